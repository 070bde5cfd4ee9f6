"""Every exact method against enumeration on tiny instances, and every method against the bounds."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import pairwise, product

import pytest

from hetplan.formulations import family
from hetplan.formulations.poplar import cover_ties, exact_shares, exact_steps, fill, step_times
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
    """A second solve at the least time: the same eq. 4 as enumeration's wherever it says so, which
    is nearly always."""
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


def literal() -> PoplarData:
    """Device a could take its two samples in 1.2 s, and in 2 s one by one; b takes one in 2 s."""
    devices = [Device(name="a", step_seconds=[1.0, 1.2]), Device(name="b", step_seconds=[2.0])]
    return PoplarData(zero_stage=0, global_batch=3, comm_seconds=0.0, devices=devices)


def linear(stage: int, batch: int) -> PoplarData:
    """0.043 s a sample: every micro-batch takes as long, but for the last bit."""
    devices = [Device(name="x", step_seconds=[0.043 * b for b in range(1, 9)])]
    return PoplarData(zero_stage=stage, global_batch=batch, comm_seconds=0.0, devices=devices)


@pytest.mark.parametrize("method", ["exact", "cp-sat", "milp", "pyomo"])
def test_ties_are_broken_over_micro_batches_too(method: str) -> None:
    """Of all decisions of the least time, 2 s, one has no idle time at all."""
    result = run(literal(), method)
    assert result.decision == PoplarDecision(
        devices=[Share(samples=2, micro_batch=1), Share(samples=1, micro_batch=1)]
    )
    assert result.details["tie_break"] == "proven"


@pytest.mark.parametrize("method", ["exact", "cp-sat", "milp", "pyomo", "paper"])
@pytest.mark.parametrize("batch", [5, 7, 32, 63, 100])
def test_equal_times_take_the_larger_micro_batch(method: str, batch: int) -> None:
    """Not the one that rounding happens to favour."""
    found = run(linear(0, batch), method).decision
    assert found == PoplarDecision(devices=[Share(samples=batch, micro_batch=min(8, batch))])


@pytest.mark.parametrize("batch", [5, 7, 32, 63, 100])
def test_equal_times_take_the_fewest_steps(batch: int) -> None:
    found = run(linear(2, batch), "exact").decision
    assert isinstance(found, PoplarDecision) and found.steps is not None
    assert sum(step.count for step in found.steps) == -(-batch // 8)


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
    assert (
        kept.decision == first.decision and kept.details["tie_break"] == "not settled: out of time"
    )
    limited = Outcome(stop=Stop.LIMIT, decision=first.decision)
    assert settle(levels, limited, Run(), stopped) is limited


def uneven(stage: int) -> PoplarData:
    """Devices of a nanosecond and of hours a sample."""
    curves = [[1.05e-9], [2.79e-9, 2.11e-9, 1.33e-9, 1.9e-9, 2.13e-9], [13352.3], [2.41e-9]]
    devices = [Device(name=f"d{i}", step_seconds=curve) for i, curve in enumerate(curves)]
    return PoplarData(zero_stage=stage, global_batch=9, comm_seconds=0.0, devices=devices)


@pytest.mark.parametrize("method", ["exact", "cp-sat", "milp", "pyomo"])
@pytest.mark.parametrize("stage", [0, 3])
def test_devices_that_are_of_no_use_do_not_blur_the_scale(method: str, stage: int) -> None:
    """13 orders of magnitude: the slow device is out before times are scaled for a solver."""
    data = uneven(stage)
    agrees(run(data, method), oracle(data))


def test_ties_are_not_settled_at_a_time_that_is_not_proven() -> None:
    """A solver that ends content above its bound says so, and claims nothing of the tie."""
    data = instance(3, stage=1)
    problem = compile_problem(data)
    levels = build_levels(problem)
    first = solve(POPLAR, data, "exact")
    assert levels is not None and first.decision is not None and first.bound is not None
    loose = Outcome(stop=Stop.OPTIMAL, decision=first.decision, bound=0.9 * first.bound)

    def never(tie: Tie) -> tuple[Stop, Counts | None]:
        raise AssertionError("asked")

    kept = settle(levels, loose, Run(), never)
    assert kept.decision == first.decision and "differ too much" in kept.message
    assert kept.details["tie_break"] == "not settled: the least time is not proven"


@pytest.mark.parametrize("pairs", [0.0, 1e9])
def test_the_path_of_large_instances_is_exact_too(
    monkeypatch: pytest.MonkeyPatch, pairs: float
) -> None:
    """Covering first, sums hit exactly only where covering fails; ties as far as `pairs` allows."""
    monkeypatch.setattr(exact_steps, "SUMS_WORK", 0.0)
    monkeypatch.setattr(cover_ties, "PAIR_WORK", pairs)
    paths: Counter[object] = Counter()
    for seed in range(500):
        data = instance(seed, stage=2 + seed % 2)
        result, best = run(data, "exact"), oracle(data)
        agrees(result, best)
        paths[result.details.get("path")] += 1
        paths[result.details.get("tie_break")] += 1
        if best is not None and result.details["tie_break"] == "proven":
            found = evaluate(POPLAR, data, result.decision).parts["under_utilisation"]
            assert found == pytest.approx(best[1], rel=1e-7, abs=1e-7), seed
    assert paths["cover"] > 100 and paths["pruned sums"] > 30, paths
    assert paths["proven"] > 100 if pairs else paths["proven"] == 0, paths


def test_thinned_fills_keep_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With most devices fixed by the greedy the time stays optimal; only eq. 4 may lose."""
    monkeypatch.setattr(exact_steps, "SUMS_WORK", 0.0)
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
            assert (
                result.status == "infeasible"
                and "no device holds even one sample" in result.message
            )
        elif result.objective is not None:
            assert result.objective >= best[0] * (1 - 1e-9)
            ratios.append(result.objective / best[0])
        else:
            assert "holds no sample" in result.message
    assert len(ratios) > 150
    assert max(ratios) > 1.05  # none of them is exact


