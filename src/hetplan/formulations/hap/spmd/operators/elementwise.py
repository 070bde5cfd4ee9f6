"""Elementwise operators: any dimension can be sliced; those linear in a tensor take its summands as
well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Way
from hetplan.formulations.hap.spmd.operators.base import (
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    same_dimensions,
)


def broadcast_ways(whole: Sequence[Shape], output: Shape) -> list[Way]:
    """Slicing any dimension of the output; inputs that lack it, or have length 1 there, are
    whole."""
    ways = []
    for d in range(len(output)):
        forms = []
        for shape in whole:
            at = d - (len(output) - len(shape))
            forms.append(at if at >= 0 and shape[at] == output[d] else WHOLE)
        ways.append(Way(tuple(forms), d))
    return ways


def broadcast_shape(kind: str, whole: Sequence[Shape]) -> Shape:
    """numpy's rule; one of the inputs must have the output's shape."""
    try:
        shape: Shape = tuple(int(n) for n in np.broadcast_shapes(*whole))
    except ValueError:
        raise InputError(
            "shapes do not fit", where=kind, got=" and ".join(map(str, whole))
        ) from None
    return shape


def summed_to(gradient: Array, shape: Shape) -> Array:
    """The gradient of an input that was broadcast: summed over what it lacked."""
    lead = gradient.ndim - len(shape)
    axes = (
        *range(lead),
        *(lead + i for i, n in enumerate(shape) if n == 1 and gradient.shape[lead + i] != 1),
    )
    found: Array = gradient.sum(axis=axes).reshape(shape)
    return found


class Add(Operator):
    """Sum of two or more tensors; of summands too, if all are. Source: HAP's released rules (Reduce
    + Reduce)."""

    kind = "add"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return broadcast_shape(self.kind, whole)

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        output = broadcast_shape(self.kind, whole)
        return [*broadcast_ways(whole, output), Way((PARTIAL,) * len(whole), PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        total: Array = sum(inputs[1:], start=inputs[0])
        return total

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [summed_to(gradient, x.shape) for x in inputs]


class Multiply(Operator):
    """Product of two tensors, linear in each."""

    kind = "multiply"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return broadcast_shape(self.kind, whole)

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        output = broadcast_shape(self.kind, whole)
        return [
            *broadcast_ways(whole, output),
            Way((PARTIAL, WHOLE), PARTIAL),
            Way((WHOLE, PARTIAL), PARTIAL),
        ]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return inputs[0] * inputs[1]

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        left, right = inputs
        return [summed_to(gradient * right, left.shape), summed_to(gradient * left, right.shape)]


class Scale(Operator):
    """Product with the number `factor`."""

    kind = "scale"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [*same_dimensions(len(whole[0]), 1), Way((PARTIAL,), PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        found: Array = inputs[0] * attributes["factor"]
        return found

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [gradient * attributes["factor"]]


class Offset(Operator):
    """Sum with the number `number`; added once where summands are held."""

    kind = "offset"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [*same_dimensions(len(whole[0]), 1), Way((PARTIAL,), PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        found: Array = inputs[0] + (
            attributes["number"] if place.first or not place.partial else 0.0
        )
        return found

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [gradient]


class Power(Operator):
    """Entries to the power `exponent`."""

    kind = "power"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return same_dimensions(len(whole[0]), 1)

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        found: Array = inputs[0] ** attributes["exponent"]
        return found

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        exponent = attributes["exponent"]
        return [gradient * exponent * inputs[0] ** (exponent - 1)]


Function = Callable[[Array], Array]


class Map(Operator):
    """A function of each entry, with its derivative (of the entry)."""

    def __init__(self, kind: str, function: Function, derivative: Function | None) -> None:
        self.kind = kind  # type: ignore[misc]
        self._function, self._derivative = function, derivative
        self.differentiable = derivative is not None

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return same_dimensions(len(whole[0]), 1)

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return self._function(inputs[0])

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [None if self._derivative is None else gradient * self._derivative(inputs[0])]


ROOT = float(np.sqrt(2 / np.pi))


def gelu(x: Array) -> Array:
    """Hendrycks and Gimpel's tanh form."""
    found: Array = 0.5 * x * (1 + np.tanh(ROOT * (x + 0.044715 * x**3)))
    return found


def gelu_slope(x: Array) -> Array:
    """Its derivative."""
    t = np.tanh(ROOT * (x + 0.044715 * x**3))
    found: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * ROOT * (1 + 3 * 0.044715 * x**2)
    return found


def erf_gelu(x: Array) -> Array:
    """The exact form, x times the normal distribution."""
    return x * _normal(x)


def erf_gelu_slope(x: Array) -> Array:
    """Its derivative."""
    found: Array = _normal(x) + x * np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)
    return found


def _normal(x: Array) -> Array:
    from math import erf

    found: Array = 0.5 * (1 + np.vectorize(erf, otypes=[float])(x / np.sqrt(2)))
    return found


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


class Gated(Operator):
    """silu(x[..., 0]) * x[..., 1] (Shazeer 2020); the last dimension stays whole."""

    kind = "gated"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        if whole[0][-1] != 2:
            raise InputError("last dimension", where=self.kind, got=whole[0][-1], expected="2")
        return whole[0][:-1]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [Way((d,), d) for d in range(len(whole[0]) - 1)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        gate, up = inputs[0][..., 0], inputs[0][..., 1]
        return gate * sigmoid(gate) * up

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        gate, up = inputs[0][..., 0], inputs[0][..., 1]
        s = sigmoid(gate)
        return [np.stack([gradient * up * s * (1 + gate * (1 - s)), gradient * gate * s], axis=-1)]


OPERATORS = (
    Add(),
    Gated(),
    Multiply(),
    Scale(),
    Offset(),
    Power(),
    Map("relu", lambda x: np.maximum(x, 0.0), lambda x: (x > 0).astype(x.dtype)),
    Map("gelu", gelu, gelu_slope),
    Map("gelu-erf", erf_gelu, erf_gelu_slope),
    Map("silu", lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
    Map("tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    Map("sigmoid", sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x))),
    Map("positive", lambda x: (x > 0).astype(x.dtype), None),
)
