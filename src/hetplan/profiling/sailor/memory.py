"""Bytes that the fullest device of a plan holds.

16 bytes per parameter (fp32 weight and gradient, and two copies of the framework's), activations of
min(S - s, M) micro-batches on stage s, three buffers of the largest intermediate (attention scores,
or logits where the head is), two of what the stage exchanges, and what framework and driver take
before anything is computed.
"""

from __future__ import annotations

import numpy as np

from hetplan.profiling.sailor.data import ModelData
from hetplan.profiling.sailor.plans import RunPipeline
from hetplan.profiling.workload import RESERVED_BYTES

BYTES_PER_PARAM = 16
ELEMENT = 4  # all of it is fp32

# What Megatron-DeepSpeed takes on a device before a model is on it: kernels loaded, CUDA's context,
# NCCL. Sailor's own simulator gives the figure for Alps, whose devices are GH200; others: CUDA and
# NCCL alone.
FRAMEWORK_BYTES = {"GH-96": 4.76e9}

# Attention heads; the data do not tell them. By the models' own configurations.
HEADS = {"OPT-350": 16, "GPT-Neo-2.7": 20, "OPT-30": 56, "LLAMA-3-8": 32}


def framework_bytes(kind: str, given: float | None) -> float:
    """`given`, or the figure known for that GPU type."""
    return FRAMEWORK_BYTES.get(kind, RESERVED_BYTES) if given is None else given


def peak_bytes(
    model: ModelData,
    pipeline: RunPipeline,
    micro_batch: int,
    micro_batches: int,
    framework: float | None,
) -> float | None:
    """Bytes on the fullest device; None where sizes of a degree are not told."""
    fullest = 0.0
    stages = len(pipeline.layers)
    for s, (layers, groups) in enumerate(zip(pipeline.layers, pipeline.groups, strict=True)):
        for group in groups:
            sizes = model.sizes.get(group.tensor)
            if sizes is None:
                return None
            samples = micro_batch * len(pipeline.groups[0]) / len(groups)
            of = np.array(layers)
            alive = min(stages - s, micro_batches)
            exchanged = (
                2 * sizes.output[of[-1] if s < stages - 1 else of[0] - 1] if stages > 1 else 0.0
            )
            inner = _scores(model, group.tensor)
            if layers[-1] == model.layers - 1:
                inner = max(inner, float(sizes.output[-1]))
            held = (
                BYTES_PER_PARAM * sizes.params[of].sum() / ELEMENT
                + samples * (alive * sizes.kept[of].sum() + 3 * inner + exchanged)
                + max(framework_bytes(kind, framework) for kind in group.kinds)
            )
            fullest = max(fullest, float(held))
    return fullest


def _scores(model: ModelData, tensor: int) -> float:
    """Attention scores of one sample on one device; 0 where heads or tokens are not told."""
    return ELEMENT * HEADS.get(model.name, 0) / tensor * model.sequence**2
