"""Writes the tables of methods.md from the families' own descriptions: `python
docs/method_tables.py [--check]`.

Each table stands between `<!-- generated: python docs/method_tables.py NAME -->` and
`<!-- end -->`. All are written, whatever names are given. With --check nothing is written and the
exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import renewed, write_or_check

from hetplan.formulations import FAMILIES, family
from hetplan.solvers.registry import Family

PAGE = Path(__file__).with_name("methods.md")
COMMAND = "python docs/method_tables.py"


def table(found: Family) -> str:
    """A family's methods as a Markdown table."""
    lines = ["| method | what it does | proof | source |", "| --- | --- | --- | --- |"]
    for method in found.methods:
        proof = "optimum and bound" if method.exact else "none"
        source = f"{method.source} (baseline)" if method.baseline else method.source
        lines.append(f"| `{method.name}` | {method.summary} | {proof} | {source} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    tables = {name: table(family(name)) for name in FAMILIES}
    page = renewed(PAGE.read_text(encoding="utf-8"), COMMAND, tables)
    return write_or_check(PAGE, page, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
