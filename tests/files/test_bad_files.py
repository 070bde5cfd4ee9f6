"""What is said of files that are empty, cut, no text, or no files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetplan import files
from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.files import check_folder_target, check_target, read_json, read_yaml
from hetplan.profiling import source_files
from hetplan.profiling.hardware.cluster import ClusterFile
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.source_files import SourceFile
from hetplan.schema import parse


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", b"", "is empty (expected a JSON document)"),
        ("x.json", b" \n", "is empty (expected a JSON document)"),
        ("x.json", b'{"a": 1', "ends in the middle (expected a whole JSON document)"),
        ("x.json", b'{"a": [1, 2,\n', "ends in the middle (expected a whole JSON document)"),
        ("x.json", b'{"a": "b', "ends in the middle (expected a whole JSON document)"),
        ("x.json", b'{"a" 1}', "line 1 column 6: not valid JSON: Expecting ':' delimiter"),
        ("x.yaml", b"", "is empty (expected a YAML document)"),
        ("x.yaml", b"# a comment\n", "is empty (expected a YAML document)"),
        (
            "x.yaml",
            b"\x00\x01\xff",
            "no text that YAML allows, at position 2 (expected a YAML document)",
        ),
        (
            "x.yaml",
            b"a: \x07",
            "no text that YAML allows, at position 3 (expected a YAML document)",
        ),
    ],
)
def test_a_file_that_is_empty_cut_or_no_text(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    read = read_json if path.suffix == ".json" else read_yaml
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {said}"


NODE = {"count": 1, "devices": 1, "device": "T4", "intra_node_gbit_per_s": 9}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": None}, "nodes: not usable (got nothing, expected a list)"),
        ({"nodes": {}}, "nodes: not usable (got an object of 0, expected a list)"),
        ({"nodes": [5]}, "nodes[0]: not usable (got 5, expected an object)"),
        ({"name": 5}, "name: not usable (got 5, expected a text)"),
        (
            {"nodes": [NODE | {"network_gbit_per_s": "1e300"}]},
            "nodes[0].network_gbit_per_s: not usable (got '1e300', expected a number; YAML takes "
            "this for text: write 1.0e+300)",
        ),
        (
            {"nodes": [NODE | {"network_gbit_per_s": "2.5e-3"}]},
            "nodes[0].network_gbit_per_s: not usable (got '2.5e-3', expected a number; YAML takes "
            "this for text: write 2.5e-3)",
        ),
        (
            {"nodes": [NODE | {"network_gbit_per_s": "fast"}]},
            "nodes[0].network_gbit_per_s: not usable (got 'fast', expected a number)",
        ),
    ],
)
def test_a_wrong_value_is_told_in_words(changes: dict[str, object], said: str) -> None:
    nodes = [NODE | {"network_gbit_per_s": 9}]
    document = {"format": "hetplan-cluster", "version": 1, "name": "x", "nodes": nodes}
    with pytest.raises(InputError) as caught:
        parse(ClusterFile, document | changes, where="c.yaml")
    assert str(caught.value) == f"c.yaml: {said}"


def test_similar_keys_are_those_of_the_same_object() -> None:
    """`memory_gb_per_s` is a key of a device, `nodes` one of the whole file."""
    node = NODE | {"network_gbits_per_s": 9}
    document = {"format": "hetplan-cluster", "version": 1, "name": "x", "nodes": [node]}
    with pytest.raises(InputError) as caught:
        parse(ClusterFile, document, where="c.yaml")
    said = str(caught.value)
    assert "did you mean network_gbit_per_s, " in said and "memory_gb_per_s" not in said
    device = {"T4": {"memory_gbs_per_s": 9}}
    good = NODE | {"network_gbit_per_s": 9}
    with pytest.raises(InputError) as caught:
        parse(ClusterFile, document | {"nodes": [good], "devices": device}, where="c.yaml")
    said = str(caught.value)
    assert "did you mean memory_gb_per_s" in said and "network_gbit" not in said


def test_a_configuration_without_a_model_type() -> None:
    with pytest.raises(InputError) as caught:
        from_config({"hidden": 3}, name="x", where="c.json")
    assert str(caught.value).startswith("c.json: model_type: required key is missing (expected the")


def test_a_pipe_that_nobody_writes_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_SECONDS", 0)
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    with pytest.raises(InputError) as caught:
        read_json(pipe)
    assert str(caught.value) == f"{pipe}: is a pipe into which nothing writes (expected a file)"


def test_a_pipe_gives_what_is_written_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than it holds at once, by a writer that comes before the first byte or after it."""
    pipe, text = tmp_path / "plan.json", f'{{"a": "{"x" * 200_000}"}}'
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()  # waits until the pipe is read
    assert read_json(pipe) == {"a": "x" * 200_000}
    writer.join()
    monkeypatch.setattr(files, "PIPE_SECONDS", 0)
    read_end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(pipe, "wb") as late:  # has it open, and has written nothing yet

        def write_late() -> None:
            late.write(b"[1]")
            late.close()

        writer = threading.Timer(0.2, write_late)
        writer.start()
        os.close(read_end)
        assert read_json(pipe) == [1]
        writer.join()


def test_of_large_files_and_of_pipes_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "x.json", tmp_path / "y.json"
    path.write_text("{}")
    noted = SourceFile.of(path)
    assert noted is not None and noted.difference() is None
    os.mkfifo(other)
    assert noted.model_copy(update={"path": str(other)}).difference() is None
    path.write_text("[]")
    assert noted.difference() == "has changed"
    monkeypatch.setattr(source_files, "LARGEST", 1)
    assert noted.difference() is None
    path.unlink()
    assert noted.difference() == "is not there"


NAMES_OF_NOTHING = ["l" * 300, "x/" * 3000 + "y", "a\0b", "loop/x"]


@pytest.mark.parametrize("check", [check_target, check_folder_target], ids=["file", "folder"])
@pytest.mark.parametrize("name", NAMES_OF_NOTHING, ids=["name", "path", "null", "loop"])
def test_targets_whose_names_can_name_nothing(
    tmp_path: Path, name: str, check: Callable[[Path], None]
) -> None:
    """Before the long work whose result would be written there."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match=r"cannot be written|no such folder"):
        check(tmp_path / name)


@pytest.mark.parametrize("name", NAMES_OF_NOTHING[:3], ids=["name", "path", "null"])
@pytest.mark.parametrize(
    "words",
    ["study report NAME", "study tiny-mixed -m paper -o NAME", "profile import metis NAME"],
)
def test_files_whose_names_can_name_nothing(
    words: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name if word == "NAME" else word for word in words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
