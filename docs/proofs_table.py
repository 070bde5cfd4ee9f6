"""Writes the tables of what methods prove, in benchmarks.md, from `evidence/speed/proofs.json`:
`python docs/proofs_table.py [--check]`.

Each table stands between `<!-- generated: python docs/proofs_table.py NAME -->` and
`<!-- end -->`. `python -m evidence.speed proofs` measures the rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated import renewed, write_or_check

from hetplan.text import number_text, seconds_text

PAGE = Path(__file__).with_name("benchmarks.md")
ROWS = Path(__file__).resolve().parents[1] / "evidence" / "speed" / "proofs.json"
COMMAND = "python docs/proofs_table.py"


def cell(row: dict[str, Any] | None) -> str:
    """What one method did: its seconds where it proved, else objective and bound. None: it does not
    take the instance."""
    if row is None:
        return "not taken"
    if row["status"] in ("optimal", "infeasible"):
        return seconds_text(row["seconds"])
    objective = "none" if row["objective"] is None else number_text(row["objective"], 5)
    bound = "none" if row["bound"] is None else number_text(row["bound"], 5)
    return f"{objective} ≥ {bound}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of a family as a Markdown table: an instance a line, a method a column."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    instances = list(dict.fromkeys(row["instance"] for row in rows))
    cells = {(row["instance"], row["method"]): row for row in rows}
    lines = [
        "| instance | optimum | " + " | ".join(f"`{method}`" for method in methods) + " |",
        "| --- " * (2 + len(methods)) + "|",
    ]
    for instance in instances:
        of_instance = [cells.get((instance, method)) for method in methods]
        taken = [row for row in of_instance if row is not None]
        proven = [row["objective"] for row in taken if row["status"] == "optimal"]
        optimum = number_text(min(proven), 5) if proven else "open"
        if any(row["status"] == "infeasible" for row in taken):
            optimum = "infeasible"
        name = instance
        if all(row.get("clock") == "processor" for row in taken):
            name += ", processor"
        lines.append(f"| {name} | {optimum} | {' | '.join(map(cell, of_instance))} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    tables = {name: table([row for row in rows if row["problem"] == name]) for name in problems}
    page = renewed(PAGE.read_text(encoding="utf-8"), COMMAND, tables)
    return write_or_check(PAGE, page, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
