"""The winner among candidates: criteria beside time, the order of the ranking, and the front of
time and money."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.errors import InputError, require
from hetplan.planner.candidate import Candidate, joined
from hetplan.profiling.workload import Workload
from hetplan.text import number_text


@dataclass(frozen=True)
class Criteria:
    """Criteria of the winner beside time: the fastest plan that fits wins unless these say
    otherwise."""

    money_limit: float | None = None  # dollars per million tokens that no winner exceeds
    # Percent: not the fastest wins but the cheapest that is at most so much slower.
    cheapest_within: float | None = None
    on_parts: bool = False  # plan on every part of the cluster, too; the other two imply it

    @property
    def wants_parts(self) -> bool:
        """Whether plans that leave devices idle are looked for, on parts of the cluster."""
        return self.on_parts or self.money_limit is not None or self.cheapest_within is not None

    def check(self, workload: Workload) -> None:
        """Raise InputError for what is no amount or no share, and where a price is unknown."""
        limit, percent = self.money_limit, self.cheapest_within
        require(
            limit is None or 0 < limit < math.inf,
            "money limit",
            got=limit,
            expected="dollars per million tokens greater than 0",
        )
        require(
            percent is None or 0 <= percent < math.inf,
            "percent that a cheaper plan may be slower",
            got=percent,
            expected="a number from 0 on",
        )
        cluster, what = workload.cluster, "money limit" if limit is not None else "cheapest plan"
        unpriced = [k for k in cluster.types if cluster.specs[k].price_per_hour is None]
        if unpriced and (limit is not None or percent is not None):
            raise InputError(
                f"{what}, but device {unpriced[0]!r} has no price",
                where=f"cluster {cluster.name}",
                expected="price_per_hour of every device",
            )

    def judged(self, candidate: Candidate, workload: Workload) -> tuple[Candidate, bool]:
        """The candidate, and whether it may win: it fits and does not exceed the limit, else its
        message says so."""
        fits = candidate.plan is not None and candidate.fits_memory is True
        money = candidate.money_per_million_tokens(workload)
        if self.money_limit is None or money is None or money <= self.money_limit:
            return candidate, fits
        limit = number_text(self.money_limit, 4)
        text = f"costs {number_text(money, 4)} per million tokens, above the limit {limit}"
        return replace(candidate, message=joined(candidate.message, text)), False


def pareto(candidates: Sequence[Candidate], workload: Workload) -> list[int]:
    """Indices of the candidates that fit and than which none is both faster and cheaper, fastest
    first."""
    priced = [
        (c.predicted_seconds, money, i)
        for i, c in enumerate(candidates)
        if c.fits_memory
        and c.predicted_seconds is not None
        and (money := c.money_per_million_tokens(workload)) is not None
    ]
    priced.sort()
    return [
        i
        for place, (_, money, i) in enumerate(priced)
        if all(money < other for _, other, _ in priced[:place])
    ]


def winner_of(
    allowed: Sequence[Candidate], workload: Workload, percent: float | None
) -> int | None:
    """Index of the fastest, or of the cheapest that is at most `percent` slower; the allowed stand
    first in the ranking, in this order."""
    if not allowed:
        return None
    most = (allowed[0].predicted_seconds or 0.0) * (1 + (percent or 0.0) / 100)
    near = [i for i in pareto(allowed, workload) if (allowed[i].predicted_seconds or 0.0) <= most]
    return near[-1] if near and percent is not None else 0


def rank(candidate: Candidate, workload: Workload) -> tuple[float, ...]:
    """Sort key: seconds per iteration, then nodes in use in part, then money; what is unknown comes
    last."""
    seconds, money = candidate.predicted_seconds, candidate.money_per_million_tokens(workload)
    plan, late = candidate.plan, math.inf if seconds is None else seconds
    order = (late, 0) if plan is None else plan.order(late)
    return *order, math.inf if money is None else money
