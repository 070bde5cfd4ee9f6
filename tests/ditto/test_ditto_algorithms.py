"""Ditto's folding and its Algorithms 1 and 2 as the paper prints them, written again in plain
Python on the file's data: what methods `paper`, `greedy` and `merge` have to return. Oobleck's
virtual templates are what the algorithms start from; `test_ditto_heuristics` has those."""

from __future__ import annotations

import math
from random import Random

import pytest

from ditto.ditto_oracle import solve as oracle, total
from hetplan.formulations.ditto.data import DeviceType, DittoData, DittoDecision
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.oobleck import (
    BYTES_PER_STATE,
    Division,
    fold,
    single_devices,
    virtual_cluster,
)
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Result, Run

Groups = list[tuple[int, int, str, int]]  # first layer, last layer, type, devices


def instance(seed: int, size: int, layers: int = 0) -> DittoData:
    """Two or three types, one node of `size` devices each but for the weakest, of whole speeds."""
    draw = Random(seed)
    speeds = draw.choice([(1, 2), (1, 2), (1, 3), (1, 2, 3)] if size < 4 else [(1, 2), (1, 3)])
    nodes = [draw.randint(1, 2), *(1 for _ in speeds[1:])]
    least = sum(n * v for n, v in zip(nodes, speeds, strict=True)) * size
    work = [draw.uniform(0.5, 1.5) for _ in range(layers or least + draw.randint(0, 2))]
    kinds = [
        DeviceType(
            name=f"t{v}",
            nodes=n,
            devices_per_node=size,
            forward_seconds=[w / v * draw.uniform(0.3, 0.4) for w in work],
            backward_seconds=[w / v * draw.uniform(0.6, 0.7) for w in work],
            allreduce_seconds={
                str(x): [draw.uniform(0.0, 0.03) * x for _ in work] for x in (2, 4) if x <= size
            },
        )
        for n, v in zip(nodes, speeds, strict=True)
    ]
    return DittoData(micro_batches=draw.choice((16, 64)), device_types=kinds)


def strength(kind: DeviceType) -> float:
    """The model's seconds on one device; the weakest type has most."""
    return sum(kind.forward_seconds) + sum(kind.backward_seconds)


def factors_of(data: DittoData) -> dict[str, int]:
    """d_i of Section 5.3.1."""
    weakest = max(map(strength, data.device_types))
    return {kind.name: round(weakest / strength(kind)) for kind in data.device_types}


def seconds(kind: DeviceType, first: int, last: int, x: int) -> float:
    """Of a stage; three devices reduce as slowly as four."""
    layers = range(first, last)
    compute = sum(kind.forward_seconds[l] + kind.backward_seconds[l] for l in layers) / x
    if x == 1:
        return compute
    return compute + 2 * sum(kind.allreduce_seconds[str({3: 4}.get(x, x))][l] for l in layers)


def algorithm_2(data: DittoData, atoms: list[tuple[int, int]], sizes: list[int]) -> Groups | None:
    """The table dp over virtual stages, choices (i, x, x d_i) for x of `sizes`."""
    kinds, d = {kind.name: kind for kind in data.device_types}, factors_of(data)
    choices = [(name, x, x * d[name]) for name in kinds for x in sizes]
    dp: list[tuple[dict[str, int], float, Groups] | None] = [(dict.fromkeys(kinds, 0), 0.0, [])]
    for i in range(1, len(atoms) + 1):
        dp.append(None)
        for name, x, y in choices:
            before = dp[i - y] if y <= i else None
            if before is None:
                continue
            assigned = before[0] | {name: before[0][name] + x}
            if assigned[name] > kinds[name].nodes * data.devices_per_node:
                continue
            t = [*before[2], (atoms[i - y][0], atoms[i - 1][1], name, x)]
            cost = total(data.micro_batches, [seconds(kinds[n], a, b, x) for a, b, n, x in t])
            now = dp[i]
            if now is None or cost < now[1]:
                dp[i] = assigned, cost, t
    last = dp[len(atoms)]
    return None if last is None else last[2]


