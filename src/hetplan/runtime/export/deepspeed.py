"""DeepSpeed: its JSON says batch sizes, precision and the ZeRO stage; everything is data parallel.

`train_batch_size` is micro-batch x accumulation steps x processes, which DeepSpeed checks when it
starts: with another number of devices than the plan's it refuses to run.
"""

from __future__ import annotations

from hetplan.files import to_json
from hetplan.runtime.export.grid import grid_of, only, refuse
from hetplan.runtime.plan import Plan

NAME = "DeepSpeed's JSON"


def export(plan: Plan) -> str:
    """The document; raises UnsupportedError for pipelines, tensor groups, unequal batches and
    recomputation."""
    for i, replica in enumerate(plan.replicas):
        if len(replica.stages) > 1:
            lost = (
                "the cut into stages, which DeepSpeed takes from the model's code (PipelineModule)"
            )
            raise refuse(
                plan, NAME, f"pipelines (replicas[{i}] has {len(replica.stages)} stages)", lost
            )
    grid = grid_of(plan, NAME)
    if grid.widths[0] > 1:
        lost = "the tensor groups; every device would hold the whole model"
        raise refuse(plan, NAME, f"tensor parallelism of degree {grid.widths[0]}", lost)
    lost = (
        "that layers are computed again, which the model's code has to do; without it "
        "memory may not suffice"
    )
    only(plan, NAME, "recomputation", ("none",), lost)
    precision = plan.workload.precision
    document = {
        "train_batch_size": plan.workload.global_batch,
        "train_micro_batch_size_per_gpu": grid.micro_batch,
        "gradient_accumulation_steps": grid.count,
        "zero_optimization": {"stage": plan.zero},
        "fp16": {"enabled": precision == "fp16"},
        "bf16": {"enabled": precision == "bf16"},
    }
    return to_json(document)
