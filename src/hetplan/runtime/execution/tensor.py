"""Tensor parallelism inside a stage: which part of a parameter a rank holds, and the two
collectives around it.

Activations are whole on every rank of a tensor group. A layer whose weights are split computes with
its part between `enter` (gradients of what goes in are summed) and `leave` (what comes out is
summed): Megatron-LM's f and g (Shoeybi et al. 2019, Section 3), with parts of any size, none
included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.runtime.execution.transport import HALF, Group
from hetplan.runtime.plan import split
from hetplan.schema import Range


@dataclass(frozen=True)
class Part:
    """The `index`-th of several shares."""

    index: int = 0
    shares: tuple[float, ...] = (1.0,)

    def of(self, length: int) -> Range:
        """[first, last) of `length` heads, columns, rows or experts; may be empty."""
        return split(length, self.shares)[self.index]


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a parameter: `ranges` [first, last) of dimension `dim`, one behind the
    other."""

    dim: int
    ranges: tuple[Range, ...]

    def take(self, whole: Tensor) -> Tensor:
        """The part of an unsplit tensor, as a tensor of its own."""
        if whole.dim() == 0:
            return whole.clone()
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)


def cut(dim: int, length: int, part: Part, blocks: int = 1) -> Cut:
    """The part of each of `blocks` equal blocks of `length` that a dimension is made of (gate and
    value, say)."""
    a, b = part.of(length)
    return Cut(dim, tuple((i * length + a, i * length + b) for i in range(blocks)))


@dataclass(frozen=True)
class TensorGroup(Part):
    """A rank's part and the group of all parts; group None: alone, both collectives do nothing."""

    group: Group | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x; in the backward pass its gradients are summed over the group.

        On every rank of it: one without a part keeps what it gets in its graph, times 0 say, or the
        others wait.
        """
        return x if self.group is None else _Enter.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of x over the group; gradients pass unchanged."""
        return x if self.group is None else _Leave.apply(x, self.group)

    def largest(self, x: Tensor) -> Tensor:
        """The largest x of the group, elementwise; no gradient."""
        if self.group is None:
            return x.detach()
        return _reduced(x.detach(), self.group, dist.ReduceOp.MAX)


ALONE = TensorGroup()


def _reduced(x: Tensor, group: Group, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    half = x.dtype in HALF  # summed in fp32, which is more exact
    result = x.float() if half else x.clone(memory_format=torch.contiguous_format)
    group.total(result, operation)
    return result.to(x.dtype)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduced(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def cuts_of(layer: torch.nn.Module, part: Part) -> dict[str, Cut]:
    """Parameter name within the layer -> its cut, as the modules inside tell by their methods
    `cuts`.

    What nobody names is whole on every tensor rank, and every rank computes its whole gradient.
    """
    cuts: dict[str, Cut] = {}
    for prefix, module in layer.named_modules():
        tell = getattr(module, "cuts", None)
        if callable(tell):
            cuts.update(
                {f"{prefix}.{name}" if prefix else name: c for name, c in tell(part).items()}
            )
    return cuts


def join(layer: torch.nn.Module, group: TensorGroup) -> None:
    """Tell every module inside that has a `tensor` which part it is."""
    for module in layer.modules():
        if isinstance(getattr(module, "tensor", None), TensorGroup):
            module.tensor = group
