"""Well-known training runs whose whole configuration is public, and their utilisation.

Chosen by that alone, whatever is predicted of them. Llama 3 405B and Narayanan et al. 2021 are not
among them: neither states its number of model chunks per stage. Model FLOPs count attention in full
and nothing computed again (Chowdhery et al. 2022, Appendix B); published rates that count the full
recomputation of all blocks are converted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.profiling.frameworks import DEEPSPEED, MEGATRON
from hetplan.profiling.operators import REPEATED
from hetplan.profiling.stack import STACKS
from hetplan.profiling.transformer import Transformer
from hetplan.profiling.workload import Workload
from hetplan.profiling.zoo import gpt2
from hetplan.runtime.truth.job import Job, posed_workload, predicted
from hetplan.runtime.truth.machines import A100_40, A100_80


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


@dataclass(frozen=True)
class KnownRow:
    """Model FLOPs utilisation of a run, published and predicted."""

    name: str
    gpus: int
    published: float
    predicted: float
    source: str


def known_rows() -> Iterator[KnownRow]:
    """Every run beside its prediction."""
    for run in RUNS:
        workload = posed_workload(run.job)
        reached = utilisation(workload, predicted(run.job).seconds)
        yield KnownRow(run.name, run.job.gpus, run.published(workload), reached, run.source)
