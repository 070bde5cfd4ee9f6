"""Measured efficiency: how much longer than expected a device's operators and links take.

An operator's expected seconds are those of the shipped rates and of physics
(`hetplan.profiling.rates`). A user may measure from ten to some hundred operators on the device
itself. A Gaussian process with a general factor (Rasmussen and Williams 2006, chapter 2) then
predicts the logarithm of measured / expected seconds from the logarithms of the sizes, separately
for products and for memory-bound operators. Near measured sizes the measurements decide, elsewhere
the general factor.

A collective's efficiency is the share that it reaches of the best bandwidth of its kind of group,
by operation, ranks and bytes. The share never falls as bytes grow, so that it includes the latency.

Files: `hetplan-operators` (measured operators of one device, and after training the errors of
predicting each from the others) and `hetplan-link-efficiency`.
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
from pydantic import Field, Strict

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import MAX_DEVICES, DeviceSpec, Floats, catalogue
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
# The kinds of groups: ranks within a node, one rank of every node, or all ranks.
Group = Literal["node", "between", "all"]
# Measured messages from which curves of links can be learned: a fifth of them gives the errors.
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
    """One operator with its measured seconds: `count` products of m x k by k x n, or an elementwise
    operator."""

    kind: Kind
    count: NonNegative = 0.0
    """0 for an elementwise operator, as are m, k and n."""
    m: NonNegative = 0.0
    k: NonNegative = 0.0
    n: NonNegative = 0.0
    elements: Positive
    """Numbers that it reads and writes."""
    seconds: Annotated[Seconds, Field(gt=0)]
    """Seconds of the fastest repeat."""
    spread_seconds: Seconds = 0.0
    """The slowest less the fastest repeat."""

    @property
    def shape(self) -> Shape:
        """The sizes of its products, all 0 for an elementwise operator."""
        return Shape(self.count, self.m, self.k, self.n)


class KindError(StrictModel):
    """The mean of |predicted / measured - 1| over the operators of one kind."""

    kind: Kind
    operators: PositiveCount
    error: NonNegative
    """The error where each operator is predicted from the others."""
    expected_error: NonNegative
    """The error where no measured operator is used."""


class OperatorData(Document):
    """Operators measured on one device."""

    format: Literal["hetplan-operators"] = "hetplan-operators"
    version: Literal[1] = 1
    device: Name
    """Device type."""
    precision: Precision
    element_bytes: PositiveCount
    """Bytes of a number."""
    flops_per_second: Positive
    """a peak that no product on the device exceeds."""
    bytes_per_second: Positive
    """a peak that no operator's traffic exceeds."""
    provenance: Provenance
    operators: list[MeasuredOperator] = Field(min_length=1)
    bus_bytes_per_second: Positive | None = None
    """Bus bandwidth (bytes that pass each link) of a large all-reduce over this machine's devices.
    """
    all_reduce_bytes_per_second: dict[
        Annotated[int, Field(ge=2, le=MAX_DEVICES), Strict(False)], Positive
    ] = Field(default_factory=dict)
    """n -> bus bandwidth of a large all-reduce over the first n devices."""
    errors: list[KindError] = Field(default_factory=list)
    """Errors by kind of operator, as `hetplan profile train` computes them."""

    def spec(self) -> DeviceSpec:
        """The catalogue's entry of the device; without one, an entry made of the file's peaks."""
        entry = catalogue().get(self.device)
        if entry is not None:
            return entry
        return DeviceSpec(
            memory_gib=1.0,  # required, but no seconds depend on it
            peak_tflops={self.precision: self.flops_per_second / 1e12},
            memory_gb_per_s=self.bytes_per_second / 1e9,
            source="measured operators",
        )


@cache
def packaged(device: str, precision: str) -> OperatorData | None:
    """The measured operators that come with hetplan for a device type, by the device name in their
    file; None for most types."""
    for path in sorted(Path(__file__).with_name("learned").glob("*.operators.json.gz")):
        file = OperatorData.load(path)
        if (file.device, file.precision) == (device, precision):
            return file
    return None


def sizes_of(shape: Shape, elements: float) -> list[float]:
    """The features of an operator: logarithms (base 2) of its sizes.

    Products have five sizes: count, m, k, n and the number of results. An elementwise operator has
    one: the elements that it moves.
    """
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
        """The predicted logarithm of measured / expected seconds at a row of features."""
        return float(self.covariance(np.array([row]), self.rows)[0] @ self.weights)

    def residuals(self) -> Floats:
        """Logarithms [N] of measured / predicted seconds where each row is predicted from the
        others (Rasmussen and Williams, equation 5.12)."""
        return np.asarray(self.weights / np.diag(self.inverse))


@dataclass(frozen=True)
class Learned:
    """The factors on expected seconds that operators measured on a device give."""

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
        """Expected seconds of operators of one kind, which no measured operator corrects."""
        data, chosen = self.data, list(operators)
        if chosen[0].kind == "product":
            shapes = tuple(op.shape for op in chosen)
            estimates = products_seconds(data.device, self.spec, data.precision, shapes)
        else:
            # the file does not say which kind of elementwise operator was measured
            estimates = tuple(
                move_seconds("pointwise", op.elements * data.element_bytes, data.device, self.spec)
                for op in chosen
            )
        return np.array([estimate.seconds for estimate in estimates])

    def factor(self, op: Operator, micro_batch: int, tensor: int) -> float:
        """The factor from expected to real seconds of an operator; 1 where no operator of its kind
        was measured."""
        shape = op.shape(micro_batch, tensor) or Shape(0, 0, 0, 0)
        kind: Kind = "product" if shape.count else "elementwise"
        correction = self.corrections.get(kind)
        if correction is None:
            return 1.0
        elements = max(op.moved(micro_batch, tensor), 1.0)
        return math.exp(correction.at(sizes_of(shape, elements)))


