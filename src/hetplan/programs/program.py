"""A single-device program: operators in order, each making one tensor of known shape.

Nodes are written through a `Writer`, which infers shapes from the operators. Placeholders (data)
and parameters are nodes without inputs. One operator reads a parameter. A model that ties two uses
gets a copy for each, named in `copies`; the gradients of the copies add up to the parameter's.
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
    """The tensor's."""
    kind: str
    """Kind of operator, or PLACEHOLDER or PARAMETER."""
    inputs: tuple[str, ...]
    """Names of the tensors that the operator reads."""
    shape: Shape
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Of this kind of operator; of a placeholder `below` and `unsliced`."""
    segment: int = 0
    """The part of the model whose ratios the tensor follows."""
    layer: str = ""
    """The layer that it belongs to, for people and for costs by layer."""

    @property
    def source(self) -> bool:
        """A placeholder or a parameter."""
        return self.kind in (PLACEHOLDER, PARAMETER)

    @property
    def elements(self) -> int:
        """Entries of the tensor."""
        return math.prod(self.shape)

    def compute(self, inputs: Sequence[Tensor], place: Place) -> Tensor:
        """The output on one device, from torch tensors."""
        return operator(self.kind).compute(inputs, self.attributes, place)


@dataclass(frozen=True)
class SingleProgram:
    """The program of one step on one device."""

    name: str
    nodes: tuple[Node, ...]
    """In order of execution; the last one is the scalar loss."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the parameter that it is a copy of."""

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def node(self, name: str) -> Node:
        """The node that makes the tensor `name`."""
        return self._by_name[name]

    def inputs(self, node: Node) -> list[Node]:
        """The nodes that make its inputs."""
        return [self.node(name) for name in node.inputs]

    @property
    def loss(self) -> Node:
        """The last node."""
        return self.nodes[-1]

    @property
    def samples(self) -> int:
        """Rows of the first placeholder."""
        return next(node for node in self.nodes if node.kind == PLACEHOLDER).shape[0]

    @property
    def parameters(self) -> list[Node]:
        """All parameters, copies included."""
        return [node for node in self.nodes if node.kind == PARAMETER]

    @property
    def computations(self) -> list[Node]:
        """All nodes that compute."""
        return [node for node in self.nodes if not node.source]

    @property
    def segments(self) -> int:
        """Number of segments."""
        return 1 + max(node.segment for node in self.nodes)

    def needs_gradient(self) -> set[str]:
        """Tensors that depend on a parameter, and not through an operator without a derivative."""
        needed: set[str] = set()
        for node in self.nodes:
            if node.kind == PARAMETER or (
                any(name in needed for name in node.inputs) and operator(node.kind).differentiable
            ):
                needed.add(node.name)
        return needed

    def in_segments(self, segment_of: Mapping[str, int]) -> SingleProgram:
        """The program with its operators in these segments (0 where left out). Placeholders and
        parameters go with the first operator that reads them."""
        first: dict[str, int] = {}
        for node in self.computations:
            segment = segment_of.get(node.name, 0)
            first.setdefault(node.name, segment)
            for source in self.inputs(node):
                if source.source:
                    first.setdefault(source.name, segment)
        return self.with_segments({node.name: first.get(node.name, 0) for node in self.nodes})

    def with_segments(self, segment: Mapping[str, int]) -> SingleProgram:
        """The same with each node in the segment given by its name."""
        nodes = tuple(replace(node, segment=segment[node.name]) for node in self.nodes)
        return SingleProgram(self.name, nodes, self.copies)


class Writer:
    """Collects nodes; `layer` names what is written from here on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layer = ""
        self._nodes: dict[str, Node] = {}
        self._used = Counter[str]()
        self._copies: dict[str, str] = {}

    def shape(self, tensor: str) -> Shape:
        """The shape of a tensor written before."""
        return self._nodes[tensor].shape

    def node(self, tensor: str) -> Node:
        """The node that made it."""
        return self._nodes[tensor]

    def placeholder(
        self,
        name: str,
        shape: Sequence[int],
        *,
        below: int | None = None,
        unsliced: Sequence[int] = (),
    ) -> str:
        """Data of one step; below: whole numbers from 0 (labels, tokens) instead of real ones.
        unsliced: dimensions that theories leave whole unless asked (`rules.theory_of`)."""
        attributes: dict[str, Any] = {} if below is None else {"below": below}
        return self._write(
            name, PLACEHOLDER, (), tuple(shape), attributes | {"unsliced": tuple(unsliced)}
        )

    def parameter(self, name: str, shape: Sequence[int]) -> str:
        """A parameter."""
        return self._write(name, PARAMETER, (), tuple(shape), {})

    def apply(self, kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Operator `kind` on tensors written before; returns its tensor's name."""
        inputs = tuple(self._once(tensor) for tensor in inputs)
        shape = operator(kind).shape([self.shape(tensor) for tensor in inputs], attributes)
        return self._write(name, kind, inputs, shape, attributes)

    def linear(
        self, name: str, x: str, equation: str, weight: Sequence[int], bias: str | None = None
    ) -> str:
        """A contraction of `x` with a new parameter, and a new bias over the output's letters
        `bias`."""
        parameters = [self.parameter(f"{name}.weight", weight)]
        if bias is not None:
            terms, output = equation.split("->")
            lengths = dict(zip(terms.replace(",", ""), (*self.shape(x), *weight), strict=True))
            parameters.append(self.parameter(f"{name}.bias", [lengths[letter] for letter in bias]))
            equation = f"{terms},{bias}->{output}"
        return self.apply("contract", name, x, *parameters, equation=equation)

    def convolution(self, name: str, x: str, channels: int) -> str:
        """A 3 x 3 convolution with bias that keeps the size, and a ReLU."""
        weight = self.parameter(f"{name}.weight", (channels, self.shape(x)[1], 3, 3))
        x = self.apply(
            "convolve", name, x, weight, self.parameter(f"{name}.bias", (channels,)), padding=1
        )
        return self.apply("relu", f"{name}.relu", x)

    def classifier(self, x: str, labels: str, widths: Mapping[str, int]) -> SingleProgram:
        """Dense layers by name, each a layer, with a ReLU between them; and the loss."""
        for number, (name, width) in enumerate(widths.items(), 1):
            self.layer = name
            x = self.linear(name, x, "bi,oi->bo", (width, self.shape(x)[1]), "o")
            if number < len(widths):
                x = self.apply("relu", f"{name}.relu", x)
        return self.loss(x, labels)

    def loss(self, logits: str, labels: str) -> SingleProgram:
        """The program with the mean cross-entropy of all rows as its loss."""
        self.apply("cross-entropy", "loss", logits, labels, count=math.prod(self.shape(labels)))
        return self.finish()

    def finish(self) -> SingleProgram:
        """The program; its last node must be a scalar."""
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
        """A parameter used again becomes a copy of its own."""
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
