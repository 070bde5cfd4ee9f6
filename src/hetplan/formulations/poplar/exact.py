"""The exact method (and `auto`). It takes milliseconds for any number of devices, and curves of any
shape.

ZeRO 0, 1. There are groups k of n_k equal devices, and G samples. A_k(T) = { g : h_k(g) <= T } are
the shares that a device takes within T seconds (h: `shares`). The method finds the least T for
which G is a sum of n_1 members of A_1(T), n_2 members of A_2(T), and so on. A_k(T) only grows with
T, so that G is also such a sum for every larger T, and a binary search over the values of h is
right for curves of any shape. Where curves fall, A_k(T) has holes, and `fill` decides whether there
is such a sum.

ZeRO 2, 3. A step of T seconds takes a sum of n_k loads { b : t_k(b) <= T } of each group, at most
M(T) samples, and costs T + C.
(1) V(n), the least cost of steps with sum M(T) >= n, is an unbounded knapsack. V(G) is a lower
    bound.
(2) In a plan that costs no more than U, a step of T seconds takes B samples only if
    T + C + V(G - B) <= U. `fill` gives the least under-utilisation of each such step. A knapsack
    over these steps gives the plan of exactly G samples of least time, and then of least
    under-utilisation.
(3) U begins at V(G), where monotone curves always have a plan, and grows until there is a plan.
Proof. Lowering each step of a plan to the least T with the same M(T) gives a cover, so that V(n) is
no more than the cost of a plan of n samples. The other steps of a plan take G - B samples and cost
V(G - B) or more, hence (2). All plans that cost no more than U have such steps only. Steps depend
on each other only by the sum of their samples, so that the second knapsack finds the best plan.

Ties. Of all plans of the least time the method takes the one of least under-utilisation (Poplar,
eq. 4), then the one with the fewest steps and the largest micro-batches. `tie_break` in the details
is `proven`, or says which part of this is not proven because it was too much work.
Source: hetplan, for Poplar eq. 1 to 4 and Algorithm 2.
"""

import bisect
from collections import Counter
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.fill import Pool, capacity, fill, least_losses
from hetplan.formulations.poplar.knapsack import knapsack
from hetplan.formulations.poplar.paper import largest_within, prior_result
from hetplan.formulations.poplar.problem import (
    NOTHING_FITS,
    ROUNDING,
    SAME_TIME,
    Floats,
    Ints,
    PoplarProblem,
    compile_problem,
)
from hetplan.formulations.poplar.shares import largest_shares, share_seconds
from hetplan.formulations.poplar.ties import pools_of, shares_within, steps_within
from hetplan.solvers.general import PriorResult
from hetplan.solvers.run import Outcome, Run, Stop

# Seconds that an attempt to fill a step counts towards the budget of a run.
FILL_SECONDS = 1e-3

# The values of U in (3), as multiples of V(G). The first ones are close together, because the work
# of (2) grows with U. The last one admits every plan.
BUDGETS = (1.0, 1.001, 1.01, 1.1, 1.5, np.inf)
TOO_LARGE = "global batch too large for tables: a simple plan, bounded by the peak speeds"


@dataclass(frozen=True)
class Effort:
    """The most additions of the method; about 1e9 take a second. Where more are needed, the outcome
    is a simple plan with the bound of peak speeds."""

    shares: float = 2e9  # the most additions for the tables of the seconds of shares
    steps: float = 2e9  # the most additions for one knapsack over steps


def solve(data: PoplarData, run: Run, effort: Effort = Effort()) -> Outcome[PoplarDecision]:
    """A decision of proven least time, ties broken towards the least under-utilisation."""
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    prior = prior_result(data, problem)
    search = solve_steps if problem.stepwise else solve_shares
    outcome = search(problem, prior, run, effort)
    if outcome is not None:
        return outcome
    return Outcome(stop=Stop.LIMIT, decision=prior.decision, bound=prior.bound, message=TOO_LARGE)


def solve_shares(
    problem: PoplarProblem, prior: PriorResult[PoplarDecision], run: Run, effort: Effort
) -> Outcome[PoplarDecision] | None:
    """The outcome for ZeRO 0 and 1; None where tables would be too large."""
    assert prior.objective is not None, "Algorithm 2 has a plan wherever a sample fits"
    latest = problem.computing_seconds(prior.objective)
    most = largest_shares(problem, latest)  # [groups] samples of a share
    additions = sum(g * group.largest for g, group in zip(most, problem.groups, strict=True))
    if additions > effort.shares:
        return None
    # [groups] h_k(0), ..., h_k(most)
    curves = [
        share_seconds(group.seconds, g) for g, group in zip(most, problem.groups, strict=True)
    ]
    earliest = problem.total / problem.speed * (1 - ROUNDING)
    times = np.unique(np.concatenate([*curves, [latest]]))
    times = times[(times >= earliest) & (times <= latest)]

    def pools_at(limit: float) -> list[Pool]:
        """[groups] the pools of shares that take at most `limit` seconds. All have equal worth,
        because only their sum matters here."""
        return [
            Pool.of(group.count, np.zeros(len(curve)), curve <= limit)
            for group, curve in zip(problem.groups, curves, strict=True)
        ]

    def enough(limit: float) -> bool:
        """Whether shares within `limit` seconds sum to G or more."""
        return capacity(pools_at(limit)) >= problem.total

    def reached(limit: float) -> bool:
        """Whether shares within `limit` seconds sum to exactly G."""
        run.check(FILL_SECONDS)
        return fill(pools_at(limit), problem.total) is not None

    # the last time is `latest`, within which there is a plan: it is not tested
    first = bisect.bisect_left(times, True, hi=len(times) - 1, key=enough)
    run.report(bound=times[first] + problem.comm)
    if not reached(times[first]):  # only where curves fall
        first = bisect.bisect_left(times, True, lo=first + 1, hi=len(times) - 1, key=reached)
    limit = float(times[first])
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=shares_within(problem, limit),
        bound=limit + problem.comm,
        details={"groups": len(curves), "times": len(times), "tie_break": "proven"},
    )


