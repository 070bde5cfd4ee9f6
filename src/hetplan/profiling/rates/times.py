"""Predicted times: measured rates per operator, the host per layer, collectives, recomputation.

Every operator takes what measurements of its kind and size say (`profiling/rates`), and the physics
fitted to them elsewhere; a layer takes the sum, together with its host's launches. Nothing here is
fitted to any system's totals.

Recomputation says what a layer keeps for its backward pass, and what it computes again. none:
everything is kept. selective: the attention core (scores, softmax, context) is computed again
(Korthikanti et al. 2022, Section 5). operators: the outputs of fused attention and of every second
product are kept, and the rest is computed again (torchtitan's selective checkpointing per
operator). full: only the layer's input is kept, and its forward pass
repeated (Chen et al. 2016).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import DeviceSpec, Floats
from hetplan.profiling.models.operators import (
    DEFAULT_STACK,
    ELEMENT_BYTES,
    FLASH_SPREAD,
    HALF_SEQUENCE,
    REPEATED,
    Counted,
    Elementwise,
    Kind,
    Layer,
    Matmul,
    Operator,
    Precision,
    Shape,
    Stack,
    flash_shares,
    launches,
)
from hetplan.profiling.rates.efficiency import Learned
from hetplan.profiling.rates.products import MoveKind, move_seconds, product_seconds
from hetplan.profiling.rates.shipped import Estimate

# The share of its speed that a 16-bit product keeps where k or n is no multiple of 8, by the
# largest power of two that divides both (NVIDIA, "Matrix Multiplication Background": operands of
# whole 16 bytes). Asynchronous copies take 4, 8 or 16 bytes (CUDA, cp.async), so that only odd
# sizes lose them; what those lose was seen on the heads of vTrain's single GPUs (50257 columns).
MISALIGNED = {1: 0.35, 2: 0.7, 4: 0.85}
# How much faster products of 8-bit numbers are than of 16-bit ones (the datasheets of H100 to B200
# say twice). Their operands are read in 16 bits, and written in 8 bits as they are and transposed
# (NVIDIA Transformer Engine, "FP8 primer"): moves of 16-bit elements for each.
FP8_SPEED, FP8_CASTS = 1.9, 2.0
# How measured memory-bound operators stand for the described ones.
MOVES: dict[Kind, MoveKind] = {
    "add": "binary",
    "activation": "pointwise",
    "copy": "pointwise",
    "lookup": "pointwise",
    "loss": "softmax",
    "norm": "norm",
    "softmax": "softmax",
}


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one micro-batch on one device of a tensor group, without its
    all-reduces.

    forward_host, backward_host: what the host takes to launch the kernels; see `together`.
    """

    forward: float
    backward: float
    forward_host: float = 0.0
    backward_host: float = 0.0


def layer_time(
    layer: Layer,
    rates: "Rates",
    *,
    micro_batch: int = 1,
    tensor: int = 1,
    learned: Learned | None = None,
) -> LayerTime:
    """Seconds of `layer` for `micro_batch` samples, split over `tensor` devices of such rates.

    Matrix products shrink with `tensor`; norms, residuals and dropouts only do where the stack is
    sequence parallel; all-reduces are not included. What the host takes to launch the kernels
    counts, too (`together`). learned: what was measured of this device's operators, as factors.
    Raises InputError where sizes are below 1.
    """
    for name, value in (("micro_batch", micro_batch), ("tensor", tensor)):
        require(value >= 1, f"{name} is not usable", got=value, expected="at least 1")
    times = [operator_time(op, rates, micro_batch, tensor) for op in layer.operators]
    if learned is not None:
        factors = [learned.factor(op, micro_batch, tensor) for op in layer.operators]
        times = [
            LayerTime(t.forward * factor, t.backward * factor)
            for t, factor in zip(times, factors, strict=True)
        ]
    casts = (
        rates.moved_seconds(3 * (layer.params + layer.tied_params) / tensor, "copy")
        if rates.stack.casts and rates.precision != "fp32"
        else 0.0
    )
    nothing = (0.0, 0.0)  # of layers without operators, such as a dropout of 0
    device = np.sum([nothing, *((t.forward, t.backward) for t in times)], axis=0) + casts
    if rates.stack.gather_copies and tensor > 1 and micro_batch > 1:  # read and written, twice
        for reduce in layer.reduces:
            device[int(reduce.backward)] += rates.moved_seconds(
                4 * micro_batch * reduce.elements, "copy"
            )
    launched = np.sum([nothing, *(launches(op) for op in layer.operators)], axis=0)
    if tensor > 1:
        launched = launched + [sum(r.backward == back for r in layer.reduces) for back in (0, 1)]
    host = launched * rates.stack.host_seconds
    return LayerTime(*map(float, (*together(device, host), *host)))


