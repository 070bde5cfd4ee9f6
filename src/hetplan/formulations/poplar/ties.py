"""Poplar's eq. 4 for the general solvers: among plans of the least time that they proved, the least
under-utilisation.

The counting model of `levels` is solved a second time. With T the least time found (without the one
C of ZeRO 0, 1):
(4) sum_j (v_j - v_(j-1) + [j = 1] C) s_j <= T            ZeRO 2, 3
    s_j = 0 for v_j > T                                   ZeRO 0, 1, whose single step lasts T
min  sum_k n_k p_k (time of all steps) - sum_k,l p_k u_k(l) y[k, l]       in samples
u_k(l) = t_k(l) for a micro-batch (ZeRO 2, 3); the longest time within T that some micro-batch takes
for a share l
(ZeRO 0, 1), so that the tie is broken over micro-batches too.
A decision counts only if its own price, from the curves, is no longer than the first one's: what
rounding of times lets through is dropped.
Source: Poplar (AAAI 2025), eq. 2 to 4.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.kernels import SAME_TIME, busiest
from hetplan.formulations.poplar.levels import Levels, decode
from hetplan.formulations.poplar.problem import Floats, Ints, PoplarProblem
from hetplan.solvers.result import OPTIMAL_GAP, Outcome, Stop
from hetplan.solvers.run import Run, Stopped

# Plans whose times differ by less tie: their terms are added in another order.
SAME = SAME_TIME

# What a solver ends with that finds no better plan within its tolerances, though its bound is
# lower.
UNPROVEN = "times differ too much for this solver's tolerances: the method exact has none"

Counts = tuple[Sequence[Counter[int]], Sequence[int]]  # {load: devices} per group, and s


@dataclass(frozen=True)
class Tie:
    """The second objective at a least time `seconds`: coefficients of y[k][l - 1] and of s_j, and a
    constant.

    batch[k][l]: the micro-batch behind a share (ZeRO 0, 1). total: what all devices could do in
    that time at peak speed, in samples; no under-utilisation is more.
    """

    seconds: float
    y: tuple[Floats, ...]
    s: Floats
    constant: float
    total: float
    batch: tuple[Ints, ...] = ()


def tie_of(levels: Levels, seconds: float) -> Tie:
    """Coefficients for plans of `seconds` (without the one C of ZeRO 0, 1)."""
    problem = levels.problem
    total = problem.speed * seconds
    if problem.stepwise:
        rows = tuple(
            -group.peak * row for group, row in zip(problem.groups, levels.seconds, strict=True)
        )
        rises = np.diff(levels.times, prepend=0.0) * problem.speed
        return Tie(seconds, rows, rises, 0.0, total)
    tables = [
        busiest(group.seconds, len(row), seconds)
        for group, row in zip(problem.groups, levels.seconds, strict=True)
    ]
    longest = [
        np.where(np.isfinite(table[1:]), table[1:], 0.0) for table, _ in tables
    ]  # (4) forbids the others
    rows = tuple(-group.peak * row for group, row in zip(problem.groups, longest, strict=True))
    return Tie(
        seconds,
        rows,
        np.zeros(len(levels.times)),
        total,
        total,
        tuple(batch for _, batch in tables),
    )


def settle(
    levels: Levels,
    outcome: Outcome[PoplarDecision],
    run: Run,
    ask: Callable[[Tie], tuple[Stop, Counts | None]],
) -> Outcome[PoplarDecision]:
    """The outcome with its tie broken by a second solve, as far as the run's time allows; `details`
    says how far.

    ask: minimises the second objective; why it ended, and what it found.
    """
    if outcome.stop is not Stop.OPTIMAL or outcome.decision is None:
        return outcome
    begun = time.perf_counter()
    seconds, waste = price(levels.problem, outcome.decision)
    total = seconds + levels.offset
    if outcome.bound is None or total - outcome.bound > OPTIMAL_GAP * total:
        return replace(
            outcome,
            message=outcome.message or UNPROVEN,
            details={**outcome.details, "tie_break": "not settled: the least time is not proven"},
        )
    try:
        tie = tie_of(levels, seconds)
        stop, counts = ask(tie)
    except Stopped:
        stop, counts = Stop.LIMIT, None
    decision, told = outcome.decision, "not settled: out of time"
    if counts is not None:
        other = decode(levels, *counts, batch=tie.batch)
        again, less = price(levels.problem, other)
        if again > seconds * (1 + SAME):
            told = "not settled: times too close for this solver"
        else:
            decision = other if less <= waste + SAME * tie.total else decision
            told = "proven" if stop is Stop.OPTIMAL else "improved within the time limit"
    return replace(
        outcome,
        decision=decision,
        solve_seconds=outcome.solve_seconds + time.perf_counter() - begun,
        details={**outcome.details, "tie_break": told},
    )


def price(problem: PoplarProblem, decision: PoplarDecision) -> tuple[float, float]:
    """Seconds (without the one C of ZeRO 0, 1) and under-utilisation in samples, from the
    curves."""
    if decision.steps is not None:
        steps = [
            (step.count, [step.micro_batches[i] for group in problem.groups for i in group.members])
            for step in decision.steps
        ]
        curves = [group for group in problem.groups for _ in group.members]
        seconds = waste = 0.0
        for count, row in steps:
            busy = np.array([float(g.seconds[b]) for g, b in zip(curves, row, strict=True)])
            slowest = float(busy.max())
            seconds += count * (slowest + problem.comm)
            waste += count * float(((slowest - busy) * [g.peak for g in curves]).sum())
        return seconds, waste
    assert decision.devices is not None, "a decision has devices or steps"
    work = []
    for group in problem.groups:
        for share in (decision.devices[i] for i in group.members):
            full, last = divmod(share.samples, share.micro_batch or 1)
            busy_seconds = full * float(group.seconds[share.micro_batch if full else 0])
            work.append(
                (busy_seconds + float(group.seconds[last if share.micro_batch else 0]), group.peak)
            )
    longest = max(busy for busy, _ in work)
    return longest, sum((longest - busy) * peak for busy, peak in work)
