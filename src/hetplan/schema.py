"""The base of the schemas of all files: strict pydantic models, types for numbers with a unit, and
errors of one line.

`Document` and `StrictModel` are for hetplan's own files, in which unknown keys are refused.
`Foreign` is for files of other programs, of which a model lists only the keys that hetplan reads.

All numbers are SI: seconds, bytes, bytes per second, FLOP, FLOP per second. Suffixes in the names
say which.
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
from hetplan.files import read_foreign_json, read_json, to_json, write_text


class StrictModel(BaseModel):
    """The base class of the models of hetplan's own files. Instances are frozen; unknown keys, NaN,
    infinities and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def nothing_below(least: float) -> Callable[[float], float]:
    """A validator of numbers >= 0 that raises ValueError for numbers between 0 and `least`."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise ValueError(f"is {value!r}, expected 0 or at least {least:g}")
        return value

    return check


# Products and quotients of two entries between these limits stay far inside float64, so that no
# evaluation overflows.
LARGEST = 1e30
SMALLEST = 1e-30
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
# The limits of figures of hardware and of measurements on it (clusters, profiles). They are far
# narrower, since instances derive their entries from these figures: as sums over thousands of
# layers, products with a billion samples, and quotients by the slowest device and link. A figure
# below the least one is no measurement, and quotients by it overflow.
MOST_SECONDS, LEAST_SECONDS = 1e9, 1e-15
MOST_BYTES, LEAST_BYTES = 1e21, 1e-3
MOST_RATE, LEAST_RATE = 1e9, 1e-6
Count = Annotated[int, Field(ge=0, le=10**9)]
PositiveCount = Annotated[int, Field(ge=1, le=10**9)]
# The pattern of every text in hetplan's own files: without control characters and without any
# character that ends a line. Rust, Python and JSON schemas read the pattern alike.
PLAIN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=PLAIN)]
# One or more sentences without line breaks.
Line = Annotated[str, Field(max_length=10_000, pattern=PLAIN)]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Seconds = Annotated[
    float, Field(ge=0, le=MOST_SECONDS), AfterValidator(nothing_below(LEAST_SECONDS))
]
Bytes = Annotated[float, Field(ge=0, le=MOST_BYTES), AfterValidator(nothing_below(LEAST_BYTES))]
# A datasheet's figure in its own unit: TFLOP/s, GB/s, Gbit/s, GiB.
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
# [first, last). JSON has no tuples, so that a list of two entries is accepted as one; the entries
# themselves stay strict.
Range = Annotated[tuple[Count, Count], Strict(False)]
# Long lists stop at the first wrong entry: collecting millions of complaints takes minutes and
# gigabytes.
Row = Annotated[list[NonNegative], FailFast()]
Matrix = Annotated[list[Row], FailFast()]
SecondsRow = Annotated[list[Seconds], FailFast()]

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], value: Any, *, where: str, prefix: Sequence[int | str] = ()) -> M:
    """`value` (parsed JSON or YAML) as an instance of `model`. Raises InputError with the place in
    `where`, what was got and what was expected. prefix: the keys that lead to `value`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise input_error(error, where=where, prefix=prefix, model=model) from None


class Document(StrictModel):
    """The base class of the kinds of JSON files. A subclass has fields `format` and `version`, each
    with the only value that it accepts as its default; both are checked before all other keys."""

    @classmethod
    def parsed(cls, value: Any, *, where: str) -> Self:
        """The document in parsed JSON. Raises InputError with the place in `where`, what was got
        and what was expected."""
        kind = cls.model_fields["format"].default
        version = cls.model_fields["version"].default
        check_header(value, kind, version, where=where)
        return parse(cls, value, where=where)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The document in a file; one whose name ends in `.gz` is unpacked. Raises InputError with
        the place in the file, what was got and what was expected."""
        return cls.parsed(read_json(path), where=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document to a file as JSON, atomically; gzip where the name ends in .gz."""
        write_text(path, to_json(self.model_dump(mode="json")))


@contextlib.contextmanager
def derived(where: str) -> Iterator[None]:
    """A context for building models from numbers that hetplan derives from a user's input.

    A derived number out of range is the user's error, not a bug of hetplan. The context turns its
    ValidationError into an InputError; every other ValidationError passes through. where: the
    origin of the numbers, for the message.
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
    """Raise InputError unless the list `row` has `count` entries, one for each `per` (`layer`,
    `device`). where: the list's name."""
    require(len(row) == count, f"{where} has {len(row)} entries, expected one per {per} ({count})")


