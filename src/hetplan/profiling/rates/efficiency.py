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
LEAST_MESSAGES = 20
# For each kind of group, the kinds whose curves may stand for it, the most alike first.
NEAREST: dict[Group, tuple[Group, ...]] = {
    "node": ("node", "all", "between"),
    "between": ("between", "all", "node"),
    "all": ("all", "between", "node"),
}


@dataclass(frozen=True)
class Smoothing:
    """The parameters of the Gaussian process: logarithms of measured / expected seconds over
    logarithms (base 2) of sizes.

    They were chosen on vidur's A100, A40 and H100 and on the packaged processor, each predicted
    from 5 to 100 operators of its own.
    """

    length: float = 4.0  # doublings over which the seconds of two sizes are correlated
    spread: float = 0.5  # standard deviation of the part that depends on sizes
    general: float = 1.0  # standard deviation of the device's general factor
    noise: float = 0.2  # standard deviation of one measurement
    largest: int = 2000  # operators that a fit uses: its seconds grow with their cube


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
        """The sizes of its products, all 0 for an elementwise operator."""
        return Shape(self.count, self.m, self.k, self.n)


class KindError(StrictModel):
    """The mean of |predicted / measured - 1| over the operators of one kind."""

    kind: Kind
    operators: PositiveCount
    error: NonNegative  # each operator is predicted from the others
    expected_error: NonNegative  # predicted without any measured operator


class OperatorData(Document):
    """Operators measured on one device.

    flops_per_second, bytes_per_second: the peaks that nothing on the device exceeds.
    bus_bytes_per_second: the bus bandwidth (bytes that pass each link) of a large all-reduce over
    this machine's devices. errors: as `hetplan profile train` measured them.
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
        """The catalogue's entry of the device; without one, an entry made of the file's peaks."""
        known = catalogue().get(self.device)
        if known is not None:
            return known
        return DeviceSpec(
            memory_gib=1.0,
            peak_tflops={self.precision: self.flops_per_second / 1e12},
            memory_gb_per_s=self.bytes_per_second / 1e9,
            source="measured operators",
        )


@cache
def packaged(device: str, precision: str) -> OperatorData | None:
    """The measured operators that come with hetplan for a device type, looked up by the name under
    which it was measured; None for most types."""
    for path in sorted(Path(__file__).with_name("learned").glob("*.operators.json.gz")):
        file = OperatorData.load(path)
        if (file.device, file.precision) == (device, precision):
            return file
    return None


def sizes_of(shape: Shape, elements: float) -> list[float]:
    """The features of an operator, logarithms (base 2) of sizes: count, m, k, n and the number of
    results of products; the elements moved of an elementwise operator."""
    if not shape.count:
        return [math.log2(elements)]
    results = shape.count * shape.m * shape.n
    return [math.log2(max(size, 1.0)) for size in (shape.count, shape.m, shape.k, shape.n, results)]


@dataclass(frozen=True, eq=False)
class Correction:
    """A Gaussian process fitted to N measured operators of one kind."""

    rows: Floats  # [N, F]: the features of each operator
    logs: Floats  # [N]: logarithms of measured / expected seconds
    smoothing: Smoothing = SMOOTHING

    def covariance(self, one: Floats, other: Floats) -> Floats:
        """The covariance [N, M] of N rows with M rows."""
        smoothing = self.smoothing
        squared_distance = ((one[:, None] - other[None]) ** 2).sum(axis=2)
        correlation = np.exp(-squared_distance / (2 * smoothing.length**2))
        return np.asarray(smoothing.general**2 + smoothing.spread**2 * correlation)

    @cached_property
    def inverse(self) -> Floats:
        """The inverse [N, N] of the rows' covariance with the measurements' noise."""
        noise = self.smoothing.noise**2 * np.eye(len(self.rows))
        return np.asarray(np.linalg.inv(self.covariance(self.rows, self.rows) + noise))

    @cached_property
    def weights(self) -> Floats:
        """The weight [N] of each measured row's covariance in a prediction."""
        return self.inverse @ self.logs

    def at(self, row: Sequence[float]) -> float:
        """The logarithm of actual / expected seconds predicted at a row of features."""
        return float(self.covariance(np.array([row]), self.rows)[0] @ self.weights)

    def residuals(self) -> Floats:
        """Logarithms [N] of measured / predicted seconds where each row is predicted from the
        others (Rasmussen and Williams, equation 5.12)."""
        return np.asarray(self.weights / np.diag(self.inverse))


@dataclass(frozen=True)
class Learned:
    """The factors that a device's own measured operators give."""

    data: OperatorData
    spec: DeviceSpec  # the entry from which expected seconds follow

    @cached_property
    def corrections(self) -> dict[Kind, Correction]:
        """The correction of each kind of operator that was measured."""
        corrections: dict[Kind, Correction] = {}
        for kind in KINDS:
            operators = [op for op in self.data.operators if op.kind == kind]
            operators = operators[: SMOOTHING.largest]
            if not operators:
                continue
            rows = np.array([sizes_of(op.shape, op.elements) for op in operators])
            measured = np.array([op.seconds for op in operators])
            corrections[kind] = Correction(rows, np.log(measured / self.expected(operators)))
        return corrections

    def expected(self, operators: Iterable[MeasuredOperator]) -> Floats:
        """Seconds of operators of one kind, before any of them was measured."""
        data, chosen = self.data, list(operators)
        if chosen[0].kind == "product":
            shapes = tuple(op.shape for op in chosen)
            estimates = products_seconds(data.device, self.spec, data.precision, shapes)
        else:
            estimates = tuple(
                move_seconds("pointwise", op.elements * data.element_bytes, data.device, self.spec)
                for op in chosen
            )
        return np.array([estimate.seconds for estimate in estimates])

    def factor(self, op: Operator, micro_batch: int, tensor: int) -> float:
        """Measured over expected seconds of an operator; 1 where its kind was not measured."""
        shape = op.shape(micro_batch, tensor) or Shape(0, 0, 0, 0)
        correction = self.corrections.get("product" if shape.count else "elementwise")
        if correction is None:
            return 1.0
        moved = max(op.moved(micro_batch, tensor), 1.0)
        return math.exp(correction.at(sizes_of(shape, moved)))


