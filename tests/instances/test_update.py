"""Best-known records only get better, and no answer is believed on its word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetplan.instances.library import BestKnown, find, save_instance
from hetplan.instances.records import Change, changes, entries_to_update, findings_of_answers, write
from hetplan.solvers.run import Options
from present import present

NAME = "tiny-fast-slow"
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: one instance, its record worse than what is known, beside a file that is
    none."""
    entry = present(find(NAME))
    here = tmp_path / "mine"
    (here / "deep").mkdir(parents=True)
    save_instance(entry.load(), here / "deep" / "other-name.json")
    (here / "notes.json").write_text('{"format": "else"}')
    return here


def answer(**edits: Any) -> dict[str, Any]:
    """A result of `solve --json` with the optimum, as the library knows it, changed by `edits`."""
    entry = present(find(NAME))
    best = present(entry.best_known())
    return {
        "method": "exact",
        "status": "optimal",
        "objective": best.objective,
        "bound": best.objective,
        "gap": 0.0,
        "seconds": 0.1,
        "decision": best.decision,
        "solver": "hetplan",
        **edits,
    }


def worse(folder: Path) -> dict[str, Any]:
    """A feasible decision above the optimum, with its own objective: the paper's repaired greedy or
    any single stage."""
    from hetplan.solvers.registry import solve
    from hetplan.solvers.run import Run

    [entry] = entries_to_update(folder)
    instance = entry.load()
    result = solve(instance.family, instance.data, "greedy-joined", Run(Options(threads=1)))
    assert result.decision is not None and result.objective is not None
    return answer(
        method="greedy-joined",
        status="feasible",
        objective=result.objective,
        bound=None,
        gap=None,
        decision=result.decision.model_dump(mode="json"),
    )


def update(folder: Path, *results: dict[str, Any]) -> Change:
    """What the results come to."""
    document = {"instance": NAME, "problem": "ditto", "results": list(results)}
    [found] = changes(entries_to_update(folder), findings_of_answers(document, "answer.json"))
    if found.changed:
        write(found)
    return found


def record(folder: Path) -> BestKnown | None:
    """What is on disk."""
    [entry] = entries_to_update(folder)
    return entry.best_known()


def test_a_record_is_made_and_then_only_bettered(folder: Path) -> None:
    heuristic = worse(folder)
    assert update(folder, heuristic).changed
    first = record(folder)
    assert first is not None and first.bound is None and first.found_by == "greedy-joined (hetplan)"
    assert (folder / "deep" / "other-name.best.json").is_file()
    assert not update(folder, heuristic).changed
    best = answer()
    assert first.objective > best["objective"], "the heuristic has to be worse for this test"
    assert update(folder, best).changed
    second = record(folder)
    assert second is not None and second.status == "optimal"
    assert (second.found_by, second.proved_by) == ("exact (hetplan)",) * 2
    change = update(folder, heuristic)
    assert not change.changed and change.refused == () and record(folder) == second


@pytest.mark.parametrize("best_first", [True, False])
def test_the_best_of_several_decisions_is_taken(folder: Path, best_first: bool) -> None:
    best, other = answer(), worse(folder)
    assert best["objective"] < other["objective"]
    results = (best, other) if best_first else (other, best)
    assert present(update(folder, *results).after).objective == best["objective"]


def test_a_higher_bound_is_taken_and_a_lower_one_is_not(folder: Path) -> None:
    best = answer()
    for share, expected in ((0.5, 0.5), (0.8, 0.8), (0.6, 0.8)):
        bound = share * best["objective"]
        update(folder, answer(status="feasible", bound=bound, gap=1 - share))
        found = record(folder)
        assert found is not None and found.bound == pytest.approx(expected * best["objective"])


LIES: dict[str, tuple[Edit, str]] = {
    "objective": (
        lambda r: r.update(objective=0.9 * r["objective"], bound=None, gap=None),
        "is not",
    ),
    "bound above": (
        lambda r: r.update(bound=r["objective"] * 1.1, gap=None, status="feasible"),
        "stated bound",
    ),
    "layers": (
        lambda r: r["decision"]["stages"][0].update(last=r["decision"]["stages"][0]["last"] + 1),
        "stage",
    ),
    "no decision": (lambda r: r.update(decision=None), "without a decision"),
    "infeasible": (lambda r: r.update(status="infeasible"), "stated infeasible"),
    "no devices": (lambda r: r["decision"]["stages"][0].update(devices=-1), "devices"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_answer_is_refused(folder: Path, lie: str) -> None:
    update(folder, worse(folder))
    before = record(folder)
    liar = json.loads(json.dumps(answer()))
    edit, told = LIES[lie]
    edit(liar)
    change = update(folder, liar)
    assert not change.changed and record(folder) == before
    assert len(change.refused) >= 1 and any(told in line for line in change.refused), change.refused
    assert update(folder, liar, answer()).changed, "an honest answer beside it counts"


def test_bounds_of_heuristics_and_of_nobody_are_not_taken(folder: Path) -> None:
    update(folder, worse(folder))
    for method in ("greedy-joined", "somebody-elses"):
        change = update(folder, answer(method=method))
        found = record(folder)
        assert (
            found is not None and found.bound is None and found.objective == answer()["objective"]
        )
        assert change.refused == ()
    bare = answer(
        status="unknown", objective=None, gap=None, decision=None, bound=0.9 * answer()["objective"]
    )
    assert not update(folder, bare).changed, (
        "without a decision nothing ties the answer to this instance"
    )


def test_a_record_that_is_refuted_is_told_and_left(folder: Path) -> None:
    update(folder, worse(folder))
    path = folder / "deep" / "other-name.best.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"bound": content["objective"], "proved_by": "someone"}))
    change = update(folder, answer())
    assert not change.changed and any("the record itself" in line for line in change.refused)
