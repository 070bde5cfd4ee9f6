"""Seconds of matrix products and of operators without products: from measured rates where a device
was measured, else from a roofline.

The speed of a device at each kind of tile is fitted to its measured products (`tiles`). Where vidur
or NeuSight measured it, regression trees learn the logarithm of measured / physical seconds from
the sizes and from the waves of each tile. They measured devices at work for long, so that these
rates are sustained ones. NVIDIA's aiconfigurator measured bursts, in each format of the operands.
Their tiles serve all devices of an architecture: in bursts, in 8 and 4 bits, and on Ada and
Blackwell, which no other source measured, also sustained. Another device has the mean of the fits,
and no trees.

Like measured seconds, predicted ones are not smooth: they jump where another wave begins, and fall
a little where a larger product fits its tiles better.

The seconds of an operator without products are the bytes that it moves over the bandwidth that it
reaches, and a few microseconds of its kernel. NeuSight measured such operators in fp32 on P4, P100,
V100, T4 and A100, from 16 MB on. The share of the bandwidth grows with the bytes; for norms and
softmax it also depends on the length of a row. Fewer bytes than the fewest measured ones are moved
at the share of those. Operators on 16-bit numbers take the seconds of their bytes.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetplan.profiling.hardware.cluster import DeviceSpec, Floats, catalogue
from hetplan.profiling.models.operators import PRECISIONS, Shape
from hetplan.profiling.rates.shipped import (
    Errors,
    Estimate,
    Format,
    MoveRate,
    ProductTrees,
    Tiling,
    shipped,
)
from hetplan.profiling.rates.tiles import (
    PHYSICS,
    Architecture,
    Machine,
    Physics,
    Regime,
    architecture,
    mean_of,
    physical,
)
from hetplan.schema import NonNegative, Positive, StrictModel


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
        tree = np.arange(len(self.feature))
        row = np.arange(len(features))[:, None]
        node = np.zeros((len(features), len(tree)), dtype=np.int64)  # [N, T] where each product is
        inner_nodes = self.feature.shape[1]
        while node[0, 0] < inner_nodes:  # all are on one level
            goes_right = features[row, self.feature[tree, node]] >= self.threshold[tree, node]
            node = 2 * node + 1 + goes_right
        return np.asarray(self.start + self.leaf[tree, node - inner_nodes].sum(axis=1))


@cache
def measured_products(device: str, precision: Format) -> tuple[ProductTrees, Trees] | None:
    """(table, trees) shipped for a device type; None where it was not measured. bf16 counts as
    fp16, because tensor cores compute both at the same rate."""
    for table in tables_of(precision):
        if device in table.devices:
            return table, Trees.of(table)
    return None


def tables_of(precision: Format) -> list[ProductTrees]:
    """The shipped tables of a precision, for bf16 those of fp16."""
    measured = "fp16" if precision == "bf16" else precision
    return [table for table in shipped().products if table.precision == measured]


@cache
def mean_tiling(precision: Format) -> Tiling:
    """The geometric mean of all measured devices' tilings in a precision."""
    return mean_of([table.tiling for table in tables_of(precision)])


def products_seconds(
    device: str,
    spec: DeviceSpec,
    number: Format,
    shapes: tuple[Shape, ...],
    physics: Physics = PHYSICS,
    regime: Regime = "sustained",
) -> tuple[Estimate, ...]:
    """Estimated seconds of each of `shapes` on a device type, whose operands have the format
    `number`.

    device: its catalogue name, by which measurements are looked up. Raises InputError where the
    device has no units for the format.
    """
    machine = Machine.of(spec, number, physics, regime)
    kind = architecture(spec)
    return _estimates(device, machine, kind, number, shapes, physics, regime)


def product_seconds(
    device: str,
    spec: DeviceSpec,
    number: Format,
    shape: Shape,
    physics: Physics = PHYSICS,
    regime: Regime = "sustained",
) -> Estimate:
    """Estimated seconds of one shape; see `products_seconds`, which is faster for many shapes."""
    return products_seconds(device, spec, number, (shape,), physics, regime)[0]


