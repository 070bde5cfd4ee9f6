"""Recomputation: what a layer keeps for its backward pass, and what it computes again.

none: everything is kept. selective: the attention core (scores, softmax, context) is computed again
(Korthikanti et al.
2022, Section 5). full: only the layer's input is kept, and its forward pass repeated (Chen et al.
2016).
"""

from __future__ import annotations

from typing import Literal

from hetplan.profiling.catalogue import DeviceSpec
from hetplan.profiling.operators import Layer
from hetplan.profiling.precision import Precision
from hetplan.profiling.times import DEFAULT_EFFICIENCY, Efficiency, Rates, operator_time

Recomputation = Literal["none", "selective", "full"]

BLOCKS = ("block", "moe-block")  # of described transformers
TRACED = "traced"  # a layer between the first and the last of a traced module
# What recomputation applies to; embeddings and heads keep everything.
REPEATED = (*BLOCKS, TRACED)
CORE = ("scores", "softmax", "context")
CORE_SAVED = ("softmax output", "scores after dropout", "scores dropout mask")


def repeated_share(
    layer: Layer,
    mode: Recomputation,
    spec: DeviceSpec,
    precision: Precision,
    micro_batch: int,
    tensor: int,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
) -> float:
    """The share of the layer's forward seconds that its backward pass spends again."""
    if mode == "none" or layer.kind not in REPEATED:
        return 0.0
    if mode == "full":
        return 1.0
    rates = Rates.of(spec, precision, efficiency)
    seconds = [operator_time(op, rates, micro_batch, tensor).forward for op in layer.operators]
    core = sum(s for op, s in zip(layer.operators, seconds, strict=True) if op.name in CORE)
    return core / sum(seconds) if sum(seconds) > 0 else 0.0


def kept_bytes(
    layer: Layer, mode: Recomputation, precision: Precision, tensor: int, before: float
) -> float:
    """Bytes per sample that each device of a tensor group keeps. before: bytes per sample of the
    layer's input."""
    if mode == "full" and layer.kind in REPEATED:
        return before
    kept = [t for t in layer.saved if not (mode == "selective" and t.name in CORE_SAVED)]
    return sum(t.size(precision) / (tensor if t.split else 1) for t in kept)
