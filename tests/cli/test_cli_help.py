"""The help of the main commands: options in sections, examples at the end that can be called."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.cli.commands import Group
from hetplan.cli.main import program

MAIN = (
    *("plan", "fits", "run", "solve", "export", "show"),
    *("plan what-if", "plan replan", "plan simulate", "launch"),
)
# Their options stand together.
SMALLER = (
    *("plan search", "plan templates", "export layout", "check", "study run", "study report"),
    *(f"instances {name}" for name in ("list", "show", "generate", "validate", "update")),
    *("instances export", "instances schema", "cluster detect"),
    *(f"profile {name}" for name in ("predict", "measure", "batch-curve", "quick")),
    *("profile operators", "profile train"),
)
OTHERS = ("doctor",)


def command_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that `hetplan WORDS` calls, loaded, and the arguments that are left for it."""
    command: Any = program()
    rest = list(words)
    while isinstance(command, Group):
        if rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        else:
            assert command.default is not None, words
            command = command.commands[command.default]
    return command.loaded, rest


def examples(text: str) -> list[list[str]]:
    """The words of each command below `Examples:` in a printed help."""
    shown = text.partition("\nExamples:\n")[2]
    joined = shown.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in joined if not line.startswith("  # ")]


@pytest.mark.parametrize("name", MAIN)
def test_every_option_stands_in_one_section(name: str) -> None:
    command, _ = command_of(name.split())
    listed = [option for names in command.description.sections.values() for option in names]
    assert len(listed) == len(set(listed))
    context = command.make_context(name, [], resilient_parsing=True)
    options = [p for p in command.get_params(context) if p.param_type_name == "option"]
    assert [p.opts for p in options if command.description.place(p.opts) is None] == []
    names = {option for p in options for option in p.opts}
    assert [option for option in listed if option not in names] == []


@pytest.mark.parametrize("name", MAIN)
def test_a_main_command_ends_with_examples_that_can_be_called(hetplan: Call, name: str) -> None:
    text = hetplan(*name.split(), "--help").out
    commands = examples(text)
    assert 2 <= len(commands) <= 3
    check_examples(name, commands)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", SMALLER)
def test_a_smaller_command_has_an_example_too(hetplan: Call, name: str) -> None:
    text = hetplan(*name.split(), "--help").out
    commands = examples(text)
    assert 1 <= len(commands) <= 3 and "\nOptions:\n" in text
    check_examples(name, commands)
    assert max(map(len, text.splitlines())) <= 80


def check_examples(name: str, commands: Sequence[Sequence[str]]) -> None:
    """The examples call the command, with options and values that it has."""
    for program_name, *words in commands:
        assert program_name == "hetplan" and words[: len(name.split())] == name.split()
        command, arguments = command_of(words)
        command.make_context(name, arguments)  # raises where an option or a value is wrong


@pytest.mark.parametrize("name", MAIN)
def test_sections_keep_the_order_that_they_are_given(hetplan: Call, name: str) -> None:
    command, _ = command_of(name.split())
    lines = hetplan(*name.split(), "--help").out.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.endswith(":") and line[0] != " "]
    sections = list(command.description.sections)
    assert [heading for heading in headings if heading in sections] == sections
    assert "Options" not in headings and headings[-1] == "Examples"


@pytest.mark.parametrize("name", OTHERS)
def test_a_command_without_sections_lists_its_options_together(hetplan: Call, name: str) -> None:
    text = hetplan(*name.split(), "--help").out
    assert "\nOptions:\n" in text and "Examples" not in text and "--help" in text
