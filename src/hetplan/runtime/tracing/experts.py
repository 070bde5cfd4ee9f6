"""Experts that are spread over ranks. A module of stacked experts stays one node of the graph, and
at run time the layer sends each token to the ranks that have its experts.

The modules are those of `transformers` that `use_experts_implementation` decorates. Their
forward(x, index, weights) takes x [tokens, width]. The result of token t is the sum over k of the
output of expert index[t, k] times weights[t, k]. All parameters are stacked, [experts, …], and each
rank has a range of the experts.

The forward pass has three exchanges: the number of tokens for each expert, the tokens, and the
experts' outputs. The backward pass exchanges the gradients of the tokens and of the outputs. A rank
without a token for its experts takes part in all exchanges.
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
    """An empty tensor of the output's shape. It stands for the experts at `path` in a graph, where
    `Experts` takes their place at run time. values: the module's parameters."""
    return torch.empty_like(x)


NODE: Any = torch.library.custom_op("hetplan::experts", like_x, mutates_args=())
NODE.register_fake(like_x)


def stacks(module: nn.Module) -> dict[str, Any]:
    """Path -> submodule, for the submodules that are stacked experts: `use_experts_implementation`
    gives their classes `_apply_gate`."""
    return {
        path: inner
        for path, inner in module.named_modules()
        if hasattr(inner, "_apply_gate") and hasattr(inner, "num_experts")
    }


@contextmanager
def as_nodes(module: nn.Module, ranks: int) -> Iterator[None]:
    """A context in which each submodule of stacked experts becomes one node of a graph.

    Raises UnsupportedError where there is no such submodule, where one has fewer experts than
    `ranks`, and where a parameter is not stacked.
    """
    modules = stacks(module)
    require(
        modules,
        "the plan spreads experts over ranks, and the model has none that are stacked",
        where=type(module).__name__,
        expected="a mixture of experts of transformers",
        kind=UnsupportedError,
    )
    for path, inner in modules.items():
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
        for inner in modules.values():
            del inner.forward


class Experts(nn.Module):
    """A rank's experts at run time, in the place of a node. Its parameters are the rank's slices of
    the module's parameters, under the names that they have in the module."""

    tensor: Any
    """The `TensorGroup` of ranks that have the same tokens."""
    group: Any
    """The `Group` of ranks over which the experts are spread."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.count = module.num_experts
        self.names = [name for name, _ in module.named_parameters()]
        # A copy that computes this rank's experts. It is in a list so that it does not become a
        # submodule, since its parameters are those of all experts.
        self.own = [copy.copy(module)]
        # torch's grouped products do not take float64
        if next(module.parameters()).dtype == torch.float64:
            self.own[0].forward = partial(inspect.unwrap(type(module).forward), self.own[0])

    def cuts(self, part: Any) -> dict[str, Any]:
        """Name of a parameter -> the cut of a rank with this `Part`."""
        return dict.fromkeys(self.names, part.experts(self.count))

    def join(self, tensor: Any, group: Any) -> None:
        """Set the rank's tensor group, whose ranks have the same tokens, and the group of ranks
        over which the experts are spread."""
        index, ranks = tensor.expert
        self.sizes = [last - first for first, last in split(self.count, [1.0] * ranks)]
        self.tensor, self.group, self.own[0].num_experts = tensor, group, self.sizes[index]

    def forward(self, x: Tensor, index: Tensor, weights: Tensor, values: Sequence[Tensor]) -> Any:
        """The module's output, [tokens, width]. Each tensor rank sends its part of the tokens.

        values: the rank's slices of the parameters, in the order of `names`.
        """
        parameters = dict(zip(self.names, values, strict=True))
        first, last = self.tensor.of(len(x))  # the tokens that this rank sends
        # `enter` sums the gradients of the tensor ranks, `leave` their outputs
        own_x = self.tensor.enter(x)[first:last]
        own_weights = self.tensor.enter(weights)[first:last]
        output = self._of_own_tokens(own_x, index[first:last], own_weights, parameters)
        # with zeros for the tokens of other tensor ranks, [0, first) and [last, len(x))
        padded = nn.functional.pad(output, (0, 0, first, len(x) - last))
        return self.tensor.leave(padded)

    def _of_own_tokens(
        self, x: Tensor, index: Tensor, weights: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """The output for the tokens that this rank sends, [tokens, width].

        A token is sent once for each of its experts. A row below is one such copy of a token.
        """
        experts_per_token = index.shape[-1]
        order = index.reshape(-1).argsort(stable=True)  # rows by their expert
        rows_for_expert = torch.bincount(index.reshape(-1), minlength=self.count)
        own_experts = self.own[0].num_experts
        # [rank, own expert] rows that come from each rank
        rows_from = self.group.swap(
            rows_for_expert, self.sizes, [own_experts] * len(self.sizes)
        ).view(-1, own_experts)
        leaving = [int(part.sum()) for part in rows_for_expert.split(self.sizes)]
        coming = rows_from.sum(1).tolist()
        to_experts = self._exchange(leaving, coming)
        from_experts = self._exchange(coming, leaving)
        # gradients go back by the opposite exchange
        received = mirrored(to_experts, from_experts, x[order // experts_per_token])
        numbers = torch.arange(own_experts, device=x.device).repeat(len(coming))
        expert_of_row = numbers.repeat_interleave(rows_from.reshape(-1))
        computed = self._computed(parameters, received, expert_of_row)
        position_of_row = torch.empty_like(order)  # the inverse permutation of `order`
        position_of_row[order] = torch.arange(len(order), device=x.device)
        returned = mirrored(from_experts, to_experts, computed)
        outputs = returned[position_of_row].view(*index.shape, -1)
        return (outputs * weights[..., None]).sum(1).to(x.dtype)

    def _exchange(
        self, leaving: Sequence[int], coming: Sequence[int]
    ) -> Callable[[Tensor], Tensor]:
        """A function that exchanges rows between the ranks. leaving, coming: [rank] number of rows
        sent to it, and received from it."""

        def exchanged(rows: Tensor) -> Tensor:
            width = rows.shape[-1]
            sent = [number * width for number in leaving]
            received = [number * width for number in coming]
            return self.group.swap(rows.reshape(-1), sent, received).view(-1, width)

        return exchanged

    def _computed(
        self, parameters: Mapping[str, Tensor], rows: Tensor, expert_of_row: Tensor
    ) -> Tensor:
        """The output of this rank's experts for rows, each of which goes through one expert."""
        if len(rows) == 0:  # part of the graph, so that the backward pass joins the exchanges
            return rows + sum(value[:0].sum() for value in parameters.values())
        # weights of 1, since the rank that sent a token weighs the output
        return torch.func.functional_call(
            self.own[0], parameters, (rows, expert_of_row[:, None], rows.new_ones(len(rows), 1))
        )
