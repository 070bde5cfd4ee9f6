"""The file of a certificate: its schema, and the verdict of `check` on it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from hetplan.errors import InputError
from hetplan.formulations.joint.certificate.check import Damaged, check
from hetplan.formulations.joint.data import JointData
from hetplan.schema import Count, Document, Name, NonNegative, PositiveCount, Row, StrictModel
from hetplan.solvers.registry import Certified

Number = Annotated[float, Field(allow_inf_nan=False)]


class Leaf(StrictModel):
    """Multipliers of the inequalities of a part, by their names."""

    multipliers: dict[str, list[Number]]


class Branch(StrictModel):
    """A column that is 0 or 1, and what holds then."""

    branch: Annotated[tuple[str, Count, Count], Strict(False)]
    """Name of the column, layer and kind of node."""
    zero: Branch | Leaf
    one: Branch | Leaf


class Nodes(StrictModel):
    """A proof by what nodes compute, receive and join."""

    apart: bool
    """Whether the inequalities tell alike nodes apart."""
    tree: Branch | Leaf


class Lump(StrictModel):
    """Replicas that are shown to be slower than the seconds of `Chains`."""

    least: PositiveCount
    """Samples of a micro-batch, at least."""
    most: PositiveCount
    low: PositiveCount
    """Samples of a replica, at least."""
    high: PositiveCount
    exact: bool
    """Whether the last micro-batch counts, too, if it is smaller."""
    fees: list[Row]
    """For each case of changes between nodes, seconds for a device's price, path by path."""


class Chains(StrictModel):
    """A proof by single stages that no plan is as fast as some seconds."""

    seconds: NonNegative
    prices: Row
    """Of a device by type."""
    lumps: list[Lump]


class PartProof(StrictModel):
    """What no plan of a part is faster than. The part: numbers of homes by class of nodes (None:
    homes are not told apart), whether it has several replicas, and several chunks."""

    homes: list[Count] | None = None
    several: bool
    chunks: bool
    nodes: Nodes | None = None
    chains: Chains | None = None


class Certificate(Document):
    """The content of a certificate's file."""

    format: Literal["hetplan-certificate"] = "hetplan-certificate"
    version: Literal[1] = 1
    problem: Literal["joint"] = "joint"
    instance: Name
    bound: NonNegative
    """Seconds that no plan replays below, as the certificate proves."""
    claimed: NonNegative | None = None
    """The bound that a method had found; None: none."""
    alone: Row
    """Prices of a device by type, in the order of the types' names."""
    parts: list[PartProof]


def verify(data: JointData, value: Any, where: str) -> Certified:
    """What a certificate proves of an instance. value: its parsed JSON. where: its source, for
    errors. Raises InputError for what is no certificate, or none of this instance."""
    certificate = Certificate.parsed(value, where=where)
    try:
        proven = check(data.model_dump(mode="json"), certificate.model_dump(mode="json"))
    except Damaged as error:
        raise InputError(str(error), where=where) from None
    return Certified(certificate.bound, rounded_down(proven), certificate.claimed)


def rounded_down(exact: Fraction) -> float:
    """The largest number in floating point that is at most so large."""
    near = float(exact)
    return near if Fraction(near) <= exact else math.nextafter(near, -math.inf)
