"""Exact search over the bottleneck of a pipeline: min over θ of a·θ + f(θ), by interval branch and
bound.

A synchronous pipeline costs (micro-batches - 1)·θ + (the rest), θ its slowest stage. Fixing θ makes
the rest a shortest path; θ itself takes one of many values (the sums of consecutive layers). Two
entries:

`search`    any problem that can bound the decisions with θ in an interval [low, high] (a
`Relaxation`).
`minimise`  the plain case: f(θ) is the least rest with every stage <= θ, hence a non-increasing
            step function, and a·low + f(high) bounds [low, high].

Intervals are explored best bound first; children inherit their parent's bound and are evaluated
when their turn comes. The bound is valid whenever the search stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion, Incumbent
from hetplan.solvers.run import Run

P = TypeVar("P")
Interval = tuple[float, float]


class Candidates(Protocol):
    """The values that θ can take, seen through closed intervals."""

    def snap(self, low: float, high: float) -> Interval | None:
        """The smallest interval with the same candidates; None when it holds none."""
        ...

    def split(self, low: float, high: float, at: float | None) -> tuple[Interval, Interval] | None:
        """Two intervals that part the candidates, the second from about `at`; None where only one
        is left."""
        ...


class Grid:
    """Candidates listed one by one; duplicates are merged. Splits at the median unless told
    where."""

    def __init__(self, values: ArrayLike) -> None:
        self.values: NDArray[np.float64] = np.unique(np.asarray(values, dtype=float))

    def snap(self, low: float, high: float) -> Interval | None:
        """See `Candidates.snap`."""
        first = int(np.searchsorted(self.values, low, side="left"))
        last = int(np.searchsorted(self.values, high, side="right")) - 1
        return (float(self.values[first]), float(self.values[last])) if first <= last else None

    def split(self, low: float, high: float, at: float | None) -> tuple[Interval, Interval] | None:
        """See `Candidates.split`."""
        first = int(np.searchsorted(self.values, low, side="left"))
        last = int(np.searchsorted(self.values, high, side="right")) - 1
        if first >= last:
            return None
        middle = (
            (first + last + 1) // 2
            if at is None
            else int(np.searchsorted(self.values, at, side="left"))
        )
        middle = min(max(middle, first + 1), last)
        below, above = float(self.values[middle - 1]), float(self.values[middle])
        return (float(self.values[first]), below), (above, float(self.values[last]))


class Continuum:
    """Candidates left implicit: every float counts as one. Splits at the middle; the gap ends the
    search."""

    def snap(self, low: float, high: float) -> Interval | None:
        """See `Candidates.snap`."""
        return (low, high) if low <= high else None

    def split(self, low: float, high: float, at: float | None) -> tuple[Interval, Interval] | None:
        """See `Candidates.split`."""
        if low >= high:
            return None
        above = (low + high) / 2 if at is None else at
        above = min(max(above, math.nextafter(low, math.inf)), high)
        return (low, math.nextafter(above, -math.inf)), (above, high)


@dataclass(frozen=True)
class Relaxation(Generic[P]):
    """What is known of the decisions whose θ lies in an interval.

    bound: no such decision costs less; None: there is no such decision.
    objective, decision: some decision of the whole problem and what it really costs, when one came
    along. below: decisions of the interval with θ >= below cost at least `objective` (the rest of
    it remains open). split: where the interval is best cut, when known.
    slope: what the bound gains per unit of `low`: decisions with θ >= low + d cost at least bound +
    slope·d.
    """

    bound: float | None
    objective: float | None = None
    decision: P | None = None
    below: float | None = None
    split: float | None = None
    slope: float = 0.0


@dataclass(frozen=True)
class Found(Generic[P]):
    """The end of a search. objective and decision None: nothing at or under the cut-off was found.

    bound: proven for the whole problem, None when nothing is proven yet; never above the cut-off.
    proven_empty: the search was exhausted without a cut-off and found nothing: there is no
    decision. finished: the search closed its gap (or proved that nothing beats the cut-off), it was
    not stopped. evaluations: relaxations that were computed.
    """

    objective: float | None
    decision: P | None
    bound: float | None
    finished: bool
    proven_empty: bool
    evaluations: int


def search(
    relax: Callable[[float, float, float], Relaxation[P]],
    interval: Interval,
    candidates: Candidates,
    run: Run,
    *,
    cutoff: float = math.inf,
    gap: float | None = None,
    lower: float | None = None,
) -> Found[P]:
    """Minimum over all decisions with θ in `interval`, best interval first.

    relax(low, high, cutoff): see `Relaxation`; it may raise `Stopped` where the run should stop.
    Where the bound reaches `cutoff`, returning bound = cutoff is enough; on a single value the
    relaxation must be exact. cutoff: an objective already known, only better decisions are sought.
    gap: relative gap at which to stop
    (the run's own). lower: a bound known beforehand.
    """
    incumbent = Incumbent[P](run, gap, cutoff)

    def expand(part: Interval, _: float) -> Expansion[Interval]:
        low, high = part
        answer = relax(low, high, incumbent.objective)
        if answer.objective is not None:
            incumbent.offer(answer.objective, cast(P, answer.decision))
        if answer.bound is None:
            return Expansion()
        bound, rest = answer.bound, part
        if answer.below is not None:
            below = candidates.snap(low, min(high, math.nextafter(answer.below, -math.inf)))
            if below is None:
                return Expansion()
            rest = below
        halves = candidates.split(*rest, answer.split)
        if halves is None and answer.below is None:
            return Expansion(dropped=bound)  # a single value: exact there by contract
        parts = (rest,) if halves is None else halves
        return Expansion([(bound + answer.slope * (half[0] - low), half) for half in parts])

    start = candidates.snap(*interval)
    roots = [] if start is None else [(-math.inf if lower is None else lower, start)]
    proof = branch_and_bound.search(roots, expand, incumbent, run)
    return Found(
        objective=None if incumbent.decision is None else incumbent.objective,
        decision=incumbent.decision,
        bound=proof.bound,
        finished=proof.finished,
        proven_empty=proof.empty,
        evaluations=proof.expanded,
    )


@dataclass(frozen=True)
class Probe(Generic[P]):
    """f at one θ. value: f(θ). reached: the largest stage really used; f is constant on [reached,
    θ]."""

    value: float
    reached: float
    decision: P


def minimise(
    slope: float,
    f: Callable[[float], Probe[P] | None],
    candidates: Candidates,
    interval: Interval,
    run: Run,
    *,
    cutoff: float = math.inf,
    gap: float | None = None,
) -> Found[P]:
    """min over θ in `interval` of slope·θ + f(θ), f non-increasing, None where no decision keeps to
    θ.

    slope >= 0. Each value of f is computed once. Returns the decision of the best probe,
    `Found.objective` = slope·reached + value.
    """
    known: dict[float, Probe[P] | None] = {}

    def relax(low: float, high: float, _: float) -> Relaxation[P]:
        if high not in known:
            known[high] = f(high)
        probe = known[high]
        if probe is None:
            return Relaxation(None)
        objective = slope * probe.reached + probe.value
        below = probe.reached if probe.reached > low else None
        # With reached <= low the bound is at least the objective, which closes the interval.
        return Relaxation(slope * low + probe.value, objective, probe.decision, below, slope=slope)

    return search(relax, interval, candidates, run, cutoff=cutoff, gap=gap)
