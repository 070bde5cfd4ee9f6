"""The engine for HAP's plans with SPMD programs; `runtime.spmd` executes them."""

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
from hetplan.runtime.execution.protocol import DeviceIntervals, ModelPart
from hetplan.runtime.job import Job
from hetplan.runtime.launch.rehearsal import Virtual, own_pass

COLLECTIVE_SECONDS = 0.002  # processor seconds of a collective of a single number


class ProgramEngine:
    """Executes SPMD programs. A rehearsal trains nothing, since not every model has a narrow
    program that could stand for its own."""

    trains_rehearsals = False

    def check_model(self, plan: Plan, model: Model) -> None:
        """Raise UnsupportedError for a plan whose program hetplan does not compute."""
        check_own_program(plan)

    def owners(self, plan: Plan, workload: Workload) -> dict[int, DeviceIntervals]:
        """Layer -> (device, interval of the layer's parameters) for each shard of a parameter.

        The parameters of a layer follow each other in its interval [0, 1), by their numbers of
        elements. A slice along any dimension of a parameter counts as an interval of it.
        """
        costs = SpmdCosts.of(plan, workload)
        program, shards = costs.decided.program, costs.decided.shards
        intervals: dict[int, DeviceIntervals] = defaultdict(list)
        for l, layer in enumerate(workload.profile.layers):
            parameters = [node for node in program.parameters if node.layer == layer.name]
            layer_elements = sum(parameter.elements for parameter in parameters)
            begin = 0.0
            for parameter in parameters:
                shard = shards[program.copies.get(parameter.name, parameter.name)]
                width = parameter.elements / layer_elements
                for rank, device in enumerate(costs.devices):
                    first, last = shard.interval(rank)
                    if last > first:
                        interval = (begin + width * first, begin + width * last)
                        intervals[l].append((device, interval))
                begin += width
        return intervals

    def real_seconds(self, plan: Plan, timeline: Timeline, place: Place) -> float:
        """Processor seconds that a rank needs in a rehearsed iteration. Each of its collectives
        has a single number."""
        collectives = np.count_nonzero(timeline.tasks.kind == Kind.COLLECTIVE)
        return COLLECTIVE_SECONDS * int(collectives)

    def moment(self, event: dict[str, Any], unit: int) -> str | None:
        """The role of an event for a rank: "collective" for a collective, in which all ranks take
        part; "forward" or "backward" for a pass of the rank's unit; None for all other events."""
        if event["kind"] == LABELS[Kind.COLLECTIVE]:
            return "collective"
        return own_pass(event, unit)

    def check_job(self, job: Job) -> None:
        """Raise InputError where the model's program is not the plan's, and UnsupportedError where
        SPMD programs lack an option of the job."""
        from hetplan.runtime.spmd.models import check_program

        check_program(job)

    def part(self, job: Job, watch: Watch, device: str, shared: Any) -> ModelPart:
        """The rank's shards of the job's program; in a rehearsal a part that only takes part in
        the collectives."""
        if isinstance(watch, Virtual):
            from hetplan.runtime.spmd.rehearsed import RehearsedProgram

            return RehearsedProgram(watch)
        from hetplan.runtime.spmd.distributed import DistributedProgram
        from hetplan.runtime.spmd.models import make_program

        return DistributedProgram(
            make_program(job), job.plan, device=device, seed=job.seed, watch=watch
        )

    def distribute(self, module: Any, plan: Plan, **options: Any) -> Any:
        """The rank's shards of a single-device program or of a torch module; see
        `spmd.distributed.DistributedProgram`."""
        from hetplan.runtime.spmd.distributed import DistributedProgram

        return DistributedProgram(module, plan, **options)
