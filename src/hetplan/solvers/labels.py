"""Label setting: parts of decisions are extended step by step, and the superfluous ones left out.

A label stands for a part of a decision. Labels are rows of a structured array with two fields of
the engine's own, and the family's:

bound   float   at most what any decision costs that the label can be completed to
parent  int     number of the label that this one extends, -1 for none (the engine fills it in)

Labels lie in numbered buckets, say the layers or the stages that are still to be placed. Buckets
are taken in a given order, and a label is only extended into later ones. In each bucket, labels
whose bound reaches the limit are left out, then those that others make superfluous, and of the rest
the `width` labels of least bound are kept. The least bound of the labels that were cut for want of
width is returned. Where none was cut, one of the labels of the last bucket is a best decision.
"""

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


class LabelRules(Protocol):
    """A family's rules: which labels extend a label, and which labels dominate others. Both methods
    are given many labels at once, as an array."""

    def extend(self, bucket: int, labels: Labels, limit: float) -> "Iterable[Extensions]":
        """Every label extended in every way; bounds that reach `limit` may be left out."""
        ...

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """Numbers of the labels to keep. The others are superfluous: however one of them is
        completed, a label that is kept can be completed to a decision that costs no more."""
        ...


@dataclass(frozen=True)
class Extensions:
    """Some labels, extended; sorted by bucket."""

    children: Labels  # [children]
    rows: Numbers  # [children] each child's parent, by its number among the labels extended
    buckets: Numbers  # [children] ascending


@dataclass(frozen=True)
class LabelLimits:
    """Limits of a search's memory, and how often it looks at the clock."""

    # Labels kept per bucket.
    width: int
    # Labels extended at a time: more take more memory, fewer more time.
    chunk: int = 4096
    # A bucket is cut before its turn, too, once it holds so many times the width.
    crowding: int = 4


@dataclass(frozen=True)
class KeptLabels:
    """All labels kept, by bucket in the order taken. Those before the last bucket have only the
    fields that a path needs."""

    buckets: list[Labels]
    first_numbers: list[int]  # of each bucket, the number of its first label
    cut_bound: float  # least bound of the labels cut for want of width, infinite where none was

    @property
    def last(self) -> Labels:
        """The labels of the last bucket."""
        return self.buckets[-1]

    @property
    def count(self) -> int:
        """The number of labels that were kept."""
        return self.first_numbers[-1] + len(self.last)

    def path(self, label: Any) -> list[Any]:
        """The label, the one that it extends, and so on to the first."""
        path = [label]
        while (number := int(path[-1]["parent"])) >= 0:
            at = bisect.bisect_right(self.first_numbers, number) - 1
            path.append(self.buckets[at][number - self.first_numbers[at]])
        return path


def set_labels(
    rules: LabelRules,
    roots: Labels,
    order: Sequence[int],
    run: Run,
    *,
    threshold: Callable[[], float],
    limits: LabelLimits,
    path_fields: Sequence[str],
) -> KeptLabels:
    """Extend the `roots`, which lie in the first bucket of `order`, to the last one.

    threshold: the limit of bounds, which may fall while labels are set. path_fields: the family's
    fields that labels keep after they were extended, for `KeptLabels.path`. Raises `Stopped` where
    the run should stop.
    """
    pending: dict[int, list[Labels]] = {bucket: [] for bucket in order}
    pending[order[0]] = [roots]
    pending_count = dict.fromkeys(order, 0)
    buckets: list[Labels] = []
    first_numbers: list[int] = []
    cut_bound, count = math.inf, 0

    def cut(bucket: int) -> Labels:
        nonlocal cut_bound
        labels = np.concatenate([*pending[bucket], roots[:0]], dtype=roots.dtype)
        labels = labels[labels["bound"] < threshold()]
        labels = labels[rules.undominated(bucket, labels)]
        if len(labels) > limits.width:
            by_bound = np.argsort(labels["bound"], kind="stable")
            cut_bound = min(cut_bound, float(labels["bound"][by_bound[limits.width]]))
            labels = labels[by_bound[: limits.width]]
        return labels

    for bucket in order:
        labels = cut(bucket)
        del pending[bucket]
        first_numbers.append(count)
        for begin in range(0, len(labels), limits.chunk):
            run.check()
            chunk = labels[begin : begin + limits.chunk]
            for made in rules.extend(bucket, chunk, threshold()):
                if not len(made.rows):
                    continue
                made.children["parent"] = count + begin + made.rows
                ends = np.flatnonzero(np.diff(made.buckets)) + 1
                for at, children in zip([0, *ends], np.split(made.children, ends), strict=True):
                    target = int(made.buckets[at])
                    pending[target].append(children)
                    pending_count[target] += len(children)
                    if pending_count[target] > limits.crowding * limits.width:
                        pending[target] = [cut(target)]
                        pending_count[target] = len(pending[target][0])
        count += len(labels)
        is_last = bucket == order[-1]
        buckets.append(labels if is_last else repack_fields(labels[["parent", *path_fields]]))
    return KeptLabels(buckets, first_numbers, cut_bound)
