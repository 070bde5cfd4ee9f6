"""Turns functions into commands: commands that load when they are called, and groups of commands.

A command is a function that has typer's annotated parameters and returns an exit code. A parameter
whose type is a dataclass stands for a group of options: each field of the dataclass is one option.
"""

import dataclasses
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hetplan.cli.help_page import Page, description_of
from hetplan.errors import unknown_name


class CutShortError(Exception):
    """Carries an EOFError through typer, which takes a bare EOFError for a user who leaves a
    prompt."""

    def __init__(self, end: EOFError) -> None:
        super().__init__(str(end))
        self.end = end  # the error that a command raised


ALIKE = 0.75  # least ratio of `difflib` from which on a word counts as a mistyped command
SETTINGS = {"help_option_names": ["-h", "--help"]}  # typer's context settings of every command


class Command(TyperCommand):
    """A command in a list of commands. Its module is imported only when the command is called, or
    its help or completion is asked for."""

    def __init__(self, name: str, target: str, help_line: str) -> None:
        super().__init__(name, short_help=help_line, hidden=not help_line, rich_markup_mode=None)
        self.target = target  # the command's function as "module:function"

    @functools.cached_property
    def loaded(self) -> Any:
        """The command with its options and its help, after the import of its module."""
        module, _, name = self.target.partition(":")
        function = getattr(import_module(module), name)
        app = typer.Typer(
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings=SETTINGS,
        )
        app.command(self.name, cls=Page)(with_groups_as_options(function))
        page: Any = typer.main.get_command(app)
        page.description = description_of(function)
        return page

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """typer's context of the loaded command, which parsing, help, completion and the call
        use."""
        return self.loaded.make_context(*args, **extra)


def keyword_parameters(target: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function or of a dataclass, by keyword and with their types resolved."""
    types = get_type_hints(target, include_extras=True)
    return [
        parameter.replace(annotation=types[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(target).parameters.values()
    ]


def with_groups_as_options(function: Callable[..., int]) -> Callable[..., int]:
    """A command's function whose dataclass parameters are replaced by their fields.

    The result has one keyword parameter per field, builds the dataclasses from them and calls
    `function`.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in keyword_parameters(function):
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += keyword_parameters(groups[parameter.name])
        else:
            parameters.append(parameter)

    @functools.wraps(function)
    def call(**values: Any) -> int:
        for name, kind in groups.items():
            fields = [field.name for field in dataclasses.fields(kind)]
            # typer gives every field as an option of its own; the group takes them together.
            values[name] = kind(**{field: values.pop(field) for field in fields})
        try:
            return function(**values)
        except EOFError as error:  # hetplan has no prompts: a file or a pipe ended too early
            raise CutShortError(error) from error

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


class Group(TyperGroup):
    """A group of commands. Where the command line names none of them, the group's default command
    runs: `hetplan plan --model …` means `hetplan plan make --model …`."""

    def __init__(
        self, name: str, help: str, commands: Mapping[str, Any], default: str | None = None
    ) -> None:
        super().__init__(
            name=name,
            help=help,
            commands=dict(commands),
            context_settings=SETTINGS,
            rich_markup_mode=None,
            hidden=not help,
        )
        self.default = default  # the name of the default command; None: the group prints its help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the default command put first where they name no command."""
        return super().parse_args(ctx, self.with_command(ctx, args))

    def with_command(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with the default command or `--help` before them where they name no
        command.

        Empty arguments stay empty for a shell that asks for completions (`resilient_parsing`).
        """
        if not args and ctx.resilient_parsing:
            return args
        if args and (args[0] in self.commands or args[0] in ctx.help_option_names):
            return args
        if args and not ctx.resilient_parsing and self.is_wrong_command(args[0]):
            listed = [name for name, command in self.commands.items() if not command.hidden]
            raise unknown_name("no such command", args[0], listed)
        if self.default is not None:
            return [self.default, *args]
        return args or ["--help"]

    def is_wrong_command(self, word: str) -> bool:
        """Whether the first word of the arguments can only be a mistyped command.

        It is one where the group has no default command, and where the default command takes no
        arguments. A default command may take names and files, so that a word that is alike to a
        command's name is none only where there is such a file.
        """
        if word.startswith("-"):
            return False
        if self.default is None:
            return True
        parameters = self.commands[self.default].loaded.params  # type: ignore[attr-defined]
        if all(parameter.param_type_name != "argument" for parameter in parameters):
            return True
        alike = difflib.get_close_matches(word, self.commands, cutoff=ALIKE)
        return bool(alike) and not os.path.exists(word)

    def get_help(self, ctx: Any) -> str:
        """The help of the default command, if the group has one, with the list of the group's
        commands before the examples."""
        if self.default is None:
            return super().get_help(ctx)
        command = self.commands[self.default].loaded  # type: ignore[attr-defined]
        command_context = type(ctx)(command, info_name=ctx.info_name, parent=ctx.parent)
        formatter = command_context.make_formatter()
        command.format_usage(command_context, formatter)
        command.format_help_text(command_context, formatter)
        command.format_options(command_context, formatter)
        self.format_commands(ctx, formatter)
        command.format_epilog(command_context, formatter)
        return str(formatter.getvalue()).rstrip("\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The group's commands, and the first words that the default command can take."""
        completions = super().shell_complete(ctx, incomplete)
        if self.default is None:
            return completions
        command_context = self.commands[self.default].make_context(
            self.default, [], parent=ctx, resilient_parsing=True
        )
        command = command_context.command
        arguments = [
            parameter for parameter in command.params if parameter.param_type_name == "argument"
        ]
        if arguments and not incomplete.startswith("-"):
            return [*completions, *arguments[0].shell_complete(command_context, incomplete)]
        return [*completions, *command.shell_complete(command_context, incomplete)]


@dataclass(frozen=True)
class CommandEntry:
    """A command in a tree of commands."""

    function: str  # "module:function", the module relative to the tree's package
    line: str = ""  # the command's line in the list of commands; empty: not listed


@dataclass(frozen=True)
class GroupEntry:
    """A group of commands in a tree of commands."""

    line: str  # the group's line in the list of commands
    commands: Mapping[str, CommandEntry]  # name -> command
    default: str | None = None  # name of the command that runs where the user names none


def make(
    name: str, entry: CommandEntry | GroupEntry, package: str = "hetplan.cli"
) -> Command | Group:
    """typer's command or group for an entry of a tree. package: where its modules are."""
    if isinstance(entry, CommandEntry):
        return Command(name, f"{package}.{entry.function}", entry.line)
    commands = {
        command_name: make(command_name, command, package)
        for command_name, command in entry.commands.items()
    }
    return Group(name, entry.line, commands, entry.default)
