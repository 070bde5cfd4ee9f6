"""CSV files of published measurements: their cells, and what is said about a row; how well
predictions hold: errors, order within a workload, what a wrong pick costs."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from hetplan.errors import InputError, require as require_input
from hetplan.files import read_bytes

GIB = 2**30


class NotPosedError(InputError):
    """A published run that hetplan cannot say; the text is the reason."""


class DamagedError(InputError):
    """A table that cannot be read; says file, row and column."""


# Raise NotPosedError unless a row is of the kind that can be said; DamagedError unless a table is
# in order.
require = partial(require_input, kind=NotPosedError)
require_intact = partial(require_input, kind=DamagedError)


@dataclass(frozen=True)
class Cells:
    """A row's texts by column. where: file and row, for messages. by_hand: what should be a whole
    number may be another text, and is then the row's reason, not the file's fault."""

    where: str
    texts: Mapping[str, str]
    by_hand: bool = False

    def text(self, column: str) -> str:
        """As it stands; raises DamagedError without such a column."""
        file, columns = self.where.rpartition(": row ")[0], ", ".join(self.texts)
        present = column in self.texts
        require_intact(present, "column is missing", where=file, got=columns, expected=column)
        return self.texts[column].strip()

    def __getitem__(self, column: str) -> str:
        """As `text`, so that a format string of columns can be filled by `format_map`."""
        return self.text(column)

    def number(self, column: str) -> float | None:
        """A finite number >= 0, None for an empty cell; raises DamagedError."""
        text = self.text(column)
        try:
            value = float(text or "0")
        except ValueError:
            value = math.nan
        require_intact(
            0 <= value < math.inf,
            "is no number",
            where=f"{self.where}: {column}",
            got=text,
            expected="a number >= 0",
        )
        return value if text else None

    def whole(self, column: str, default: int | None = None) -> int:
        """A whole number from 1 on (from 0 where 0 is the default), or the default for an empty
        cell; raises DamagedError, or where people wrote the table NotPosedError."""
        text = self.text(column)
        if not text and default is not None:
            return default
        stated = f"{column} is {text!r}" if text else f"{column} is not stated"
        require(not self.by_hand or text.replace(".0", "").isdecimal(), stated)
        value = self.number(column)
        if value is None or not value.is_integer() or value > 1e9:
            raise DamagedError("is no whole number", where=f"{self.where}: {column}", got=text)
        require(value > 0 or default == 0, f"{column} is 0")
        return int(value)

    def flag(self, column: str) -> bool:
        """`True`; an empty cell and anything else are not."""
        return self.text(column).lower() == "true"


def read_table(path: Path, *, by_hand: bool = False) -> Iterator[Cells]:
    """The rows of a CSV file (`.gz`: unpacked); raises InputError naming file, row, column."""
    where = str(path)
    try:
        lines = csv.reader(io.StringIO(read_bytes(path).decode("utf-8"), newline=""), strict=True)
        table = [line for line in lines if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedError(f"is no table: {error}", where=where) from None
    require_intact(
        len(table) >= 2, "has no rows", where=where, expected="a header and at least one row"
    )
    header, *rows = table
    for i, row in enumerate(rows):
        place = f"{where}: row {i}"
        require_intact(
            len(row) == len(header),
            "number of cells",
            where=place,
            got=len(row),
            expected=f"{len(header)}",
        )
        yield Cells(place, dict(zip(header, row, strict=True)), by_hand)


@dataclass(frozen=True)
class Published:
    """What a source says of a row; None where it is silent.

    workload: equal for rows that compare plans of one model, batch and GPUs. seconds: of an
    iteration or operator. held_bytes: on the fullest GPU. utilisation: of the peak by the model's
    FLOPs. kind: GPU type, or operator and device. cell: of a grid of plans, what decides the
    seconds of a layer, so that rows of one cell err alike. scored: whether the seconds say how
    right a prediction is, or an order of magnitude only.
    """

    workload: str | None
    seconds: float | None
    held_bytes: float | None = None
    utilisation: float | None = None
    kind: str = ""
    cell: str = ""
    scored: bool = True


@dataclass(frozen=True)
class Predicted:
    """seconds of an iteration or operator, bytes on the fullest device, whether they fit. interval:
    of an operator, seconds between which eight in ten measurements are said to lie."""

    seconds: float
    peak_bytes: float | None = None
    fits: bool = True
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ranked:
    """A configuration among all of its model, batch and GPUs. own: in closed form. place: share of
    those that fit and are no faster; count: of all that fit. best, best_seconds: the fastest. why:
    where the difference lies, the largest first: seconds of the configuration and of the best."""

    own: Predicted
    place: float
    count: int
    best: str
    best_seconds: float
    why: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class Source:
    """How the rows of a file are read: what was published, and what hetplan predicts (raises
    NotPosedError, or InputError as `replay` does). job: of runs, what was configured.
    by_hand: see `Cells`. passed_over: number of a row -> why it is not predicted beside the others.
    """

    published: Callable[[Cells], Published]
    predicted: Callable[[Cells], Predicted]
    job: Callable[[Cells], Any] | None = None
    by_hand: bool = False
    passed_over: Callable[[Sequence[Cells]], Mapping[int, str]] = lambda rows: {}


@dataclass(frozen=True)
class Compared:
    """One published row beside its prediction, or beside the reason why there is none."""

    file: str
    row: int
    published: Published
    predicted: Predicted | None
    reason: str | None = None
    ranked: Ranked | None = None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured seconds; None where one is unknown or not scored."""
        seconds = self.published.seconds if self.published.scored else None
        return self.predicted.seconds / seconds - 1 if self.predicted and seconds else None

    @property
    def held(self) -> bool | None:
        """Whether the measurement lies in the predicted interval; None where one is unknown."""
        seconds = self.published.seconds
        if not seconds or self.predicted is None or self.predicted.interval is None:
            return None
        low, high = self.predicted.interval
        return low <= seconds <= high

    @property
    def memory_error(self) -> float | None:
        """(predicted - measured) / measured bytes; None where one is unknown."""
        held = self.published.held_bytes
        peak = self.predicted.peak_bytes if self.predicted else None
        return peak / held - 1 if peak is not None and held else None

    def document(self) -> dict[str, Any]:
        """As JSON types; the interval and the ranking only where there is one."""
        interval = self.predicted.interval if self.predicted else None
        low, high = interval or (None, None)
        return {
            "file": self.file,
            "row": self.row,
            "workload": self.published.workload,
            "measured_seconds": self.published.seconds,
            "predicted_seconds": self.predicted.seconds if self.predicted else None,
            "measured_bytes": self.published.held_bytes,
            "predicted_bytes": self.predicted.peak_bytes if self.predicted else None,
            "reason": self.reason,
            **({"predicted_low_seconds": low, "predicted_high_seconds": high} if interval else {}),
            **({"ranked": asdict(self.ranked)} if self.ranked else {}),
        }


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
    cells, cell_error: number of cells, and the error where each of them counts once. held: share of
    measurements in the predicted interval, which should be eight in ten.
    spearman: mean over workloads; order: Spearman's of all rows. regret, worst_regret: over
    workloads of several plans. memory_…: the same of bytes; memory_below: rows whose memory is
    predicted too low by more than 5 %. unfit: rows that ran and are said not to fit. utilisation:
    of rows of one GPU type, Spearman's of model FLOPs utilisation; the prediction's is the
    published one times measured / predicted seconds.
    """
    timed = [row for row in rows if row.error is not None]
    pairs = [
        measured_and_predicted(part)
        for name, part in groups(timed, workload)
        if name and len(part) > 1
    ]
    costs = [regret(*pair) for pair in pairs]
    errors = [row.error for row in timed if row.error is not None]
    cells = {
        name: float(np.mean([abs(row.error) for row in part if row.error is not None]))
        for name, part in groups(timed, attrgetter("published.cell"))
        if name
    }
    with_memory = [row for row in rows if row.memory_error is not None]
    memory_errors = [row.memory_error for row in with_memory if row.memory_error is not None]
    large = [row for row in with_memory if (row.published.held_bytes or 0) >= rules.large]
    large_errors = [row.memory_error for row in large if row.memory_error is not None]
    predicted = [row.predicted for row in rows if row.predicted is not None]
    one_type = len(set(map(kind, timed))) == 1 and all(row.published.utilisation for row in timed)
    return {
        "rows": len(rows),
        "predicted": len(predicted),
        "error": mean(map(abs, errors)),
        "bias": mean(errors),
        "cells": len(cells),
        "cell_error": mean(cells.values()),
        "held": mean(row.held for row in timed),
        "workloads": len(pairs),
        "spearman": mean(order(*pair, rules) for pair in pairs),
        "order": order(*measured_and_predicted(timed), rules),
        "regret": mean(costs),
        "worst_regret": max(costs, default=None),
        "memory_rows": len(with_memory),
        "memory_error": mean(map(abs, memory_errors)),
        "memory_bias": mean(memory_errors),
        "memory_large_rows": len(large),
        "memory_large_error": mean(map(abs, large_errors)),
        "memory_below": sum(error < -rules.below for error in memory_errors),
        "unfit": sum(not prediction.fits for prediction in predicted),
        "utilisation": order(*shares(timed), rules) if one_type else None,
    }


def workload(row: Compared) -> str:
    """What is compared with each other; empty for rows that stand alone."""
    return row.published.workload or ""


def measured_and_predicted(rows: Iterable[Compared]) -> tuple[list[float], list[float]]:
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
