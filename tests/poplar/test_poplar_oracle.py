"""Every exact method against enumeration on tiny instances, and every method against the bounds."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import pairwise, product

import pytest

from hetplan.formulations import family
from hetplan.formulations.poplar import exact_shares, exact_steps, fill
from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.levels import build_levels
from hetplan.formulations.poplar.problem import compile_problem
from hetplan.formulations.poplar.ties import Counts, Tie, settle
from hetplan.solvers.options import Options
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.result import Outcome, Result, Stop
from hetplan.solvers.run import Run, Stopped
from poplar.poplar_cases import curve, instance, oracle

SEEDS = range(320)
POPLAR = family("poplar")


@cache
def known(seed: int) -> tuple[PoplarData, tuple[float, float] | None]:
    """One instance and what enumeration says of it."""
    data = instance(seed)
    return data, oracle(data)


def run(data: PoplarData, method: str) -> Result[object]:
    """`method` with one thread."""
    return solve(POPLAR, data, method, Run(Options(threads=1, time_limit=60)))


def agrees(result: Result[object], best: tuple[float, float] | None) -> None:
    """The result is the proven optimum, or proven infeasible."""
    if best is None:
        assert result.status == "infeasible"
        assert result.message
    else:
        assert result.status == "optimal", result.message
        assert result.objective == pytest.approx(best[0], rel=1e-9)
        assert result.bound is not None and result.bound <= best[0] * (1 + 1e-9)


def test_the_cases_reach_what_they_should() -> None:
    """Infeasible ones, curves that fall, every stage, devices that hold nothing."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        data, best = known(seed)
        seen["infeasible"] += best is None
        seen[f"stage {data.zero_stage}"] += 1
        curves = [device.step_seconds for device in data.devices]
        seen["falling"] += any(a > b for curve in curves for a, b in pairwise(curve))
        seen["holds nothing"] += any(not curve for curve in curves) and best is not None
    assert all(seen[key] >= 15 for key in ("infeasible", "falling", "holds nothing")), seen
    assert all(seen[f"stage {stage}"] >= 60 for stage in range(4)), seen


@pytest.mark.parametrize("method", ["auto", "exact", "cp-sat", "milp"])
def test_exact_methods_equal_enumeration(method: str) -> None:
    for seed in SEEDS:
        data, best = known(seed)
        agrees(run(data, method), best)


def test_pyomo_equals_enumeration() -> None:
    pytest.importorskip("pyomo")
    for seed in SEEDS:
        data, best = known(seed)
        agrees(run(data, "pyomo"), best)


def test_ties_go_to_the_least_under_utilisation() -> None:
    """Equation 4 of the paper, on instances where enumeration knows all plans of least time."""
    for seed in SEEDS:
        data, best = known(seed)
        if best is not None:
            result = run(data, "exact")
            found = evaluate(POPLAR, data, result.decision).parts["under_utilisation"]
            assert found == pytest.approx(best[1], rel=1e-7, abs=1e-7), seed


@pytest.mark.parametrize("method", ["cp-sat", "milp", "pyomo"])
def test_general_solvers_break_ties_too(method: str) -> None:
    """A second solve at the least time: the same eq. 4 as enumeration's wherever it says so, which is nearly always."""
    told: Counter[object] = Counter()
    for seed in SEEDS:
        data, best = known(seed)
        if best is None:
            continue
        result = run(data, method)
        assert result.objective == pytest.approx(best[0], rel=1e-9)
        found = evaluate(POPLAR, data, result.decision).parts["under_utilisation"]
        told[result.details["tie_break"]] += 1
        assert found >= best[1] - 1e-7
        if result.details["tie_break"] == "proven":
            assert found == pytest.approx(best[1], rel=1e-6, abs=1e-5), seed
    assert told["proven"] >= 0.97 * told.total(), told


def test_no_time_for_a_second_solve_leaves_the_first_plan() -> None:
    data = instance(3, stage=1)
    problem = compile_problem(data)
    levels = build_levels(problem)
    first = solve(POPLAR, data, "exact")
    assert levels is not None and first.decision is not None
    outcome = Outcome(stop=Stop.OPTIMAL, decision=first.decision, bound=first.bound)

    def stopped(tie: Tie) -> tuple[Stop, Counts | None]:
        raise Stopped

    kept = settle(levels, outcome, Run(), stopped)
    assert kept.decision == first.decision and kept.details["tie_break"] == "not settled: out of time"
    limited = Outcome(stop=Stop.LIMIT, decision=first.decision)
    assert settle(levels, limited, Run(), stopped) is limited


