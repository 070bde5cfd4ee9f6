"""Seconds of matrix products: learned where a device type was measured, scaled physics elsewhere.

The physics of a product is a roofline over tiles. A library cuts the result into tiles, the
multiprocessors compute them in waves, and the last wave takes as long as a full one (NVIDIA,
"Matrix Multiplication Background", tile and wave quantisation). Of the tile sizes that libraries
use the fastest counts; a product takes no less than its bytes need. Learned trees give the
logarithm of measured / physical seconds from the sizes and from how each tile fits them.

What is not smooth in truth is not smooth here: seconds jump where another wave begins, and fall a
little where a larger product fits its tiles better.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from hetplan.profiling.catalogue import DeviceSpec
from hetplan.profiling.operators import ELEMENT_BYTES, Precision, Shape
from hetplan.profiling.rates.estimate import Estimate
from hetplan.profiling.rates.shipped import ProductTrees, shipped

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Physics:
    """Constants of the roofline over tiles.

    tile_rows, tile_columns: tiles of cuBLAS and CUTLASS (CUTLASS documentation, "Efficient GEMM in
    CUDA"). tile_share: of the rate of the largest tile, which loads each operand least often; read
    off the medians of vidur's A100 products by result size. share_16, share_32: of the peak, of a
    well-filled product (vidur's A100, A40 and H100: 0.69 to 0.78; NeuSight's V100, A100: 0.8 to
    0.97). memory: share of the bandwidth that products reach. start_seconds: a kernel's own.

    joules_32, joules_32_new: of an fp32 operation on devices up to Turing (NeuSight's T4: 70 W at
    3.7 TFLOP/s) and from Ampere on (its L4: 72 W at 7.7 TFLOP/s); no device computes more than its
    board's watts pay for. joules_16, joules_16_new: of one of tensor cores, likewise (a T4 at 70 W
    computes 24 TFLOP/s, NVIDIA developer forum 264462; vidur's H100 at 700 W 720).
    multiprocessors: of a device whose own are not known, a V100's. low, high: around physics alone,
    of measured products (10 % and 90 % over all devices of `benchmarks/fit_rates.py`).
    """

    tile_rows: tuple[int, ...] = (256, 128, 128, 256, 64, 128, 64, 64)
    tile_columns: tuple[int, ...] = (128, 256, 128, 64, 256, 64, 128, 64)
    tile_share: tuple[float, ...] = (1.0, 1.0, 0.9, 0.9, 0.9, 0.75, 0.75, 0.6)
    share_16: float = 0.8
    share_32: float = 0.9
    memory: float = 0.8
    start_seconds: float = 3e-6
    joules_32: float = 19e-12
    joules_32_new: float = 9.3e-12
    joules_16: float = 2.9e-12
    joules_16_new: float = 0.97e-12
    multiprocessors: int = 80
    low: float = 0.75
    high: float = 1.6


PHYSICS = Physics()


@dataclass(frozen=True)
class Machine:
    """What physics asks of a device: FLOP/s of its datasheet and reached, bytes/s, tiles at once.

    Multiprocessors that the catalogue does not know count as those of a V100.
    """

    peak: float
    reached: float
    bandwidth: float
    multiprocessors: int
    element_bytes: int

    @classmethod
    def of(cls, spec: DeviceSpec, precision: Precision, physics: Physics = PHYSICS) -> Machine:
        """From a catalogue entry; raises InputError where it lacks `precision`."""
        peak = spec.peak_flops(precision)
        reached = peak * (physics.share_32 if precision == "fp32" else physics.share_16)
        if spec.tdp_w is not None:
            newer = "bf16" in spec.peak_tflops
            joules = {
                (True, True): physics.joules_32_new,
                (True, False): physics.joules_32,
                (False, True): physics.joules_16_new,
                (False, False): physics.joules_16,
            }[precision == "fp32", newer]
            reached = min(reached, spec.tdp_w / joules)
        return cls(
            peak=peak,
            reached=reached,
            bandwidth=spec.memory_bytes_per_s * physics.memory,
            multiprocessors=spec.multiprocessors or physics.multiprocessors,
            element_bytes=ELEMENT_BYTES[precision],
        )


def physical(machine: Machine, sizes: Floats, physics: Physics = PHYSICS) -> tuple[Floats, Floats]:
    """Physical seconds [N] of products `sizes` [N, 4] (count, m, k, n), and what trees ask [N, F].

    Features are logarithms (base 2, in thousandths): of count, m, k, n, of the seconds at the peak,
    of those over the seconds of its bytes, of the seconds lost to the edges of each tile size
    and to its last wave, of waves of the middle one, and of physical over ideal seconds.
    """
    count, m, k, n = np.maximum(sizes.T, 1.0)[:, :, None]
    rows, columns = np.array(physics.tile_rows), np.array(physics.tile_columns)
    tiles = count * np.ceil(m / rows) * np.ceil(n / columns)
    waves = np.ceil(tiles / machine.multiprocessors)
    lost = waves * machine.multiprocessors * rows * columns / (count * m * n)
    at_peak = 2.0 * count * m * k * n / machine.peak
    moved = count * (m * k + k * n + m * n) * machine.element_bytes / machine.bandwidth
    slowest = machine.peak / machine.reached * at_peak
    computed = np.min(slowest * lost / np.array(physics.tile_share), axis=1, keepdims=True)
    seconds = np.maximum(computed, moved) + physics.start_seconds
    ideal = np.maximum(slowest, moved)
    asked = (
        count, m, k, n, at_peak * 1e6, at_peak / moved, lost, waves[:, 2:3], seconds / ideal
    )  # fmt: skip
    features = np.round(1e3 * np.log2(np.concatenate(asked, axis=1)))
    return seconds[:, 0], features


@dataclass(frozen=True, eq=False)
class Trees:
    """Complete binary trees as arrays, ready to ask."""

    start: float
    feature: NDArray[np.int64]
    threshold: Floats
    leaf: Floats

    @classmethod
    def of(cls, table: ProductTrees) -> Trees:
        """From the file's whole numbers."""
        return cls(
            table.start,
            np.array(table.feature),
            np.array(table.threshold, float),
            np.array(table.leaf, float) * 1e-4,
        )

    def sums(self, features: Floats) -> Floats:
        """[N] sums over all trees for features [N, F]."""
        tree, row = np.arange(len(self.feature)), np.arange(len(features))[:, None]
        node = np.zeros((len(features), len(tree)), dtype=np.int64)
        inner = self.feature.shape[1]
        while node[0, 0] < inner:
            right = features[row, self.feature[tree, node]] >= self.threshold[tree, node]
            node = 2 * node + 1 + right
        return np.asarray(self.start + self.leaf[tree, node - inner].sum(axis=1))


@cache
def measured_products(device: str, precision: Precision) -> tuple[ProductTrees, Trees] | None:
    """The trees that serve a device type; None where it was not measured. bf16 counts as fp16:
    tensor cores compute both at one rate."""
    asked = "fp16" if precision == "bf16" else precision
    for table in shipped().products:
        if device in table.devices and table.precision == asked:
            return table, Trees.of(table)
    return None


def products_seconds(
    device: str,
    spec: DeviceSpec,
    precision: Precision,
    shapes: tuple[Shape, ...],
    physics: Physics = PHYSICS,
) -> tuple[Estimate, ...]:
    """Seconds of each of `shapes` on a device type, all asked at once.

    device: its catalogue name, by which measurements are looked up. Raises InputError where the
    device has no units for `precision`.
    """
    return _estimates(device, Machine.of(spec, precision, physics), precision, shapes, physics)


@lru_cache(maxsize=2**16)
def _estimates(
    device: str,
    machine: Machine,
    precision: Precision,
    shapes: tuple[Shape, ...],
    physics: Physics,
) -> tuple[Estimate, ...]:
    """One for each shape."""
    sizes = np.array([(s.count, s.m, s.k, s.n) for s in shapes], float).reshape(-1, 4)
    seconds, features = physical(machine, sizes, physics)
    known = measured_products(device, precision)
    if known is None:
        low, high, source = physics.low, physics.high, "roofline over tiles, never measured"
    else:
        table, trees = known
        seconds = seconds * np.exp(trees.sums(features))
        low, high, source = table.errors.low, table.errors.high, table.origin
    return tuple(Estimate(s, s * low, s * high, source) for s in seconds.tolist())


def product_seconds(
    device: str, spec: DeviceSpec, precision: Precision, shape: Shape, physics: Physics = PHYSICS
) -> Estimate:
    """Seconds of one shape; each is computed once. As `products_seconds`, which is quicker for
    many."""
    machine = Machine.of(spec, precision, physics)
    return _estimates(device, machine, precision, (shape,), physics)[0]
