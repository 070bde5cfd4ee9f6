"""The relaxation of an interval of θ: Lagrangian bound, shortest paths, and stages counted where
these cannot decide.

Where the states do not count stages, a path pays a fee for each. The best fee for the interval is
sought first
(cutting planes: every path is a line over the fee); what it leaves open is left to `counted`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.ditto.exact.counted import Relaxed, TooManyLabels, cheapest_counted, lines
from hetplan.formulations.ditto.exact.fees import Ascent, Known
from hetplan.formulations.ditto.exact.paths import relax
from hetplan.formulations.ditto.exact.prices import Prices
from hetplan.formulations.ditto.exact.space import Charge, Space, States, Windows
from hetplan.formulations.ditto.exact.trace import trace
from hetplan.formulations.ditto.problem import Stages
from hetplan.solvers.bottleneck import Relaxation
from hetplan.solvers.run import Run

# The first incumbent comes from templates whose θ exceeds the least possible one by this share at
# most.
FIRST_SHARE = 0.02
# Proofs go deeper than the gap asked for by this factor, so that exact methods agree to that gap.
DEPTH = 0.1
# Beyond this many arcs an interval is split on its Lagrangian bound alone; beyond these states it
# has to be.
# Wider intervals than this ratio are split on it as well: their paths mix stages that no template
# would.
WIDE = 1.3
# Where stages are not counted, the first template is sought near so many values of θ, evenly spaced
# by ratio.
TRIES = 16
STEPS, WIDE_STEPS = 40, 200
# Cut-offs over the least Lagrangian bound seen, where stages are not counted.
GUESSES = (1.01, 1.04, 1.1, 1.25, 1.6, 2.5)
MOST_ARCS = 4e9
MOST_STATES = 60_000_000
# Without a count, intervals up to this ratio have their stages counted; where that takes too many
# labels, better fees are tried, so often at most, then the interval is split. A single value gets
# all the labels that memory allows.
NARROW = 1.1
FEES = 6
FEW_LABELS, MOST_LABELS = 4_000_000, 20_000_000


@dataclass
class Undisturbed(Run):
    """A run that asks another whether to stop, or for a while does not."""

    asked: Run = field(default_factory=Run)
    deaf: bool = False

    @property
    def should_stop(self) -> bool:
        """See `Run.should_stop`."""
        return not self.deaf and self.asked.should_stop

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, nothing stops."""
        self.deaf = True
        try:
            yield
        finally:
            self.deaf = False


