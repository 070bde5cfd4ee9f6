"""What the general models know before they are built: a fluid bound and a simple plan.

Bound   G / (sum of peak speeds) and C for each step that is needed at least (one for ZeRO 0 and 1):
        no device is ever faster than its peak p_k = max_b b / t_k(b).
Plan    ZeRO 0, 1: shares by peak speed, rounded either way. ZeRO 2, 3: one group alone, its best
        micro-batches, then single samples.
Source: hetplan, for Poplar eq. 1 (AAAI 2025).
"""

from __future__ import annotations

from collections import Counter

from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.decode import shares_decision, steps_decision
from hetplan.formulations.poplar.levels import TOO_LARGE, alone
from hetplan.formulations.poplar.problem import PoplarProblem
from hetplan.formulations.poplar.share_times import fastest
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.whole import Known

# Bounds are computed in another order than the evaluator's sums.
ROUNDING = 1e-12


def known_before(problem: PoplarProblem) -> Known[PoplarDecision]:
    """Bound and plan of a problem in which something fits."""
    decision, seconds = (
        steps_of_one_group(problem) if problem.stepwise else shares_by_speed(problem)
    )
    return Known(bound=fluid_seconds(problem), decision=decision, objective=seconds)


def too_large(problem: PoplarProblem, solver: str, seconds: float) -> Outcome[PoplarDecision]:
    """The outcome of a general method that builds no model because it would be too large."""
    known = known_before(problem)
    return Outcome(
        stop=Stop.LIMIT,
        decision=known.decision,
        bound=known.bound,
        build_seconds=seconds,
        solver=solver,
        message=TOO_LARGE,
    )


def fluid_seconds(problem: PoplarProblem) -> float:
    """What every plan takes at least, seconds."""
    fullest = sum(group.count * group.largest for group in problem.groups)
    steps = -(-problem.total // fullest) if problem.stepwise else 1
    return (problem.total / problem.speed + steps * problem.comm) * (1 - ROUNDING)


def shares_by_speed(problem: PoplarProblem) -> tuple[PoplarDecision, float]:
    """ZeRO 0, 1: every device's share of G by its peak speed, rounded down or up; and its
    seconds."""
    ideal = problem.total / problem.speed
    rows = [Counter({int(ideal * group.peak): group.count}) for group in problem.groups]
    missing = problem.total - sum(l * n for row in rows for l, n in row.items())
    for group, row in zip(problem.groups, rows, strict=True):
        (share,) = row
        moved = max(
            -group.count, min(group.count, missing)
        )  # below 0 only where a product rounds up to a whole
        if moved:
            row[share + (1 if moved > 0 else -1)] = abs(moved)
            row[share] -= abs(moved)
            missing -= moved
    rows = [+row for row in rows]
    seconds = max(
        fastest(g, l)[0] for g, row in zip(problem.groups, rows, strict=True) for l in row
    )
    decision = shares_decision(problem, rows, lambda k, l: fastest(problem.groups[k], l)[1])
    return decision, seconds + problem.comm


def steps_of_one_group(problem: PoplarProblem) -> tuple[PoplarDecision, float]:
    """ZeRO 2, 3: the group that is fastest on its own; and its seconds."""
    seconds, k = min((alone(problem, group)[0], k) for k, group in enumerate(problem.groups))
    _, batch, full, rest = alone(problem, problem.groups[k])
    count = problem.groups[k].count
    singles = -(-rest // count)
    plan = [
        (full, Counter({batch: full * count})),
        (singles, Counter({1: rest, 0: singles * count - rest})),
    ]
    rows = [
        (
            steps,
            [
                +row if at == k else Counter({0: steps * g.count})
                for at, g in enumerate(problem.groups)
            ],
        )
        for steps, row in plan
        if steps
    ]
    return steps_decision(problem, rows), seconds