def test_the_baselines_by_hand() -> None:
    """Two devices of 3 : 1 peak FLOP/s, mbs 4 and 2, 18 samples: DeepSpeed 2 and 2, Whale 4 and 1 a
    step."""
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
    """A T4 (8.1 TFLOP/s in single precision) beside an A100 (19.5): shares follow the datasheets,
    not the curves."""
    same = [0.1 * b for b in range(1, 33)]
    devices = [Device(name=name, step_seconds=same) for name in ("A100-SXM4-80GB", "T4")]
    data = PoplarData(zero_stage=0, global_batch=276, comm_seconds=0.0, devices=devices)
    found = run(data, "whale").decision
    assert isinstance(found, PoplarDecision) and found.devices is not None
    assert [share.samples for share in found.devices] == [195, 81]


@pytest.mark.parametrize("seed", range(60))
def test_long_batches_equal_a_plain_programme(seed: int) -> None:
    """One or two devices, hundreds of samples: most steps are placed without a table, the rest as
    if all were.

    Least time first, then least under-utilisation, by adding one step after the other in whole
    milliseconds.
    """
    rng = random.Random(seed)
    shape = rng.choice(["convex", "tiles", "wild", "integers", "linear"])
    drawn = (
        [0.25 * b for b in range(1, 7)]
        if shape == "linear"
        else curve(rng, rng.randint(1, 6), shape)
    )
    ms = [round(1000 * t) for t in drawn]
    count, batch, comm = rng.randint(1, 2), rng.randint(100, 700), rng.choice([0, 400, 2000])
    device = Device(name="x", step_seconds=[t / 1000 for t in ms])
    data = PoplarData(
        zero_stage=3, global_batch=batch, comm_seconds=comm / 1000, devices=[device] * count
    )
    steps: dict[int, tuple[int, int]] = {}
    for loads in product(range(len(ms) + 1), repeat=count):
        if any(loads):
            busy = [ms[b - 1] if b else 0 for b in loads]
            step = (max(busy) + comm, sum(max(busy) - one for one in busy))
            steps[sum(loads)] = min(steps.get(sum(loads), step), step)
    least = [(0, 0)]
    for n in range(1, batch + 1):
        ends = [(least[n - size], step) for size, step in steps.items() if size <= n]
        least.append(min((t + dt, idle + more) for (t, idle), (dt, more) in ends))
    result = run(data, "exact")
    assert result.status == "optimal"
    assert result.objective == pytest.approx(least[batch][0] / 1000, rel=1e-9)
    assert result.details["tie_break"] == "proven"
    found = evaluate(POPLAR, data, result.decision).parts["under_utilisation"]
    idle = least[batch][1] * max(b / t for b, t in enumerate(ms, 1))
    assert found == pytest.approx(idle, rel=1e-7, abs=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_least_times_of_all_step_sizes(seed: int) -> None:
    """The convolution, the search time by time and enumeration agree."""
    data = instance(seed, stage=2)
    problem = compile_problem(data)
    if not problem.groups:
        return
    curves = [[0.0, *device.step_seconds] for device in data.devices]
    top = min(data.global_batch, sum(len(c) - 1 for c in curves))
    least = [float("inf")] * (top + 1)
    for row in product(*(range(len(c)) for c in curves)):
        if sum(row) <= top:
            seconds = max(c[b] for c, b in zip(curves, row, strict=True))
            least[sum(row)] = min(least[sum(row)], seconds)
    assert step_times.convolved(problem).tolist() == least
    assert step_times.time_by_time(problem)[1:].tolist() == least[1:]
