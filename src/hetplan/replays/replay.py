"""Plans of every family replayed on a workload: the entry that chooses between plans of stages
(`chains`) and SPMD programs (`programs`)."""

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
    """Replays plans of stages of one workload, with their further degrees."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        super().__init__(partial(costs_of, workload), settings)
        self.workload = workload

    def zero(self, plan: Plan) -> ZeroCosts:
        """The plan's costs, with its further degrees."""
        further = None if plan.degrees is None else zero_costs(plan, self.workload)
        return further or super().zero(plan)


class Replayer:
    """Replays plans of one workload, one after the other; what they have in common is kept."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        self.workload = workload
        self.stages = StageReplayer(workload, settings)
        self.programs = ProgramReplayer(workload, settings)

    def of(self, plan: Plan) -> StageReplayer | ProgramReplayer:
        """The replayer of the plan's kind. Raises InputError unless the plan was made for such a
        workload."""
        check_same(plan, self.workload)
        return self.stages if plan.program is None else self.programs

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        return self.of(plan).replay(plan)

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds per iteration of a plan; where they are surely more than `limit`, some number
        between both."""
        return self.of(plan).seconds(plan, limit)

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """The median of replays whose durations are noisy; of an SPMD program its seconds."""
        return self.of(plan).robust_seconds(plan, noise)


def replay(plan: Plan, workload: Workload, settings: Settings | None = None) -> Replay:
    """One iteration of the plan. Raises InputError unless plan and workload belong together,
    UnsupportedError for what is not modelled."""
    return Replayer(workload, settings).replay(plan)


def check_same(plan: Plan, workload: Workload) -> None:
    """Raise InputError unless the plan was made for such a model, cluster and batch."""
    made, devices = plan.workload, workload.cluster.devices
    for name, of_plan, of_workload in (
        ("model", made.model, workload.model.name),
        ("global_batch", made.global_batch, workload.global_batch),
        ("sequence", made.sequence, workload.sequence),
        ("precision", made.precision, workload.precision),
        ("number of layers", len(made.layers), len(workload.profile.layers)),
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
