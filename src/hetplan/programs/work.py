"""The FLOP of a program's operators in both passes, as HAP's theories count them: only gradients
that the backward pass computes count, and moved elements count as FLOP."""

from collections.abc import Set
from dataclasses import dataclass

from hetplan.programs.operators.operator import Work as FlopOfInputs
from hetplan.programs.operators.table import operator
from hetplan.programs.program import Node, SingleProgram


@dataclass(frozen=True)
class Work:
    """FLOP of one operator."""

    forward: float
    """FLOP of the forward pass."""
    gradients: tuple[float, ...] = ()
    """[input] FLOP of the input's gradient in the backward pass; 0 where none is computed."""

    @property
    def backward(self) -> float:
        """FLOP of all gradients."""
        return sum(self.gradients)

    @property
    def total(self) -> float:
        """FLOP of both passes."""
        return self.forward + self.backward


def work_of(program: SingleProgram, node: Node, needed: Set[str], weight: float = 1.0) -> Work:
    """The FLOP of a node, moved elements included.

    needed: the tensors with gradients, `program.needs_gradient()`. weight: a factor on the FLOP.
    """
    shapes = [source.shape for source in program.inputs(node)]
    work = operator(node.kind).work(shapes, node.shape, node.attributes)
    return _charged(program, node, needed, work, weight)


def products_of(program: SingleProgram, node: Node, needed: Set[str]) -> Work:
    """The FLOP of a node's matrix products alone, as counters of FLOP count them."""
    shapes = [source.shape for source in program.inputs(node)]
    products = operator(node.kind).products(shapes, node.shape, node.attributes)
    return _charged(program, node, needed, products)


def _charged(
    program: SingleProgram,
    node: Node,
    needed: Set[str],
    work: FlopOfInputs,
    weight: float = 1.0,
) -> Work:
    """The FLOP `work` of a node, without gradients that are not computed, times `weight`."""
    forward, backward = work
    gradients = [0.0] * len(backward)
    if node.name in needed:
        for number, (name, flops) in enumerate(zip(node.inputs, backward, strict=True)):
            if name in needed:
                gradients[number] = weight * flops
    return Work(weight * forward, tuple(gradients))


def by_layer(program: SingleProgram) -> dict[str, float]:
    """Layer -> FLOP of both passes, in order of appearance."""
    needed = program.needs_gradient()
    flops: dict[str, float] = {}
    for node in program.computations:
        flops[node.layer] = flops.get(node.layer, 0.0) + work_of(program, node, needed).total
    return flops


def computing_operators(program: SingleProgram) -> list[Node]:
    """The operators that take FLOP; the other operators make views."""
    needed = program.needs_gradient()
    return [node for node in program.computations if work_of(program, node, needed).total > 0]
