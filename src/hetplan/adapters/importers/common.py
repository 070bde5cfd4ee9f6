"""The common parts of all importers: their settings and results, and profiles from chains of
operators."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.errors import require
from hetplan.files import read_foreign_text
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.profiles.profile import Profile, ProfileLayer, ProfileTable, Provenance
from hetplan.schema import as_name, derived

# The forward pass's share of the time where a file gives only the sum of forward and backward pass:
# the backward pass of matrix products takes twice the forward pass's time.
FORWARD_SHARE = 1 / 3
# The note of importers that divide times in this way.
DIVIDED_NOTE = "forward and backward are given together: a third counts as forward"
MOST_LAYERS = 4096  # layers of a profile
MOST_TEXT_BYTES = 64 * 2**20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # a terminal's escape sequence
# A date with a time, or a time, with the parts of a second that a log may have.
TIME_OF_DAY = re.compile(r"(?:\d{4}-\d\d-\d\d[T ,])?\d\d:\d\d:\d\d(?:[.,]\d+)?")


@dataclass(frozen=True)
class Settings:
    """The user's settings of an import, for facts that a file may lack.

    None: the importer takes the fact from the file, or else the usual value of its format.
    """

    model: str | None = None  # the model's name
    device: str | None = None  # the device type's name in cluster files
    precision: Precision | None = None
    sequence: int | None = None  # tokens of a sample
    micro_batch: int | None = None  # samples in one measured pass
    nodes: int | None = None  # number of nodes of a cluster
    with_links: bool = False  # whether the user also wants a cluster file with the links

    def check_one_device_type(self, kinds: Iterable[str]) -> None:
        """Raise InputError where the user names one device type, but the files have several.

        kinds: the device types of the files.
        """
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
    """The result of an import: a document in one of hetplan's formats."""

    kind: str  # profile, cluster or model
    document: dict[str, Any]  # the content of hetplan's file, as JSON types
    notes: tuple[str, ...] = ()  # what the importer had to assume, for the user


@dataclass(frozen=True)
class Operator:
    """One operator of a chain, with its costs in one measured pass."""

    name: str
    forward: float  # seconds of the forward pass
    backward: float  # seconds of the backward pass
    params: float  # bytes of parameters
    output: float  # bytes sent to every operator that reads the output
    kept: float  # bytes kept until the backward pass


def layer(
    name: str, params: float, activation: float, saved: float, replicated: float = 0.0
) -> ProfileLayer:
    """A profile's layer without tensor-parallel all-reduces.

    params: bytes of parameters. The other sizes are bytes per sample. activation: bytes sent to the
    next layer. saved: bytes kept until the backward pass. replicated: the part of `saved` that
    every tensor-parallel rank keeps whole.
    """
    return ProfileLayer(
        name=as_name(name),
        param_bytes=params,
        activation_bytes=activation,
        tensor_bytes=0.0,
        saved_bytes=saved,
        replicated_saved_bytes=replicated,
    )


def table_of_sums(device: str, tensor: int, micro_batch: int, both: list[float]) -> ProfileTable:
    """A profile's table of a file that gives only the sum of forward and backward seconds.

    both [L]: seconds of the two passes together.
    """
    return ProfileTable(
        device=device,
        tensor=tensor,
        micro_batch=micro_batch,
        forward_seconds=[FORWARD_SHARE * seconds for seconds in both],
        backward_seconds=[(1 - FORWARD_SHARE) * seconds for seconds in both],
    )


def chain_layers(chain: Sequence[tuple[Operator, float]], batch: int = 1) -> list[ProfileLayer]:
    """A profile's layers, one for each operator of a chain.

    chain: (operator, bytes that cross the cut behind it) in one pass of `batch` samples.
    """
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
    """A profile with one table, for micro-batches of `settings.micro_batch` samples (None: 1).

    chain: the argument of `chain_layers`. model, device: names of the model and of the device type,
    unless the user gives others. source: the profile's provenance. where: the file, for errors.
    """
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
    """A measured profile with the importer's notes.

    model, sequence, precision: values that the user's settings override. source: the profile's
    provenance. where: the file, for errors. notes: the importer's assumptions; empty ones are left
    out. Raises InputError where a size is out of range.
    """
    check_layers(len(layers), where)
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


def check_layers(count: int, where: str) -> None:
    """Raise InputError for more layers than a profile has. count: number of layers."""
    require(
        count <= MOST_LAYERS,
        "too many layers",
        where=where,
        got=count,
        expected=f"at most {MOST_LAYERS}",
    )


def lines_of(path: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not empty, each with its number from 1 on."""
    text = read_foreign_text(path, MOST_TEXT_BYTES)
    return [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]


def lines_of_one_rank(lines: list[tuple[int, str]], mark: str) -> list[tuple[int, str]]:
    """The lines of a log that one rank has written, without what a launcher puts before each line.

    Launchers write the rank, the host or the time before a line: `0: `, `[default0]:`, `host: `. A
    program underlines its headings with dashes, so that the text before the dashes of a heading is
    what the launcher has written. Other ranks wrote the lines that do not begin with this text;
    times in it may differ. Without a heading, and where nothing stands before it, all lines are the
    result.

    lines: (number, text) of each line. mark: words of the heading; of several the last counts.
    """
    lines = [(number, COLOUR.sub("", line)) for number, line in lines]
    headings = [line for _, line in lines if mark in line]
    # text that a launcher writes before a line never ends with a dash
    prefix = headings[-1].partition(mark)[0].rstrip().rstrip("-") if headings else ""
    if not prefix.strip():
        return lines
    # The pattern of the prefix, in which digits of times stand for any digits.
    parts = TIME_OF_DAY.split(prefix)
    times = [re.sub(r"\d", r"\\d", re.escape(time)) for time in TIME_OF_DAY.findall(prefix)]
    pattern = re.escape(parts[0])
    for time, part in zip(times, parts[1:], strict=True):
        pattern += time + re.escape(part)
    # An editor or a launcher may have cut the blanks at the end of an empty line.
    begins = re.compile(pattern)
    return [
        (number, line[match.end() :]) for number, line in lines if (match := begins.match(line))
    ]
