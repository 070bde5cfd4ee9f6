"""Strict pydantic models, units as types and one-line errors for the schemas of all files; and
models for files of other programs, of the keys that are read.

All numbers are SI: seconds, bytes, bytes per second, FLOP, FLOP per second (suffixes in the names
say which).
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    RootModel,
    Strict,
    ValidationError,
)

from hetplan.errors import (
    LONGEST_KEY,
    InputError,
    T,
    json_path,
    printable,
    require,
    suggestion,
)
from hetplan.files import read_json, to_json, write_text


class StrictModel(BaseModel):
    """Frozen; unknown keys, NaN, infinities and silently converted types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def nothing_below(least: float) -> Callable[[float], float]:
    """A validator of numbers >= 0: one that lets 0 and what is at least `least` pass."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise ValueError(f"is {value!r}, expected 0 or at least {least:g}")
        return value

    return check


# Above 1e30 products of two entries stay far inside float64, so no evaluation can overflow.
LARGEST = 1e30
# What is divided by is no less than this, so that no quotient of two entries overflows.
SMALLEST = 1e-30
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
# What describes hardware and what was measured on it (cluster, profile) stays far inside of that,
# so that what instances derive from it does, too: sums over thousands of layers, products with a
# billion samples, quotients by the slowest device and link. What is smaller than the least is no
# measurement, and quotients by it overflow.
MOST_SECONDS, LEAST_SECONDS = 1e9, 1e-15
MOST_BYTES, LEAST_BYTES = 1e21, 1e-3
MOST_RATE, LEAST_RATE = 1e9, 1e-6
Count = Annotated[int, Field(ge=0, le=10**9)]
PositiveCount = Annotated[int, Field(ge=1, le=10**9)]
# What no text of hetplan's own files holds: control characters, and what ends a line anywhere.
# (Rust, Python and JSON schemas read the pattern alike.)
PLAIN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=PLAIN)]
# A sentence or a list of some, without line breaks.
Line = Annotated[str, Field(max_length=10_000, pattern=PLAIN)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Seconds = Annotated[
    float, Field(ge=0, le=MOST_SECONDS), AfterValidator(nothing_below(LEAST_SECONDS))
]
Bytes = Annotated[float, Field(ge=0, le=MOST_BYTES), AfterValidator(nothing_below(LEAST_BYTES))]
# A datasheet's figure in its own unit: TFLOP/s, GB/s, Gbit/s, GiB.
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
# [first, last). JSON has no tuples, so a list of two is one; the entries themselves stay strict.
Range = Annotated[tuple[Count, Count], Strict(False)]
# Long lists stop at the first wrong entry: collecting millions of complaints takes minutes and
# gigabytes.
Row = Annotated[list[NonNegative], FailFast()]
Matrix = Annotated[list[Row], FailFast()]
SecondsRow = Annotated[list[Seconds], FailFast()]

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], value: Any, *, where: str, prefix: Sequence[int | str] = ()) -> M:
    """`value` (parsed JSON or YAML) as a `model`; raises InputError naming file, path, got and
    expected."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise input_error(error, where=where, prefix=prefix, model=model) from None


class Document(StrictModel):
    """A JSON file of its own kind: a subclass has fields `format` and `version` with one value
    each, which are checked before everything else."""

    @classmethod
    def parsed(cls, value: Any, *, where: str) -> Self:
        """From parsed JSON; raises InputError naming `where`, place, got and expected."""
        kind, version = (cls.model_fields[key].default for key in ("format", "version"))
        check_header(value, kind, version, where=where)
        return parse(cls, value, where=where)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a file (`.gz`: unpacked); raises InputError naming file, place, got and expected."""
        return cls.parsed(read_json(path), where=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically (gzip where the name ends in .gz)."""
        write_text(path, to_json(self.model_dump(mode="json")))


