"""Poplar's Algorithms 1 and 2 as the paper prints them (with eq. 2 and 3 where line 9 misprints
them), written again in plain Python on curves whose splines scipy lays. Nothing is shared with the
package but the data classes."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from scipy.interpolate import CubicSpline

from hetplan.formulations import family
from hetplan.formulations.poplar.curves import CurveDevice
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.profiling.profiles.largest_batch import explore
from hetplan.solvers.registry import solve
from present import present


@pytest.mark.parametrize(
    ("largest", "tried"),
    [
        # at most 16 by the estimate; 16 fails, then the middles of 8 to 15, 12 to 15, 12 to 13
        (13, (1, 2, 4, 8, 16, 12, 14, 13)),
        (4, (1, 2, 4, 5)),
        (3, (1, 2, 3)),
        (1, (1,)),
    ],
)
def test_algorithm_1_by_hand(largest: int, tried: tuple[int, ...]) -> None:
    """Doubling, then binary search, the estimate a quarter too high; every pass that fits is
    kept."""
    aware = explore(CurveDevice([0.5 + 0.1 * b for b in range(1, largest + 1)]))
    assert (aware.largest, aware.tried) == (largest, tried)
    assert sorted(aware.points) == sorted(b for b in tried if b <= largest)


def instance(seed: int, stage: int) -> PoplarData:
    """Two to five devices of up to three types, whose curves are flat at first."""
    draw, types = Random(seed), []
    for name in "xyz":
        flat, slope = draw.uniform(0.5, 2.0), draw.uniform(0.2, 1.0)
        most = draw.randint(2, 14)
        seconds = [max(flat, slope * b) + draw.uniform(0.01, 0.05) * b for b in range(1, most + 1)]
        types.append(Device(name=name, step_seconds=seconds))
    devices = sorted(draw.choices(types, k=draw.randint(2, 5)), key=lambda d: d.name)
    batch, comm = draw.randint(9, 90), draw.choice([0.0, 0.3, 2.0])
    return PoplarData(zero_stage=stage, global_batch=batch, comm_seconds=comm, devices=devices)


def splines(data: PoplarData) -> list[list[float]]:
    """t(0 .. mbs) of each device: the speeds that Algorithm 1 measures, and a natural cubic spline
    between them."""
    curves = []
    for device in data.devices:
        measured = [0.0, *device.step_seconds]
        most, estimate = len(device.step_seconds), int(1.25 * len(device.step_seconds))
        low, b, points, high = 0, 1, list[int](), estimate
        while b <= high:
            if b > most:
                high = b - 1
                break
            points.append(b)
            low, b = b, 2 * b
        while low < high:
            middle = (low + high + 1) // 2
            if middle <= most:
                points.append(middle)
                low = middle
            else:
                high = middle - 1
        points.sort()
        speed = CubicSpline(points, [b / measured[b] for b in points], bc_type="natural")
        at = range(1, most + 1)
        curves.append([0.0, *(measured[b] if b in points else b / float(speed(b)) for b in at)])
    return curves


def share_seconds(curve: list[float], g: int) -> tuple[float, int]:
    """Time and micro-batch of g samples: of the peak range (2 % below the best speed) the fastest,
    of equally fast ones the largest; one micro-batch below that range."""
    best = max(b / curve[b] for b in range(1, len(curve)))
    peak = [b for b in range(1, len(curve)) if b / curve[b] >= 0.98 * best and b <= g]
    ways = [(g // b * curve[b] + curve[g % b], b) for b in peak or [min(g, len(curve) - 1)]]
    least = min(t for t, _ in ways)
    return max((w for w in ways if w[0] <= least * (1 + 1e-9)), key=lambda w: w[1])


@pytest.mark.parametrize("seed", range(40))
def test_lines_1_to_16(seed: int) -> None:
    """Floors in proportion to the speeds; each sample left goes where (T - t_i) speed_i is
    greatest."""
    data = instance(seed, seed % 2)
    curves = splines(data)
    speed = [max(b / curve[b] for b in range(1, len(curve))) for curve in curves]
    loads = [math.floor(data.global_batch * v / sum(speed) + 1e-9) for v in speed]
    while sum(loads) < data.global_batch:
        times = [share_seconds(c, g)[0] if g else 0.0 for c, g in zip(curves, loads, strict=True)]
        waste = [(max(times) - t) * v for t, v in zip(times, speed, strict=True)]
        loads[waste.index(max(waste))] += 1
    expected = Counter(
        (device.name, g, share_seconds(curve, g)[1] if g else 0)
        for device, g, curve in zip(data.devices, loads, curves, strict=True)
    )
    decision = present(solve(family("poplar"), data, "paper").decision)
    shares = zip(data.devices, decision.devices, strict=True)
    assert expected == Counter(
        (device.name, share.samples, share.micro_batch if share.samples else 0)
        for device, share in shares
    )


@pytest.mark.parametrize("seed", range(40))
def test_lines_17_to_29(seed: int) -> None:
    """For every time t the largest batches of at most t; the least (t + C) gas; a smaller last
    step, of the least t that takes it, less a sample of one device after the other."""
    data = instance(seed, 2 + seed % 2)
    curves = splines(data)
    rows = []
    for t in sorted({t for curve in curves for t in curve[1:]}):
        batches = [max(b for b in range(len(c)) if b == 0 or c[b] <= t) for c in curves]
        gas = math.ceil(data.global_batch / sum(batches))
        rows.append(((t + data.comm_seconds) * gas, t, gas, batches))
    _, _, gas, batches = min(rows)
    rest = data.global_batch - (gas - 1) * sum(batches)
    last = list(next(row for *_, row in rows if sum(row) >= rest))
    while sum(last) > rest:
        for i, b in enumerate(last):
            last[i] -= b > 0 and sum(last) > rest
    decision = present(solve(family("poplar"), data, "paper").decision)
    steps = [(step.count, step.micro_batches) for step in decision.steps]
    printed = [(1, last)] if gas == 1 else [(gas - 1, batches), (1, last)]
    if len(printed) > len(steps):  # an equal last step is grouped with the others
        assert printed.pop()[1] == batches
        printed = [(gas, batches)]
    names = [device.name for device in data.devices]

    def by_name(plan: list[tuple[int, list[int]]]) -> list[tuple[int, Counter[tuple[str, int]]]]:
        return [(n, Counter(zip(names, row, strict=True))) for n, row in plan]

    assert by_name(steps) == by_name(printed)
