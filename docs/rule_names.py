"""Writes the tables of search.md with the parameters of a search and the names that rules may use:
`python docs/rule_names.py [--check]`.

Each table stands between `<!-- generated: python docs/rule_names.py NAME -->` and `<!-- end -->`.
With --check nothing is written and the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import renewed, write_or_check

from hetplan.formulations.astra.search.parameters import MEANINGS as PARAMETERS
from hetplan.formulations.astra.search.rule_names import MEANINGS
from hetplan.formulations.astra.search.space import rule_columns

PAGE = Path(__file__).with_name("search.md")
COMMAND = "python docs/rule_names.py"


def parameters() -> str:
    """The parameters of a search with their values and meanings, in Markdown."""
    lines = ["| name | values | meaning; without it |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {of.values} | {of.meaning} |" for name, of in PARAMETERS.items()]
    return "\n".join(lines)


def names() -> str:
    """The names of rules with their values and meanings, in Markdown."""
    columns = rule_columns(("the pool's types",))
    lines = ["| name | values | what it is |", "| --- | --- | --- |"]
    lines += [f"| `${name}` | {columns[name].values} | {MEANINGS[name]} |" for name in MEANINGS]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    tables = {"parameters": parameters(), "names": names()}
    page = renewed(PAGE.read_text(encoding="utf-8"), COMMAND, tables)
    return write_or_check(PAGE, page, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
