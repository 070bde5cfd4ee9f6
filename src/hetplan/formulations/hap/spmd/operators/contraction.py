"""Sums of products: matrix products of every kind as one operator, `contract`, with an optional
bias.

Slicing a dimension of the output is batch or output parallelism, slicing one that is summed over is
reduction parallelism, whose results are summands. Source: HAP, Fig. 9, last three rules; its
released code lacks the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import Way, along
from hetplan.formulations.hap.spmd.operators.base import (
    ELEMENT_FLOPS,
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    size,
)


def parsed(equation: str) -> tuple[tuple[str, ...], str]:
    """`ab,bc,c->ac` as (("ab", "bc", "c"), "ac")."""
    left, _, output = equation.partition("->")
    return tuple(left.split(",")), output


class Contract(Operator):
    """sum of left * right over the letters that `equation` leaves out, plus a bias (third input, if
    any)."""

    kind = "contract"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        terms, output = parsed(attributes["equation"])
        lengths: dict[str, int] = {}
        if len(terms) != len(whole) or len(terms) not in (2, 3):
            raise InputError(
                "number of tensors", where=attributes["equation"], got=len(whole), expected="2 or 3"
            )
        for term, shape in zip(terms, whole, strict=True):
            if len(term) != len(shape):
                raise InputError(
                    f"{term} has {len(term)} letters",
                    where=attributes["equation"],
                    got=shape,
                    expected="as many dimensions",
                )
            for letter, length in zip(term, shape, strict=True):
                if lengths.setdefault(letter, length) != length:
                    raise InputError(
                        f"length of {letter}",
                        where=attributes["equation"],
                        got=length,
                        expected=str(lengths[letter]),
                    )
        return tuple(lengths[letter] for letter in output)

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        terms, output = parsed(attributes["equation"])
        return [
            along(letter, terms, output) for letter in dict.fromkeys("".join((*terms[:2], output)))
        ]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        terms, output = parsed(attributes["equation"])
        result: Array = np.einsum(
            f"{terms[0]},{terms[1]}->{output}", inputs[0], inputs[1], optimize=True
        )
        if len(inputs) == 3 and (place.first or not place.partial):
            result = result + spread(inputs[2], terms[2], output)
        return result

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        terms, out = parsed(attributes["equation"])
        left, right = inputs[0], inputs[1]
        gradients: list[Array | None] = [
            product(f"{out},{terms[1]}->{terms[0]}", gradient, right, left.shape),
            product(f"{out},{terms[0]}->{terms[1]}", gradient, left, right.shape),
        ]
        if len(inputs) == 3:
            bias = np.einsum(f"{out}->{terms[2]}", gradient)
            gradients.append(bias if place.first or not place.partial else np.zeros_like(bias))
        return gradients

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        terms, _ = parsed(attributes["equation"])
        lengths = {
            x: n
            for term, shape in zip(terms, whole, strict=True)
            for x, n in zip(term, shape, strict=True)
        }
        flops = 2.0 * float(np.prod([lengths[x] for x in set(terms[0] + terms[1])], dtype=float))
        bias = [ELEMENT_FLOPS * size(output)] * (len(whole) - 2)
        return flops, [flops, flops, *bias]


def spread(bias: Array, letters: str, output: str) -> Array:
    """`bias` with the dimensions of the output, those that it lacks of length 1."""
    assert list(letters) == [x for x in output if x in letters], (
        "a bias keeps the order of the output"
    )
    shape = [bias.shape[letters.index(x)] if x in letters else 1 for x in output]
    return bias.reshape(shape)


def product(equation: str, gradient: Array, other: Array, shape: Shape) -> Array:
    """einsum whose result may have letters that neither factor has: repeated along these to
    `shape`."""
    terms, output = parsed(equation)
    known = "".join(x for x in output if x in terms[0] + terms[1])
    result: Array = np.einsum(f"{terms[0]},{terms[1]}->{known}", gradient, other, optimize=True)
    if known == output:
        return result
    dims = [n if x in known else 1 for x, n in zip(output, shape, strict=True)]
    return np.broadcast_to(result.reshape(dims), shape).copy()


OPERATORS = (Contract(),)
