"""Parts of pages that a script writes, between `<!-- generated: COMMAND -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path


def renewed(page: str, command: str, parts: Mapping[str, str]) -> str:
    """The text of a page with its generated parts renewed. parts: NAME of the mark
    `generated: COMMAND NAME` -> its text. Raises ValueError where a part has no place, or several.
    """
    for name, text in parts.items():
        mark = re.escape(f"<!-- generated: {command} {name} -->")
        content = text.replace("\\", r"\\")
        page, places = re.subn(
            rf"({mark}\n).*?(<!-- end -->)", rf"\1{content}\n\2", page, flags=re.DOTALL
        )
        if places != 1:
            raise ValueError(f"{places} places for {name}, expected 1")
    return page


def write_or_check(path: Path, text: str, command: str, arguments: list[str]) -> int:
    """Write a page. With --check among the arguments nothing is written, and the exit code is 1
    where the page is out of date."""
    if "--check" in arguments:
        is_old = text != path.read_text(encoding="utf-8")
        if is_old:
            print(f"{path} is out of date: run {command}", file=sys.stderr)
        return int(is_old)
    path.write_text(text, encoding="utf-8")
    return 0
