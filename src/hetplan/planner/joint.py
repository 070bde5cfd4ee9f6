"""The sixth problem as a strategy: of all plans that a plan file can express, the one whose replay
is shortest.

It is asked last and begins with the plans of the others, so that it is no slower than any of
them that is a chain of stages. Its bound holds for all chains of stages; programs that all devices
run together (HAP's) are no chains. Of a plan with further degrees (context, expert ranks) it begins
with the pipeline, whose row groups then share samples: neither its plans nor its bound have any.

`joint/degrees` begins with the same plans and changes further degrees, stages, cuts, devices,
micro-batches, schedule, ZeRO and recomputation together; all replicas stay alike. Its
tensor and context degrees and its micro-batches are those of `astra/degrees`, whose bound by
computing alone holds for its plans, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hetplan.errors import UnsupportedError, require
from hetplan.formulations import family
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Design, Space
from hetplan.formulations.joint.evaluate import broken, decision_of, plan_of
from hetplan.formulations.joint.search import Parameters, Search
from hetplan.planner.astra import LIMITS, with_degrees
from hetplan.planner.strategy import (
    Candidate,
    NoPlan,
    Problem,
    Strategy,
    StrategyMethod,
    useful_modes,
)
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, check_degrees
from hetplan.profiling.workload import Workload
from hetplan.replays.degrees import zero_costs
from hetplan.replays.pose import pose
from hetplan.replays.replay import StageReplayer
from hetplan.schema import Positive, StrictModel
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run


class JointSettings(StrictModel):
    """seconds: of search and proof together, at most; no more than the time that is left."""

    seconds: Positive = 20.0


class Joint(Strategy):
    """See the module. starts: plans of the same workload to begin with."""

    name = "joint"
    methods = (StrategyMethod("auto", exact=True),)
    Settings = JointSettings
    slow = True

    def __init__(self, settings: JointSettings | None = None, starts: Sequence[Plan] = ()) -> None:
        self.settings, self.starts = settings or JointSettings(), starts

    def beginning_with(self, plans: Iterable[Plan]) -> "Joint":
        """The strategy with more plans to begin with."""
        return Joint(self.settings, [*self.starts, *plans])

    def pose(self, workload: Workload, run: Run) -> "list[Problem]":
        """Plans without further degrees, and with them where these are searched."""
        require(
            workload.links is None,
            "learned links are no part of the problem",
            where="joint",
            kind=UnsupportedError,
        )
        data = pose(workload, ("none", *useful_modes(workload)))
        further = with_degrees(workload)
        seconds = self.settings.seconds / (2 if further else 1)
        return [
            JointProblem(data, self.starts, seconds),
            *([FurtherProblem(workload, data, self.starts, seconds)] if further else []),
        ]


@dataclass(frozen=True)
class JointProblem(Problem):
    """An instance with plans to begin with."""

    data: JointData
    starts: Sequence[Plan]
    seconds: float

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The best of search and proof."""
        part = run.part(time_limit=self.seconds, quiet=False)
        chains = [plan for plan in self.starts if plan.program is None]
        starts = [decision_of(plan) for plan in chains if not any(broken(self.data, plan))]
        result = solve(family("joint"), self.data, method.name, part, starts=starts)
        if result.decision is None:
            raise NoPlan(
                result.status, result.message or "no plan was reached in time", result.seconds
            )
        return replace(
            Candidate.of_result("joint", method, result),
            objective=result.objective,
            fits_memory=True,
            plan=plan_of(self.data, result.decision),
        )


# Of designs with further degrees, whose replays are slow: on 32 devices some forty in a second.
# Chosen on the cases of tests/joint/test_further.py.
FURTHER = Parameters(
    shares={
        "cut": 4, "order": 2, "swap": 1, "unite": 2, "divide": 2, "pair": 1,
        "micro": 3, "schedule": 1, "zero": 2, "mode": 0.5, "further": 3,
    },
    together=(1.0,), far=6.0, near=5.0, scattered=60, away=5, width=8, first_steps=60,
)  # fmt: skip


