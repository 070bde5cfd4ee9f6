"""evidence/speed/every_method.py: what its rows may not say of one instance, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evidence.speed import every_method as script
from hetplan.formulations import family
from hetplan.instances.library import find

pytestmark = pytest.mark.evidence
KNOWN = 6.0  # seconds, about the objective of an instance that is not packaged


def row(method: str, **changes: Any) -> dict[str, Any]:
    return {
        "problem": "amp",
        "instance": "not-packaged",
        "method": method,
        "limit": 1.0,
        "status": "feasible",
        "objective": KNOWN,
        "bound": None,
        "seconds": 0.5,
        "message": "",
        **changes,
    }


def test_rows_that_agree_have_no_fault() -> None:
    rows = [
        row("exact", status="optimal", bound=KNOWN * (1 - 1e-8)),
        row("milp", bound=KNOWN * (1 + 1e-9)),
        row("paper", objective=2 * KNOWN),
        {**row("cp-sat"), "status": script.REFUSED, "objective": None},
    ]
    assert script.faults(rows) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bound": KNOWN * 1.01, "objective": KNOWN * 1.02}, "bound 6.06 of milp is above"),
        ({"status": "infeasible", "objective": None}, "milp calls infeasible what has"),
        ({"status": script.REFUTED, "message": "decision rejected"}, "milp: decision rejected"),
        ({"seconds": 3.5}, "milp: took 3.5 s with a limit of 1.0 s"),
    ],
)
def test_each_fault_is_told(changes: dict[str, Any], said: str) -> None:
    (line,) = script.faults([row("exact"), row("milp", **changes)])
    assert said in line


def test_a_bound_above_the_librarys_record_is_told() -> None:
    entry = find("amp/tiny-mixed")
    assert entry is not None
    record = entry.best_known()
    assert record is not None
    claimed = {"bound": 1.1 * record.objective, "objective": 1.2 * record.objective}
    (line,) = script.faults([row("exact", instance="tiny-mixed", **claimed)])
    assert "of the record" in line


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    entry = find("amp/tiny-mixed")
    assert entry is not None
    output = tmp_path / "rows.jsonl"
    names = [method.name for method in family("amp").methods]
    assert script.methods_left(entry, output) == names
    done = row(names[1], instance="tiny-mixed")
    output.write_text(json.dumps(done) + "\n" + json.dumps(row(names[0])) + "\n")
    assert script.methods_left(entry, output) == [names[0], *names[2:]]