def together(device: Floats, host: Floats) -> Floats:
    """Seconds of passes whose kernels take `device` and whose launches take `host` seconds.

    The host runs ahead of the device where it is faster, and the device waits where it is not;
    where both are alike, delays of either cost time. The root of the sum of squares says all three.
    It was chosen over the larger of both on layers of vTrain's single nodes.
    """
    return np.asarray(np.hypot(device, host))


@dataclass(frozen=True)
class Rates:
    """What one device type reaches in one precision under one software stack.

    device: its catalogue name, by which measurements are looked up. edge: of every estimate, its
    middle or an end of the interval in which eight in ten measurements lay.
    """

    device: str
    spec: DeviceSpec
    precision: Precision
    stack: Stack = DEFAULT_STACK
    edge: Literal["low", "seconds", "high"] = "seconds"

    @cached_property
    def flops_per_s(self) -> float:
        """FLOP/s of a large matrix product; raises InputError where the device lacks the
        precision."""
        large = Shape(1, 4096, 4096, 4096)
        return large.flops / self.product_seconds(large)

    def moved_seconds(self, elements: float, kind: Kind) -> float:
        """Seconds of moving so many elements of the precision."""
        return self.end_of(
            move_seconds(
                MOVES[kind], elements * ELEMENT_BYTES[self.precision], self.device, self.spec
            )
        )

    def end_of(self, estimate: Estimate) -> float:
        """The end of an estimate that is asked for."""
        return float(getattr(estimate, self.edge))

    def product_seconds(self, shape: Shape) -> float:
        """Seconds of matrix products."""
        share = (
            MISALIGNED.get(math.gcd(int(shape.k), int(shape.n), 8), 1.0)
            if self.precision != "fp32"
            else 1.0
        )
        return self.end_of(product_seconds(self.device, self.spec, self.precision, shape)) / share

    def attention_seconds(self, op: Matmul, shape: Shape) -> tuple[float, float]:
        """Seconds of one of the two products of fused attention, forward and backward: five
        products backward for two forward. A causal mask halves both (Dao 2023, Section 4.1), and
        the keys that a query sees on the average."""
        peak, part = self.spec.peak_flops(self.precision), op.attention == "fused-causal"
        length = max(shape.k, shape.n) * (0.5 if part else 1.0)
        flops = shape.flops * (0.5 if part else 1.0)
        shares = flash_shares(self.stack.flash, peak, "bf16" in self.spec.peak_tflops)
        reached = peak * length / (length + HALF_SEQUENCE) / FLASH_SPREAD[self.edge]
        return flops / (reached * shares[0]), 2.5 * flops / (reached * shares[1])


