"""The profile: the seconds and bytes of one model's layers, by device type, tensor degree and
micro-batch.

It is a JSON file `hetplan-profile`, predicted by hetplan or measured. The planner reads the costs
of layers from nowhere else.

Seconds are of one micro-batch on one device of a tensor group. Bytes are per sample; bytes of
parameters count the whole layer. Seconds of a layer exclude the all-reduces of tensor
groups, whose seconds follow from `tensor_bytes`. A measured profile whose seconds include them has
`tensor_bytes` 0.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    """A part of a file that is written without the keys that hold None or an empty list."""

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in (None, [])}


class Provenance(WithoutEmpty):
    """The origin of a file's numbers."""

    kind: Literal["predicted", "measured"]
    source: Name
    """The program and method that gave the numbers."""
    date: Date
    calibrated: bool = False
    """Whether measurements corrected a prediction."""
    learned: list[Name] = Field(default_factory=list)
    """Device types whose predictions were corrected by operators measured on them."""
    predictor: PositiveCount | None = None
    """Version of hetplan's predictor; None in measured files and in files before version 2."""
    sources: list[Name] = Field(default_factory=list)
    """The published measurements to which the predictor's rates were fitted."""


# Keys of a layer that are not written where they are 0: in full training nothing is frozen.
OF_FROZEN = ("frozen_bytes", "frozen_tied_bytes", "cast_bytes")


