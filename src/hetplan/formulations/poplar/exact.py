"""The exact method (and `auto`): milliseconds whatever the number of devices, curves of any shape.

ZeRO 0, 1. Sets k groups of n_k equal devices; A_k(T) = { g : h_k(g) <= T } the shares that a device
takes within T seconds (h: `shares`). Find the least T for which G is a sum of n_1 members of
A_1(T), n_2 of A_2(T), ... A_k(T) only grows with T, so a binary search over the values of h is
right for any curve: every T above one that reaches G reaches G too. Where curves fall, A_k(T) has
holes, and the sum itself is searched for (`fill`).

ZeRO 2, 3. A step of T seconds takes any sum of n_k loads { b : t_k(b) <= T } of each group, at most
M(T) samples, and costs T + C.
(1) V(n), the least cost of steps with sum M(T) >= n, is an unbounded knapsack. V(G) is a bound.
(2) In a plan that costs no more than U, a step of T seconds takes B samples only if
    T + C + V(G - B) <= U. Of each such step the least under-utilisation is known (`fill`), and a
    knapsack over them hits G exactly, at the least time and then the least under-utilisation.
(3) U begins at V(G), where monotone curves always have a plan, and grows until there is one.
Why: lowering each step of a plan to the least T with the same M(T) gives a cover, so V(n) is no
more than a plan of n samples costs. The other steps of a plan take G - B samples at V(G - B) or
more, hence (2). All plans that cost no more than U are made of such steps, and steps are
independent but for the sum of their samples, so the second knapsack finds the best of them.

Ties. Of all plans of the least time the one of least under-utilisation (Poplar, eq. 4) is taken,
then the one with the fewest steps and the largest micro-batches. `tie_break` in the details says
`proven`, or what was too much work to settle.
Source: hetplan, for Poplar eq. 1 to 4 and Algorithm 2.
"""

import bisect
from collections import Counter
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.fill import Pool, capacity, fill, least_losses
from hetplan.formulations.poplar.knapsack import knapsack
from hetplan.formulations.poplar.paper import known_before, largest_within
from hetplan.formulations.poplar.problem import (
    NOTHING_FITS,
    SAME_TIME,
    Floats,
    Ints,
    PoplarProblem,
    compile_problem,
)
from hetplan.formulations.poplar.shares import largest_shares, share_seconds
from hetplan.formulations.poplar.ties import pools_of, shares_within, steps_within
from hetplan.solvers.general import Known
from hetplan.solvers.run import Outcome, Run, Stop

# U in (3), relative to V(G); the last one admits every plan.
BUDGETS = (1.0, 1.001, 1.01, 1.1, 1.5, np.inf)
TOO_LARGE = "global batch too large for tables: a simple plan, bounded by the peak speeds"


@dataclass(frozen=True)
class Effort:
    """Additions (about 1e9 a second) that are made at most; where more are needed, a simple plan
    stands, with its bound."""

    shares: float = 2e9  # for tables of the seconds of shares
    steps: float = 2e9  # for one knapsack over steps


def solve(data: PoplarData, run: Run, effort: Effort = Effort()) -> Outcome[PoplarDecision]:
    """A decision of proven least time, ties broken towards the least under-utilisation."""
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    known = known_before(data, problem)
    search = solve_steps if problem.stepwise else solve_shares
    outcome = search(problem, known, run, effort)
    if outcome is not None:
        return outcome
    return Outcome(stop=Stop.LIMIT, decision=known.decision, bound=known.bound, message=TOO_LARGE)


def solve_shares(
    problem: PoplarProblem, known: Known[PoplarDecision], run: Run, effort: Effort
) -> Outcome[PoplarDecision] | None:
    """ZeRO 0 and 1; None where tables would be too large."""
    latest = ((known.objective or 0.0) - problem.comm) * (1 + 1e-12)
    most = largest_shares(problem, latest)
    if sum(m * g.largest for m, g in zip(most, problem.groups, strict=True)) > effort.shares:
        return None
    curves = [share_seconds(g.seconds, m) for g, m in zip(problem.groups, most, strict=True)]
    earliest = problem.total / problem.speed * (1 - 1e-12)
    times = np.unique(np.concatenate([*curves, [latest]]))
    times = times[(times >= earliest) & (times <= latest)]

    def pools_at(limit: float) -> list[Pool]:
        """The admissible shares; all are worth the same here."""
        return [
            Pool.of(group.count, np.zeros(len(curve)), curve <= limit)
            for group, curve in zip(problem.groups, curves, strict=True)
        ]

    def enough(limit: float) -> bool:
        return capacity(pools_at(limit)) >= problem.total

    def reached(limit: float) -> bool:
        run.check()
        return fill(pools_at(limit), problem.total) is not None

    first = bisect.bisect_left(times, True, hi=len(times) - 1, key=enough)
    run.report(bound=times[first] + problem.comm)
    if not reached(times[first]):  # mostly it is
        first = bisect.bisect_left(times, True, lo=first + 1, hi=len(times) - 1, key=reached)
    limit = float(times[first])
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=shares_within(problem, limit),
        bound=limit + problem.comm,
        details={"groups": len(curves), "times": len(times), "tie_break": "proven"},
    )


