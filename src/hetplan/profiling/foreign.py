"""What other programs wrote, as pydantic models of the keys that are read."""

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, Strict

from hetplan.errors import T, require
from hetplan.files import read_json
from hetplan.schema import M, parse


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
    require(not missing, f"layer {next(iter(missing), None)} is missing, expected layers from 0 on")
    return [by_number[number] for number in numbers]


# An object with one entry for every layer, as a list.
ByLayer = Annotated[Filled[list[T]], BeforeValidator(in_order)]


def read_foreign(kind: type[M], path: str | os.PathLike[str]) -> M:
    """A JSON file as a model; raises InputError naming file, place, got and expected."""
    return parse(kind, read_json(path), where=os.fspath(path))
