"""Commands that the pages show have the options that they are shown with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetplan.cli.commands import Group
from hetplan.cli.main import program
from markdown_pages import PAGES, blocks


def commands(text: str) -> Iterator[list[str]]:
    """The words behind `hetplan` of each of its commands in a shell text."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;|\||>", line.partition(" #")[0].removeprefix("$ ")):
            words = shlex.split(part)
            name = next((n for n, word in enumerate(words) if Path(word).name == "hetplan"), None)
            if name is not None:
                yield words[name + 1 :]


def unknown_options(words: list[str]) -> list[str]:
    """The options that the command of these words does not have."""
    found: Any = program()
    while isinstance(found, Group):
        named = bool(words) and words[0] in found.commands
        name = words[0] if named else found.default
        if name is None:
            return [word for word in words[:1] if word not in {"--version", "--help"}]
        found, words = found.commands[name], words[1:] if named else words
    options = {o for p in found.loaded.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [option for option in given if option not in options]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    shell = [block for block in blocks(page) if block.language in {"sh", "bash", "console"}]
    texts = [
        "\n".join(f"$ {command}" for command, _ in block.commands())
        if block.language == "console"
        else block.body
        for block in shell
    ]
    wrong = [
        (words, bad) for t in texts for words in commands(t) if (bad := unknown_options(words))
    ]
    assert wrong == []


def test_wrong_options_are_noticed() -> None:
    text = "$ hetplan plan --modle gpt2 && hetplan plan replan p.json --lost node1 # --no\n"
    (first, second) = commands(text)
    assert unknown_options(first) == ["--modle"]
    assert unknown_options(second) == []
    assert unknown_options(["fly", "--high"]) == ["fly"]
