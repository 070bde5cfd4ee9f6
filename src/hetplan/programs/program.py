"""A single-device program: a list of nodes in order of execution, each of which makes one tensor of
known shape.

A node is an operator, or a placeholder (data) or parameter, which have no inputs. A `Writer` makes
the nodes and infers their shapes from the operators. Only one operator reads a parameter. In a
model that ties weights, every further operator reads a copy of the parameter, listed in `copies`;
the gradients of a parameter and its copies are added up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hetplan.errors import InputError, require
from hetplan.programs.operators.operator import Place, Shape
from hetplan.programs.operators.table import operator

if TYPE_CHECKING:
    from torch import Tensor

PLACEHOLDER, PARAMETER = "placeholder", "parameter"


@dataclass(frozen=True)
class Node:
    """A tensor of a program, and the operator that makes it."""

    name: str
    """Name of the tensor."""
    kind: str
    """Name of the operator in `operators.table`, or PLACEHOLDER or PARAMETER."""
    inputs: tuple[str, ...]
    """Names of the tensors that the operator reads."""
    shape: Shape
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Attributes of the operator; `below` and `unsliced` if it is a placeholder."""
    segment: int = 0
    """The part of the model whose sharding ratios apply to the tensor."""
    layer: str = ""
    """The layer that the node belongs to, for people and for costs by layer."""

    @property
    def source(self) -> bool:
        """Whether the node is a placeholder or a parameter."""
        return self.kind in (PLACEHOLDER, PARAMETER)

    @property
    def elements(self) -> int:
        """The number of the tensor's entries."""
        return math.prod(self.shape)

    def compute(self, inputs: Sequence[Tensor], place: Place) -> Tensor:
        """One device's part of the tensor, from torch tensors."""
        return operator(self.kind).compute(inputs, self.attributes, place)


@dataclass(frozen=True)
class SingleProgram:
    """The program of one training step on one device."""

    name: str
    nodes: tuple[Node, ...]
    """The nodes in order of execution; the last one is the scalar loss."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Copy of a parameter -> the parameter."""

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """The node that makes the tensor `name`."""
        return self._by_name[name]

    def inputs(self, node: Node) -> list[Node]:
        """The nodes that make the inputs of `node`."""
        return [self.node(name) for name in node.inputs]

    @property
    def loss(self) -> Node:
        """The node of the loss."""
        return self.nodes[-1]

    @property
    def samples(self) -> int:
        """The number of samples of one step: the first length of the first placeholder."""
        return next(node for node in self.nodes if node.kind == PLACEHOLDER).shape[0]

    @property
    def parameters(self) -> list[Node]:
        """The nodes of all parameters, copies included."""
        return [node for node in self.nodes if node.kind == PARAMETER]

    @property
    def computations(self) -> list[Node]:
        """The nodes of all operators."""
        return [node for node in self.nodes if not node.source]

    @property
    def segments(self) -> int:
        """Number of segments."""
        return 1 + max(node.segment for node in self.nodes)

    def needs_gradient(self) -> set[str]:
        """The tensors whose gradients the backward pass computes: parameters, and tensors that
        depend on a parameter through operators with a derivative."""
        needed: set[str] = set()
        for node in self.nodes:
            if node.kind == PARAMETER:
                needed.add(node.name)
                continue
            from_needed = any(name in needed for name in node.inputs)
            if from_needed and operator(node.kind).differentiable:
                needed.add(node.name)
        return needed

    def in_segments(self, segment_of: Mapping[str, int]) -> SingleProgram:
        """The program with its operators in other segments. A placeholder or parameter is in the
        segment of the first operator that reads it.

        segment_of: operator -> segment; 0 for an operator that is missing.
        """
        segments: dict[str, int] = {}
        for node in self.computations:
            segment = segment_of.get(node.name, 0)
            segments.setdefault(node.name, segment)
            for source in self.inputs(node):
                if source.source:
                    segments.setdefault(source.name, segment)
        return self.with_segments({node.name: segments.get(node.name, 0) for node in self.nodes})

    def with_segments(self, segment: Mapping[str, int]) -> SingleProgram:
        """The program with its nodes in other segments. segment: name of every node -> segment."""
        nodes = tuple(replace(node, segment=segment[node.name]) for node in self.nodes)
        return SingleProgram(self.name, nodes, self.copies)


