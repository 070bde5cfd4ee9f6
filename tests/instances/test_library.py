"""The packaged instances: each one validates, and its best-known record is what the evaluator
says."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fuzzing.mutations import check_one_line, mutate
from hetplan.errors import InputError
from hetplan.formulations import FAMILIES
from hetplan.instances.library import (
    BestKnown,
    Entry,
    find,
    library,
    load_from_library,
    parse_instance,
)
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


def test_filters() -> None:
    assert {entry.problem for entry in library("amp")} == {"amp"}
    assert {entry.name[:5] for entry in library(name="tiny-*")} == {"tiny-"}
    assert library("poplar", "tiny-mixed") == []


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"no such instance in the library: 'nothing'"):
        load_from_library("nothing")


def record() -> dict[str, Any]:
    """The content of a best-known record with its proof."""
    return present(present(find("tiny-mixed")).best_known()).model_dump(mode="json")


def test_status_and_gap_of_a_record() -> None:
    content = record()
    for bound, status, gap in ((None, "feasible", None), (0.9, "feasible", 0.1), (1, "optimal", 0)):
        stated = None if bound is None else bound * content["objective"]
        best = BestKnown.parsed(content | {"bound": stated}, where="f")
        assert (best.status, best.gap) == (status, None if gap is None else pytest.approx(gap))


def test_random_edits_of_a_record_never_escape() -> None:
    content, refused = record(), 0
    for seed in range(500):
        try:
            BestKnown.parsed(mutate(Random(seed), content), where="r.json")
        except InputError as error:
            refused += 1
            check_one_line(str(error), "r.json: ")
    assert refused > 150