@lru_cache(maxsize=2**16)
def _estimates(
    device: str,
    machine: Machine,
    kind: Architecture,
    number: Format,
    shapes: tuple[Shape, ...],
    physics: Physics,
    regime: Regime,
) -> tuple[Estimate, ...]:
    """The estimate of each shape; the last answers are cached."""
    # [N, 4] also for N = 0
    sizes = np.array([(s.count, s.m, s.k, s.n) for s in shapes], float).reshape(-1, 4)
    measured = measured_products(device, number) if regime == "sustained" else None
    if measured is not None:
        return by_trees(*measured, machine, sizes, physics)
    model = untreed_model(device, kind, number, regime, physics)
    predicted = within_watts(machine, model, sizes, physics)
    least = physics.least_width if number in PRECISIONS else physics.least_narrow_width
    beneath = (
        sizes[:, 2:].min(axis=1) < least
    )  # [N] whether k or n is less than any that was fitted
    estimates = []
    for seconds, is_beneath in zip(predicted.tolist(), beneath.tolist(), strict=True):
        low, high = model.low, model.high
        if is_beneath:
            low, high = min(low, physics.unlike_low), max(high, physics.unlike_high)
        estimates.append(Estimate(seconds, seconds * low, seconds * high, model.source))
    return tuple(estimates)


def by_trees(
    table: ProductTrees, trees: Trees, machine: Machine, sizes: Floats, physics: Physics
) -> tuple[Estimate, ...]:
    """The estimates of products `sizes` [N, 4] on a device that was measured in sustained use."""
    predicted, features = physical(machine, table.tiling, sizes, physics)
    corrected = predicted * np.exp(trees.sums(features))
    estimates = []
    for seconds, is_beyond in zip(corrected.tolist(), beyond(table, sizes), strict=True):
        low, high, source = table.errors.low, table.errors.high, table.origin
        if is_beyond:
            low, high = min(low, physics.low), max(high, physics.high)
            source = f"{table.origin}, beyond its sizes"
        estimates.append(Estimate(seconds, seconds * low, seconds * high, source))
    return tuple(estimates)


@dataclass(frozen=True)
class Untreed:
    """Tiles of a device without trees, and the ends of its intervals over the seconds."""

    tiling: Tiling
    of_bursts: bool  # whether bursts were measured, and not what the device reaches in the regime
    low: float
    high: float
    source: str


@cache
def untreed_model(
    device: str, kind: Architecture, number: Format, regime: Regime, physics: Physics
) -> Untreed:
    """The tiles of a device's architecture in a format where they were measured, else the mean of
    others.

    Measured bursts serve in sustained use, too, within the watts of the board, where no source says
    more: in 8 and 4 bits, and on Ada and Blackwell.
    """
    rates = [rate for rate in shipped().formats if rate.number == burst_format(number)]
    own = next((rate for rate in rates if rate.architecture == kind), None)
    lasting = regime == "burst" or number not in PRECISIONS or kind in ("ada", "blackwell")
    if own is not None and lasting:
        low, high, source = own.errors.low, own.errors.high, own.origin
        if device not in own.devices:
            low, high = wider(low, high, physics.boards)
            source = f"{own.origin} on {own.devices[0]}"
        if regime == "sustained" and number in PRECISIONS:
            low = min(low, physics.sustained_low)
            source = f"{source}, within the board's watts"
        return Untreed(own.tiling, True, low, high, source)
    if number in PRECISIONS:
        source = "roofline over tiles, never measured"
        return Untreed(mean_tiling(number), False, physics.low, physics.high, source)
    tiling = mean_of([rate.tiling for rate in rates])
    source = f"{number} of other architectures"
    return Untreed(tiling, True, physics.unlike_low, physics.unlike_high, source)


def within_watts(machine: Machine, model: Untreed, sizes: Floats, physics: Physics) -> Floats:
    """[N] physical seconds of products `sizes` [N, 4]. Bursts take at least the seconds of their
    operations at the rate that the regime allows: a smooth maximum, as in `physical`."""
    if not model.of_bursts:
        return physical(machine, model.tiling, sizes, physics)[0]
    bursting = replace(machine, reached=machine.bursts)
    seconds, _ = physical(bursting, model.tiling, sizes, physics)
    least = 2.0 * sizes.prod(axis=1) / machine.reached
    blunt = physics.sharpness[1]
    return np.asarray((seconds**blunt + least**blunt) ** (1 / blunt))


def burst_format(number: Format) -> Format:
    """The measured format that serves for another: tensor cores compute fp16 as fast as bf16."""
    return "bf16" if number == "fp16" else number


def wider(low: float, high: float, deviation: float) -> tuple[float, float]:
    """The ends of an interval that holds eight of ten where, besides its own errors, a factor is
    uncertain by a standard deviation of its logarithm. Independent errors add up in squares."""
    tenth = 1.28 * deviation  # of a normal distribution, one in ten is further above
    return (
        math.exp(-math.hypot(math.log(low), tenth)),
        math.exp(math.hypot(math.log(high), tenth)),
    )


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