@contextlib.contextmanager
def derived(where: str) -> Iterator[None]:
    """Around what builds models from a user's numbers: one out of range is an InputError there, and
    no bug.

    where: what the numbers are of. Anything else that is wrong with what is built stays a
    ValidationError.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] not in SIZES:
            raise
        raise InputError(
            f"{json_path(first['loc'])} follows from what is given, and is out of range",
            where=where,
            got=first["input"],
            expected=expectation(first),
        ) from None


def check_length(row: Sequence[object], count: int, where: str, per: str) -> None:
    """A list has one entry per layer, device or whatever `per` names."""
    require(len(row) == count, f"{where} has {len(row)} entries, expected one per {per} ({count})")


def check_distinct_names(names: Sequence[str], where: str) -> None:
    """Raise ValueError where two entries of the list `where` have one name."""
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in first:
            raise ValueError(f"{where}[{i}].name repeats {where}[{first[name]}].name ({name!r})")
        first[name] = i


def check_every_type(bytes_of: Mapping[str, float], types: Iterable[str]) -> None:
    """memory.device_bytes names every device type."""
    missing = sorted({*types} - {*bytes_of})
    lacks = f"memory.device_bytes lacks device type {min(missing, default='')!r}"
    require(not missing, f"{lacks}, expected every type")


def check_header(value: Any, kind: str, version: int, *, where: str) -> None:
    """Refuse what is no file of this kind and version, before any other complaint; raises
    InputError."""
    require(
        isinstance(value, dict),
        "not an object",
        where=where,
        got=value,
        expected=f'an object with "format": "{kind}"',
    )
    for key, what, known in (
        ("format", f"not a {kind} file", kind),
        ("version", "version not readable here", version),
    ):
        stated = value.get(key)
        require(
            not isinstance(stated, bool) and stated == known,
            what,
            where=f"{where}: {key}",
            got=stated,
            expected=f"{known}",
        )


def input_error(
    error: ValidationError,
    *,
    where: str,
    prefix: Sequence[int | str] = (),
    model: type[BaseModel] | None = None,
) -> InputError:
    """The first of pydantic's complaints as one line, unknown keys before all others; the number of
    further ones is told. model: whose keys are suggested for an unknown one."""
    problems = error.errors(include_url=False, include_context=True)
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    path = json_path([*prefix, *(p for p in first["loc"] if not str(p).startswith("function-"))])
    more = f" [and {len(problems) - 1} more]" if len(problems) > 1 else ""
    place = f"{where}: {path}" if path else where
    complaints = {
        "missing": "required key is missing",
        "extra_forbidden": "unknown key" + similar_keys(first, model),
        # our own checks already say what was got and expected
        "value_error": first["msg"].removeprefix("Value error, "),
        "union_tag_invalid": first["msg"],
        "union_tag_not_found": first["msg"],
    }
    if first["type"] in complaints:
        return InputError(f"{complaints[first['type']]}{more}", where=place)
    return InputError(
        f"not usable{more}", where=place, got=first["input"], expected=expectation(first)
    )


def similar_keys(problem: Mapping[str, Any], model: type[BaseModel] | None) -> str:
    """`; did you mean A?` of an unknown key, with keys of the model and of its parts."""
    if model is None or problem["type"] != "extra_forbidden":
        return ""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    known = {key for part in parts for key in part.get("properties", {})}
    return suggestion(str(problem["loc"][-1])[:LONGEST_KEY], sorted(known))


# What `PLAIN` expects, for people.
PLAIN_TEXT = "text of one line without control characters"
# pydantic's bounds in fewer words.
BOUNDS = {
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
}
# Complaints about the size of a number; a wrong type or shape is another matter.
SIZES = {*BOUNDS, "finite_number"}


def expectation(problem: Mapping[str, Any]) -> str:
    """The expectation of one of pydantic's errors: its bound, or its `Input should be …` without
    that opening."""
    if problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == PLAIN:
        return PLAIN_TEXT
    if problem["type"] in BOUNDS:
        key, words = BOUNDS[problem["type"]]
        bound = problem["ctx"][key]
        return f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound:.12g}"
    complaint = str(problem["msg"]).partition(" after validation")[0]
    message = complaint.removeprefix("Input should ").removeprefix("be ")
    return message[:1].lower() + message[1:]


def check_plain(value: Any, where: str, *path: int | str) -> None:
    """Raise InputError unless every text of a parsed document, keys too, is of one line and without
    control characters."""
    place = f"{where}: {json_path(path)}" if path else where
    if isinstance(value, str):
        fits = re.fullmatch(PLAIN, value)
        require(fits, "not usable", where=place, got=value, expected=PLAIN_TEXT)
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_plain(key, place)
            check_plain(inner, where, *path, str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            check_plain(inner, where, *path, number)


def as_name(text: str) -> str:
    """A text from elsewhere, of another program's file or of a file's own name, as a `Name`."""
    return printable(text)[:200]


# A name in another program's file, which is read leniently.
ForeignName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(as_name)]


class Foreign(BaseModel):
    """An object with strict types for the keys that are read; others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class ForeignRoot(RootModel[T]):
    """A whole document that is no object with known keys."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


Filled = Annotated[T, Field(min_length=1)]
# A tensor degree as the key of an object: JSON has only texts there.
DegreeKey = Annotated[int, Field(ge=1, le=4096), Strict(False)]


def in_order(by_number: Any) -> Any:
    """Entries of {"0": …, "1": …, …} by number; a validator, raises ValueError."""
    require(isinstance(by_number, dict), 'is no object {"0": …, "1": …, …}')
    numbers = [str(number) for number in range(len(by_number))]
    missing = [number for number in numbers if number not in by_number]
    if missing:
        raise InputError(f"layer {missing[0]} is missing, expected layers from 0 on")
    return [by_number[number] for number in numbers]


# An object with one entry for every layer, as a list.
ByLayer = Annotated[Filled[list[T]], BeforeValidator(in_order)]


def read_foreign(kind: type[M], path: str | os.PathLike[str]) -> M:
    """A JSON file as a model; raises InputError naming file, place, got and expected."""
    return parse(kind, read_json(path), where=os.fspath(path))
