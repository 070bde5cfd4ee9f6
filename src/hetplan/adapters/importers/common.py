"""Settings and results of all importers, and profiles from chains of layers."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.errors import InputError, require
from hetplan.files import read_bytes
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.profiles.profile import Profile, ProfileLayer, ProfileTable, Provenance
from hetplan.schema import as_name, derived

# A backward pass of matrix products takes twice the forward's time; where a file gives their sum
# only.
FORWARD_SHARE = 1 / 3
TOGETHER = "forward and backward are given together: a third counts as forward"


@dataclass(frozen=True)
class Settings:
    """Settings of an importer that a file may lack. None: those of the file, or the format's usual.

    device: the device type's name in cluster files. micro_batch: samples in one measured pass.
    nodes: of a cluster.
    """

    model: str | None = None
    device: str | None = None
    precision: Precision | None = None
    sequence: int | None = None
    micro_batch: int | None = None
    nodes: int | None = None

    def one_kind(self, kinds: Iterable[str]) -> None:
        """Raise InputError where the user names one device type and there are several."""
        several = sorted(set(kinds))
        require(
            self.device is None or len(several) <= 1,
            "several device types",
            where="--device-type",
            got=", ".join(several),
            expected="PATH of one of them",
        )

    def device_note(self, device: str) -> str:
        """A note that the device type's name is assumed; empty where the user gave the name."""
        if self.device:
            return ""
        return (
            f"the file names no device type: {device!r}; "
            "--device-type gives the name in cluster files"
        )


@dataclass(frozen=True)
class Imported:
    """kind: profile, cluster or model. document: the file's content, as JSON types. notes: what had
    to be assumed."""

    kind: str
    document: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One link of a chain. Seconds and bytes of a whole pass.

    output: bytes for each operator behind it. kept: bytes until the backward pass.
    """

    name: str
    forward: float
    backward: float
    params: float
    output: float
    kept: float


def layer(
    name: str, params: float, activation: float, saved: float, replicated: float = 0.0
) -> ProfileLayer:
    """A layer without tensor-parallel all-reduces of its own; bytes."""
    return ProfileLayer(
        name=as_name(name),
        param_bytes=params,
        activation_bytes=activation,
        tensor_bytes=0.0,
        saved_bytes=saved,
        replicated_saved_bytes=replicated,
    )


def table_of_sums(device: str, tensor: int, micro_batch: int, both: list[float]) -> ProfileTable:
    """A table from seconds of forward and backward passes together."""
    return ProfileTable(
        device=device,
        tensor=tensor,
        micro_batch=micro_batch,
        forward_seconds=[FORWARD_SHARE * seconds for seconds in both],
        backward_seconds=[(1 - FORWARD_SHARE) * seconds for seconds in both],
    )


def chain_layers(chain: Sequence[tuple[Operator, float]], batch: int = 1) -> list[ProfileLayer]:
    """Layers from (operator, bytes that pass the cut behind it) of passes of `batch` samples."""
    return [
        layer(f"{i}-{op.name}", op.params, crossing / batch, op.kept / batch)
        for i, (op, crossing) in enumerate(chain)
    ]


def chain_profile(
    chain: Sequence[tuple[Operator, float]],
    settings: Settings,
    *,
    model: str,
    device: str,
    source: str,
    where: str,
    notes: Iterable[str] = (),
) -> Imported:
    """A profile of one table, of passes of `micro_batch` samples. device: the type's name where the
    user gives none."""
    batch = settings.micro_batch or 1
    table = ProfileTable(
        device=settings.device or device,
        tensor=1,
        micro_batch=batch,
        forward_seconds=[op.forward for op, _ in chain],
        backward_seconds=[op.backward for op, _ in chain],
    )
    return profile(
        settings,
        model=model,
        source=source,
        where=where,
        layers=chain_layers(chain, batch),
        tables=[table],
        notes=(settings.device_note(device), *notes),
    )


def profile(
    settings: Settings,
    *,
    model: str,
    source: str,
    where: str,
    layers: list[ProfileLayer],
    tables: list[ProfileTable],
    sequence: int | None = None,
    precision: Precision = "fp32",
    notes: Iterable[str] = (),
) -> Imported:
    """A measured profile and what had to be assumed (empty notes are left out); raises InputError
    where sizes are out of range."""
    with derived(where):
        profile = Profile(
            model=as_name(settings.model or model),
            sequence=settings.sequence or sequence,
            precision=settings.precision or precision,
            provenance=Provenance(
                kind="measured",
                source=as_name(source),
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            ),
            layers=layers,
            tables=tables,
        )
    return Imported("profile", profile.model_dump(mode="json"), tuple(filter(None, notes)))


def lines_of(path: str) -> list[tuple[int, str]]:
    """Numbered lines that are not empty."""
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text at byte {error.start}", where=path) from None
    return [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
