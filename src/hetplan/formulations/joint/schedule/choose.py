"""The choice of the schedule: a local search over plans under the schedules that are allowed, then
explicit orders of passes.

1. The designs nearest to given plans are replayed under every schedule that is allowed.
2. The local search goes on from the best of them (annealing.py), with moves to these schedules.
3. The best designs get explicit orders by rules of dispatching and a few steps of local search
   (dispatch.py), within the room that their devices have.

Every plan is judged by its replay and by the memory of its devices, as in problem `joint`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from hetplan.errors import UnsupportedError
from hetplan.formulations.joint.annealing import VALUE, BestPlan, LocalSearch, Parameters
from hetplan.formulations.joint.design import SCHEDULES, SPLIT_SCHEDULES, Design, design_of
from hetplan.formulations.joint.schedule.data import PassProblem
from hetplan.formulations.joint.schedule.dispatch import Found, best_dispatched, improve
from hetplan.formulations.joint.schedule.pose import pose
from hetplan.formulations.joint.schedule.solve import with_orders
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import PASS_SCHEDULES, PassSchedule, Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Run


@dataclass(frozen=True)
class Limits:
    """Limits of the choice."""

    starts: int = 8  # plans that it begins with, at most
    ordered: int = 4  # designs that get an explicit order, at most
    improvements: int = 60  # steps of local search for an order
    search_share: float = 0.6  # of what is left of the budget, for the local search
    scattered: int = 100  # designs that a round of the local search scatters
    width: int = 8  # designs that it first anneals
    first_steps: int = 100  # of each of these annealings

    @property
    def of_search(self) -> Parameters:
        """The parameters of the local search, whose budget is short."""
        return Parameters(scattered=self.scattered, width=self.width, first_steps=self.first_steps)


def with_chunks(allowed: Sequence[PassSchedule]) -> list[tuple[PassSchedule, int]]:
    """(schedule, number of chunks) of the designs that a search under these schedules has. Where
    explicit orders alone are allowed, they are those of designs under whole passes."""
    named = [pair for pair in (*SCHEDULES, *SPLIT_SCHEDULES) if pair[0] in allowed]
    return named or [*SCHEDULES]


def choose(
    space: Space,
    run: Run,
    starts: Sequence[Plan],
    allowed: Sequence[PassSchedule] = PASS_SCHEDULES,
    limits: Limits = Limits(),
) -> BestPlan | None:
    """The fastest plan that fits under a schedule that is allowed; None where none is found.

    space: designs under the schedules `with_chunks(allowed)`. starts: plans of the space, but for
    their schedule, the fastest first. allowed: `explicit` stands for orders of passes of their own.
    """
    starts = starts[: limits.starts]
    local = LocalSearch(space, run.part(share=limits.search_share), limits.of_search)
    offer(local, starts, allowed)
    under_all_schedules(local, starts)
    local.vary()
    local.rounds()
    local.run = run
    designs = best_designs(local, starts, limits.ordered)
    if set(allowed) == {"explicit"}:
        local.incumbent = None
        offer(local, starts, allowed)
    if "explicit" not in allowed:
        return local.incumbent
    for design in designs:
        if run.should_stop:
            break
        ordered = with_explicit_order(space.sketch(design), space.replayer, run, limits)
        if ordered is not None:
            local.offer(ordered, space.replayer.seconds(ordered))
    return local.incumbent


def offer(local: LocalSearch, plans: Sequence[Plan], allowed: Sequence[PassSchedule]) -> None:
    """Replay the plans whose schedule is allowed."""
    for plan in plans:
        if plan.schedule in allowed and not local.late:
            local.offer(plan, local.space.replayer.seconds(plan))
            local.count_replay(design_of(plan))


def under_all_schedules(local: LocalSearch, plans: Sequence[Plan]) -> None:
    """Replay the designs nearest to plans, under every schedule of the space."""
    space = local.space
    for plan in plans:
        for schedule, chunks in space.schedules:
            changed = space.with_schedule(design_of(plan), schedule, chunks)
            repaired = None if changed is None else space.repaired(changed)
            if repaired is not None and not local.late:
                local.penalised_seconds(repaired)


def best_designs(local: LocalSearch, starts: Sequence[Plan], most: int) -> list[Design]:
    """The designs nearest to the best plan and to the first start, the faster one first; then the
    best ones of unlike shapes that the search has met."""
    first = [(local.space.replayer.seconds(plan), plan) for plan in starts[:1]]
    if local.incumbent is not None:
        seconds, _ = local.incumbent.order  # the key `Plan.order`: its first entry is the seconds
        first.append((seconds, local.incumbent.plan))
    nearest = [design_of(plan) for _, plan in sorted(first, key=itemgetter(0))]
    named = [design for design in nearest if design.schedule != "explicit"]
    ranked = sorted(local.best_of_shape.values(), key=VALUE)
    return list(dict.fromkeys([*named, *(design for _, design in ranked)]))[:most]


def with_explicit_order(
    plan: Plan, replayer: ChainReplayer, run: Run, limits: Limits
) -> Plan | None:
    """The plan with the orders that the heuristics find for its replicas; None where a replica has
    none within its room, or where the plan's backward passes cannot be split."""
    if plan.recomputation not in ("none", "selective"):
        return None
    try:
        problems = pose(plan, replayer)
    except UnsupportedError:
        return None
    known: dict[PassProblem, Found | None] = {}
    for problem in problems:
        if problem not in known:
            found = best_dispatched(problem, run)
            known[problem] = found and improve(problem, found, run, limits.improvements)
    return with_orders(plan, [(problem, known[problem]) for problem in problems])
