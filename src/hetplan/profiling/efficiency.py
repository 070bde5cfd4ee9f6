"""Learned efficiency: which share of its peak an operator or a collective reaches, from measured
ones.

An operator's ideal seconds are the roofline's, max(FLOPs / peak, bytes / bandwidth), with nothing
lost; those of a collective are a ring's (or one message's) on a link that loses nothing, whose
bandwidth is the most that any of them reached in its kind of group. The efficiency is ideal /
measured, in (0, 1]. Gradient-boosted trees (XGBoost) learn its logarithm: of operators from their
sizes, products and elementwise operators apart; of collectives from operation, kind of group, ranks
and bytes, never falling as bytes grow, so that latency is part of it. Source: Astra, Section 3.5.
What was never measured keeps the plain roofline.

Files: `hetplan-operators` (measured operators of one device), `hetplan-efficiency` and
`hetplan-link-efficiency` (trees, with what they were trained from and how wrong they are on samples
kept apart).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetplan.errors import InputError, UnsupportedError
from hetplan.profiling.measured import OPERATIONS, Collectives
from hetplan.profiling.operators import Operator, Precision, Shape
from hetplan.profiling.profile import Provenance
from hetplan.schema import (
    Document,
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Seconds,
    StrictModel,
)

Floats = NDArray[np.float64]
Kind = Literal["product", "elementwise"]
KINDS: tuple[Kind, ...] = ("product", "elementwise")
Group = Literal["node", "between", "all"]
# A kind of group, and where its efficiency is looked up, the nearest first.
NEAREST: dict[Group, tuple[Group, ...]] = {
    "node": ("node", "all", "between"),
    "between": ("between", "all", "node"),
    "all": ("all", "between", "node"),
}
SETTINGS = {"max_depth": 3, "eta": 0.1, "objective": "reg:squarederror", "nthread": 1, "seed": 0}


@dataclass(frozen=True)
class Training:
    """How trees are fitted to logarithms of efficiencies."""

    rounds: int
    """Trees; more fit finer and take longer to ask."""
    floor: float
    """No efficiency is less: what is slower was disturbed."""
    rising: bool = False
    """Whether the efficiency may not fall as the first feature grows."""
    apart: float = 0.2
    """Share of the samples that is kept apart from training."""
    least: int = 20
    """Samples; trees from fewer say nothing."""


OF_OPERATORS = Training(rounds=100, floor=1e-3)
OF_LINKS = Training(rounds=120, floor=1e-6, rising=True)


@dataclass(frozen=True)
class Fit:
    """Trees as XGBoost's JSON, and seconds that were predicted of the samples kept apart."""

    trees: str
    used: list[int]
    apart: list[int]
    predicted: Floats
    """[apart] with the trees."""
    plain: Floats
    """[apart] at the median efficiency of the others."""


def fit(how: Training, rows: Floats, ideal: Floats, seconds: Floats, seed: int) -> Fit:
    """Trees of ideal / seconds [N] from features `rows` [N, F]; `seed` says what is kept apart."""
    xgboost = xgboost_library()
    efficiency = np.clip(ideal / seconds, how.floor, 1.0)
    order = list(range(len(rows)))
    Random(seed).shuffle(order)
    cut = max(round(how.apart * len(order)), 1)
    apart, used = order[:cut], order[cut:]
    settings: dict[str, Any] = dict(SETTINGS)
    if how.rising:
        settings["monotone_constraints"] = "(1" + ",0" * (rows.shape[1] - 1) + ")"
    data = xgboost.DMatrix(rows[used], np.log(efficiency[used]))
    booster = xgboost.train(settings, data, how.rounds)
    return Fit(
        trees=bytes(booster.save_raw("json")).decode(),
        used=used,
        apart=apart,
        predicted=ideal[apart] / shares(how, booster, rows[apart]),
        plain=ideal[apart] / np.median(efficiency[used]),
    )


def shares(how: Training, booster: Any, rows: Floats) -> Floats:
    """Efficiencies [N] that trees tell of features [N, F]."""
    logs = booster.predict(xgboost_library().DMatrix(rows))
    return np.asarray(np.exp(np.clip(logs, np.log(how.floor), 0.0)), float)


