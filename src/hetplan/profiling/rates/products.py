"""Seconds of matrix products and of operators without products: from measured rates where a device
was measured, else from a roofline.

The physics of a product is a roofline over tiles. A library cuts the result into tiles, and also
the inner dimension where tiles are few. The multiprocessors compute the tiles in waves, and the
last wave takes as long as a full one (NVIDIA, "Matrix Multiplication Background", tile and wave
quantisation). The fastest kind of tile that libraries use decides, but a product takes no less than
its bytes need.

The speed of a device at each kind of tile is fitted to its measured products. Regression trees
learn the logarithm of measured / physical seconds from the sizes and from the waves of each tile. A
device that was not measured has the mean of the fits, and no trees.

Like measured seconds, predicted ones are not smooth: they jump where another wave begins, and fall
a little where a larger product fits its tiles better.

The seconds of an operator without products are the bytes that it moves over the bandwidth that it
reaches, and a few microseconds of its kernel. NeuSight measured such operators in fp32 on P4, P100,
V100, T4 and A100, from 16 MB on. The share of the bandwidth grows with the bytes; for norms and
softmax it also depends on the length of a row. Fewer bytes than the fewest measured ones are moved
at the share of those. Operators on 16-bit numbers take the seconds of their bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetplan.profiling.hardware.cluster import DeviceSpec, Floats, catalogue
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision, Shape
from hetplan.profiling.rates.shipped import (
    Errors,
    Estimate,
    MoveRate,
    ProductTrees,
    Tiling,
    shipped,
)
from hetplan.schema import NonNegative, Positive, StrictModel


@dataclass(frozen=True)
class Physics:
    """Constants of the roofline over tiles."""

    # [T] rows and columns of each kind of tile of cuBLAS and CUTLASS, and the number of parts into
    # which it cuts the inner dimension (CUTLASS documentation, "Efficient GEMM in CUDA")
    rows: tuple[int, ...] = (256, 128, 128, 256, 64, 128, 64, 64, 128, 64, 128, 64)
    columns: tuple[int, ...] = (128, 256, 128, 64, 256, 64, 128, 64, 128, 64, 128, 64)
    split: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4)
    # share of the peak that large products reach: in 16 bits vidur's A100, A40 and H100 0.69 to
    # 0.78, in fp32 NeuSight's V100 and A100 0.8 to 0.97
    share_16: float = 0.8
    share_32: float = 0.9
    # joules of an operation; no device computes more than the watts of its board pay for
    joules_32: float = 19e-12  # fp32, up to Turing (NeuSight's T4: 70 W at 3.7 TFLOP/s)
    joules_32_new: float = 9.3e-12  # fp32, from Ampere on (NeuSight's L4: 72 W at 7.7 TFLOP/s)
    # tensor cores up to Turing (a T4: 70 W at 24 TFLOP/s, NVIDIA developer forum 264462)
    joules_16: float = 2.9e-12
    joules_16_new: float = 0.97e-12  # from Ampere on (vidur's H100: 700 W at 720 TFLOP/s)
    multiprocessors: int = 80  # of a device for which the catalogue has no number: a V100's
    # (exponent of the smooth minimum over tiles, exponent of the smooth maximum of computing and
    # moving); the minimum is smooth because libraries do not always choose the fastest tile
    sharpness: tuple[float, float] = (20.0, 10.0)
    # Measured / physical seconds of a device that was not measured: 10 % of the products lie below
    # `low`, 10 % above `high`, over all measured devices, each with the mean fit of the others
    # (`evidence/speed/fit_rates.py`).
    low: float = 0.77
    high: float = 1.3


PHYSICS = Physics()


@dataclass(frozen=True)
class Machine:
    """A device as the model of products sees it."""

    peak: float  # FLOP/s of its datasheet
    reached: float  # FLOP/s of large products
    bandwidth: float  # bytes/s of its datasheet
    multiprocessors: int  # tiles that it computes at once; a V100's where the catalogue has none
    element_bytes: int  # of a number in this precision

    @classmethod
    def of(cls, spec: DeviceSpec, precision: Precision, physics: Physics = PHYSICS) -> "Machine":
        """The machine of a catalogue entry. Raises InputError where it lacks `precision`."""
        from_ampere_on = "bf16" in spec.peak_tflops
        if precision == "fp32":
            share = physics.share_32
            joules = physics.joules_32_new if from_ampere_on else physics.joules_32
        else:
            share = physics.share_16
            joules = physics.joules_16_new if from_ampere_on else physics.joules_16
        peak = spec.peak_flops(precision)
        reached = peak * share
        if spec.tdp_w is not None and energy_is_known(spec):
            reached = min(reached, spec.tdp_w / joules)
        return cls(
            peak=peak,
            reached=reached,
            bandwidth=spec.memory_bytes_per_s,
            multiprocessors=spec.multiprocessors or physics.multiprocessors,
            element_bytes=ELEMENT_BYTES[precision],
        )


def energy_is_known(spec: DeviceSpec) -> bool:
    """Whether the joules of `Physics` hold for a device.

    They were measured on NVIDIA's chips before Blackwell, the first ones with 4-bit products. A
    device that a cluster file describes counts as such a chip.
    """
    return spec.vendor in ("nvidia", "other") and "fp4" not in spec.peak_tflops


@dataclass(frozen=True)
class Tiles:
    """N products cut into each of T kinds of tile on a device."""

    busy: Floats  # [N, T] seconds of all waves at the reached rate, the last one counted as full
    waves: Floats  # [N, T] number of waves
    lost: Floats  # [N, T] `busy` over `alone`
    alone: Floats  # [N, 1] seconds of the product's own operations at the reached rate
    moved: Floats  # [N, 1] seconds of the product's bytes at the datasheet's bandwidth

    @classmethod
    def of(cls, machine: Machine, sizes: Floats, physics: Physics = PHYSICS) -> "Tiles":
        """The tiles of products `sizes` [N, 4]: count, m, k, n, each at least 1."""
        count, m, k, n = sizes.T[:, :, None]  # [N, 1] each
        rows, columns, split = map(np.array, (physics.rows, physics.columns, physics.split))
        tiles = count * np.ceil(m / rows) * np.ceil(n / columns) * split
        waves = np.ceil(tiles / machine.multiprocessors)
        inner = np.ceil(k / split / 32) * 32  # kernels take the inner dimension in steps of 32
        busy = 2.0 * waves * machine.multiprocessors * rows * columns * inner / machine.reached
        alone = 2.0 * count * m * k * n / machine.reached
        moved = count * (m * k + k * n + m * n) * machine.element_bytes / machine.bandwidth
        return cls(busy, waves, busy / alone, alone, moved)


def physical(
    machine: Machine, tiling: Tiling, sizes: Floats, physics: Physics = PHYSICS
) -> tuple[Floats, Floats]:
    """(physical seconds [N], features of the trees [N, F]) of products `sizes` [N, 4]: count, m, k
    and n.

    computed = (sum over tiles of seconds^-sharp)^(-1/sharp), a smooth minimum;
    seconds = (computed^blunt + moved^blunt)^(1/blunt) + start, a smooth maximum.
    """
    sizes = np.maximum(sizes, 1.0)
    tiles = Tiles.of(machine, sizes, physics)
    sharp, blunt = physics.sharpness
    by_tile = tiles.busy * np.array(tiling.slowness) + tiles.waves * np.array(tiling.wave_seconds)
    best = by_tile.min(axis=1, keepdims=True)
    by_best = by_tile / best
    computed = best * (by_best**-sharp).sum(axis=1, keepdims=True) ** (-1 / sharp)
    moved = tiles.moved / tiling.memory
    longer = np.maximum(computed, moved)
    shorter = np.minimum(computed, moved)
    seconds = longer * (1.0 + (shorter / longer) ** blunt) ** (1 / blunt) + tiling.start_seconds
    measures = (
        sizes,
        tiles.alone * 1e6,  # microseconds
        tiles.alone / tiles.moved,
        tiles.waves[:, 2:3],  # of tiles of 128 x 128, the third kind of `Physics.rows`
        best / moved,
        tiles.lost,
        by_best,
    )
    # Trees compare whole numbers: thousandths of logarithms to base 2.
    features = np.round(1e3 * np.log2(np.concatenate(measures, axis=1)))
    return seconds[:, 0], features


@dataclass(frozen=True, eq=False)
class Trees:
    """The trees of `ProductTrees` as arrays."""

    start: float
    feature: NDArray[np.int64]  # [T, 2^depth - 1]
    threshold: Floats  # [T, 2^depth - 1] in thousandths, as the features
    leaf: Floats  # [T, 2^depth] logarithms

    @classmethod
    def of(cls, table: ProductTrees) -> "Trees":
        """The arrays of a table, whose integers become numbers."""
        return cls(
            table.start,
            np.array(table.feature),
            np.array(table.threshold, float),
            np.array(table.leaf, float) * 1e-4,
        )

    def sums(self, features: Floats) -> Floats:
        """[N] sums over all trees for features [N, F]."""
        tree, row = np.arange(len(self.feature)), np.arange(len(features))[:, None]
        node = np.zeros((len(features), len(tree)), dtype=np.int64)  # [N, T] where each product is
        inner_nodes = self.feature.shape[1]
        while node[0, 0] < inner_nodes:  # all are on one level
            goes_right = features[row, self.feature[tree, node]] >= self.threshold[tree, node]
            node = 2 * node + 1 + goes_right
        return np.asarray(self.start + self.leaf[tree, node - inner_nodes].sum(axis=1))


@cache
def measured_products(device: str, precision: Precision) -> tuple[ProductTrees, Trees] | None:
    """(table, trees) shipped for a device type; None where it was not measured. bf16 counts as
    fp16, because tensor cores compute both at the same rate."""
    for table in tables_of(precision):
        if device in table.devices:
            return table, Trees.of(table)
    return None


def tables_of(precision: Precision) -> list[ProductTrees]:
    """The shipped tables of a precision, for bf16 those of fp16."""
    measured = "fp16" if precision == "bf16" else precision
    return [table for table in shipped().products if table.precision == measured]


@cache
def mean_tiling(precision: Precision) -> Tiling:
    """The geometric mean of all measured devices' tilings in a precision."""
    return mean_of([table.tiling for table in tables_of(precision)])


