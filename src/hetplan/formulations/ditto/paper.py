"""Ditto's methods: Algorithm 2, an exact merge of its virtual stages, and Algorithm 1.

`paper`, `paper-powers` and `paper-communication` (Sections 5.3, 6.2 and Algorithm 2) fold the
cluster (`oobleck`). Oobleck's divide and conquer makes the uniform virtual template of n M stages
with one weakest device each, and dynamic programming recovers real stages from these virtual
stages. A choice (i, x, x d_i), x = 1 to M, lets x devices of type i take x d_i consecutive virtual
stages. dp[j] keeps one best template of the first j virtual stages, its cost and its devices. One
template per j loses others that use other devices, so that the programme can miss the best merge.
`paper-powers` has only the choices with 1, 2, 4, ..., M devices.

The paper's text also speaks of merging "up to" x d_i stages, but the choices that it lists are
those above. With fewer stages per device the first stages use up devices that the last ones lack,
and on the paper's clusters the programme then recovers nothing.

A profile has all-reduces on powers of two, and a template has no other groups. While the algorithm
runs, a group of three devices is therefore priced with the all-reduce of four. In the end it keeps
two of its devices, which the message says.

`merge` lets the exact search choose which consecutive virtual stages each real group takes, with
memory as a constraint. `merge-cp-sat` and `merge-milp` let general solvers choose. Folding and the
virtual template lose the difference between `merge` and the optimum. The recovery programme loses
the difference between `paper` and `merge`.

`greedy` is Algorithm 1 as printed. It gives out the devices of each type, the strongest type first.
While the type has devices, some stage of Oobleck's best virtual template gets
ceil(virtual devices / d_i) of them: the stage for which T is then least. The other stages count
with the time on their virtual devices. The last stage of a type may get more devices than are left,
and stages may get none: the method then has no template.

`greedy-joined` is hetplan's repair. Groups are rounded up to powers of two and must fit into the
devices that are left. A stage without devices joins the neighbour with which T is least. Every
template of Oobleck's list is tried (Section 6: "may not be the optimal one"), and the best result
is taken. The message says how many of its stages had to join.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from hetplan.formulations.ditto import exact
from hetplan.formulations.ditto.data import (
    DeviceType,
    DittoData,
    DittoDecision,
    Memory,
    group_sizes,
)
from hetplan.formulations.ditto.model import formulate
from hetplan.formulations.ditto.oobleck import (
    Division,
    Folding,
    NoTemplate,
    Template,
    conclude,
    fold,
    next_power_of_two,
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

# Layers [a, b) of each virtual stage.
Atoms = list[tuple[int, int]]
# (first layer, layer behind the last one, kind, number of devices) of each stage. The number is 0
# for a stage that has got no devices.
Groups = list[tuple[int, int, int, int]]
# In place of the option of a stage without devices.
NO_DEVICES = -1


def solve_by(method: str, data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The outcome of one of `ALGORITHMS`, which prove no bound."""
    return conclude(data, run, lambda problem: ALGORITHMS[method](data, problem, run))


def ditto(
    data: DittoData,
    problem: DittoProblem,
    run: Run,
    *,
    communication: bool = False,
    powers: bool = False,
) -> Template:
    """The template of Algorithm 2.

    communication: whether folding counts the all-reduces inside a node. powers: whether groups have
    only 1, 2, 4, ..., M devices.
    """
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
    stages = [(a, b, option(problem, i, x)) for a, b, i, x in groups]
    reduced = []
    for k, (_, _, _, x) in enumerate(groups):
        kept = 1 << (x.bit_length() - 1)
        if kept < x:
            reduced.append(f"stage {k} keeps {kept} of {x} devices")
    message = f"only powers of two: {', '.join(reduced)}" if reduced else ""
    return Template(stages, message, details)


def virtual_stages(data: DittoData, folding: Folding, run: Run) -> Atoms:
    """The layers of each virtual stage, of which n M have one weakest device each.

    Raises NoTemplate where there are fewer than n M layers (Section 6.3).
    """
    needed = folding.devices
    if data.layers < needed:
        count = f"{data.layers} layers, {needed} virtual devices"
        raise NoTemplate(f"Ditto needs as many layers as virtual devices: {count}")
    division = Division(compile_problem(single_devices(data, folding)), run)
    return [(a, b) for a, b, _ in division.template(needed)]


