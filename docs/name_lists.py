"""Writes the lists of device types and built-in models of files.md: `python docs/name_lists.py
[--check]`.

Each list stands between `<!-- generated: python docs/name_lists.py LIST -->` and `<!-- end -->`.
With --check nothing is written and the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import fill

from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.models.zoo import BUILT_IN

PAGE = Path(__file__).with_name("files.md")


def lists() -> dict[str, str]:
    """LIST -> the names, sorted, as Markdown."""
    names: dict[str, list[str]] = {"devices": list(catalogue()), "models": list(BUILT_IN)}
    return {
        key: fill(", ".join(f"`{name}`" for name in sorted(each)), 120, break_on_hyphens=False)
        for key, each in names.items()
    }


def filled(page: str) -> str:
    """The page with both lists renewed; raises ValueError where one has no place on it."""
    for key, text in lists().items():
        mark = f"<!-- generated: python docs/name_lists.py {key} -->"
        page, count = re.subn(
            rf"({mark}\n).*?(<!-- end -->)", rf"\1{text}.\n\2", page, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{PAGE.name}: {count} places for {key}, expected 1")
    return page


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if "--check" in arguments:
        if new != old:
            print(f"{PAGE} is out of date: run python docs/name_lists.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