def mean_of(tilings: Sequence[Tiling]) -> Tiling:
    """The tiling whose figures are the geometric means of the tilings' figures."""
    figures = [[*t.slowness, *t.wave_seconds, t.memory, t.start_seconds] for t in tilings]
    mean = np.exp(np.log(figures).mean(axis=0)).tolist()
    tiles = len(tilings[0].slowness)
    return Tiling(
        slowness=mean[:tiles], wave_seconds=mean[tiles:-2], memory=mean[-2], start_seconds=mean[-1]
    )


def products_seconds(
    device: str,
    spec: DeviceSpec,
    precision: Precision,
    shapes: tuple[Shape, ...],
    physics: Physics = PHYSICS,
) -> tuple[Estimate, ...]:
    """Estimated seconds of each of `shapes` on a device type.

    device: its catalogue name, by which measurements are looked up. Raises InputError where the
    device has no units for `precision`.
    """
    return _estimates(device, Machine.of(spec, precision, physics), precision, shapes, physics)


def product_seconds(
    device: str, spec: DeviceSpec, precision: Precision, shape: Shape, physics: Physics = PHYSICS
) -> Estimate:
    """Estimated seconds of one shape; see `products_seconds`, which is faster for many shapes."""
    return products_seconds(device, spec, precision, (shape,), physics)[0]


