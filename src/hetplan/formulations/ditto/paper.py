"""Methods `paper`, `paper-communication`, `merge` and `greedy`: Ditto itself, its stages merged
exactly, and its Algorithm 1.

Ditto (Sections 5.3, 6.2 and Algorithm 2) folds the cluster, lets Oobleck make the uniform virtual
template of n M stages with one weakest device each, and recovers real stages by dynamic
programming: a choice (i, x, x d_i) lets x devices of type i take x d_i consecutive virtual stages;
dp[j] keeps one best template of the first j virtual stages, its cost and the devices it uses. One
entry per j forgets templates that use other devices, so the programme can miss the best merge. The
text also speaks of merging "up to" x d_i stages; the choices it lists are these, and with fewer
stages per device the first stages use up devices that the last ones lack: on the paper's clusters
the programme then recovers nothing.

`merge` takes the virtual stages as atoms and lets the exact search choose which consecutive ones
each real group takes. What separates it from the optimum is lost by folding and template, what
separates `paper` from it by the recovery programme. Memory counts.

`greedy` takes Oobleck's virtual templates and gives their stages to real devices (Algorithm 1).
From the strongest type to the weakest, each step gives ceil(virtual devices / d_i) devices to the
stage whose change leaves the least T; stages not yet given away run on their virtual devices.
Groups are rounded up to a power of two, which the paper leaves open. Rounding up wastes devices, so
that they run out before the stages do (on most of the paper's own clusters); the paper does not say
what happens then. Here a stage without devices joins the neighbour that makes T least, every
template of Oobleck's list is tried (Section 6: "may not be the optimal one"), and the best result
is taken; the message tells how many of its stages had to join.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import DeviceType, DittoData, DittoDecision, Memory
from hetplan.formulations.ditto.folding import (
    Folding,
    NoTemplate,
    Template,
    conclude,
    fold,
    single_devices,
    virtual_cluster,
)
from hetplan.formulations.ditto.oobleck import Division
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Ints,
    Stages,
    compile_problem,
    total_seconds,
)
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

Atoms = list[tuple[int, int]]


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """Ditto, folding without communication (as in its evaluation)."""
    return conclude(data, run, lambda problem: ditto(data, problem, run, communication=False))


def solve_with_communication(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """Ditto, folding with the in-node communication of Section 5.3.2."""
    return conclude(data, run, lambda problem: ditto(data, problem, run, communication=True))


def solve_by_merging(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The best template that cuts only between virtual stages; proves nothing about others."""
    return conclude(data, run, lambda problem: merge(data, problem, run))


def ditto(data: DittoData, problem: DittoProblem, run: Run, *, communication: bool) -> Template:
    """Fold, divide the virtual cluster, recover."""
    folding = fold(data, communication=communication)
    atoms = virtual_stages(data, folding, run)
    stages = recover(problem, folding, atoms)
    details = {"virtual_stages": len(atoms), "factors": dict(folding.factors)}
    return Template(stages, details=details)


def virtual_stages(data: DittoData, folding: Folding, run: Run) -> Atoms:
    """The uniform virtual template of n M stages on one weakest device each, as layer ranges.

    Raises NoTemplate where there are fewer layers than that (Section 6.3).
    """
    needed = folding.devices
    if data.layers < needed:
        count = f"{data.layers} layers, {needed} virtual devices"
        raise NoTemplate(f"Ditto needs as many layers as virtual devices: {count}")
    division = Division(compile_problem(single_devices(data, folding)), run)
    return [(a, b) for a, b, _ in division.template(needed)]


@dataclass(frozen=True)
class Recovered:
    """dp[j]: the one template kept of the first j virtual stages."""

    cost: float
    used: Ints  # [K] devices
    stages: Stages
    times: list[float]  # of the stages


def recover(problem: DittoProblem, folding: Folding, atoms: Atoms) -> Stages:
    """Algorithm 2; raises NoTemplate where it ends without one."""
    names = [problem.kinds[kind].names[0] for kind in problem.option_kind]
    widths = [x * folding.factors[n] for x, n in zip(problem.option_devices, names, strict=True)]
    none = np.zeros(len(problem.kinds), dtype=np.int64)
    table: list[Recovered | None] = [Recovered(0.0, none, [], [])]
    for j in range(1, len(atoms) + 1):
        best: Recovered | None = None
        for r, width in enumerate(widths):
            before = table[j - width] if width <= j else None
            if before is None:
                continue
            used = before.used.copy()
            used[problem.option_kind[r]] += problem.option_devices[r]
            if (used > problem.devices).any():
                continue
            first, last = atoms[j - width][0], atoms[j - 1][1]
            times = [*before.times, float(problem.time[r, first, last])]
            cost = total_seconds(problem.micro_batches, times)
            if best is None or cost < best.cost:
                best = Recovered(cost, used, [*before.stages, (first, last, r)], times)
        table.append(best)
    if table[-1] is None:
        raise NoTemplate("Algorithm 2 recovers no template within the devices")
    return table[-1].stages


def merge(data: DittoData, problem: DittoProblem, run: Run) -> Template:
    """The exact search over the instance whose layers are the virtual stages."""
    atoms = virtual_stages(data, fold(data), run)
    answer = exact.solve(merged(data, atoms), run)
    if answer.decision is None and answer.stop is not Stop.INFEASIBLE:
        raise Stopped
    if answer.decision is None:
        raise NoTemplate("no merge of virtual stages is feasible")
    options = {
        (name, int(problem.option_devices[r])): r
        for r, kind in enumerate(problem.option_kind)
        for name in problem.kinds[kind].names
    }
    stages = [
        (atoms[stage.first][0], atoms[stage.last - 1][1], options[stage.type, stage.devices])
        for stage in answer.decision.stages
    ]
    details = {**answer.details, "virtual_stages": len(atoms), "best_merge": answer.bound}
    stop = Stop.DONE if answer.stop is Stop.OPTIMAL else answer.stop
    return Template(stages, details=details, stop=stop)


def merged(data: DittoData, atoms: Atoms) -> DittoData:
    """The instance whose layers are the atoms: all per-layer rows summed over each."""

    def summed(row: list[float]) -> list[float]:
        return [math.fsum(row[a:b]) for a, b in atoms]

    kinds = [
        DeviceType(
            name=kind.name,
            nodes=kind.nodes,
            devices_per_node=kind.devices_per_node,
            forward_seconds=summed(kind.forward_seconds),
            backward_seconds=summed(kind.backward_seconds),
            allreduce_seconds={x: summed(row) for x, row in kind.allreduce_seconds.items()},
        )
        for kind in data.device_types
    ]
    memory = data.memory
    if memory is not None:
        memory = Memory(
            device_bytes=memory.device_bytes,
            layer_state_bytes=summed(memory.layer_state_bytes),
            layer_activation_bytes=summed(memory.layer_activation_bytes),
        )
    return DittoData(micro_batches=data.micro_batches, device_types=kinds, memory=memory)


def greedy(data: DittoData, run: Run) -> Outcome[DittoDecision]:
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