@dataclass(frozen=True)
class Recovered:
    """dp[j]: the template that is kept of the first j virtual stages."""

    cost: float  # seconds, T
    used: Ints  # [K] devices of each kind
    groups: Groups
    times: list[float]  # seconds of each group per micro-batch


def recover(problem: DittoProblem, folding: Folding, atoms: Atoms, *, powers: bool) -> Groups:
    """The groups that Algorithm 2 recovers from the virtual stages; raises NoTemplate where it ends
    without any. powers: see `ditto`."""
    sizes: Sequence[int] = range(1, folding.weakest.devices_per_node + 1)
    if powers:
        sizes = group_sizes(folding.weakest.devices_per_node)
    # (kind i, devices x, virtual stages x d_i); all types of a kind have equal times, so that any
    # one of them has the kind's factor
    choices = [
        (i, x, x * folding.factors[kind.names[0]])
        for i, kind in enumerate(problem.kinds)
        for x in sizes
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
    """The best template whose stages are whole virtual stages. solver: the method of the general
    solver that finds it; empty: the exact search finds it."""
    atoms = virtual_stages(data, fold(data), run)
    instance = merged(data, atoms)
    answer = solve_with(solver, formulate, instance, run) if solver else exact.solve(instance, run)
    if answer.decision is None and answer.stop is not Stop.INFEASIBLE:
        raise Stopped
    if answer.decision is None:
        raise NoTemplate("no merge of virtual stages is feasible")
    options = {  # (device type, number of devices) -> option
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
    """The instance whose layers are the atoms."""

    def summed(row: list[float]) -> list[float]:
        """[atoms] the sums of a row [L] over the layers of each atom."""
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
    """The template of Algorithm 1 as printed, on Oobleck's best virtual template.

    Raises NoTemplate where a stage gets no devices, or a kind gives out more than it has.
    """
    folding, division, ranked = divided(data, run)
    _, count = ranked[0]
    groups, _ = assign(problem, folding, division, count, powers=False)
    without_devices = sum(not x for *_, x in groups)
    if without_devices:
        raise NoTemplate(
            f"Algorithm 1 leaves {without_devices} of {len(groups)} stages without devices"
        )
    for i, kind in enumerate(problem.kinds):
        used = sum(x for _, _, group_kind, x in groups if group_kind == i)
        if used > kind.devices:
            names = ", ".join(kind.names)
            raise NoTemplate(f"Algorithm 1 gives out {used} of {kind.devices} devices of {names}")
    return settled(problem, groups, {"virtual_stages": len(groups)})


def recovered(data: DittoData, problem: DittoProblem, run: Run) -> Template:
    """The template of least T of `all_recovered`."""
    return min(
        all_recovered(data, problem, run), key=lambda template: problem.price(template.stages)
    )


def all_recovered(data: DittoData, problem: DittoProblem, run: Run) -> list[Template]:
    """The templates of `greedy-joined`: one for each template of the virtual cluster."""
    folding, division, ranked = divided(data, run)
    templates = []
    for _, count in ranked:
        groups, virtual_seconds = assign(problem, folding, division, count, powers=True)
        assigned = [(a, b, option(problem, i, x) if x else NO_DEVICES) for a, b, i, x in groups]
        stages = join_left_over(problem, assigned, virtual_seconds)
        joined = sum(r == NO_DEVICES for _, _, r in assigned)
        message = ""
        if joined:
            message = f"{joined} of {count} virtual stages got no devices and joined a neighbour"
        templates.append(Template(stages, message, {"virtual_stages": count, "joined": joined}))
    return templates


def divided(data: DittoData, run: Run) -> tuple[Folding, Division, list[tuple[float, int]]]:
    """(The folding, Oobleck's table of the virtual cluster, (T, S) of its templates, best first).

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
    """(The groups of Algorithm 1 on the virtual template of `count` stages, the seconds of its
    virtual stages). A group without devices is (first, last, 0, 0).

    powers: whether groups are rounded up to powers of two and must fit into the devices left.
    """
    virtual = division.problem
    template = division.template(count)
    virtual_seconds = [float(virtual.time[r, a, b]) for a, b, r in template]
    times = list(virtual_seconds)  # of the stages as they are given out so far
    groups = [(a, b, 0, 0) for a, b, _ in template]
    kinds = range(len(problem.kinds))
    # the types of a kind have equal times, and so the same factor
    factors = [folding.factors[kind.names[0]] for kind in problem.kinds]
    # seconds of all layers over all group sizes, which are the same for every kind
    slowness = [float(problem.weight[problem.option_kind == i].sum()) for i in kinds]
    for i in sorted(kinds, key=lambda i: slowness[i]):
        left = int(problem.devices[i])
        while left > 0:
            best: tuple[float, int, int, float] | None = None  # cost, stage, devices, seconds
            for j, (a, b, r) in enumerate(template):
                x = -(-int(virtual.option_devices[r]) // factors[i])
                if powers:
                    x = next_power_of_two(x)
                has_devices = groups[j][3] > 0
                if has_devices or (powers and x > left):
                    continue
                seconds = seconds_on(problem, i, x, a, b)
                cost = total_seconds(problem.micro_batches, [*times[:j], seconds, *times[j + 1 :]])
                if best is None or cost < best[0]:
                    best = cost, j, x, seconds
            if best is None:
                break
            _, j, x, times[j] = best
            a, b, _ = template[j]
            groups[j] = (a, b, i, x)
            left -= x
    return groups, virtual_seconds


def join_left_over(problem: DittoProblem, stages: Stages, virtual: list[float]) -> Stages:
    """The stages after each one without devices has joined a neighbour with devices.

    The join that leaves the least T comes first. The paper has no such step. stages: option
    NO_DEVICES for stages without devices. virtual: seconds of each stage on its virtual devices,
    with which a stage counts until it has joined.
    """

    def stage_seconds(stage: tuple[int, int, int], on_virtual_devices: float) -> float:
        a, b, r = stage
        return on_virtual_devices if r == NO_DEVICES else float(problem.time[r, a, b])

    def joined(j: int) -> tuple[Stages, list[float]]:
        """(stages, virtual) after stages j and j + 1 have joined, on the devices of one of them."""
        (a, _, r), (_, b, q) = stages[j], stages[j + 1]
        joined_stage = (a, b, q if r == NO_DEVICES else r)
        return (
            [*stages[:j], joined_stage, *stages[j + 2 :]],
            [*virtual[:j], 0.0, *virtual[j + 2 :]],  # the joined stage has devices: 0 is not read
        )

    while any(r == NO_DEVICES for _, _, r in stages):
        best: tuple[float, int] | None = None  # T, the first of the two stages
        for j, ((_, _, r), (_, _, q)) in enumerate(pairwise(stages)):
            both_or_neither_have_devices = (r == NO_DEVICES) == (q == NO_DEVICES)
            if both_or_neither_have_devices:
                continue
            trial, on_virtual = joined(j)
            times = [stage_seconds(stage, t) for stage, t in zip(trial, on_virtual, strict=True)]
            cost = total_seconds(problem.micro_batches, times)
            if best is None or cost < best[0]:
                best = cost, j
        assert best is not None, "the strongest device always takes a stage"
        _, j = best
        stages, virtual = joined(j)
    return stages


def seconds_on(problem: DittoProblem, kind: int, devices: int, first: int, last: int) -> float:
    """Seconds of layers [first, last) on any number of devices of a kind, with the all-reduces of
    the next power of two."""
    size = next_power_of_two(devices)
    on_one = float(problem.time[option(problem, kind, 1), first, last])  # computation alone
    on_size = float(problem.time[option(problem, kind, size), first, last])
    if devices == size:
        return on_size
    return on_size + on_one / devices - on_one / size


def option(problem: DittoProblem, kind: int, devices: int) -> int:
    """The option of a kind with the largest group of at most `devices` devices."""
    fits = (problem.option_kind == kind) & (problem.option_devices <= devices)
    return int(np.flatnonzero(fits)[-1])


# The algorithms by the names of their methods. `merge` is `exact` where no general solver is named.
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
