"""Where the tensors of a program may be cut.

Two dimensions belong to one axis where some way slices both: a reshape's 768 columns and 12 heads,
a weight's rows and its input's columns. All lengths of an axis are multiples of its number of
units, and devices get whole units, so that the slices of all its dimensions fit one another
whatever the ratios.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from networkx.utils import UnionFind
from numpy.typing import NDArray

from hetplan.programs.forms import PARTIAL, Way
from hetplan.programs.operators.table import operator
from hetplan.programs.program import Node, SingleProgram
from hetplan.programs.shards import shard_lengths

Floats = NDArray[np.float64]
Dimension = tuple[str, int]
Bounds = tuple[tuple[int, int], ...]


class Axes:
    """The axes of a program."""

    def __init__(self, program: SingleProgram) -> None:
        self.program = program
        self._axes: Any = UnionFind()  # of dimensions
        self._rounded: dict[tuple[tuple[float, ...], int], list[int]] = {}
        for node in program.computations:
            for way in ways_of(program, node):
                self._axes.union(*sliced(node, way))

    @cached_property
    def units(self) -> dict[Dimension, int]:
        """Units of every axis, by its representative."""
        units: dict[Dimension, int] = {}
        for node in self.program.nodes:
            for d, length in enumerate(node.shape):
                axis = self._axes[node.name, d]
                units[axis] = math.gcd(units.get(axis, 0), length)
        return units

    @cached_property
    def unsliced(self) -> set[Dimension]:
        """Axes that placeholders want left whole."""
        return {
            self._axes[node.name, d]
            for node in self.program.nodes
            for d in node.attributes.get("unsliced", ())
        }

    def sliceable(self, node: Node, way: Way, devices: int, *, all_dimensions: bool) -> bool:
        """Whether every axis that the way slices has a unit for each device, and is not marked
        `unsliced`."""
        axes = {self._axes[dimension] for dimension in sliced(node, way)}
        usable = all_dimensions or not axes & self.unsliced
        return usable and all(self.units[axis] >= devices for axis in axes)

    def bounds(self, tensor: str, d: int, ratios: Sequence[float]) -> Bounds:
        """[m] where each device's slice of dimension d begins and ends. Source of the rounding:
        HAP, Section 5.1."""
        units = self.units[self._axes[tensor, d]]
        each = self.program.node(tensor).shape[d] // units
        ends = list(accumulate(self._lengths(ratios, units), initial=0))
        return tuple((each * first, each * last) for first, last in pairwise(ends))

    def shares(self, tensor: str, d: int, ratios: Sequence[float]) -> Floats:
        """[m] each device's slice of dimension d as a share of it."""
        units = self.units[self._axes[tensor, d]]
        return np.array(self._lengths(ratios, units)) / units

    def _lengths(self, ratios: Sequence[float], units: int) -> list[int]:
        """[m] whole units of each device. All slices of a program ask for a few of these."""
        key = (tuple(ratios), units)
        if key not in self._rounded:
            self._rounded[key] = shard_lengths(ratios, units)
        return self._rounded[key]


def ways_of(program: SingleProgram, node: Node) -> list[Way]:
    """All ways of a node but the replicated one. Placeholders and parameters give no summands."""
    inputs = program.inputs(node)
    whole = [source.shape for source in inputs]
    ways = []
    for way in operator(node.kind).all_ways(whole, node.attributes):
        pairs = zip(inputs, way.inputs, strict=True)
        if not any(source.source and form == PARTIAL for source, form in pairs):
            ways.append(way)
    return ways


def sliced(node: Node, way: Way) -> list[Dimension]:
    """The dimensions that the way slices."""
    tensors = zip((*node.inputs, node.name), (*way.inputs, way.output), strict=True)
    return [(name, form) for name, form in tensors if form >= 0]