class FurtherSpace(Space):
    """Designs with further degrees: all replicas alike, row groups are context ranks."""

    def __init__(self, data: JointData, workload: Workload) -> None:
        super().__init__(data)
        self.workload, self.replayer = workload, StageReplayer(workload)
        self.samples, self.contexts = (
            {table.micro_batch for table in data.tables} & {*range(LIMITS.samples + 1)},
            {2**e for e in range(LIMITS.context.bit_length())},
        )

    def least(self, design: Design) -> float:
        """Nothing is known without a replay."""
        return 0.0

    def repaired(self, design: Design) -> Design | None:
        """With degrees that suit its groups; None where none do."""
        made = super().repaired(design)
        if made is None or made.degrees is None:
            return None
        pipe, now = made.pipes[0], made.degrees
        alike = {(len(p.groups), p.cuts, p.micro, p.samples) for p in made.pipes}
        (context, tensor), *unlike = {(len(g), len(g[0])) for p in made.pipes for g in p.groups}
        whole = pipe.micro in self.samples and pipe.samples % pipe.micro == 0
        if len(alike) > 1 or unlike or not whole or context not in self.contexts:
            return None
        changes = {
            "context": context,
            "exchange": now.exchange if context > 1 else "ring",
            "expert_tensor": tensor if now.expert_tensor > 1 else 1,
            "sequence_parallel": now.sequence_parallel and tensor > 1,
        }
        made = replace(made, degrees=now.model_copy(update=changes))
        return made if can_be_replayed(self.sketch(made), self.workload) else None


def can_be_replayed(plan: Plan, workload: Workload) -> bool:
    """Whether the replay has costs for the plan's further degrees."""
    try:
        check_degrees(plan)
        zero_costs(plan, workload)
    except ValueError:  # an InputError is one, and so is what a rule of plan files refuses
        return False
    return True


def with_all_degrees(plan: Plan) -> Plan | None:
    """The plan, one without further degrees with those that change nothing; None where row groups
    share samples, and for programs."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    single = plan.program is None and all(len(stage.devices) == 1 for stage in stages)
    nothing = Degrees(expert_tensor=len(stages[0].tensor_shares)) if single else None
    degrees = plan.degrees or nothing
    return plan.model_copy(update={"degrees": degrees}) if degrees is not None else None


@dataclass(frozen=True)
class FurtherProblem(Problem):
    """Plans to begin with, the fastest first. seconds: at most. parameters: of the search."""

    workload: Workload
    data: JointData
    starts: Sequence[Plan]
    seconds: float
    parameters: Parameters = FURTHER

    def renamed(self, method: StrategyMethod) -> StrategyMethod:
        """`degrees`."""
        return StrategyMethod("degrees")

    def usable_starts(self) -> list[Plan]:
        """The first plans to begin with that can be replayed with further degrees."""
        written = (with_all_degrees(plan) for plan in self.starts)
        usable = (p for p in written if p is not None and can_be_replayed(p, self.workload))
        return list(islice(usable, self.parameters.replayed))

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The shortest replay that fits."""
        part = run.part(time_limit=self.seconds, quiet=False)
        search = Search(FurtherSpace(self.data, self.workload), part, self.parameters)
        search.begin(self.usable_starts())
        search.vary()
        search.rounds()
        if search.best is None:
            raise NoPlan("unknown", "no plan with further degrees fits", part.elapsed)
        plan = Plan.model_validate(dict(search.best[1]))
        needless = zero_costs(plan, self.workload) is None
        return Candidate(
            strategy="joint",
            method=method,
            status="feasible",
            objective=search.best[0][0],
            fits_memory=True,
            solve_seconds=part.elapsed,
            plan=plan.model_copy(update={"degrees": None if needless else plan.degrees}),
            message=f"{search.replays} plans replayed",
        )