def virtual_template(data: DittoData) -> list[tuple[int, int]]:
    """The n M stages of one weakest device each."""
    folding = fold(data)
    assert dict(folding.factors) == factors_of(data)
    division = Division(compile_problem(single_devices(data, folding)), Run())
    return [(a, b) for a, b, _ in division.template(folding.devices)]


def stages_of(result: Result[object]) -> Groups | None:
    """The decision as groups."""
    if result.decision is None:
        return None
    assert isinstance(result.decision, DittoDecision)
    return [(s.first, s.last, s.type, s.devices) for s in result.decision.stages]


def kept(groups: Groups | None) -> Groups | None:
    """Groups of powers of two: of three devices two are kept."""
    return groups and [(a, b, name, 2 if x == 3 else x) for a, b, name, x in groups]


CASES = [(seed, size) for size in (1, 2) for seed in range(14)] + [(seed, 4) for seed in range(8)]


@pytest.mark.parametrize(("seed", "size"), CASES)
def test_the_paper_is_algorithm_2(seed: int, size: int) -> None:
    data = instance(seed, size)
    atoms, every = virtual_template(data), list(range(1, size + 1))
    printed = algorithm_2(data, atoms, every)
    result = solve(FAMILY, data, "paper")
    assert stages_of(result) == kept(printed)
    assert ("keeps 2 of 3 devices" in result.message) == (kept(printed) != printed)
    powers = [x for x in every if x != 3]
    assert stages_of(solve(FAMILY, data, "paper-powers")) == algorithm_2(data, atoms, powers)


def whole_seconds(data: DittoData) -> DittoData:
    """The instance with layers of equal whole seconds and free all-reduces, so that costs tie."""
    layers = len(data.device_types[0].forward_seconds)
    kinds = []
    for kind in data.device_types:
        speed = int(kind.name.removeprefix("t"))
        seconds = {
            "forward_seconds": [6.0 / speed] * layers,
            "backward_seconds": [12.0 / speed] * layers,
            "allreduce_seconds": {x: [0.0] * layers for x in kind.allreduce_seconds},
        }
        kinds.append(kind.model_copy(update=seconds))
    return data.model_copy(update={"device_types": kinds})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_equal_costs_algorithm_2_keeps_the_first(size: int) -> None:
    """It takes a choice where its cost "is better": a tie changes nothing."""
    for seed in range(20):
        data = whole_seconds(instance(seed, size))
        printed = algorithm_2(data, virtual_template(data), list(range(1, size + 1)))
        assert stages_of(solve(FAMILY, data, "paper")) == kept(printed)


def test_the_cases_of_algorithm_2_reach_what_they_should() -> None:
    """Templates, none, and groups of three devices."""
    found = [
        algorithm_2(data, virtual_template(data), list(range(1, size + 1)))
        for seed, size in CASES
        for data in [instance(seed, size)]
    ]
    assert sum(groups is not None for groups in found) >= 20
    assert any(kept(groups) != groups for groups in found)


def algorithm_1(
    data: DittoData, template: list[tuple[int, int, int]], times: list[float]
) -> Groups | None:
    """Strongest type first; each step gives ceil(virtual devices / d_i) devices to the stage that
    leaves the least T. None where stages go without devices, or devices run out."""
    d, given = factors_of(data), dict[int, tuple[int, int, str, int]]()
    now = list(times)
    for kind in sorted(data.device_types, key=strength):
        used, most = 0, kind.nodes * data.devices_per_node
        while used < most and len(given) < len(template):
            trials = []
            for j, (a, b, virtual) in enumerate(template):
                if j not in given:
                    x = math.ceil(virtual / d[kind.name])
                    after = [*now[:j], seconds(kind, a, b, x), *now[j + 1 :]]
                    trials.append((total(data.micro_batches, after), j, x))
            _, j, x = min(trials)
            a, b, _ = template[j]
            given[j], now[j] = (a, b, kind.name, x), seconds(kind, a, b, x)
            used += x
        if used > most:
            return None
    return [given[j] for j in range(len(template))] if len(given) == len(template) else None


