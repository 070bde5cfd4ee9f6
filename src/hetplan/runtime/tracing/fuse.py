"""Attention as modules write it, brought to one product before it and one behind.

Modules project queries, keys and values apart and turn rows into heads by views and transpositions.
Three tensors that every device may hold in four forms each make a theory wide for nothing: they are
always sliced alike. Here the three products become one, with parameters stacked head by head ([n, 3
d, h]), and the product behind attention takes heads as they are ([h, n, d]). FLOP stay; `Packed`
says how values and gradients of parameters go over.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hetplan.formulations.hap.spmd.operators import Shape
from hetplan.formulations.hap.spmd.program import PARAMETER, Node, SingleProgram

LINEAR = ("abx,yx->aby", "abx,yx,y->aby")
HEADS = (0, 2, 1, 3)


@dataclass(frozen=True)
class Packed:
    """A parameter made of others: each reshaped to `shape`, one after the other along `axis`;
    shapes: their own."""

    owners: tuple[str, ...]
    shapes: tuple[Shape, ...]
    shape: Shape
    axis: int

    def pack(self, values: Sequence[Tensor]) -> Tensor:
        """From the owners' values."""
        return torch.cat([value.reshape(self.shape) for value in values], dim=self.axis)

    def unpack(self, gradient: Tensor) -> dict[str, Tensor]:
        """To the owners' gradients."""
        parts = gradient.chunk(len(self.owners), dim=self.axis)
        return {n: p.reshape(s) for n, s, p in zip(self.owners, self.shapes, parts, strict=True)}


@dataclass(frozen=True)
class Projection:
    """A product with what turns its rows into heads [b, n, s, d] (or heads into its rows); gone:
    nodes to leave out."""

    product: Node
    gone: tuple[str, ...]


def fused(program: SingleProgram) -> tuple[SingleProgram, dict[str, Packed]]:
    """The program with every attention that fits the pattern rewritten, and its packed
    parameters."""
    fuser = _Fuser(program)
    for node in program.computations:
        if node.kind == "attention" and len(node.inputs) == 3:
            fuser.before(node)
        if node.kind == "contract":
            fuser.behind(node)
    nodes = tuple(new for node in program.nodes for new in fuser.instead.get(node.name, (node,)))
    return SingleProgram(program.name, nodes, program.copies), fuser.packed


class _Fuser:
    """instead: node -> what takes its place."""

    def __init__(self, program: SingleProgram) -> None:
        self.program = program
        self.users = Counter(name for node in program.nodes for name in node.inputs)
        self.tied = {*program.copies, *program.copies.values()}
        self.instead: dict[str, tuple[Node, ...]] = {}
        self.packed: dict[str, Packed] = {}

    def alone(self, name: str, kind: str) -> Node | None:
        """The node of that kind, if nothing else uses what it makes."""
        node = self.program.node(name)
        return node if node.kind == kind and self.users[name] == 1 else None

    def linear(self, node: Node | None) -> bool:
        """Whether it is a product of [a, b, x] with a parameter that nothing shares."""
        if node is None or node.attributes.get("equation") not in LINEAR:
            return False
        own = self.program.inputs(node)[1:]
        return all(p.kind == PARAMETER and p.name not in self.tied for p in own)

    def projection(self, name: str) -> Projection | None:
        """The product behind a tensor [b, n, s, d], through a transposition and a view."""
        turned = self.alone(name, "permute")
        if turned is None or tuple(turned.attributes["order"]) != HEADS:
            return None
        split = self.alone(turned.inputs[0], "reshape")
        product = self.alone(split.inputs[0], "contract") if split is not None else None
        if (
            split is None
            or product is None
            or not self.linear(product)
            or split.shape[:2] != product.shape[:2]
        ):
            return None
        return Projection(product, (turned.name, split.name, product.name, *product.inputs[1:]))

    def before(self, node: Node) -> None:
        """Queries, keys and values of one tensor as one product."""
        projections = [self.projection(name) for name in node.inputs]
        shapes = {self.program.node(name).shape for name in node.inputs}
        if len(shapes) > 1 or any(p is None for p in projections):
            return
        products = [p.product for p in projections if p is not None]
        if len({p.inputs[0] for p in products}) > 1 or len({len(p.inputs) for p in products}) > 1:
            return
        b, n, s, d = shapes.pop()
        hidden = self.program.node(products[0].inputs[0]).shape[2]
        base, layer = f"{node.name}.qkv", products[0].layer
        made = [
            self.pack(f"{base}.weight", [p.inputs[1] for p in products], (n, d, hidden), 1, layer)
        ]
        equation = "bsh,ndh->bnsd"
        if len(products[0].inputs) == 3:
            made.append(
                self.pack(f"{base}.bias", [p.inputs[2] for p in products], (n, d), 1, layer)
            )
            equation = "bsh,ndh,nd->bnsd"
        inputs = (products[0].inputs[0], *(p.name for p in made))
        joint = Node(
            base, "contract", inputs, (b, n, s, 3 * d), frozen(equation=equation), 0, layer
        )
        self.instead[node.name] = (*made, joint, replace(node, inputs=(base,)))
        for part in projections:
            assert part is not None, "all were projections"
            self.instead.update(dict.fromkeys(part.gone, ()))

    def behind(self, node: Node) -> None:
        """A product of joined heads as one of heads."""
        if not self.linear(node):
            return
        joined = self.alone(node.inputs[0], "reshape")
        turned = self.alone(joined.inputs[0], "permute") if joined is not None else None
        if joined is None or turned is None or tuple(turned.attributes["order"]) != HEADS:
            return
        heads = self.program.node(turned.inputs[0])
        if heads.kind != "attention" or joined.shape[:2] != turned.shape[:2]:
            return
        _, n, _, d = heads.shape
        weight = self.pack(
            f"{node.name}.by-head", [node.inputs[1]], (node.shape[2], n, d), 0, node.layer
        )
        equation = "bnsd,hnd->bsh" if len(node.inputs) == 2 else "bnsd,hnd,h->bsh"
        inputs = (heads.name, weight.name, *node.inputs[2:])
        self.instead[node.name] = (
            weight,
            replace(node, inputs=inputs, attributes=frozen(equation=equation)),
        )
        self.instead.update(dict.fromkeys((joined.name, turned.name, node.inputs[1]), ()))

    def pack(self, name: str, owners: Sequence[str], shape: Shape, axis: int, layer: str) -> Node:
        """A parameter made of others."""
        shapes = tuple(self.program.node(owner).shape for owner in owners)
        self.packed[name] = Packed(tuple(owners), shapes, shape, axis)
        whole = (*shape[:axis], len(owners) * shape[axis], *shape[axis + 1 :])
        return Node(name, PARAMETER, (), whole, layer=layer)


def frozen(**attributes: Any) -> Mapping[str, Any]:
    """Attributes of a node."""
    return MappingProxyType(attributes)
