"""Strict schemas of dataclasses, for files that carry their values.

A record is a pydantic model with the fields of a dataclass. It bounds every number, refuses unknown
keys, and is written without the fields that have their default value.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
)

from hetplan.schema import Line, NonNegative, StrictModel

# Sizes in elements: products of a vocabulary and the longest sequence stay below.
LARGEST_SIZE = 10**18
Whole = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
AtLeastOne = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
# Names of fields with whole numbers that may be 0 although 0 is not their default.
MAY_BE_ZERO = {
    *("vocabulary", "rope", "nope"),  # of a transformer's shape
    *("left", "out", "forward", "backward", "elements"),  # of operators and tensors
}


class Record(StrictModel):
    """A part of a file that is written without the keys that have their default value."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {
            key: value
            for key, value in written.items()
            if fields[key].is_required() or getattr(self, key) != default_of(fields[key])
        }


def default_of(field: Any) -> Any:
    """The default value of a field that is not required."""
    return field.get_default(call_default_factory=True)


@cache
def record_of(kind: type[Any]) -> type[Record]:
    """The record class of a dataclass, called `kind`.

    A whole number is at least 1, unless its default is 0 or its field is one of `MAY_BE_ZERO`. A
    field whose type is another dataclass holds the record of that one.
    """
    hints = get_type_hints(kind, include_extras=True)
    schema: dict[str, Any] = {}  # name of the field -> (type, default); `...`: required
    for field in dataclasses.fields(kind):
        may_be_zero = field.default == 0 or field.name in MAY_BE_ZERO
        default = ... if field.default is dataclasses.MISSING else as_record(field.default)
        schema[field.name] = (strict_type(hints[field.name], may_be_zero=may_be_zero), default)
    return create_model(kind.__name__, __base__=Record, __doc__=kind.__doc__, **schema)


def strict_type(hint: Any, *, may_be_zero: bool) -> Any:
    """The type of a record's field. hint: the type of the dataclass's field. may_be_zero: whether a
    whole number may be 0."""
    simple: Mapping[Any, Any] = {
        int: Whole if may_be_zero else AtLeastOne,
        float: NonNegative,
        str: Line,
        bool: bool,
        NoneType: None,
    }
    if hint in simple:
        return simple[hint]
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return record_of(hint)
    if get_origin(hint) in (Union, UnionType):
        parts = tuple(strict_type(part, may_be_zero=may_be_zero) for part in get_args(hint))
        return Union[parts]  # noqa: UP007
    assert get_origin(hint) is Literal, hint
    return hint


def as_record(value: Any) -> Any:
    """The record of a dataclass's object; any other value itself."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in dataclasses.fields(value)]
    return record_of(type(value))(**{name: as_record(getattr(value, name)) for name in names})


def from_record(kind: type[Any], record: BaseModel) -> Any:
    """The object of a record. kind: its dataclass."""
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        value = getattr(record, field.name)
        if isinstance(value, Record):
            value = from_record(dataclass_in(hints[field.name]), value)
        values[field.name] = value
    return kind(**values)


def dataclass_in(hint: Any) -> type[Any]:
    """The dataclass in a type, which is this dataclass or a union with it."""
    for part in (hint, *get_args(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    raise TypeError(f"{hint} has no dataclass")
