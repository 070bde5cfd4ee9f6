"""torchtitan: TOML for degrees, micro-batches, stages by module name, schedule and sharding.

Ranks: pipeline outermost, then data, then tensor, as torchtitan's device mesh numbers them;
torchrun numbers nodes one after the other. ZeRO 0 is data_parallel_replicate_degree (DDP); ZeRO 3
is data_parallel_shard_degree (FSDP) with weights given up after the forward pass. Replicas of
several devices need the latter: DDP stands alone there, and bf16 acts under FSDP, under DDP and on
one device only. torchtitan's tensor parallelism is sequence parallel too, which hetplan does not
assume.
"""

from __future__ import annotations

import json

from hetplan.runtime.export.grid import (
    Grid,
    blocks_of,
    equal_widths,
    grid_of,
    heading,
    node_order,
    only,
    refuse,
)
from hetplan.runtime.plan import Plan

VERSION = (
    "torchtitan's TOML job config: torchtitan/config/job_config.py at 6404b93 (September 2025)"
)
NAME = "torchtitan"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def export(plan: Plan) -> str:
    """The job config's sections that a plan decides; raises UnsupportedError for what they cannot
    express."""
    only(plan, NAME, "precision", tuple(DTYPES), "the precision of training")
    only(plan, NAME, "zero", (0, 3), "which states are sharded (FSDP shards all of them)")
    lost = "which activations are kept (torchtitan's selective mode keeps others)"
    only(plan, NAME, "recomputation", ("none", "full"), lost)
    grid = grid_of(plan, NAME)
    tensor = equal_widths(plan, grid, NAME)
    if grid.pipeline * tensor > 1:
        divided(plan, grid)
    nodes = node_order(plan, grid.ranked(), NAME)
    comments = [
        *heading(plan, NAME, VERSION),
        *(
            f"--node-rank {i}: node {node} of the plan, --nproc-per-node {n}"
            for i, (node, n) in enumerate(nodes)
        ),
    ]
    if tensor > 1:
        comments.append(
            "tensor parallel groups are sequence parallel too, which the prediction does not count"
        )
    sections = [training(plan, grid), parallelism(plan, grid, tensor), recomputation(plan)]
    return (
        "\n".join(
            [
                *(f"# {line}" for line in comments),
                *(line for part in sections for line in ("", *part)),
            ]
        )
        + "\n"
    )


def divided(plan: Plan, grid: Grid) -> None:
    """What torchtitan has for replicas of several devices with FSDP only: data parallelism and
    mixed precision."""
    sharded = plan.zero == 3 and grid.data > 1
    if grid.data > 1 and not sharded:
        raise refuse(
            plan,
            NAME,
            f"ZeRO 0 on {grid.data} replicas beside a pipeline or tensor groups "
            "(its DDP stands alone; ZeRO 3 would do)",
            "the replicas: it ends with an error",
        )
    if plan.workload.precision != "fp32" and not sharded:
        raise refuse(
            plan,
            NAME,
            f"{plan.workload.precision} on a pipeline or tensor groups without FSDP "
            "(fp32, or ZeRO 3 on several replicas, would do)",
            "the precision: mixed_precision_param would do nothing, and everything run in fp32",
        )


def entry(key: str, value: object) -> str:
    """`key = value`; JSON's strings, numbers, booleans and lists are TOML's."""
    return f"{key} = {json.dumps(value)}"


def training(plan: Plan, grid: Grid) -> list[str]:
    """Batches: with a pipeline the local batch is all micro-batches, without one it is one of them,
    accumulated."""
    local = grid.micro_batch * (grid.count if grid.pipeline > 1 else 1)
    lines = [
        "[training]",
        entry("local_batch_size", local),
        entry("global_batch_size", plan.workload.global_batch),
        entry("mixed_precision_param", DTYPES[plan.workload.precision]),
    ]
    if plan.workload.sequence is not None:
        lines.append(entry("seq_len", plan.workload.sequence))
    return lines


def parallelism(plan: Plan, grid: Grid, tensor: int) -> list[str]:
    """Degrees, schedule and stages."""
    sharded = plan.zero == 3
    lines = [
        "[parallelism]",
        entry("data_parallel_replicate_degree", 1 if sharded else grid.data),
        entry("data_parallel_shard_degree", grid.data if sharded else 1),
        entry("tensor_parallel_degree", tensor),
        entry("pipeline_parallel_degree", grid.pipeline),
    ]
    if sharded:
        lines.append(entry("fsdp_reshard_after_forward", "always"))
    if grid.pipeline > 1:
        lines += [
            entry("pipeline_parallel_schedule", SCHEDULES[plan.schedule]),
            entry("pipeline_parallel_microbatch_size", grid.micro_batch),
            entry("module_fqns_per_model_part", modules(plan, grid)),
        ]
    return lines


def modules(plan: Plan, grid: Grid) -> list[list[str]]:
    """Names of the modules of every virtual stage, as torchtitan's decoders call them."""
    blocks = blocks_of(plan, NAME)
    names = [["tok_embeddings"], *([f"layers.{i}"] for i in range(blocks)), ["norm", "output"]]
    return [
        [name for part in names[first:last] for name in part]
        for first, last in grid.virtual_stages()
    ]


def recomputation(plan: Plan) -> list[str]:
    """Activation checkpointing."""
    return ["[activation_checkpoint]", entry("mode", plan.recomputation)]
