"""Label setting: parts of decisions are extended step by step, and dominated ones are left out.

A label stands for a part of a decision. Labels are rows of a structured array. It has the fields of
the family and two more:

bound   float   a lower bound on the cost of every decision to which the label can be completed
parent  int     number of the label that this one extends, -1 for none; `set_labels` fills it in

Labels lie in numbered buckets, for example by the number of layers that are still to be placed.
Buckets are taken in a given order, and a label is only extended into later buckets. Each bucket
first leaves out labels whose bound reaches the threshold, and then dominated labels. Of the rest it
keeps the `width` labels of least bound and cuts the others. The least bound of all labels that were
cut is returned. Where none was cut, one of the labels of the last bucket is a best decision.
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
        """The labels of a bucket, each extended in all possible ways. Extensions whose bound
        reaches `limit` may be left out."""
        ...

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """The numbers of the labels that no other one dominates.

        For every decision to which a dominated label can be completed, one of these labels can be
        completed to a decision that costs no more.
        """
        ...


@dataclass(frozen=True)
class Extensions:
    """Extensions of some labels, sorted by bucket."""

    children: Labels  # [children]
    rows: Numbers  # [children] the number of each child's parent in the array that was extended
    buckets: Numbers  # [children] the bucket of each child, ascending


@dataclass(frozen=True)
class LabelLimits:
    """Limits on the memory of label setting."""

    width: int  # labels that a bucket keeps at most
    # Labels that are extended at a time, between two looks at the clock. More take more memory,
    # fewer more time.
    chunk: int = 4096
    # A bucket is also cut before its turn, once it has more labels than this multiple of the width.
    crowding: int = 4
    label_seconds: float = 2e-6  # seconds that a label counts towards the budget of the run


@dataclass(frozen=True)
class KeptLabels:
    """All labels that were kept. The labels are numbered bucket by bucket."""

    # The labels of each bucket, in the order in which buckets were taken. Buckets before the last
    # one have only the fields that a path needs.
    buckets: list[Labels]
    first_numbers: list[int]  # of each bucket, the number of its first label
    cut_bound: float  # the least bound of a label that was cut; infinite where none was

    @property
    def last(self) -> Labels:
        """The labels of the last bucket."""
        return self.buckets[-1]

    @property
    def count(self) -> int:
        """The number of labels that were kept."""
        return self.first_numbers[-1] + len(self.last)

    def path(self, label: Any) -> list[Any]:
        """The label, the label that it extends, and so on to a root."""
        path = [label]
        while (number := int(path[-1]["parent"])) >= 0:
            i = bisect.bisect_right(self.first_numbers, number) - 1  # position of its bucket
            path.append(self.buckets[i][number - self.first_numbers[i]])
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
    """All labels that are kept when the `roots`, in the first bucket of `order`, are extended up to
    the last bucket.

    threshold: the bound from which on labels are left out; it may fall while labels are set.
    path_fields: the family's fields that labels keep after they were extended, for
    `KeptLabels.path`. Raises `Stopped` where the run should stop.
    """
    # bucket -> the labels in it that were not extended yet, in several arrays, and their number
    pending: dict[int, list[Labels]] = {bucket: [] for bucket in order}
    pending[order[0]] = [roots]
    pending_count = dict.fromkeys(order, 0)
    buckets: list[Labels] = []
    first_numbers: list[int] = []
    cut_bound, count = math.inf, 0

    def cut(bucket: int) -> Labels:
        """The labels that a bucket keeps."""
        nonlocal cut_bound
        # `roots[:0]` has no labels; it is there because numpy cannot concatenate an empty list.
        labels = np.concatenate([*pending[bucket], roots[:0]], dtype=roots.dtype)
        labels = labels[labels["bound"] < threshold()]
        labels = labels[rules.undominated(bucket, labels)]
        if len(labels) > limits.width:
            by_bound = np.argsort(labels["bound"], kind="stable")
            cut_bound = min(cut_bound, float(labels["bound"][by_bound[limits.width]]))
            labels = labels[by_bound[: limits.width]]
        return labels

    def add(extensions: Extensions) -> None:
        """Add the extended labels to their buckets, and cut a bucket that has too many labels."""
        # `extensions` is sorted by bucket: the children of the next bucket begin at each split
        splits = np.flatnonzero(np.diff(extensions.buckets)) + 1
        by_bucket = np.split(extensions.children, splits)
        for first, children in zip([0, *splits], by_bucket, strict=True):
            target = int(extensions.buckets[first])
            pending[target].append(children)
            pending_count[target] += len(children)
            if pending_count[target] > limits.crowding * limits.width:
                pending[target] = [cut(target)]
                pending_count[target] = len(pending[target][0])

    for bucket in order:
        labels = cut(bucket)
        del pending[bucket]
        first_numbers.append(count)
        for begin in range(0, len(labels), limits.chunk):
            chunk = labels[begin : begin + limits.chunk]
            run.check(limits.label_seconds * len(chunk))
            for extensions in rules.extend(bucket, chunk, threshold()):
                if len(extensions.rows):
                    extensions.children["parent"] = count + begin + extensions.rows
                    add(extensions)
        count += len(labels)
        is_last = bucket == order[-1]
        buckets.append(labels if is_last else repack_fields(labels[["parent", *path_fields]]))
    return KeptLabels(buckets, first_numbers, cut_bound)
