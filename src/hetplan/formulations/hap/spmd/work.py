"""FLOP of a single-device program, without theories: in all, of its products alone, by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetplan.formulations.hap.spmd.operators import ELEMENT_FLOPS, operator, size
from hetplan.formulations.hap.spmd.program import Node, SingleProgram

PRODUCTS = ("contract", "convolve", "attention")


@dataclass(frozen=True)
class Work:
    """FLOP forward, and backward for all gradients that are needed."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward


def work_of(program: SingleProgram, node: Node, gradients: set[str]) -> Work:
    """The work that theories charge for a node; gradients: `program.needs_gradient()`."""
    inputs = program.inputs(node)
    forward, backward = operator(node.kind).work(
        [s.shape for s in inputs], node.shape, node.attributes
    )
    passed = gradients if node.name in gradients else set()
    return Work(forward, sum(b for s, b in zip(inputs, backward, strict=True) if s.name in passed))


def products_of(program: SingleProgram, node: Node, gradients: set[str]) -> Work:
    """The part of it that is products of matrices, as counters of FLOP see it; 0 for other
    kinds."""
    if node.kind not in PRODUCTS:
        return Work(0.0, 0.0)
    found, inputs = work_of(program, node, gradients), program.inputs(node)
    if node.kind == "attention":
        b, n, q, _ = node.shape
        scores = ELEMENT_FLOPS * float(
            b * n * node.attributes.get("queries", 1) * q * inputs[-1].shape[2]
        )
        return Work(found.forward - 4 * scores, found.backward - 6 * scores)
    bias = ELEMENT_FLOPS * size(node.shape) * (len(inputs) - 2)
    return Work(found.forward, found.backward - bias)


def summed(
    program: SingleProgram, count: Callable[[SingleProgram, Node, set[str]], Work] = work_of
) -> Work:
    """All nodes together."""
    gradients = program.needs_gradient()
    each = [count(program, node, gradients) for node in program.computations]
    return Work(sum(w.forward for w in each), sum(w.backward for w in each))


def by_layer(program: SingleProgram) -> dict[str, float]:
    """layer -> FLOP forward and backward, in order of appearance."""
    gradients = program.needs_gradient()
    found: dict[str, float] = {}
    for node in program.computations:
        found[node.layer] = found.get(node.layer, 0.0) + work_of(program, node, gradients).total
    return found
