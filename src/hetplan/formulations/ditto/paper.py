"""Ditto itself, its stages merged exactly, and its Algorithm 1.

Methods `paper`, `paper-powers`, `paper-communication` (Sections 5.3, 6.2 and Algorithm 2): fold the
cluster, let Oobleck make the uniform virtual template of n M stages with one weakest device each,
and recover real stages by dynamic programming: a choice (i, x, x d_i), x = 1 to M, lets x devices
of type i take x d_i consecutive virtual stages; dp[j] keeps one best template of the first j
virtual stages, its cost and the devices it uses. One entry per j forgets templates that use other
devices, so the programme can miss the best merge. The text also speaks of merging "up to" x d_i
stages; the choices it lists are these, and with fewer stages per device the first stages use up
devices that the last ones lack: on the paper's clusters the programme then recovers nothing.
`paper-powers` has the choices of 1, 2, 4, ..., M devices alone.

A profile knows all-reduces on powers of two, and a template has no other groups. A group of three
devices is therefore priced with the all-reduce of four while the algorithm runs; in the end it
keeps two of its devices, which the message says.

`merge` takes the virtual stages as atoms and lets the exact search choose which consecutive ones
each real group takes; `merge-cp-sat` and `merge-milp` let general solvers choose. What separates it
from the optimum is lost by folding and template, what separates `paper` from it by the recovery
programme. Memory counts.

`greedy` is Algorithm 1 as printed: from the strongest type to the weakest, while it has devices,
the stage of Oobleck's best virtual template whose change leaves the least T gets
ceil(virtual devices / d_i) of them; stages not yet given away run on their virtual devices. Nothing
keeps the last step to what is left, and stages may go without: it then has no template.
`greedy-joined` is hetplan's repair. Groups are rounded up to powers of two and must fit, a stage
without devices joins the neighbour that makes T least, every template of Oobleck's list is tried
(Section 6: "may not be the optimal one"), and the best result is taken; the message tells how many
of its stages had to join.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import DeviceType, DittoData, DittoDecision, Memory
from hetplan.formulations.ditto.model import formulate
from hetplan.formulations.ditto.oobleck import (
    Division,
    Folding,
    NoTemplate,
    Template,
    conclude,
    fold,
    single_devices,
    virtual_cluster,
)
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Ints,
    Stages,
    compile_problem,
    total_seconds,
)
from hetplan.solvers.general import solve_with
from hetplan.solvers.run import Outcome, Run, Stop, Stopped

Atoms = list[tuple[int, int]]
# (First layer, last layer, kind, number of devices) of each stage.
Groups = list[tuple[int, int, int, int]]


def solve_by(method: str, data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The template of one of `ALGORITHMS`; proves nothing about others."""
    return conclude(data, run, lambda problem: ALGORITHMS[method](data, problem, run))


def ditto(
    data: DittoData,
    problem: DittoProblem,
    run: Run,
    *,
    communication: bool = False,
    powers: bool = False,
) -> Template:
    """Fold, divide the virtual cluster, recover; powers: with groups of 1, 2, 4, ..., M devices
    alone."""
    folding = fold(data, communication=communication)
    atoms = virtual_stages(data, folding, run)
    return settled(
        problem,
        recover(problem, folding, atoms, powers=powers),
        {"virtual_stages": len(atoms), "factors": dict(folding.factors)},
    )


def settled(problem: DittoProblem, groups: Groups, details: Mapping[str, object]) -> Template:
    """The template of an algorithm's groups, each of which keeps the largest power of two of its
    devices."""
    odd = [(k, x) for k, (*_, x) in enumerate(groups) if x & (x - 1)]
    stages = [(a, b, option(problem, i, x)) for a, b, i, x in groups]
    message = ", ".join(f"stage {k} keeps {1 << x.bit_length() - 1} of {x} devices" for k, x in odd)
    return Template(stages, f"only powers of two: {message}" if odd else "", details)


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
    groups: Groups
    times: list[float]  # of the groups


def recover(problem: DittoProblem, folding: Folding, atoms: Atoms, *, powers: bool) -> Groups:
    """Algorithm 2; raises NoTemplate where it ends without one."""
    choices = [
        (i, x, x * folding.factors[kind.names[0]])
        for i, kind in enumerate(problem.kinds)
        for x in range(1, folding.weakest.devices_per_node + 1)
        if not powers or not x & (x - 1)
    ]
    none = np.zeros(len(problem.kinds), dtype=np.int64)
    table: list[Recovered | None] = [Recovered(0.0, none, [], [])]
    for j in range(1, len(atoms) + 1):
        best: Recovered | None = None
        for i, x, width in choices:
            before = table[j - width] if width <= j else None
            if before is None:
                continue
            used = before.used.copy()
            used[i] += x
            if (used > problem.devices).any():
                continue
            first, last = atoms[j - width][0], atoms[j - 1][1]
            times = [*before.times, seconds_on(problem, i, x, first, last)]
            cost = total_seconds(problem.micro_batches, times)
            if best is None or cost < best.cost:
                best = Recovered(cost, used, [*before.groups, (first, last, i, x)], times)
        table.append(best)
    if table[-1] is None:
        raise NoTemplate("Algorithm 2 recovers no template within the devices")
    return table[-1].groups


def merge(data: DittoData, problem: DittoProblem, run: Run, solver: str) -> Template:
    """The instance whose layers are the virtual stages, by the exact search or a general solver."""
    atoms = virtual_stages(data, fold(data), run)
    posed = merged(data, atoms)
    answer = solve_with(solver, formulate, posed, run) if solver else exact.solve(posed, run)
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


