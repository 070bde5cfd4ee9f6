"""Plans a workload by several strategies, and ranks their candidates: the fastest replay that fits
comes first.

Each strategy is searched in every precision and, on request, on every part of the cluster. Plans
are compared by their replayed seconds; a strategy's objective and bound are of its own problem.
Where no candidate fits, `planner.fits` says what would.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from hetplan.planner.candidate import Candidate, with_inputs
from hetplan.planner.criteria import Criteria, rank, winner_of
from hetplan.planner.fits import advice
from hetplan.planner.phases import budget_of, search_all, with_parts
from hetplan.planner.planning import Planning
from hetplan.planner.search import OnCandidate, StrategySearch
from hetplan.planner.strategy import Strategy, make_strategies
from hetplan.planner.variants import Variant, parts_of_cluster
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import CUT, Run

# The searches get 1 / END of the time. The rest, an eleventh, is for the start of Python, the
# replay of the last plan, ranking, explaining and printing.
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
    """The planning of a workload: its candidates by all strategies, replayed and sorted by
    `criteria.rank`. A plan that does not fit in memory never wins.

    workload: one workload, or the same one in different precisions (`planner.workloads`), whose
    candidates are ranked together. strategies: the strategies to ask; None: all. run: its time
    limit is for the whole planning. on_candidate: a function that is called with every candidate as
    it is found. notes: notes that come before those of the planning. Raises InputError for criteria
    that are not usable, and for a workload that cannot be posed.
    """
    in_precisions = (workload,) if isinstance(workload, Workload) else tuple(workload)
    run = (run or Run()).share(END)
    criteria = criteria or Criteria()
    first = in_precisions[0]
    picked = make_strategies() if strategies is None else list(strategies)
    criteria.check(first)
    if criteria.zero_levels:
        picked = [strategy.within_levels(criteria.zero_levels) for strategy in picked]
    if criteria.schedules:
        picked = [strategy.within_schedules(criteria.schedules) for strategy in picked]
    several = len(in_precisions) > 1
    variants = [(w, Variant(precision=w.precision if several else None)) for w in in_precisions]
    # where money or levels count, slower plans may win, too
    cannot_win = math.inf if criteria.wants_slower else StrategySearch.cannot_win
    start = partial(StrategySearch, on_candidate=on_candidate, cannot_win=cannot_win)
    on_whole_cluster = [
        start(strategy, in_precision, run, variant)
        for strategy in picked
        for in_precision, variant in variants
    ]
    if run.budget is None:
        run.budget = budget_of(on_whole_cluster) * (2 if criteria.wants_parts else 1)
    # if parts are searched, they get the second half of the budget
    candidates = search_all(on_whole_cluster, run.share(2 if criteria.wants_parts else 1))
    all_notes = list(notes)
    if criteria.wants_parts:
        searches = []
        for in_precision, variant in variants:
            for part in parts_of_cluster(in_precision):
                on_part = replace(variant, part=part)
                searches += [start(strategy, in_precision, run, on_part) for strategy in picked]
        candidates, left_out = with_parts(candidates, searches, run)
        all_notes += left_out
    for candidate in candidates:
        if CUT in candidate.message and candidate.plan is not None:
            all_notes.append(candidate.message)
    candidates = with_inputs_of(in_precisions, candidates)
    if criteria.zero_levels:
        candidates = [without_saved_bound(candidate) for candidate in candidates]
    judged = [criteria.judged(candidate, first) for candidate in candidates]
    judged.sort(key=lambda pair: (not pair[1], *rank(pair[0], first)))
    ranked = tuple(candidate for candidate, _ in judged)
    allowed = [candidate for candidate, may_win in judged if may_win]
    winner = winner_of(allowed, first, criteria)
    changes: tuple[str, ...] = ()
    if not any(candidate.fits_memory for candidate in ranked):
        # what helps is said for the precision that keeps the fewest activations
        smallest = min(in_precisions, key=lambda w: sum(l.saved_bytes for l in w.profile.layers))
        changes = advice(smallest)
    precision = None if winner is None else ranked[winner].variant.precision
    return Planning(
        workload=next((w for w in in_precisions if w.precision == precision), first),
        candidates=ranked,
        winner=winner,
        notes=tuple(all_notes),
        advice=changes,
        precisions=tuple(w.precision for w in in_precisions),
        criteria=criteria,
    )


def without_saved_bound(candidate: Candidate) -> Candidate:
    """The candidate whose plan file states no bounds. Readers of the file take them for bounds of
    all plans, but where the user names ZeRO levels they are of plans of these levels alone."""
    plan = candidate.plan
    if plan is None or plan.prediction is None:
        return candidate
    prediction = plan.prediction.model_copy(update={"bound": None, "ladder": None})
    return replace(candidate, plan=plan.model_copy(update={"prediction": prediction}))


def with_inputs_of(
    workloads: Sequence[Workload], candidates: Iterable[Candidate]
) -> list[Candidate]:
    """The candidates with their workloads in their plans. workloads: one for each precision."""
    inputs = {workload.precision: Inputs.of(workload) for workload in workloads}
    default = workloads[0].precision  # of candidates whose variant names no precision
    return [with_inputs(c, inputs[c.variant.precision or default]) for c in candidates]
