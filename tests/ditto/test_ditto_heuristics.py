"""Ditto's own algorithms: against their definitions, against published answers, and where they fall
short."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from ditto.ditto_cases import data_of, middle_instance
from ditto.ditto_oracle import solve as oracle
from hetplan.formulations.ditto import oobleck
from hetplan.formulations.ditto.data import DeviceType, DittoData
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.oobleck import Division, NoTemplate, fold, virtual_seconds
from hetplan.formulations.ditto.paper import all_recovered, virtual_stages
from hetplan.formulations.ditto.problem import DittoProblem, compile_problem
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stop

Vector = tuple[int, ...]


def kind(
    name: str, work: list[float], nodes: int, size: int = 1, link: float = 0.0
) -> dict[str, object]:
    """A device type whose backward pass takes as long as its forward pass."""
    return {
        "name": name,
        "nodes": nodes,
        "devices_per_node": size,
        "forward_seconds": [w / 2 for w in work],
        "backward_seconds": [w / 2 for w in work],
        "allreduce_seconds": {str(x): [link] * len(work) for x in (2, 4) if x <= size},
    }


def instance(micro_batches: int, *kinds: dict[str, object]) -> DittoData:
    return DittoData.model_validate({"micro_batches": micro_batches, "device_types": list(kinds)})


def textbook(problem: DittoProblem) -> float | None:
    """Eq. 1-3 as plain recursion without classes of intervals; least T over S, None without a
    template."""
    p, n = problem, problem.micro_batches

    @cache
    def best(
        stages: int, u: int, v: int, x: Vector
    ) -> tuple[float, float, float, int, float] | None:
        """(T, T1, t of k*, k*, T3)."""
        if stages == 1:
            for r in range(p.options):
                if x == tuple(
                    int(p.option_devices[r]) * (i == p.option_kind[r]) for i in range(len(x))
                ):
                    t = float(p.time[r, u, v])
                    return (n * t, t, t, 0, t)
            return None
        found = None
        for y in product(*(range(d + 1) for d in x)):
            z = tuple(a - b for a, b in zip(x, y, strict=True))
            for s, cut in product(range(1, stages), range(u + 1, v)):
                left, right = best(s, u, cut, y), best(stages - s, cut, v, z)
                if left is None or right is None:
                    continue
                work = left[1] + right[1]
                if left[2] >= right[2] * (1 - 1e-9):
                    t, k, rest = left[2], left[3], left[4] + right[1]
                else:
                    t, k, rest = right[2], s + right[3], right[4]
                cost = work + (n - stages + k - 1) * t + rest
                if found is None or cost < found[0]:
                    found = (cost, work, t, k, rest)
        return found

    full = tuple(int(d) for d in p.devices)
    counts = range(1, min(p.most_stages, n) + 1)
    values = [state[0] for s in counts if (state := best(s, 0, p.layers, full)) is not None]
    return min(values, default=None)


@pytest.mark.parametrize("seed", range(0, 120, 2))
def test_the_division_equals_its_recursion(seed: int) -> None:
    data = data_of(seed)
    if not any(k.nodes for k in data.device_types):
        return
    problem = compile_problem(data)
    if problem.devices.sum() > 8:  # beyond plain recursion
        return
    division = Division(problem, Run())
    expected, ranked = textbook(problem), division.ranked()
    assert (expected is None) == (not ranked)
    if ranked:
        assert ranked[0][0] == pytest.approx(expected, rel=1e-12)
        for cost, count in ranked:
            stages = division.template(count)
            assert len(stages) == count
            assert problem.price(stages) == pytest.approx(cost, rel=1e-9)


@pytest.mark.parametrize(
    ("nodes", "cuts"), [(2, [0, 4, 6]), (3, [0, 3, 5, 6]), (4, [0, 3, 4, 5, 6])]
)
def test_oobleck_reproduces_its_published_templates(nodes: int, cuts: list[int]) -> None:
    # Oobleck's own unit tests: six layers whose forward and backward passes take 1 to 6.
    data = instance(4 * nodes, kind("a", [2.0 * (i + 1) for i in range(6)], nodes))
    for method in ("oobleck", "exact"):
        decision = solve(FAMILY, data, method).decision
        assert decision is not None
        assert [stage.first for stage in decision.stages] == cuts[:-1]


def test_oobleck_is_not_optimal_in_general() -> None:
    work = [7.0, 8.0, 1.0, 4.0, 8.0, 8.0]
    data = instance(4, kind("a", [w / 2 for w in work], 2), kind("b", [w / 1.5 for w in work], 2))
    best = oracle(data)
    assert best is not None
    # The optimum uses all devices too: what is lost is lost by keeping one best half per state.
    assert len(best.decision.stages) == 4
    exact, oobleck = solve(FAMILY, data, "exact"), solve(FAMILY, data, "oobleck")
    assert exact.objective == pytest.approx(best.objective, rel=1e-7)
    assert oobleck.objective == pytest.approx(best.objective * 1.02127659574, rel=1e-9)


def test_a_division_that_is_stopped_says_so() -> None:
    run = Run()
    run.cancel.set()
    result = solve(FAMILY, middle_instance(0), "oobleck", run)
    assert result.stop is Stop.INTERRUPTED
    assert result.status == "unknown"


def test_folding_rounds_the_ratio_of_totals() -> None:
    data = instance(
        8,
        kind("old", [6.0] * 4, 2, 2),
        kind("new", [1.7] * 4, 1, 2),
        kind("none", [99.0] * 4, 0, 2),
    )
    folding = fold(data)
    assert folding.weakest.name == "old"
    assert dict(folding.factors) == {"old": 1, "new": 4}  # 3.53 is rounded up
    assert folding.nodes == 2 * 1 + 1 * 4


def test_folding_with_communication_follows_its_formula() -> None:
    old = kind("old", [6.0] * 10, 1, 4, link=0.5)
    data = instance(8, old, kind("new", [1.0] * 10, 1, 4))
    weakest = data.device_types[0]
    # d = 5: one node of four and one single device; only the node's layers reduce.
    assert virtual_seconds(weakest, 5) == pytest.approx(60 / 5 + 10 * 4 / 5 * 0.5)
    assert virtual_seconds(weakest, 3) == pytest.approx(60 / 3 + 10 * 0.5)
    folding = fold(data, communication=True)
    by_hand = min(range(1, 7), key=lambda d: abs(virtual_seconds(weakest, d) - 10.0))
    assert folding.factors["new"] == by_hand


def test_folding_with_communication_may_take_fewer_devices() -> None:
    """60 s on one old device, 10 s on the new one; an all-reduce of a layer takes 2 s. p(5) = 12 +
    16 = 28 s is nearest to 10 s: p(6) = 10 + 20 = 30 s, p(4) = 15 + 20 = 35 s."""
    old = kind("old", [6.0] * 10, 1, 4, link=2.0)
    data = instance(8, old, kind("new", [1.0] * 10, 1, 4))
    weakest = data.device_types[0]
    assert [virtual_seconds(weakest, d) for d in (4, 5, 6)] == pytest.approx([35.0, 28.0, 30.0])
    assert fold(data, communication=True).factors["new"] == 5
    assert fold(data).factors["new"] == 6


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("ratio", [1, 2, 7, 300])
def test_folding_with_communication_finds_the_closest_factor(size: int, ratio: int) -> None:
    for link in (0.0, 1e-3, 0.02, 0.5, 4.0):
        old = kind("old", [6.0, 2.0], 1, size, link=link)
        data = instance(8, old, kind("new", [6.0 / ratio, 2.0 / ratio], 1, size))
        weakest, total = data.device_types[0], 8.0 / ratio
        errors = [abs(virtual_seconds(weakest, d) - total) for d in range(1, ratio + 1)]
        closest = 1 + errors.index(min(errors))
        assert fold(data, communication=True).factors["new"] == closest


def test_folding_does_not_try_every_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that is a hundred thousand times as fast has as many factors."""
    asked = []

    def counted(weakest: DeviceType, d: int) -> float:
        asked.append(d)
        return virtual_seconds(weakest, d)

    monkeypatch.setattr(oobleck, "virtual_seconds", counted)
    data = instance(8, kind("old", [6.0], 1, 4, link=1e-6), kind("new", [6e-5], 1, 4))
    assert fold(data, communication=True).factors["new"] > 100
    assert len(asked) < 1000


