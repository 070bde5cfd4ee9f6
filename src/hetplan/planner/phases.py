"""The phases in which all strategies are searched, and the budget that each phase gets.

Every phase goes over all searches (a search is a strategy, a workload and a variant):
(1) methods that answer at once, so that a complete ranking exists early;
(2) exact methods, first those of strategies that are not slow;
(3) exact methods with recomputation, for strategies none of whose plans fits without it;
(4) the other heuristics, which are for comparison;
(5) the strategy `joint`, which begins with the plans of all others;
(6) its choice of a schedule, which begins with the plans of all, and is not asked on parts.

The budget is counted in seconds of a slow core (`solvers.run.Work`), so that the same plans are
found on every machine, idle or busy. A time limit is shared in the same way; it only cuts.

In each phase, a search may take a share of the budget that is left: a tenth in (1) and (3), an
eighth in (4). In (2) the share is a fifth, because exact methods mostly need little of their
budget; it grows up to a half for the last searches. `joint` has at least a quarter of the whole
budget, unless its own is below that.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from math import fsum

from hetplan.planner.candidate import Candidate
from hetplan.planner.criteria import pareto
from hetplan.planner.joint import Joint
from hetplan.planner.proposals import fault_of, refused
from hetplan.planner.search import StrategySearch
from hetplan.planner.strategy import NoPlan
from hetplan.planner.variants import MOST_TYPES
from hetplan.solvers.run import Run
from hetplan.text import counted

# Counted seconds of all searches but those of `joint`, whose own are settings.
OTHERS_SECONDS = 60.0

Phase = Callable[[StrategySearch, Run], list[Candidate]]


def search_all(searches: Sequence[StrategySearch], run: Run) -> list[Candidate]:
    """The candidates of all searches, search by search, within the time of `run`."""
    candidates: list[list[Candidate]] = [[] for _ in searches]
    last = [i for i, search in enumerate(searches) if isinstance(search.strategy, Joint)]
    first = [i for i in range(len(searches)) if i not in last]
    first.sort(key=lambda i: searches[i].strategy.slow)
    before_joint = run.share(1 / share_before([searches[i] for i in last], run))

    def add(i: int, phase: Phase, within: Run, share: float) -> None:
        """Add the candidates of a phase of search i, which may take 1 / share of the time that is
        left of `within`."""
        known = tuple(chain.from_iterable(candidates))
        search = replace(searches[i], run=within, known=known)
        try:
            candidates[i] += phase(search, within.share(share))
        except Exception as error:  # noqa: BLE001 - a fault costs this strategy's phase alone
            fault = fault_of(search.strategy.name, search.strategy.methods[0], error)
            candidates[i].append(replace(fault, variant=search.variant))

    for i in first:
        add(i, StrategySearch.quick_candidates, before_joint, 10)
    for place, i in enumerate(first):
        still_to_come = len(first) - place
        add(i, StrategySearch.exact_candidates, before_joint, min(5, still_to_come + 1))
    for i in first:
        add(i, StrategySearch.recomputing_candidates, before_joint, 10)
    for i in first:
        add(i, StrategySearch.other_candidates, before_joint, 8)
    for place, i in enumerate(last):
        add(i, StrategySearch.exact_candidates, run, len(last) - place)
    for place, i in enumerate(last):
        add(i, StrategySearch.other_candidates, run, len(last) - place)

    for of_search, search in zip(candidates, searches, strict=True):
        if not of_search and not search.variant.part and before_joint.out_of_time:
            reason = NoPlan("unknown", "not begun: the time limit was reached")
            of_search.append(refused(search.strategy, search.strategy.methods[0], reason))
    return list(chain.from_iterable(candidates))


def budget_of(searches: Sequence[StrategySearch]) -> float:
    """The counted seconds of all searches together."""
    joint = [s.strategy for s in searches if isinstance(s.strategy, Joint)]
    return OTHERS_SECONDS + fsum(strategy.seconds for strategy in joint)


def share_before(joint: Sequence[StrategySearch], run: Run) -> float:
    """The share of the time for the searches before those of `joint`: three quarters, or more if
    the time limits of `joint` are below a quarter; all of it where the time has no limit, or
    `joint` no searches. joint: its searches."""
    seconds = 0.0
    for search in joint:
        assert isinstance(search.strategy, Joint)
        seconds += search.strategy.seconds
    time_left = max(run.remaining, 1e-3)  # never 0, by which nothing can be divided
    return max(0.75, 1 - seconds / time_left)


def with_parts(
    whole: list[Candidate], searches: Sequence[StrategySearch], run: Run
) -> tuple[list[Candidate], list[str]]:
    """(candidates, notes) after searching parts of the cluster: all candidates of `whole`, and
    those on parts that are on the Pareto front of time and money. The notes are about candidates
    that were left out and parts that were not searched.

    whole: the candidates on the whole cluster. searches: the searches on its parts.
    """
    on_parts = search_all(searches, run.share(1))
    workload = searches[0].workload
    together = [*whole, *on_parts]
    # `id`, because equal candidates of several searches are told apart
    front = {id(together[i]) for i in pareto(together, workload)}
    kept = [c for c in on_parts if id(c) in front]
    notes = []
    if len(kept) < len(on_parts):
        beaten = counted(len(on_parts) - len(kept), "plan")
        notes.append(f"on parts of the cluster, {beaten} left out: beaten in time and money")
    types = len(workload.cluster.types)
    if types > MOST_TYPES:
        which = "of one, of two, and of all but one (not every combination)"
        notes.append(f"parts of {types} device types: {which}")
    return [*whole, *kept], notes
