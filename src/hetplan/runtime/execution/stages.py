"""hetplan's own engine for plans of stages (`runtime.engine`)."""

from collections import defaultdict
from itertools import accumulate, pairwise
from typing import Any

from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_own_layers
from hetplan.profiling.models.model import Model
from hetplan.profiling.workload import Workload
from hetplan.replays.simulator.tasks import Timeline
from hetplan.runtime.events import Watch
from hetplan.runtime.execution.protocol import DeviceIntervals, ModelPart
from hetplan.runtime.job import Job
from hetplan.runtime.launch.rehearsal import own_pass

LAYER_SECONDS = 0.0015  # processor seconds of a narrow layer's pass
PASS_SECONDS = 0.004  # further processor seconds of a pass, for its messages


class StageEngine:
    """Executes every plan of stages."""

    trains_rehearsals = True

    def check_model(self, plan: Plan, model: Model) -> None:
        """Raise UnsupportedError for a model that hetplan's own layers do not compute."""
        check_own_layers(plan, model)

    def owners(self, plan: Plan, workload: Workload) -> dict[int, DeviceIntervals]:
        """Layer -> (device, the interval of its tensor rank) for all replicas and row groups."""
        parts: dict[int, DeviceIntervals] = defaultdict(list)
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        for stage in stages:
            whole = sum(stage.tensor_shares)
            ends = [end / whole for end in accumulate(stage.tensor_shares, initial=0.0)]
            intervals = list(pairwise(ends))  # one for each tensor rank
            for first, last in stage.layers:
                for layer in range(first, last):
                    for row_group in stage.devices:
                        parts[layer] += zip(row_group, intervals, strict=True)
        return parts

    def real_seconds(self, plan: Plan, timeline: Timeline, place: Place) -> float:
        """Processor seconds that an iteration of a rank needs in a rehearsal, on narrow layers."""
        replica = plan.replicas[place.replica]
        chunks = replica.stages[place.stage].layers
        layers = sum(last - first for first, last in chunks)
        seconds_of_a_direction = len(chunks) * PASS_SECONDS + layers * LAYER_SECONDS
        return 2 * replica.steps * seconds_of_a_direction

    def moment(self, event: dict[str, Any], unit: int) -> str | None:
        """The direction of a pass of the rank's unit, "forward" or "backward"; None for all other
        events."""
        return own_pass(event, unit)

    def check_job(self, job: Job) -> Any:
        """(module, chain) of the job. Raises InputError for an unusable factory, UnsupportedError
        for layers that the plan cannot divide."""
        from hetplan.runtime.engine.models import check_saved, described

        module, chain = described(job)
        self.check_chain(job.plan, chain)
        check_saved(job, chain)
        return module, chain

    def check_chain(self, plan: Plan, chain: Any) -> None:
        """Raise UnsupportedError for a plan and a chain that the engine does not execute."""

    def part(self, job: Job, watch: Watch, device: str, shared: Any) -> ModelPart:
        """The rank's part of the job's model, with the job's data."""
        import torch.distributed as dist

        from hetplan.runtime.engine.distributed import example_of
        from hetplan.runtime.engine.layout import Layout
        from hetplan.runtime.engine.models import chain_of, make_module, precision_of

        module, chain = shared or (make_module(job), None)
        if chain is None or device != "cpu" or job.pack:
            # The shared chain reads its data on the CPU, and has the width of the first replica's
            # rows; a rank on a GPU, or with other rows, makes one of its own.
            row = 0
            if job.pack:
                place = job.plan.places[dist.get_rank()]
                first_row, _ = Layout(job.plan).micro_batches[place.replica][0]
                row = min(first_row, len(job.pack) - 1)  # a replica may have no rows
            chain = chain_of(job, module, example_of(module, row), device)
        part: ModelPart = self.trained(
            module,
            job.plan,
            device=device,
            seed=job.seed,
            watch=watch,
            precision=precision_of(job),
            chain=chain,
        )
        return part

    def distribute(self, module: Any, plan: Plan, **options: Any) -> Any:
        """The rank's part of a torch module; see `engine.distributed`."""
        return self.trained(module, plan, **options)

    def trained(self, module: Any, plan: Plan, **options: Any) -> Any:
        """The rank's part of a torch module on this engine. options: those of `Distributed`."""
        from hetplan.runtime.engine.distributed import Distributed

        return Distributed(module, plan, **options)