def step_sizes(problem: PoplarProblem, times: Floats) -> Ints:
    """[J] min(M(T), G), the most samples of a step of each time T. times: [J]."""
    most = np.zeros(len(times), np.int64)
    for group in problem.groups:
        most += group.count * largest_within(group.seconds[: problem.total + 1], times)
    return np.minimum(most, problem.total)


def solve_steps(
    problem: PoplarProblem, prior: PriorResult[PoplarDecision], run: Run, effort: Effort
) -> Outcome[PoplarDecision] | None:
    """The outcome for ZeRO 2 and 3; None where tables would be too large."""
    times = np.unique(np.concatenate([g.seconds[1 : problem.total + 1] for g in problem.groups]))
    sizes = step_sizes(problem, times)
    grows = np.diff(sizes, prepend=0) > 0
    if int(grows.sum()) * problem.total > effort.steps:
        return None
    cost = times[grows] + problem.comm
    no_waste = np.zeros(len(cost))
    # per step, at most an eighth of SAME_TIME of its cost, and so of the cost of the whole cover
    slack = (SAME_TIME * float(cost.min()) / 8, 0.0)
    cover, chosen = knapsack(  # V: (1)
        cost, no_waste, sizes[grows], problem.total, covering=True, slack=slack
    )
    bound = float(cover[-1])
    run.report(bound=bound)
    # seconds of a step -> number of steps, of the cover until a plan is found
    counts = Counter(times[grows][chosen].tolist())
    tie_break = "proven for these step times"
    for multiple in BUDGETS:  # (3)
        run.check(FILL_SECONDS)
        budget = multiple * bound
        steps = useful_steps(problem, (times, sizes), cover, budget, effort)  # (2)
        if steps is None:
            break
        seconds, waste, size = steps
        # Per step: a plan of eight times as many steps as the cover is still within SAME_TIME. In
        # these seconds all devices at their peaks waste `speed` samples per second.
        seconds_slack = SAME_TIME * bound / 8 / max(1, len(chosen))
        slack = (seconds_slack, seconds_slack * problem.speed)
        value, plan = knapsack(
            seconds + problem.comm, waste, size, problem.total, covering=False, slack=slack
        )
        if value[-1] <= budget * (1 + SAME_TIME):
            bound = float(value[-1])
            counts = Counter(seconds[plan].tolist())
            tie_break = "proven"
            break
    decision = steps_within(problem, counts)
    if decision is None:
        return Outcome(stop=Stop.LIMIT, decision=prior.decision, bound=bound, message=TOO_LARGE)
    return Outcome(
        stop=Stop.OPTIMAL,
        decision=decision,
        bound=bound,
        details={
            "groups": len(problem.groups),
            "different_steps": len(counts),
            "tie_break": tie_break,
        },
    )


def useful_steps(
    problem: PoplarProblem, steps: tuple[Floats, Ints], cover: Floats, budget: float, effort: Effort
) -> tuple[Floats, Floats, Ints] | None:
    """(seconds, least under-utilisation, samples) of every step that may be in a plan of cost
    `budget` by (2); None where that is too much work.

    steps: ([J] times T, [J] M(T)). cover: [G + 1] V. budget: U in seconds.
    """
    times, most = steps
    left = budget * (1 + SAME_TIME) - (times + problem.comm)
    # the most samples that the other steps of the plan can take (V ascends)
    rest = np.searchsorted(cover, left, side="right") - 1
    fewest = np.maximum(1, problem.total - rest)  # samples that the step itself has to take
    # the step takes most - width to most samples; where the width is negative, it is in no plan
    widths = np.where(rest >= 0, most - fewest, -1)
    if float((widths + 1).clip(min=0).sum()) * problem.total > effort.steps:
        return None
    columns = [
        sizes_of_step(problem, float(times[j]), int(most[j]), int(widths[j]))
        for j in np.flatnonzero(widths >= 0)
    ]
    seconds, wastes, sizes = zip(*columns, strict=True)  # not empty: it has the cover's steps
    return np.concatenate(seconds), np.concatenate(wastes), np.concatenate(sizes)


def sizes_of_step(
    problem: PoplarProblem, limit: float, most: int, width: int
) -> tuple[Floats, Floats, Ints]:
    """(seconds, least under-utilisation, samples) of every step of `limit` seconds that takes
    most - width to most samples."""
    pools = pools_of(problem, limit)
    beyond = capacity(pools) - most  # samples that would fit beyond `most`, where it is G
    losses = least_losses(pools, beyond + width)[beyond:]  # of taking 0, 1, … fewer than `most`
    busy = 0.0  # samples: busy time of the greatest loads at peak speed
    for pool, group in zip(pools, problem.groups, strict=True):
        busy += pool.copies * group.peak * float(group.seconds[pool.most])
    fewer = np.flatnonzero(np.isfinite(losses))
    # the samples of all devices at peak speed, less those of their busy time
    waste = problem.speed * limit - busy + losses[fewer]
    return np.full(len(fewer), limit), waste, most - fewer
