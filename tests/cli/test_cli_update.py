"""`hetplan instances update` from answers and from studies, on a user's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.instances.library import BestKnown, find, save_instance
from hetplan.instances.update import changes, shelf
from hetplan.solvers.options import Options

NAME = "tiny-fast-slow"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one instance without a record."""
    entry = find(NAME)
    assert entry is not None
    (tmp_path / "mine").mkdir()
    save_instance(entry.load(), tmp_path / "mine" / "a.json")
    return tmp_path / "mine"


def record(folder: Path) -> BestKnown | None:
    """What is on disk."""
    [entry] = shelf(folder)
    return entry.best_known()


def test_answers(hetplan: Call, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.json"
    source.write_text(hetplan("solve", NAME, "--method", "exact,greedy", "--json").out)
    dry = hetplan("instances", "update", source, "--folder", folder, "--dry-run")
    assert dry.code == 0 and "1 of 1 records would change" in dry.out and record(folder) is None
    ran = hetplan("instances", "update", source, "--folder", folder, "--json").json
    found = record(folder)
    assert ran["instances"][0]["changed"] and ran["refused"] == []
    assert (
        found is not None
        and found.status == "optimal"
        and (found.proved_by or "").startswith("exact (")
    )
    assert (
        "0 of 1 records changed" in hetplan("instances", "update", source, "--folder", folder).out
    )
    assert (
        "0 of 1 records would change" in hetplan("instances", "update", source, "--dry-run").out
    ), "the library knows"

    document = json.loads(source.read_text())
    document["results"][0]["objective"] *= 0.9
    source.write_text(json.dumps(document))
    lied = hetplan("instances", "update", source, "--folder", folder)
    assert lied.code == 1 and "refused:" in lied.err and record(folder) == found


def test_what_cannot_be_updated(hetplan: Call, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.json"
    source.write_text(
        json.dumps({"instance": "nothing", "problem": "ditto", "results": [{"method": "exact"}]})
    )
    assert "no such instance among those to update" in hetplan("instances", "update", source).error
    assert (
        "no such folder" in hetplan("instances", "update", source, "--folder", tmp_path / "x").error
    )
    assert "holds no study" in hetplan("instances", "update", tmp_path).error
    source.write_text("[]")
    assert hetplan("instances", "update", source).code == 2


def test_a_study(hetplan: Call, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
    from hetplan.studies.rows import findings_of_rows, tasks, write_row
    from hetplan.studies.workers import perform

    rows = [
        perform(task) for task in tasks([str(folder)], ["exact", "greedy"], [0], Options(threads=1))
    ]
    for row in rows:
        write_row(tmp_path / "study", row)
    ran = hetplan("instances", "update", tmp_path / "study", "--folder", folder, "--json").json
    found = record(folder)
    assert ran["instances"][0]["changed"] and found is not None and found.status == "optimal"
    [other] = changes(shelf(folder), findings_of_rows([{**rows[0], "key": "0" * 24}], "rows"))
    assert not other.news and "another instance" in other.refused[0]
