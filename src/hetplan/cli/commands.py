"""How a function becomes a command: groups of options, commands that load when they are called, and
groups of commands.

A command is a function of typer's annotated parameters that returns an exit code. A parameter whose
type is a dataclass stands for the options that the dataclass's fields are.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hetplan.cli.help_page import Page, description_of


class CutShortError(Exception):
    """Takes an EOFError past typer, for which that is always the user's wish to leave a prompt."""

    def __init__(self, end: EOFError) -> None:
        super().__init__(str(end))
        self.end = end


SETTINGS = {"help_option_names": ["-h", "--help"]}


class Command(TyperCommand):
    """A command that is loaded when something is to be done with it beside listing it.

    target: "module:function".
    """

    def __init__(self, name: str, target: str, help_line: str) -> None:
        super().__init__(name, short_help=help_line, hidden=not help_line, rich_markup_mode=None)
        self.target = target

    @functools.cached_property
    def loaded(self) -> Any:
        """The whole command."""
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
        """A context of the whole command: parsing, help, completion and the call go by it."""
        return self.loaded.make_context(*args, **extra)


def keyword_parameters(target: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function or of a dataclass, by keyword and with their types resolved."""
    types = get_type_hints(target, include_extras=True)
    return [
        parameter.replace(annotation=types[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(target).parameters.values()
    ]


def with_groups_as_options(function: Callable[..., int]) -> Callable[..., int]:
    """`function` with the fields of its parameters that are dataclasses as parameters of its
    own."""
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
            values[name] = kind(**{field: values.pop(field) for field in fields})
        try:
            return function(**values)
        except EOFError as error:  # hetplan has no prompts: a file or a pipe ended too early
            raise CutShortError(error) from error

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


class Group(TyperGroup):
    """Commands by name; `default` is meant where none is named: `hetplan plan --model …`."""

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
        self.default = default

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command first where none is named."""
        return super().parse_args(ctx, self.with_command(ctx, args))

    def with_command(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with the default command or `--help` before them where they name none. A
        shell that asks for completions (`resilient_parsing`) may have typed nothing yet."""
        if not args and ctx.resilient_parsing:
            return args
        if args and (args[0] in self.commands or args[0] in ctx.help_option_names):
            return args
        if self.default is not None:
            return [self.default, *args]
        return args or ["--help"]

    def get_help(self, ctx: Any) -> str:
        """The default command's help, where there is one, and the group's commands."""
        if self.default is None:
            return super().get_help(ctx)
        command = self.commands[self.default].loaded  # type: ignore[attr-defined]
        inner = type(ctx)(command, info_name=ctx.info_name, parent=ctx.parent)
        formatter = inner.make_formatter()
        command.format_usage(inner, formatter)
        command.format_help_text(inner, formatter)
        command.format_options(inner, formatter)
        self.format_commands(ctx, formatter)
        command.format_epilog(inner, formatter)
        return str(formatter.getvalue()).rstrip("\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The group's commands, and what may stand first after the default command."""
        offered = super().shell_complete(ctx, incomplete)
        if self.default is None:
            return offered
        inner = self.commands[self.default].make_context(
            self.default, [], parent=ctx, resilient_parsing=True
        )
        arguments = [p for p in inner.command.params if p.param_type_name == "argument"]
        if arguments and not incomplete.startswith("-"):
            return [*offered, *arguments[0].shell_complete(inner, incomplete)]
        return [*offered, *inner.command.shell_complete(inner, incomplete)]


@dataclass(frozen=True)
class CommandEntry:
    """A command of a tree: its function as "module:function", and its line in the list of commands.
    One without a line is not listed."""

    function: str
    line: str = ""


@dataclass(frozen=True)
class GroupEntry:
    """A group of a tree: its line in the list, its commands, and the one that is meant where none
    is named."""

    line: str
    commands: Mapping[str, CommandEntry]
    default: str | None = None


def make(
    name: str, entry: CommandEntry | GroupEntry, package: str = "hetplan.cli"
) -> Command | Group:
    """The command or the group of an entry. package: of its modules."""
    if isinstance(entry, CommandEntry):
        return Command(name, f"{package}.{entry.function}", entry.line)
    parts = {command: make(command, part, package) for command, part in entry.commands.items()}
    return Group(name, entry.line, parts, entry.default)
