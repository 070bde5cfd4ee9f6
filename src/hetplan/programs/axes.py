"""The axes of a program, which say where its tensors may be cut.

A dimension is (tensor, number of the dimension). Two dimensions belong to one axis if some sharding
rule slices both: a reshape's 768 columns and 12 heads, or a weight's rows and its input's columns.
The units of an axis are the greatest common divisor of its dimensions' lengths. Each device gets
whole units, so that the slices of all dimensions of an axis fit one another for any ratios.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from networkx.utils import UnionFind
from numpy.typing import NDArray

from hetplan.programs.forms import PARTIAL, ShardingRule
from hetplan.programs.operators.table import operator
from hetplan.programs.program import Node, SingleProgram
from hetplan.programs.shards import shard_lengths

Floats = NDArray[np.float64]
Dimension = tuple[str, int]
Bounds = tuple[tuple[int, int], ...]


class Axes:
    """The axes of a program. An axis is represented by one of its dimensions."""

    def __init__(self, program: SingleProgram) -> None:
        self.program = program
        self._axes: Any = UnionFind()  # dimension -> the dimension that represents its axis
        # (ratios, units) -> whole units of each device
        self._rounded: dict[tuple[tuple[float, ...], int], list[int]] = {}
        for node in program.computations:
            for rule in sharding_rules_of(program, node):
                self._axes.union(*sliced_dimensions(node, rule))

    @cached_property
    def units(self) -> dict[Dimension, int]:
        """Axis -> its number of units."""
        units: dict[Dimension, int] = {}
        for node in self.program.nodes:
            for d, length in enumerate(node.shape):
                axis = self._axes[node.name, d]
                units[axis] = math.gcd(units.get(axis, 0), length)  # gcd(0, length) is length
        return units

    @cached_property
    def unsliced(self) -> set[Dimension]:
        """The axes with a dimension that a placeholder marks `unsliced`."""
        return {
            self._axes[node.name, d]
            for node in self.program.nodes
            for d in node.attributes.get("unsliced", ())
        }

    def sliceable(
        self, node: Node, rule: ShardingRule, devices: int, *, all_dimensions: bool
    ) -> bool:
        """Whether a sharding rule may be used: every axis that it slices has as many units as there
        are devices, and none is marked `unsliced`. all_dimensions: whether axes with this mark may
        be sliced, too."""
        axes = {self._axes[dimension] for dimension in sliced_dimensions(node, rule)}
        if not all_dimensions and axes & self.unsliced:
            return False
        return all(self.units[axis] >= devices for axis in axes)

    def bounds(self, tensor: str, d: int, ratios: Sequence[float]) -> Bounds:
        """[m] where each device's slice of dimension d begins and ends. Source of the rounding:
        HAP, Section 5.1."""
        units = self.units[self._axes[tensor, d]]
        # without remainder: the units are a divisor of every length of the axis
        unit_length = self.program.node(tensor).shape[d] // units
        ends = accumulate(self._lengths(ratios, units), initial=0)
        return tuple((unit_length * first, unit_length * last) for first, last in pairwise(ends))

    def shares(self, tensor: str, d: int, ratios: Sequence[float]) -> Floats:
        """[m] the share of dimension d that each device's slice has."""
        units = self.units[self._axes[tensor, d]]
        return np.array(self._lengths(ratios, units)) / units

    def _lengths(self, ratios: Sequence[float], units: int) -> list[int]:
        """[m] whole units of each device. The result is cached: the slices of a program ask for few
        different ratios and units."""
        key = (tuple(ratios), units)
        if key not in self._rounded:
            self._rounded[key] = shard_lengths(ratios, units)
        return self._rounded[key]


def sharding_rules_of(program: SingleProgram, node: Node) -> list[ShardingRule]:
    """All sharding rules of a node but the replicated one. Rules that read a placeholder or a
    parameter as summands are left out: both are loaded whole or in slices."""
    inputs = program.inputs(node)
    shapes = [tensor.shape for tensor in inputs]
    sharding_rules = []
    for rule in operator(node.kind).all_sharding_rules(shapes, node.attributes):
        reads_summands = False
        for tensor, form in zip(inputs, rule.inputs, strict=True):
            # the attribute `source` marks placeholders and parameters
            if tensor.source and form == PARTIAL:
                reads_summands = True
        if not reads_summands:
            sharding_rules.append(rule)
    return sharding_rules


def sliced_dimensions(node: Node, rule: ShardingRule) -> list[Dimension]:
    """The dimensions that a sharding rule slices, of the node's inputs and of its output."""
    names = (*node.inputs, node.name)
    forms = (*rule.inputs, rule.output)
    # A form that is not negative is the dimension along which the tensor is sliced.
    return [(name, form) for name, form in zip(names, forms, strict=True) if form >= 0]