class Relaxer:
    """The relaxation of one interval of θ; see the module. Keeps prices and counts between
    intervals."""

    def __init__(self, space: Space, run: Run) -> None:
        self.space, self.gap = space, run.options.gap * DEPTH
        self.run = Undisturbed(run.options, cancel=run.cancel, started=run.started, asked=run)
        self.prices = (Prices(space, self.run), Prices(space, self.run))
        self.counts = {"intervals": 0, "paths": 0, "states": 0, "counted": 0}
        self.known = Known()
        self.leaks = 0  # single values of θ whose stages cannot be counted for want of memory

    def __call__(self, low: float, high: float, cutoff: float) -> Relaxation[Stages]:
        """Bound, template and split of [low, high]; what costs `cutoff` less the gap is not
        sought."""
        return self._relax(low, high, cutoff, count=not self.space.exact)

    def _relax(self, low: float, high: float, cutoff: float, *, count: bool) -> Relaxation[Stages]:
        """The same; count: with fees improved and stages counted."""
        space, windows = self.space, self.space.windows(low, high)
        self.counts["intervals"] += 1
        limit = cutoff - self.gap * cutoff if math.isfinite(cutoff) else math.inf
        wide = low < high and high > low * (WIDE if space.exact else NARROW)
        steps = (WIDE_STEPS if wide else STEPS) if math.isfinite(limit) or not space.exact else 1
        bound, charge, prices = self._best_charge(windows, limit, steps)
        if bound == math.inf:
            return Relaxation(None)
        if bound >= limit:
            return Relaxation(bound)
        if wide:
            return Relaxation(bound, split=middle(low, high))
        states = space.states(windows)
        if states is None:
            return Relaxation(None)
        if states.total > MOST_STATES or (
            low < high and states.total * self._arcs(windows) > MOST_ARCS
        ):
            return Relaxation(bound)
        likely = self.known.likely(low) if prices.limited else None
        if likely is not None and prices.bound(windows, charge, limit, STEPS, likely) >= limit:
            return Relaxation(limit)
        relaxed = self._cheapest(windows, states, charge, prices, limit)
        if relaxed is None:
            return nothing_below(limit)
        if count:
            return self._counted(windows, states, charge, prices, relaxed, limit)
        return self._answer(max(bound, self._net(relaxed)), relaxed.template, windows)

    def _answer(self, bound: float, template: Stages, windows: Windows) -> Relaxation[Stages]:
        """A bound and the path behind it, with its price if it is a template."""
        split = self._split(template, windows.low, windows.high)
        if not self.space.problem.accepts(template):
            return Relaxation(bound, split=split)
        return Relaxation(bound, self.space.problem.price(template), template, split=split)

    def _net(self, relaxed: Relaxed) -> float:
        """What a path bounds: the fees of as many stages as there may be are given back."""
        return relaxed.cost - relaxed.fee * self.space.problem.micro_batches

    def _counted(
        self,
        windows: Windows,
        states: States,
        charge: Charge,
        prices: Prices,
        relaxed: Relaxed,
        limit: float,
    ) -> Relaxation[Stages]:
        """Stages counted if few labels suffice, else with better fees, until one or the other
        decides."""
        best: Relaxation[Stages] = Relaxation(None)
        ascent, chosen = Ascent(self.space.problem.micro_batches), relaxed
        single = windows.low == windows.high
        for _ in range(FEES):
            answer = self._answer(self._net(relaxed), relaxed.template, windows)
            if answer.objective is not None and (
                best.objective is None or answer.objective < best.objective
            ):
                best, limit = answer, min(limit, answer.objective * (1 - self.gap))
            chosen = max(chosen, relaxed, key=self._net)
            self.known.fees[windows.low] = chosen.fee
            if self._net(chosen) >= limit:
                return replace(best, bound=limit)
            if relaxed is chosen:
                found = self._count(windows, states, charge, chosen, limit, FEW_LABELS)
                if found is not None:
                    return better(best, found)
            fee = ascent.next(relaxed, limit)
            if fee is None:
                break
            if prices.bound(windows, charge, limit, STEPS, fee) >= limit:
                return replace(best, bound=limit)
            again = self._cheapest(windows, states, charge, prices, limit)
            if again is None:
                self.known.fees[windows.low] = fee
                return replace(best, bound=limit)
            relaxed = again
        found = self._count(windows, states, charge, chosen, limit, MOST_LABELS) if single else None
        if found is not None:
            return better(best, found)
        self.leaks += single
        split = self._split(chosen.template, windows.low, windows.high)
        return replace(best, bound=self._net(chosen), split=split)

    def _count(
        self,
        windows: Windows,
        states: States,
        charge: Charge,
        relaxed: Relaxed,
        limit: float,
        room: int,
    ) -> Relaxation[Stages] | None:
        """The cheapest template of the interval as charged; None where counting takes more than
        `room` labels."""
        self.counts["counted"] += 1
        try:
            found = cheapest_counted(
                self.space, self.run, windows, states, charge, relaxed, limit, room
            )
        except TooManyLabels:
            return None
        if found is None:
            return nothing_below(limit)
        answer = self._answer(found[0], found[1], windows)
        assert answer.objective is not None, "counted stages are no template"
        return answer

    def first(self, least: float, most: float, cutoff: float) -> Relaxation[Stages]:
        """The relaxation just above the least θ, with a first template.

        Without the count a template of few stages, hence of a larger θ, may be the first one
        possible.
        """
        with (
            self.run.undisturbed()
        ):  # a search that is stopped at once has a template, too, if one is at hand
            answer = self._relax(least, min(most, least * (1 + FIRST_SHARE)), cutoff, count=False)
        if self.space.exact or least <= 0:
            return answer
        best = answer
        for low in np.geomspace(least, min(most, least * self.space.problem.layers), TRIES)[1:]:
            limit = cutoff if best.objective is None else min(cutoff, best.objective)
            other = self._relax(
                float(low), min(most, float(low) * (1 + FIRST_SHARE)), limit, count=False
            )
            if other.objective is not None and other.objective < limit:
                best = other
            elif best.objective is not None:
                break
        return replace(best, bound=answer.bound)

    def guesses(self, least: float, most: float, best: float) -> list[float]:
        """Cut-offs to try one after the other, the last being `best`.

        Shortest paths are cheap under a cut-off that is close, so where a first template is far
        from the optimum, it is faster to prove that nothing costs less than a little above the
        Lagrangian bound, then somewhat more.
        """
        if self.space.exact or least <= 0:
            return [best]
        bound = self._promising(least, most)
        return [*(bound * share for share in GUESSES if bound * share < best), best]

    def _promising(self, least: float, most: float) -> float:
        """The least Lagrangian bound among narrow intervals, evenly spaced by ratio."""
        found = math.inf
        for low in np.geomspace(least, min(most, least * self.space.problem.layers), TRIES):
            windows = self.space.windows(float(low), min(most, float(low) * (1 + FIRST_SHARE)))
            found = min(found, self._best_charge(windows, math.inf, STEPS)[0])
        return found

    def _cheapest(
        self, windows: Windows, states: States, charge: Charge, prices: Prices, limit: float
    ) -> Relaxed | None:
        """The shortest path, with the price of a stage where they are not counted; None: none below
        `limit`."""
        space, value = self.space, np.full((2, states.total), np.inf)
        fee = 0.0 if space.counted else prices.fee
        first, last = states.first.copy(), states.last.copy()
        costs = lines(charge, fee)
        relax(
            self.run, space.problem.time, *costs, space.coords, space.strides, space.kind, space.size, space.delta,
            space.stages, 1, space.counted, windows.after, windows.before, windows.peak_first, first, last,
            states.offset, prices.togo, prices.rent(), limit, value,
        )  # fmt: skip
        self.counts["paths"] += 1
        self.counts["states"] += states.total
        at = states.offset[-1]
        if not (first[-1] <= 0 <= last[-1]) or value[1, at] == np.inf:
            return None
        template = trace(space, windows, states, costs, first, last, value)
        return Relaxed(value, first, last, fee, float(value[1, at]), template)

    def _best_charge(
        self, windows: Windows, limit: float, steps: int
    ) -> tuple[float, Charge, Prices]:
        """The Lagrangian bound and the way of charging that gives it."""
        best: tuple[float, Charge, Prices] | None = None
        for charge, prices in zip(
            self.space.charges(windows.low, windows.high), self.prices, strict=False
        ):
            bound = prices.bound(windows, charge, limit, steps)
            if best is None or bound > best[0]:
                best = bound, charge, prices
            if bound >= limit:
                break
        assert best is not None
        return best

    def ceiling(self, least: float, most: float, cutoff: float) -> tuple[float, float | None]:
        """(top, bound): templates with θ > top cost at least `bound`, the cut-off less the gap."""
        if not math.isfinite(cutoff):
            return most, None
        values, limit = self.space.candidates, cutoff - self.gap * cutoff
        first = int(np.searchsorted(values, least))
        last = len(values)
        begin = first
        while first < last:  # the least index from which on the bound reaches the limit
            middle = (first + last) // 2
            low = float(values[middle])
            bound = self.prices[0].bound(
                self.space.windows(low, most), self.space.charges(low, most)[0], limit, 60
            )
            if bound >= limit:
                last = middle
            else:
                first = middle + 1
        return float(values[max(begin, last - 1)]), limit if last < len(values) else None

    def _arcs(self, windows: Windows) -> float:
        """Mean number of arcs out of a state."""
        lengths = windows.after - np.arange(windows.after.shape[2])
        return float(lengths.sum(axis=1).mean()) * 2

    def _split(self, template: Stages, low: float, high: float) -> float | None:
        """Where the relaxation's own template is excluded on one side and priced truly on the
        other."""
        longest = max(float(self.space.problem.time[r, a, b]) for a, b, r in template)
        return min(longest, middle(low, high)) if longest > low else None


def middle(low: float, high: float) -> float:
    """The geometric middle; the arithmetic one of an interval that begins with 0."""
    return math.sqrt(low * high) if low > 0 else high / 2


def nothing_below(limit: float) -> Relaxation[Stages]:
    """No template costs less than `limit`; without a limit there is none."""
    return Relaxation(limit) if math.isfinite(limit) else Relaxation(None)


def better(known: Relaxation[Stages], found: Relaxation[Stages]) -> Relaxation[Stages]:
    """`found`, with the template of `known` if that one costs less."""
    if known.objective is None or (
        found.objective is not None and found.objective <= known.objective
    ):
        return found
    return replace(found, objective=known.objective, decision=known.decision)
