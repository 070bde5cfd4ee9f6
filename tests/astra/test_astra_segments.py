"""The methods of problem `astra` against brute force, each other, and what the problem's symmetries
demand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astra.cases import oracle, random_instance
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage, DeviceType
from hetplan.formulations.astra.evaluate import evaluate
from hetplan.formulations.astra.exact import optimum
from hetplan.formulations.astra.problem import compile_problem, infeasible_because
from hetplan.formulations.astra.unequal import greedy, least_work, scratch
from hetplan.schema import parse
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.result import Result, Stop
from hetplan.solvers.run import Run
from stopping import After, cancelled_after

ASTRA = family("astra")
EXACT = [method.name for method in ASTRA.methods if method.exact and method.name != "auto"]
CASES = 220


@cache
def best_of(seed: int) -> float | None:
    """The oracle's answer for one seed."""
    return oracle(random_instance(seed))


def test_more_layers_than_a_chain_has_are_refused() -> None:
    document = random_instance(0).model_dump(mode="json")
    assert (
        parse(
            AstraData, document | {"layers": 4096, "equal_layers_per_type": False}, where="f"
        ).layers
        == 4096
    )
    with pytest.raises(InputError, match=r"f: layers.*got 4097"):
        parse(AstraData, document | {"layers": 4097}, where="f")


def run_one(data: AstraData, method: str, *, time_limit: float = 60) -> Result[Any]:
    """One method, one thread."""
    return solve(ASTRA, data, method, Run(Options(threads=1, time_limit=time_limit)))