def operator_time(op: Operator, rates: Rates, micro_batch: int, tensor: int) -> LayerTime:
    """Seconds of one operator, forward and backward."""
    if rates.stack.sequence_parallel and isinstance(op, Elementwise) and op.kind != "lookup":
        op = replace(op, split=True)  # a lookup takes all tokens to each rank's part of the table
    moved, shape = op.moved(micro_batch, tensor), op.shape(micro_batch, tensor)
    if isinstance(op, Matmul) and op.attention.startswith("fused"):
        return LayerTime(*rates.attention_seconds(op, op.shape(micro_batch, tensor)))
    kind = op.kind if isinstance(op, Elementwise) else "add"
    seconds = (
        rates.product_seconds(shape)
        if shape is not None and shape.count
        else rates.moved_seconds(moved, kind)
    )
    if isinstance(op, Matmul):
        if (rates.stack.fp8 or rates.stack.fp4) and op.weight:
            operands = op.shape(micro_batch, tensor)
            elements = operands.count * operands.k * (operands.m + operands.n)
            peaks = rates.spec.peak_tflops
            faster = FP8_SPEED * (peaks["fp4"] / peaks["fp8"] if rates.stack.fp4 else 1.0)
            seconds = seconds / faster + rates.moved_seconds(FP8_CASTS * elements, "copy")
        return LayerTime(seconds, seconds * op.backward_products)
    if isinstance(op, Counted):
        return LayerTime(0.0, seconds) if op.backward else LayerTime(seconds, 0.0)
    return LayerTime(
        rates.stack.kernels * seconds,
        rates.stack.kernels * rates.moved_seconds(op.moved_back(micro_batch, tensor), op.kind),
    )


def all_reduce_seconds(size: float, ranks: int, bandwidth: float, latency: float = 0.0) -> float:
    """Time of a ring all-reduce: 2 (n-1) (size / (n b) + a), no overlap.

    size: bytes per rank. ranks: n >= 1 (1 gives 0). bandwidth: bytes/s of the ring's slowest link.
    latency: seconds per message. Source: Patarasuk and Yuan 2009; AMP (NeurIPS 2022), equation 3,
    without the latency.
    """
    return 2.0 * (ranks - 1) * (size / (ranks * bandwidth) + latency)


Recomputation = Literal["none", "selective", "operators", "full"]

CORE = ("scores", "softmax", "context")
CORE_SAVED = ("softmax output", "scores after dropout", "scores dropout mask")
FUSED_SAVED = ("attention output", "log-sum-exp")


def repeated_share(
    layer: Layer, mode: Recomputation, rates: Rates, micro_batch: int, tensor: int
) -> float:
    """The share of the layer's forward seconds that its backward pass spends again."""
    if mode == "none" or layer.kind not in REPEATED:
        return 0.0
    if mode == "full":
        return 1.0
    seconds = [operator_time(op, rates, micro_batch, tensor).forward for op in layer.operators]
    parts = [s * repeated_part(op, mode) for op, s in zip(layer.operators, seconds, strict=True)]
    return sum(parts) / sum(seconds) if sum(seconds) > 0 else 0.0


def repeated_part(op: Operator, mode: Recomputation) -> float:
    """How much of an operator is computed again, neither under `none` nor under `full`."""
    if mode == "selective":
        return float(op.name in CORE)
    if isinstance(op, Matmul):
        return 0.5 if op.weight else float(not op.attention.startswith("fused"))
    return 1.0


def kept_bytes(
    layer: Layer, mode: Recomputation, precision: Precision, tensor: int, before: float
) -> float:
    """Bytes per sample that each device of a tensor group keeps. before: bytes per sample of the
    layer's input."""
    if mode == "full" and layer.kind in REPEATED:
        return before
    if mode == "operators" and layer.kind in REPEATED:
        products = [op for op in layer.operators if isinstance(op, Matmul) and op.weight]
        outputs = sum(
            op.m * op.n * op.count / (tensor if op.split == "n" else 1) for op in products
        )
        core = sum(t.size(precision) for t in layer.saved if t.name in FUSED_SAVED) / tensor
        return before + core + outputs / 2 * ELEMENT_BYTES[precision]
    return sum(
        t.size(precision) / (tensor if t.split else 1)
        for t in layer.saved
        if not (mode == "selective" and t.name in CORE_SAVED)
    )
