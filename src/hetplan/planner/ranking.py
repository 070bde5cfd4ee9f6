"""Plan a workload by several strategies and rank what they propose: the fastest replay that fits
first.

Each strategy is searched on its own, in every precision and, where that is asked for, on every part
of the cluster. Plans are compared by their replays; what a strategy proves is of its own problem.
Where nothing fits, `planner.fits` says what would.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from hetplan.planner.candidate import Candidate, carrying
from hetplan.planner.criteria import Criteria, rank, winner_of
from hetplan.planner.fits import advice
from hetplan.planner.phases import search_all, with_parts
from hetplan.planner.planning import Planning
from hetplan.planner.search import OnCandidate, StrategySearch
from hetplan.planner.strategy import Strategy, make_strategies
from hetplan.planner.variants import Variant, parts_of_cluster
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import Run

# An eleventh of the time is for what no search counts: Python's start, the replay of the last plan,
# ranking, explaining and printing.
END = 1.1


def make_plans(
    workload: Workload | Sequence[Workload],
    strategies: Sequence[Strategy] | None = None,
    run: Run | None = None,
    *,
    criteria: Criteria | None = None,
    on_candidate: OnCandidate | None = None,
    notes: Sequence[str] = (),
) -> Planning:
    """Solve `workload` by each strategy (all by default), replay the plans, rank them by seconds,
    then whole nodes, then money.

    workload: one, or the same in different precisions (`planner.library`), ranked together. A
    plan that does not fit in memory never wins. The run's time limit is for all of it.
    on_candidate: called with every candidate as it is found. notes: to stand before those of the
    planning. Raises InputError for criteria that are not usable, or a workload that cannot be
    posed.
    """
    in_precisions = (workload,) if isinstance(workload, Workload) else tuple(workload)
    run, criteria, first = (run or Run()).share(END), criteria or Criteria(), in_precisions[0]
    picked = make_strategies() if strategies is None else list(strategies)
    criteria.check(first)
    variants = [
        (w, Variant(precision=w.precision if len(in_precisions) > 1 else None))
        for w in in_precisions
    ]
    # where money counts, slower plans may win, too
    cannot_win = math.inf if criteria.wants_parts else StrategySearch.cannot_win
    start = partial(StrategySearch, on_candidate=on_candidate, cannot_win=cannot_win)
    candidates = search_all(
        [start(s, w, run, v) for s in picked for w, v in variants],
        run.share(2 if criteria.wants_parts else 1),
    )
    all_notes = list(notes)
    if criteria.wants_parts:
        searches = [
            start(s, w, run, replace(v, part=part))
            for w, v in variants
            for part in parts_of_cluster(w)
            for s in picked
        ]
        candidates, left_out = with_parts(candidates, searches, run)
        all_notes += left_out
    candidates = with_inputs_of(in_precisions, candidates)
    judged = [criteria.judged(candidate, first) for candidate in candidates]
    judged.sort(key=lambda pair: (not pair[1], *rank(pair[0], first)))
    ranked = tuple(candidate for candidate, _ in judged)
    allowed = [candidate for candidate, may_win in judged if may_win]
    winner = winner_of(allowed, first, criteria.cheapest_within)
    smallest = min(in_precisions, key=lambda w: sum(l.saved_bytes for l in w.profile.layers))
    precision = None if winner is None else ranked[winner].variant.precision
    return Planning(
        next((w for w in in_precisions if w.precision == precision), first),
        ranked,
        winner,
        tuple(all_notes),
        () if any(candidate.fits_memory for candidate in ranked) else advice(smallest),
        tuple(w.precision for w in in_precisions),
        criteria,
    )


def with_inputs_of(
    workloads: Sequence[Workload], candidates: Iterable[Candidate]
) -> list[Candidate]:
    """The candidates with plans that carry their workload. workloads: one for each precision."""
    inputs = {workload.precision: Inputs.of(workload) for workload in workloads}
    only = workloads[0].precision
    return [carrying(c, inputs[c.variant.precision or only]) for c in candidates]
