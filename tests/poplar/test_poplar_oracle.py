"""Every exact method against enumeration on tiny instances, every method against the bounds, and
what must hold of optimal plans whatever the numbers are."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import pairwise, product

import pytest

from hetplan.formulations import family
from hetplan.formulations.poplar import exact
from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.exact import Effort
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Options, Outcome, Result, Run, Stop
from poplar.poplar_cases import curve, instance, oracle
from present import present

SEEDS = range(320)
POPLAR = family("poplar")


@cache
def known(seed: int) -> tuple[PoplarData, tuple[float, float] | None]:
    """One instance and what enumeration says of it."""
    data = instance(seed)
    return data, oracle(data)


def run(data: PoplarData, method: str) -> Result[object]:
    """`method` with one thread."""
    return solve(POPLAR, data, method, Run(Options(threads=1, time_limit=600)))


def agrees(result: Result[object], best: tuple[float, float] | None) -> None:
    """The result is the proven optimum, or proven infeasible."""
    if best is None:
        assert result.status == "infeasible"
        assert result.message
    else:
        assert result.status == "optimal", result.message
        assert result.objective == pytest.approx(best[0], rel=1e-9)
        assert result.bound is not None and result.bound <= best[0] * (1 + 1e-9)


@pytest.mark.wide
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


@pytest.mark.parametrize("method", ["auto", "exact", "cp-sat", "cp-sat-linear", "milp", "pyomo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_exact_methods_equal_enumeration(seed: int, method: str) -> None:
    """In time, and where enumeration knows all plans of that time in equation 4 of the paper, which
    `cp-sat` does not state."""
    data, best = known(seed)
    result = run(data, method)
    agrees(result, best)
    if best is not None:
        waste = evaluate(POPLAR, data, result.decision).parts["under_utilisation"]
        assert waste >= best[1] - 1e-7
        general = method in ("cp-sat-linear", "milp", "pyomo")
        if method in ("auto", "exact") or (general and not data.stepwise):
            assert result.details.get("tie_break", "proven") == "proven"
            assert waste == pytest.approx(best[1], rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("method", ["exact", "cp-sat", "cp-sat-linear", "milp", "pyomo"])
@pytest.mark.parametrize("stage", [0, 3])
def test_curves_with_holes_ask_for_the_whole_batch_and_no_more(method: str, stage: int) -> None:
    """Two devices that take 3 s for one sample and 1 s for two: four samples would take 1 s, three
    take 3 s."""
    curves = [[3.0, 1.0], [3.0, 1.0, 9.0]]
    devices = [Device(name="x", step_seconds=curve) for curve in curves]
    data = PoplarData(zero_stage=stage, global_batch=3, comm_seconds=0.5, devices=devices)
    agrees(run(data, method), (3.5, 0.0))


def linear(stage: int, batch: int) -> PoplarData:
    """0.043 s a sample: every micro-batch takes as long, but for the last bit."""
    devices = [Device(name="x", step_seconds=[0.043 * b for b in range(1, 9)])]
    return PoplarData(zero_stage=stage, global_batch=batch, comm_seconds=0.0, devices=devices)


@pytest.mark.parametrize("method", ["exact", "cp-sat", "cp-sat-linear", "milp", "pyomo", "paper"])
@pytest.mark.parametrize("batch", [5, 7, 32, 63, 100])
def test_equal_times_take_the_larger_micro_batch(method: str, batch: int) -> None:
    """Not the one that rounding happens to favour."""
    decision = run(linear(0, batch), method).decision
    assert decision == PoplarDecision(devices=[Share(samples=batch, micro_batch=min(8, batch))])
    if method == "exact":  # as few steps
        steps = present(exact.solve(linear(2, batch), Run()).decision).steps or []
        assert sum(step.count for step in steps) == -(-batch // 8)


def uneven(stage: int) -> PoplarData:
    """Devices of a nanosecond and of hours a sample."""
    curves = [[1.05e-9], [2.79e-9, 2.11e-9, 1.33e-9, 1.9e-9, 2.13e-9], [13352.3], [2.41e-9]]
    devices = [Device(name=f"d{i}", step_seconds=curve) for i, curve in enumerate(curves)]
    return PoplarData(zero_stage=stage, global_batch=9, comm_seconds=0.0, devices=devices)


@pytest.mark.parametrize("method", ["exact", "cp-sat", "cp-sat-linear", "milp", "pyomo"])
@pytest.mark.parametrize("stage", [0, 3])
def test_devices_that_are_of_no_use_do_not_blur_the_scale(method: str, stage: int) -> None:
    """13 orders of magnitude: the slow device is out before times are scaled for a solver."""
    data = uneven(stage)
    agrees(run(data, method), oracle(data))


@pytest.mark.parametrize("method", ["exact", "cp-sat", "milp", "pyomo"])
@pytest.mark.parametrize("comm", [3901.6106472955635, 1e9, 1e30])
def test_synchronising_may_take_far_longer_than_computing(method: str, comm: float) -> None:
    """Of a time with C in it, nothing but C may be left: no plan is lost with the rest."""
    for times, batch in (([0.001, 0.001, 0.003], 7), ([2e-5, 90.8], 1), ([0.3, 0.4], 3)):
        devices = [Device(name="x", step_seconds=times), Device(name="y", step_seconds=[1.0, 2.0])]
        for count, stage in product((1, 2), (1, 2)):
            data = PoplarData(
                zero_stage=stage, global_batch=batch, comm_seconds=comm, devices=devices[:count]
            )
            agrees(run(data, method), oracle(data))


def searched(data: PoplarData, effort: Effort) -> tuple[Outcome[PoplarDecision], float | None]:
    """What the exact method says with that effort, and the objective of its decision."""
    outcome = exact.solve(data, Run(), effort)
    if outcome.decision is None:
        return outcome, None
    return outcome, evaluate(POPLAR, data, outcome.decision).objective


@pytest.mark.parametrize("seed", SEEDS)
def test_too_large_for_tables_is_a_plan_with_a_bound(seed: int) -> None:
    data, best = known(seed)
    outcome, objective = searched(data, Effort(shares=0.0, steps=0.0))
    if best is None:
        assert outcome.stop is Stop.INFEASIBLE
        return
    assert outcome.stop is Stop.LIMIT and "too large" in outcome.message
    assert objective is not None and outcome.bound is not None
    assert outcome.bound <= best[0] * (1 + 1e-9) and objective >= best[0] * (1 - 1e-9)


@pytest.mark.parametrize("method", ["paper", "weak-only", "strong-only", "deepspeed", "whale"])
@pytest.mark.parametrize("seed", SEEDS)
def test_heuristics_are_feasible_and_never_better(seed: int, method: str) -> None:
    data, best = known(seed)
    result = run(data, method)
    assert result.bound is None
    if best is None:
        assert result.status == "infeasible"
        assert "no device holds even one sample" in result.message
    elif result.objective is not None:
        assert result.objective >= best[0] * (1 - 1e-9)
    else:
        assert "holds no sample" in result.message


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


def test_baselines_on_one_type_by_hand() -> None:
    """Type b (2 s a sample) is slower than type a (1 s): all 10 samples on the one b, or on the two
    a; the others keep out."""
    a = Device(name="a", step_seconds=[1.0, 2.0, 3.0])
    devices = [a, Device(name="b", step_seconds=[2.0, 4.0]), a]
    for stage, weak, strong in ((0, 20.0, 5.0), (3, 25.0, 7.0)):
        data = PoplarData(zero_stage=stage, global_batch=10, comm_seconds=1.0, devices=devices)
        found = {method: run(data, method) for method in ("weak-only", "strong-only")}
        comm = 1.0 if stage == 0 else 0.0
        assert found["weak-only"].objective == weak + comm
        assert found["strong-only"].objective == strong + comm
        assert found["weak-only"].message == "b alone, with the collectives of all devices"


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
    found = evaluate(POPLAR, data, result.decision).parts["under_utilisation"]
    idle = least[batch][1] * max(b / t for b, t in enumerate(ms, 1))
    assert found == pytest.approx(idle, rel=1e-7, abs=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_tables_without_end_are_left_to_other_methods(stage: int) -> None:
    """Sixty thousand devices of two samples: a bound, and no table that fills the memory."""
    device = Device(name="x", step_seconds=[1.0, 1.5])
    data = PoplarData(
        zero_stage=stage, global_batch=10**6, comm_seconds=0.25, devices=[device] * 60_000
    )
    result = run(data, "cp-sat")
    assert result.stop is Stop.LIMIT and "the method exact" in result.message
    assert result.bound == pytest.approx(10**6 / (60_000 * 2 / 1.5) + 0.25)
