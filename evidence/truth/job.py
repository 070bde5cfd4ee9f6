"""A published training run as a model, a cluster and a plan, and what the replay says of it.

Devices stand in Megatron's order (Narayanan et al. 2021, Section 5): tensor ranks next to each
other, then data ranks, then stages.

`RUNS` are well-known training runs whose whole configuration is public, with their utilisation;
they were chosen by that alone, whatever is predicted of them. Llama 3 405B and Narayanan et al.
2021 are not among them: neither states its number of model chunks per stage. Model FLOPs count
attention in full and nothing computed again (Chowdhery et al. 2022, Appendix B); published rates
that count the full recomputation of all blocks are converted.

The machines on which published runs were made: GPU, links within and between nodes.

Bandwidths are those of one direction, as in cluster files; `between` is that of a node's network
cards together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from pydantic import ValidationError

from evidence.truth.tables import NotPosedError, Predicted, require
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MicroBatches, Plan, Recomputation, Replica, Stage
from hetplan.plans.shares import split
from hetplan.profiling.frameworks import DEEPSPEED, MEGATRON, Framework
from hetplan.profiling.hardware.cluster import (
    GBIT,
    INTRA_NODE_LATENCY_US,
    NETWORK_LATENCY_US,
    Cluster,
    Node,
    device,
)
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import REPEATED, STACKS, Precision, Stack
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import gpt2, text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.chains import Settings
from hetplan.replays.replay import replay
from hetplan.schema import input_error


@dataclass(frozen=True)
class Machine:
    """A kind of node. device: of the catalogue. within, between: Gbit/s. per_node: GPUs that share
    the fast links."""

    device: str
    within: float
    between: float
    per_node: int = 8


# NVLink 3 (A100): 12 links of 25 GB/s each way; NVLink 4 (H100, H200): 18; NVLink 5 (Blackwell):
# 18 of 50 GB/s; Infinity Fabric (MI300X, MI325X): 7 of 64 GB/s.
# Networks as the sources state them; where one is silent, a DGX's cards: eight of
# 200 (A100) or 400 Gbit/s (later ones), as NVIDIA's datasheets of DGX A100, H100, H200, B200 and
# B300 say. Racks of 72 GPUs on one NVLink hold 64 of a job; each GPU has a card of 400 (GB200) or
# 800 Gbit/s (B300, GB300).
A100_80 = Machine("A100-SXM4-80GB", 2400, 1600)
A100_40 = Machine("A100-SXM4-40GB", 2400, 1600)
VTRAIN = Machine("A100-SXM4-80GB", 2400, 800)  # vTrain (MICRO 2024): 800 Gbit/s per node
# What texts of the sets begin with, the longer ones first.
MACHINES = {
    Machine("H100-96GB-HBM2e", 3600, 3200): ("H100 96GB",),  # torchtitan: 400 Gbit/s per GPU
    Machine("H100-SXM5-80GB", 3600, 3200): (
        "h100_80gb", "H100", "DGX-H100", "NVIDIA H100-SXM5-80GB",
    ),
    Machine("H200-SXM-141GB", 3600, 3200): ("H200 ", "NVIDIA H200-SXM5-141GB"),
    Machine("MI300X", 3584, 3200): ("AMD Instinct MI300X",),
    Machine("MI325X", 3584, 3200): ("AMD Instinct MI325X",),
    A100_80: ("A100-SXM4-80GB", "A100 ", "a100_80gb"),
    A100_40: ("a100_40gb",),
    Machine("GB200", 7200, 25600, 64): ("GB200", "DGX-GB200", "NVIDIA Blackwell GPU (GB200)"),
    Machine("GB300", 7200, 51200, 64): ("GB300", "DGX-GB300"),
    Machine("B200", 7200, 3200): ("DGX-B200", "NVIDIA Blackwell GPU (B200", "B200"),
    Machine("B300", 7200, 6400): ("DGX-B300",),
}  # fmt: skip


def machine(text: str | None) -> Machine:
    """The machine that a set's text names; raises NotPosedError for one that is unknown."""
    for known, starts in MACHINES.items():
        if text is not None and text.startswith(starts):
            return known
    raise NotPosedError(f"unknown GPU {text!r}")


@cache
def cluster(kind: Machine, gpus: int) -> Cluster:
    """As many GPUs in full nodes, the last one with the rest."""
    full, rest = divmod(gpus, kind.per_node)
    links = (
        kind.within * GBIT, kind.between * GBIT, INTRA_NODE_LATENCY_US * 1e-6,
        NETWORK_LATENCY_US * 1e-6,
    )  # fmt: skip
    sizes = [kind.per_node] * full + [rest] * bool(rest)
    nodes = tuple(Node(kind.device, size, *links) for size in sizes)
    return Cluster(f"{gpus} {kind.device}", nodes, {kind.device: device(kind.device)})


# GPUs x samples x blocks, beyond any published run: thousands of GPUs, thousands of samples.
LARGEST = 10**10