def check_distinct_names(names: Sequence[str], where: str) -> None:
    """Raise ValueError where two entries of a list have the same name. names: names of all entries;
    where: the list's name."""
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in first:
            raise ValueError(f"{where}[{i}].name repeats {where}[{first[name]}].name ({name!r})")
        first[name] = i


def check_every_type(bytes_of: Mapping[str, float], types: Iterable[str]) -> None:
    """Raise InputError unless `bytes_of`, the mapping memory.device_bytes, has an entry for every
    device type."""
    missing = sorted({*types} - {*bytes_of})
    lacks = f"memory.device_bytes lacks device type {min(missing, default='')!r}"
    require(not missing, f"{lacks}, expected every type")


def check_header(value: Any, kind: str, version: int, *, where: str) -> None:
    """Raise InputError unless `value`, a parsed file, is an object with this `format` and
    `version`."""
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
    """The first of pydantic's errors as one line, with the number of further ones.

    An unknown key counts as the first error. where: the file. prefix: the keys that lead to the
    validated value. model: the model whose keys are suggested for an unknown one.
    """
    problems = error.errors(include_url=False, include_context=True)
    unknown_keys = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    first = (unknown_keys or problems)[0]
    # pydantic names validators, such as `function-before[…]`, among the keys
    keys = [key for key in first["loc"] if not str(key).startswith("function-")]
    path = json_path([*prefix, *keys])
    more = f" [and {len(problems) - 1} more]" if len(problems) > 1 else ""
    place = f"{where}: {path}" if path else where
    complaints = {
        "missing": "required key is missing",
        "extra_forbidden": "unknown key" + similar_keys(first, model),
        # our own checks already say what was got and expected
        "value_error": first["msg"].removeprefix("Value error, "),
    }
    if first["type"] in complaints:
        return InputError(f"{complaints[first['type']]}{more}", where=place)
    got, expected = first["input"], expectation(first)
    if first["type"] == "union_tag_invalid":
        place, got = f"{place}.{key_of_tag(first)}", first["ctx"]["tag"]
    if first["type"] == "union_tag_not_found":
        return InputError(
            f"required key is missing{more}",
            where=f"{place}.{key_of_tag(first)}",
            expected=expected,
        )
    if got is None:
        got = NOTHING
    in_yaml = os.path.splitext(where)[1] in (".yaml", ".yml")
    number = re.fullmatch(TEXT_IN_YAML, got) if isinstance(got, str) else None
    if in_yaml and number is not None and expected == KINDS["float_type"]:
        whole, fraction, exponent = number.groups()
        written = f"{whole}{fraction or '.0'}e{int(exponent):+d}"
        expected += f"; YAML takes this for text: write {written}"
    return InputError(f"not usable{more}", where=place, got=got, expected=expected)


class Nothing:
    """The value null, as messages show it; an error whose `got` is None has no such part."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = Nothing()
# A number that YAML 1.1 takes for text, because it lacks the point or the sign of its exponent.
TEXT_IN_YAML = r"([-+]?[0-9]{1,99})(\.[0-9]{1,99})?[eE]([-+]?[0-9]{1,9})"


def key_of_tag(problem: Mapping[str, Any]) -> str:
    """The key whose value chooses the class of an object."""
    return str(problem["ctx"]["discriminator"]).strip("'")


def similar_keys(problem: Mapping[str, Any], model: type[BaseModel] | None) -> str:
    """`; did you mean A?` for an unknown key, with similar keys of the object in which it stands.
    Empty for other errors, and where no key is similar. model: model of the whole document."""
    if model is None or problem["type"] != "extra_forbidden":
        return ""
    schema = model.model_json_schema()
    *path, key = problem["loc"]
    known: set[str] = set()
    for place in places_in(schema, path):
        known |= place.get("properties", {}).keys()
    return suggestion(str(key)[:LONGEST_KEY], sorted(known))


def places_in(schema: Mapping[str, Any], path: Sequence[int | str]) -> list[Mapping[str, Any]]:
    """The schemas of the objects to which a path of pydantic's leads. There are several where the
    path does not say which class of a union an object has.

    schema: the JSON schema of the whole document. path: keys, indices and tags of unions.
    """
    places = whole_schemas(schema, schema)
    for part in path:
        found: list[Mapping[str, Any]] = []
        for place in places:
            steps: list[Any] = []
            if isinstance(part, int):
                steps = [place.get("items"), *place.get("prefixItems", [])]
            elif part in place.get("properties", {}):
                steps = [place["properties"][part]]
            else:  # an object with any keys
                steps = [place.get("additionalProperties")]
                steps += place.get("patternProperties", {}).values()
            for step in steps:
                if isinstance(step, dict):
                    found += whole_schemas(step, schema)
        # A part that leads nowhere is the tag of a union; only classes with this tag may be meant.
        places = found or [p for p in places if has_tag(p, part)] or places
    return places


def whole_schemas(part: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas for which a part of a JSON schema stands: itself, the definition to which it
    refers, or those of the classes of a union."""
    if "$ref" in part:
        return whole_schemas(schema["$defs"][part["$ref"].rpartition("/")[2]], schema)
    classes = [*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())]
    if not classes:
        return [part]
    return [whole for one in classes for whole in whole_schemas(one, schema)]


