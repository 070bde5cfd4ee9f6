"""Convolution and pooling: samples and output channels can be sliced, input channels are summed
over.

Source: HAP's released rules (batch and output channels); input channels as reduction parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import PARTIAL, Way, along
from hetplan.formulations.hap.spmd.operators.base import (
    ELEMENT_FLOPS,
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    same_dimensions,
    size,
)


class Convolve(Operator):
    """x [b, c, H, W] with weight [o, c, k, l] and bias [o], zero `padding` and `stride` alike both
    ways."""

    kind = "convolve"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        (b, c, height, width), (o, inner, k, l) = whole[:2]
        if inner != c:
            raise InputError("input channels", where=self.kind, got=c, expected=str(inner))
        pad, stride = attributes.get("padding", 0), attributes.get("stride", 1)
        return (b, o, (height + 2 * pad - k) // stride + 1, (width + 2 * pad - l) // stride + 1)

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        terms = ("bcHW", "ockl", "o")[: len(whole)]
        return [along(letter, terms, "boHW") for letter in "boc"]

    def _windows(self, x: Array, weight: Array, attributes: Attributes) -> Array:
        pad, stride = attributes.get("padding", 0), attributes.get("stride", 1)
        padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        view = sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
        windows: Array = view[:, :, ::stride, ::stride]
        return windows

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        windows = self._windows(inputs[0], inputs[1], attributes)
        result: Array = np.einsum("bcHWkl,ockl->boHW", windows, inputs[1], optimize=True)
        if len(inputs) == 3 and (place.first or not place.partial):
            result = result + inputs[2][:, None, None]
        return result

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        x, weight = inputs[:2]
        windows = self._windows(x, weight, attributes)
        dweight = np.einsum("bcHWkl,boHW->ockl", windows, gradient, optimize=True)
        spread = np.einsum("boHW,ockl->bcHWkl", gradient, weight, optimize=True)
        pad, stride = attributes.get("padding", 0), attributes.get("stride", 1)
        height, width = gradient.shape[2:]
        dx = np.zeros(
            (*x.shape[:2], x.shape[2] + 2 * pad, x.shape[3] + 2 * pad), dtype=gradient.dtype
        )
        for i in range(weight.shape[2]):
            for j in range(weight.shape[3]):
                rows, columns = (
                    slice(i, i + stride * height, stride),
                    slice(j, j + stride * width, stride),
                )
                dx[:, :, rows, columns] += spread[..., i, j]
        inner = dx[:, :, pad : pad + x.shape[2], pad : pad + x.shape[3]]
        gradients: list[Array | None] = [inner, dweight]
        if len(inputs) == 3:
            bias = gradient.sum(axis=(0, 2, 3))
            gradients.append(bias if place.first or not place.partial else np.zeros_like(bias))
        return gradients

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        flops = 2.0 * size(output) * size(whole[1][1:])
        return flops, [flops, flops, *[ELEMENT_FLOPS * size(output)] * (len(whole) - 2)]


class MaxPool(Operator):
    """The largest of each `window` x `window` square of x [b, c, H, W], squares side by side."""

    kind = "max-pool"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        (b, c, height, width), w = whole[0], attributes["window"]
        return (b, c, height // w, width // w)

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return same_dimensions(4, 1, blocked=(2, 3))

    def _squares(self, x: Array, w: int) -> Array:
        b, c, height, width = x.shape
        cut = x[:, :, : height // w * w, : width // w * w]
        return cut.reshape(b, c, height // w, w, width // w, w).transpose(0, 1, 2, 4, 3, 5)

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        largest: Array = self._squares(inputs[0], attributes["window"]).max(axis=(4, 5))
        return largest

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        x, w = inputs[0], attributes["window"]
        squares = self._squares(x, w)
        flat = squares.reshape(*squares.shape[:4], w * w)
        chosen = np.zeros_like(flat)
        np.put_along_axis(chosen, flat.argmax(axis=-1)[..., None], gradient[..., None], axis=-1)
        b, c, height, width = gradient.shape
        inner = (
            chosen.reshape(squares.shape)
            .transpose(0, 1, 2, 4, 3, 5)
            .reshape(b, c, height * w, width * w)
        )
        dx = np.zeros_like(x)
        dx[:, :, : height * w, : width * w] = inner
        return [dx]


class MeanPool(Operator):
    """The mean over each image: [b, c, H, W] -> [b, c]."""

    kind = "mean-pool"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return whole[0][:2]

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [*(along(letter, ("bcHW",), "bc") for letter in "bc"), Way((PARTIAL,), PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        mean: Array = inputs[0].mean(axis=(2, 3))
        return mean

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        x = inputs[0]
        return [
            np.broadcast_to(gradient[:, :, None, None] / (x.shape[2] * x.shape[3]), x.shape).copy()
        ]


OPERATORS = (Convolve(), MaxPool(), MeanPool())
