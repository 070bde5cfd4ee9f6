"""Which dimensions are sliced together, and where the cuts fall.

Two dimensions belong to one axis where some way slices both: a reshape's 768 columns and 12 heads,
a weight's rows and its input's columns. All lengths of an axis are multiples of its number of
units, and devices get whole units, so that the slices of all its dimensions fit one another
whatever the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from hetplan.formulations.hap.ratios import shard_lengths
from hetplan.formulations.hap.spmd.forms import Shape, Way
from hetplan.formulations.hap.spmd.operators import operator
from hetplan.formulations.hap.spmd.program import Node, SingleProgram

Dimension = tuple[str, int]
Bounds = tuple[tuple[int, int], ...]


class Axes:
    """The axes of a program. `unsliced`: those of placeholders' dimensions marked so."""

    def __init__(self, program: SingleProgram) -> None:
        self.program = program
        self._parent: dict[Dimension, Dimension] = {}
        for node in program.computations:
            for way in ways_of(program, node):
                self._join(list(sliced(node, way)))

    def _find(self, dimension: Dimension) -> Dimension:
        while (above := self._parent.get(dimension, dimension)) != dimension:
            self._parent[dimension] = self._parent.get(above, above)
            dimension = above
        return dimension

    def _join(self, dimensions: Sequence[Dimension]) -> None:
        for other in dimensions[1:]:
            one, two = self._find(dimensions[0]), self._find(other)
            if one != two:
                self._parent[two] = one

    @cached_property
    def units(self) -> dict[Dimension, int]:
        """Units of every axis, by its representative."""
        units: dict[Dimension, int] = {}
        for node in self.program.nodes:
            for d, length in enumerate(node.shape):
                axis = self._find((node.name, d))
                units[axis] = math.gcd(units.get(axis, 0), length)
        return units

    @cached_property
    def unsliced(self) -> set[Dimension]:
        """Axes that placeholders want left whole."""
        return {
            self._find((node.name, d))
            for node in self.program.nodes
            for d in node.attributes.get("unsliced", ())
        }

    def sliceable(self, node: Node, way: Way, devices: int, *, all_dimensions: bool) -> bool:
        """Whether every axis that the way slices has a unit for each device, and is not marked
        `unsliced`."""
        axes = {self._find(dimension) for dimension in sliced(node, way)}
        if not all_dimensions and axes & self.unsliced:
            return False
        return all(self.units[axis] >= devices for axis in axes)

    def lengths(self, tensor: str, d: int, ratios: Sequence[float]) -> list[int]:
        """How long each device's slice of dimension d is. Source of the rounding: HAP, Section
        5.1."""
        units = self.units[self._find((tensor, d))]
        each = self.program.node(tensor).shape[d] // units
        return [each * part for part in shard_lengths(ratios, units)]

    def bounds(self, tensor: str, d: int, ratios: Sequence[float]) -> Bounds:
        """[m] where each device's slice of dimension d begins and ends."""
        lengths = self.lengths(tensor, d, ratios)
        ends = accumulate(lengths)
        return tuple((end - length, end) for length, end in zip(lengths, ends, strict=True))


def ways_of(program: SingleProgram, node: Node) -> list[Way]:
    """All ways of a node but the replicated one; a source gives no summands."""
    inputs = program.inputs(node)
    whole: list[Shape] = [source.shape for source in inputs]
    ways = operator(node.kind).ways(whole, node.attributes)
    return [
        w
        for w in ways
        if not any(s.source and form == -2 for s, form in zip(inputs, w.inputs, strict=True))
    ]


def sliced(node: Node, way: Way) -> list[Dimension]:
    """The dimensions that the way slices."""
    cuts = [(name, form) for name, form in zip(node.inputs, way.inputs, strict=True) if form >= 0]
    return [*cuts, (node.name, way.output)] if way.output >= 0 else cuts
