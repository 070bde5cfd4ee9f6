"""The order in which the strategies are searched, and the time that each phase of it gets.

Phases, each over all searches:
(1) methods that answer at once, so that a complete ranking stands early;
(2) exact methods, those of strategies that end soon first;
(3) exact methods with recomputation, for strategies none of whose plans fits without;
(4) the other heuristics, which are for comparison;
(5) `joint`, which begins with the plans of all others.

A search of a phase may take a share of the time that is left: a tenth in (1) and (3), an eighth in
(4). In (2) it is a fifth, for exact methods mostly need little of it, and up to a half for the last
ones. At least a quarter of the time is for `joint`, where it can use that much.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from hetplan.planner.candidate import Candidate
from hetplan.planner.criteria import pareto
from hetplan.planner.joint import Joint
from hetplan.planner.proposals import fault_of, refused
from hetplan.planner.search import StrategySearch
from hetplan.planner.strategy import NoPlan
from hetplan.planner.variants import MOST_TYPES
from hetplan.solvers.run import Run
from hetplan.text import counted

Phase = Callable[[StrategySearch, Run], list[Candidate]]


def search_all(searches: Sequence[StrategySearch], run: Run) -> list[Candidate]:
    """All candidates, strategy by strategy, within the time of `run`; the phases are in the
    module."""
    candidates: list[list[Candidate]] = [[] for _ in searches]
    last = [i for i, search in enumerate(searches) if isinstance(search.strategy, Joint)]
    first = [i for i in range(len(searches)) if i not in last]
    first.sort(key=lambda i: searches[i].strategy.slow)
    before_joint = run.share(1 / share_before([searches[i] for i in last], run))

    def add(i: int, phase: Phase, within: Run, share: float) -> None:
        """Search once more by search i, for a share of the time of `within`."""
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

    for own, search in zip(candidates, searches, strict=True):
        if not own and not search.variant.part and not before_joint.remaining:
            reason = NoPlan("unknown", "not begun: the time limit was reached")
            own.append(refused(search.strategy, search.strategy.methods[0], reason))
    return list(chain.from_iterable(candidates))


def share_before(joint: Sequence[StrategySearch], run: Run) -> float:
    """The share of the time that is for the searches before those of `joint`: three quarters, or
    more where `joint` cannot use a quarter."""
    usable = 0.0
    for search in joint:
        assert isinstance(search.strategy, Joint)
        usable += search.strategy.settings.seconds
    return max(0.75, 1 - usable / max(run.remaining, 1e-3))


def with_parts(
    whole: list[Candidate], searches: Sequence[StrategySearch], run: Run
) -> tuple[list[Candidate], list[str]]:
    """All of `whole`, and those candidates on parts of the cluster that nothing beats in both time
    and money; notes on the others and on parts that were not tried."""
    more, workload = search_all(searches, run.share(1)), searches[0].workload
    together = [*whole, *more]
    front = {id(together[i]) for i in pareto(together, workload)}
    kept = [c for c in more if id(c) in front]
    notes = []
    if len(kept) < len(more):
        beaten = counted(len(more) - len(kept), "plan")
        notes.append(f"on parts of the cluster, {beaten} left out: beaten in time and money")
    if (types := len(workload.cluster.types)) > MOST_TYPES:
        which = "of one, of two, and of all but one (not every combination)"
        notes.append(f"parts of {types} device types: {which}")
    return [*whole, *kept], notes
