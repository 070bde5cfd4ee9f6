"""The measured rates that come with hetplan (`measured.json.gz`): trees, shares and curves that
`evidence/speed/fit_rates.py` derived from published measurements, with origin and licence of each.

No measured table of others is shipped itself. Seconds, bytes, and shares of a datasheet's peaks.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetplan.profiling.models.operators import Precision
from hetplan.schema import Document, Name, NonNegative, Positive, PositiveCount, StrictModel

Whole = Annotated[list[list[int]], Field(min_length=1)]


@dataclass(frozen=True)
class Estimate:
    """Seconds of an operator or a collective.

    low, high: eight in ten measurements lay between them where shapes like this one were left out
    of what was learned; wider where nothing of the kind was measured. source: what it comes from.
    """

    seconds: float
    low: float
    high: float
    source: str


class Origin(StrictModel):
    """Where measurements come from: a repository at a commit, its licence, and what was run."""

    name: Name
    source: Name
    licence: Name
    conditions: Name


class Errors(StrictModel):
    """Errors of seconds that were predicted with a model's (or a group's) shapes left out.

    mean: of |predicted / measured - 1|. low, high: between these shares of the prediction lay
    eight in ten measurements. rows: how many were predicted.
    """

    mean: NonNegative
    low: Positive
    high: Positive
    rows: PositiveCount


class Tiling(StrictModel):
    """The rates at which a device computes each kind of tile (`products.Tiles`).

    slowness [T]: seconds over those at the rate that large products reach. wave_seconds [T]: of a
    wave, whatever its size. memory: share of the bandwidth. start_seconds: no product takes less.
    """

    slowness: list[Positive]
    wave_seconds: list[Positive]
    memory: Positive
    start_seconds: Positive


class ProductTrees(StrictModel):
    """Products on one kind of device in one precision: how it computes tiles, and gradient-boosted
    trees of what that leaves, each a complete binary tree.

    devices: catalogue names that it serves. least, most [4]: measured counts, m, k and n. feature
    [T, 2^depth - 1]: index of what is asked;
    threshold [T, 2^depth - 1]: in thousandths, at least it goes right; leaf [T, 2^depth]: in
    ten-thousandths of the logarithm of measured / physical seconds; start and the trees' leaves sum
    to the answer.
    """

    devices: list[Name]
    precision: Precision
    origin: Name
    tiling: Tiling
    least: list[Positive]
    most: list[Positive]
    start: float
    feature: Whole
    threshold: Whole
    leaf: Whole
    errors: Errors


class MoveRate(StrictModel):
    """Shares of the memory bandwidth that an operator without products reaches on one kind of
    device.

    share [B][R]: by bytes moved (log2_bytes [B]) and numbers in a row (log2_row [R]); straight
    lines between, constant beyond.
    """

    devices: list[Name]
    kind: Name
    origin: Name
    log2_bytes: list[Positive]
    log2_row: list[Positive]
    share: list[list[Positive]]
    errors: Errors


class Curve(StrictModel):
    """Seconds of one collective of `ranks` devices by the bytes of each.

    fabric: what connects them. log2_bytes [B], seconds [B]: straight lines in logarithms between.
    """

    fabric: Name
    operation: Name
    ranks: PositiveCount
    origin: Name
    log2_bytes: list[Positive]
    seconds: list[Positive]
    errors: Errors


class ShippedRates(Document):
    """`measured.json.gz`."""

    format: Literal["hetplan-rates"] = "hetplan-rates"
    version: Literal[1] = 1
    origins: list[Origin]
    products: list[ProductTrees]
    moves: list[MoveRate]
    collectives: list[Curve]


@cache
def shipped() -> ShippedRates:
    """All that comes with hetplan."""
    return ShippedRates.load(Path(__file__).with_name("measured.json.gz"))
