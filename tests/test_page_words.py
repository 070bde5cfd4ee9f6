"""The pages stay short, and what a command makes says which command that is."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from markdown_pages import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS = 35_000
GENERATED = re.compile(
    r"<!-- generated: (?P<command>[^\n]*?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL
)


def own_words(text: str) -> int:
    """Words of a page outside of what commands make."""
    return len(GENERATED.sub(" ", text).split())


def unknown(command: str) -> str:
    """Why the command of a mark cannot be run; empty where it is a script of docs or a module."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"] and len(words) > 2:
        package, *more = words[2:]
        names = [package, f"{package}.{more[0]}"] if package == "evidence.speed" else [package]
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        return f"no module {missing[0]}" if missing else ""
    if words[:1] == ["python"] and len(words) > 1:
        return "" if (ROOT / words[1]).is_file() else f"no script {words[1]}"
    return f"neither a script nor a module: {command}"


def test_all_pages_together_are_short() -> None:
    counts = {page.name: own_words(page.read_text(encoding="utf-8")) for page in PAGES}
    longest = sorted(counts, key=lambda name: -counts[name])[:5]
    assert sum(counts.values()) <= MOST_WORDS, [(name, counts[name]) for name in longest]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_marks_are_closed_and_name_commands_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = list(GENERATED.finditer(text))
    assert len(found) == text.count("<!-- generated:") == text.count("<!-- end -->")
    assert all("<!-- generated:" not in match["body"] for match in found)
    assert [why for match in found if (why := unknown(match["command"]))] == []


def test_what_is_counted_and_what_is_noticed() -> None:
    text = "one two\n<!-- generated: python -m evidence.speed amp -->\n| a |\n<!-- end -->\nthree\n"
    assert own_words(text) == 3
    assert own_words(text.replace("generated", "made")) > 3
    assert unknown("python -m evidence.speed amp --quick") == ""
    assert unknown("python docs/method_tables.py amp") == ""
    assert (
        unknown("python -m evidence.speed no_such_script")
        == "no module evidence.speed.no_such_script"
    )
    assert unknown("python -m evidence.nothing") == "no module evidence.nothing"
    assert unknown("python docs/nothing.py") == "no script docs/nothing.py"
    assert unknown("hetplan plan").startswith("neither")
