"""Writes the tables of methods.md from the families' own descriptions: `python
docs/method_tables.py [--check]`.

Each table stands between `<!-- generated: python docs/method_tables.py NAME -->` and
`<!-- end -->`. All are written, whatever names are given. With --check nothing is written and the
exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hetplan.formulations import FAMILIES, family
from hetplan.solvers.registry import Family

PAGE = Path(__file__).with_name("methods.md")


def table(found: Family) -> str:
    """A family's methods as a Markdown table."""
    lines = ["| method | what it does | proof | source |", "| --- | --- | --- | --- |"]
    for method in found.methods:
        proof = "optimum and bound" if method.exact else "none"
        source = f"{method.source} (baseline)" if method.baseline else method.source
        lines.append(f"| `{method.name}` | {method.summary} | {proof} | {source} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with every family's table renewed; raises ValueError where a family has no place on
    it."""
    for name in FAMILIES:
        mark = f"<!-- generated: python docs/method_tables.py {name} -->"
        pattern = rf"({mark}\n).*?(<!-- end -->)"
        content = table(family(name)).replace("\\", r"\\")
        page, count = re.subn(pattern, rf"\1{content}\n\2", page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name}: {count} places for the methods of {name}, expected 1")
    return page


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if "--check" in arguments:
        if new != old:
            print(f"{PAGE} is out of date: run python docs/method_tables.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
