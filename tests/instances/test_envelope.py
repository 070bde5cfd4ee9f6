"""Instance files: what is read comes back, what is wrong is refused with its place."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from amp.generate import instance as amp_data
from fuzzing.mutations import as_json, check_one_line, damage, mutate
from hetplan.errors import InputError
from hetplan.files import parse_json, read_bytes, to_json
from hetplan.instances.library import (
    Instance,
    instance_schema,
    load_instance,
    parse_instance,
    save_instance,
)

Document = dict[str, Any]


def document(seed: int = 4) -> Document:
    """A valid amp instance file of a few devices and layers."""
    made = Instance(problem="amp", name=f"tiny-{seed}", origin="generated", data=amp_data(seed))
    return made.document()


# Control characters and separators of lines are refused.
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)


@settings(max_examples=30)
@given(st.integers(0, 30), names, names, st.floats(0, 1e30) | st.integers(0, 2**53))
def test_document_comes_back_unchanged(seed: int, name: str, layer: str, amount: float) -> None:
    made = {**document(seed), "name": name, "origin": layer}
    made["data"]["layers"][0] |= {"name": layer, "param_bytes": amount}
    assert parse_instance(parse_json(to_json(made), where="f"), where="f").document() == made


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_file_comes_back_unchanged(tmp_path: Path, ending: str) -> None:
    made = parse_instance(document(), where="f")
    path = tmp_path / f"a.{ending}"
    save_instance(made, path)
    assert load_instance(path).document() == made.document()
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == ending.endswith("gz")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(InputError, match="No space left"):
        save_instance(parse_instance(document(), where="f"), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


NODE = ("data", "devices", 1, "node")
LINK = ("data", "bandwidth", 0, 1)
SIZE = ("data", "layers", 0, "param_bytes")


def broken(*path: Any, value: Any = ..., seed: int = 4) -> Document:
    """The valid document with the entry at `path` replaced, or removed where no value is given."""
    made = copy.deepcopy(document(seed))
    container: Any = made
    for key in path[:-1]:
        container = container[key]
    if value is ...:
        del container[path[-1]]
    else:
        container[path[-1]] = value
    return made


AT_LEAST_0 = "expected at least 0"
FINITE = "expected a finite number"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, 'not an object (got 3, expected an object with "format": "hetplan-instance")'),
        (
            [],
            'not an object (got a list of 0, expected an object with "format": "hetplan-instance")',
        ),
        ({}, "format: not a hetplan-instance file (expected hetplan-instance)"),
        (broken("version", value=2), "version: version not readable here (got 2, expected 1)"),
        (
            broken("version", value=True),
            "version: version not readable here (got True, expected 1)",
        ),
        (broken("name"), "name: required key is missing"),
        (broken("name", value=5), "name: not usable (got 5, expected a text)"),
        (broken("extra", value=1), "extra: unknown key"),
        (broken("k" * 10**6, value=1), f"{'k' * 199}…: unknown key"),
        (broken(*NODE, value=-1), f"data.devices[1].node: not usable (got -1, {AT_LEAST_0})"),
        (
            broken(*NODE, value=1.0),
            "data.devices[1].node: not usable (got 1.0, expected a whole number)",
        ),
        (
            broken(*LINK, value=float("nan")),
            f"data.bandwidth[0][1]: not usable (got nan, {FINITE})",
        ),
        (
            broken(*LINK, value=float("inf")),
            f"data.bandwidth[0][1]: not usable (got inf, {FINITE})",
        ),
        (broken(*SIZE, value=-5), f"data.layers[0].param_bytes: not usable (got -5, {AT_LEAST_0})"),
        (
            broken(*SIZE, value="5"),
            "data.layers[0].param_bytes: not usable (got '5', expected a number)",
        ),
        (
            broken("data", "bandwidth", value=[[1.0]]),
            "data: bandwidth has 1 rows, expected one per device (2)",
        ),
    ],
)
def test_refusals(wrong: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_instance(wrong, where="f.json")
    assert str(caught.value) == f"f.json: {message}"


def test_unknown_problem_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"f: problem: unknown problem 'tsp' \(expected one of amp"
    ):
        parse_instance(broken("problem", value="tsp"), where="f")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'["' + b"[" * 1000 + b'", ' + b"[" * 70, "nested too deeply"),
        (b'{"format": NaN}', "not finite"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b"9" * 10_000, "an integer of 10000 digits"),
        (b'{"a": 1} {"b": 2}', "Extra data"),
    ],
)
def test_hostile_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_instance(path)
    check_one_line(str(caught.value))
    assert "hostile.json" in str(caught.value)


def test_brackets_in_strings_are_no_nesting() -> None:
    text = json.dumps({"a": '\\"[[' * 100, "b": ["{" * 200, "\\", '"[' * 90]})
    assert parse_json(text, where="f") == json.loads(text)


def test_packed_rubbish_and_bombs(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(as_json(document()))[:-20])
    with pytest.raises(InputError, match="cannot be read"):
        load_instance(path)
    path.write_bytes(gzip.compress(b" " * 20_000))
    with pytest.raises(InputError, match=r"too large \(expected at most 10000 bytes"):
        read_bytes(path, most=10_000)


@pytest.mark.parametrize("edit", ["entries", "bytes"])
@pytest.mark.parametrize("block", range(4))
def test_damaged_files_never_escape(tmp_path: Path, block: int, edit: str) -> None:
    """500 files with edited entries, 500 with damaged bytes: each is an instance or one InputError
    that names the file."""
    path = tmp_path / "damaged.json"
    refused = 0
    for i in range(125):
        rng = Random(1000 * block + i)
        whole = document(rng.randrange(30))
        content = as_json(mutate(rng, whole)) if edit == "entries" else damage(rng, as_json(whole))
        path.write_bytes(content)
        try:
            made = load_instance(path)
        except InputError as error:
            refused += 1
            check_one_line(str(error), f"{path}: ")
        else:
            assert parse_instance(made.document(), where="again").document() == made.document()
    assert refused > 60


def test_a_million_wrong_entries_are_one_error() -> None:
    size = 1000
    wrong = broken("data", "bandwidth", value=[["x"] * size] * size)
    with pytest.raises(InputError, match=r"data\.bandwidth\[0\]\[0\]: not usable \(got 'x'"):
        parse_instance(wrong, where="f")


def test_schema_refers_only_to_what_it_defines() -> None:
    for problem in (None, "amp"):
        schema = instance_schema(problem)
        for reference in references(schema):
            place: Any = schema
            for part in reference.removeprefix("#/").split("/"):
                place = place[part]
    assert instance_schema("amp")["properties"]["problem"] == {"const": "amp", "type": "string"}


def references(value: Any) -> list[str]:
    """Every `$ref` inside a schema."""
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [r for entry in value.values() for r in references(entry)]
    return [r for entry in value for r in references(entry)] if isinstance(value, list) else []
