"""The routing of a mixture of experts as one operator of torch, which `trace` knows:
`hetplan::route`.

Gates [b, s, e] -> weights [b, s, e, c] as the operator `route` has them; routing written out in
sorts, cumulative sums and comparisons has no rule of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def route_operator() -> Any:
    """The operator (gates, active, capacity) -> weights, with its gradient; imports torch and
    registers it once."""
    import torch

    def places(gates: Any, active: int, capacity: int) -> Any:
        """[b, s, e, c] of 0 and 1: which place each token takes at its experts."""
        order = torch.sort(-gates, dim=-1, stable=True).indices[..., :active]
        chosen = torch.zeros_like(gates).scatter(-1, order, 1.0)
        place = (chosen.cumsum(dim=1) - chosen).long()
        free = torch.arange(capacity, device=gates.device)
        return ((place.unsqueeze(-1) == free) & (chosen.unsqueeze(-1) > 0)).to(gates.dtype)

    def forward(gates: Any, active: int, capacity: int) -> Any:
        return gates.unsqueeze(-1) * places(gates, active, capacity)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:  # torch passes these by name
        gates, ctx.active, ctx.capacity = inputs
        ctx.save_for_backward(gates)

    def backward(ctx: Any, gradient: Any) -> Any:
        (gates,) = ctx.saved_tensors
        return (gradient * places(gates, ctx.active, ctx.capacity)).sum(dim=-1), None, None

    # the schema is written out: annotations of a function within a function cannot be read
    schema = "(Tensor gates, int active, int capacity) -> Tensor"
    made = torch.library.custom_op("hetplan::route", forward, mutates_args=(), schema=schema)
    made.register_fake(lambda gates, active, capacity: gates.new_empty((*gates.shape, capacity)))
    made.register_autograd(backward, setup_context=keep)
    return made