def train(data: OperatorData) -> OperatorData:
    """The measured operators with the errors of predictions from each other; raises InputError
    where no kind has two operators."""
    errors = []
    for kind, correction in Learned(data, data.spec()).corrections.items():
        operators = len(correction.logs)
        if operators < 2:
            continue
        error = mean_error(np.exp(-correction.residuals()))
        expected_error = mean_error(np.exp(-correction.logs))
        errors.append(
            KindError(kind=kind, operators=operators, error=error, expected_error=expected_error)
        )
    require(
        errors,
        "too few operators",
        got=len(data.operators),
        expected="at least 2 of a kind",
    )
    return data.model_copy(update={"errors": errors})


def mean_error(shares: Floats) -> float:
    """The mean of |predicted / measured - 1|; shares: predicted / measured."""
    return float(np.mean(np.abs(shares - 1)))


class LinkCurve(StrictModel):
    """The shares of the best bandwidth that a collective of some number of ranks reaches, by its
    bytes; between two points, straight lines of logarithms."""

    operation: Name
    group: Group
    ranks: PositiveCount
    bytes: list[Positive]
    share: list[Positive]


class LinkEfficiencyFile(Document):
    """The learned efficiency of one device's links.

    bytes_per_second: the best bandwidth reached, by kind of group. trained_on, kept_apart: numbers
    of messages. error: mean |predicted / measured - 1| of the seconds of the messages kept apart,
    which the curves of the others predict; plain_error: the same where the median efficiency
    predicts them; line_error: the same where each operation's latency and bandwidth do, which were
    fitted with these messages among theirs.
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
    others = ranks - 1
    if operation == "send":
        return 1.0
    if operation == "all-reduce":
        return 2 * others / ranks
    if operation in ("all-gather", "grouped-broadcast"):
        return others
    return others / ranks


Message = tuple[str, Group, int, float, float]  # operation, group, ranks, bytes, share


def link_curves(messages: Iterable[Message]) -> list[LinkCurve]:
    """One curve for each operation, group and number of ranks; shares never fall."""
    by_collective = grouped((message[:3], message[3:]) for message in sorted(messages))
    return [
        LinkCurve(
            operation=operation,
            group=group,
            ranks=ranks,
            bytes=[size for size, _ in points],
            share=np.maximum.accumulate([share for _, share in points]).tolist(),
        )
        for (operation, group, ranks), points in by_collective.items()
    ]


def share_of(
    curves: Sequence[LinkCurve], operation: str, group: Group, ranks: int, size: float
) -> float:
    """The share of the best bandwidth that a message of `size` bytes reaches, by the curve of the
    most similar collective: the same operation first, then the group, then the number of ranks.

    Messages smaller than the curve's smallest take as long as it.
    """

    def difference(curve: LinkCurve) -> tuple[bool, int, float]:
        other_group = NEAREST[group].index(curve.group)
        return curve.operation != operation, other_group, abs(math.log(curve.ranks / ranks))

    curve = min(curves, key=difference)
    size = max(size, 1.0)
    on_curve = math.exp(np.interp(math.log(size), np.log(curve.bytes), np.log(curve.share)))
    return on_curve * min(size / curve.bytes[0], 1.0)


def train_links(files: Sequence[Collectives], seed: int = 0) -> LinkEfficiencyFile:
    """Curves from measured collectives; for the errors a fifth is kept apart, by `seed`.

    Raises InputError for too few, and where files are of different devices or back ends.
    """
    for key, file in product(("device", "backend"), files):
        got, expected = getattr(file, key), getattr(files[0], key)
        require(got == expected, f"collectives of another {key}", got=got, expected=repr(expected))
    measured = [(fit, point) for file in files for fit in file.fits for point in fit.points]
    require(
        len(measured) >= LEAST_MESSAGES,
        "too few measured messages",
        got=len(measured),
        expected=f"at least {LEAST_MESSAGES}",
    )
    moved = np.array([moved_share(fit.operation, fit.ranks) * p.bytes for fit, p in measured])
    seconds = np.array([point.seconds for _, point in measured])
    groups = np.array([fit.group for fit, _ in measured])
    bandwidth = moved / seconds
    best = {group: float(bandwidth[groups == group].max()) for group in NEAREST if group in groups}
    ideal = moved / np.array([best[fit.group] for fit, _ in measured])
    messages: list[Message] = [
        (fit.operation, fit.group, fit.ranks, point.bytes, share)
        for (fit, point), share in zip(measured, (ideal / seconds).tolist(), strict=True)
    ]
    order = list(range(len(measured)))
    Random(seed).shuffle(order)
    cut = round(len(order) / 5)
    apart, used = order[:cut], order[cut:]
    curves = link_curves(messages[i] for i in used)
    predicted = np.array([share_of(curves, *messages[i][:4]) for i in apart])
    lines = np.array([fit.operation_seconds(point.bytes) for fit, point in measured])
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
    """The curves of a file, ready to be asked."""

    file: LinkEfficiencyFile

    def share(self, operation: str, group: Group, ranks: int, size: float) -> float:
        """The share of the link's best bandwidth, in (0, 1]. A kind of group that was not measured
        has the share of the most similar one (`NEAREST`)."""
        return share_of(self.file.curves, operation, group, ranks, size)
