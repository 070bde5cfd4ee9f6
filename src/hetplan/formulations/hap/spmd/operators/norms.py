"""Normalisations and softmax: any dimension but the normalised one can be sliced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.hap.spmd.forms import WHOLE, Way
from hetplan.formulations.hap.spmd.operators.base import (
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    same_dimensions,
)

EPSILON = 1e-5


class LayerNorm(Operator):
    """(x - mean) / deviation * scale + shift over the last dimension (Ba et al. 2016)."""

    kind = "layer-norm"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [Way((d, WHOLE, WHOLE), d) for d in range(len(whole[0]) - 1)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        x, scale, shift = inputs
        return self._normal(x, attributes)[0] * scale + shift

    def _normal(self, x: Array, attributes: Attributes) -> tuple[Array, Array]:
        centred = x - x.mean(axis=-1, keepdims=True)
        inverse = 1 / np.sqrt(
            (centred**2).mean(axis=-1, keepdims=True) + attributes.get("epsilon", EPSILON)
        )
        return centred * inverse, inverse

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        x, scale, _ = inputs
        normal, inverse = self._normal(x, attributes)
        inner = gradient * scale
        along = (inner * normal).mean(axis=-1, keepdims=True)
        dx = inverse * (inner - inner.mean(axis=-1, keepdims=True) - normal * along)
        axes = tuple(range(x.ndim - 1))
        return [dx, (gradient * normal).sum(axis=axes), gradient.sum(axis=axes)]


class RmsNorm(Operator):
    """x / root mean square * scale over the last dimension (Zhang and Sennrich 2019)."""

    kind = "rms-norm"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [Way((d, WHOLE), d) for d in range(len(whole[0]) - 1)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        x, scale = inputs
        return x * self._inverse(x, attributes) * scale

    def _inverse(self, x: Array, attributes: Attributes) -> Array:
        square = (x**2).mean(axis=-1, keepdims=True)
        inverse: Array = 1 / np.sqrt(square + attributes.get("epsilon", EPSILON))
        return inverse

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        x, scale = inputs
        inverse = self._inverse(x, attributes)
        inner = gradient * scale
        dx = inverse * (inner - x * inverse**2 * (inner * x).mean(axis=-1, keepdims=True))
        return [dx, (gradient * x * inverse).sum(axis=tuple(range(x.ndim - 1)))]


class Softmax(Operator):
    """exp(x) / sum exp(x) over the last dimension."""

    kind = "softmax"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return same_dimensions(len(whole[0]), 1, blocked=(len(whole[0]) - 1,))

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return softmax(inputs[0])

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [softmax_gradient(output, gradient)]


class LogSoftmax(Softmax):
    """x - log sum exp(x) over the last dimension."""

    kind = "log-softmax"

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        x = inputs[0] - inputs[0].max(axis=-1, keepdims=True)
        found: Array = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
        return found

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [gradient - np.exp(output) * gradient.sum(axis=-1, keepdims=True)]


def softmax(x: Array) -> Array:
    """Over the last dimension."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    found: Array = e / e.sum(axis=-1, keepdims=True)
    return found


def softmax_gradient(output: Array, gradient: Array) -> Array:
    """From its output and the output's gradient."""
    found: Array = output * (gradient - (gradient * output).sum(axis=-1, keepdims=True))
    return found


OPERATORS = (LayerNorm(), RmsNorm(), Softmax(), LogSoftmax())
