"""Exports plans to torchtitan, as a Python module with a configuration function.

Source: torchtitan 0.3.0, `torchtitan/config/configs.py` (`TrainingConfig`, `ParallelismConfig`),
`config/manager.py` (how `--module` and `--config` are found), `distributed/fsdp.py` and
`models/common/decoder.py` (what divides a model).

torchtitan keeps its models in Python. The exported module therefore takes a model's own
configuration function, holds its sizes against the plan's model, and replaces everything that the
plan decides.

torchtitan's device mesh numbers ranks with the pipeline outermost, then data, then context, then
tensor; torchrun numbers the nodes one after the other. ZeRO 0 becomes
data_parallel_replicate_degree. ZeRO 3 becomes data_parallel_shard_degree (FSDP), and FSDP frees the
gathered weights after the forward pass.
"""

import pprint
from itertools import chain
from typing import Any

from hetplan.adapters.exports.division import check_division
from hetplan.adapters.exports.grid import Grid, heading
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.profiling.models.transformer import Transformer
from hetplan.text import comments

VERSION = "torchtitan 0.3.0"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# The recomputation of a plan -> the policy of torchtitan's `activation_checkpoint`.
CHECKPOINTING = {"none": "None", "operators": "SelectiveAC.Config()", "full": "FullAC.Config()"}
# The scaling of rotary positions -> torchtitan's name of it.
SCALINGS = {"default": "none", "llama3": "llama", "yarn": "yarn"}
# The exported module; the names in braces stand for the plan's settings.
PROGRAM = '''\
import importlib
import os
from dataclasses import replace

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

# The model's own configuration function, such as
# torchtitan.models.llama3.config_registry:llama3_8b. The variable BASE names another one.
BASE = ""
# What the plan's model has.
MODEL = {model}
TRAINING = {training}
PARALLELISM = {parallelism}
ACTIVATION_CHECKPOINT = {checkpointing}


def planned() -> Trainer.Config:
    """The configuration of `BASE`, with everything that the plan decides."""
    module, _, function = os.environ.get("BASE", BASE).partition(":")
    if not function:
        raise ValueError("BASE is not set, expected MODULE:FUNCTION of the model's configuration")
    config = getattr(importlib.import_module(module), function)()
    model = config.model_spec.model
    attention = model.first_attention
    rope = attention.rope
    built = {{
        "layers": len(model.layers),
        "dim": model.dim,
        "vocab_size": model.vocab_size,
        "n_heads": attention.n_heads,
        "n_kv_heads": getattr(attention, "n_kv_heads", None) or attention.n_heads,
        "enable_weight_tying": model.enable_weight_tying,
        "eps": model.norm.eps,
        "theta": None if rope is None else rope.theta,
        "scaling": None if rope is None else rope.scaling,
    }}
    for name, expected in MODEL.items():
        got = built[name]
        if got != expected:
            raise ValueError(f"{{module}}:{{function}}: {{name}} is {{got}}, expected {{expected}}")
    return replace(
        config,
        training=replace(config.training, **TRAINING),
        parallelism=replace(config.parallelism, **PARALLELISM),
        activation_checkpoint=ACTIVATION_CHECKPOINT,
    )
'''