@lru_cache(maxsize=2**16)
def _estimates(
    device: str,
    machine: Machine,
    precision: Precision,
    shapes: tuple[Shape, ...],
    physics: Physics,
) -> tuple[Estimate, ...]:
    """The estimate of each shape; the last answers are cached."""
    # [N, 4] also for N = 0
    sizes = np.array([(s.count, s.m, s.k, s.n) for s in shapes], float).reshape(-1, 4)
    measured = measured_products(device, precision)
    estimates = []
    if measured is None:
        predicted, _ = physical(machine, mean_tiling(precision), sizes, physics)
        source = "roofline over tiles, never measured"
        for seconds in predicted.tolist():
            low, high = seconds * physics.low, seconds * physics.high
            estimates.append(Estimate(seconds, low, high, source))
        return tuple(estimates)
    table, trees = measured
    predicted, features = physical(machine, table.tiling, sizes, physics)
    corrected = predicted * np.exp(trees.sums(features))
    for seconds, is_beyond in zip(corrected.tolist(), beyond(table, sizes), strict=True):
        low, high, source = table.errors.low, table.errors.high, table.origin
        if is_beyond:
            low, high = min(low, physics.low), max(high, physics.high)
            source = f"{table.origin}, beyond its sizes"
        estimates.append(Estimate(seconds, seconds * low, seconds * high, source))
    return tuple(estimates)


def beyond(table: ProductTrees, sizes: Floats) -> list[bool]:
    """[N] for each product, whether one of its sizes [N, 4] is more than twice the largest measured
    one, or less than half of the smallest. Larger m and n never count, because they only need more
    tiles of the same kinds."""
    largest_count, _, largest_k, _ = table.most
    largest = np.array([largest_count, np.inf, largest_k, np.inf])
    far = (sizes < np.array(table.least) / 2) | (sizes > 2 * largest)
    return [bool(row.any()) for row in far]


