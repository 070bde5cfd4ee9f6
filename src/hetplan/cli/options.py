"""Options that several commands share, the groups they form, and how commands are declared."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from hetplan.cli import completion
from hetplan.errors import InputError
from hetplan.solvers.options import NativeValue, Options


def usable_target(path: Path | None) -> Path | None:
    """The path; raises InputError for a file that cannot be written, before hours are spent on what
    should go into it."""
    if path is None:
        return None
    if os.path.isdir(path):
        raise InputError("is a folder, expected a file name", where=str(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError("is a device or a pipe, expected a file name", where=str(path))
    folder = path.parent
    if not os.path.isdir(folder):
        raise InputError("no such folder", where=str(folder))
    if not os.access(folder, os.W_OK):
        raise InputError("folder cannot be written to", where=str(folder))
    return path


def target(*names: str, help: str, metavar: str = "FILE") -> Any:
    """An option that names a file to write."""
    return typer.Option(*names, metavar=metavar, help=help, callback=usable_target)


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
OutputOption = Annotated[
    Path | None,
    target("--output", "-o", metavar="FILE", help="Write the JSON document to a file as well."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
TimeOption = Annotated[
    float | None,
    typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each method; default none."),
]
LimitOption = Annotated[
    float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each method.")
]
GapOption = Annotated[
    float | None,
    typer.Option("--gap", metavar="RATIO", help="Relative gap to stop at; default 1e-6."),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Threads of general solvers; default all cores."),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Of everything random; default 0.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="Built-in model, or a Hugging Face config.json.",
        autocompletion=completion.models,
    ),
]
OwnModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="Built-in model or config.json; default the plan's.",
        autocompletion=completion.models,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME",
        help="Cluster file (YAML), or an example's name.",
        autocompletion=completion.clusters,
    ),
]
OwnClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME",
        help="Cluster file (YAML); default an example of the plan's cluster's name.",
        autocompletion=completion.clusters,
    ),
]
BatchOption = Annotated[
    int, typer.Option("--global-batch", metavar="N", help="Samples per iteration.")
]
SequenceOption = Annotated[
    int | None,
    typer.Option("--sequence", metavar="N", help="Tokens per sample; default the model's."),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="fp16|bf16|fp32",
        help="In which it is trained.",
        autocompletion=completion.precisions,
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured profile; default a prediction."),
]
LinksOption = Annotated[
    Path | None,
    typer.Option(
        "--links",
        metavar="FILE",
        help="Learned efficiency of links, as `hetplan profile train` writes it.",
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategies",
        metavar="A[,B…]",
        help="Which to try; default all.",
        autocompletion=completion.strategies,
    ),
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, as `hetplan plan -o` writes it.")
]
InstanceArgument = Annotated[
    str,
    typer.Argument(
        help="Instance file, - for standard input, or a name from `hetplan instances list`.",
        autocompletion=completion.instances,
    ),
]


@dataclass(frozen=True, kw_only=True)
class NativeOptions:
    """What goes to the back ends of general solvers as it is."""

    native: Annotated[
        list[str] | None,
        typer.Option(
            "--native",
            metavar="BACKEND.NAME=VALUE",
            help="A back end's own option; BACKEND: cp-sat, highs, pyomo.",
        ),
    ] = None
    pyomo_solver: Annotated[
        str | None,
        typer.Option(
            "--pyomo-solver", metavar="NAME", help="Solver behind the pyomo method; default highs."
        ),
    ] = None


def add(
    app: typer.Typer, commands: Mapping[str, Callable[..., int]], *, hidden: bool = False
) -> None:
    """Add functions as commands; a parameter whose type is a dataclass is as many options as that
    has fields."""
    for name, function in commands.items():
        app.command(name, hidden=hidden)(flattened(function))


def flattened(function: Any) -> Callable[..., Any]:
    """`function` with the fields of its dataclass parameters as parameters of its own."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(
                parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            missing = field.default is dataclasses.MISSING
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=inner[field.name],
                    default=inspect.Parameter.empty if missing else field.default,
                )
            )

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        for name, kind in groups.items():
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
            values[name] = kind(**own)
        return function(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


class GroupWithDefault(TyperGroup):
    """A group one of whose commands is meant where none is named: `hetplan plan --model …`."""

    default = "make"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command's name before arguments that begin with no command."""
        asks_help = any(word in args for word in ctx.help_option_names)
        named = bool(args) and args[0] in self.commands
        if not (named or (asks_help and args[0] in ctx.help_option_names)) and (
            args or not ctx.resilient_parsing
        ):
            args = self.with_command(args)
        return super().parse_args(ctx, args)

    def with_command(self, args: list[str]) -> list[str]:
        """The arguments with the command that they mean."""
        return [self.default, *args]

    def get_help(self, ctx: Any) -> str:
        """The default command's help, and the group's commands."""
        command = self.commands[self.default]
        inner = type(ctx)(command, info_name=ctx.info_name, parent=ctx.parent)
        formatter = inner.make_formatter()
        command.format_help(inner, formatter)
        self.format_commands(ctx, formatter)
        return str(formatter.getvalue()).rstrip("\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The group's commands, and what may stand first after the default command."""
        found = super().shell_complete(ctx, incomplete)
        command = self.commands[self.default]
        inner = command.make_context(self.default, [], parent=ctx, resilient_parsing=True)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments and not incomplete.startswith("-"):
            return [*found, *arguments[0].shell_complete(inner, incomplete)]
        return [*found, *command.shell_complete(inner, incomplete)]


def group(help_text: str, kind: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """A Typer application without decoration."""
    return typer.Typer(
        cls=kind,
        help=help_text,
        no_args_is_help=kind is TyperGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def require(holds: bool, option: str, got: object, expected: str) -> None:
    """Raise InputError for an option whose value is not usable."""
    if not holds:
        raise InputError("not usable", where=option, got=got, expected=expected)


def make_options(**given: Any) -> Options:
    """`Options` from what was given on the command line; None keeps the default. Raises
    InputError."""
    entries = {name: value for name, value in given.items() if value is not None}
    if "native" in entries:
        entries["native"] = parse_dotted(entries["native"], "--native", "BACKEND.NAME=VALUE")
    return Options(**entries)


def parse_dotted(texts: Sequence[str], option: str, form: str) -> dict[str, dict[str, NativeValue]]:
    """`["owner.name=value"]` as {"owner": {"name": value}}; raises InputError naming `option` and
    its `form`."""
    parsed: dict[str, dict[str, NativeValue]] = {}
    for text in texts:
        left, equals, value = text.partition("=")
        owner, dot, name = left.strip().partition(".")
        require(bool(equals and dot and owner and name), option, text, form)
        entries = parsed.setdefault(owner, {})
        if name in entries:
            raise InputError(f"{owner}.{name} is given twice", where=option)
        entries[name] = native_value(value.strip())
    return parsed


def native_value(text: str) -> NativeValue:
    """The value as a boolean (true, false), a whole number, a finite number, or text, in this
    order."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            value = convert(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def split_list(values: Sequence[str]) -> list[str]:
    """`["a,b", "c"]` as ["a", "b", "c"]; empty parts are left out."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]
