"""What devices do together under a distributed program, as an interface; and all of them simulated
in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hetplan.formulations.hap.spmd.operators.base import Array

Slices = list[Array]  # one array for each device here
Bounds = list[tuple[int, int]]  # [m] where each device's slice begins and ends along a dimension
# one collective of slices padded to the largest, or one per slice
Manner = Literal["padded", "grouped"]


class Exchange(ABC):
    """What devices do together. here: numbers of the devices whose arrays are given and
    returned."""

    here: Sequence[int]

    @abstractmethod
    def total(self, slices: Slices) -> Slices:
        """Everyone gets the sum."""

    @abstractmethod
    def gather(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """Everyone gets the slices side by side."""

    @abstractmethod
    def scatter(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """Everyone gets its slice of the sum."""

    @abstractmethod
    def swap(
        self, slices: Slices, source: int, before: Bounds, target: int, after: Bounds
    ) -> Slices:
        """From slices along one dimension to slices along another one, or to others along the
        same."""


class Simulated(Exchange):
    """All devices in one process."""

    def __init__(self, devices: int) -> None:
        self.here = range(devices)

    def total(self, slices: Slices) -> Slices:
        """The sum, m times."""
        return [added(slices)] * len(slices)

    def gather(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """Put together, m times."""
        return [np.concatenate(slices, axis=dimension)] * len(slices)

    def scatter(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """The sum, cut."""
        return pieces(added(slices), dimension, bounds)

    def swap(
        self, slices: Slices, source: int, before: Bounds, target: int, after: Bounds
    ) -> Slices:
        """Put together, cut again."""
        return pieces(np.concatenate(slices, axis=source), target, after)


def added(slices: Slices) -> Array:
    """The sum."""
    return np.asarray(sum(slices[1:], start=slices[0]))


def piece(value: Array, dimension: int, bounds: tuple[int, int]) -> Array:
    """A slice; a view."""
    first, last = bounds
    return value[(*[slice(None)] * dimension, slice(first, last))]


def pieces(value: Array, dimension: int, bounds: Bounds) -> Slices:
    """All slices."""
    return [piece(value, dimension, pair) for pair in bounds]