def mean_error(predicted: Floats, seconds: Floats) -> float:
    """Mean |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted / seconds - 1)))


def booster_of(trees: str, what: str, where: str) -> Any:
    """Trees ready to ask; raises InputError where the text is none."""
    xgboost = xgboost_library()
    try:
        json.loads(trees)
        return xgboost.Booster(model_file=bytearray(trees, "utf-8"))
    except (ValueError, xgboost.core.XGBoostError):
        raise InputError(f"{what} cannot be read", where=where) from None


def xgboost_library() -> Any:
    """The library; raises UnsupportedError where it is not installed."""
    try:
        import xgboost
    except ImportError:
        raise UnsupportedError(
            "learned efficiency needs xgboost; install hetplan with its extra: "
            "pip install 'hetplan[learn]'"
        ) from None
    return xgboost


class MeasuredOperator(StrictModel):
    """`count` products of m x k by k x n, or an elementwise operator (all four 0) that moves
    `elements`."""

    kind: Kind
    count: NonNegative = 0.0
    m: NonNegative = 0.0
    k: NonNegative = 0.0
    n: NonNegative = 0.0
    elements: Positive
    seconds: Annotated[Seconds, Field(gt=0)]
    spread_seconds: Seconds = 0.0

    @property
    def shape(self) -> Shape:
        """Its products, all 0 for an elementwise operator."""
        return Shape(self.count, self.m, self.k, self.n)


class OperatorData(Document):
    """Operators measured on one device. peaks: FLOP/s and bytes/s that nothing on it exceeds."""

    format: Literal["hetplan-operators"] = "hetplan-operators"
    version: Literal[1] = 1
    device: Name
    precision: Precision
    element_bytes: PositiveCount
    flops_per_second: Positive
    bytes_per_second: Positive
    provenance: Provenance
    operators: list[MeasuredOperator] = Field(min_length=1)


class TrainedKind(StrictModel):
    """Trees of one kind of operator, as XGBoost's JSON.

    error, roofline_error: mean |predicted / measured - 1| of the seconds of operators kept apart,
    with the trees and with the plain roofline at its median efficiency.
    """

    kind: Kind
    trained_on: PositiveCount
    kept_apart: PositiveCount
    error: NonNegative
    roofline_error: NonNegative
    trees: str


class EfficiencyFile(Document):
    """What was learned on one device."""

    format: Literal["hetplan-efficiency"] = "hetplan-efficiency"
    version: Literal[1] = 1
    device: Name
    precision: Precision
    flops_per_second: Positive
    bytes_per_second: Positive
    provenance: Provenance
    kinds: list[TrainedKind] = Field(min_length=1)


load_operators, load_efficiency = OperatorData.load, EfficiencyFile.load


@cache
def packaged(device: str, precision: str) -> EfficiencyFile | None:
    """What comes with hetplan of a device type, by the name that it was measured under; None of
    most."""
    for path in sorted(Path(__file__).with_name("learned").glob("*.efficiency.json.gz")):
        file = load_efficiency(path)
        if (file.device, file.precision) == (device, precision):
            return file
    return None


def features(shape: Shape, elements: float) -> list[float]:
    """What trees see of an operator: logarithms of its sizes, FLOPs, elements and of FLOPs per
    element."""
    sizes = (shape.count, shape.m, shape.k, shape.n, elements)
    return [float(np.log2(1 + v)) for v in (*sizes, shape.flops, shape.flops / elements)]


def train(data: OperatorData, seed: int = 0) -> EfficiencyFile:
    """Trees from measured operators; a fifth is kept apart, by `seed`. Raises InputError for too
    few operators."""
    kinds = []
    for kind in KINDS:
        chosen = [op for op in data.operators if op.kind == kind]
        if len(chosen) < OF_OPERATORS.least:
            continue
        rows = np.array([features(op.shape, op.elements) for op in chosen])
        flops = np.array([op.shape.flops for op in chosen])
        moved = np.array([op.elements for op in chosen]) * data.element_bytes
        ideal = np.maximum(flops / data.flops_per_second, moved / data.bytes_per_second)
        seconds = np.array([op.seconds for op in chosen])
        made = fit(OF_OPERATORS, rows, ideal, seconds, seed)
        kinds.append(
            TrainedKind(
                kind=kind,
                trained_on=len(made.used),
                kept_apart=len(made.apart),
                error=mean_error(made.predicted, seconds[made.apart]),
                roofline_error=mean_error(made.plain, seconds[made.apart]),
                trees=made.trees,
            )
        )
    if not kinds:
        expected = f"at least {OF_OPERATORS.least}"
        raise InputError("too few operators of a kind", got=len(data.operators), expected=expected)
    return EfficiencyFile(
        device=data.device, precision=data.precision, flops_per_second=data.flops_per_second,
        bytes_per_second=data.bytes_per_second, provenance=data.provenance, kinds=kinds,
    )  # fmt: skip


@dataclass(frozen=True)
class Learned:
    """Trees of one device, ready to ask; kinds that were not trained have none."""

    file: EfficiencyFile

    @cached_property
    def _boosters(self) -> dict[str, Any]:
        return {
            trained.kind: booster_of(trained.trees, f"trees of {trained.kind}", self.file.device)
            for trained in self.file.kinds
        }

    def seconds(
        self, op: Operator, micro_batch: int, tensor: int, element_bytes: int
    ) -> float | None:
        """Forward seconds of an operator, None where its kind was not trained."""
        shape = op.shape(micro_batch, tensor) or Shape(0, 0, 0, 0)
        moved = max(op.moved(micro_batch, tensor), 1.0)
        booster = self._boosters.get("product" if shape.count else "elementwise")
        if booster is None:
            return None
        rows = np.array([features(shape, moved)])
        ideal = max(
            shape.flops / self.file.flops_per_second,
            moved * element_bytes / self.file.bytes_per_second,
        )
        return ideal / float(shares(OF_OPERATORS, booster, rows)[0])


class LinkEfficiencyFile(Document):
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


load_link_efficiency = LinkEfficiencyFile.load


def moved_share(operation: str, ranks: int) -> float:
    """Bytes that pass a rank's slowest link per byte of its own, at best.

    Rings: Patarasuk and Yuan 2009. A rank's own bytes are what it sends (send), gives to all
    (gathers), or has of what is reduced or exchanged, all parts together.
    """
    rest = ranks - 1
    gathers = {"all-gather": rest, "grouped-broadcast": rest}
    at_best = {"send": 1.0, "all-reduce": 2 * rest / ranks, **gathers}
    return at_best.get(operation, rest / ranks)


def link_features(operation: str, group: str, ranks: int, size: float) -> list[float]:
    """What trees see: bytes and ranks as logarithms, then which operation and group."""
    return [
        float(np.log2(size)),
        float(np.log2(ranks)),
        *(float(operation == known) for known in OPERATIONS),
        *(float(group == known) for known in NEAREST),
    ]


def train_links(files: Sequence[Collectives], seed: int = 0) -> LinkEfficiencyFile:
    """Trees from measured collectives; a fifth is kept apart, by `seed`.

    Raises InputError for too few, and where files are of different devices or back ends.
    """
    for key, file in product(("device", "backend"), files):
        got, expected = getattr(file, key), getattr(files[0], key)
        if got != expected:
            raise InputError(f"collectives of another {key}", got=got, expected=repr(expected))
    measured = [(of, p) for file in files for of in file.fits for p in of.points]
    if len(measured) < OF_LINKS.least:
        expected = f"at least {OF_LINKS.least}"
        raise InputError("too few measured messages", got=len(measured), expected=expected)
    moved = np.array([moved_share(of.operation, of.ranks) * p.bytes for of, p in measured])
    seconds = np.array([p.seconds for _, p in measured])
    groups = np.array([of.group for of, _ in measured])
    best = {g: float((moved / seconds)[groups == g].max()) for g in NEAREST if g in groups}
    rows = np.array(
        [link_features(of.operation, of.group, of.ranks, p.bytes) for of, p in measured]
    )
    ideal = moved / np.array([best[of.group] for of, _ in measured])
    lines = np.array([of.seconds(p.bytes) for of, p in measured])
    made = fit(OF_LINKS, rows, ideal, seconds, seed)
    return LinkEfficiencyFile(
        device=files[0].device,
        backend=files[0].backend,
        provenance=files[0].provenance,
        bytes_per_second=best,
        trained_on=len(made.used),
        kept_apart=len(made.apart),
        error=mean_error(made.predicted, seconds[made.apart]),
        plain_error=mean_error(made.plain, seconds[made.apart]),
        line_error=mean_error(lines[made.apart], seconds[made.apart]),
        trees=made.trees,
    )


@dataclass(frozen=True, eq=False)
class LearnedLinks:
    """Trees ready to ask. Efficiencies are asked for at powers of two, once, with straight lines
    between."""

    file: LinkEfficiencyFile
    _known: dict[tuple[str, str, int], Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def _booster(self) -> Any:
        return booster_of(self.file.trees, "trees", f"links of {self.file.device}")

    def share(self, operation: str, group: Group, ranks: int, size: float) -> float:
        """The share of the link's bandwidth, in (0, 1]; of a group that was not measured that of
        the next wider."""
        near = next(g for g in NEAREST[group] if g in self.file.bytes_per_second)
        key, powers = (operation, near, ranks), np.arange(8.0, 33.0)
        if key not in self._known:
            rows = np.array([link_features(operation, near, ranks, 2.0**p) for p in powers])
            self._known[key] = np.log(shares(OF_LINKS, self._booster, rows))
        return float(np.exp(np.interp(np.log2(max(size, 1.0)), powers, self._known[key])))
