"""The packaged instances: each one validates, and its best-known record is what the evaluator
says."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fuzzing.mutations import check_one_line, mutate
from hetplan.errors import InputError
from hetplan.formulations import FAMILIES
from hetplan.instances.library import (
    Entry,
    find,
    library,
    load_from_library,
    parse_best_known,
    parse_instance,
)
from hetplan.instances.update import shelf
from hetplan.schema import parse
from hetplan.solvers.registry import evaluate
from present import present

ENTRIES = library()
REGISTERED = [entry for entry in ENTRIES if entry.problem in FAMILIES]


def test_there_is_a_library() -> None:
    assert find("amp/tiny-mixed") is not None
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES), (
        "names are unique across problems"
    )
    assert {entry.problem for entry in ENTRIES} <= set(FAMILIES)


@pytest.mark.parametrize("entry", REGISTERED, ids=lambda e: f"{e.problem}/{e.name}")
def test_packaged_instance(entry: Entry) -> None:
    instance = entry.load()
    assert (instance.problem, instance.name) == (entry.problem, entry.name)
    assert instance.origin.strip()
    assert parse_instance(instance.document(), where="again").data == instance.data
    best = entry.best_known()
    assert best is not None, f"{entry.name} has no best-known record"
    assert (best.problem, best.instance) == (entry.problem, entry.name)
    decision = parse(instance.family.load_decision(), best.decision, where=entry.name)
    evaluation = evaluate(instance.family, instance.data, decision)
    assert evaluation.violations == ()
    assert evaluation.objective == pytest.approx(best.objective, rel=1e-9)
    assert (best.bound is None) == (best.proved_by is None)
    if best.bound is not None:
        assert best.bound <= best.objective * (1 + 1e-9)


def copy_of_the_tiny_one(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A library of one instance under `folder`; its best-known record's path and content."""
    entry = present(find("tiny-mixed"))
    target = folder / "amp"
    target.mkdir()
    (target / entry.file.name).write_bytes(entry.file.read_bytes())
    record = target / entry.best_file.name
    record.write_bytes(entry.best_file.read_bytes())
    return record, json.loads(record.read_text())


def test_an_instance_without_a_record(tmp_path: Path) -> None:
    record, _ = copy_of_the_tiny_one(tmp_path)
    best = present(shelf(tmp_path)[0].best_known())
    assert (best.status, best.gap) == ("optimal", 0.0)
    record.unlink()
    assert shelf(tmp_path)[0].best_known() is None


def test_filters() -> None:
    assert {entry.problem for entry in library("amp")} == {"amp"}
    assert {entry.name[:5] for entry in library(name="tiny-*")} == {"tiny-"}
    assert library("poplar", "tiny-mixed") == []


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"no such instance in the library: 'nothing'"):
        load_from_library("nothing")


def test_gap_of_a_record_without_proof(tmp_path: Path) -> None:
    _, content = copy_of_the_tiny_one(tmp_path)
    best = parse_best_known(content | {"bound": None, "proved_by": None}, where="f")
    assert (best.status, best.gap) == ("feasible", None)
    best = parse_best_known(content | {"bound": content["objective"] * 0.9}, where="f")
    assert best.status == "feasible"
    assert best.gap == pytest.approx(0.1)


def test_random_edits_of_a_record_never_escape(tmp_path: Path) -> None:
    _, content = copy_of_the_tiny_one(tmp_path)
    refused = 0
    for seed in range(500):
        try:
            parse_best_known(mutate(Random(seed), content), where="r.json")
        except InputError as error:
            refused += 1
            check_one_line(str(error), "r.json: ")
    assert refused > 150
