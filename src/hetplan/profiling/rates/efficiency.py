"""Measured efficiency: how much longer than expected a device's operators and links take.

An operator's expected seconds are those of measured rates and physics (`hetplan.profiling.rates`).
Operators that a user measured on the device itself, ten or some hundreds, say how much longer it
takes: the logarithm of measured / expected seconds is smoothed over the logarithms of the sizes,
products and memory-bound operators apart, by a Gaussian process with a general factor (Rasmussen
and Williams 2006, chapter 2). What was measured nearby counts there, and elsewhere the general
factor.

A collective's efficiency is the share that it reaches of the bandwidth that its kind of group
reaches at best, by operation, ranks and bytes; it never falls as bytes grow, so that latency is
part of it.

Files: `hetplan-operators` (measured operators of one device, with how wrong each is predicted from
the others once it was trained) and `hetplan-link-efficiency`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import DeviceSpec, Floats, catalogue
from hetplan.profiling.models.operators import Operator, Precision, Shape
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.profiles.profile import Provenance
from hetplan.profiling.rates.products import move_seconds, products_seconds
from hetplan.schema import (
    Document,
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Seconds,
    StrictModel,
)
from hetplan.text import grouped

Kind = Literal["product", "elementwise"]
KINDS: tuple[Kind, ...] = ("product", "elementwise")
Group = Literal["node", "between", "all"]
# A kind of group, and where its efficiency is looked up, the nearest first.
LEAST_MESSAGES = 20
NEAREST: dict[Group, tuple[Group, ...]] = {
    "node": ("node", "all", "between"),
    "between": ("between", "all", "node"),
    "all": ("all", "between", "node"),
}


@dataclass(frozen=True)
class Smoothing:
    """Of logarithms of measured / expected seconds over logarithms (base 2) of sizes.

    length: over how many doublings two sizes still tell of each other. spread: standard deviation
    of what depends on sizes. general: of the device's general factor. noise: of one measurement.
    Chosen on vidur's A100, A40 and H100 and on the packaged processor, each predicted from 5 to 100
    operators of its own. largest: operators that are taken into account, because seconds grow with
    their cube.
    """

    length: float = 4.0
    spread: float = 0.5
    general: float = 1.0
    noise: float = 0.2
    largest: int = 2000


SMOOTHING = Smoothing()


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


class KindError(StrictModel):
    """Of one kind of operator: mean |predicted / measured - 1| of the seconds of each, predicted
    from the others (error) and as expected without any (expected_error)."""

    kind: Kind
    operators: PositiveCount
    error: NonNegative
    expected_error: NonNegative


class OperatorData(Document):
    """Operators measured on one device. peaks: FLOP/s and bytes/s that nothing on it exceeds.

    bus_bytes_per_second: what a large all-reduce over this machine's devices reached, as bus
    bandwidth (bytes that pass each link). errors: as `hetplan profile train` measured them.
    """

    format: Literal["hetplan-operators"] = "hetplan-operators"
    version: Literal[1] = 1
    device: Name
    precision: Precision
    element_bytes: PositiveCount
    flops_per_second: Positive
    bytes_per_second: Positive
    provenance: Provenance
    operators: list[MeasuredOperator] = Field(min_length=1)
    bus_bytes_per_second: Positive | None = None
    errors: list[KindError] = Field(default_factory=list)

    def spec(self) -> DeviceSpec:
        """The catalogue's entry, or else one of the peaks."""
        return catalogue().get(self.device) or DeviceSpec(
            memory_gib=1.0,
            peak_tflops={self.precision: self.flops_per_second / 1e12},
            memory_gb_per_s=self.bytes_per_second / 1e9,
            source="measured operators",
        )


@cache
def packaged(device: str, precision: str) -> OperatorData | None:
    """What comes with hetplan of a device type, by the name that it was measured under; None of
    most."""
    for path in sorted(Path(__file__).with_name("learned").glob("*.operators.json.gz")):
        file = OperatorData.load(path)
        if (file.device, file.precision) == (device, precision):
            return file
    return None


def sizes_of(shape: Shape, elements: float) -> list[float]:
    """Logarithms (base 2): of count, m, k, n and of all results; or of elements moved."""
    if not shape.count:
        return [math.log2(elements)]
    results = shape.count * shape.m * shape.n
    return [math.log2(max(size, 1.0)) for size in (shape.count, shape.m, shape.k, shape.n, results)]


