"""The routing of tokens to the experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetplan.programs.forms import Way
from hetplan.programs.operators.operator import Attributes, Operator, Place, Shape, Shapes

if TYPE_CHECKING:
    from torch import Tensor


def route_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """gates [b, s, e] -> weights [b, s, e, c] of `capacity` c places at each expert."""
    return (*whole[0], attributes["capacity"])


def route_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Samples can be sliced: the tokens of one sample compete for its places."""
    return [Way((0,), 0)]


def places_of_tokens(gates: Tensor, active: int, capacity: int) -> Tensor:
    """gates [b, s, e] -> [b, s, e, c] of 0 and 1: the place that a token takes at an expert.

    Each token goes to its `active` best experts, at the next of their `capacity` places within its
    sample; tokens that find no place are dropped. Source: GShard (Lepikhin et al. 2020), Section
    2.2.
    """
    import torch

    order = torch.sort(-gates, dim=-1, stable=True).indices[..., :active]
    chosen = torch.zeros_like(gates).scatter(-1, order, 1.0)
    place = (chosen.cumsum(dim=1) - chosen).long()
    free = torch.arange(capacity, device=gates.device)
    return ((place.unsqueeze(-1) == free) & (chosen.unsqueeze(-1) > 0)).to(gates.dtype)


def route(inputs: Sequence[Tensor], attributes: Attributes, place: Place) -> Tensor:
    """The gate at the place that a token takes."""
    gates = inputs[0]
    places = places_of_tokens(gates.detach(), attributes["active"], attributes["capacity"])
    return gates.unsqueeze(-1) * places


ROUTING: dict[str, Operator] = {"route": Operator(route_shape, route_ways, route)}
