"""The strategy `joint`, hetplan's own problem: of all plans of stages that a plan file can express,
find the one whose replay is shortest.

A plan of stages is one without an SPMD program (those of HAP). The strategy is asked last and
begins with the plans of all other strategies, so that its plan is no slower than any of them that
is a plan of stages. Its bound holds for all plans of stages without further degrees (context ranks,
expert ranks, …). If another strategy's plan has further degrees, it begins with the same pipeline
without them: the row groups then share samples instead of tokens.

The candidate `joint/schedules` is from a search that begins with the plans of all rows, that of
`joint/auto` among them, and goes on under schedules with split backward passes and in explicit
orders of passes (formulations/joint/schedule/choose.py). The bound of `joint/auto` holds for plans
under GPipe, 1F1B and interleaved 1F1B; that of `joint/schedules` for all orders of passes.

The candidate `joint/degrees` is from a local search that begins with the same plans and changes
further degrees, stages, cuts, devices, micro-batches, schedule, ZeRO level and recomputation
together. All replicas stay alike. Its tensor and context degrees and its micro-batches are those of
`astra/degrees`, whose bound by computing alone therefore holds for its plans, too. The candidate
`joint/degrees-schedules` is the choice of a schedule among such plans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from hetplan.errors import UnsupportedError, require
from hetplan.formulations import family
from hetplan.formulations.joint.annealing import BestPlan, LocalSearch, Parameters
from hetplan.formulations.joint.bound.driver import lower_bound
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import (
    SCHEDULES as WITH_WHOLE_PASSES,
    Design,
    design_of,
)
from hetplan.formulations.joint.evaluate import broken, decision_of, plan_of
from hetplan.formulations.joint.schedule.choose import choose, with_chunks
from hetplan.formulations.joint.space import Space
from hetplan.planner.astra import LIMITS, with_degrees
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.strategy import NoPlan, Problem, Strategy
from hetplan.planner.variants import useful_modes
from hetplan.plans.degrees import Degrees
from hetplan.plans.ladder import Rung
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import PASS_SCHEDULES, PassSchedule, Plan, Schedule, check_degrees
from hetplan.profiling.workload import Workload
from hetplan.replays.degrees import zero_costs
from hetplan.replays.model_states import STAGES
from hetplan.replays.pose import pose
from hetplan.replays.replay import StageReplayer
from hetplan.schema import Positive, StrictModel
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Result, Run

MOST_WORKERS = 64
# The method that chooses a schedule. It counts a share of the strategy's seconds in addition, of
# which the search takes its part and the bound the rest.
SCHEDULES = StrategyMethod("schedules")
# The names by which the ranking lists the two methods for plans with further degrees. Neither
# proves anything.
WITH_DEGREES = StrategyMethod("degrees")
SCHEDULES_WITH_DEGREES = StrategyMethod("degrees-schedules")
SCHEDULES_SHARE = 0.5
SCHEDULES_SEARCH = 0.7


class JointSettings(StrictModel):
    """The settings `--set joint.NAME=VALUE`."""

    seconds: Positive = 30.0
    """Seconds of a slow core that search and proof count together, at most."""
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 2
    """Number of processes that the search runs in. Another number may give another plan."""


class Joint(Strategy):
    """The strategy: the plan whose replay is shortest."""

    name = "joint"
    methods: ClassVar[tuple[StrategyMethod, ...]] = (
        StrategyMethod("auto", exact=True),
        SCHEDULES,
    )
    Settings = JointSettings
    slow = True

    def __init__(
        self,
        settings: JointSettings | None = None,
        starts: Sequence[Plan] = (),
        levels: Sequence[int] = STAGES,
        schedules: Sequence[PassSchedule] = PASS_SCHEDULES,
    ) -> None:
        self.settings = settings or JointSettings()
        self.starts = starts  # plans of the same workload with which the search begins
        self.levels = levels  # ZeRO levels that plans may have
        self.schedules = schedules  # that plans may have

    @property
    def seconds(self) -> float:
        """Seconds of a slow core that all its methods count together, at most."""
        return self.settings.seconds * (1 + SCHEDULES_SHARE)

    def beginning_with(self, plans: Iterable[Plan]) -> "Joint":
        """The strategy with further plans with which the search begins."""
        return Joint(self.settings, [*self.starts, *plans], self.levels, self.schedules)

    def within_levels(self, levels: Sequence[int]) -> "Joint":
        """The strategy whose problems have only plans of these ZeRO levels."""
        return Joint(self.settings, self.starts, tuple(levels), self.schedules)

    def within_schedules(self, schedules: Sequence[PassSchedule]) -> "Joint":
        """The strategy that chooses among these schedules."""
        return Joint(self.settings, self.starts, self.levels, schedules)

    def pose(self, workload: Workload, run: Run) -> "list[Problem]":
        """The problem of plans without further degrees, and the problem of plans with them if these
        are searched (`astra.with_degrees`)."""
        require(
            workload.links is None,
            "learned links are no part of the problem",
            where="joint",
            kind=UnsupportedError,
        )
        data = pose(workload, ("none", *useful_modes(workload)), self.levels)
        degrees, seconds = with_degrees(workload), self.settings.seconds
        if degrees:
            seconds /= 2
        schedules = tuple(self.schedules)
        problem = JointProblem(data, self.starts, seconds, self.settings.workers, schedules)
        if not degrees:
            return [problem]
        return [problem, FurtherProblem(workload, data, self.starts, seconds, schedules=schedules)]


@dataclass(frozen=True)
class JointProblem(Problem):
    """The workload as an instance of problem `joint`."""

    data: JointData
    starts: Sequence[Plan]  # plans with which the search begins
    seconds: float  # budget of search and proof, in seconds that count work instead of time
    workers: int = 1  # processes of the search
    schedules: tuple[PassSchedule, ...] = PASS_SCHEDULES  # that plans may have

    @property
    def starts_in_the_problem(self) -> list[JointDecision]:
        """The starts that are plans of the problem."""
        return [decision_of(plan) for plan in self.chains if plan.schedule in WHOLE_SCHEDULES]

    @property
    def chains(self) -> list[Plan]:
        """The starts that are plans of stages, under any schedule, without further degrees."""
        return [
            plan.model_copy(update={"degrees": None, **self.data.common_fields})
            for plan in self.starts
            if plan.program is None and not any(broken(self.data, plan))
        ]

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The best plan of search and proof, with its bound; or that of the choice of a schedule.
        Raises NoPlan where none is found."""
        if method == SCHEDULES:
            return self.with_best_schedule(run)
        part = run.part(seconds=self.seconds, quiet=False)
        result = solve(
            family("joint"),
            self.data,
            method.name,
            part,
            starts=self.starts_in_the_problem,
            workers=self.workers,
        )
        if result.decision is None:
            raise NoPlan(
                result.status, result.message or "no plan was reached in time", result.seconds
            )
        return replace(
            Candidate.of_result("joint", method, result),
            objective=result.objective,
            fits_memory=True,
            plan=plan_of(self.data, result.decision),
            ladder=ladder_of(result),
        )

    def with_best_schedule(self, run: Run) -> Candidate | None:
        """The best plan found under the schedules that plans may have, with the bound of all orders
        of passes; None where no schedule is left beside those of the method `auto`."""
        searched = not_yet_searched(self.schedules)
        if not searched:
            return None
        part = run.part(seconds=SCHEDULES_SHARE * self.seconds, quiet=False)
        space = Space(self.data, with_chunks(searched))
        found = choose(space, part.part(share=SCHEDULES_SEARCH), self.chains, searched)
        bound = None
        if not set(searched) <= set(WHOLE_SCHEDULES):
            bound = lower_bound(Relaxation(self.data), part, any_order=True)
        return chosen(found, space, SCHEDULES, part, bound)


