"""HAP's engine for plans with SPMD programs (`runtime.spmd`)."""

from collections import defaultdict
from typing import Any

import numpy as np

from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_own_program
from hetplan.profiling.models.model import Model
from hetplan.profiling.workload import Workload
from hetplan.replays.programs import SpmdCosts
from hetplan.replays.simulator.tasks import LABELS, Kind, Timeline
from hetplan.runtime.events import Watch
from hetplan.runtime.execution.protocol import DeviceIntervals, Interval, ModelPart
from hetplan.runtime.job import Job
from hetplan.runtime.launch.rehearsal import Virtual, own_pass

COLLECTIVE_SECONDS = 0.002  # processor seconds of a collective of a single number


class ProgramEngine:
    """Executes SPMD programs. No program is narrow enough on every model to stand for it, so that a
    rehearsal trains nothing."""

    trains_rehearsals = False

    def check_model(self, plan: Plan, model: Model) -> None:
        """Raise UnsupportedError for a plan whose program hetplan does not compute."""
        check_own_program(plan)

    def owners(self, plan: Plan, workload: Workload) -> dict[int, DeviceIntervals]:
        """Layer -> (device, interval of its shard) for each parameter of the layer.

        The parameters of a layer lie one behind the other in [0, 1). A shard along any dimension
        counts as an interval of its parameter, as a tensor rank's part does."""
        costs = SpmdCosts.of(plan, workload)
        program, shards = costs.decided.program, costs.decided.shards
        parts: dict[int, DeviceIntervals] = defaultdict(list)
        for l, layer in enumerate(workload.profile.layers):
            nodes = [node for node in program.parameters if node.layer == layer.name]
            whole, begin = sum(node.elements for node in nodes), 0.0
            for node in nodes:
                shard = shards[program.copies.get(node.name, node.name)]
                share = node.elements / whole
                for rank, device in enumerate(costs.devices):
                    first, last = shard.interval(rank)
                    if last > first:
                        parts[l].append((device, placed(begin, share, (first, last))))
                begin += share
        return parts

    def real_seconds(self, plan: Plan, timeline: Timeline, place: Place) -> float:
        """Processor seconds that an iteration of a rank needs in a rehearsal, for collectives of a
        single number."""
        collectives = np.count_nonzero(timeline.tasks.kind == Kind.COLLECTIVE)
        return COLLECTIVE_SECONDS * int(collectives)

    def moment(self, event: dict[str, Any], unit: int) -> str | None:
        """A rank rehearses its own passes, and collectives, which all devices join."""
        if event["kind"] == LABELS[Kind.COLLECTIVE]:
            return "collective"
        return own_pass(event, unit)

    def check_job(self, job: Job) -> None:
        """Raises InputError for a program that is not the plan's, UnsupportedError for what
        programs do not offer."""
        from hetplan.runtime.spmd.models import check_program

        check_program(job)

    def part(self, job: Job, watch: Watch, device: str, shared: Any) -> ModelPart:
        """The rank's shards; in a rehearsal its collectives."""
        if isinstance(watch, Virtual):
            from hetplan.runtime.spmd.rehearsed import RehearsedProgram

            return RehearsedProgram(watch)
        from hetplan.runtime.spmd.distributed import DistributedProgram
        from hetplan.runtime.spmd.models import make_program

        return DistributedProgram(
            make_program(job), job.plan, device=device, seed=job.seed, watch=watch
        )

    def distribute(self, module: Any, plan: Plan, **options: Any) -> Any:
        """The rank's shards of a single-device program, or of a module with data of its own; see
        `spmd.distributed`."""
        from hetplan.runtime.spmd.distributed import DistributedProgram

        return DistributedProgram(module, plan, **options)


def placed(begin: float, share: float, interval: Interval) -> Interval:
    """The interval of a layer that an interval of a parameter is. begin, share: the parameter's."""
    first, last = interval
    return begin + share * first, begin + share * last