def test_the_path_of_large_instances_is_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the settling of ties: covering first, sums hit exactly only where covering fails."""
    monkeypatch.setattr(exact_steps, "TIE_WORK", 0.0)
    paths: Counter[object] = Counter()
    for seed in range(500):
        data = instance(seed, stage=2 + seed % 2)
        result = run(data, "exact")
        agrees(result, oracle(data))
        paths[result.details.get("path")] += 1
    assert paths["cover"] > 100 and paths["exact sums"] > 30, paths


def test_thinned_fills_keep_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With most devices fixed by the greedy the time stays optimal; only eq. 4 may lose."""
    monkeypatch.setattr(exact_steps, "TIE_WORK", 0.0)
    monkeypatch.setattr(fill, "BUDGET", 0.0)
    monkeypatch.setattr(fill, "FREE", 1)
    for seed in SEEDS:
        data, best = known(seed)
        agrees(run(data, "exact"), best)


def test_without_tables_the_bound_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global batches beyond the tables: a plan and a bound around the optimum."""
    monkeypatch.setattr(exact_steps, "MAX_ENTRIES", 0)
    monkeypatch.setattr(exact_shares, "MAX_ENTRIES", 0)
    plans = 0
    for seed in SEEDS:
        data, best = known(seed)
        if best is None:
            continue
        result = run(data, "exact")
        assert result.bound is not None and result.bound <= best[0] * (1 + 1e-9)
        if result.objective is not None:
            plans += 1
            assert result.objective >= best[0] * (1 - 1e-9)
    assert plans > 200


@pytest.mark.parametrize("method", ["paper", "deepspeed", "whale"])
def test_heuristics_are_feasible_and_never_better(method: str) -> None:
    ratios = []
    for seed in SEEDS:
        data, best = known(seed)
        result = run(data, method)
        assert result.bound is None
        if best is None:
            assert result.decision is None
        elif result.objective is not None:
            assert result.objective >= best[0] * (1 - 1e-9)
            ratios.append(result.objective / best[0])
        else:
            assert "holds no sample" in result.message
    assert len(ratios) > 150
    assert max(ratios) > 1.05  # none of them is exact


def test_the_baselines_by_hand() -> None:
    """Two devices of 3 : 1 peak FLOP/s, mbs 4 and 2, 18 samples: DeepSpeed 2 and 2, Whale 4 and 1 a step."""
    devices = [
        Device(name="a", step_seconds=[1.0, 2.0, 3.0, 4.0], flops_per_second=3e12),
        Device(name="b", step_seconds=[4.0, 7.0], flops_per_second=1e12),
    ]
    data = PoplarData(zero_stage=3, global_batch=18, comm_seconds=0.5, devices=devices)
    plans = {method: run(data, method).decision for method in ("deepspeed", "whale")}
    assert plans["deepspeed"] == PoplarDecision(
        steps=[Step(count=4, micro_batches=[2, 2]), Step(count=1, micro_batches=[1, 1])]
    )
    assert plans["whale"] == PoplarDecision(
        steps=[Step(count=3, micro_batches=[4, 1]), Step(count=1, micro_batches=[2, 1])]
    )
    whole = PoplarData(zero_stage=0, global_batch=18, comm_seconds=0.5, devices=devices)
    shares = {method: run(whole, method).decision for method in ("deepspeed", "whale")}
    assert shares["deepspeed"] == PoplarDecision(
        devices=[Share(samples=9, micro_batch=2), Share(samples=9, micro_batch=2)]
    )
    assert shares["whale"] == PoplarDecision(
        devices=[Share(samples=14, micro_batch=4), Share(samples=4, micro_batch=1)]
    )


def test_whale_reads_the_catalogue() -> None:
    """A T4 (8.1 TFLOP/s in single precision) beside an A100 (19.5): shares follow the datasheets, not the curves."""
    same = [0.1 * b for b in range(1, 33)]
    devices = [Device(name=name, step_seconds=same) for name in ("A100-SXM4-80GB", "T4")]
    data = PoplarData(zero_stage=0, global_batch=276, comm_seconds=0.0, devices=devices)
    found = run(data, "whale").decision
    assert isinstance(found, PoplarDecision) and found.devices is not None
    assert [share.samples for share in found.devices] == [195, 81]


@pytest.mark.parametrize("seed", range(60))
def test_long_batches_equal_a_plain_programme(seed: int) -> None:
    """One or two devices, hundreds of samples: most steps are placed without a table, the rest as if all were."""
    rng = random.Random(seed)
    shape = rng.choice(["convex", "tiles", "wild", "integers"])
    times = curve(rng, rng.randint(1, 6), shape)
    count, batch, comm = rng.randint(1, 2), rng.randint(100, 700), rng.choice([0.0, 0.4, 2.0])
    device = Device(name="x", step_seconds=times)
    data = PoplarData(zero_stage=3, global_batch=batch, comm_seconds=comm, devices=[device] * count)
    cost: dict[int, float] = {}
    for loads in product(range(len(times) + 1), repeat=count):
        if any(loads):
            slowest = max(times[b - 1] if b else 0.0 for b in loads) + comm
            cost[sum(loads)] = min(cost.get(sum(loads), slowest), slowest)
    least = [0.0]
    for n in range(1, batch + 1):
        least.append(min(least[n - size] + seconds for size, seconds in cost.items() if size <= n))
    result = run(data, "exact")
    assert result.status == "optimal" and result.objective == pytest.approx(least[batch], rel=1e-9)