def not_yet_searched(schedules: Sequence[PassSchedule]) -> tuple[PassSchedule, ...]:
    """The schedules that the choice searches. If plans may have all of whole backward passes, the
    method `auto` has searched these already."""
    if set(WHOLE_SCHEDULES) <= set(schedules):
        return tuple(each for each in schedules if each not in WHOLE_SCHEDULES)
    return tuple(schedules)


def chosen(
    found: BestPlan | None, space: Space, listed: StrategyMethod, run: Run, bound: float | None
) -> Candidate:
    """The candidate of a choice of a schedule. listed: the method as the ranking lists it. bound:
    that of all orders of passes; None where it is not known."""
    candidate = Candidate(
        strategy="joint",
        method=listed,
        status="unknown",
        bound=bound,
        solve_seconds=run.elapsed,
    )
    if found is None:
        return replace(candidate, message="no plan found fits under these schedules")
    plan = Plan.model_validate(dict(found.plan))
    seconds, _ = found.order  # the key `Plan.order`: its first entry is the seconds
    return replace(
        candidate,
        status="feasible",
        objective=seconds,
        fits_memory=True,
        plan=plan,
        details={"seconds_under_1f1b": seconds_under_1f1b(space, plan)},
    )


def seconds_under_1f1b(space: Space, plan: Plan) -> float | None:
    """Replayed seconds of a plan's replicas under 1F1B, on the same devices and in the same
    micro-batches; cut evenly where the plan has several chunks. None where that does not fit."""
    design = space.with_schedule(design_of(plan), "1f1b", 1)
    repaired = None if design is None else space.repaired(design)
    if repaired is None:
        return None
    under_1f1b = space.sketch(repaired)
    if space.replayer.excess(under_1f1b):
        return None
    return space.replayer.seconds(under_1f1b)


