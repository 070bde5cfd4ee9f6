"""Tiny random Poplar instances and a brute-force oracle that shares nothing with the solvers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

from hetplan.formulations.poplar.data import Device, PoplarData


def curve(rng: random.Random, largest: int, shape: str) -> list[float]:
    """t(1..largest): `convex` (flat, then linear), `tiles` (steps), `wild` (any), `integers` (many
    ties)."""
    if shape == "convex":
        flat, slope = rng.uniform(0.5, 4.0), rng.uniform(0.3, 2.0)
        return [max(flat, slope * b) + 0.01 * b for b in range(1, largest + 1)]
    if shape == "tiles":
        tile, cost = rng.randint(2, 3), rng.uniform(0.5, 2.0)
        return [-(-b // tile) * cost + (0.7 if b % tile else 0.0) for b in range(1, largest + 1)]
    if shape == "integers":
        return [float(rng.randint(1, 4)) for _ in range(largest)]
    return [rng.uniform(0.2, 3.0) for _ in range(largest)]


def instance(seed: int, stage: int | None = None) -> PoplarData:
    """Up to 4 devices of 2 types, up to 9 samples; some devices or instances hold nothing."""
    rng = random.Random(seed)
    types = []
    for name in ("x", "y"):
        largest = rng.choice([0, 1, 2, 3, 4, 5]) if rng.random() < 0.9 else 0
        shape = rng.choice(["convex", "tiles", "wild", "wild", "integers"])
        types.append(Device(name=name, step_seconds=curve(rng, largest, shape)))
    devices = [rng.choice(types) for _ in range(rng.randint(1, 4))]
    return PoplarData(
        zero_stage=rng.randint(0, 3) if stage is None else stage,
        global_batch=rng.randint(1, 9),
        comm_seconds=rng.choice([0.0, 0.1, 1.0, 3.0]),
        devices=devices,
    )


def oracle(data: PoplarData) -> tuple[float, float] | None:
    """Least time and, of that time, least under-utilisation, by enumeration; None: infeasible."""
    return _steps_oracle(data) if data.zero_stage >= 2 else _shares_oracle(data)


def _peak(times: list[float]) -> float:
    return max((b / t for b, t in enumerate(times, 1)), default=0.0)


def _allocations(limits: list[int], total: int) -> Iterator[tuple[int, ...]]:
    for row in product(*(range(limit + 1) for limit in limits[1:])):
        first = total - sum(row)
        if 0 <= first <= limits[0]:
            yield (first, *row)


def _shares_oracle(data: PoplarData) -> tuple[float, float] | None:
    """Shares and micro-batches both vary: at the least time a device may run slower than it
    could."""
    curves = [device.step_seconds for device in data.devices]
    peaks, batch = [_peak(curve) for curve in curves], data.global_batch

    def seconds(times: list[float], samples: int, micro_batch: int) -> float:
        left, spent = samples, 0.0
        while left:
            piece = min(micro_batch, left)
            spent += times[piece - 1]
            left -= piece
        return spent

    tables = [  # per device and share the seconds of every micro-batch
        [[0.0]]
        + [[seconds(c, g, b) for b in range(1, len(c) + 1)] for g in range(1, batch + 1) if c]
        for c in curves
    ]
    rows = list(_allocations([len(table) - 1 for table in tables], batch))
    if not rows:
        return None
    least = min(max(min(table[g]) for table, g in zip(tables, row, strict=True)) for row in rows)
    within = least * (1 + 1e-9)
    wastes = []
    for row in rows:
        options = [
            [w for w in table[g] if w <= within] for table, g in zip(tables, row, strict=True)
        ]
        if all(options):
            wastes.append(sum((least - max(o)) * p for o, p in zip(options, peaks, strict=True)))
    return least + data.comm_seconds, min(wastes)


def _lexicographic(found: list[tuple[float, float]], extra: float) -> tuple[float, float] | None:
    if not found:
        return None
    least = min(time for time, _ in found)
    return least + extra, min(waste for time, waste in found if time <= least * (1 + 1e-9) + 1e-12)


def _steps_oracle(data: PoplarData) -> tuple[float, float] | None:
    curves = [device.step_seconds for device in data.devices]
    steps: dict[int, list[tuple[float, float]]] = {}
    for row in product(*(range(len(c) + 1) for c in curves)):
        if 1 <= sum(row) <= data.global_batch:
            busy = [c[b - 1] if b else 0.0 for c, b in zip(curves, row, strict=True)]
            top = max(busy)
            waste = sum((top - b) * _peak(c) for b, c in zip(busy, curves, strict=True))
            steps.setdefault(sum(row), []).append((top + data.comm_seconds, waste))
    # dominated allocations can be left out: both terms add up over steps
    for options in steps.values():
        options.sort()
        kept: list[tuple[float, float]] = []
        for option in options:
            if not kept or option[1] < kept[-1][1]:
                kept.append(option)
        options[:] = kept

    @cache
    def best(left: int, cap: int) -> tuple[tuple[float, float], ...]:
        """Undominated (time, waste) of plans for `left` samples in steps of at most `cap`."""
        if left == 0:
            return ((0.0, 0.0),)
        if cap == 0:
            return ()
        found = list(best(left, cap - 1))
        for time, waste in steps.get(cap, []) if cap <= left else []:
            found += [(time + t, waste + w) for t, w in best(left - cap, cap)]
        found.sort()
        kept: list[tuple[float, float]] = []
        for option in found:
            if not kept or option[1] < kept[-1][1]:
                kept.append(option)
        return tuple(kept)

    return _lexicographic(list(best(data.global_batch, data.global_batch)), 0.0)