class ProfileLayer(StrictModel):
    """The bytes of a whole layer, which do not depend on the device."""

    name: Name
    param_bytes: Bytes
    """Bytes of the trained parameters that the layer owns."""
    tied_param_bytes: Bytes = 0.0
    """Bytes of trained parameters that belong to an earlier layer (tied embeddings); a stage
    without that layer needs a copy of them."""
    frozen_bytes: Bytes = 0.0
    """Bytes in which the layer holds its frozen parameters, which have neither gradients nor
    optimizer states."""
    frozen_tied_bytes: Bytes = 0.0
    """Bytes of frozen parameters that belong to an earlier layer."""
    cast_bytes: Bytes = 0.0
    """Bytes of the largest frozen weight that a product casts from fewer bits."""
    activation_bytes: Bytes
    """Bytes per sample sent to the next layer."""
    tensor_bytes: Bytes
    """Bytes per sample all-reduced in a tensor group, in both passes."""
    saved_bytes: Bytes
    """Bytes per sample kept for the backward pass."""
    replicated_saved_bytes: Bytes = 0.0
    """The part of `saved_bytes` that tensor parallelism does not divide."""

    @model_validator(mode="after")
    def _part_of_saved(self) -> Self:
        require(
            self.replicated_saved_bytes <= self.saved_bytes,
            f"replicated_saved_bytes is {self.replicated_saved_bytes!r}, "
            f"expected at most saved_bytes ({self.saved_bytes!r})",
        )
        return self

    @model_serializer(mode="wrap")
    def _without_frozen(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        return {key: value for key, value in written.items() if value or key not in OF_FROZEN}

    @property
    def held_param_bytes(self) -> float:
        """Bytes of the trained parameters that a stage with only this layer holds."""
        return self.param_bytes + self.tied_param_bytes

    @property
    def held_frozen_bytes(self) -> float:
        """Bytes of the frozen parameters that a stage with only this layer holds."""
        return self.frozen_bytes + self.frozen_tied_bytes


class Readings(StrictModel):
    """Further readings [L] of a measurement, layer by layer, besides the medians of the seconds."""

    forward_spread_seconds: SecondsRow
    """The slowest less the fastest repeat."""
    backward_spread_seconds: SecondsRow
    """The slowest less the fastest repeat."""
    optimizer_seconds: SecondsRow
    """Seconds of one update."""
    saved_bytes: list[Bytes]
    """Bytes of the whole micro-batch kept from forward to backward pass."""
    peak_bytes: list[Bytes] | None = None
    """Bytes needed at the peak of the passes beside the parameters; None where the device does not
    count them."""


# Keys of a table's rows that may be left out.
HOST = ("forward_host_seconds", "backward_host_seconds")


class ProfileTable(WithoutEmpty):
    """Seconds of every layer for one micro-batch on one device of a tensor group."""

    device: Name
    """Device type."""
    tensor: PositiveCount
    """Devices of the tensor group."""
    micro_batch: PositiveCount
    """Samples."""
    forward_seconds: SecondsRow
    """[L] of a layer's forward pass."""
    backward_seconds: SecondsRow
    """[L] of a layer's backward pass."""
    forward_host_seconds: SecondsRow = Field(default_factory=list)
    """[L] seconds in which the host launches the kernels of a forward pass
    (`hetplan.profiling.rates.times.together`); empty in measured tables."""
    backward_host_seconds: SecondsRow = Field(default_factory=list)
    """[L] the same of a backward pass."""
    interval: Annotated[tuple[Positive, Positive], Strict(False)] | None = None
    """(low, high) of a predicted table: the ends of the interval of its seconds, as ratios to the
    seconds. They follow from the predictor's errors on measurements that its fits had not seen."""
    readings: Readings | None = None
    """The further readings of a measured table."""

    def spread(self) -> list[float] | None:
        """[L] the spread of each layer's seconds, forward and backward added; None where nothing
        was measured."""
        if self.readings is None:
            return None
        both = self.readings.forward_spread_seconds, self.readings.backward_spread_seconds
        return [forward + backward for forward, backward in zip(*both, strict=True)]

    def layer_seconds(self) -> list[float]:
        """[L] seconds of each layer, forward and backward added."""
        both = self.forward_seconds, self.backward_seconds
        return [forward + backward for forward, backward in zip(*both, strict=True)]


def keyed_rows(table: ProfileTable) -> Iterator[tuple[str, Sequence[float]]]:
    """(key, row) of each row of a table that needs one entry per layer, without the rows that the
    table leaves out."""
    for key in ("forward_seconds", "backward_seconds"):
        yield key, getattr(table, key)
    for key in HOST:
        if getattr(table, key):
            yield key, getattr(table, key)
    for key, row in table.readings or ():  # a model's fields as pairs
        if row is not None:
            yield f"readings.{key}", row


class Profile(Document):
    """The profile of a model with L layers."""

    format: Literal["hetplan-profile"] = "hetplan-profile"
    version: Literal[1] = 1
    model: Name
    sequence: PositiveCount | None = None
    """Tokens per sample; None for images."""
    precision: Precision
    provenance: Provenance
    layers: list[ProfileLayer] = Field(min_length=1, max_length=4096)
    """[L] the layers in the order of the model."""
    tables: list[ProfileTable] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        place_of: dict[tuple[str, int, int], int] = {}
        for i, table in enumerate(self.tables):
            for key, row in keyed_rows(table):
                require(
                    len(row) == len(self.layers),
                    f"tables[{i}].{key} has {len(row)} entries, "
                    f"expected one per layer ({len(self.layers)})",
                )
            key_of_table = (table.device, table.tensor, table.micro_batch)
            before = place_of.setdefault(key_of_table, i)
            require(
                before == i,
                f"tables[{i}] repeats tables[{before}] (same device, tensor, micro_batch)",
            )
        return self

    def devices(self) -> tuple[str, ...]:
        """Device types with at least one table, in order of appearance."""
        return tuple(dict.fromkeys(table.device for table in self.tables))

    def table(self, device: str, tensor: int, micro_batch: int) -> ProfileTable | None:
        """The table of a device type, tensor degree and micro-batch; None where there is none."""
        return self._by_key.get((device, tensor, micro_batch))

    def micro_batches(self, device: str, tensor: int) -> tuple[int, ...]:
        """The micro-batches with a table of a device type and tensor degree, ascending."""
        return tuple(sorted(m for d, t, m in self._by_key if (d, t) == (device, tensor)))

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, int], ProfileTable]:
        """(device type, tensor degree, micro-batch) -> its table."""
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
    # Validated again, unlike a copy: factors may lead out of the range of seconds.
    return Profile(**{**dict(profile), "tables": tables})
