"""The profile: what one model costs per layer on every device type, tensor degree and micro-batch
size.

A JSON file `hetplan-profile`, predicted by hetplan or measured elsewhere; the planner only ever
sees this.

SI units: seconds of one micro-batch on one device of a tensor group, bytes per sample (parameters:
bytes).
Layer times exclude the tensor-parallel all-reduce, which is priced from `tensor_bytes`; a measured
profile whose times include it says `tensor_bytes` 0.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, Strict, model_serializer, model_validator

from hetplan.errors import require
from hetplan.profiling.models.operators import Precision
from hetplan.schema import (
    Bytes,
    Date,
    Document,
    Name,
    Positive,
    PositiveCount,
    SecondsRow,
    StrictModel,
)


class WithoutEmpty(StrictModel):
    """Written without the keys that hold None or an empty list."""

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in (None, [])}


class Provenance(WithoutEmpty):
    """Where the numbers come from. calibrated: whether measurements corrected a prediction.

    learned: device types predicted with an efficiency learned from measured operators; others have
    the plain roofline. predictor: the version of what predicted them; None of files before 2.
    sources: whose measurements the predictor learned from.
    """

    kind: Literal["predicted", "measured"]
    source: Name
    date: Date
    calibrated: bool = False
    learned: list[Name] = Field(default_factory=list)
    predictor: PositiveCount | None = None
    sources: list[Name] = Field(default_factory=list)


class ProfileLayer(StrictModel):
    """Figures of a whole layer that do not depend on the device.

    param_bytes: owned parameters; tied_param_bytes: a copy of an earlier layer's (tied embeddings),
    needed by a stage without that layer. activation_bytes: sent to the next layer, per sample.
    tensor_bytes: all-reduced in a tensor group, forward and backward, per sample. saved_bytes: kept
    for the backward pass, per sample; replicated_saved_bytes: the part that tensor parallelism does
    not divide.
    """

    name: Name
    param_bytes: Bytes
    tied_param_bytes: Bytes = 0.0
    activation_bytes: Bytes
    tensor_bytes: Bytes
    saved_bytes: Bytes
    replicated_saved_bytes: Bytes = 0.0

    @model_validator(mode="after")
    def _part_of_saved(self) -> Self:
        require(
            self.replicated_saved_bytes <= self.saved_bytes,
            f"replicated_saved_bytes is {self.replicated_saved_bytes!r}, "
            f"expected at most saved_bytes ({self.saved_bytes!r})",
        )
        return self

    @property
    def held_param_bytes(self) -> float:
        """Parameters that a stage of this layer alone holds."""
        return self.param_bytes + self.tied_param_bytes


class Readings(StrictModel):
    """Readings of a measurement beside medians, per layer [L]: spreads are the slowest less the
    fastest repeat.

    optimizer_seconds: one update. saved_bytes: kept from forward to backward, whole micro-batch.
    peak_bytes: needed beside at the passes' peak; null where the device keeps no such books.
    """

    forward_spread_seconds: SecondsRow
    backward_spread_seconds: SecondsRow
    optimizer_seconds: SecondsRow
    saved_bytes: list[Bytes]
    peak_bytes: list[Bytes] | None = None


HOST = ("forward_host_seconds", "backward_host_seconds")


class ProfileTable(WithoutEmpty):
    """Seconds per layer [L] of one micro-batch on `tensor` devices of one type. readings: of
    measured tables. *_host_seconds: what the host takes to launch a pass's kernels, part of its
    seconds as `hetplan.profiling.rates.times.together` says; none of measured tables. interval:
    factors of all seconds of a predicted table, low and high, by what the predictor's operators
    were off on models left out."""

    device: Name
    tensor: PositiveCount
    micro_batch: PositiveCount
    forward_seconds: SecondsRow
    backward_seconds: SecondsRow
    forward_host_seconds: SecondsRow = Field(default_factory=list)
    backward_host_seconds: SecondsRow = Field(default_factory=list)
    interval: Annotated[tuple[Positive, Positive], Strict(False)] | None = None
    readings: Readings | None = None

    def spread(self) -> list[float] | None:
        """Forward + backward spread per layer [L], None where nothing was measured."""
        if self.readings is None:
            return None
        both = self.readings.forward_spread_seconds, self.readings.backward_spread_seconds
        return [f + b for f, b in zip(*both, strict=True)]

    def layer_seconds(self) -> list[float]:
        """[L] forward and backward seconds of each layer."""
        return [f + b for f, b in zip(self.forward_seconds, self.backward_seconds, strict=True)]


class Profile(Document):
    """A profile: layers [L], tables of [L] entries each. sequence: tokens per sample, null for
    images."""

    format: Literal["hetplan-profile"] = "hetplan-profile"
    version: Literal[1] = 1
    model: Name
    sequence: PositiveCount | None = None
    precision: Precision
    provenance: Provenance
    layers: list[ProfileLayer] = Field(min_length=1, max_length=4096)
    tables: list[ProfileTable] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: dict[tuple[str, int, int], int] = {}
        expected = f"entries, expected one per layer ({len(self.layers)})"
        for i, table in enumerate(self.tables):
            for key in ("forward_seconds", "backward_seconds", *HOST):
                length = len(getattr(table, key) or (self.layers if key in HOST else ()))
                require(length == len(self.layers), f"tables[{i}].{key} has {length} {expected}")
            for key, row in table.readings or ():
                if row is not None:
                    require(
                        len(row) == len(self.layers),
                        f"tables[{i}].readings.{key} has {len(row)} {expected}",
                    )
            before = seen.setdefault((table.device, table.tensor, table.micro_batch), i)
            require(
                before == i,
                f"tables[{i}] repeats tables[{before}] (same device, tensor, micro_batch)",
            )
        return self

    def devices(self) -> tuple[str, ...]:
        """Device types with at least one table, in order of appearance."""
        return tuple(dict.fromkeys(table.device for table in self.tables))

    def table(self, device: str, tensor: int, micro_batch: int) -> ProfileTable | None:
        """The table of that device type, tensor degree and micro-batch, or None."""
        return self._by_key.get((device, tensor, micro_batch))

    def micro_batches(self, device: str, tensor: int) -> tuple[int, ...]:
        """The micro-batch sizes with a table of that device type and tensor degree, ascending."""
        return tuple(sorted(m for d, t, m in self._by_key if (d, t) == (device, tensor)))

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, int], ProfileTable]:
        return {(table.device, table.tensor, table.micro_batch): table for table in self.tables}


load_profile = Profile.load


def perturbed(
    profile: Profile, factors: Mapping[str, Sequence[float] | NDArray[np.float64]]
) -> Profile:
    """The profile with each layer's forward and backward seconds multiplied.

    factors: device type -> the factor of every layer [L]. A device type without an entry keeps its
    seconds.
    """
    unchanged = np.ones(len(profile.layers))
    tables = []
    for table in profile.tables:
        row = np.asarray(factors.get(table.device, unchanged), float)
        seconds = {
            "forward_seconds": (row * table.forward_seconds).tolist(),
            "backward_seconds": (row * table.backward_seconds).tolist(),
        }
        tables.append(table.model_copy(update=seconds))
    return Profile(**{**dict(profile), "tables": tables})
