"""FlagScale: the `system` section of its YAML for heterogeneous training on Megatron-LM.

Consecutive stages of equal width on one device type are one process mesh [tp, cp, ep, dp, pp];
meshes, stages and ranks follow each other in the order of the pipeline. Blocks are counted per
stage; embedding and head are at the ends.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import yaml

from hetplan.runtime.export.grid import Grid, blocks_of, grid_of, heading, node_order, only, refuse
from hetplan.runtime.plan import Plan

VERSION = "FlagScale, branch main-legacy at 0526731: its heterogeneous training guide"
NAME = "FlagScale"


def export(plan: Plan) -> str:
    """The YAML; raises UnsupportedError for what it cannot express."""
    only(
        plan, NAME, "schedule", ("1f1b",), "the model chunks of each stage, or the order of passes"
    )
    only(plan, NAME, "zero", (0, 1), "sharded gradients and weights")
    grid = grid_of(plan, NAME)
    types = stage_types(plan, grid)
    nodes = node_order(plan, grid.ranked(), NAME)
    comments = [
        *heading(plan, NAME, VERSION),
        "hostfile, in this order: "
        + ", ".join(
            f"node {node} slots={count} type={type_of(plan, node)}" for node, count in nodes
        ),
    ]
    text = yaml.safe_dump(
        document(plan, grid, types), sort_keys=False, default_flow_style=None, width=110
    )
    return "".join(f"# {line}\n" for line in comments) + text


def type_of(plan: Plan, node: int) -> str:
    """The type of the node's devices."""
    return next(device.type for device in plan.devices if device.node == node)


def stage_types(plan: Plan, grid: Grid) -> list[str]:
    """The device type of each stage; refuses stages over several."""
    stages = []
    for j, groups in enumerate(grid.devices):
        types = {plan.devices[d].type for group in groups for d in group}
        if len(types) > 1:
            lost = "which replica runs on which type"
            raise refuse(
                plan,
                NAME,
                f"a stage over several device types (stage {j}: {', '.join(sorted(types))})",
                lost,
            )
        stages.append(types.pop())
    return stages


def layer_split(plan: Plan, grid: Grid) -> list[int]:
    """Blocks of each stage; refuses an embedding or a head on a stage of its own."""
    blocks = blocks_of(plan, NAME)
    counts = [len(range(max(first, 1), min(last, blocks + 1))) for ((first, last),) in grid.stages]
    if not all(counts):
        empty = counts.index(0)
        raise refuse(
            plan,
            NAME,
            f"a stage without blocks (stage {empty})",
            "a stage of embedding or head alone",
        )
    return counts


def document(plan: Plan, grid: Grid, types: list[str]) -> dict[str, Any]:
    """As YAML types."""
    kinds = list(zip(grid.widths, types, strict=True))
    meshes = [(width, name, len(list(run))) for (width, name), run in groupby(kinds)]
    system: dict[str, Any] = {
        "tensor_model_parallel_size": grid.widths[0],
        "pipeline_model_parallel_size": grid.pipeline,
        "context_parallel_size": 1,
        "use_distributed_optimizer": plan.zero == 1,
        "precision": {plan.workload.precision: True} if plan.workload.precision != "fp32" else {},
        "hetero": {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": layer_split(plan, grid),
            "hetero_process_meshes": [
                n for width, _, pp in meshes for n in (width, 1, 1, grid.data, pp)
            ],
            "hetero_device_types": [name for _, name, _ in meshes],
            "hetero_current_device_type": meshes[0][1],
            "standalone_embedding_stage": False,
        },
    }
    if plan.recomputation == "full":
        system |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif plan.recomputation == "selective":
        system["recompute_granularity"] = "selective"
    model = {
        "num_layers": blocks_of(plan, NAME),
        "seq_length": plan.workload.sequence,
        "micro_batch_size": grid.micro_batch,
        "global_batch_size": plan.workload.global_batch,
    }
    return {"system": system, "model": model}