@dataclass(frozen=True, eq=False)
class Correction:
    """A Gaussian process of logarithms at sizes [N, F]."""

    rows: Floats
    logs: Floats
    smoothing: Smoothing = SMOOTHING

    def covariance(self, one: Floats, other: Floats) -> Floats:
        """[N, M] between rows."""
        far = ((one[:, None] - other[None]) ** 2).sum(axis=2)
        return np.asarray(
            self.smoothing.general**2
            + self.smoothing.spread**2 * np.exp(-far / (2 * self.smoothing.length**2))
        )

    @cached_property
    def inverse(self) -> Floats:
        """[N, N] of the covariance with noise."""
        return np.asarray(
            np.linalg.inv(
                self.covariance(self.rows, self.rows)
                + self.smoothing.noise**2 * np.eye(len(self.rows))
            )
        )

    @cached_property
    def weights(self) -> Floats:
        """[N] of each row's covariance."""
        return self.inverse @ self.logs

    def at(self, row: Sequence[float]) -> float:
        """The logarithm expected at a row."""
        return float(self.covariance(np.array([row]), self.rows)[0] @ self.weights)

    def residuals(self) -> Floats:
        """[N] logarithms of measured / predicted where each row is predicted from the others
        (Rasmussen and Williams, equation 5.12)."""
        return np.asarray(self.weights / np.diag(self.inverse))


@dataclass(frozen=True)
class Learned:
    """What a device's own operators say; `spec` is what its expected seconds follow from."""

    data: OperatorData
    spec: DeviceSpec

    @cached_property
    def corrections(self) -> dict[Kind, Correction]:
        """Of the kinds that were measured."""
        corrections: dict[Kind, Correction] = {}
        for kind in KINDS:
            chosen = [op for op in self.data.operators if op.kind == kind][: SMOOTHING.largest]
            if chosen:
                corrections[kind] = Correction(
                    np.array([sizes_of(op.shape, op.elements) for op in chosen]),
                    np.log(np.array([op.seconds for op in chosen]) / self.expected(chosen)),
                )
        return corrections

    def expected(self, operators: Iterable[MeasuredOperator]) -> Floats:
        """Seconds of operators of one kind, before any of them was measured."""
        data, chosen = self.data, list(operators)
        estimates = (
            products_seconds(
                data.device, self.spec, data.precision, tuple(op.shape for op in chosen)
            )
            if chosen[0].kind == "product"
            else tuple(
                move_seconds("pointwise", op.elements * data.element_bytes, data.device, self.spec)
                for op in chosen
            )
        )
        return np.array([estimate.seconds for estimate in estimates])

    def factor(self, op: Operator, micro_batch: int, tensor: int) -> float:
        """Measured over expected seconds of an operator; 1 where its kind was not measured."""
        shape = op.shape(micro_batch, tensor) or Shape(0, 0, 0, 0)
        correction = self.corrections.get("product" if shape.count else "elementwise")
        return (
            1.0
            if correction is None
            else math.exp(correction.at(sizes_of(shape, max(op.moved(micro_batch, tensor), 1.0))))
        )


def train(data: OperatorData) -> OperatorData:
    """The same with its errors; raises InputError where no kind has two operators."""
    errors = [
        KindError(
            kind=kind,
            operators=len(correction.logs),
            error=mean_error(np.exp(-correction.residuals())),
            expected_error=mean_error(np.exp(-correction.logs)),
        )
        for kind, correction in Learned(data, data.spec()).corrections.items()
        if len(correction.logs) > 1
    ]
    require(
        errors,
        "too few operators",
        got=len(data.operators),
        expected="at least 2 of a kind",
    )
    return data.model_copy(update={"errors": errors})


def mean_error(shares: Floats) -> float:
    """Mean |predicted / measured - 1| of predicted / measured."""
    return float(np.mean(np.abs(shares - 1)))


class LinkCurve(StrictModel):
    """Shares of the best bandwidth that one operation of so many ranks reaches, by bytes: straight
    lines between logarithms."""

    operation: Name
    group: Group
    ranks: PositiveCount
    bytes: list[Positive]
    share: list[Positive]


class LinkEfficiencyFile(Document):
    """What was learned of one device's links. bytes_per_second: the most reached, by kind of group.

    error: mean |predicted / measured - 1| of the seconds of messages kept apart from the curves;
    plain_error: of the same at the median efficiency; line_error: of each operation's latency and
    bandwidth, which were fitted with those messages among them.
    """

    format: Literal["hetplan-link-efficiency"] = "hetplan-link-efficiency"
    version: Literal[2] = 2
    device: Name
    backend: Name
    provenance: Provenance
    bytes_per_second: dict[Group, Positive]
    trained_on: PositiveCount
    kept_apart: PositiveCount
    error: NonNegative
    plain_error: NonNegative
    line_error: NonNegative
    curves: list[LinkCurve] = Field(min_length=1)