def step_sizes(problem: PoplarProblem, times: Floats) -> Ints:
    """[J] min(M(T), G), the most samples of a step of each time."""
    most = np.zeros(len(times), np.int64)
    for group in problem.groups:
        most += group.count * largest_within(group.seconds[: problem.total + 1], times)
    return np.minimum(most, problem.total)


def solve_steps(
    problem: PoplarProblem, known: Known[PoplarDecision], run: Run, effort: Effort
) -> Outcome[PoplarDecision] | None:
    """ZeRO 2 and 3; None where tables would be too large."""
    times = np.unique(np.concatenate([g.seconds[1 : problem.total + 1] for g in problem.groups]))
    sizes = step_sizes(problem, times)
    grows = np.diff(sizes, prepend=0) > 0
    if int(grows.sum()) * problem.total > effort.steps:
        return None
    cost = times[grows] + problem.comm
    slack = (SAME_TIME * float(cost.min()) / 8, 0.0)
    cover, chosen = knapsack(cost, np.zeros(len(cost)), sizes[grows], problem.total, True, slack)
    bound = float(cover[-1])
    run.report(bound=bound)
    counts = Counter(times[grows][chosen].tolist())
    tie = "proven for these step times"
    for budget in BUDGETS:
        run.check()
        steps = useful_steps(problem, (times, sizes), cover, budget * bound, effort)
        if steps is None:
            break
        seconds, waste, size = steps
        each = SAME_TIME * bound / 8 / max(1, len(chosen))
        slack = (each, each * problem.speed)
        value, plan = knapsack(seconds + problem.comm, waste, size, problem.total, False, slack)
        if value[-1] <= budget * bound * (1 + SAME_TIME):
            bound, counts, tie = float(value[-1]), Counter(seconds[plan].tolist()), "proven"
            break
    decision = steps_within(problem, counts)
    if decision is None:
        return Outcome(stop=Stop.LIMIT, decision=known.decision, bound=bound, message=TOO_LARGE)
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=decision,
        bound=bound,
        details={
            "groups": len(problem.groups),
            "different_steps": len(counts),
            "tie_break": tie,
        },
    )


def useful_steps(
    problem: PoplarProblem, steps: tuple[Floats, Ints], cover: Floats, budget: float, effort: Effort
) -> tuple[Floats, Floats, Ints] | None:
    """(2): seconds, least under-utilisation and size of every step that may be in a plan of cost
    `budget`; None where that is too much work.

    steps: times T [J] and M(T) [J]; cover [G + 1]: V.
    """
    times, most = steps
    left = budget * (1 + SAME_TIME) - (times + problem.comm)
    rest = np.searchsorted(cover, left, side="right") - 1  # samples for `left`, as V ascends
    fewest = np.maximum(1, problem.total - rest)  # samples that the step itself has to take
    widths = np.where(rest >= 0, most - fewest, -1)  # below 0: no size will do
    if float((widths + 1).clip(min=0).sum()) * problem.total > effort.steps:
        return None
    columns = [
        sizes_of_step(problem, float(times[j]), int(most[j]), int(widths[j]))
        for j in np.flatnonzero(widths >= 0)
    ]
    seconds, wastes, sizes = zip(*columns, strict=True)
    return np.concatenate(seconds), np.concatenate(wastes), np.concatenate(sizes)


def sizes_of_step(
    problem: PoplarProblem, limit: float, most: int, width: int
) -> tuple[Floats, Floats, Ints]:
    """Seconds, least under-utilisation and size of every step of `limit` seconds that takes
    most - width..most samples."""
    pools = pools_of(problem, limit)
    beyond = capacity(pools) - most  # more than G samples would fit
    losses = least_losses(pools, beyond + width)[beyond:]  # of taking `most` less 0, 1, …
    busy = 0.0  # worth of the greatest loads
    for pool, group in zip(pools, problem.groups, strict=True):
        busy += pool.copies * group.peak * float(group.seconds[pool.most])
    fewer = np.flatnonzero(np.isfinite(losses))
    waste = problem.speed * limit - busy + losses[fewer]
    return np.full(len(fewer), limit), waste, most - fewer
