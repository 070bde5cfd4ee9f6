"""Method `exact`: interval branch and bound over θ, the slowest stage's time, with shortest paths inside.

With k* the slowest stage and θ its time,  T = N_b θ + sum_{k < k*} t_k + sum_{k > k*} (2 t_k - θ),  so that
for a given θ the cheapest template is a shortest path over (devices used, layers covered, k* passed or not).
For θ in [low, high] stages up to `high` are allowed, those behind k* are charged 2 t - low, and k* is charged
N_b low + (N_b - S_max + 1)(t - low): never too much, since at most S_max - 1 stages lie behind k*, and exact
at low = high. States are kept only where the remaining devices can still cover the remaining layers, and
where the Lagrangian bound of the rest leaves a chance to beat the incumbent.
Source: hetplan; the objective is Oobleck's (SOSP 2023, Section 4.1.2), the problem Ditto's (Section 3).
"""

from __future__ import annotations

import math
import time

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.exact.paths import relax_all, trace_back
from hetplan.formulations.ditto.exact.prices import Prices
from hetplan.formulations.ditto.exact.space import Space, Windows
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
    space = Space(problem)
    built = time.perf_counter()
    found, counts = optimum(space, run)
    if found.proven_empty:
        stop = Stop.INFEASIBLE
    elif found.finished:
        stop = Stop.OPTIMAL
    else:
        stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    return Outcome(
        stop=stop,
        decision=None if found.decision is None else problem.decision(found.decision),
        bound=found.bound,
        build_seconds=built - begun,
        solve_seconds=time.perf_counter() - built,
        message="no template fits in memory" if found.proven_empty else "",
        details={"vectors": space.vectors, "candidates": len(space.candidates), **counts},
    )


def optimum(space: Space, run: Run) -> tuple[Found[Stages], dict[str, int]]:
    """The best stages, and how many shortest paths and states it took."""
    relax = Relaxer(space, run.options.gap * DEPTH)
    least = space.least_theta()
    if least is None:
        return Found(None, None, None, finished=True, proven_empty=True, evaluations=0), relax.counts
    most = float(space.candidates[-1])
    grid = Grid(space.candidates)
    first = relax(least, min(most, least * (1 + FIRST_SHARE)), math.inf)
    best = math.inf if first.objective is None else first.objective
    top, above = relax.ceiling(least, most, best)
    found = search(relax, (least, top), grid, run, cutoff=best, gap=relax.gap)
    decision = first.decision if found.decision is None else found.decision
    objective = first.objective if found.decision is None else found.objective
    bound = found.bound if found.bound is None or above is None else min(found.bound, above)
    empty = found.finished and decision is None
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
    return Relaxer(space, 0.0)(least, least * (1 + FIRST_SHARE), math.inf).decision


class Relaxer:
    """The relaxation of one interval of θ; see the module. Keeps prices and counts between intervals."""

    def __init__(self, space: Space, gap: float) -> None:
        self.space, self.gap = space, gap
        self.prices = Prices(space)
        self.counts = {"intervals": 0, "paths": 0, "states": 0}

    def charge(self, low: float) -> tuple[float, float]:
        """(base, rate): what k* is charged, base + rate (t - low)."""
        p = self.space.problem
        return (p.micro_batches * low, float(p.micro_batches - p.most_stages + 1))

    def __call__(self, low: float, high: float, cutoff: float) -> Relaxation[Stages]:
        """Bound, template and split of [low, high]; what costs `cutoff` less the gap is not sought."""
        space, windows, charge = self.space, self.space.windows(low, high), self.charge(low)
        self.counts["intervals"] += 1
        limit = cutoff - self.gap * cutoff if math.isfinite(cutoff) else math.inf
        wide = low < high and high > low * WIDE
        steps = (WIDE_STEPS if wide else STEPS) if math.isfinite(limit) else 1
        bound = self.prices.bound(windows, charge, limit, steps)
        if bound == math.inf:
            return Relaxation(None)
        if bound >= limit:
            return Relaxation(bound)
        if wide:
            return Relaxation(bound, split=middle(low, high))
        first = space.reach_back(windows)
        if first[-1] > 0:
            return Relaxation(None)
        last = space.reach_forward(windows)[::-1].copy()
        states = np.maximum(last - first + 1, 0)
        total = int(states.sum())
        if total > MOST_STATES or (low < high and total * self._arcs(windows) > MOST_ARCS):
            return Relaxation(bound)
        offset = np.cumsum(states) - states - first
        value = np.full((2, total), np.inf)
        togo, rent = self.prices.togo, self.prices.rent()
        arguments = (
            space.problem.time, low, charge, space.coords, space.strides, space.kind, space.size, space.delta,
            space.counted, windows.after, windows.before, windows.peak_first, first, last, offset,
        )  # fmt: skip
        relax_all(*arguments, togo, rent, limit, value)
        self.counts["paths"] += 1
        self.counts["states"] += total
        at = offset[-1]
        if not (first[-1] <= 0 <= last[-1]) or value[1, at] == np.inf:
            return Relaxation(limit) if math.isfinite(limit) else Relaxation(None)
        stages = np.empty((space.problem.layers, 3), dtype=np.int64)
        count = trace_back(*arguments, value, stages)
        assert count > 0, "the shortest path cannot be traced back"
        template = [(int(a), int(b), int(r)) for a, b, r in stages[:count]]
        return Relaxation(
            max(bound, float(value[1, at])),
            space.problem.price(template),
            template,
            split=self._split(template, low, high),
        )

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
            bound = self.prices.bound(self.space.windows(low, most), self.charge(low), limit, 60)
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