@dataclass(frozen=True)
class Job:
    """A run on like GPUs in like replicas. chunks: model chunks of each stage, interleaved if
    several. blocks: of each stage, None: evenly divided. zero: ZeRO level; FSDP's full shards are
    level 3. framework: what trained, for its memory; stack: for its time. buckets: parts in which
    gradients leave while the last backward pass goes on. pooled: the published bytes are those of
    the allocator's whole pool. last_stage: they are of the last stage's ranks, where frameworks
    keep their log. recomputed: layers of each chunk that are computed again, 0 for all where
    recomputation is full. context, expert: degrees. expert_tensor: the tensor degree of
    experts."""

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
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    recomputed: int = 0

    @property
    def replicas(self) -> int:
        """Data-parallel replicas; raises NotPosedError where the degrees do not divide the GPUs, or
        the job is larger than anybody replays."""
        passes = self.gpus * self.global_batch * self.shape.layers
        require(0 < passes <= LARGEST, f"{passes:.1g} GPUs x samples x blocks to replay")
        replicas, rest = divmod(self.gpus, self.tensor * self.pipeline)
        degrees = f"tensor {self.tensor} and pipeline {self.pipeline}"
        require(replicas and not rest, f"{degrees} do not divide {self.gpus} GPUs")
        return replicas


@cache
def predicted(job: Job) -> Predicted:
    """The job replayed; raises NotPosedError or InputError where it cannot be said."""
    plan, workload = posed(job)
    ahead = int(job.zero >= 2)  # FSDP gathers one layer ahead
    outcome = replay(plan, workload, Settings(buckets=job.buckets, prefetch=ahead))
    ranks = plan.replicas[-1].stages[-1].all_devices if job.last_stage else list(plan.ranks)
    fullest = max(ranks, key=lambda rank: outcome.peak_bytes[rank])
    held, limit = outcome.peak_bytes[fullest], outcome.limit_bytes[fullest]
    return Predicted(outcome.seconds, published_bytes(job, held, limit), outcome.fits)


def published_bytes(job: Job, held: float, limit: float) -> float:
    """What the job's source would report where a device holds so much: the same, or the allocator's
    whole pool, which takes no more than the limit while everything fits in it."""
    if not job.pooled:
        return held
    pool = held / (1 - job.framework.fragmentation)
    return max(held, min(pool, limit))


def posed(job: Job) -> tuple[Plan, Workload]:
    """The plan and its workload; raises as `predicted` does."""
    require(job.context * job.expert == 1, "no plan has context and expert parallelism")
    workload = posed_workload(job)
    return posed_plan(job, workload), workload


@cache
def posed_workload(job: Job) -> Workload:
    """The model with a predicted profile of what the plan needs, on the machine's nodes."""
    model = load_model(
        text_model("published", "a published run", job.sequence, job.shape),
        sequence=job.sequence,
        precision=job.precision,
    )
    nodes = cluster(job.machine, job.gpus)
    return make_workload(
        model,
        nodes,
        job.global_batch,
        profile=predict(
            model,
            nodes,
            micro_batches=sorted({batch.samples for batch in micro_batches(job)}),
            tensor_degrees=[job.tensor],
            stack=job.stack,
            date="2026-01-01",
        ),
        framework=job.framework,
        stack=job.stack,
    )


def micro_batches(job: Job) -> list[MicroBatches]:
    """Those of each replica; the last one may be smaller."""
    own, rest = divmod(job.global_batch, job.replicas)
    batch = f"a batch of {job.global_batch}"
    require(not rest, f"{batch} does not divide over {job.replicas} replicas")
    full, last = divmod(own, job.micro_batch)
    sizes = ((full, job.micro_batch), (1, last))
    return [MicroBatches(count=n, samples=size) for n, size in sizes if n and size]


def posed_plan(job: Job, workload: Workload) -> Plan:
    """Like replicas of like stages."""
    require(
        job.shape.layers >= job.pipeline * job.chunks,
        f"{job.shape.layers} blocks are too few for the stages",
    )
    require(
        job.shape.tensor_degree_fits(job.tensor),
        f"tensor degree {job.tensor} does not divide heads and columns",
    )
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
    blocks = job.blocks or even_blocks(job.shape.layers, job.pipeline * job.chunks)
    ends = [end + 1 for end in accumulate(blocks)]
    return list(pairwise([0, *ends[:-1], ends[-1] + 1]))


