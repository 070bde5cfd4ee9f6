"""Curves and Algorithm 1: splines, their dips, the largest micro-batch, the ZeRO stage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.poplar.curves import (
    CurveDevice,
    linear_curve,
    natural_spline,
    spline_curve,
)
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.profiling.profiles.largest_batch import explore
from hetplan.solvers.registry import solve


def test_curves_pass_through_their_points() -> None:
    points = {1: 0.4, 2: 0.5, 4: 0.7, 8: 1.5, 11: 2.0}
    for curve in (spline_curve(points, 11), linear_curve(points, 11)):
        assert curve[0] == 0.0 and len(curve) == 12
        assert [curve[b] for b in points] == list(points.values())
    assert linear_curve(points, 14)[14] == pytest.approx(2.5)
    assert linear_curve({4: 1.0}, 8)[[2, 8]] == pytest.approx([1.0, 2.0])


def test_a_spline_through_zero_falls_back_on_the_line() -> None:
    """Speeds of 100, 1 and 1 samples per second: the spline falls below 0 behind the second."""
    points = {1: 0.01, 3: 3.0, 10: 10.0}
    batches = np.array(sorted(points), dtype=float)
    speeds = natural_spline(batches, batches / np.array([0.01, 3.0, 10.0]), np.arange(1.0, 11.0))
    broken = np.flatnonzero(speeds <= 0) + 1
    curve = spline_curve(points, 10)
    assert len(broken) and (curve[1:] > 0).all()
    assert curve[broken].tolist() == linear_curve(points, 10)[broken].tolist()


def test_points_must_be_measurements() -> None:
    for points in ({}, {0: 1.0}, {1: 0.0}, {1: math.nan}):
        with pytest.raises(InputError):
            linear_curve(points, 4)


@pytest.mark.parametrize("optimism", [1.0, 1.25, 3.0])
def test_algorithm_1_finds_the_largest_micro_batch(optimism: float) -> None:
    for largest in range(1, 140):
        found = explore(CurveDevice([0.1 * b for b in range(1, largest + 1)], optimism))
        assert found.largest == largest
        assert len(set(found.tried)) == len(found.tried) <= 2 * math.log2(largest) + 4
        assert found.points == {b: pytest.approx(0.1 * b) for b in found.tried if b <= largest}
        assert largest in found.points
    assert explore(CurveDevice([])).largest == 0


def test_the_paper_measures_few_points_and_plans_on_splines() -> None:
    """On a smooth curve Algorithm 2 gets the optimum from the points that Algorithm 1 measured."""
    fast = [0.2 + 0.05 * b for b in range(1, 61)]
    slow = [0.3 + 0.11 * b for b in range(1, 31)]
    devices = [Device(name="fast", step_seconds=fast)] * 2 + [
        Device(name="slow", step_seconds=slow)
    ] * 2
    for stage in (0, 2):
        data = PoplarData(zero_stage=stage, global_batch=512, comm_seconds=0.1, devices=devices)
        paper, best = (solve(family("poplar"), data, method) for method in ("paper", "exact"))
        passes = paper.details["passes"]
        assert isinstance(passes, int) and passes < 30
        assert paper.objective is not None and best.objective is not None
        assert best.objective <= paper.objective <= 1.05 * best.objective


def test_the_remainder_goes_where_equations_2_and_3_say() -> None:
    """Speeds 1 and 1/3, 10 samples: 7 and 2, then T = 7 and u = (0, 1/3), so the slow device takes
    the tenth."""
    devices = [
        Device(name="fast", step_seconds=[1.0 * b for b in range(1, 9)]),
        Device(name="slow", step_seconds=[3.0 * b for b in range(1, 9)]),
    ]
    data = PoplarData(zero_stage=1, global_batch=10, comm_seconds=0.0, devices=devices)
    plan = solve(family("poplar"), data, "paper").decision
    assert plan is not None and [share.samples for share in plan.devices] == [7, 3]


def test_the_sweep_takes_the_step_of_least_wall_time() -> None:
    """12 samples, C = 1: steps of 1 s take (1, 0), of 2 s (2, 1), of 4 s (4, 2): walls 24, 12, 10,
    last step full."""
    devices = [
        Device(name="fast", step_seconds=[1.0, 2.0, 3.0, 4.0]),
        Device(name="slow", step_seconds=[2.0, 4.0]),
    ]
    data = PoplarData(zero_stage=3, global_batch=12, comm_seconds=1.0, devices=devices)
    plan = solve(family("poplar"), data, "paper").decision
    assert plan is not None and plan.steps is not None
    rows = [step.micro_batches for step in plan.steps for _ in range(step.count)]
    assert rows == [[4, 2], [4, 2]]


def test_the_paper_tells_where_its_splines_dip() -> None:
    """Flat up to 4 samples, then twice as steep: told in the message, which every table shows, and
    in the details."""
    curve = [1.0 if b <= 4 else b / 2 for b in range(1, 9)]
    data = PoplarData(
        zero_stage=1,
        global_batch=20,
        comm_seconds=0.0,
        devices=[Device(name="kinked", step_seconds=curve)],
    )
    found = solve(family("poplar"), data, "paper")
    dipping = found.details["dips"]
    assert isinstance(dipping, list) and dipping
    assert found.message.startswith("spline of kinked: batch 3: 0.9577 s, below both neighbouring")
    smooth = data.model_copy(
        update={"devices": [Device(name="a", step_seconds=[1.0 * b for b in range(1, 9)])]}
    )
    assert solve(family("poplar"), smooth, "paper").message == ""
