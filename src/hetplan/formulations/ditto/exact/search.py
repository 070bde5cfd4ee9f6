"""Method `exact`: interval branch and bound over θ, the slowest stage's time, with shortest paths inside.

With k* the slowest stage and θ its time,  T = N_b θ + sum_{k < k*} t_k + sum_{k > k*} (2 t_k - θ),  so that for a
given θ the cheapest template is a shortest path over (devices used, layers covered, k* passed or not). For θ in
[low, high] stages up to `high` are allowed, and θ where it multiplies the number of stages behind k* is charged as
`low` or as `high`, whichever bounds better: never too much, and exact at low = high (`Charge` has the proof). States
are kept only where the remaining devices can still cover the remaining layers, and where the Lagrangian bound of the
rest leaves a chance to beat the incumbent.
Memory depends on the number of stages behind, and micro-batches limit their number: both need a count of stages in
the state, which multiplies the states. Without the count, stages behind are at least the devices used over the largest
group, and too many stages pay a price each (`prices`): every template stays a path and costs no more, so this is a
relaxation. It decides an interval where its bound reaches the incumbent, and a single θ where its own path is a
template (else the value leaks: it is let go with the bound that it has, and only the count can close it).
Source: hetplan; the objective is Oobleck's (SOSP 2023, Section 4.1.2), the problem Ditto's (Section 3).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.exact.paths import relax_all, trace_back
from hetplan.formulations.ditto.exact.prices import Prices
from hetplan.formulations.ditto.exact.space import Charge, Space, States, Windows
from hetplan.formulations.ditto.problem import DittoProblem, Stages, compile_problem, infeasible_because
from hetplan.solvers.bottleneck import Found, Grid, Relaxation, search
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# The first incumbent comes from templates whose θ exceeds the least possible one by this share at most.
FIRST_SHARE = 0.02
# Proofs go deeper than the gap asked for by this factor, so that exact methods agree to that gap.
DEPTH = 0.1
# Beyond this many arcs an interval is split on its Lagrangian bound alone; beyond these states it has to be.
# Wider intervals than this ratio are split on it as well: their paths mix stages that no template would.
WIDE = 1.3
# Spaces with a count and no more vectors than FEW are explored at once, without the relaxation that lacks it; the
# relaxation gives up after LEAKS single values that it cannot decide, unless the count makes more than MANY vectors.
FEW_VECTORS, MANY_VECTORS = 150_000, 2_000_000
LEAKS = 20
# Where stages are not counted, the first template is sought near so many values of θ, evenly spaced by ratio.
TRIES = 16
STEPS, WIDE_STEPS = 40, 200
MOST_ARCS = 4e9
MOST_STATES = 60_000_000


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The proven optimum; at the time limit the best template found and a proven bound."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason, solve_seconds=time.perf_counter() - begun)
    built = time.perf_counter()
    found, counts = optimum(problem, run)
    messages = {
        Stop.INFEASIBLE: "no template fits in memory",
        Stop.DONE: "stages cannot be counted on so many devices: solved without, which leaves a gap",
    }
    if found.proven_empty:
        stop = Stop.INFEASIBLE
    elif found.finished:
        stop = Stop.OPTIMAL if closed(found, run.options.gap) else Stop.DONE
    else:
        stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    return Outcome(
        stop=stop,
        decision=None if found.decision is None else problem.decision(found.decision),
        bound=found.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        message=messages.get(stop, ""),
        details=counts,
    )


def optimum(problem: DittoProblem, run: Run) -> tuple[Found[Stages], dict[str, int]]:
    """The best stages, and how many intervals, shortest paths and states it took.

    Where stages have to be counted on a large cluster, a relaxation without the count comes first: it mostly finds
    the optimum and proves it, and else leaves a cut-off. Where the count makes too many states, it is all there is.
    """
    relaxed = Space(problem, counted=False)
    vectors = relaxed.vectors * (problem.most_stages + 1)
    if relaxed.exact:
        return explore(Relaxer(relaxed, run), run, math.inf)
    if vectors <= FEW_VECTORS:
        return explore(Relaxer(Space(problem), run), run, math.inf)
    relaxer = Relaxer(relaxed, run)
    if vectors > MANY_VECTORS:
        return explore(relaxer, run, math.inf)
    patient = Patient(run.options, run.watch, run.cancel, run.started, relaxer=relaxer)
    found, counts = explore(relaxer, patient, math.inf)
    if found.proven_empty or run.should_stop or closed(found, run.options.gap):
        return found, counts
    best = math.inf if found.objective is None else found.objective
    again, more = explore(Relaxer(Space(problem), run), run, best)
    return joined(found, again), {key: counts[key] + more[key] for key in counts}


def joined(found: Found[Stages], again: Found[Stages]) -> Found[Stages]:
    """What a relaxation and a search below its cut-off say together."""
    bounds = [b for b in (found.bound, again.bound) if b is not None]
    chosen = found if again.decision is None else again
    return Found(
        chosen.objective,
        chosen.decision,
        max(bounds, default=None),
        finished=again.finished,
        proven_empty=again.proven_empty and found.decision is None,
        evaluations=found.evaluations + again.evaluations,
    )


def closed(found: Found[Stages], gap: float) -> bool:
    """Whether objective and bound are known and meet."""
    if found.objective is None or found.bound is None:
        return False
    return found.bound >= found.objective * (1 - gap)


def explore(relax: Relaxer, run: Run, cutoff: float) -> tuple[Found[Stages], dict[str, int]]:
    """All of a space: a first template, a ceiling for θ, then the search; better ones than `cutoff` are sought."""
    space = relax.space
    least = space.least_theta()
    if least is None:
        return Found(None, None, None, finished=True, proven_empty=True, evaluations=0), relax.counts
    most = float(space.candidates[-1])
    first = relax.first(least, most, cutoff)
    better = first.objective is not None and first.objective < cutoff
    best = first.objective if better and first.objective is not None else cutoff
    top, above = relax.ceiling(least, most, best)
    found = search(relax, (least, top), Grid(space.candidates), run, cutoff=best, gap=relax.gap)
    decision = first.decision if found.decision is None and better else found.decision
    objective = first.objective if found.decision is None and better else found.objective
    bound = found.bound if found.bound is None or above is None else min(found.bound, above)
    empty = found.finished and decision is None and cutoff == math.inf and bound is None
    return Found(objective, decision, bound, found.finished, empty, found.evaluations), relax.counts


def first_template(problem: DittoProblem, run: Run) -> Stages | None:
    """A good template at once: the cheapest of those whose θ is about the least possible; None: none at hand.

    A start for other methods. It may be None although templates exist, where there are too many device vectors.
    """
    try:
        space = Space(problem)
    except UnsupportedError:
        return None
    least = space.least_theta()
    if least is None or run.should_stop:
        return None
    return Relaxer(space, run).first(least, float(space.candidates[-1]), math.inf).decision


@dataclass
class Patient(Run):
    """The same run, stopping as well when a relaxation cannot decide too many values of θ."""

    relaxer: Relaxer | None = None

    @property
    def should_stop(self) -> bool:
        """See `Run.should_stop`."""
        return super().should_stop or (self.relaxer is not None and self.relaxer.leaks >= LEAKS)


class Relaxer:
    """The relaxation of one interval of θ; see the module. Keeps prices and counts between intervals."""

    def __init__(self, space: Space, run: Run) -> None:
        self.space, self.gap = space, run.options.gap * DEPTH
        self.prices = (Prices(space), Prices(space))
        self.counts = {"intervals": 0, "paths": 0, "states": 0}
        self.leaks = 0  # single values of θ whose cheapest path is no template, for want of a count

    def __call__(self, low: float, high: float, cutoff: float) -> Relaxation[Stages]:
        """Bound, template and split of [low, high]; what costs `cutoff` less the gap is not sought."""
        space, windows = self.space, self.space.windows(low, high)
        self.counts["intervals"] += 1
        limit = cutoff - self.gap * cutoff if math.isfinite(cutoff) else math.inf
        wide = low < high and high > low * WIDE
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
        if states.total > MOST_STATES or (low < high and states.total * self._arcs(windows) > MOST_ARCS):
            return Relaxation(bound)
        fee = 0.0 if space.counted else prices.fee
        found = self._cheapest(windows, states, charge, fee, prices, limit)
        if found is None:
            return Relaxation(limit) if math.isfinite(limit) else Relaxation(None)
        cost, template = found
        bound, split = max(bound, cost - fee * space.problem.micro_batches), self._split(template, low, high)
        if not space.problem.accepts(template):
            self.leaks += low == high
            return Relaxation(bound, split=split)
        return Relaxation(bound, space.problem.price(template), template, split=split)

    def first(self, least: float, most: float, cutoff: float) -> Relaxation[Stages]:
        """The relaxation just above the least θ, with a first template.

        Without the count a template of few stages, hence of a larger θ, may be the first one possible.
        """
        answer = self(least, min(most, least * (1 + FIRST_SHARE)), cutoff)
        if self.space.exact or least <= 0:
            return answer
        best = answer
        for low in np.geomspace(least, min(most, least * self.space.problem.layers), TRIES)[1:]:
            limit = cutoff if best.objective is None else min(cutoff, best.objective)
            other = self(float(low), min(most, float(low) * (1 + FIRST_SHARE)), limit)
            if other.objective is not None and other.objective < limit:
                best = other
            elif best.objective is not None:
                break
        return replace(best, bound=answer.bound)

    def _cheapest(
        self, windows: Windows, states: States, charge: Charge, fee: float, prices: Prices, limit: float
    ) -> tuple[float, Stages] | None:
        """The shortest path, with `fee` for each stage: its cost and its stages; None: none below `limit`."""
        space, value = self.space, np.full((2, states.total), np.inf)
        first, last = states.first.copy(), states.last.copy()
        arguments = (
            space.problem.time, charge.credit - fee, (charge.peak[0] + fee, charge.peak[1]), fee, space.coords,
            space.strides, space.kind, space.size, space.delta, space.stages, space.counted, windows.after,
            windows.before, windows.peak_first, first, last, states.offset,
        )  # fmt: skip
        relax_all(*arguments, prices.togo, prices.rent(), limit, value)
        self.counts["paths"] += 1
        self.counts["states"] += states.total
        at = states.offset[-1]
        if not (first[-1] <= 0 <= last[-1]) or value[1, at] == np.inf:
            return None
        stages = np.empty((space.problem.layers, 3), dtype=np.int64)
        count = trace_back(*arguments, value, stages)
        assert count > 0, "the shortest path cannot be traced back"
        return float(value[1, at]), [(int(a), int(b), int(r)) for a, b, r in stages[:count]]

    def _best_charge(self, windows: Windows, limit: float, steps: int) -> tuple[float, Charge, Prices]:
        """The Lagrangian bound and the way of charging that gives it."""
        best: tuple[float, Charge, Prices] | None = None
        for charge, prices in zip(self.space.charges(windows.low, windows.high), self.prices, strict=False):
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
        """Where the relaxation's own template is excluded on one side and priced truly on the other."""
        longest = max(float(self.space.problem.time[r, a, b]) for a, b, r in template)
        return min(longest, middle(low, high)) if longest > low else None


def middle(low: float, high: float) -> float:
    """The geometric middle; the arithmetic one of an interval that begins with 0."""
    return math.sqrt(low * high) if low > 0 else high / 2
