"""Method `exact`: interval branch and bound over θ, the slowest stage's time, with shortest paths
inside.

With k* the slowest stage and θ its time,  T = N_b θ + sum_{k < k*} t_k + sum_{k > k*} (2 t_k - θ),
so that for a given θ the cheapest template is a shortest path over (devices used, layers covered,
k* passed or not). For θ in [low, high] stages up to `high` are allowed, and θ where it multiplies
the number of stages behind k* is charged as `low` or as `high`, whichever bounds better: never too
much, and exact at low = high (`Charge` has the proof). States are kept only where the remaining
devices can still cover the remaining layers, and where the Lagrangian bound of the rest leaves a
chance to beat the incumbent.
Memory depends on the number of stages behind, and micro-batches limit their number: both need a
count of stages in the state, which multiplies the states. Without the count, stages behind are at
least the devices used over the largest group, and too many stages pay a price each (`prices`):
every template stays a path and costs no more, so this is a relaxation. Where it cannot decide a
narrow interval, its shortest paths from both ends leave few states below the cut-off, and on these
the stages are counted by label setting (`relaxer`, `counted`). Should a single θ take more labels
than memory allows, it leaks: it is let go with the bound that it has, and only states that count
can close it.
Source: hetplan; the objective is Oobleck's (SOSP 2023, Section 4.1.2), the problem Ditto's (Section
3).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.exact.relaxer import Relaxer
from hetplan.formulations.ditto.exact.space import Space
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Stages,
    compile_problem,
    infeasible_because,
)
from hetplan.solvers.bottleneck import Found, Grid, search
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

# Spaces with a count and no more vectors than FEW are explored at once, without the relaxation that
# lacks it; the relaxation gives up after LEAKS single values that it cannot decide, unless the
# count makes more than MANY vectors.
FEW_VECTORS, MANY_VECTORS = 150_000, 2_000_000
LEAKS = 20


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The proven optimum; at the time limit the best template found and a proven bound."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(
            stop=Stop.INFEASIBLE, message=reason, solve_seconds=time.perf_counter() - begun
        )
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

    Where stages have to be counted on a large cluster, a relaxation without the count comes first:
    it mostly finds the optimum and proves it, and else leaves a cut-off. Where the count makes too
    many states, it is all there is.
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
    """All of a space: a first template, a ceiling for θ, then the search; better ones than `cutoff`
    are sought."""
    space = relax.space
    least = space.least_theta()
    if least is None:
        return Found(
            None, None, None, finished=True, proven_empty=True, evaluations=0
        ), relax.counts
    most = float(space.candidates[-1])
    try:
        first = relax.first(least, most, cutoff)
    except Stopped:
        return Found(
            None, None, None, finished=False, proven_empty=False, evaluations=0
        ), relax.counts
    better = first.objective is not None and first.objective < cutoff
    best = first.objective if better and first.objective is not None else cutoff
    bounds: list[float] = []
    found = Found[Stages](None, None, None, finished=False, proven_empty=False, evaluations=0)
    limit, bound = best, None
    for limit, (top, above) in ceilings(relax, least, most, best):
        found = search(
            relax, (least, top), Grid(space.candidates), run, cutoff=limit, gap=relax.gap
        )
        bound = found.bound if found.bound is None or above is None else min(found.bound, above)
        bounds += [] if bound is None else [bound]
        if found.decision is not None or not found.finished:
            break
    empty = found.finished and found.decision is None and limit == math.inf and bound is None
    decision = first.decision if found.decision is None and better else found.decision
    objective = first.objective if found.decision is None and better else found.objective
    proven = None if empty else max(bounds, default=None)
    whole = found.finished and (
        found.decision is not None or limit == best
    )  # else stopped between two cut-offs
    return Found(objective, decision, proven, whole, empty, found.evaluations), relax.counts


def ceilings(
    relax: Relaxer, least: float, most: float, best: float
) -> Iterator[tuple[float, tuple[float, float | None]]]:
    """Each cut-off to try with the ceiling of θ under it, while there is time."""
    try:
        for limit in relax.guesses(least, most, best):
            yield limit, relax.ceiling(least, most, limit)
    except Stopped:
        return


def first_template(problem: DittoProblem, run: Run) -> Stages | None:
    """A good template at once: the cheapest of those whose θ is about the least possible; None:
    none at hand.

    A start for other methods. It may be None although templates exist, where there are too many
    device vectors.
    """
    try:
        space = Space(problem)
    except UnsupportedError:
        return None
    least = space.least_theta()
    if least is None or run.should_stop:
        return None
    try:
        return Relaxer(space, run).first(least, float(space.candidates[-1]), math.inf).decision
    except Stopped:
        return None


@dataclass
class Patient(Run):
    """The same run, stopping as well when a relaxation cannot decide too many values of θ."""

    relaxer: Relaxer | None = None

    @property
    def should_stop(self) -> bool:
        """See `Run.should_stop`."""
        return super().should_stop or (self.relaxer is not None and self.relaxer.leaks >= LEAKS)
