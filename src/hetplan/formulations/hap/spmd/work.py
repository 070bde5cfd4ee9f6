"""FLOP of a single-device program, without theories: in all, of its products alone, by layer."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from hetplan.formulations.hap.spmd.operators import ELEMENT_FLOPS, operator, size
from hetplan.formulations.hap.spmd.program import Node, SingleProgram

PRODUCTS = ("contract", "convolve", "attention")


@dataclass(frozen=True)
class Work:
    """FLOP of one operator."""

    forward: float
    gradients: tuple[float, ...] = ()
    """Of the backward pass, for each input; 0 where no gradient is needed."""

    @property
    def backward(self) -> float:
        """For all gradients."""
        return sum(self.gradients)

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def work_of(program: SingleProgram, node: Node, needed: Set[str], weight: float = 1.0) -> Work:
    """The work that theories charge for a node.

    needed: the tensors with gradients, `program.needs_gradient()`. weight: a factor on all of it.
    """
    inputs = program.inputs(node)
    shapes = [source.shape for source in inputs]
    forward, backward = operator(node.kind).work(shapes, node.shape, node.attributes)
    pairs = zip(inputs, backward, strict=True)
    passed = needed if node.name in needed else ()
    return Work(weight * forward, tuple(weight * b if s.name in passed else 0.0 for s, b in pairs))


def products_of(program: SingleProgram, node: Node, needed: Set[str]) -> Work:
    """The part of it that is products of matrices, as counters of FLOP see it; 0 for other
    kinds."""
    if node.kind not in PRODUCTS:
        return Work(0.0)
    work, inputs = work_of(program, node, needed), program.inputs(node)
    if node.kind == "attention":
        b, n, q, _ = node.shape
        heads, keys = n * node.attributes.get("queries", 1), inputs[-1].shape[2]
        scores = ELEMENT_FLOPS * float(b * heads * q * keys)
        return Work(work.forward - 4 * scores, (work.backward - 6 * scores,))
    bias = ELEMENT_FLOPS * size(node.shape) * (len(inputs) - 2)
    return Work(work.forward, (work.backward - bias,))


def summed(
    program: SingleProgram, count: Callable[[SingleProgram, Node, Set[str]], Work] = work_of
) -> Work:
    """All nodes together."""
    needed = program.needs_gradient()
    each = [count(program, node, needed) for node in program.computations]
    return Work(sum(w.forward for w in each), (sum(w.backward for w in each),))


def by_layer(program: SingleProgram) -> dict[str, float]:
    """layer -> FLOP forward and backward, in order of appearance."""
    needed = program.needs_gradient()
    flops: dict[str, float] = {}
    for node in program.computations:
        flops[node.layer] = flops.get(node.layer, 0.0) + work_of(program, node, needed).total
    return flops
