"""The routing of tokens to the experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.programs.forms import ShardingRule
from hetplan.programs.operators.operator import Attributes, Operator, Place, Shape, Shapes

if TYPE_CHECKING:
    from torch import Tensor


def route_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The output's shape: weights [b, s, e, c] for gates [b, s, e]. Letters: b samples, s tokens,
    e experts, c places at an expert (the attribute `capacity`)."""
    return (*whole[0], attributes["capacity"])


def route_rules(whole: Shapes, attributes: Attributes) -> list[ShardingRule]:
    """Samples can be sliced. Tokens cannot, because the tokens of one sample compete for places."""
    return [ShardingRule((0,), 0)]


def places_of_tokens(gates: Tensor, active: int, capacity: int) -> Tensor:
    """[b, s, e, c] 1 where token s takes place c at expert e, else 0; gates: [b, s, e].

    Each token goes to the `active` experts with the largest gates, and takes the next of their
    `capacity` places within its sample. Tokens that find no place are dropped. Source: GShard
    (Lepikhin et al. 2020), Section 2.2.
    """
    import torch

    # a stable sort: of equal gates the first experts are chosen, on every device alike
    best = torch.sort(-gates, dim=-1, stable=True).indices[..., :active]
    chosen = torch.zeros_like(gates).scatter(-1, best, 1.0)  # [b, s, e] 1 for chosen experts
    earlier_tokens = (chosen.cumsum(dim=1) - chosen).long()  # [b, s, e] at the same expert
    places = torch.arange(capacity, device=gates.device)
    takes = (earlier_tokens.unsqueeze(-1) == places) & (chosen.unsqueeze(-1) > 0)
    return takes.to(gates.dtype)


def route(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The weights: the gate of each token and expert, at the place that the token takes there."""
    gates = inputs[0]
    places = places_of_tokens(gates.detach(), attributes["active"], attributes["capacity"])
    return gates.unsqueeze(-1) * places


ROUTING: dict[str, Operator] = {"route": Operator(route_shape, route_rules, route)}