def torchtitan(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """torchtitan's module: degrees, micro-batch, the modules of each stage, schedule, sharding."""
    grid = Grid(plan, "torchtitan", shape, model=model)
    degrees = plan.degrees or Degrees()
    grid.only("precision", tuple(DTYPES), "the precision of training")
    grid.only("zero", (0, 3), "which states are sharded (FSDP shards all of them)")
    grid.only(
        "recomputation",
        tuple(CHECKPOINTING),
        "which activations are kept (torchtitan's selective mode keeps others)",
    )
    grid.only("schedule", tuple(SCHEDULES), "the order of passes")
    grid.check()
    tensor = grid.equal_width()
    grid.refuse(
        degrees.recompute_layers
        or degrees.offloaded
        or degrees.exchange != "ring"
        or plan.workload.narrow,
        plan.workload.narrow or degrees.text,
        "which activations are kept, which states are on the host, or how context ranks meet",
    )
    grid.refuse(
        degrees.expert > 1 and degrees.expert_tensor > 1,
        f"expert ranks beside tensor parts of experts ({degrees.expert_tensor})",
        "the tensor parts: expert ranks take whole experts",
    )
    grid.refuse(
        degrees.context > 1 and plan.zero == 0,
        "ZeRO 0 beside context ranks",
        "whole weights: context ranks shard them (FSDP)",
    )
    grid.refuse(
        grid.writes_model and shape is not None and shape.tied and grid.pipeline > 1,
        "a head that shares the embedding's weights in a pipeline",
        "the model: it ends with an error",
    )
    check_division(grid, degrees, shares_keys=False)
    node_options = [
        f"--node-rank {node_rank}: node {node} of the plan, --nproc-per-node {ranks}"
        for node_rank, (node, ranks) in enumerate(grid.nodes())
    ]
    # Python reads a source's encoding from its first two lines. A line of its own states it, since
    # the heading holds the plan's name, which could name another encoding.
    lines = ["# -*- coding: utf-8 -*-", *heading(plan, "torchtitan", VERSION)]
    lines += comments(
        "With this file as plan_titan.py in the working folder, on every node: PYTHONPATH=. "
        "torchrun ... -m torchtitan.train --module plan_titan --config planned",
        *node_options,
    )
    if grid.missing is not None:
        lines += comments(grid.missing.replace("arguments", "sizes"))
    program = PROGRAM.format(
        model=literal(titan_model(grid)),
        training=literal(training(grid)),
        parallelism=literal(parallelism(grid, tensor, degrees)),
        checkpointing=CHECKPOINTING[plan.recomputation],
    )
    return "\n".join([*lines, "", program])


def literal(value: dict[str, Any]) -> str:
    """A dictionary as Python source."""
    return pprint.pformat(value, width=100, sort_dicts=False)


def titan_model(grid: Grid) -> dict[str, Any]:
    """The values that the exported module compares with torchtitan's model; none where the model is
    left to the user."""
    shape = grid.shape
    if shape is None or shape.function is None or not grid.writes_model:
        return {}
    rope = shape.function.rope
    sizes: dict[str, Any] = {
        "layers": grid.blocks(),
        "dim": shape.hidden,
        "vocab_size": shape.vocabulary,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "enable_weight_tying": shape.tied,
        "eps": shape.function.norm_epsilon,
    }
    if rope is not None:
        sizes |= {"theta": rope.theta, "scaling": SCALINGS.get(rope.kind, rope.kind)}
    return sizes


def training(grid: Grid) -> dict[str, Any]:
    """The fields of torchtitan's `TrainingConfig`.

    With a pipeline, `local_batch_size` counts the samples of all micro-batches of a step; without
    one, torchtitan accumulates micro-batches of that size.
    """
    plan = grid.plan
    local_micro_batches = grid.micro_batches if grid.pipeline > 1 else 1
    fields: dict[str, Any] = {
        "local_batch_size": grid.micro_batch * local_micro_batches,
        "global_batch_size": plan.workload.global_batch,
        "mixed_precision_param": DTYPES[plan.workload.precision],
    }
    if plan.workload.sequence is not None:
        fields["seq_len"] = plan.workload.sequence
    return fields


def keeps_weights(grid: Grid) -> bool:
    """Whether the stages of a pipeline keep gathered weights, as the plan's framework does."""
    inputs = grid.plan.inputs
    return grid.pipeline > 1 and inputs is not None and inputs.framework.whole_in_pipelines


def parallelism(grid: Grid, tensor: int, degrees: Degrees) -> dict[str, Any]:
    """The fields of torchtitan's `ParallelismConfig`. tensor: the tensor degree."""
    plan = grid.plan
    sharded = plan.zero == 3
    groups = degrees.shard_groups if sharded else grid.data
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": groups,
        "data_parallel_shard_degree": grid.data // groups,
        "fsdp_reshard_after_forward": "always" if sharded and not keeps_weights(grid) else "never",
        "tensor_parallel_degree": tensor,
        "enable_sequence_parallel": degrees.sequence_parallel,
        "context_parallel_degree": degrees.context,
        "expert_parallel_degree": degrees.expert,
        "pipeline_parallel_degree": grid.pipeline,
    }
    if grid.pipeline > 1:
        blocks = [[f"layers.{i}"] for i in range(grid.blocks())]
        modules_of_layer = [["tok_embeddings"], *blocks, ["norm", "lm_head"]]
        modules_of_stage = [
            list(chain.from_iterable(modules_of_layer[first:last]))
            for first, last in grid.virtual_stages
        ]
        fields |= {
            "pipeline_parallel_schedule": SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": grid.micro_batch,
            "module_fqns_per_model_part": modules_of_stage,
        }
    return fields
