"""The Python examples run as they stand (mypy checks them with everything else)."""

from __future__ import annotations

import pytest

from markdown_pages import ROOT
from page_commands import shell

COMMANDS = {  # what each prints, among other things
    "python plan_from_python.py 3": "best: ",
    "hetplan solve tiny-two-types --plugin own_method -m auto,even -q": "even",
}


@pytest.mark.pages
@pytest.mark.parametrize(("command", "expected"), COMMANDS.items())
def test_examples_run(command: str, expected: str) -> None:
    ran = shell(command, ROOT / "examples")
    assert (ran.returncode, ran.stderr) == (0, "") and expected in ran.stdout


def test_every_example_is_run() -> None:
    """`experts_too` is a plugin, which the page on families of one's own runs."""
    commands = [*COMMANDS, (ROOT / "docs" / "howto-family.md").read_text(encoding="utf-8")]
    names = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert names and all(any(name in command for command in commands) for name in names)