def test_paper_needs_as_many_layers_as_virtual_devices() -> None:
    data = instance(8, kind("old", [4.0] * 5, 2), kind("new", [1.0] * 5, 1))
    for method in ("paper", "merge"):
        result = solve(FAMILY, data, method)
        assert result.status == "unknown"
        assert result.stop is Stop.DONE
        assert "5 layers, 6 virtual devices" in result.message


def test_paper_and_merge_cut_between_virtual_stages() -> None:
    run, recovered, better = Run(Options(threads=1)), 0, 0
    for seed in range(80):
        data = middle_instance(seed)
        try:
            ends = {last for _, last in virtual_stages(data, fold(data), run)}
        except NoTemplate:
            continue
        paper, merge = solve(FAMILY, data, "paper", run), solve(FAMILY, data, "merge", run)
        assert (paper.bound, merge.bound) == (None, None)
        for result in (paper, merge):
            if result.decision is not None:
                assert {stage.last for stage in result.decision.stages} <= ends
        if paper.objective is not None:
            recovered += 1
            assert merge.objective is not None
            assert merge.objective <= paper.objective * (1 + 1e-6)
            better += merge.objective < paper.objective * (1 - 1e-6)
    assert recovered >= 10
    assert better >= 1


@pytest.mark.parametrize("seed", [0, 5, 7, 9])
def test_greedy_keeps_the_best_of_its_templates(seed: int) -> None:
    data = middle_instance(seed)
    problem, run = compile_problem(data), Run()
    prices = [problem.price(template.stages) for template in all_recovered(data, problem, run)]
    assert min(prices) < max(prices), "the instance says nothing"
    assert solve(FAMILY, data, "greedy-joined").objective == pytest.approx(min(prices), rel=1e-12)
