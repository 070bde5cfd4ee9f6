"""Switches the layers of a split module to evaluation: dropout passes everything on.

A trace keeps the operators of a forward pass in training. In evaluation a module may leave out
dropout, which can be switched off in the trace. It may also compute something else, which the trace
does not have. So the module is traced once more in evaluation, and its operators are compared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from hetplan.errors import UnsupportedError
from hetplan.runtime.tracing.losses import name_of, values_of

ATTENTION = "scaled_dot_product_attention"
OFF = {"train": False, "training": False, "dropout_p": 0.0}  # argument -> its value in evaluation
MARKS = ("_assert_scalar", "_assert_tensor_metadata")  # operators that compute nothing


def is_dropout(node: Node) -> bool:
    """Whether a node is a dropout of torch."""
    return "dropout" in name_of(node)


def in_evaluation(node: Node) -> dict[str, Any]:
    """Name -> value in evaluation of the arguments by which a node drops elements."""
    if node.op != "call_function" or not (is_dropout(node) or name_of(node) == ATTENTION):
        return {}
    return {name: OFF[name] for name in values_of(node) if name in OFF}


def operators_of(graph: fx.Graph) -> list[str]:
    """The operators of a graph with their constants, dropout left out."""
    texts = []
    for node in graph.nodes:
        if node.op != "call_function" or is_dropout(node) or name_of(node) in MARKS:
            continue
        values = values_of(node) | in_evaluation(node)
        constants = [f"{k}={v}" for k, v in values.items() if isinstance(v, (bool, int, float))]
        texts.append(" ".join([name_of(node), *constants]))
    return texts


def check_alike(training: Sequence[str], evaluation: Sequence[str], where: str) -> None:
    """Raise UnsupportedError where a module computes something else in evaluation than in training,
    dropout aside. training, evaluation: see `operators_of`."""
    if list(training) == list(evaluation):
        return
    pairs = zip([*training, "nothing"], [*evaluation, "nothing"], strict=False)
    got, expected = next(pair for pair in pairs if pair[0] != pair[1])
    raise UnsupportedError(
        "the model computes something else in evaluation than in training, which was traced",
        where=where, got=got, expected=f"{expected}, as module.eval() has it; evaluate the result "
        "of model.gather() in one process",
    )  # fmt: skip


@contextmanager
def evaluating(layers: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which layers are in evaluation: modules by their own mode, graphs without
    dropout."""
    modes = {module: module.training for layer in layers for module in layer.modules()}
    changed: list[tuple[Node, Any, Any]] = []
    graphs = [layer for layer in layers if isinstance(layer, fx.GraphModule)]
    try:
        for layer in layers:
            layer.eval()
        for layer in graphs:
            for node in layer.graph.nodes:
                off = in_evaluation(node)
                if off:
                    changed.append((node, node.args, node.kwargs))
                    named = values_of(node) | off
                    node.args, node.kwargs = (), named
                elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    raise UnsupportedError(
                        "the model draws random numbers otherwise than by dropout",
                        where=node.name, got=name_of(node), expected="none in evaluation",
                    )  # fmt: skip
            layer.recompile()
        yield
    finally:
        for node, args, kwargs in changed:
            node.args, node.kwargs = args, kwargs
        for layer in graphs:
            layer.recompile()
        for module, training in modes.items():
            module.training = training