def ladder_of(result: Result[Any]) -> tuple[Rung, ...]:
    """The ladder of bounds in the details of a result; empty where there is none."""
    rungs: Any = result.details.get("ladder", [])
    return tuple(Rung.model_validate(rung) for rung in rungs)


# Parameters of the search for designs with further degrees, chosen on the cases of
# tests/joint/test_further.py. Their replays are slow: about forty per second on 32 devices.
FURTHER = Parameters(
    shares={
        "cut": 4, "order": 2, "swap": 1, "unite": 2, "divide": 2, "pair": 1,
        "micro": 3, "schedule": 1, "zero": 2, "mode": 0.5, "further": 3,
    },
    alike_probabilities=(1.0,), far=6.0, near=5.0, scattered=60, away=5, width=8, first_steps=60,
)  # fmt: skip


# Ratio of the seconds of a replay with further degrees to those of a replay without.
FURTHER_REPLAYS = 3.0


class FurtherSpace(Space):
    """The designs of plans with further degrees, in which the row groups of a stage are context
    ranks, and all replicas are alike.

    The moves of the local search do not keep these rules: they change the groups of one replica, or
    a number of row groups. `repaired` sets the degrees that follow from the groups, and rejects
    every design for which no degrees are possible. Most designs may be rejected, since that takes
    little time in comparison with a replay.
    """

    def __init__(
        self,
        data: JointData,
        workload: Workload,
        schedules: Sequence[tuple[Schedule, int]] = WITH_WHOLE_PASSES,
    ) -> None:
        """schedules: as those of `Space`."""
        super().__init__(data, schedules)
        self.workload = workload
        self.replayer = StageReplayer(workload)
        with_tables = {table.micro_batch for table in data.tables}
        self.micro_batches = with_tables & {*range(LIMITS.samples + 1)}  # allowed sizes
        self.contexts = {2**e for e in range(LIMITS.context.bit_length())}  # allowed degrees

    def lower_bound(self, design: Design) -> float:
        """0, so that every design is replayed: the bound by computing alone of `Space` is wrong
        here, because it gives each row group samples of its own, which context ranks share."""
        return 0.0

    def replay_seconds(self, design: Design) -> float:
        """The seconds that a replay of the design counts, which are many: its costs are made
        anew."""
        return FURTHER_REPLAYS * super().replay_seconds(design)

    def repaired(self, design: Design) -> Design | None:
        """The nearest design that obeys the rules of a plan file, with the degrees that follow from
        its groups; None where there is none, or none that can be replayed."""
        repaired = super().repaired(design)
        if repaired is None or repaired.degrees is None:
            return None
        shape = common_stage_shape(repaired)
        if shape is None or not replicas_are_alike(repaired):
            return None
        context, tensor = shape
        first = repaired.pipelines[0]
        whole_micro_batches = first.samples % first.micro_batch == 0
        if context not in self.contexts or first.micro_batch not in self.micro_batches:
            return None
        if not whole_micro_batches:
            return None
        complete = replace(repaired, degrees=fitting(repaired.degrees, context, tensor))
        return complete if can_be_replayed(self.sketch(complete), self.workload) else None


def common_stage_shape(design: Design) -> tuple[int, int] | None:
    """(row groups, tensor ranks) of every stage; None where stages differ."""
    groups = [group for pipeline in design.pipelines for group in pipeline.groups]
    shapes = {(len(group), len(group[0])) for group in groups}
    return shapes.pop() if len(shapes) == 1 else None


def replicas_are_alike(design: Design) -> bool:
    """Whether all replicas have equally many stages, cuts, micro-batches and samples."""
    shapes = {(len(p.groups), p.cuts, p.micro_batch, p.samples) for p in design.pipelines}
    return len(shapes) == 1


