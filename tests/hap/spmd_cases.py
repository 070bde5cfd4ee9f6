"""One case per operator, and how to hold a tensor in a form, for the tests of the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form
from hetplan.formulations.hap.spmd.operators.base import Array, Place
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer

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
) -> list[Array]:
    """Random inputs; those of `softmax`-like gates are distinct with probability 1."""
    found: list[Array] = []
    for entry in case[1]:
        if isinstance(entry[0], tuple):
            found.append(draw.integers(entry[1], size=entry[0]))
        else:
            found.append(draw.normal(size=entry))
    return found


def lengths(length: int, unit: int = 1) -> list[int]:
    """An uneven split over three devices in multiples of `unit`."""
    units = length // unit
    first = max(1, units // 2)
    second = max(0, (units - first) * 2 // 3)
    return [first * unit, second * unit, (units - first - second) * unit]


def hold(
    value: Array, form: Form, parts: Sequence[int] | None, draw: np.random.Generator
) -> list[Array]:
    """What three devices hold of `value` in a form: itself, random summands, or slices of these
    lengths."""
    if form == WHOLE:
        return [value] * 3
    if form == PARTIAL:
        one, two = draw.normal(size=value.shape), draw.normal(size=value.shape)
        return [one, two, value - one - two]
    assert parts is not None
    return list(np.split(value, np.cumsum(parts)[:-1], axis=form))


def dual(form: Form) -> Form:
    """The form of the gradient of a tensor in `form`."""
    return {WHOLE: PARTIAL, PARTIAL: WHOLE}.get(form, form)


def whole(held: Sequence[Array], form: Form) -> Array:
    """The tensor that the devices hold in a form."""
    if form == WHOLE:
        for other in held[1:]:
            assert np.allclose(other, held[0], rtol=0, atol=1e-12), (
                "a whole tensor is the same everywhere"
            )
        return held[0]
    if form == PARTIAL:
        total: Array = sum(held[1:], start=held[0])
        return total
    return np.concatenate(list(held), axis=form)


def place(shape: Sequence[int], starts: Sequence[int], partial: bool, first: bool) -> Place:
    """Where a device runs."""
    return Place(tuple(shape), tuple(starts), partial, first)


def two_layers(batch: int, inner: int = 600, outer: int = 300) -> SingleProgram:
    """A matrix product of data with a parameter, a second, and a loss."""
    w = Writer("two")
    x, labels = w.placeholder("x", (batch, inner)), w.placeholder("labels", (batch,), below=outer)
    y = w.linear("first", x, "bi,oi->bo", (outer, inner))
    y = w.linear("second", y, "bi,oi->bo", (outer, outer))
    w.apply("cross-entropy", "loss", y, labels, count=batch)
    return w.finish()