def even_blocks(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of each virtual stage where nothing states them.

    Megatron Core has equally many in each. Where the blocks do not divide but would with two more,
    embedding and loss count as a layer each (`account_for_embedding_in_pipeline_split`), as in the
    126 blocks of Llama 405B.
    """
    each, rest = divmod(layers + 2, stages)
    if layers % stages and not rest and each > 1:
        return (each - 1, *[each] * (stages - 2), each - 1)
    return tuple(last - first for first, last in split(layers, [1.0] * stages))


@dataclass(frozen=True)
class KnownRun:
    """One of three is published: mfu, the model FLOPs utilisation; seconds of an iteration; or
    tflops, TFLOP/s per GPU with what full recomputation repeats."""

    name: str
    source: str
    job: Job
    mfu: float | None = None
    seconds: float | None = None
    tflops: float | None = None

    def published(self, workload: Workload) -> float:
        """Model FLOPs utilisation."""
        if self.mfu is not None:
            return self.mfu
        if self.seconds is not None:
            return utilisation(workload, self.seconds)
        blocks = [layer for layer in workload.model.layers if layer.kind in REPEATED]
        again = workload.global_batch * sum(layer.forward_flops() for layer in blocks)
        done = (workload.flops_per_iteration + again) / len(workload.cluster.devices)
        return utilisation(workload, done / ((self.tflops or 0.0) * 1e12))


def utilisation(workload: Workload, seconds: float) -> float:
    """Of all devices, in so many seconds per iteration; their peaks are known."""
    reached = workload.utilisation(seconds, [d.type for d in workload.cluster.devices])
    assert reached is not None, "A100s have peaks"
    return reached


EAGER = STACKS["eager-2021"]
PARALLEL = replace(EAGER, sequence_parallel=True)
SIZES = ((48, 6144, 64), (96, 12288, 96), (105, 20480, 128), (128, 25600, 160))


def gpt(size: int) -> Transformer:
    """Megatron's GPT; size: of `SIZES` (layers, width, heads)."""
    return gpt2(*SIZES[size], vocabulary=51200, positions=2048, attention="standard")


def megatron(size: int, gpus: int, batch: int, micro_batch: int, pipeline: int, chunks: int) -> Job:
    """Megatron-LM with sequence parallelism and selective recomputation."""
    return Job(
        gpt(size),
        2048,
        "fp16",
        A100_80,
        gpus,
        batch,
        micro_batch,
        tensor=8,
        pipeline=pipeline,
        chunks=chunks,
        recomputation="selective",
        framework=MEGATRON.model_copy(update={"sequence_parallel": True}),
        stack=PARALLEL,
    )


KORTHIKANTI = "Korthikanti et al. 2022, Tables 3 and 5"
MEGATRON_RUNS = (
    ("GPT 22B", megatron(0, 8, 4, 4, 1, 1), 0.415, 1.42),
    ("GPT 175B", megatron(1, 64, 64, 1, 8, 3), 0.514, 18.13),
    ("GPT 530B", megatron(2, 280, 280, 1, 35, 3), 0.560, 49.05),
    ("GPT 1T", megatron(3, 512, 512, 1, 64, 1), 0.563, 94.42),
)  # with the seconds of full recomputation without sequence parallelism
RUNS = (
    *(KnownRun(name, KORTHIKANTI, job, mfu=mfu) for name, job, mfu, _ in MEGATRON_RUNS),
    *(
        KnownRun(
            f"{name}, full recomputation",
            KORTHIKANTI,
            replace(job, recomputation="full", framework=MEGATRON, stack=EAGER),
            seconds=seconds,
        )
        for name, job, _, seconds in MEGATRON_RUNS
    ),
    KnownRun(
        "GPT 530B, 8 replicas",
        "Korthikanti et al. 2022, Section 6.3",
        megatron(2, 2240, 2240, 1, 35, 3),
        mfu=0.542,
    ),
    KnownRun(
        "MT-NLG 530B",
        "Smith et al. 2022, Section 2.4: 60.1 s",
        Job(
            gpt(2), 2048, "bf16", A100_80, 2240, 1920, 1, tensor=8, pipeline=35,
            recomputation="full", framework=DEEPSPEED, stack=EAGER,
        ),
        seconds=60.1,
    ),
    KnownRun(
        "BLOOM 176B",
        "BigScience 2022, model card: about 150 TFLOP/s with recomputation; 4 x 100 Gbit/s a node",
        Job(
            gpt2(
                70, 14336, 112, vocabulary=250880, positions=0, embedding_norm=True, dropout=False,
                attention="standard",
            ),
            2048, "bf16", replace(A100_80, between=400), 384, 2048, 2, tensor=4, pipeline=12,
            blocks=(5, *[6] * 10, 5), zero=1, recomputation="full", framework=DEEPSPEED,
            stack=EAGER,
        ),
        tflops=150,
    ),
    KnownRun(
        "GPT-NeoX 20B",
        "Black et al. 2022, Sections 2 and 3: 117 TFLOP/s with recomputation; configs/20B.yml",
        Job(
            gpt2(
                44, 6144, 64, vocabulary=50432, positions=0, rotary=True, tied=False,
                dropout=False, attention="standard",
            ),
            2048, "fp16", replace(A100_40, between=800), 96, 1536, 4, tensor=2, pipeline=4, zero=1,
            recomputation="full", framework=DEEPSPEED, stack=EAGER,
        ),
        tflops=117,
    ),
)  # fmt: skip


def known_rows() -> Iterator[dict[str, Any]]:
    """Every run beside its prediction."""
    for run in RUNS:
        workload = posed_workload(run.job)
        yield {
            "name": run.name,
            "gpus": run.job.gpus,
            "published": run.published(workload),
            "predicted": utilisation(workload, predicted(run.job).seconds),
            "source": run.source,
        }