# Operators without products, by the tensors that they move. binary: two in, one out. pointwise: one
# in, one out (activations, casts, copies, scaling). norm, softmax: one in, one out, over rows.
MoveKind = Literal["binary", "pointwise", "norm", "softmax"]


@dataclass(frozen=True)
class Moving:
    """Constants of operators without products."""

    # seconds of a kernel besides its bytes: an empty one takes 2 to 4 us (NVIDIA Nsight)
    start_seconds: float = 3e-6
    row: float = 1536.0  # numbers in a row without a given length: the middle of the measured ones
    # `Errors.low` and `Errors.high` of devices that were not measured and take the rate of the
    # measured device with the nearest bandwidth. `evidence/speed/fit_rates.py` prints them, where
    # it predicts each measured device by the others.
    low: float = 0.72
    high: float = 1.33


MOVING = Moving()


@cache
def rate_of(device: str, bandwidth: float, kind: MoveKind) -> tuple[MoveRate, bool]:
    """(rate, True) of a device type that was measured, else (rate, False) of the measured device
    with the nearest memory bandwidth."""
    rates = [rate for rate in shipped().moves if rate.kind == kind]
    for rate in rates:
        if device in rate.devices:
            return rate, True

    def distance(rate: MoveRate) -> float:
        # the devices of one rate are variants of one device
        measured_bandwidth = catalogue()[rate.devices[0]].memory_bytes_per_s
        return abs(math.log(measured_bandwidth / bandwidth))

    return min(rates, key=distance), False


class MoveCurve(StrictModel):
    """Seconds of an operator by the bytes that it moves: a start, and the bytes over the bandwidth
    that they reach. Shares are interpolated as in `MoveRate`."""

    start_seconds: NonNegative
    bytes_per_second: Positive
    """The datasheet's memory bandwidth."""
    log2_bytes: list[NonNegative]
    """[B] knots: logarithms of the bytes."""
    share: list[Positive]
    """[B] shares of the bandwidth that are reached at the knots."""

    def move_seconds(self, moved: float) -> float:
        """Seconds of moving `moved` bytes; never fewer for more bytes."""
        share = float(np.interp(math.log2(max(moved, 1.0)), self.log2_bytes, self.share))
        return self.start_seconds + moved / (self.bytes_per_second * share)


def move_curve(
    kind: MoveKind,
    device: str,
    spec: DeviceSpec,
    *,
    row: float | None = None,
    moving: Moving = MOVING,
) -> MoveCurve:
    """The seconds of one kind of operator by bytes, on a device type. Parameters: see
    `move_seconds`."""
    rate, _ = rate_of(device, spec.memory_bytes_per_s, kind)
    length = math.log2(row or moving.row)
    return MoveCurve(
        start_seconds=moving.start_seconds,
        bytes_per_second=spec.memory_bytes_per_s,
        log2_bytes=rate.log2_bytes,
        share=[float(np.interp(length, rate.log2_row, column)) for column in rate.share],
    )


def move_seconds(
    kind: MoveKind,
    moved: float,
    device: str,
    spec: DeviceSpec,
    *,
    row: float | None = None,
    moving: Moving = MOVING,
) -> Estimate:
    """Estimated seconds of one operator; never fewer for more bytes in rows of the same length.

    moved: bytes that it reads and writes. device: its catalogue name, by which measurements are
    looked up. row: numbers in a row of a norm or softmax; None: `Moving.row`.
    """
    return move_estimates(kind, device, spec, row=row, moving=moving).estimate(moved)


@dataclass(frozen=True)
class MoveEstimates:
    """Estimated seconds of one kind of operator on one device type, by the bytes that it moves."""

    curve: MoveCurve
    errors: Errors | Moving  # factors from the estimate to the ends of its interval
    source: str

    def estimate(self, moved: float) -> Estimate:
        """Estimated seconds of moving `moved` bytes."""
        seconds = self.curve.move_seconds(moved)
        return Estimate(seconds, seconds * self.errors.low, seconds * self.errors.high, self.source)


def move_estimates(
    kind: MoveKind,
    device: str,
    spec: DeviceSpec,
    *,
    row: float | None = None,
    moving: Moving = MOVING,
) -> MoveEstimates:
    """The estimates of `move_seconds` for any number of bytes. Parameters: see there."""
    rate, measured = rate_of(device, spec.memory_bytes_per_s, kind)
    return MoveEstimates(
        curve=move_curve(kind, device, spec, row=row, moving=moving),
        errors=rate.errors if measured else moving,
        source=rate.origin if measured else f"{rate.origin} on {rate.devices[0]}",
    )
