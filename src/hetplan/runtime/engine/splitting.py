"""A layer's backward pass in two parts: gradients of its inputs, and later those of its weights.

The layer's autograd graph has nodes on ways to the inputs. Where such a node, say of a product,
also leads to parameters by a way of its own, it is a fork. The first part runs the graph to the
inputs alone and keeps the gradient that came to each fork. The second part starts from the forks
and runs to the parameters. Source: `stage_backward_input` and `stage_backward_weight` of
torch.distributed.pipelining.

A parameter may be reached from several forks. These run together, and each of them takes the
gradient that it kept in place of what comes from the others, so that nothing counts twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Kept = tuple[Tensor | None, ...]  # the gradients of a node's outputs


@dataclass
class Fork:
    """A node of the graph that leads to inputs and, by another way, to parameters."""

    node: Node
    parameters: set[Tensor]
    kept: Kept = ()
    """The gradients that came to it in the first part; (): none came."""

    def keep(self, gradients: Kept) -> None:
        """Keep the gradients, as a hook before the node runs."""
        self.kept = gradients

    def replaced(self, _: Kept) -> Kept:
        """The gradients that were kept, as a hook before the node runs."""
        return self.kept

    def starts(self) -> list[tuple[GradientEdge, Tensor]]:
        """(edge, gradient) from which the second part starts."""
        return [
            (GradientEdge(self.node, number), gradient)
            for number, gradient in enumerate(self.kept)
            if gradient is not None
        ]


@dataclass
class WeightPass:
    """The second part of a layer's backward pass."""

    groups: list[list[Fork]]
    """Forks that share parameters, in groups."""
    outputs: list[Tensor]
    """Outputs that depend on parameters alone, and not on any input."""
    gradients: list[Tensor]
    """Gradients of these outputs."""

    def run(self) -> None:
        """Add the gradients of the weights to those of their parameters."""
        for forks in self.groups:
            starts = [start for fork in forks for start in fork.starts()]
            if not starts:
                continue
            edges, gradients = zip(*starts, strict=True)
            parameters = list(set().union(*(fork.parameters for fork in forks)))
            shared = forks if len(forks) > 1 else []
            with_hooks(
                [(fork.node, fork.replaced) for fork in shared],
                partial(
                    torch.autograd.backward,
                    edges, gradients, retain_graph=True, inputs=parameters,
                ),
            )  # fmt: skip
        if self.outputs:
            torch.autograd.backward(self.outputs, self.gradients)


def backward_of_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightPass]:
    """(the gradients of the inputs, the second part of the backward pass).

    outputs: the outputs that have a gradient. inputs: leaves of the graph.
    """
    sought = [x for x in inputs if x.requires_grad]
    graph = Graph(outputs, sought)
    groups = grouped_by_parameters(graph.forks())
    # an output on a way to the inputs is reached again from its forks
    alone = [i for i, node in enumerate(graph.roots) if node not in graph.to_inputs]
    later = WeightPass(groups, [outputs[i] for i in alone], [gradients[i] for i in alone])
    found: dict[int, Tensor | None] = {}
    beside = [i for i in range(len(outputs)) if i not in alone]
    if beside:
        forks = [fork for group in groups for fork in group]
        of_sought = with_hooks(
            [(fork.node, fork.keep) for fork in forks],
            partial(
                torch.autograd.grad,
                [outputs[i] for i in beside], sought, [gradients[i] for i in beside],
                retain_graph=True, allow_unused=True,
            ),
        )  # fmt: skip
        found = {id(x): gradient for x, gradient in zip(sought, of_sought, strict=True)}
    return [found.get(id(x)) for x in inputs], later


def with_hooks(hooks: Sequence[tuple[Node, Callable[..., Any]]], act: Callable[[], Any]) -> Any:
    """The result of a function that runs with hooks before some nodes."""
    handles = [node.register_prehook(hook) for node, hook in hooks]
    try:
        return act()
    finally:
        for handle in handles:
            handle.remove()


class Graph:
    """The autograd graph of a layer."""

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.roots = [torch.autograd.graph.get_gradient_edge(y).node for y in outputs]
        """[output] the node that its gradient comes to; of an input that passes on as it is, that
        input's own."""
        self.nodes = list(nodes_behind(self.roots))
        """Every node behind those that it leads to."""
        leaves = {torch.autograd.graph.get_gradient_edge(x).node for x in inputs}
        self.to_inputs: set[Node] = set()
        """The nodes that lead to an input."""
        self.parameters: dict[Node, set[Tensor]] = {}
        """Node that leads to no input -> the parameters that it leads to."""
        for node in self.nodes:
            behind = next_nodes(node)
            if node in leaves or not self.to_inputs.isdisjoint(behind):
                self.to_inputs.add(node)
                continue
            own: set[Tensor] = set().union(*(self.parameters[other] for other in behind))
            variable = getattr(node, "variable", None)  # of a leaf
            if variable is not None:
                own.add(variable)
            self.parameters[node] = own

    def forks(self) -> Iterator[Fork]:
        """The forks of the graph."""
        for node in self.nodes:
            if node not in self.to_inputs:
                continue
            ways = [self.parameters.get(other, set()) for other in next_nodes(node)]
            reached: set[Tensor] = set().union(*ways)
            if reached:
                yield Fork(node, reached)


def next_nodes(node: Node) -> list[Node]:
    """The nodes to which a node passes gradients."""
    return [other for other, _ in node.next_functions if other is not None]


def nodes_behind(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node that the roots lead to, each behind those that it leads to itself."""
    visited: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack += [(other, False) for other in next_nodes(node)]


def grouped_by_parameters(forks: Iterator[Fork]) -> list[list[Fork]]:
    """The forks in groups: those of a group share parameters, and those of two groups do not."""
    groups: list[list[Fork]] = []
    for fork in forks:
        apart, together = list[list[Fork]](), [fork]
        for group in groups:
            shares = any(not fork.parameters.isdisjoint(other.parameters) for other in group)
            if shares:
                together = group + together
            else:
                apart.append(group)
        groups = [*apart, together]
    return groups
