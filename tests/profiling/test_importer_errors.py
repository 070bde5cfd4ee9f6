"""Broken files of other programs: one line with file and place, and no file written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.foreign import DEEPSPEED, PIPEDREAM, metis, piper, placement, write
from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.importers import KINDS, import_file
from hetplan.profiling.importers.common import Settings


def without(document: Any, *path: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


def changed(document: Any, value: Any, *path: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


TIME = ("nodes", 0, "TMPCs", "2", 1, "timePerSample")
SIZES = ("model", "parameters", "parameters_per_layer_bytes")
METIS = "DeviceType.A_tp1_bs1.json"
SHORT = DEEPSPEED.replace("500 us, 5.00% latency", "...")
BROKEN: list[tuple[str, str, Any, str]] = [
    (
        "pipedream",
        "g.txt",
        PIPEDREAM + "node5 -- x -- forward_compute_time=1\n",
        r"line 9: backward_.* is missing",
    ),
    (
        "pipedream",
        "g.txt",
        PIPEDREAM.replace("=8.000", "=nan"),
        r"line 2: backward_compute_time is not usable",
    ),
    (
        "pipedream",
        "g.txt",
        PIPEDREAM + "\tnode4 -- node9\n",
        r"names a node that is not there .*node9",
    ),
    ("pipedream", "g.txt", PIPEDREAM + "\tnode4 -- node1\n", r"circle"),
    ("pipedream", "g.txt", PIPEDREAM + "nonsense\n", r"line 9: not usable"),
    ("pipedream", "g.txt", "", r"no node"),
    (
        "piper",
        "p.json",
        without(piper(), "nodes", 1, "TMPCs"),
        r"nodes\[1\]\.TMPCs: required key is missing",
    ),
    ("piper", "p.json", changed(piper(), -1, *TIME), r"nodes\[0\]\.TMPCs\.2\[1\]\.timePerSample"),
    (
        "piper",
        "p.json",
        changed(piper(), 8, "edges", 0, "destId"),
        r"edges\[0\]\.destId: .*not there",
    ),
    (
        "dnn-partitioning",
        "d.json",
        without(placement(), "edges"),
        r"edges: required key is missing",
    ),
    (
        "dnn-partitioning",
        "d.json",
        changed(placement(), 7, "nodes", 2, "colorClass"),
        r"colorClass 7 has a backw",
    ),
    (
        "dnn-partitioning",
        "d.json",
        changed(placement(), "x", "nodes", 0, "fpgaLatency"),
        r"nodes\[0\]\.fpgaLat",
    ),
    ("metis", "m.json", metis(), r"name is not usable"),
    (
        "metis",
        METIS,
        without(metis(), "execution_time"),
        r"execution_time: required key is missing",
    ),
    ("metis", METIS, changed(metis(), [1], *SIZES), r"2 entries"),
    ("calculon", "c.json", {"hidden": 64}, r"feedforward: required key is missing"),
    ("calculon", "c.json", {}, r"neither a model nor a system"),
    ("calculon", "c.json", {"networks": []}, r"matrix: required key is missing"),
    ("deepspeed", "o.txt", "nothing", r"no detailed profile"),
    ("deepspeed", "o.txt", DEEPSPEED.split("  (head)", maxsplit=1)[0], r"does not end"),
    ("deepspeed", "o.txt", SHORT, r"line 13: module embed has no figures"),
    ("sailor", "profile.json", {}, r"llm_info\.json"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), BROKEN)
def test_broken_files_are_one_line_with_their_place(
    kind: str,
    name: str,
    content: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / name, content)
    assert main(["profile", "import", kind, str(path), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and name in error
    with pytest.raises(InputError, match=message):
        import_file(kind, path, Settings())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_missing_files(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such|not usable"):
        import_file(kind, tmp_path / "absent.json", Settings())


def test_unknown_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["profile", "import", "pipdream", str(tmp_path)]) == 2
    assert "did you mean pipedream" in capsys.readouterr().err