def moved_share(operation: str, ranks: int) -> float:
    """Bytes that pass a rank's slowest link per byte of its own, at best.

    Rings: Patarasuk and Yuan 2009. A rank's own bytes are what it sends (send), gives to all
    (gathers), or has of what is reduced or exchanged, all parts together.
    """
    rest = ranks - 1
    gathers = {"all-gather": rest, "grouped-broadcast": rest}
    return {"send": 1.0, "all-reduce": 2 * rest / ranks, **gathers}.get(operation, rest / ranks)


Message = tuple[str, Group, int, float, float]  # operation, group, ranks, bytes, share


def link_curves(messages: Iterable[Message]) -> list[LinkCurve]:
    """One curve for each operation, group and number of ranks; shares never fall."""
    points = grouped((message[:3], message[3:]) for message in sorted(messages))
    return [
        LinkCurve(
            operation=operation,
            group=group,
            ranks=ranks,
            bytes=[size for size, _ in of],
            share=np.maximum.accumulate([share for _, share in of]).tolist(),
        )
        for (operation, group, ranks), of in points.items()
    ]


def share_of(
    curves: Sequence[LinkCurve], operation: str, group: Group, ranks: int, size: float
) -> float:
    """By the curve of the operation (else of another), the nearest group and number of ranks.

    Messages smaller than the smallest take as long as it.
    """
    curve = min(
        curves,
        key=lambda c: (
            c.operation != operation,
            NEAREST[group].index(c.group),
            abs(math.log(c.ranks / ranks)),
        ),
    )
    known = math.log(max(size, 1.0)), np.log(curve.bytes), np.log(curve.share)
    return math.exp(np.interp(*known)) * min(max(size, 1.0) / curve.bytes[0], 1.0)


def train_links(files: Sequence[Collectives], seed: int = 0) -> LinkEfficiencyFile:
    """Curves from measured collectives; for the errors a fifth is kept apart, by `seed`.

    Raises InputError for too few, and where files are of different devices or back ends.
    """
    for key, file in product(("device", "backend"), files):
        got, expected = getattr(file, key), getattr(files[0], key)
        require(got == expected, f"collectives of another {key}", got=got, expected=repr(expected))
    measured = [(of, p) for file in files for of in file.fits for p in of.points]
    require(
        len(measured) >= LEAST_MESSAGES,
        "too few measured messages",
        got=len(measured),
        expected=f"at least {LEAST_MESSAGES}",
    )
    moved = np.array([moved_share(of.operation, of.ranks) * p.bytes for of, p in measured])
    seconds = np.array([p.seconds for _, p in measured])
    groups = np.array([of.group for of, _ in measured])
    best = {g: float((moved / seconds)[groups == g].max()) for g in NEAREST if g in groups}
    ideal = moved / np.array([best[of.group] for of, _ in measured])
    messages: list[Message] = [
        (of.operation, of.group, of.ranks, p.bytes, share)
        for (of, p), share in zip(measured, (ideal / seconds).tolist(), strict=True)
    ]
    order = list(range(len(measured)))
    Random(seed).shuffle(order)
    cut = round(len(order) / 5)
    apart, used = order[:cut], order[cut:]
    curves = link_curves(messages[i] for i in used)
    predicted = np.array([share_of(curves, *messages[i][:4]) for i in apart])
    lines = np.array([of.operation_seconds(p.bytes) for of, p in measured])
    ratio = ideal[apart] / seconds[apart]
    return LinkEfficiencyFile(
        device=files[0].device,
        backend=files[0].backend,
        provenance=files[0].provenance,
        bytes_per_second=best,
        trained_on=len(used),
        kept_apart=len(apart),
        error=mean_error(ratio / predicted),
        plain_error=mean_error(ratio / np.median((ideal / seconds)[used])),
        line_error=mean_error((lines / seconds)[apart]),
        curves=link_curves(messages),
    )


@dataclass(frozen=True)
class LearnedLinks:
    """Curves ready to ask."""

    file: LinkEfficiencyFile

    def share(self, operation: str, group: Group, ranks: int, size: float) -> float:
        """The share of the link's bandwidth, in (0, 1]; of a group that was not measured that of
        the next wider."""
        return share_of(self.file.curves, operation, group, ranks, size)