class Writer:
    """Writes a program: its methods add nodes and return the names of their tensors."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the program
        self.layer = ""  # the layer of the nodes that are added next
        self._nodes: dict[str, Node] = {}
        self._used = Counter[str]()  # parameter -> number of operators that read it
        self._copies: dict[str, str] = {}  # copy -> parameter

    def shape(self, tensor: str) -> Shape:
        """The shape of a tensor written before."""
        return self._nodes[tensor].shape

    def node(self, tensor: str) -> Node:
        """The node of a tensor written before."""
        return self._nodes[tensor]

    def placeholder(
        self,
        name: str,
        shape: Sequence[int],
        *,
        below: int | None = None,
        unsliced: Sequence[int] = (),
    ) -> str:
        """Add the data of one step.

        below: the data are whole numbers in 0..below - 1 (labels, tokens); None: real numbers.
        unsliced: dimensions that are not sliced unless `rules.rules_of` is asked for all.
        """
        attributes: dict[str, Any] = {} if below is None else {"below": below}
        attributes["unsliced"] = tuple(unsliced)
        return self._write(name, PLACEHOLDER, (), tuple(shape), attributes)

    def parameter(self, name: str, shape: Sequence[int]) -> str:
        """Add a parameter."""
        return self._write(name, PARAMETER, (), tuple(shape), {})

    def apply(self, kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Add the operator `kind`, which reads earlier tensors and makes the tensor `name`."""
        inputs = tuple(self._once(tensor) for tensor in inputs)
        shape = operator(kind).shape([self.shape(tensor) for tensor in inputs], attributes)
        return self._write(name, kind, inputs, shape, attributes)

    def linear(
        self, name: str, x: str, equation: str, weight: Sequence[int], bias: str | None = None
    ) -> str:
        """Add a contraction of `x` with a new parameter.

        equation: the equation of einsum for `x` and the parameter. weight: the parameter's shape.
        bias: the output's letters over which a new bias is added; None: no bias.
        """
        parameters = [self.parameter(f"{name}.weight", weight)]
        if bias is not None:
            terms, output = equation.split("->")
            lengths = dict(zip(terms.replace(",", ""), (*self.shape(x), *weight), strict=True))
            bias_shape = [lengths[letter] for letter in bias]
            parameters.append(self.parameter(f"{name}.bias", bias_shape))
            equation = f"{terms},{bias}->{output}"
        return self.apply("contract", name, x, *parameters, equation=equation)

    def convolution(self, name: str, x: str, channels: int) -> str:
        """Add a 3 x 3 convolution with bias that keeps the image's size, and a ReLU."""
        weight = self.parameter(f"{name}.weight", (channels, self.shape(x)[1], 3, 3))
        bias = self.parameter(f"{name}.bias", (channels,))
        x = self.apply("convolve", name, x, weight, bias, padding=1)
        return self.apply("relu", f"{name}.relu", x)

    def classifier(self, x: str, labels: str, widths: Mapping[str, int]) -> SingleProgram:
        """The finished program, with dense layers, a ReLU between any two of them, and the loss.
        widths: name of each dense layer -> its width."""
        for number, (name, width) in enumerate(widths.items(), 1):
            self.layer = name
            x = self.linear(name, x, "bi,oi->bo", (width, self.shape(x)[1]), "o")
            if number < len(widths):
                x = self.apply("relu", f"{name}.relu", x)
        return self.loss(x, labels)

    def loss(self, logits: str, labels: str) -> SingleProgram:
        """The finished program, with the mean cross-entropy of all rows as its loss."""
        self.apply("cross-entropy", "loss", logits, labels, count=math.prod(self.shape(labels)))
        return self.finish()

    def finish(self) -> SingleProgram:
        """The finished program. Raises InputError unless its last node is a scalar operator."""
        nodes = tuple(self._nodes.values())
        require(
            nodes and not nodes[-1].source and nodes[-1].shape == (),
            "the last operator must give a scalar loss",
            where=self.name,
            got=nodes[-1].shape if nodes else None,
            expected="shape ()",
        )
        return SingleProgram(self.name, nodes, dict(self._copies))

    def _once(self, tensor: str) -> str:
        """The tensor itself; for a parameter that an operator already reads, a new copy of it."""
        node = self._nodes.get(tensor)
        if node is None:
            raise InputError("unknown tensor", where=self.name, got=tensor)
        if node.kind != PARAMETER:
            return tensor
        self._used[tensor] += 1
        if self._used[tensor] == 1:
            return tensor
        copy = f"{tensor}#{self._used[tensor]}"
        self._copies[copy] = tensor
        return self._write(copy, PARAMETER, (), node.shape, {})

    def _write(
        self,
        name: str,
        kind: str,
        inputs: tuple[str, ...],
        shape: Shape,
        attributes: Mapping[str, Any],
    ) -> str:
        """Add a node and return its name. Raises InputError for a name that is taken, and for one
        with the character that ends names in properties (`forms.property_name`)."""
        require(
            name not in self._nodes and "|" not in name,
            "name of a tensor",
            where=self.name,
            got=name,
            expected="a new one, without |",
        )
        self._nodes[name] = Node(
            name, kind, inputs, shape, MappingProxyType(dict(attributes)), 0, self.layer
        )
        return name
