"""A published training run as a model, a cluster and a plan, and what the replay says of it.

Devices stand in Megatron's order (Narayanan et al. 2021, Section 5): tensor ranks next to each
other, then data ranks, then stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from pydantic import ValidationError

from hetplan.formulations.joint.plan import (
    MicroBatches,
    Plan,
    Recomputation,
    Replica,
    Stage,
    new_plan,
    split,
)
from hetplan.profiling.frameworks import MEGATRON, Framework
from hetplan.profiling.models import load_model
from hetplan.profiling.operators import Precision
from hetplan.profiling.predict import predict
from hetplan.profiling.stack import STACKS, Stack
from hetplan.profiling.transformer import Transformer
from hetplan.profiling.workload import Workload, make_workload
from hetplan.profiling.zoo import text_model
from hetplan.runtime.replay import Settings, replay
from hetplan.runtime.truth.machines import Machine, cluster
from hetplan.runtime.truth.tables import NotPosedError, Predicted, require
from hetplan.schema import input_error

# GPUs x samples x blocks, beyond any published run: thousands of GPUs, thousands of samples.
LARGEST = 10**10


@dataclass(frozen=True)
class Job:
    """A run on like GPUs in like replicas. chunks: model chunks of each stage, interleaved if
    several. blocks: of each stage, None: evenly divided. zero: ZeRO level; FSDP's full shards are
    level 3. framework: what trained, for its memory; stack: for its time. buckets: parts in which
    gradients leave while the last backward pass goes on. pooled: the published bytes are those of
    the allocator's whole pool. last_stage: they are of the last stage's ranks, where frameworks
    keep their log."""

    shape: Transformer
    sequence: int
    precision: Precision
    machine: Machine
    gpus: int
    global_batch: int
    micro_batch: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    blocks: tuple[int, ...] | None = None
    zero: int = 0
    recomputation: Recomputation = "none"
    framework: Framework = MEGATRON
    stack: Stack = STACKS["fused"]
    buckets: int = 1
    pooled: bool = False
    last_stage: bool = False

    @property
    def replicas(self) -> int:
        """Data-parallel replicas; raises NotPosedError where the degrees do not divide the GPUs, or
        the job is larger than anybody replays."""
        passes = self.gpus * self.global_batch * self.shape.layers
        require(0 < passes <= LARGEST, f"{passes:.1g} GPUs x samples x blocks to replay")
        replicas, rest = divmod(self.gpus, self.tensor * self.pipeline)
        if rest or not replicas:
            degrees = f"tensor {self.tensor} and pipeline {self.pipeline}"
            raise NotPosedError(f"{degrees} do not divide {self.gpus} GPUs")
        return replicas


@cache
def predicted(job: Job) -> Predicted:
    """The job replayed; raises NotPosedError or InputError where it cannot be said."""
    plan, workload = posed(job)
    ahead = int(job.zero >= 2)  # FSDP gathers one layer ahead
    outcome = replay(plan, workload, Settings(buckets=job.buckets, prefetch=ahead))
    ranks = plan.replicas[-1].stages[-1].all_devices if job.last_stage else list(plan.ranks)
    held = max(outcome.peak_bytes[rank] for rank in ranks)
    share = 1 - job.framework.fragmentation if job.pooled else 1.0
    return Predicted(outcome.seconds, held / share, outcome.fits)


def posed(job: Job) -> tuple[Plan, Workload]:
    """The plan and its workload; raises as `predicted` does."""
    workload = posed_workload(job)
    return posed_plan(job, workload), workload


def posed_workload(job: Job) -> Workload:
    """The model with a predicted profile of what the plan needs, on the machine's nodes."""
    return workload_of(
        job.shape,
        job.sequence,
        job.precision,
        job.machine,
        job.gpus,
        job.tensor,
        tuple(sorted({batch.samples for batch in micro_batches(job)})),
        job.global_batch,
        job.framework,
        job.stack,
    )


@cache
def workload_of(
    shape: Transformer,
    sequence: int,
    precision: Precision,
    machine: Machine,
    gpus: int,
    tensor: int,
    samples: tuple[int, ...],
    global_batch: int,
    framework: Framework,
    stack: Stack,
) -> Workload:
    """A workload whose profile has one tensor degree and these micro-batches."""
    model = load_model(
        text_model("published", "a published run", sequence, shape),
        sequence=sequence,
        precision=precision,
    )
    nodes = cluster(machine, gpus)
    profile = predict(
        model,
        nodes,
        micro_batches=samples,
        tensor_degrees=[tensor],
        stack=stack,
        date="2026-01-01",
    )
    return make_workload(
        model, nodes, global_batch, profile=profile, framework=framework, stack=stack
    )


def micro_batches(job: Job) -> list[MicroBatches]:
    """Those of each replica; the last one may be smaller."""
    own, rest = divmod(job.global_batch, job.replicas)
    if rest:
        batch = f"a batch of {job.global_batch}"
        raise NotPosedError(f"{batch} does not divide over {job.replicas} replicas")
    full, last = divmod(own, job.micro_batch)
    sizes = ((full, job.micro_batch), (1, last))
    return [MicroBatches(count=n, samples=size) for n, size in sizes if n and size]


def posed_plan(job: Job, workload: Workload) -> Plan:
    """Like replicas of like stages."""
    if job.shape.layers < job.pipeline * job.chunks:
        raise NotPosedError(f"{job.shape.layers} blocks are too few for the stages")
    if not job.shape.tensor_degree_fits(job.tensor):
        raise NotPosedError(f"tensor degree {job.tensor} does not divide heads and columns")
    ranges = layer_ranges(job)
    replicas = [
        Replica(
            stages=[
                Stage(
                    layers=ranges[stage :: job.pipeline],
                    devices=[
                        [(stage * job.replicas + i) * job.tensor + t for t in range(job.tensor)]
                    ],
                    tensor_shares=[1.0] * job.tensor,
                )
                for stage in range(job.pipeline)
            ],
            micro_batches=micro_batches(job),
        )
        for i in range(job.replicas)
    ]
    try:
        return new_plan(
            workload,
            replicas,
            schedule="interleaved-1f1b" if job.chunks > 1 else "1f1b",
            zero=job.zero,
            recomputation=job.recomputation,
        )
    except ValidationError as error:
        raise input_error(error, where="plan") from None


def layer_ranges(job: Job) -> list[tuple[int, int]]:
    """[virtual stages] [first, last) of the chain; the embedding goes with the first block, the
    head with the last."""
    blocks: Sequence[int] = job.blocks or [
        last - first for first, last in split(job.shape.layers, [1.0] * (job.pipeline * job.chunks))
    ]
    ends = [end + 1 for end in accumulate(blocks)]
    return list(pairwise([0, *ends[:-1], ends[-1] + 1]))
