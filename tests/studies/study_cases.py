"""Rows of studies made by hand."""

from __future__ import annotations

from typing import Any

from hetplan.studies.rows import COLUMNS, Row


def row(problem: str, instance: str, method: str, **changes: Any) -> Row:
    """A row of the set papers: of an exact method optimal where nothing else is said, of another
    one feasible."""
    exact = method in ("exact", "milp")
    made: Row = dict.fromkeys(COLUMNS)
    made |= {
        "key": f"{problem}-{instance}-{method}-{changes.get('seed', 0)}",
        "set": "papers",
        "problem": problem,
        "instance": instance,
        "method": method,
        "exact": exact,
        "seed": 0,
        "status": "optimal" if exact else "feasible",
        "stop": "done",
        "seconds": 1.0,
        "time_limit": 60.0,
        "gap": 0.0 if exact else None,
        "peak_bytes": 2**20,
        "message": "",
        "begun": "2026-01-01",
        "machine_json": '{"cpu":"<x>"}',
        "versions_json": '{"hetplan":"0"}',
        "options_json": "{}",
        "details_json": f'{{"instance_size": {100 * ord(instance[0])}}}',
    }
    return {**made, **changes}
