"""Learned efficiency: which share of a device's peak an operator reaches, from operators measured
on it.

An operator's ideal seconds are the roofline's, max(FLOPs / peak, bytes / bandwidth), with nothing
lost; its efficiency is ideal / measured, in (0, 1]. Gradient-boosted trees (XGBoost) learn it from
sizes, products and elementwise operators apart, as Astra does for whole operators (Section 3.5).
What was never measured keeps the plain roofline.

Files: `hetplan-operators` (measured operators of one device), `hetplan-efficiency` (trees, with
what they were trained from and how wrong they are on operators kept apart).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetplan.errors import InputError, UnsupportedError
from hetplan.files import read_json, to_json, write_text
from hetplan.profiling.counted import Counted
from hetplan.profiling.operators import Matmul, Operator
from hetplan.profiling.precision import Precision
from hetplan.profiling.profile import Provenance
from hetplan.schema import (
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Seconds,
    StrictModel,
    check_header,
    parse,
)

Floats = NDArray[np.float64]
Kind = Literal["product", "elementwise"]
KINDS: tuple[Kind, ...] = ("product", "elementwise")

APART = 0.2  # of the operators are kept apart from training
LEAST = 20  # operators of a kind; trees from fewer say nothing
SMALLEST = 1e-3  # no operator that anybody waits for is worse than this
SETTINGS = {"max_depth": 3, "eta": 0.1, "objective": "reg:squarederror", "nthread": 1, "seed": 0}
ROUNDS = 100


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


class OperatorData(StrictModel):
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        write_text(path, to_json(self.model_dump(mode="json")))


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


class EfficiencyFile(StrictModel):
    """What was learned on one device."""

    format: Literal["hetplan-efficiency"] = "hetplan-efficiency"
    version: Literal[1] = 1
    device: Name
    precision: Precision
    flops_per_second: Positive
    bytes_per_second: Positive
    provenance: Provenance
    kinds: list[TrainedKind] = Field(min_length=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        write_text(path, to_json(self.model_dump(mode="json")))


def load_operators(path: str | os.PathLike[str]) -> OperatorData:
    """Measured operators; raises InputError."""
    where, value = os.fspath(path), read_json(path)
    check_header(value, "hetplan-operators", 1, where=where)
    return parse(OperatorData, value, where=where)


def load_efficiency(path: str | os.PathLike[str]) -> EfficiencyFile:
    """Trained trees; raises InputError."""
    where, value = os.fspath(path), read_json(path)
    check_header(value, "hetplan-efficiency", 1, where=where)
    return parse(EfficiencyFile, value, where=where)


@cache
def packaged(device: str, precision: str) -> EfficiencyFile | None:
    """What comes with hetplan of a device type, by the name that it was measured under; None of
    most."""
    for path in sorted(Path(__file__).with_name("learned").glob("*.efficiency.json.gz")):
        found = load_efficiency(path)
        if (found.device, found.precision) == (device, precision):
            return found
    return None


def features(count: float, m: float, k: float, n: float, elements: float) -> list[float]:
    """What trees see of an operator: logarithms of its sizes, FLOPs, elements and of FLOPs per
    element."""
    flops = 2 * count * m * k * n
    return [
        float(np.log2(1 + value)) for value in (count, m, k, n, elements, flops, flops / elements)
    ]


def ideal_seconds(flops: float, moved_bytes: float, peak: float, bandwidth: float) -> float:
    """The roofline with nothing lost."""
    return max(flops / peak, moved_bytes / bandwidth)


def train(data: OperatorData, seed: int = 0) -> EfficiencyFile:
    """Trees from measured operators; a fifth is kept apart, by `seed`. Raises InputError for too
    few operators."""
    found = []
    for kind in KINDS:
        operators = [op for op in data.operators if op.kind == kind]
        if len(operators) >= LEAST:
            found.append(_train(kind, operators, data, seed))
    if not found:
        raise InputError(
            "too few operators of a kind", got=len(data.operators), expected=f"at least {LEAST}"
        )
    return EfficiencyFile(
        device=data.device, precision=data.precision, flops_per_second=data.flops_per_second,
        bytes_per_second=data.bytes_per_second, provenance=data.provenance, kinds=found,
    )  # fmt: skip


def _train(
    kind: Kind, operators: Sequence[MeasuredOperator], data: OperatorData, seed: int
) -> TrainedKind:
    xgboost = xgboost_library()
    rows = np.array([features(op.count, op.m, op.k, op.n, op.elements) for op in operators])
    ideal = np.array(
        [
            ideal_seconds(
                2 * op.count * op.m * op.k * op.n,
                op.elements * data.element_bytes,
                data.flops_per_second,
                data.bytes_per_second,
            )
            for op in operators
        ]
    )
    seconds = np.array([op.seconds for op in operators])
    efficiency = np.clip(ideal / seconds, SMALLEST, 1.0)
    order = list(range(len(operators)))
    Random(seed).shuffle(order)
    apart, used = (
        order[: max(round(APART * len(order)), 1)],
        order[max(round(APART * len(order)), 1) :],
    )
    booster = xgboost.train(SETTINGS, xgboost.DMatrix(rows[used], np.log(efficiency[used])), ROUNDS)
    learned = np.exp(np.clip(booster.predict(xgboost.DMatrix(rows[apart])), np.log(SMALLEST), 0.0))
    plain = np.median(efficiency[used])
    return TrainedKind(
        kind=kind,
        trained_on=len(used),
        kept_apart=len(apart),
        error=float(np.mean(np.abs(ideal[apart] / learned / seconds[apart] - 1))),
        roofline_error=float(np.mean(np.abs(ideal[apart] / plain / seconds[apart] - 1))),
        trees=bytes(booster.save_raw("json")).decode(),
    )


@dataclass(frozen=True)
class Learned:
    """Trees of one device, ready to ask; kinds that were not trained have none."""

    file: EfficiencyFile

    @cached_property
    def _boosters(self) -> dict[str, Any]:
        xgboost = xgboost_library()
        found: dict[str, Any] = {}
        for trained in self.file.kinds:
            try:
                json.loads(trained.trees)
                found[trained.kind] = xgboost.Booster(model_file=bytearray(trained.trees, "utf-8"))
            except (ValueError, xgboost.core.XGBoostError):
                raise InputError(
                    f"trees of {trained.kind} cannot be read", where=self.file.device
                ) from None
        return found

    def seconds(
        self, op: Operator, micro_batch: int, tensor: int, element_bytes: int
    ) -> float | None:
        """Forward seconds of an operator, None where its kind was not trained."""
        count, m, k, n, moved = sizes_of(op, micro_batch, tensor)
        kind: Kind = "product" if count else "elementwise"
        if kind not in self._boosters:
            return None
        row = xgboost_library().DMatrix(np.array([features(count, m, k, n, moved)]))
        share = float(np.exp(np.clip(self._boosters[kind].predict(row)[0], np.log(SMALLEST), 0.0)))
        file = self.file
        return (
            ideal_seconds(
                2 * count * m * k * n,
                moved * element_bytes,
                file.flops_per_second,
                file.bytes_per_second,
            )
            / share
        )


def sizes_of(
    op: Operator, micro_batch: int, tensor: int
) -> tuple[float, float, float, float, float]:
    """(count, m, k, n, elements moved) of an operator; the first four 0 for what is no product."""
    if isinstance(op, Counted):
        sizes = (0.0, 0.0, 0.0, 0.0) if op.product is None else op.product.at(micro_batch)
        return (*sizes, max(op.all_moved(micro_batch), 1.0))
    moved = max(op.moved(micro_batch, tensor), 1.0)
    if isinstance(op, Matmul):
        shape = op.shape(micro_batch, tensor)
        return float(shape.count), float(shape.m), float(shape.k), float(shape.n), moved
    return 0.0, 0.0, 0.0, 0.0, moved


def xgboost_library() -> Any:
    """The library; raises UnsupportedError where it is not installed."""
    try:
        import xgboost
    except ImportError:
        raise UnsupportedError(
            "learned efficiency needs xgboost; install hetplan with its extra: pip install 'hetplan[learn]'"
        ) from None
    return xgboost
