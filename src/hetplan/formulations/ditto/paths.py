"""Templates of an interval of θ by label setting, from the last layer to the first.

A label is a part of a template that covers the layers [a, L): its bucket is a. Of two labels with
the same bucket and phase one is needless if the other has paid no more, with no more devices of any
kind and, where stages count, no more stages: whatever is put in front of the one can be put in
front of the other (Lemma 5 of docs/method-ditto.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from hetplan.formulations.ditto.intervals import Priced, Space
from hetplan.formulations.ditto.problem import Floats, Ints, Stages
from hetplan.solvers.labels import Extensions, Labels, Numbers

# Dominance is decided on a table of the combinations of devices and stages that occur, if it has no
# more cells than this per label. Else only labels of the same combination are compared.
CELLS_PER_LABEL = 20


class Parts:
    """The labels of one interval as it is charged; see `labels.Family`."""

    def __init__(self, space: Space, priced: Priced, reach: Ints | None) -> None:
        self.space, self.priced, self.reach = space, priced, reach
        p, arcs = space.problem, priced.arcs
        self.kind, self.size = p.option_kind[arcs.option], p.option_devices[arcs.option]
        # what a label needs to be completed at best, besides its own cost and devices
        self.ahead: Floats = (
            priced.costs + priced.prices[self.kind] * self.size - priced.prices @ space.devices
        )
        self.strides = np.array(
            [int((space.devices + 1)[k + 1 :].prod()) for k in range(len(space.devices))]
        )

    def root(self) -> Labels:
        """The one label that covers no layer."""
        fields = [
            ("bound", "f8"), ("parent", "i8"), ("cost", "f8"),
            ("used", "i4", len(self.space.devices)), ("stages", "i4"), ("phase", "i1"),
            ("first", "i4"), ("option", "i4"),
        ]  # fmt: skip
        root = np.zeros(1, dtype=fields)
        root["parent"], root["bound"], root["first"] = (
            -1,
            self.priced.bound,
            self.space.problem.layers,
        )
        return root

    def stages(self, path: list[Any]) -> Stages:
        """The stages of a label's path, the first stage first."""
        return [
            (int(label["first"]), int(behind["first"]), int(label["option"]))
            for label, behind in pairwise(path)
        ]

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        """One stage more in front of each label, [arcs, labels]."""
        space, arcs, front = self.space, self.priced.arcs, self.priced.front
        few = slice(*arcs.of_end[bucket : bucket + 2])
        first, after, kind, size = arcs.first[few], arcs.after[few], self.kind[few], self.size[few]
        score = labels["cost"] + labels["used"] @ self.priced.prices
        if space.limited:
            left = space.problem.micro_batches - 1 - labels["stages"]
            rest = np.where(left >= 0, front[left, after[:, None], first[:, None]], np.inf)
        else:
            rest = front[0, after, first][:, None]
        bound = self.ahead[few][:, None] + rest + score
        allowed = bound < limit
        allowed &= labels["phase"] == arcs.before[few][:, None]
        allowed &= labels["used"].T[kind] + size[:, None] <= space.devices[kind][:, None]
        if space.problem.has_memory:
            allowed &= labels["stages"] <= arcs.behind[few][:, None]
        arc, label = np.nonzero(allowed)
        if self.reach is not None:
            left = (space.devices - labels["used"]) @ self.strides
            left = left[label] - (self.strides[kind] * size)[arc]
            kept = self.reach.ravel()[left] >= first[arc]
            arc, label = arc[kept], label[kept]
        if not len(arc):
            return
        children = labels[label]
        children["bound"] = bound[arc, label]
        children["cost"] += self.priced.costs[few][arc]
        children["used"][np.arange(len(arc)), kind[arc]] += size[arc].astype(np.int32)
        children["stages"] += 1
        children["phase"], children["first"] = after[arc], first[arc]
        children["option"] = arcs.option[few][arc]
        whole = children["first"] == 0  # devices left over are worth nothing
        children["bound"][whole] = children["cost"][whole]
        yield Extensions(children, label, first[arc])

    def needed(self, bucket: int, labels: Labels) -> Numbers:
        """The labels that no other one makes needless."""
        if len(labels) < 2:
            return np.arange(len(labels))
        axes = [labels["phase"], *labels["used"].T]
        if self.space.counted:
            axes.append(labels["stages"])
        key = np.stack(axes).astype(np.int64)
        cost = labels["cost"]
        key -= key.min(axis=1, keepdims=True)
        shape = key.max(axis=1) + 1
        if np.prod(shape.astype(float)) > CELLS_PER_LABEL * len(labels):
            order = np.lexsort((cost, *key))
            same = (np.diff(key[:, order], axis=1) == 0).all(axis=0)
            cheapest: Numbers = order[np.append(True, ~same)]
            return cheapest
        strides = np.append(np.cumprod(shape[:0:-1])[::-1], 1)
        flat = strides @ key
        least = np.full(shape, np.inf)
        np.minimum.at(least.ravel(), flat, cost)
        lowest = np.flatnonzero(least.ravel()[flat] == cost)
        for axis in range(1, len(shape)):
            np.minimum.accumulate(least, axis=axis, out=least)
        kept = lowest[np.unique(flat[lowest], return_index=True)[1]]
        needed = np.ones(len(kept), dtype=np.bool_)
        for axis in range(1, len(shape)):
            inner = key[axis, kept] > 0
            neighbour = flat[kept[inner]] - strides[axis]
            needed[inner] &= least.ravel()[neighbour] > cost[kept[inner]]
        alone: Numbers = kept[needed]
        return alone