def has_tag(schema: Mapping[str, Any], tag: int | str) -> bool:
    """Whether one of a class's keys has the tag as its only value."""
    return any(entry.get("const") == tag for entry in schema.get("properties", {}).values())


# The pattern `PLAIN` in words.
PLAIN_TEXT = "text of one line without control characters"
# Type of pydantic's error about a bound -> the key of the bound in its context, and the bound's
# meaning in words.
BOUNDS = {
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
}
# Type of pydantic's error about the kind of a value -> the expected kind in words.
KINDS = {
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
}
# Types of pydantic's errors about the size of a number.
SIZES = {*BOUNDS, "finite_number"}


def expectation(problem: Mapping[str, Any]) -> str:
    """The expectation of one of pydantic's errors: its bound in words, or its message without the
    opening `Input should be`."""
    if problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == PLAIN:
        return PLAIN_TEXT
    if problem["type"] in BOUNDS:
        key, words = BOUNDS[problem["type"]]
        bound = problem["ctx"][key]
        if isinstance(bound, float):
            return f"{words} {bound:g}"
        return f"{words} {bound:.12g}"  # `:g` would round an integer to six digits
    if problem["type"] in KINDS:
        return KINDS[problem["type"]]
    if problem["type"] == "union_tag_invalid":
        return "one of " + str(problem["ctx"]["expected_tags"]).replace("'", "")
    if problem["type"] == "union_tag_not_found":
        return "the kind of this object"
    message = str(problem["msg"]).partition(" after validation")[0]
    expected = message.removeprefix("Input should ").removeprefix("be ")
    return expected[:1].lower() + expected[1:]


def check_plain(value: Any, where: str, *path: int | str) -> None:
    """Raise InputError unless every text of a parsed document, keys included, has one line and no
    control characters. path: the keys that lead to `value`."""
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
    """A text of another program's file, or a file's name, made fit for a field of type `Name`."""
    return printable(text)[:200]


# A name in another program's file. Control characters are escaped instead of refused.
ForeignName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(as_name)]


class Foreign(BaseModel):
    """The base class of objects in other programs' files. The keys that a subclass lists have
    strict types; all other keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class ForeignRoot(RootModel[T]):
    """The base class of other programs' documents whose outermost value is a list, or an object
    with any keys."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


Filled = Annotated[T, Field(min_length=1)]
# A tensor degree as the key of an object. Keys of JSON objects are texts, so that a text is
# accepted as a number.
DegreeKey = Annotated[int, Field(ge=1, le=4096), Strict(False)]


def in_order(by_number: Any) -> Any:
    """The list of the entries of {"0": …, "1": …, …} by number. A validator; raises InputError, a
    ValueError, where a number is missing."""
    require(isinstance(by_number, dict), 'is no object {"0": …, "1": …, …}')
    numbers = [str(number) for number in range(len(by_number))]
    missing = [number for number in numbers if number not in by_number]
    if missing:
        raise InputError(f"layer {missing[0]} is missing, expected layers from 0 on")
    return [by_number[number] for number in numbers]


# An object with one entry for every layer, as a list.
ByLayer = Annotated[Filled[list[T]], BeforeValidator(in_order)]


def read_foreign(kind: type[M], path: str | os.PathLike[str]) -> M:
    """The JSON file of another program as an instance of the model `kind`. Raises InputError with
    the place in the file, what was got and what was expected. Values of keys that `kind` does not
    have are not judged."""
    return parse(kind, read_foreign_json(path), where=os.fspath(path))
