"""Routing of a mixture of experts. Source: GShard (Lepikhin et al. 2020), Section 2.2, groups =
samples.

Dispatch and combination are contractions with the result, so that experts are one more dimension to
slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.hap.spmd.forms import Way
from hetplan.formulations.hap.spmd.operators.base import Array, Attributes, Operator, Place, Shape


class Route(Operator):
    """gates [b, s, e] -> weights [b, s, e, c]: each token goes to its `active` best experts, at the
    next of their `capacity` places within its sample, with the gate as weight; tokens that find no
    place are dropped."""

    kind = "route"

    def shape(self, whole: Sequence[Shape], attributes: Attributes) -> Shape:
        return (*whole[0], attributes["capacity"])

    def ways(self, whole: Sequence[Shape], attributes: Attributes) -> list[Way]:
        return [Way((0,), 0)]

    def _places(self, gates: Array, attributes: Attributes) -> Array:
        """[b, s, e, c] of 0 and 1."""
        b, s, e = gates.shape
        order = np.argsort(-gates, axis=-1, kind="stable")[..., : attributes["active"]]
        chosen = np.zeros((b, s, e))
        np.put_along_axis(chosen, order, 1.0, axis=-1)
        place = (np.cumsum(chosen, axis=1) - chosen).astype(np.int64)
        capacity = attributes["capacity"]
        here = (place[..., None] == np.arange(capacity)) & (chosen[..., None] > 0)
        found: Array = here.astype(gates.dtype)
        return found

    def forward(self, inputs: Sequence[Array], attributes: Attributes, place: Place) -> Array:
        return inputs[0][..., None] * self._places(inputs[0], attributes)

    def backward(
        self,
        inputs: Sequence[Array],
        output: Array,
        gradient: Array,
        attributes: Attributes,
        place: Place,
    ) -> list[Array | None]:
        return [(gradient * self._places(inputs[0], attributes)).sum(axis=-1)]


OPERATORS = (Route(),)
