"""A study's rows as findings for best-known records: each row's key tells exactly which instance it
is of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial

from hetplan.instances.envelope import Instance
from hetplan.instances.update import Finding
from hetplan.studies.rows import Row
from hetplan.studies.tasks import Subject, task_key


def findings_of_rows(rows: Iterable[Row], where: str) -> Iterator[Finding]:
    """Of rows with a decision or a bound."""
    for row in rows:
        if row["decision_json"] is None and row["bound"] is None:
            continue
        yield Finding(
            where=f"{where}: {row['instance']} by {row['method']} (row {row['key']})",
            problem=row["problem"],
            instance=row["instance"],
            method=row["method"],
            by=f"{row['method']} ({row['solver']})"[:200] if row["solver"] else row["method"],
            status=row["status"],
            objective=row["objective"],
            bound=row["bound"],
            decision=None if row["decision_json"] is None else json.loads(row["decision_json"]),
            about=partial(made_on, row),
        )


def made_on(row: Row, instance: Instance) -> bool:
    """Whether the row's key is that of this instance, its method and its options."""
    key = task_key(Subject(instance).digest, row["method"], json.loads(row["options_json"]))
    return bool(key == row["key"])