def test_the_limit_of_states_counts_their_bytes() -> None:
    data = instance(0, 2, layers=9)
    division = Division(compile_problem(virtual_cluster(data, fold(data))), Run())
    tables = division.seconds.nbytes + division.left_part.nbytes
    assert tables == division.states * BYTES_PER_STATE


@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_greedy_is_algorithm_1(size: int, seed: int) -> None:
    data = instance(seed, size, layers=9)
    virtual = compile_problem(virtual_cluster(data, fold(data)))
    division = Division(virtual, Run())
    stages = division.template(division.ranked()[0][1])
    template = [(a, b, int(virtual.option_devices[r])) for a, b, r in stages]
    times = [float(virtual.time[r, a, b]) for a, b, r in stages]
    result = solve(FAMILY, data, "greedy")
    assert stages_of(result) == kept(algorithm_1(data, template, times))
    assert (result.decision is None) == result.message.startswith("Algorithm 1")


def test_algorithm_1_by_hand() -> None:
    """Three layers of 4, 8 and 4 s on type a, 2, 3 and 2.5 s on b, one node of two devices each. b
    counts as two (16 / 7.5), so that there are three virtual nodes and stages of 2, 4 and 2 s. With
    8 micro-batches b's first device leaves T = 8 + 5 x 4 + 6, 7 + 5 x 3 + 5 or 8.5 + 5 x 4 + 6.5 s
    and takes stage 1; the second leaves 27 s on stage 0 and 28 s on stage 2; a takes the rest."""
    kinds = [
        {
            "name": name, "nodes": 1, "devices_per_node": 2, "allreduce_seconds": {"2": [0.0] * 3},
            "forward_seconds": [t / 2 for t in row], "backward_seconds": [t / 2 for t in row],
        }
        for name, row in (("a", [4.0, 8.0, 4.0]), ("b", [2.0, 3.0, 2.5]))
    ]  # fmt: skip
    data = DittoData.model_validate({"micro_batches": 8, "device_types": kinds})
    result = solve(FAMILY, data, "greedy")
    assert stages_of(result) == [(0, 1, "b", 1), (1, 2, "b", 1), (2, 3, "a", 2)]
    assert result.objective == pytest.approx(27.0)


def on_atoms(data: DittoData, atoms: list[tuple[int, int]]) -> DittoData:
    """The virtual stages as layers."""

    def summed(row: list[float]) -> list[float]:
        return [sum(row[first:last]) for first, last in atoms]

    kinds = [
        kind.model_copy(
            update={
                "forward_seconds": summed(kind.forward_seconds),
                "backward_seconds": summed(kind.backward_seconds),
                "allreduce_seconds": {x: summed(r) for x, r in kind.allreduce_seconds.items()},
            }
        )
        for kind in data.device_types
    ]
    return data.model_copy(update={"device_types": kinds})


SMALL = [*((seed, 1) for seed in range(6)), (1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize(("seed", "size"), SMALL)
@pytest.mark.parametrize("method", ["merge", "merge-cp-sat", "merge-milp"])
def test_merge_is_the_best_of_all_merges(seed: int, size: int, method: str) -> None:
    """Enumerated over the virtual stages."""
    data = instance(seed, size)
    best = oracle(on_atoms(data, virtual_template(data)))
    assert best is not None
    result = solve(FAMILY, data, method, Run(Options(threads=1)))
    assert result.objective == pytest.approx(best.objective, rel=1e-6)
    assert (result.bound, str(result.stop)) == (None, "done")
