"""What every file's schema shares: strict pydantic models, units as types, and one-line errors.

All numbers are SI: seconds, bytes, bytes per second, FLOP, FLOP per second (suffixes in the names say which).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, ValidationError

from hetplan.errors import InputError, json_path


class StrictModel(BaseModel):
    """Frozen; unknown keys, NaN, infinities and silently converted types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# Above 1e30 products of two entries stay far inside float64, so no evaluation can overflow.
LARGEST = 1e30
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=10**9)]
PositiveCount = Annotated[int, Field(ge=1, le=10**9)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# [first, last). JSON has no tuples, so a list of two is one; the entries themselves stay strict.
Range = Annotated[tuple[Count, Count], Strict(False)]
# Long lists stop at the first wrong entry: collecting millions of complaints takes minutes and gigabytes.
Row = Annotated[list[NonNegative], FailFast()]
Matrix = Annotated[list[Row], FailFast()]

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], value: Any, *, where: str, prefix: Sequence[int | str] = ()) -> M:
    """`value` (parsed JSON or YAML) as a `model`; raises InputError naming file, path, got and expected."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise input_error(error, where=where, prefix=prefix) from None


def check_header(value: Any, kind: str, version: int, *, where: str) -> None:
    """Refuse what is no file of this kind and version, before any other complaint; raises InputError."""
    if not isinstance(value, dict):
        expected = f'an object with "format": "{kind}"'
        raise InputError("not an object", where=where, got=value, expected=expected)
    found = value.get("format")
    if found != kind:
        raise InputError(f"not a {kind} file", where=f"{where}: format", got=found, expected=kind)
    found = value.get("version")
    if isinstance(found, bool) or found != version:
        raise InputError(
            "version not readable here", where=f"{where}: version", got=found, expected=f"{version}"
        )


def input_error(error: ValidationError, *, where: str, prefix: Sequence[int | str] = ()) -> InputError:
    """The first of pydantic's complaints as one line; the number of further ones is told."""
    problems = error.errors(include_url=False, include_context=True)
    first = problems[0]
    path = json_path([*prefix, *(p for p in first["loc"] if not str(p).startswith("function-"))])
    more = f" [and {len(problems) - 1} more]" if len(problems) > 1 else ""
    place = f"{where}: {path}" if path else where
    message = first["msg"].removeprefix("Value error, ")
    kind = first["type"]
    if kind == "missing":
        return InputError(f"required key is missing{more}", where=place)
    if kind == "extra_forbidden":
        return InputError(f"unknown key{more}", where=place)
    if kind == "value_error":  # our own checks already say what was got and expected
        return InputError(f"{message}{more}", where=place)
    return InputError(f"not usable{more}", where=place, got=first["input"], expected=expectation(message))


def expectation(message: str) -> str:
    """pydantic's `Input should be …` turned into what goes behind `expected`."""
    for opening in ("Input should be ", "Input should "):
        if message.startswith(opening):
            return message.removeprefix(opening)
    return message[:1].lower() + message[1:]