def printed_greedy(data: DittoData, problem: DittoProblem, run: Run) -> Template:
    """Algorithm 1 as printed, on Oobleck's best virtual template. Raises NoTemplate where stages or
    devices are left over."""
    folding, division, ranked = divided(data, run)
    groups, _ = assign(problem, folding, division, ranked[0][1], powers=False)
    bare = sum(not x for *_, x in groups)
    if bare:
        raise NoTemplate(f"Algorithm 1 leaves {bare} of {len(groups)} stages without devices")
    for i, kind in enumerate(problem.kinds):
        used = sum(x for *_, own, x in groups if own == i)
        if used > kind.devices:
            names = ", ".join(kind.names)
            raise NoTemplate(f"Algorithm 1 gives out {used} of {kind.devices} devices of {names}")
    return settled(problem, groups, {"virtual_stages": len(groups)})


def recovered(data: DittoData, problem: DittoProblem, run: Run) -> Template:
    """The best recovered template of all virtual templates."""
    return min(
        all_recovered(data, problem, run), key=lambda template: problem.price(template.stages)
    )


def all_recovered(data: DittoData, problem: DittoProblem, run: Run) -> list[Template]:
    """Every template of the virtual cluster, given to real devices."""
    folding, division, ranked = divided(data, run)
    templates = []
    for _, count in ranked:
        groups, times = assign(problem, folding, division, count, powers=True)
        assigned = [(a, b, option(problem, i, x) if x else -1) for a, b, i, x in groups]
        stages = join_left_over(problem, assigned, times)
        joined = sum(r < 0 for _, _, r in assigned)
        message = f"{joined} of {count} virtual stages got no devices and joined a neighbour"
        templates.append(
            Template(stages, message if joined else "", {"virtual_stages": count, "joined": joined})
        )
    return templates


def divided(data: DittoData, run: Run) -> tuple[Folding, Division, list[tuple[float, int]]]:
    """The folding, Oobleck's table of the virtual cluster, and (T, S) of its templates, best first.

    Raises NoTemplate where there is none.
    """
    folding = fold(data)
    division = Division(compile_problem(virtual_cluster(data, folding)), run)
    ranked = division.ranked()
    if not ranked:
        raise NoTemplate("the virtual cluster has no template: too few layers or micro-batches")
    return folding, division, ranked


def assign(
    problem: DittoProblem, folding: Folding, division: Division, count: int, *, powers: bool
) -> tuple[Groups, list[float]]:
    """Algorithm 1 on the virtual template of `count` stages: its groups, those without devices as
    (first, last, 0, 0), and the seconds of its virtual stages.

    powers: groups are rounded up to powers of two and must fit into what is left.
    """
    virtual, template = division.problem, division.template(count)
    times = [float(virtual.time[r, a, b]) for a, b, r in template]
    now, groups = list(times), [(a, b, 0, 0) for a, b, _ in template]
    factors = [folding.factors[kind.names[0]] for kind in problem.kinds]
    strength = [
        float(problem.weight[problem.option_kind == i].sum()) for i in range(len(problem.kinds))
    ]
    for i in sorted(range(len(problem.kinds)), key=lambda i: strength[i]):
        left = int(problem.devices[i])
        while left > 0:
            best: tuple[float, int, int, float] | None = None
            for j, (a, b, r) in enumerate(template):
                x = -(-int(virtual.option_devices[r]) // factors[i])
                x = 1 << (x - 1).bit_length() if powers else x
                if groups[j][3] or (powers and x > left):
                    continue
                seconds = seconds_on(problem, i, x, a, b)
                cost = total_seconds(problem.micro_batches, [*now[:j], seconds, *now[j + 1 :]])
                if best is None or cost < best[0]:
                    best = cost, j, x, seconds
            if best is None:
                break
            _, j, x, now[j] = best
            groups[j] = (*template[j][:2], i, x)
            left -= x
    return groups, times


def join_left_over(problem: DittoProblem, stages: Stages, virtual: list[float]) -> Stages:
    """Stages without devices (option -1, `virtual` seconds) join neighbours, cheapest first. Not
    the paper's."""

    def stage_seconds(stage: tuple[int, int, int], waiting: float) -> float:
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
            times = [stage_seconds(stage, t) for stage, t in zip(trial, waiting, strict=True)]
            cost = total_seconds(problem.micro_batches, times)
            if best is None or cost < best[0]:
                best = cost, j
        assert best is not None, "the strongest device always takes a stage"
        j = best[1]
        (a, _, r), (_, b, q) = stages[j : j + 2]
        stages[j : j + 2] = [(a, b, max(r, q))]
        virtual[j : j + 2] = [0.0]
    return stages


def seconds_on(problem: DittoProblem, kind: int, devices: int, first: int, last: int) -> float:
    """Seconds of layers [first, last) on any number of devices of a type, with the all-reduces of
    the next power of two."""
    size = 1 << (devices - 1).bit_length()
    one, group = option(problem, kind, 1), option(problem, kind, size)
    compute, wide = float(problem.time[one, first, last]), float(problem.time[group, first, last])
    return wide if devices == size else wide + compute / devices - compute / size


def option(problem: DittoProblem, kind: int, devices: int) -> int:
    """The option of a kind with the largest group of at most `devices` devices."""
    fits = (problem.option_kind == kind) & (problem.option_devices <= devices)
    return int(np.flatnonzero(fits)[-1])


# By the names of their methods. `merge` is `exact` where no general solver is named.
ALGORITHMS: dict[str, Callable[[DittoData, DittoProblem, Run], Template]] = {
    "paper": ditto,
    "paper-powers": partial(ditto, powers=True),
    "paper-communication": partial(ditto, communication=True),
    "merge": partial(merge, solver=""),
    "merge-cp-sat": partial(merge, solver="cp-sat"),
    "merge-milp": partial(merge, solver="milp"),
    "greedy": printed_greedy,
    "greedy-joined": recovered,
}
