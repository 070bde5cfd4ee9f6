"""The measured rates that come with hetplan, in `measured.json.gz`.

`evidence/speed/fit_rates.py` derives them from measurements that others published: regression trees
for matrix products, shares of the memory bandwidth for other operators, and curves of seconds by
bytes for collectives. The file has none of the published tables, and names the origin and the
licence of every entry. Units are seconds, bytes, and shares of a device's datasheet figures.
`products` and `collectives` compute with the rates.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetplan.profiling.models.operators import Precision
from hetplan.schema import Document, Name, NonNegative, Positive, PositiveCount, StrictModel

# How the operands of a product are stored. `fp8-block` has a scale for each block of 128, `fp8` one
# for each tensor, `fp4` one for each block of 16 (NVFP4).
Format = Literal["fp32", "fp16", "bf16", "fp8", "fp8-block", "fp4"]
IntegerRows = Annotated[list[list[int]], Field(min_length=1)]


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of an operator or a collective, with an interval.

    Eight in ten measurements lie in the interval. Its width follows from the errors of fits that
    did not see the measured shapes; where nothing like the operator was measured, it is wider.
    """

    seconds: float
    low: float  # seconds, lower end of the interval
    high: float  # seconds, upper end of the interval
    source: str  # what the prediction comes from, in words


class Origin(StrictModel):
    """A published set of measurements."""

    name: Name
    """The name by which entries refer to this set."""
    source: Name
    """Repository and commit."""
    licence: Name
    conditions: Name
    """The benchmark that was run, and its software."""


class Errors(StrictModel):
    """Errors of predictions for measurements that a fit has not seen."""

    mean: NonNegative
    """Mean of |predicted / measured - 1|."""
    low: Positive
    """The ratio measured / predicted below which one in ten measurements lies; at most 1."""
    high: Positive
    """The ratio measured / predicted above which one in ten measurements lies; at least 1."""
    rows: PositiveCount
    """Number of measurements."""


class Tiling(StrictModel):
    """The speed of a device for each of the T kinds of tile in `products.Physics`."""

    slowness: list[Positive]
    """[T] ratio of a tile's seconds to its seconds at the rate that large products reach."""
    wave_seconds: list[Positive]
    """[T] seconds that a wave takes in addition to its operations."""
    memory: Positive
    """Share of the datasheet's memory bandwidth."""
    start_seconds: Positive
    """Seconds that every product takes in addition to its tiles and bytes."""


class ProductTrees(StrictModel):
    """The model of matrix products on one kind of device in one precision.

    `tiling` gives physical seconds. T gradient-boosted trees give the logarithm of
    measured / physical seconds, as `start` plus the sum of one leaf of each tree. Every tree is a
    complete binary tree, whose nodes are stored level by level.
    """

    devices: list[Name]
    """Catalogue names of the devices that the model serves."""
    precision: Precision
    origin: Name
    tiling: Tiling
    least: list[Positive]
    """[4] smallest measured count, m, k and n of a product."""
    most: list[Positive]
    """[4] largest measured count, m, k and n."""
    start: float
    feature: IntegerRows
    """[T, 2^depth - 1] index of the feature that an inner node compares."""
    threshold: IntegerRows
    """[T, 2^depth - 1] in thousandths; a feature of at least the threshold leads to the right."""
    leaf: IntegerRows
    """[T, 2^depth] ten-thousandths of the logarithm."""
    errors: Errors


class FormatRate(StrictModel):
    """The speed of an architecture for products of one format in bursts, without trees."""

    devices: list[Name]
    """Catalogue names of the devices that were measured, or have the same chip and power."""
    architecture: Name
    """The architecture's name, as `tiles.architecture` gives it."""
    number: Format
    origin: Name
    tiling: Tiling
    errors: Errors


class MoveRate(StrictModel):
    """Shares of the memory bandwidth that one kind of memory-bound operator reaches on one kind of
    device, by bytes and by the length of a row. Shares between the knots are interpolated linearly;
    beyond the knots they are constant."""

    devices: list[Name]
    """Catalogue names of the devices that the rate serves."""
    kind: Name
    """The kind of operator, one of `products.MoveKind`."""
    origin: Name
    log2_bytes: list[Positive]
    """[B] knots: logarithm of the bytes read and written."""
    log2_row: list[Positive]
    """[R] knots: logarithm of the numbers in a row."""
    share: list[list[Positive]]
    """[B][R] share of the datasheet's memory bandwidth."""
    errors: Errors


class Curve(StrictModel):
    """Seconds of one collective on one fabric, by bytes. The logarithm of the seconds between the
    knots is interpolated linearly."""

    fabric: Name
    """Name of the network that connects the devices, such as "a100-nvswitch"."""
    operation: Name
    """"all-reduce" or "send"."""
    ranks: PositiveCount
    origin: Name
    log2_bytes: list[Positive]
    """[B] knots: logarithm of the bytes of each rank."""
    seconds: list[Positive]
    """[B] seconds of the collective at each knot."""
    errors: Errors


class ShippedRates(Document):
    """The contents of `measured.json.gz`."""

    format: Literal["hetplan-rates"] = "hetplan-rates"
    version: Literal[1] = 1
    origins: list[Origin]
    products: list[ProductTrees]
    formats: list[FormatRate] = Field(default_factory=list)
    moves: list[MoveRate]
    collectives: list[Curve]


@cache
def shipped() -> ShippedRates:
    """The measured rates that come with hetplan, read once."""
    return ShippedRates.load(Path(__file__).with_name("measured.json.gz"))
