"""The choice of the schedule: a local search over plans under the schedules that are allowed, then
explicit orders of passes.

1. The designs nearest to given plans are replayed under every schedule that is allowed.
2. The local search goes on from the best of them (annealing.py), with moves to these schedules.
3. The best designs get explicit orders by rules of dispatching and a few steps of local search
   (dispatch.py), within the room that their devices have.

Every plan is judged by its replay and by the memory of its devices, as in problem `joint`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.errors import UnsupportedError
from hetplan.formulations.joint.annealing import BestPlan, LocalSearch, Parameters
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import SCHEDULES, SPLIT_SCHEDULES, Design, design_of
from hetplan.formulations.joint.schedule.data import PassProblem
from hetplan.formulations.joint.schedule.dispatch import Found, best_dispatched, improve
from hetplan.formulations.joint.schedule.pose import pose
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


def choose(
    data: JointData,
    run: Run,
    starts: Sequence[Plan],
    allowed: Sequence[PassSchedule] = PASS_SCHEDULES,
    limits: Limits = Limits(),
) -> BestPlan | None:
    """The fastest plan that fits under a schedule that is allowed; None where none is found.

    starts: plans of stages without further degrees, the fastest first; under any schedule.
    allowed: `explicit` stands for orders of passes of their own.
    """
    schedules = [pair for pair in (*SCHEDULES, *SPLIT_SCHEDULES) if pair[0] in allowed]
    # explicit orders are those of designs, which have a named schedule
    space = Space(data, schedules or SCHEDULES)
    local = LocalSearch(space, run.part(share=limits.search_share), limits.of_search)
    under_all_schedules(local, starts[: limits.starts])
    local.vary()
    local.rounds()
    best = local.incumbent if schedules else None
    if "explicit" not in allowed:
        return best
    local.incumbent, local.run = best, run
    for design in best_designs(local, starts, limits.ordered):
        if run.should_stop:
            break
        ordered = with_explicit_order(space.sketch(design), space.replayer, run, limits)
        if ordered is not None:
            local.offer(ordered, space.replayer.seconds(ordered))
    return local.incumbent


def under_all_schedules(local: LocalSearch, starts: Sequence[Plan]) -> None:
    """Replay the designs nearest to plans, under every schedule of the space."""
    space = local.space
    for plan in starts:
        for schedule, chunks in space.schedules:
            changed = space.with_schedule(design_of(plan), schedule, chunks)
            repaired = None if changed is None else space.repaired(changed)
            if repaired is not None and not local.late:
                local.penalised_seconds(repaired)


def best_designs(local: LocalSearch, starts: Sequence[Plan], most: int) -> Iterator[Design]:
    """The best designs of the search, of unlike shapes, and the one nearest to the first start."""
    ranked = [design for _, design in sorted(local.best_of_shape.values(), key=lambda v: v[0])]
    if local.incumbent is not None:
        ranked.insert(0, design_of(local.incumbent.plan))
    if starts:
        ranked.insert(1, design_of(starts[0]))
    yield from list(dict.fromkeys(ranked))[:most]


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
    passes = []
    for problem in problems:
        found = known[problem]
        if found is None:
            return None
        passes.append(problem.texts(found.order))
    return plan.model_copy(update={"schedule": "explicit", "passes": passes})
