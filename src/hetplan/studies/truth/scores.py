"""How well predictions hold: errors, order within a workload, what a wrong pick costs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from hetplan.studies.truth.tables import Compared


@dataclass(frozen=True)
class Scoring:
    """tie: measured seconds within this share count as equal, as repeated runs of one plan differ
    by a percent or two. least: rows from which on an order is judged. large: bytes from which on
    memory is judged, since below the framework's own dominate. below: a prediction that is lower by
    more says that a run fits which would not."""

    tie: float = 0.02
    least: int = 3
    large: float = 5e9
    below: float = 0.05


kind = attrgetter("published.kind")  # of a row: GPU type or operator


def tied(values: Sequence[float], share: float) -> list[float]:
    """The values with those within `share` above the least of their group made equal to it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    equal = list(values)
    first = 0.0
    for i in order:
        if not first or values[i] > (1 + share) * first:
            first = values[i]
        equal[i] = first
    return equal


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean rank; None where all of one are equal."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    columns = [np.array(column) for column in (a, b)]
    ranks = [(c[:, None] > c).sum(axis=1) + (c[:, None] == c).sum(axis=1) / 2 for c in columns]
    return float(np.corrcoef(ranks)[0, 1])


def order(measured: Sequence[float], predicted: Sequence[float], rules: Scoring) -> float | None:
    """Spearman's rank correlation with ties; None for fewer rows than are judged, or where all are
    equal."""
    return None if len(measured) < rules.least else spearman(tied(measured, rules.tie), predicted)


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """By how much the row that the prediction picks is slower than the best one."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def groups(
    rows: Iterable[Compared], key: Callable[[Compared], Any]
) -> Iterable[tuple[Any, list[Compared]]]:
    """Rows by a key, in its order."""
    return ((name, list(part)) for name, part in groupby(sorted(rows, key=key), key))


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def summarised(rows: Sequence[Compared], rules: Scoring = Scoring()) -> dict[str, Any]:
    """The figures of some rows: of seconds, of order, of the pick, of memory, of utilisation.

    rows, predicted: how many. error, bias: mean of the absolute and of the signed relative error.
    spearman: mean over workloads; order: Spearman's of all rows. regret, worst_regret: over
    workloads of several plans. memory_…: the same of bytes; memory_below: rows whose memory is
    predicted too low by more than 5 %. unfit: rows that ran and are said not to fit. utilisation:
    of rows of one GPU type, Spearman's of model FLOPs utilisation; the prediction's is the
    published one times measured / predicted seconds.
    """
    timed = [row for row in rows if row.error is not None]
    pairs = [seconds(part) for name, part in groups(timed, workload) if name and len(part) > 1]
    costs = [regret(*pair) for pair in pairs]
    held = [row for row in rows if row.memory_error is not None]
    large = [row for row in held if (row.published.held_bytes or 0) >= rules.large]
    one_type = len(set(map(kind, timed))) == 1 and all(row.published.utilisation for row in timed)
    return {
        "rows": len(rows),
        "predicted": sum(row.predicted is not None for row in rows),
        "error": mean(abs(row.error or 0.0) for row in timed),
        "bias": mean(row.error for row in timed),
        "workloads": len(pairs),
        "spearman": mean(order(*pair, rules) for pair in pairs),
        "order": order(*seconds(timed), rules),
        "regret": mean(costs),
        "worst_regret": max(costs, default=None),
        "memory_rows": len(held),
        "memory_error": mean(abs(row.memory_error or 0.0) for row in held),
        "memory_bias": mean(row.memory_error for row in held),
        "memory_large_rows": len(large),
        "memory_large_error": mean(abs(row.memory_error or 0.0) for row in large),
        "memory_below": sum((row.memory_error or 0) < -rules.below for row in held),
        "unfit": sum(row.predicted is not None and not row.predicted.fits for row in rows),
        "utilisation": order(*shares(timed), rules) if one_type else None,
    }


def workload(row: Compared) -> str:
    """What is compared with each other; empty for rows that stand alone."""
    return row.published.workload or ""


def seconds(rows: Iterable[Compared]) -> tuple[list[float], list[float]]:
    """Measured and predicted ones, of rows that have both."""
    both = [
        (row.published.seconds, row.predicted.seconds)
        for row in rows
        if row.published.seconds and row.predicted
    ]
    return [pair[0] for pair in both], [pair[1] for pair in both]


def shares(rows: Iterable[Compared]) -> tuple[list[float], list[float]]:
    """Published utilisation, and what it would be in the predicted seconds."""
    both = [(row.published.utilisation or 0.0, 1 + (row.error or 0.0)) for row in rows]
    return [share for share, _ in both], [share / longer for share, longer in both]


def summary(rows: Sequence[Compared]) -> dict[str, Any]:
    """The figures of a set as a whole, by file, by GPU type or operator."""
    return {
        **summarised(rows),
        "files": {name: summarised(part) for name, part in groups(rows, attrgetter("file"))},
        "kinds": {name: summarised(part) for name, part in groups(rows, kind) if name},
    }