def instance(**changes: Any) -> AstraData:
    """Four types, 32 stages, 96 layers: the size that the paper's enumeration is meant for."""
    given: dict[str, Any] = {
        "layers": 96,
        "stages": 32,
        "micro_batches": 64,
        "data_parallel": 8,
        "tensor_parallel": 8,
        "device_types": [
            DeviceType(name=f"t{i}", max_devices=800, layer_seconds=0.01 + 0.004 * i, p2p_seconds=h)
            for i, h in enumerate((0.002, 0.0005, 0.003, 0.0001))
        ],
        "equal_layers_per_type": False,
    }
    return AstraData(**(given | changes))


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("block", range(4))
def test_equal_to_brute_force(method: str, block: int) -> None:
    for seed in range(CASES * block // 4, CASES * (block + 1) // 4):
        result, best = run_one(random_instance(seed), method), best_of(seed)
        if best is None:
            assert result.status == "infeasible" and result.message, (seed, result)
        else:
            assert result.status == "optimal", (seed, result)
            assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed


def test_the_cases_are_of_every_kind() -> None:
    cases = [random_instance(seed) for seed in range(CASES)]
    infeasible = [data for seed, data in enumerate(cases) if best_of(seed) is None]
    assert CASES // 10 <= len(infeasible) <= CASES // 2
    assert {data.equal_layers_per_type for data in infeasible} == {False, True}
    problems = [compile_problem(data) for data in cases]
    dividing = [
        p
        for p, d in zip(problems, cases, strict=True)
        if d in infeasible and not infeasible_because(p)
    ]
    assert dividing, "no case is infeasible for want of numbers that divide"
    assert any(p.ordered and not p.equal for p in problems) and any(not p.ordered for p in problems)


def test_paper_is_exact_under_its_own_restriction_and_never_better() -> None:
    worse = 0
    for seed in range(CASES):
        data = random_instance(seed)
        result, best = run_one(data, "paper"), best_of(seed)
        if best is None:
            assert result.objective is None
        elif data.equal_layers_per_type:
            assert result.status == "optimal" and result.objective == pytest.approx(best, rel=1e-9)
        elif result.objective is not None:
            assert result.bound is None and result.objective >= best * (1 - 1e-9)
            worse += result.objective > best * (1 + 1e-6)
    assert worse > 5  # the restriction costs something


@pytest.mark.parametrize("equal", [False, True])
def test_large_instances_agree_across_methods(equal: bool) -> None:
    data = instance(layers=48, stages=12, equal_layers_per_type=equal)
    best = run_one(data, "exact")
    assert best.status == "optimal"
    for method in ("cp-sat", "milp"):
        other = run_one(data, method, time_limit=20)
        assert other.bound is not None and other.objective is not None
        assert best.objective is not None
        assert other.bound <= best.objective * (1 + 1e-9)
        assert other.objective >= best.objective * (1 - 1e-9)
        if other.status == "optimal":
            assert other.objective == pytest.approx(best.objective, rel=2e-6)


def test_equal_layers_cannot_beat_unequal_ones() -> None:
    free, equal = (
        run_one(instance(), "exact"),
        run_one(instance(equal_layers_per_type=True), "exact"),
    )
    assert free.objective is not None and equal.objective is not None
    assert free.objective <= equal.objective


def test_out_of_time_keeps_a_bound() -> None:
    """A run that is cancelled at its second report stops there, with what it has."""
    run = Run(Options(threads=1))
    run.watch = lambda progress: run.cancel.set() if progress.bound is not None else None
    result = solve(ASTRA, instance(), "exact", run)
    assert result.stop is Stop.INTERRUPTED and result.status == "feasible"
    best = run_one(instance(), "exact").objective
    assert result.bound is not None and best is not None and result.objective is not None
    assert result.bound <= best * (1 + 1e-12) <= result.objective * (1 + 1e-9)


@pytest.mark.parametrize("method", ["exact", "paper"])
@pytest.mark.parametrize("equal", [True, False])
def test_the_clock_is_looked_at_within_one_evaluation(
    method: str, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, methods find what they find in one go, and stop where they are told to, with what
    they have."""
    data = instance(layers=24, stages=8, equal_layers_per_type=equal)
    whole = run_one(data, method)
    monkeypatch.setattr("hetplan.formulations.astra.problem.MOST_OPERATIONS", 1)
    monkeypatch.setattr("hetplan.formulations.astra.paper.PATIENCE", 3)
    patient = After(10**9)
    again = solve(ASTRA, data, method, Run(Options(threads=1), cancel=patient))
    assert again.decision == whole.decision and again.bound == whole.bound
    assert again.details == whole.details
    looks = patient.looked
    assert looks > 5 * int(str(whole.details.get("evaluations", 0))) + 50
    for most in (3, looks // 2):
        stopped = solve(ASTRA, data, method, cancelled_after(most))
        assert stopped.stop is Stop.INTERRUPTED
        assert method == "paper" or stopped.objective is not None
        if stopped.objective is not None and stopped.bound is not None:
            assert whole.objective is not None
            assert stopped.bound <= whole.objective * (1 + 1e-12) <= stopped.objective * (1 + 1e-9)


def test_tables_beyond_memory_are_refused_before_they_are_made() -> None:
    """Equal layers, and types ordered in nothing; what the greedy takes has no tables."""
    kinds = [
        DeviceType(
            name=f"t{i}", max_devices=4096, layer_seconds=1 + i / 10, p2p_seconds=1 - i / 100
        )
        for i in range(30)
    ]
    big: dict[str, Any] = {"layers": 4096, "stages": 4000, "data_parallel": 1, "tensor_parallel": 1}
    for equal in (True, False):
        with pytest.raises(UnsupportedError, match="GiB"):
            run_one(instance(**big, device_types=kinds, equal_layers_per_type=equal), "exact")
    one = instance(**big, device_types=kinds[:1])
    assert run_one(one, "exact").status == "optimal"


def test_greedy_and_programme_agree_where_both_apply() -> None:
    compared = 0
    for seed in range(CASES):
        problem = compile_problem(random_instance(seed))
        if problem.M == 0 or problem.P > problem.N or not problem.ordered:
            continue
        work, _, _ = greedy(problem, problem.thresholds)
        room = scratch(problem)
        for theta, value in zip(problem.thresholds, work, strict=True):
            caps = problem.caps(float(theta))
            other = least_work(problem, caps, room, Run())
            assert other == pytest.approx(value, rel=1e-12)
            compared += 1
    assert compared > 300


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_invariants(seed: int, rng: Any) -> None:
    data = random_instance(seed)
    problem = compile_problem(data)
    if infeasible_because(problem) is not None:
        return
    best = optimum(problem, Run()).bound
    # types in another order are the same problem
    kinds = list(data.device_types)
    rng.shuffle(kinds)
    shuffled = data.model_copy(update={"device_types": kinds})
    assert optimum(compile_problem(shuffled), Run()).bound == (
        None if best is None else pytest.approx(best)
    )
    # more devices never hurt, doubled times double the optimum
    richer = data.model_copy(
        update={
            "device_types": [k.model_copy(update={"max_devices": k.max_devices + 4}) for k in kinds]
        }
    )
    slower = data.model_copy(
        update={
            "device_types": [
                k.model_copy(
                    update={"layer_seconds": 2 * k.layer_seconds, "p2p_seconds": 2 * k.p2p_seconds}
                )
                for k in kinds
            ]
        }
    )
    if best is not None:
        more = optimum(compile_problem(richer), Run()).bound
        assert more is not None and more <= best * (1 + 1e-12)
        assert optimum(compile_problem(slower), Run()).bound == pytest.approx(2 * best)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"stages": 97}, "at least one layer each"),
        (
            {
                "device_types": [
                    DeviceType(name="a", max_devices=63, layer_seconds=1, p2p_seconds=0)
                ]
            },
            "0 stages",
        ),
        (
            {
                "device_types": [
                    DeviceType(
                        name="a", max_devices=10**6, layer_seconds=1, p2p_seconds=0, max_layers=2
                    )
                ]
            },
            "room for 64 layers",
        ),
    ],
)
def test_reasons_for_infeasibility(changes: dict[str, Any], part: str) -> None:
    for method in ("exact", "cp-sat", "milp", "paper"):
        result = run_one(instance(**changes), method)
        assert result.status == "infeasible" and part in result.message


def test_evaluator_names_each_broken_constraint() -> None:
    data = instance(
        layers=4,
        stages=2,
        device_types=[
            DeviceType(name="a", max_devices=64, layer_seconds=1, p2p_seconds=0.5, max_layers=3),
            DeviceType(name="b", max_devices=128, layer_seconds=2, p2p_seconds=0),
        ],
        equal_layers_per_type=True,
    )

    def verdict(*stages: tuple[str, int]) -> tuple[float | None, str]:
        found = evaluate(
            data, AstraDecision(stages=[AstraStage(type=t, layers=n) for t, n in stages])
        )
        return found.objective, "; ".join(found.violations)

    assert verdict(("a", 2), ("b", 2)) == (2.5 + 4 + 63 * 4, "")
    assert verdict(("a", 3), ("b", 1))[0] == 3.5 + 2 + 63 * 3.5
    for stages, part in (
        ((("a", 4),), "1 stages, expected 2"),
        ((("a", 1), ("b", 1)), "hold 2 layers, expected 4"),
        ((("a", 2), ("c", 2)), "expected one of a, b"),
        ((("a", 4), ("b", 1)), "at most 3"),
        ((("a", 2), ("a", 2)), "2 stages of 64 need 128"),
        ((("b", 1), ("b", 3)), "expected the same number"),
    ):
        objective, violations = verdict(*stages)
        assert objective is None and part in violations
