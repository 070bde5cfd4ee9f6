"""The order of the ranking and its winner, by time or by criteria of money; the Pareto front of
time and money."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.errors import InputError, require
from hetplan.planner.candidate import Candidate, joined
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import PASS_SCHEDULES, PassSchedule, Plan
from hetplan.profiling.workload import Workload
from hetplan.text import number_text


@dataclass(frozen=True)
class Criteria:
    """Criteria of the winner. By default the fastest plan that fits wins."""

    money_limit: float | None = None  # dollars per million tokens that the winner may cost at most
    # Percent by which the winner may be slower than the fastest plan; the cheapest such plan wins.
    cheapest_within: float | None = None
    # Whether plans on parts of the cluster are searched, too. Each of the other two implies it.
    on_parts: bool = False
    # Seconds that an iteration of the winner may take at most; the cheapest such plan wins.
    seconds_limit: float | None = None
    zero_levels: tuple[int, ...] = ()  # ZeRO levels that the winner may have; empty: all
    # Schedules that the winner may have where it has several stages; empty: all. `explicit` stands
    # for orders of passes of their own.
    schedules: tuple[PassSchedule, ...] = ()

    @property
    def levels_text(self) -> str:
        """The ZeRO levels that the winner may have, for people: `0 or 1`."""
        *first, last = map(str, self.zero_levels)
        return f"{', '.join(first)} or {last}" if first else last

    @property
    def wants_cheapest(self) -> bool:
        """Whether the cheapest plan within a limit of time wins, in place of the fastest one."""
        return self.cheapest_within is not None or self.seconds_limit is not None

    @property
    def wants_slower(self) -> bool:
        """Whether another plan than the fastest one may win."""
        return self.wants_parts or bool(self.zero_levels) or bool(self.schedules)

    @property
    def splits_backward(self) -> bool:
        """Whether the winner may have split backward passes, or an order of its own."""
        return not set(self.schedules or PASS_SCHEDULES) <= set(WHOLE_SCHEDULES)

    @property
    def wants_parts(self) -> bool:
        """Whether plans on parts of the cluster, which leave devices idle, are searched, too."""
        return self.on_parts or self.money_limit is not None or self.wants_cheapest

    def check(self, workload: Workload) -> None:
        """Raise InputError for a limit or a percentage out of range, and for criteria of money
        where the price of a device is unknown."""
        limit, percent = self.money_limit, self.cheapest_within
        require(
            limit is None or 0 < limit < math.inf,
            "money limit",
            where="--money-limit",
            got=limit,
            expected="dollars per million tokens greater than 0",
        )
        require(
            percent is None or 0 <= percent < math.inf,
            "percent that a cheaper plan may be slower",
            where="--cheapest-within",
            got=percent,
            expected="a number from 0 on",
        )
        require(
            set(self.zero_levels) <= {0, 1, 2, 3},
            "ZeRO levels",
            where="--zero",
            got=", ".join(map(str, self.zero_levels)),
            expected="numbers from 0 to 3",
        )
        for schedule in self.schedules:
            require(
                schedule in PASS_SCHEDULES,
                "unknown schedule",
                where="--schedules",
                got=schedule,
                expected=f"some of {', '.join(PASS_SCHEDULES)}",
            )
        seconds = self.seconds_limit
        require(
            seconds is None or 0 < seconds < math.inf,
            "seconds of an iteration",
            where="--seconds-limit",
            got=seconds,
            expected="seconds greater than 0",
        )
        if limit is None and not self.wants_cheapest:
            return
        cluster = workload.cluster
        unpriced = [name for name in cluster.types if cluster.specs[name].price_per_hour is None]
        if unpriced:
            wanted = "money limit" if limit is not None else "cheapest plan"
            raise InputError(
                f"{wanted}, but device {unpriced[0]!r} has no price",
                where=f"cluster {cluster.name}",
                expected="price_per_hour of every device",
            )

    def judged(self, candidate: Candidate, workload: Workload) -> tuple[Candidate, bool]:
        """The candidate, and whether it may win: it has a plan that fits and that exceeds no limit.
        The message of a candidate says that it exceeds one."""
        fits = candidate.plan is not None and candidate.fits_memory is True
        if candidate.plan is not None and self.zero_levels:
            level = candidate.plan.zero
            if level not in self.zero_levels:
                text = f"ZeRO {level} is not among the levels asked for ({self.levels_text})"
                return replace(candidate, message=joined(candidate.message, text)), False
        if candidate.plan is not None and not self.allows_schedule(candidate.plan):
            asked = ", ".join(self.schedules)
            text = f"{candidate.plan.schedule} is not among the schedules asked for ({asked})"
            return replace(candidate, message=joined(candidate.message, text)), False
        seconds = candidate.predicted_seconds
        if self.seconds_limit is not None and seconds is not None and seconds > self.seconds_limit:
            limit = number_text(self.seconds_limit, 4)
            text = f"takes {number_text(seconds, 4)} s, above the limit of {limit} s"
            return replace(candidate, message=joined(candidate.message, text)), False
        money = candidate.money_per_million_tokens(workload)
        if self.money_limit is None or money is None or money <= self.money_limit:
            return candidate, fits
        limit = number_text(self.money_limit, 4)
        text = f"costs {number_text(money, 4)} per million tokens, above the limit {limit}"
        return replace(candidate, message=joined(candidate.message, text)), False

    def allows_schedule(self, plan: Plan) -> bool:
        """Whether the winner may have the plan's schedule. Stages that wait for no other one are
        alike under all of them."""
        return not self.schedules or plan.in_step or plan.schedule in self.schedules


def pareto(candidates: Sequence[Candidate], workload: Workload) -> list[int]:
    """Indices of the candidates on the Pareto front of time and money, fastest first: those that
    fit, and that are cheaper than every faster one."""
    priced = []  # (seconds, money, index)
    for i, candidate in enumerate(candidates):
        seconds, money = candidate.predicted_seconds, candidate.money_per_million_tokens(workload)
        if candidate.fits_memory and seconds is not None and money is not None:
            priced.append((seconds, money, i))
    priced.sort()
    front: list[int] = []
    least_money: float | None = None
    for _, money, i in priced:
        if least_money is None or money < least_money:
            least_money = money
            front.append(i)
    return front


def winner_of(allowed: Sequence[Candidate], workload: Workload, criteria: Criteria) -> int | None:
    """Index of the winner in the ranking; None without a candidate that may win.

    allowed: the candidates that may win, fastest first; the ranking begins with them.
    """
    if not allowed:
        return None
    if not criteria.wants_cheapest:
        return 0
    # Without a percentage, the limit of seconds has left out the plans that are too slow.
    percent = math.inf if criteria.cheapest_within is None else criteria.cheapest_within
    most_seconds = (allowed[0].predicted_seconds or 0.0) * (1 + percent / 100)
    near = []
    for i in pareto(allowed, workload):
        if (allowed[i].predicted_seconds or 0.0) <= most_seconds:
            near.append(i)
    # The front is sorted by time, so that its last is cheapest. Without prices nothing is near, and
    # the fastest wins.
    return near[-1] if near else 0


def rank(candidate: Candidate, workload: Workload) -> tuple[float, ...]:
    """The key by which candidates are sorted: seconds per iteration, then the number of nodes with
    devices both in use and idle, then money. Unknown seconds and money come last."""
    seconds, money = candidate.predicted_seconds, candidate.money_per_million_tokens(workload)
    if seconds is None:
        seconds = math.inf
    if money is None:
        money = math.inf
    order = (seconds, 0) if candidate.plan is None else candidate.plan.order(seconds)
    return *order, money
