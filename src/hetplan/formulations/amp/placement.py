"""Placement by rule: Megatron's order.

Megatron numbers ranks tensor first, then data, then pipeline, and fills node after node (AMP §3.6,
§4.1): tensor groups lie within nodes, and what is left of a node's links serves data groups next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from hetplan.formulations.amp.problem import Configuration, Ints


def by_node(nodes: Sequence[int]) -> list[list[int]]:
    """Device numbers of each node, nodes in ascending order; nodes [D]."""
    return [[d for d, own in enumerate(nodes) if own == node] for node in sorted(set(nodes))]


def megatron_placement(nodes: Sequence[int], configuration: Configuration) -> Ints:
    """Devices [pp, dp, tp] in Megatron's order; nodes [D] names the node of each device.

    Where the tensor degree does not divide a node's devices, whole groups come first, node after
    node, and the left-over devices then form groups across nodes.
    """
    tp = configuration.tensor
    members = by_node(nodes)
    whole = chain.from_iterable(node[: len(node) - len(node) % tp] for node in members)
    rest = chain.from_iterable(node[len(node) - len(node) % tp :] for node in members)
    order = np.array([*whole, *rest], dtype=np.int64)
    return order.reshape(configuration.pipeline, configuration.data, tp)
