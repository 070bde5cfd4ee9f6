"""`hetplan instances update` from answers and from studies, on a user's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.instances.library import BestKnown, find, save_instance
from hetplan.instances.records import changes, entries_to_update
from hetplan.solvers.run import Options
from present import present

NAME, OTHER = "tiny-fast-slow", "tiny-mixed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one instance without a record."""
    (tmp_path / "mine").mkdir()
    save_instance(present(find(NAME)).load(), tmp_path / "mine" / "a.json")
    return tmp_path / "mine"


def record(folder: Path) -> BestKnown | None:
    """What is on disk."""
    [entry] = entries_to_update(folder)
    return entry.best_known()


def test_answers(hetplan: Call, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "answer.json"
    source.write_text(hetplan("solve", NAME, "--method", "exact,greedy-joined", "--json").out)
    update = ("instances", "update", source)
    dry = hetplan(*update, "--folder", folder, "--dry-run")
    assert dry.code == 0 and "1 of 1 records would change" in dry.out and record(folder) is None
    ran = hetplan(*update, "--folder", folder, "--json").json
    assert ran["instances"][0]["changed"] and ran["refused"] == []
    assert present(record(folder)).status == "optimal"
    known = hetplan(*update, "--dry-run")
    assert "0 of 1 records would change" in known.out, "the library knows"
    document = json.loads(source.read_text())
    document["results"][0]["objective"] *= 0.9
    source.write_text(json.dumps(document))
    lied = hetplan(*update, "--folder", folder)
    assert lied.code == 1 and "refused:" in lied.err


def test_answers_of_several_instances(hetplan: Call, tmp_path: Path) -> None:
    source = tmp_path / "answers.json"
    solved = hetplan("solve", NAME, OTHER, "--method", "exact", "--json", "-o", source)
    assert solved.code == 0
    known = hetplan("instances", "update", source, "--dry-run")
    assert "0 of 2 records would change" in known.out
    checked = hetplan("check", OTHER, source, "--json").json
    assert checked["instance"] == OTHER and checked["decisions"][0]["valid"]
    refused = hetplan("check", "amp-homogeneous", source)
    assert refused.code == 2 and "no answer for this instance" in refused.err
    document = json.loads(source.read_text())
    document["answers"][1].pop("problem")
    source.write_text(json.dumps(document))
    damaged = hetplan("instances", "update", source, "--dry-run")
    assert damaged.code == 2 and "answers[1]" in damaged.err
    source.write_text('{"answers": 3}')
    assert "answers" in hetplan("instances", "update", source, "--dry-run").err


def test_a_study(hetplan: Call, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
    from hetplan.studies.rows import findings_of_rows, tasks, write_row
    from hetplan.studies.workers import perform

    [task] = tasks([str(folder)], ["exact"], [0], Options(threads=1))
    row = perform(task)
    write_row(tmp_path / "study", row)
    ran = hetplan("instances", "update", tmp_path / "study", "--folder", folder, "--json").json
    assert ran["instances"][0]["changed"] and present(record(folder)).status == "optimal"
    [other] = changes(
        entries_to_update(folder), findings_of_rows([{**row, "key": "0" * 24}], "rows")
    )
    assert not other.changed and "another instance" in other.refused[0]
