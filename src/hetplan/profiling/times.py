"""Analytical times: a roofline per operator, a floor per layer, ring collectives, recomputation.

Every operator takes max(FLOPs / (peak e_m), bytes / (bandwidth e_b)) (Williams et al. 2009, the
roofline); a layer takes the sum, but never less than launching its kernels. These are first guesses
that rank devices and layers; a measured profile replaces them. Nothing here is fitted to any
system's totals.

Recomputation says what a layer keeps for its backward pass, and what it computes again. none:
everything is kept. selective: the attention core (scores, softmax, context) is computed again
(Korthikanti et al. 2022, Section 5). full: only the layer's input is kept, and its forward pass
repeated (Chen et al. 2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hetplan.errors import InputError
from hetplan.profiling.catalogue import DeviceSpec
from hetplan.profiling.operators import (
    ELEMENT_BYTES,
    REPEATED,
    Counted,
    Layer,
    Matmul,
    Operator,
    Precision,
    Shape,
    launches,
)

if TYPE_CHECKING:
    from hetplan.profiling.efficiency import Learned


@dataclass(frozen=True)
class Efficiency:
    """The shares of the datasheet's peaks that kernels reach, and the cost of a launch.

    matmul_16, matmul_32: of peak_tflops, large matrix products. Tensor-core libraries reach 60 to
    80 % on square products of some thousands (the rest is clocks under load, epilogues and the last
    wave), plain fp32 more. memory: of the memory bandwidth; copies reach 80 to 90 % on HBM and GDDR
    (STREAM-like benchmarks). launch_seconds: one kernel from an eager framework, host side; several
    microseconds to ten. tile: products are computed in tiles, so m and n round up to a multiple of
    it (NVIDIA, "Matrix Multiplication Background", tile quantisation); 64 is the smallest tile that
    libraries use for 16-bit products.
    """

    matmul_16: float = 0.7
    matmul_32: float = 0.85
    memory: float = 0.8
    launch_seconds: float = 8e-6
    tile: int = 64

    def matmul(self, precision: Precision) -> float:
        """The share of the peak for matrix products in `precision`."""
        return self.matmul_32 if precision == "fp32" else self.matmul_16


DEFAULT_EFFICIENCY = Efficiency()


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one micro-batch on one device of a tensor group, without its
    all-reduces."""

    forward: float
    backward: float


def layer_time(
    layer: Layer,
    spec: DeviceSpec,
    precision: Precision,
    *,
    micro_batch: int = 1,
    tensor: int = 1,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
    learned: Learned | None = None,
) -> LayerTime:
    """Seconds of `layer` for `micro_batch` samples, split over `tensor` devices such as `spec`.

    Matrix products shrink with `tensor`; norms, residuals and dropouts do not; all-reduces are not
    included. learned: what was learned of this device's operators, in place of the roofline.
    Raises InputError where the device lacks `precision`, or sizes are below 1.
    """
    for name, value in (("micro_batch", micro_batch), ("tensor", tensor)):
        if value < 1:
            raise InputError(f"{name} is not usable", got=value, expected="at least 1")
    rates = Rates.of(spec, precision, efficiency)
    times = [operator_time(op, rates, micro_batch, tensor) for op in layer.operators]
    if learned is not None:
        times = [
            learned_time(learned, op, plain, micro_batch, tensor, ELEMENT_BYTES[precision])
            for op, plain in zip(layer.operators, times, strict=True)
        ]
    kernels = [launches(op) for op in layer.operators]
    return LayerTime(
        forward=max(
            sum(t.forward for t in times), sum(k[0] for k in kernels) * efficiency.launch_seconds
        ),
        backward=max(
            sum(t.backward for t in times), sum(k[1] for k in kernels) * efficiency.launch_seconds
        ),
    )


@dataclass(frozen=True)
class Rates:
    """What one device reaches: FLOP/s of matrix products, seconds per element moved, tile size."""

    flops_per_s: float
    element_seconds: float
    tile: int

    @classmethod
    def of(cls, spec: DeviceSpec, precision: Precision, efficiency: Efficiency) -> Rates:
        """The datasheet's peaks times the efficiencies."""
        return cls(
            flops_per_s=spec.peak_flops(precision) * efficiency.matmul(precision),
            element_seconds=ELEMENT_BYTES[precision]
            / (spec.memory_bytes_per_s * efficiency.memory),
            tile=efficiency.tile,
        )


def operator_time(op: Operator, rates: Rates, micro_batch: int, tensor: int) -> LayerTime:
    """The roofline of one operator, forward and backward."""
    seconds = op.moved(micro_batch, tensor) * rates.element_seconds
    shape = op.shape(micro_batch, tensor)
    if shape is not None:
        seconds = max(tiled_flops(shape, rates.tile) / rates.flops_per_s, seconds)
    if isinstance(op, Counted):
        return LayerTime(0.0, seconds) if op.backward else LayerTime(seconds, 0.0)
    if isinstance(op, Matmul):
        return LayerTime(seconds, seconds * op.backward_products)
    return LayerTime(seconds, op.moved_back(micro_batch, tensor) * rates.element_seconds)


def learned_time(
    learned: Learned,
    op: Operator,
    plain: LayerTime,
    micro_batch: int,
    tensor: int,
    element_bytes: int,
) -> LayerTime:
    """What was learned of an operator's forward pass, and the plain roofline's ratio of its
    passes; of a traced operator the seconds of its only pass."""
    seconds = learned.seconds(op, micro_batch, tensor, element_bytes)
    if seconds is None:
        return plain
    if plain.forward == 0:
        return LayerTime(0.0, seconds if plain.backward > 0 else 0.0)
    return LayerTime(seconds, seconds * plain.backward / plain.forward)


def tiled_flops(shape: Shape, tile: int) -> float:
    """FLOPs with m and n rounded up to whole tiles."""
    m, n = (-(-size // tile) * tile for size in (shape.m, shape.n))
    return 2.0 * shape.count * m * n * shape.k


def all_reduce_seconds(size: float, ranks: int, bandwidth: float, latency: float = 0.0) -> float:
    """Time of a ring all-reduce: 2 (n-1) (size / (n b) + a), no overlap.

    size: bytes per rank. ranks: n >= 1 (1 gives 0). bandwidth: bytes/s of the ring's slowest link.
    latency: seconds per message. Source: Patarasuk and Yuan 2009; AMP (NeurIPS 2022), equation 3,
    without the latency.
    """
    return 2.0 * (ranks - 1) * (size / (ranks * bandwidth) + latency)


Recomputation = Literal["none", "selective", "full"]

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
