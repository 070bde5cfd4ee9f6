"""Label setting: parts of decisions side by side, without those that others make superfluous.

A label stands for a part of a decision. Labels are rows of a structured array with two fields of
the engine's own, and the family's:

bound   float   at most what any decision costs that the label can be completed to
parent  int     number of the label that this one extends, -1 for none (the engine fills it in)

Labels lie in numbered buckets, say the layers or the stages that are still to be placed. Buckets
are taken in a given order, and a label is only extended into later ones. In each bucket, labels
whose bound reaches the limit are left out, then those that others make superfluous, and of the rest
the `width` labels of least bound are kept. The least bound of what was cut for want of width is
returned: where nothing was cut, the labels of the last bucket hold a best decision.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from hetplan.solvers.run import Run

Labels = NDArray[Any]  # [labels], structured
Numbers = NDArray[np.int64]


class Family(Protocol):
    """What a family says about its labels, all at once."""

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterable[Extensions]:
        """Every label extended in every way; bounds that reach `limit` may be left out."""
        ...

    def needed(self, bucket: int, labels: Labels) -> Numbers:
        """Numbers of labels that suffice: for each of the others one of them costs no more,
        however it is completed."""
        ...


@dataclass(frozen=True)
class Extensions:
    """Some labels, extended; sorted by bucket."""

    children: Labels  # [children]
    rows: Numbers  # [children] each child's parent, by its number among the labels extended
    buckets: Numbers  # [children] ascending


@dataclass(frozen=True)
class Limits:
    """How much memory a search may take, and how often it looks at the clock."""

    # Labels kept per bucket.
    width: int
    # Labels extended at a time: more take more memory, fewer more time.
    block: int = 4096
    # Extensions waiting in a bucket are compared when they are so many times the width.
    crowd: int = 4


@dataclass(frozen=True)
class Labelled:
    """All labels kept, by bucket in the order taken; of those before the last bucket the fields
    that a path needs."""

    buckets: list[Labels]
    first: list[int]  # number of each bucket's first label
    dropped: float  # least bound of what was cut for want of width, infinite where nothing was

    @property
    def last(self) -> Labels:
        """The labels of the last bucket."""
        return self.buckets[-1]

    @property
    def count(self) -> int:
        """How many labels were kept."""
        return self.first[-1] + len(self.last)

    def path(self, label: Any) -> list[Any]:
        """The label, the one that it extends, and so on to the first."""
        path = [label]
        while (number := int(path[-1]["parent"])) >= 0:
            at = bisect.bisect_right(self.first, number) - 1
            path.append(self.buckets[at][number - self.first[at]])
        return path


def set_labels(
    family: Family,
    roots: Labels,
    order: Sequence[int],
    run: Run,
    *,
    threshold: Callable[[], float],
    limits: Limits,
    trail: Sequence[str],
) -> Labelled:
    """Extend the `roots`, which lie in the first bucket of `order`, to the last one.

    threshold: the limit of bounds, which may fall while labels are set. trail: fields that are
    kept of labels after they were extended. Raises `Stopped` where the run should stop.
    """
    pending: dict[int, list[Labels]] = {bucket: [] for bucket in order}
    pending[order[0]] = [roots]
    waiting = dict.fromkeys(order, 0)
    buckets: list[Labels] = []
    first: list[int] = []
    dropped, count = math.inf, 0

    def kept(bucket: int) -> Labels:
        nonlocal dropped
        labels = np.concatenate([*pending[bucket], roots[:0]], dtype=roots.dtype)
        labels = labels[labels["bound"] < threshold()]
        labels = labels[family.needed(bucket, labels)]
        if len(labels) > limits.width:
            order = np.argsort(labels["bound"], kind="stable")
            dropped = min(dropped, float(labels["bound"][order[limits.width]]))
            labels = labels[order[: limits.width]]
        return labels

    for bucket in order:
        labels = kept(bucket)
        del pending[bucket]
        first.append(count)
        for begin in range(0, len(labels), limits.block):
            run.check()
            block = labels[begin : begin + limits.block]
            for made in family.extend(bucket, block, threshold()):
                if not len(made.rows):
                    continue
                made.children["parent"] = count + begin + made.rows
                cuts = np.flatnonzero(np.diff(made.buckets)) + 1
                for at, children in zip([0, *cuts], np.split(made.children, cuts), strict=True):
                    target = int(made.buckets[at])
                    pending[target].append(children)
                    waiting[target] += len(children)
                    if waiting[target] > limits.crowd * limits.width:
                        pending[target] = [kept(target)]
                        waiting[target] = len(pending[target][0])
        count += len(labels)
        kept_fields = labels if bucket == order[-1] else repack_fields(labels[["parent", *trail]])
        buckets.append(kept_fields)
    return Labelled(buckets, first, dropped)