def fitting(degrees: Degrees, context: int, tensor: int) -> Degrees:
    """The degrees, made to suit the numbers of context and of tensor ranks of a stage. All-to-all
    exchanges need several context ranks; tensor ranks of experts and sequence parallelism need
    several tensor ranks."""
    return degrees.model_copy(
        update={
            "context": context,
            "exchange": degrees.exchange if context > 1 else "ring",
            "expert_tensor": tensor if degrees.expert_tensor > 1 else 1,
            "sequence_parallel": degrees.sequence_parallel and tensor > 1,
        }
    )


def can_be_replayed(plan: Plan, workload: Workload) -> bool:
    """Whether the plan's further degrees obey the rules of a plan file, and can be replayed."""
    try:
        check_degrees(plan)
        zero_costs(plan, workload)
    except ValueError:  # both raise InputError, which is a ValueError
        return False
    return True


def with_all_degrees(plan: Plan) -> Plan | None:
    """The plan with further degrees: its own, or those that change nothing.

    None for SPMD plans, and for plans without further degrees that have several row groups in a
    stage: such row groups share samples, but those of a plan with degrees share tokens.
    """
    if plan.degrees is not None:
        return plan
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    if plan.program is not None or any(len(stage.devices) > 1 for stage in stages):
        return None
    neutral = Degrees(expert_tensor=len(stages[0].tensor_shares))
    return plan.model_copy(update={"degrees": neutral})


@dataclass(frozen=True)
class FurtherProblem(Problem):
    """The workload with plans that have further degrees, for the local search alone."""

    workload: Workload
    data: JointData
    starts: Sequence[Plan]  # plans with which the search begins, the fastest first
    seconds: float  # budget of the search, in seconds that count work instead of time
    parameters: Parameters = FURTHER  # parameters of the local search
    schedules: tuple[PassSchedule, ...] = PASS_SCHEDULES  # that plans may have

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method as the ranking lists it. It proves nothing: the searches give no bound."""
        return SCHEDULES_WITH_DEGREES if method == SCHEDULES else WITH_DEGREES

    def usable_starts(self) -> list[Plan]:
        """The first `parameters.replayed` of the starts that can be replayed with further
        degrees."""
        usable: list[Plan] = []
        for plan in self.starts:
            if len(usable) == self.parameters.replayed:
                break
            complete = with_all_degrees(plan)
            allowed = plan.zero in self.data.zero_levels
            if allowed and complete is not None and can_be_replayed(complete, self.workload):
                usable.append(complete)
        return usable

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The plan that fits and whose replay is shortest, of those that the local search replays;
        or that of the choice of a schedule. Raises NoPlan where no plan fits."""
        if method == SCHEDULES:
            return self.with_best_schedule(run)
        part = run.part(seconds=self.seconds, quiet=False)
        search = LocalSearch(FurtherSpace(self.data, self.workload), part, self.parameters)
        search.begin(self.usable_starts())
        search.vary()
        search.rounds()
        if search.incumbent is None:
            raise NoPlan("unknown", "no plan with further degrees fits", part.elapsed)
        seconds, _ = search.incumbent.order  # the key `Plan.order`: its first entry is the seconds
        sketch = search.incumbent.plan  # `Space.sketch` leaves out the check of the rules
        plan = Plan.model_validate(dict(sketch))
        return Candidate(
            strategy="joint",
            method=method,
            status="feasible",
            objective=seconds,
            fits_memory=True,
            solve_seconds=part.elapsed,
            plan=self.without_idle_degrees(plan),
            message=f"{search.replays} plans replayed",
        )

    def without_idle_degrees(self, plan: Plan) -> Plan:
        """The plan, without its degrees where these change nothing."""
        if zero_costs(plan, self.workload) is not None:
            return plan
        return plan.model_copy(update={"degrees": None})

    def with_best_schedule(self, run: Run) -> Candidate | None:
        """The best plan found under the schedules that plans may have; None where no schedule is
        left beside those of the method `degrees`, and where no plan with further degrees is known
        to begin with."""
        searched, starts = not_yet_searched(self.schedules), self.usable_starts()
        if not searched or not starts:
            return None
        part = run.part(seconds=SCHEDULES_SHARE * self.seconds, quiet=False)
        space = FurtherSpace(self.data, self.workload, with_chunks(searched))
        candidate = chosen(
            choose(space, part, starts, searched), space, SCHEDULES_WITH_DEGREES, part, None
        )
        if candidate.plan is None:
            return candidate
        return replace(candidate, plan=self.without_idle_degrees(candidate.plan))
