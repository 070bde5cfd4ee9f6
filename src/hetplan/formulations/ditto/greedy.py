"""Method `greedy`: Oobleck's virtual templates, their stages given to real devices (Ditto,
Algorithm 1).

From the strongest type to the weakest, each step gives ceil(virtual devices / d_i) devices to the
stage whose change leaves the least T; stages not yet given away run on their virtual devices.
Groups are rounded up to a power of two, which the paper leaves open. Rounding up wastes devices, so
that they run out before the stages do
(on most of the paper's own clusters); the paper does not say what happens then. Here a stage
without devices joins the neighbour that makes T least, every template of Oobleck's list is tried
(Section 6: "may not be the optimal one"), and the best result is taken; the message tells how many
of its stages had to join.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.folding import (
    Folding,
    NoTemplate,
    Template,
    conclude,
    fold,
    virtual_cluster,
)
from hetplan.formulations.ditto.oobleck import Division
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Stages,
    compile_problem,
    total_seconds,
)
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The recovered template of the best virtual template that can be recovered."""
    return conclude(data, run, lambda problem: recovered(data, problem, run))


def recovered(data: DittoData, problem: DittoProblem, run: Run) -> Template:
    """The best of `all_recovered`."""
    return min(
        all_recovered(data, problem, run), key=lambda template: problem.price(template.stages)
    )


def all_recovered(data: DittoData, problem: DittoProblem, run: Run) -> list[Template]:
    """Every template of the virtual cluster, given to real devices."""
    folding = fold(data)
    virtual = compile_problem(virtual_cluster(data, folding))
    division = Division(virtual, run)
    templates = []
    for _, count in division.ranked():
        template = division.template(count)
        devices = [int(virtual.option_devices[r]) for _, _, r in template]
        times = [float(virtual.time[r, a, b]) for a, b, r in template]
        assigned = assign(problem, folding, [(a, b) for a, b, _ in template], devices, times)
        stages = join_left_over(problem, assigned, times)
        joined = sum(r < 0 for _, _, r in assigned)
        message = f"{joined} of {count} virtual stages got no devices and joined a neighbour"
        details = {"virtual_stages": count, "joined": joined}
        templates.append(Template(stages, message if joined else "", details))
    if not templates:
        raise NoTemplate("the virtual cluster has no template: too few layers or micro-batches")
    return templates


def assign(
    problem: DittoProblem,
    folding: Folding,
    layers: list[tuple[int, int]],
    devices: list[int],
    times: list[float],
) -> Stages:
    """Algorithm 1: virtual stages (layers, devices, seconds) to real groups; option -1: got no
    devices."""
    times, chosen = list(times), [-1] * len(layers)
    factors = [folding.factors[kind.names[0]] for kind in problem.kinds]
    strength = [
        float(problem.weight[problem.option_kind == i].sum()) for i in range(len(problem.kinds))
    ]
    for i in sorted(range(len(problem.kinds)), key=lambda i: strength[i]):
        left = int(problem.devices[i])
        while left > 0:
            best: tuple[float, int, int] | None = None
            for j, (a, b) in enumerate(layers):
                r = option(problem, i, -(-devices[j] // factors[i]))
                if chosen[j] >= 0 or problem.option_devices[r] > left:
                    continue
                trial = [*times[:j], float(problem.time[r, a, b]), *times[j + 1 :]]
                cost = total_seconds(problem.micro_batches, trial)
                if best is None or cost < best[0]:
                    best = cost, j, r
            if best is None:
                break
            _, j, r = best
            chosen[j], times[j] = r, float(problem.time[r, layers[j][0], layers[j][1]])
            left -= int(problem.option_devices[r])
    return [(a, b, r) for (a, b), r in zip(layers, chosen, strict=True)]


def join_left_over(problem: DittoProblem, stages: Stages, virtual: list[float]) -> Stages:
    """Stages without devices (option -1, `virtual` seconds) join neighbours, cheapest first. Not
    the paper's."""

    def seconds(stage: tuple[int, int, int], waiting: float) -> float:
        a, b, r = stage
        return float(problem.time[r, a, b]) if r >= 0 else waiting

    stages, virtual = list(stages), list(virtual)
    while any(r < 0 for _, _, r in stages):
        best: tuple[float, int] | None = None
        for j, ((a, _, r), (_, b, q)) in enumerate(pairwise(stages)):
            if (r < 0) == (q < 0):
                continue
            trial = [*stages[:j], (a, b, max(r, q)), *stages[j + 2 :]]
            waiting = [*virtual[:j], 0.0, *virtual[j + 2 :]]
            times = [seconds(stage, t) for stage, t in zip(trial, waiting, strict=True)]
            cost = total_seconds(problem.micro_batches, times)
            if best is None or cost < best[0]:
                best = cost, j
        assert best is not None, "the strongest device always takes a stage"
        j = best[1]
        (a, _, r), (_, b, q) = stages[j : j + 2]
        stages[j : j + 2] = [(a, b, max(r, q))]
        virtual[j : j + 2] = [0.0]
    return stages


def option(problem: DittoProblem, kind: int, devices: int) -> int:
    """The option of a kind with the least group of at least `devices` devices."""
    fits = (problem.option_kind == kind) & (problem.option_devices >= devices)
    return int(np.flatnonzero(fits)[0])
