"""Writes the lists of device types, built-in models and types of configurations of files.md:
`python docs/name_lists.py [--check]`.

Each list stands between `<!-- generated: python docs/name_lists.py LIST -->` and `<!-- end -->`.
With --check nothing is written and the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

from generated import renewed, write_or_check

from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.models.configurations import KNOWN
from hetplan.profiling.models.zoo import BUILT_IN

PAGE = Path(__file__).with_name("files.md")
COMMAND = "python docs/name_lists.py"


def lists() -> dict[str, str]:
    """LIST -> the names, sorted, as a sentence in Markdown."""
    names: dict[str, list[str]] = {
        "devices": list(catalogue()),
        "models": list(BUILT_IN),
        "types": [kind for kind in KNOWN if kind != "calculon"],  # another program's
    }
    texts = {}
    for key, of_list in names.items():
        quoted = ", ".join(f"`{name}`" for name in sorted(of_list))
        texts[key] = fill(quoted, 120, break_on_hyphens=False) + "."
    return texts


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    page = renewed(PAGE.read_text(encoding="utf-8"), COMMAND, lists())
    return write_or_check(PAGE, page, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
