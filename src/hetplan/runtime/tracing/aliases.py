"""Operators that change tensors in place: which nodes of a graph of torch.export show the change.

Values of a program never change: after `z.add_(1)` every node that is `z` itself has the new value,
and so has what is taken from it later. A view of `z` that was taken before and is read afterwards
would show the change, too; that has no rule. Which nodes share memory is told by the storages of
torch.export's example values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class Aliases:
    """Of one graph. inner: whether it is that of a region, whose placeholders another graph
    reads."""

    def __init__(self, graph: Any, *, inner: bool = False) -> None:
        self._inner = inner
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._sharing: dict[int, list[Any]] = defaultdict(list)
        self._root: dict[Any, Any] = {}
        self._same: dict[Any, list[Any]] = defaultdict(list)
        for node in graph.nodes:
            changed = changed_by(node)
            root = self._root.get(changed[0], changed[0]) if changed else node
            self._root[node] = root
            self._same[root].append(node)
            for storage in storages(node):
                self._sharing[storage].append(node)

    def same(self, node: Any) -> list[Any]:
        """All nodes that are the same tensor, entry for entry."""
        return self._same[self._root[node]]

    def shown(self, node: Any) -> str | None:
        """The name of another node taken before and read after `node`, which shows what `node`
        changes; or None."""
        now = self._position[node]
        for target in changed_by(node):
            for storage in storages(target):
                for other in self._sharing[storage]:
                    if self._inner and other.op == "placeholder":
                        return str(other.name)
                    earlier = (
                        self._position[other] < now and self._root[other] is not self._root[target]
                    )
                    if earlier and any(self._position[user] > now for user in other.users):
                        return str(other.name)
        return None


def changed_by(node: Any) -> list[Any]:
    """The nodes among an operator's arguments that it changes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and hasattr(value, "users")
        ):
            found.append(value)
    return found


def storages(node: Any) -> Iterator[int]:
    """Of the node's example values."""
    value = node.meta.get("val")
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if hasattr(one, "untyped_storage"):
            yield one.untyped_storage()._cdata  # the only name that a storage without memory has
