"""Experts that are spread over ranks: a module of stacked experts stays one node of the graph, and
the layer that has it sends tokens to where their experts are.

Known are the modules of `transformers` that `use_experts_implementation` decorates: forward(x,
index, weights) of x [tokens, width], of which token t goes through the experts index[t, k] and gets
the sum of what they make times weights[t, k]; all parameters are stacked, [experts, …]. Each rank
holds the experts of its part. Every pass exchanges tokens three times: how many each expert gets,
the tokens, and what became of them; the backward pass exchanges the gradients of the latter two. A
rank without a token for its experts takes part all the same.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import UnsupportedError, require
from hetplan.plans.shares import split
from hetplan.runtime.engine.transport import mirrored


def like_x(
    x: Tensor, index: Tensor, weights: Tensor, values: Sequence[Tensor], path: str
) -> Tensor:
    """What a graph knows of the module at `path` with these parameters; layers compute it by
    `Experts`."""
    return torch.empty_like(x)


NODE: Any = torch.library.custom_op("hetplan::experts", like_x, mutates_args=())
NODE.register_fake(like_x)


def stacks(module: nn.Module) -> dict[str, Any]:
    """Path -> module of stacked experts."""
    return {
        path: inner
        for path, inner in module.named_modules()
        if hasattr(inner, "_apply_gate") and hasattr(inner, "num_experts")
    }


@contextmanager
def as_nodes(module: nn.Module, ranks: int) -> Iterator[None]:
    """Inside, stacked experts are one node of a graph each. Raises UnsupportedError where there are
    none, fewer than ranks, or others than the module's docstring says."""
    known = stacks(module)
    require(
        known,
        "the plan spreads experts over ranks, and the model has none that are stacked",
        where=type(module).__name__,
        expected="a mixture of experts of transformers",
        kind=UnsupportedError,
    )
    for path, inner in known.items():
        require(
            inner.num_experts >= ranks,
            "the plan spreads experts over more ranks than there are",
            where=path,
            got=ranks,
            expected=f"{inner.num_experts} at most",
            kind=UnsupportedError,
        )
        for name, value in inner.named_parameters():
            require(
                value.shape[:1] == (inner.num_experts,),
                "experts are not stacked",
                where=f"{path}.{name}",
                got=list(value.shape),
                expected=f"{inner.num_experts} in front",
                kind=UnsupportedError,
            )

        def node(
            x: Tensor, index: Tensor, weights: Tensor, *, path: str = path, inner: Any = inner
        ) -> Tensor:
            return NODE(x, index, weights, list(inner.parameters()), path)

        inner.forward = node
    try:
        yield
    finally:
        for inner in known.values():
            del inner.forward


class Experts(nn.Module):
    """A node at run time; its parameters are what a rank holds, by the names of the module."""

    tensor: Any
    """A `TensorGroup`."""
    group: Any
    """What exchanges with the ranks that hold the others (a transport's `Group`)."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.count = module.num_experts
        self.names = [name for name, _ in module.named_parameters()]
        self.own = [copy.copy(module)]  # not as a submodule: its parameters are whole
        # torch's grouped products know no doubles
        if next(module.parameters()).dtype == torch.float64:
            self.own[0].forward = partial(inspect.unwrap(type(module).forward), self.own[0])

    def cuts(self, part: Any) -> dict[str, Any]:
        """What a rank of this `Part` holds."""
        return dict.fromkeys(self.names, part.experts(self.count))

    def join(self, tensor: Any, group: Any) -> None:
        """Be one of the ranks over which experts are spread, and of the tensor group that has the
        same tokens."""
        own, ranks = tensor.expert
        self.sizes = [b - a for a, b in split(self.count, [1.0] * ranks)]
        self.tensor, self.group, self.own[0].num_experts = tensor, group, self.sizes[own]

    def forward(self, x: Tensor, index: Tensor, weights: Tensor, values: Sequence[Tensor]) -> Any:
        """[tokens, width] as the module gives it; each tensor rank sends its part of the tokens."""
        held, enter = dict(zip(self.names, values, strict=True)), self.tensor.enter
        first, last = self.tensor.of(len(x))
        made = self._sent(enter(x)[first:last], index[first:last], enter(weights)[first:last], held)
        return self.tensor.leave(nn.functional.pad(made, (0, 0, first, len(x) - last)))

    def _sent(
        self, x: Tensor, index: Tensor, weights: Tensor, held: Mapping[str, Tensor]
    ) -> Tensor:
        """[tokens, width] of tokens that nobody else sends."""
        each = index.shape[-1]
        order = index.reshape(-1).argsort(stable=True)
        wanted = torch.bincount(index.reshape(-1), minlength=self.count)
        own = self.own[0].num_experts
        offered = self.group.swap(wanted, self.sizes, [own] * len(self.sizes)).view(-1, own)
        leaving = [int(part.sum()) for part in wanted.split(self.sizes)]
        coming = offered.sum(1).tolist()
        to, back = (self._swapping(*sides) for sides in ((leaving, coming), (coming, leaving)))
        here = mirrored(to, back, x[order // each])
        numbers = torch.arange(own, device=x.device).repeat(len(coming))
        made = self._computed(held, here, numbers.repeat_interleave(offered.reshape(-1)))
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=x.device)
        gathered = mirrored(back, to, made)[rows].view(*index.shape, -1)
        return (gathered * weights[..., None]).sum(1).to(x.dtype)

    def _swapping(
        self, leaving: Sequence[int], coming: Sequence[int]
    ) -> Callable[[Tensor], Tensor]:
        """What exchanges rows, so many with each rank."""

        def swapped(rows: Tensor) -> Tensor:
            width = rows.shape[-1]
            sides = ([n * width for n in side] for side in (leaving, coming))
            return self.group.swap(rows.reshape(-1), *sides).view(-1, width)

        return swapped

    def _computed(self, held: Mapping[str, Tensor], here: Tensor, index: Tensor) -> Tensor:
        """What the experts here make of a row each."""
        if len(here) == 0:  # the backward pass meets the others, too
            return here + sum(value[:0].sum() for value in held.values())
        return torch.func.functional_call(
            self.own[0], held, (here, index[:, None], here.new_ones(len(here), 1))
        )
