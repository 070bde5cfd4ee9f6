"""The routing of a mixture of experts as one operator of torch, which the tracer knows:
`hetplan::route`.

Gates [b, s, e] -> weights [b, s, e, c] as the operator `route` has them; routing written out in
sorts, cumulative sums and comparisons has no rule of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetplan.runtime.execution.spmd.kernels import places_of_tokens


def _forward(gates: Tensor, active: int, capacity: int) -> Tensor:
    return gates.unsqueeze(-1) * places_of_tokens(gates, active, capacity)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:  # torch passes these by name
    gates, ctx.active, ctx.capacity = inputs
    ctx.save_for_backward(gates)


def _backward(ctx: Any, gradient: Tensor) -> Any:
    (gates,) = ctx.saved_tensors
    places = places_of_tokens(gates, ctx.active, ctx.capacity)
    return (gradient * places).sum(dim=-1), None, None


SCHEMA = "(Tensor gates, int active, int capacity) -> Tensor"
route = torch.library.custom_op("hetplan::route", _forward, mutates_args=(), schema=SCHEMA)
route.register_fake(lambda gates, active, capacity: gates.new_empty((*gates.shape, capacity)))
route.register_autograd(_backward, setup_context=_keep)
