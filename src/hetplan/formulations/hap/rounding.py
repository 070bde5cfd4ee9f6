"""From ratios to whole numbers: how many rows of a dimension each device gets, and what that costs.

Source: HAP, Section 5.1: the nearest whole numbers, then one up or down at the shard where it adds
least to the rounding error until they sum to the length. `best_lengths` is hetplan's: the optimal
whole numbers instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.problem import compile_problem, infeasible_because
from hetplan.solvers.linear_model import SMALLEST, LinearModel
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run


@dataclass(frozen=True)
class Rounded:
    """lengths [g][m], each row summing to the length; seconds: the program's time at lengths /
    length, on the instance; loss: relative to the time at the ratios asked for (None when that is
    0); bound: of the best whole numbers, in seconds, where they were optimised; fits: whether every
    device has memory for its rows."""

    lengths: list[list[int]]
    seconds: float
    loss: float | None
    bound: float | None = None
    fits: bool = True


def shard_lengths(ratios: Sequence[float], length: int) -> list[int]:
    """Whole numbers near length * ratios [m] that sum to `length`. Raises InputError for a length
    below 1."""
    if length < 1:
        raise InputError("length of a dimension", got=length, expected="at least 1")
    wanted = np.array(ratios, dtype=float) * length
    lengths = np.maximum(np.rint(wanted), 0).astype(np.int64)
    while (off := length - int(lengths.sum())) != 0:
        step = 1 if off > 0 else -1
        worse = np.abs(lengths + step - wanted) - np.abs(lengths - wanted)
        if step < 0:
            worse[lengths == 0] = np.inf
        lengths[int(np.argmin(worse))] += step
    return [int(x) for x in lengths]


def round_ratios(data: HapData, decision: HapDecision, length: int) -> Rounded:
    """The paper's rounding of every segment's ratios to a dimension of that length, and its
    loss."""
    return _priced(data, decision, [shard_lengths(row, length) for row in decision.ratios], length)


def _priced(
    data: HapData,
    decision: HapDecision,
    lengths: list[list[int]],
    length: int,
    bound: float | None = None,
) -> Rounded:
    problem = compile_problem(data)
    stages = problem.stages(decision.program)
    speeds = np.array([device.flops_per_second for device in data.devices])

    def seconds(ratios: np.ndarray) -> float:
        busy = (stages.F[:, None] + stages.S @ ratios) / speeds
        return float(stages.constant + stages.comm @ ratios.max(axis=1) + busy.max(axis=1).sum())

    shares = np.array(lengths) / length
    fits = True
    if problem.capacity is not None and stages.shared_bytes is not None:
        room = problem.capacity[problem.kind]
        fits = bool((stages.fixed_bytes + stages.shared_bytes @ shares <= room).all())
    before, after = seconds(np.array(decision.ratios)), seconds(shares)
    return Rounded(lengths, after, after / before - 1 if before > 0 else None, bound, fits)


def best_lengths(
    data: HapData, decision: HapDecision, length: int, run: Run | None = None
) -> Rounded:
    """The whole numbers that minimise the program's time, by HiGHS; keeps the rounding when time
    runs out.

    Lengths of equal devices are ordered, which loses nothing. Where no whole numbers fit in memory,
    the rounding is told with `fits` false. Raises InputError where the program is none.
    """
    from hetplan.solvers import highs

    run = run or Run()
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        raise InputError(reason)
    rounded = round_ratios(data, decision, length)
    if rounded.seconds <= 0 and rounded.fits:
        return replace(rounded, bound=0.0)
    stages, m = problem.stages(decision.program), len(data.devices)
    unit = highs.objective_unit(rounded.seconds) if rounded.seconds > 0 else 1.0
    model = LinearModel("hap-lengths")
    model.constant = stages.constant * unit
    size = model.integer("length", (data.segments, m), 0, length)
    top = model.continuous("top", data.segments)
    T = model.continuous("stage", len(stages.F))
    model.minimize(T, 1.0)
    model.minimize(
        top, np.where(stages.comm * unit / length < SMALLEST, 0.0, stages.comm * unit / length)
    )
    for k in range(data.segments):
        model.equal("whole", size[k], to=float(length))
        for j in range(m):
            model.row("largest", [top[k], size[k, j]], [1.0, -1.0], lower=0.0)
    for j, device in enumerate(data.devices):
        for s in range(len(stages.F)):
            work = stages.S[s] * (unit / device.flops_per_second / length)
            values = np.append(1.0, -np.where(work < SMALLEST, 0.0, work))
            fixed = float(stages.F[s] * unit / device.flops_per_second)
            model.row("stage", np.append(T[s], size[:, j]), values, lower=fixed)
    if data.segments == 1:
        for d in range(problem.K):
            members = np.flatnonzero(problem.kind == d)
            for here, after in pairwise(members):
                model.row("order", [size[0, here], size[0, after]], [1.0, -1.0], lower=0.0)
    if problem.capacity is not None and stages.shared_bytes is not None:
        for j, room in enumerate(problem.capacity[problem.kind] - stages.fixed_bytes):
            scale = max(float(stages.shared_bytes.max()), abs(float(room)), 1e-300)
            parts = stages.shared_bytes / scale / length
            parts = np.where(parts < SMALLEST, 0.0, parts)
            model.row("memory", size[:, j], parts, upper=float(room) / scale)
    answer = highs.solve(model, run, Scale(per_unit=unit), report=lambda i, b: None)
    assert answer.stop is not Stop.INFEASIBLE or problem.capacity is not None, "whole numbers exist"
    if answer.x is None:
        return replace(rounded, bound=answer.bound)
    lengths = [[round(x) for x in row] for row in answer.values(size)]
    found = _priced(data, decision, lengths, length, answer.bound)
    if rounded.fits and (found.seconds > rounded.seconds or not found.fits):
        return replace(rounded, bound=answer.bound)
    return found
