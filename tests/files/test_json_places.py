"""What strict JSON refuses, and that the error says where it stands: file and JSON path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fuzzing.mutations import check_one_line
from hetplan.errors import InputError, json_path as path_text, one_line
from hetplan.files import parse_json, read_json


def message(text: str) -> str:
    """The error of a text called `f`."""
    with pytest.raises(InputError) as caught:
        parse_json(text, where="f")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NaN", "f: number is not finite (got 'NaN', expected a finite number)"),
        ('{"a": {"b": [1, 2,\n  3, -Infinity]}}', "f: a.b[3]: number is not finite (got '-Inf"),
        ('[{"x": 1},\n {"y": [[], ["NaN", Infinity]]}]', "f: [1].y[1][1]: number is not"),
        ('{"a": 1, "b": 2,\n "a": 3}', "f: a: key 'a' stands twice in one object"),
        ('{"l": [0, {"k": "k", "\\u006b": 0}]}', "f: l[1].k: key 'k' stands twice"),
        ('{"a": "x\\"]}", "b": {"b": NaN}}', "f: b.b: number is not finite"),
        ('{"a": {"k": 1}, "b": {"k": 1, "k": 2}}', "f: b.k: key 'k' stands twice"),
        ('{"a": {"k": NaN}, "a": 2}', "f: a: key 'a' stands twice"),
        (f'{{"n": [1, 2, -{"7" * 5000}]}}', "f: n[2]: an integer of 5000 digits (expected at"),
        ("9" * 100_000, "f: an integer of 100000 digits (expected at most 4300)"),
        ('{"a":\n' + "[" * 70, "f: line 2: nested too deeply (expected at most 64 levels)"),
        ('{"a": 1, "b": }', "f: line 1 column 15: not valid JSON"),
        ('{"a": NaN, "b": nonsense', "f: line 1 column 17: not valid JSON"),
        ('{"a": [1, NaN0.5]}', "f: line 1 column 14: not valid JSON"),
    ],
)
def test_place(text: str, expected: str) -> None:
    error = message(text)
    assert error.startswith(expected)
    assert "\n" not in error and len(error) < 300


def test_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"data": [NaN]}')
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: data[0]: number is not finite")


# Texts of every shape, with the place of each value known.
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
documents = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)


def places(value: Any) -> list[list[str | int]]:
    """The path of every value inside a list or an object."""
    keys: Any = (
        range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    )
    return [[key, *rest] for key in keys for rest in ([], *places(value[key]))]


@given(documents, st.data())
def test_not_a_number_is_found_wherever_it_stands(document: Any, data: st.DataObject) -> None:
    value = json.loads(json.dumps({"top": [document]}))
    path = data.draw(st.sampled_from(places(value)))
    container = value
    for part in path[:-1]:
        container = container[part]
    container[path[-1]] = math.nan
    assert message(json.dumps(value)).startswith(
        one_line(f"f: {path_text(path)}: number is not finite")
    )


@pytest.mark.parametrize("block", range(4))
def test_damaged_texts_never_escape(block: int) -> None:
    """2000 texts with constants, keys and digits put where they do not belong: a value, or one
    line."""
    document = {
        "name": "x",
        "rows": [[1, 2.5, -3e-7], []],
        "more": [{"a": None, "b": "NaN"}, {"a": True}],
    }
    endings = set()
    for i in range(500):
        rng = Random(f"{block} {i}")
        text = json.dumps(document, indent=rng.choice((None, 1)))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(INSERTED) + text[at + rng.choice((0, 0, 1, 5)) :]
        try:
            parse_json(text, where="f")
        except InputError as error:
            check_one_line(str(error), "f: ")
            endings.add(str(error).split("(")[-1][:10])
    assert len(endings) > 3


INSERTED = (
    "NaN",
    "-Infinity",
    "Infinity",
    '"a": 1, ',
    '"name": 2, ',
    "9" * 4400,
    "-" + "9" * 4400,
    ",",
    '"',
    "{",
    "]",
)


@given(documents)
def test_what_is_json_stays_as_it_is(document: Any) -> None:
    text = json.dumps(document)
    assert parse_json(text, where="f") == json.loads(text)
