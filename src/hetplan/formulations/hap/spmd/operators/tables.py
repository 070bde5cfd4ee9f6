"""Embedding and loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Way
from hetplan.formulations.hap.spmd.operators.base import (
    ELEMENT_FLOPS,
    Array,
    Attributes,
    Operator,
    Place,
    Shape,
    size,
)
from hetplan.formulations.hap.spmd.operators.norms import softmax


class Embed(Operator):
    """Rows of a table [V, h] by whole numbers [...]: numbers or columns can be sliced; a device
    with a slice of the rows gives zeros for the others, a summand (Shoeybi et al. 2019, Section
    3)."""

    kind = "embed"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return (*whole[0], whole[1][1])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        rank = len(whole[0])
        return [
            *(Way((d, WHOLE), d) for d in range(rank)),
            Way((WHOLE, 1), rank),
            Way((WHOLE, 0), PARTIAL),
        ]

    def _rows(self, ids: Array, table: Array, place: Place) -> tuple[Array, Array]:
        rows = ids - place.starts[1] if place.partial else ids
        return np.clip(rows, 0, max(0, len(table) - 1)), (rows >= 0) & (rows < len(table))

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        ids, table = inputs
        if not len(table):
            return np.zeros((*ids.shape, table.shape[1]))
        rows, here = self._rows(ids, table, place)
        return table[rows] * here[..., None]

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        ids, table = inputs
        rows, here = self._rows(ids, table, place)
        found = np.zeros_like(table)
        if len(table):
            np.add.at(found, rows, gradient * here[..., None])
        return [None, found]

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        moved = 2 * ELEMENT_FLOPS * size(output)
        return moved, [0.0, moved]


class CrossEntropy(Operator):
    """Mean over all rows of -log softmax(logits [..., V])[label]; slices give summands of the mean.

    No label is left out (torch's `ignore_index`): the rows that count would be known at run time
    only. One outside 0 … V - 1 raises InputError.
    """

    kind = "cross-entropy"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return ()

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [Way((d, d), PARTIAL) for d in range(len(whole[1]))]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        logits, labels = inputs
        if not labels.size:
            return np.zeros(())
        check_labels(labels, logits.shape[-1])
        top = logits.max(axis=-1, keepdims=True)
        spread = np.log(np.exp(logits - top).sum(axis=-1)) + top[..., 0]
        chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return np.asarray((spread - chosen).sum() / attributes["count"])

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        logits, labels = inputs
        if not labels.size:
            return [np.zeros_like(logits), None]
        found = softmax(logits)
        np.put_along_axis(
            found,
            labels[..., None],
            np.take_along_axis(found, labels[..., None], axis=-1) - 1,
            axis=-1,
        )
        return [found * (gradient / attributes["count"]), None]

    def work(
        self, whole: Sequence[Shape], output: Shape, attributes: Attributes
    ) -> tuple[float, list[float]]:
        return 2 * ELEMENT_FLOPS * size(whole[0]), [2 * ELEMENT_FLOPS * size(whole[0]), 0.0]


def check_labels(labels: Array, classes: int) -> None:
    """Raises InputError where a label is no class."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise InputError(
            "label of a cross-entropy, which leaves none out (no ignore_index)",
            got=int(wrong.flat[0]), expected=f"0 to {classes - 1}",
        )  # fmt: skip


class Mean(Operator):
    """Mean over the dimension `dimension` of length `length`, which is left out; slices of it give
    summands."""

    kind = "mean"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        d = attributes["dimension"]
        return (*whole[0][:d], *whole[0][d + 1 :])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        d = attributes["dimension"]
        kept = [Way((i,), i if i < d else i - 1) for i in range(len(whole[0])) if i != d]
        return [*kept, Way((d,), PARTIAL), Way((PARTIAL,), PARTIAL)]

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        total: Array = inputs[0].sum(axis=attributes["dimension"]) / attributes["length"]
        return total

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        d, x = attributes["dimension"], inputs[0]
        return [np.broadcast_to(np.expand_dims(gradient / attributes["length"], d), x.shape).copy()]


OPERATORS = (Embed(), CrossEntropy(), Mean())
