"""The sixth problem as a strategy: of all plans that a plan file can express, the one whose replay
is shortest.

It is asked last and begins with the plans of the others, so that it is no slower than any of
them that is a chain of stages. Its bound holds for all chains of stages; programs that all devices
run together (HAP's) are no chains. Of a plan with further degrees (context, expert ranks) it begins
with the pipeline, whose row groups then share samples: neither its plans nor its bound have any.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hetplan.errors import UnsupportedError, require
from hetplan.formulations import family
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.evaluate import broken, decision_of, plan_of
from hetplan.formulations.joint.plan import Plan
from hetplan.formulations.joint.pose import pose
from hetplan.planner.strategy import (
    Candidate,
    NoPlan,
    Problem,
    Strategy,
    StrategyMethod,
    useful_modes,
)
from hetplan.profiling.workload import Workload
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

    def pose(self, workload: Workload, run: Run) -> "list[JointProblem]":
        """One problem."""
        require(
            workload.links is None,
            "learned links are no part of the problem",
            where="joint",
            kind=UnsupportedError,
        )
        data = pose(workload, ("none", *useful_modes(workload)))
        return [JointProblem(data, self.starts, self.settings.seconds)]


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
