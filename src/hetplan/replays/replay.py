"""The entry to replays: plans of every family on a workload, by the replayer of stages (`chains`)
or of SPMD programs (`programs`)."""

import math
from functools import partial

from hetplan.errors import require
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import ChainReplayer, Noise, Replay, Settings
from hetplan.replays.degrees import zero_costs
from hetplan.replays.pose import costs_of
from hetplan.replays.programs import ProgramReplayer
from hetplan.replays.zero import ZeroCosts

__all__ = ["Noise", "Replay", "Replayer", "Settings", "check_same", "replay"]


class StageReplayer(ChainReplayer):
    """Replays plans of stages on one workload, with their further degrees."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        super().__init__(partial(costs_of, workload), settings)
        self.workload = workload

    def zero(self, plan: Plan) -> ZeroCosts:
        """The plan's costs, with its further degrees where it has any."""
        with_degrees = zero_costs(plan, self.workload)
        if with_degrees is not None:
            return with_degrees
        return super().zero(plan)


class Replayer:
    """Replays plans of every family on one workload, one after the other, with common caches."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        self.workload = workload
        self.stages = StageReplayer(workload, settings)
        self.programs = ProgramReplayer(workload, settings)

    def of(self, plan: Plan) -> StageReplayer | ProgramReplayer:
        """The replayer for a plan of stages or for a plan with a program. Raises InputError where
        `check_same` does."""
        check_same(plan, self.workload)
        return self.stages if plan.program is None else self.programs

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        return self.of(plan).replay(plan)

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds per iteration of a plan; or a lower bound of them that exceeds `limit`."""
        return self.of(plan).seconds(plan, limit)

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """The median seconds per iteration over replays with random durations; for an SPMD program
        its seconds without noise."""
        return self.of(plan).robust_seconds(plan, noise)


def replay(plan: Plan, workload: Workload, settings: Settings | None = None) -> Replay:
    """One iteration of the plan, with its timeline and memory. Raises InputError where `check_same`
    does, UnsupportedError for a plan or settings that the replay does not support."""
    return Replayer(workload, settings).replay(plan)


def check_same(plan: Plan, workload: Workload) -> None:
    """Raise InputError unless the plan was made for the workload's model, devices and batch."""
    planned, devices = plan.workload, workload.cluster.devices
    for name, of_plan, of_workload in (
        ("model", planned.model, workload.model.name),
        ("global_batch", planned.global_batch, workload.global_batch),
        ("sequence", planned.sequence, workload.sequence),
        ("precision", planned.precision, workload.precision),
        ("number of layers", len(planned.layers), len(workload.profile.layers)),
        ("devices", [d.type for d in plan.devices], [d.type for d in devices]),
        ("nodes", [d.node for d in plan.devices], [d.node for d in devices]),
    ):
        require(
            of_plan == of_workload,
            f"{name} of the plan is not the workload's",
            where=plan.name,
            got=of_plan,
            expected=repr(of_workload),
        )