def train(data: OperatorData) -> OperatorData:
    """The measured operators, with the errors of predicting each from the others. Raises InputError
    where no kind has two operators."""
    errors = []
    for kind, correction in Learned(data, data.spec()).corrections.items():
        operators = len(correction.logs)
        if operators < 2:  # a single operator has no others from which it could be predicted
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
    """The mean of |predicted / measured - 1|. shares: predicted / measured seconds."""
    return float(np.mean(np.abs(shares - 1)))


class LinkCurve(StrictModel):
    """The shares of the best bandwidth that one collective reaches, by its bytes. Between two
    points, the logarithms of bytes and shares are interpolated linearly."""

    operation: Name
    group: Group
    ranks: PositiveCount
    bytes: list[Positive]
    """[B] on each rank, ascending."""
    share: list[Positive]
    """[B] never falling."""


class LinkEfficiencyFile(Document):
    """The learned efficiency of one device's links.

    The errors are means of |predicted / measured - 1| over the seconds of the messages that were
    kept apart.
    """

    format: Literal["hetplan-link-efficiency"] = "hetplan-link-efficiency"
    version: Literal[2] = 2
    device: Name
    backend: Name
    provenance: Provenance
    bytes_per_second: dict[Group, Positive]
    """The best bandwidth reached, by kind of group."""
    trained_on: PositiveCount
    """Messages that give the curves behind `error`."""
    kept_apart: PositiveCount
    """Messages that these curves predict."""
    error: NonNegative
    """Error of predictions by the curves."""
    plain_error: NonNegative
    """Error of predictions by the median share."""
    line_error: NonNegative
    """Error of predictions by each operation's latency and bandwidth. Both were fitted to all
    messages, also to those kept apart."""
    curves: list[LinkCurve] = Field(min_length=1)
    """Learned from all messages."""


def moved_share(operation: str, ranks: int) -> float:
    """The least bytes that pass a rank's slowest link for each byte of that rank, by a ring
    (Patarasuk and Yuan 2009).

    A rank's bytes are the message that it sends (send), the part that it gives to all other ranks
    (all-gather, grouped-broadcast), or its whole tensor that is reduced or exchanged.
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
    """One curve for each operation, group and number of ranks. A share below that of fewer bytes is
    raised to it."""
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

    A message that is smaller than the smallest of the curve takes as long as that one.
    """

    def difference(curve: LinkCurve) -> tuple[bool, int, float]:
        other_group = NEAREST[group].index(curve.group)
        # tuples are compared entry by entry; False is less than True
        return curve.operation != operation, other_group, abs(math.log(curve.ranks / ranks))

    curve = min(curves, key=difference)
    size = max(size, 1.0)
    on_curve = math.exp(np.interp(math.log(size), np.log(curve.bytes), np.log(curve.share)))
    return on_curve * min(size / curve.bytes[0], 1.0)


def train_links(files: Sequence[Collectives], seed: int = 0) -> LinkEfficiencyFile:
    """Curves from measured collectives. A fifth of the messages, drawn by `seed`, is kept apart for
    the errors.

    Raises InputError for too few messages, and where files are of different devices or back ends.
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
    ideal = moved / np.array([best[fit.group] for fit, _ in measured])  # seconds at the best rate
    shares = ideal / seconds
    messages: list[Message] = [
        (fit.operation, fit.group, fit.ranks, point.bytes, share)
        for (fit, point), share in zip(measured, shares.tolist(), strict=True)
    ]
    order = list(range(len(measured)))
    Random(seed).shuffle(order)
    count_apart = round(len(order) / 5)
    apart, used = order[:count_apart], order[count_apart:]
    curves = link_curves(messages[i] for i in used)
    predicted_shares = np.array([share_of(curves, *messages[i][:4]) for i in apart])
    line_seconds = np.array([fit.operation_seconds(point.bytes) for fit, point in measured])
    return LinkEfficiencyFile(
        device=files[0].device,
        backend=files[0].backend,
        provenance=files[0].provenance,
        bytes_per_second=best,
        trained_on=len(used),
        kept_apart=len(apart),
        # predicted seconds are ideal / predicted share, and measured ones ideal / share
        error=mean_error(shares[apart] / predicted_shares),
        plain_error=mean_error(shares[apart] / np.median(shares[used])),
        line_error=mean_error((line_seconds / seconds)[apart]),
        curves=link_curves(messages),
    )


@dataclass(frozen=True)
class LearnedLinks:
    """The learned efficiency of links, as the formulas of seconds use it."""

    file: LinkEfficiencyFile

    def share(self, operation: str, group: Group, ranks: int, size: float) -> float:
        """The share of the links' best bandwidth that a message of `size` bytes reaches, in (0, 1].
        A kind of group that was not measured has the share of the most similar one (`NEAREST`)."""
        return share_of(self.file.curves, operation, group, ranks, size)
