"""One pass of a module on fake tensors, every operator recorded with the layer and the pass that it
belongs to.

Fake tensors have shapes and no values, so an operator whose output's size depends on values cannot
be run. Operators of the backward pass belong to the layer whose forward pass made their autograd
node, found by the nodes' numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetplan.runtime.tracing.private import TorchDispatchMode, next_node, running_node
from hetplan.runtime.tracing.rules import (
    Product,
    is_free,
    is_ruled,
    name_of,
    products,
    tensors,
    traffic,
)


@dataclass(frozen=True)
class Call:
    """One operator: layer's number, pass, bytes, products (of equal work each, as far as they are
    of one kernel)."""

    name: str
    layer: int
    backward: bool
    read: float
    written: float
    products: tuple[Product, ...]
    ruled: bool


@dataclass
class Layers:
    """Layers in the order in which they run. firsts: number of the first autograd node of each."""

    names: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    def enter(self, name: str) -> None:
        """The layer runs from here on, unless it does already; one that ran before gets a
        number."""
        if self.names and self._bare(self.names[-1]) == name:
            return
        times = sum(self._bare(known) == name for known in self.names)
        self.names.append(name if not times else f"{name}#{times + 1}")
        self.firsts.append(next_node() if len(self.names) > 1 else 0)

    def of_node(self, number: int) -> int:
        """The layer whose forward pass made an autograd node."""
        return max(bisect_right(self.firsts, number) - 1, 0)

    @property
    def now(self) -> int:
        """The layer that runs; 0 before the first."""
        return max(len(self.names) - 1, 0)

    @staticmethod
    def _bare(name: str) -> str:
        return name.partition("#")[0]


class Counter(TorchDispatchMode):
    """Records calls; which layer made which storage, and which ones used it. own: storages that no
    layer makes."""

    def __init__(self, layers: Layers, own: set[int]) -> None:
        super().__init__()
        self.layers, self.own = layers, own
        self.calls: list[Call] = []
        self.made: dict[int, tuple[int, float]] = {}  # storage -> (layer, bytes)
        self.users: dict[int, list[int]] = {}  # storage -> layers
        self.alive: list[Tensor] = []  # a storage that is gone gives its number to the next one
        self.backward, self.last = False, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = name_of(func)
        if func.namespace == "prim":
            return out
        layer = self._layer()
        if not self.backward:
            self._follow(layer, (args, kwargs), out)
        if is_free(func, name):
            return out
        read, written = traffic(name, args, kwargs, out)
        made = tuple(products(name, args, out))
        self.calls.append(
            Call(name, layer, self.backward, read, written, made, is_ruled(func, name))
        )
        return out

    def _layer(self) -> int:
        if not self.backward:
            return self.layers.now
        number = running_node()
        # Parameters' own nodes have the largest number there is: what they do belongs to the layer
        # before.
        if number is not None and number < 1 << 62:
            self.last = self.layers.of_node(number)
        return self.last

    def _follow(self, layer: int, given: Any, out: Any) -> None:
        for tensor in tensors(given):
            users = self.users.setdefault(storage(tensor), [])
            if layer not in users[-1:]:
                users.append(layer)
        for tensor in tensors(out):
            if storage(tensor) not in self.made and storage(tensor) not in self.own:
                self.made[storage(tensor)] = (layer, float(tensor.untyped_storage().nbytes()))
                self.alive.append(tensor)

    def crossing(self) -> list[float]:
        """[layers] bytes that later layers need of what this one and those before made."""
        sizes = [0.0] * len(self.layers.names)
        for key, (layer, size) in self.made.items():
            for k in range(layer, self.users.get(key, [layer])[-1]):
                sizes[k] += size
        return sizes


class Fused(TorchFunctionMode):
    """Dropout and RMSNorm as the single kernels that GPUs run; on CPUs torch writes them out.

    RMSNorm counts as a LayerNorm without offset: it moves and keeps the same but for one number per
    row.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        functional = torch.nn.functional
        if func is functional.dropout:
            x, p, training = _dropout(*args, **kwargs)
            return torch.native_dropout(x, p, True)[0] if training and p else x
        if func in (functional.rms_norm, torch.rms_norm):
            x, shape, weight, eps = _rms_norm(*args, **kwargs)
            return torch.native_layer_norm(x, list(shape), weight, None, eps or 0.0)[0]
        return func(*args, **kwargs)


def _dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    """The arguments of functional.dropout."""
    return x, p, training


def _rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Any, Tensor | None, float | None]:
    """The arguments of functional.rms_norm."""
    return x, normalized_shape, weight, eps


def storage(tensor: Tensor) -> int:
    """What tells storages apart, fake ones too, which have no address."""
    return int(tensor.untyped_storage()._cdata)
