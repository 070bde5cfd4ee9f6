"""One case per operator, and how to hold a tensor in a form, for the tests of the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetplan.programs.forms import PARTIAL, WHOLE, Form

# kind -> (shapes of the inputs, attributes); whole-number inputs are written as (shape, below)
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("contract", [(5, 6), (6, 7)], {"equation": "ab,bc->ac"}),
    ("contract", [(5, 3, 6), (7, 6), (7,)], {"equation": "bsh,fh,f->bsf"}),
    ("contract", [(5, 4, 6), (5, 8, 6)], {"equation": "bqd,bkd->bqk"}),
    ("contract", [(5, 3, 6, 4), (5, 3, 7)], {"equation": "bsec,bsh->bech"}),
    ("contract", [(5, 6), (7,)], {"equation": "ab,c->ac"}),
    ("add", [(5, 6, 7), (6, 7)], {}),
    ("add", [(5, 6), (5, 6), (5, 6)], {}),
    ("add", [(5, 6), (5, 1)], {}),
    ("multiply", [(5, 6), (6,)], {}),
    ("multiply", [(5, 6), (5, 6)], {}),
    ("scale", [(5, 6)], {"factor": -0.7}),
    ("offset", [(5, 6)], {"number": 0.3}),
    ("power", [(5, 6)], {"exponent": 2.0}),
    ("relu", [(5, 6)], {}),
    ("gelu", [(5, 6)], {}),
    ("gelu-erf", [(5, 6)], {}),
    ("silu", [(5, 6)], {}),
    ("tanh", [(5, 6)], {}),
    ("sigmoid", [(5, 6)], {}),
    ("positive", [(5, 6)], {}),
    ("gated", [(5, 6, 2)], {}),
    ("layer-norm", [(5, 4, 6), (6,), (6,)], {}),
    ("rms-norm", [(5, 4, 6), (6,)], {"epsilon": 1e-6}),
    ("softmax", [(5, 4, 6)], {}),
    ("log-softmax", [(5, 4, 6)], {}),
    ("attention", [(5, 6, 4, 2), (5, 6, 4, 2), (5, 6, 4, 3)], {"causal": True}),
    ("attention", [(5, 6, 4, 12)], {"causal": False, "rotary": True}),
    ("attention", [(5, 6, 4, 16)], {"causal": True, "rotary": True, "queries": 2}),
    ("rotary", [(5, 6, 4, 4)], {}),
    ("convolve", [(5, 6, 7, 6), (5, 6, 3, 3), (5,)], {"padding": 1, "stride": 2}),
    ("convolve", [(5, 5, 6, 6), (6, 5, 2, 2)], {}),
    ("max-pool", [(5, 6, 5, 4)], {"window": 2}),
    ("max-pool", [(5, 6, 7, 6)], {"window": 3, "stride": 2, "padding": 1}),
    ("batch-moments", [(5, 6, 4, 3)], {"count": 60}),
    ("batch-moments", [(7, 6)], {"count": 7}),
    ("batch-norm", [(5, 6, 4, 3), (2, 6), (6,), (6,)], {"epsilon": 40.0}),
    ("batch-norm", [(7, 6), (2, 6), (6,), (6,)], {"epsilon": 40.0}),
    ("mean-pool", [(5, 6, 3, 4)], {}),
    ("embed", [((5, 4), 9), (9, 6)], {}),
    ("cross-entropy", [(5, 4, 7), ((5, 4), 7)], {"count": 20}),
    ("mean", [(5, 6, 7)], {"dimension": 1, "length": 6}),
    ("permute", [(5, 6, 7)], {"order": (2, 0, 1)}),
    ("reshape", [(5, 12)], {"shape": (5, 6, 2)}),
    ("reshape", [(5, 6, 2)], {"shape": (5, 12)}),
    ("reshape", [(5, 1, 8)], {"shape": (5, 8, 1, 1)}),
    ("select", [(5, 6, 7)], {"dimension": 1, "start": 2, "stop": 4}),
    ("repeat", [(1, 6, 1)], {"shape": (5, 6, 4)}),
    ("join", [(5, 2, 6), (5, 3, 6)], {"dimension": 1}),
    ("route", [(5, 6, 4)], {"active": 2, "capacity": 3}),
]


def shapes(case: tuple[str, list[Any], dict[str, Any]]) -> list[tuple[int, ...]]:
    """The inputs' shapes."""
    return [entry[0] if isinstance(entry[0], tuple) else entry for entry in case[1]]


def draw_inputs(
    case: tuple[str, list[Any], dict[str, Any]], draw: np.random.Generator
) -> list[Tensor]:
    """Random inputs; those of `softmax`-like gates are distinct with probability 1."""
    return [
        torch.as_tensor(draw.integers(entry[1], size=entry[0]))
        if isinstance(entry[0], tuple)
        else torch.as_tensor(draw.normal(size=entry)).requires_grad_()
        for entry in case[1]
    ]


def lengths(length: int, unit: int = 1) -> list[int]:
    """An uneven split over three devices in multiples of `unit`."""
    units = length // unit
    first = max(1, units // 2)
    second = max(0, (units - first) * 2 // 3)
    return [first * unit, second * unit, (units - first - second) * unit]


def hold(
    value: Tensor, form: Form, parts: Sequence[int] | None, draw: np.random.Generator
) -> list[Tensor]:
    """What three devices hold of `value` in a form: itself, random summands, or slices of these
    lengths; leaves of their own."""
    value = value.detach()
    if form == WHOLE:
        held = [value.clone() for _ in range(3)]
    elif form == PARTIAL:
        one, two = (torch.as_tensor(draw.normal(size=value.shape)) for _ in range(2))
        held = [one, two, value - one - two]
    else:
        assert parts is not None
        held = [part.clone() for part in value.split(list(parts), dim=form)]
    return [part.requires_grad_() if part.is_floating_point() else part for part in held]


def dual(form: Form) -> Form:
    """The form of the gradient of a tensor in `form`."""
    return {WHOLE: PARTIAL, PARTIAL: WHOLE}.get(form, form)


def whole(held: Sequence[Tensor], form: Form) -> Tensor:
    """The tensor that the devices hold in a form; a whole tensor is the same everywhere."""
    if form == WHOLE:
        assert all(torch.allclose(other, held[0], rtol=0, atol=1e-12) for other in held)
        return held[0]
    return torch.stack(list(held)).sum(0) if form == PARTIAL else torch.cat(list(held), dim=form)
