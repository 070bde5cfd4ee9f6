"""Megatron-LM: flags for degrees, micro-batch, uneven stages, recomputation and the distributed
optimizer.

Ranks are numbered tensor first, then data, then pipeline (Megatron's default order), and every
process is started with its rank, so that any placement can be kept. What stays the user's: the
model's other flags, data and learning rate.

Uneven stages: `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` where
only the ends differ, else `--pipeline-model-parallel-layout` (E embedding, t block, L loss; stages
separated by |, chunk by chunk).
"""

from __future__ import annotations

from itertools import groupby

from hetplan.runtime.export.grid import Grid, blocks_of, equal_widths, grid_of, heading, only
from hetplan.runtime.export.script import started
from hetplan.runtime.plan import Plan

VERSION = (
    "Megatron-LM core 0.13 and later: megatron/training/arguments.py at 000c4ac, parallel_state.py"
)
NAME = "Megatron-LM"
PRECISION_FLAGS = {"fp16": ["--fp16"], "bf16": ["--bf16"], "fp32": []}


def export(plan: Plan) -> str:
    """A shell script; raises UnsupportedError for what stock Megatron-LM cannot express."""
    only(plan, NAME, "schedule", ("1f1b", "interleaved-1f1b"), "the order of passes")
    only(
        plan,
        NAME,
        "zero",
        (0, 1),
        "sharded gradients and weights; --to deepspeed or torchtitan may take them",
    )
    grid = grid_of(plan, NAME)
    ranked = grid.ranked()
    comments = [
        *heading(plan, NAME, VERSION),
        "Behind the script come pretrain_gpt.py and the flags of model, data and optimizer.",
    ]
    return started(plan, ranked, comments, ["python", '"$@"'], flags(plan, grid))


def flags(plan: Plan, grid: Grid) -> list[str]:
    """What decides the parallel run, as command-line words."""
    tensor = equal_widths(plan, grid, NAME)
    words = [
        "--tensor-model-parallel-size", str(tensor),
        "--pipeline-model-parallel-size", str(grid.pipeline),
        "--micro-batch-size", str(grid.micro_batch),
        "--global-batch-size", str(plan.workload.global_batch),
        "--num-layers", str(blocks_of(plan, NAME)),
        "--seq-length", str(plan.workload.sequence),
    ]  # fmt: skip
    words += PRECISION_FLAGS[plan.workload.precision]
    words += stage_flags(plan, grid)
    if plan.recomputation == "full":
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        words += ["--recompute-num-layers", "1"]
    elif plan.recomputation == "selective":
        words += ["--recompute-granularity", "selective"]
    if plan.zero == 1:
        words.append("--use-distributed-optimizer")
    return words


def stage_flags(plan: Plan, grid: Grid) -> list[str]:
    """How the blocks divide: nothing where that is Megatron's own even cut."""
    blocks = blocks_of(plan, NAME)
    ranges = grid.virtual_stages()
    counts = [len(range(max(first, 1), min(last, blocks + 1))) for first, last in ranges]
    if len(ranges) == 1:
        return []
    if all(counts) and grid.chunks == 1:
        if len(set(counts)) == 1:
            return []
        ends = ends_flags(counts)
        if ends:
            return ends
    if all(counts) and grid.chunks > 1 and len(set(counts)) == 1:
        return ["--num-layers-per-virtual-pipeline-stage", str(counts[0])]
    return ["--pipeline-model-parallel-layout", layout(ranges, blocks)]


def ends_flags(counts: list[int]) -> list[str]:
    """Flags for a first or last stage that differs from equal ones between; nothing where more
    differ.

    Megatron divides what the given ends leave evenly over the other stages.
    """
    first, *middle, last = counts
    if len(set(middle)) > 1 or not middle:
        return []
    words = []
    if first != middle[0]:
        words += ["--decoder-first-pipeline-num-layers", str(first)]
    if last != middle[0]:
        words += ["--decoder-last-pipeline-num-layers", str(last)]
    return words


def layout(ranges: list[tuple[int, int]], blocks: int) -> str:
    """`Et*5|t*6|t*5,L`: the layers of each virtual stage."""
    kinds = ["E", *["t"] * blocks, "L"]
    return "|".join(
        "".join(
            kind if count == 1 else f"{kind}*{count}"
            for kind, count in ((k, len(list(run))) for k, run in groupby(kinds[first:last]))
        )
        for first, last in ranges
    )
