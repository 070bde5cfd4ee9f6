"""Learned efficiency of communication: which share of a link's bandwidth a collective reaches, from
measured ones.

A collective's ideal seconds are those of a ring (or of one message) on a link that loses nothing;
its efficiency is ideal / measured, in (0, 1]. The link's bandwidth is the most that any of them
reached in its kind of group. Gradient- boosted trees (XGBoost) learn it from operation, kind of
group, ranks and bytes, never falling as bytes grow: latency is part of it. Source: Astra, Section
3.5 (efficiency of communication as of computation).

File: `hetplan-link-efficiency`, written by `hetplan profile train` from files of `hetplan profile
--collectives`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.files import read_json, to_json, write_text
from hetplan.profiling.collectives import OPERATIONS, Collectives
from hetplan.profiling.efficiency import APART, LEAST, SETTINGS, SMALLEST, xgboost_library
from hetplan.profiling.profile import Provenance
from hetplan.schema import (
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    StrictModel,
    check_header,
    parse,
)

Floats = NDArray[np.float64]
Group = Literal["node", "between", "all"]
GROUPS: tuple[Group, ...] = ("node", "between", "all")
FORMAT, VERSION = "hetplan-link-efficiency", 1
ROUNDS = 120


class LinkEfficiencyFile(StrictModel):
    """What was learned of one device's links. bytes_per_second: the most reached, by kind of group.

    error: mean |predicted / measured - 1| of the seconds of messages kept apart; plain_error: of
    the same at the median efficiency; line_error: of each operation's latency and bandwidth, which
    were fitted with those messages among them.
    """

    format: Literal["hetplan-link-efficiency"] = "hetplan-link-efficiency"
    version: Literal[1] = 1
    device: Name
    backend: Name
    provenance: Provenance
    bytes_per_second: dict[Group, Positive]
    trained_on: PositiveCount
    kept_apart: PositiveCount
    error: NonNegative
    plain_error: NonNegative
    line_error: NonNegative
    trees: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        write_text(path, to_json(self.model_dump(mode="json")))


def load_link_efficiency(path: str | os.PathLike[str]) -> LinkEfficiencyFile:
    """Trained trees; raises InputError."""
    where, value = os.fspath(path), read_json(path)
    check_header(value, FORMAT, VERSION, where=where)
    return parse(LinkEfficiencyFile, value, where=where)


def moved_share(operation: str, ranks: int) -> float:
    """Bytes that pass a rank's slowest link per byte of its own, at best.

    Rings: Patarasuk and Yuan 2009. A rank's own bytes are what it sends (send), gives to all
    (gathers), or has of what is reduced or exchanged, all parts together.
    """
    rest = ranks - 1
    return {
        "send": 1.0,
        "all-reduce": 2 * rest / ranks,
        "all-gather": rest,
        "grouped-broadcast": rest,
    }.get(operation, rest / ranks)


@dataclass(frozen=True)
class Message:
    """One measured size: seconds of the fastest repeat; line: what the operation's fitted line
    says."""

    operation: str
    group: Group
    ranks: int
    size: float
    seconds: float
    line: float

    def ideal(self, bandwidth: float) -> float:
        """Seconds on links that lose nothing."""
        return moved_share(self.operation, self.ranks) * self.size / bandwidth


def features(operation: str, group: str, ranks: int, size: float) -> list[float]:
    """What trees see: bytes and ranks as logarithms, then which operation and group."""
    return [
        float(np.log2(size)),
        float(np.log2(ranks)),
        *(float(operation == known) for known in OPERATIONS),
        *(float(group == known) for known in GROUPS),
    ]


def messages_of(files: Sequence[Collectives]) -> list[Message]:
    """All measured sizes; raises InputError where files are of different devices or back ends."""
    for file in files[1:]:
        for key in ("device", "backend"):
            got, expected = getattr(file, key), getattr(files[0], key)
            if got != expected:
                raise InputError(f"collectives of another {key}", got=got, expected=repr(expected))
    return [
        Message(fit.operation, fit.group, fit.ranks, p.bytes, p.seconds, fit.seconds(p.bytes))
        for file in files
        for fit in file.fits
        for p in fit.points
    ]


def train_links(files: Sequence[Collectives], seed: int = 0) -> LinkEfficiencyFile:
    """Trees from measured collectives; a fifth is kept apart, by `seed`. Raises InputError for too
    few."""
    xgboost = xgboost_library()
    found = messages_of(files)
    if len(found) < LEAST:
        raise InputError("too few measured messages", got=len(found), expected=f"at least {LEAST}")
    best = {
        group: max(
            moved_share(m.operation, m.ranks) * m.size / m.seconds
            for m in found
            if m.group == group
        )
        for group in GROUPS
        if any(m.group == group for m in found)
    }
    rows = np.array([features(m.operation, m.group, m.ranks, m.size) for m in found])
    ideal = np.array([m.ideal(best[m.group]) for m in found])
    seconds, lines = np.array([m.seconds for m in found]), np.array([m.line for m in found])
    efficiency = np.clip(ideal / seconds, SMALLEST**2, 1.0)
    order = list(range(len(found)))
    Random(seed).shuffle(order)
    cut = max(round(APART * len(order)), 1)
    apart, used = order[:cut], order[cut:]
    rising = "(1" + ",0" * (rows.shape[1] - 1) + ")"
    booster = xgboost.train(
        {**SETTINGS, "monotone_constraints": rising},
        xgboost.DMatrix(rows[used], np.log(efficiency[used])),
        ROUNDS,
    )
    learned = _shares(booster, rows[apart])

    def error(predicted: Floats) -> float:
        return float(np.mean(np.abs(predicted / seconds[apart] - 1)))

    return LinkEfficiencyFile(
        device=files[0].device,
        backend=files[0].backend,
        provenance=files[0].provenance,
        bytes_per_second=best,
        trained_on=len(used),
        kept_apart=len(apart),
        error=error(ideal[apart] / learned),
        plain_error=error(ideal[apart] / np.median(efficiency[used])),
        line_error=error(lines[apart]),
        trees=bytes(booster.save_raw("json")).decode(),
    )


def _shares(booster: Any, rows: Floats) -> Floats:
    found = booster.predict(xgboost_library().DMatrix(rows))
    return np.asarray(np.exp(np.clip(found, 2 * np.log(SMALLEST), 0.0)), float)


@dataclass(frozen=True, eq=False)
class LearnedLinks:
    """Trees ready to ask. Efficiencies are asked for at powers of two, once, with straight lines
    between."""

    file: LinkEfficiencyFile
    _known: dict[tuple[str, str, int], tuple[Floats, Floats]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def _booster(self) -> Any:
        xgboost = xgboost_library()
        try:
            json.loads(self.file.trees)
            return xgboost.Booster(model_file=bytearray(self.file.trees, "utf-8"))
        except (ValueError, xgboost.core.XGBoostError):
            raise InputError("trees cannot be read", where=f"links of {self.file.device}") from None

    def share(self, operation: str, group: Group, ranks: int, size: float) -> float:
        """The share of the link's bandwidth, in (0, 1]; of a group that was not measured that of
        the next wider."""
        measured = self.file.bytes_per_second
        order: Mapping[Group, tuple[Group, ...]] = {
            "node": ("node", "all", "between"),
            "between": ("between", "all", "node"),
            "all": ("all", "between", "node"),
        }
        near = next(g for g in order[group] if g in measured)
        key = (operation, near, ranks)
        if key not in self._known:
            powers = np.arange(8.0, 33.0)
            rows = np.array([features(operation, near, ranks, 2.0**p) for p in powers])
            self._known[key] = powers, np.log(_shares(self._booster, rows))
        powers, logs = self._known[key]
        return float(np.exp(np.interp(np.log2(max(size, 1.0)), powers, logs)))
