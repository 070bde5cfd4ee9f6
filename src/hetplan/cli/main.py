"""The entry `hetplan`: the commands by name, each loaded when it is called, and the one place where
errors become a line and an exit code.

A command is a function of typer's annotated parameters that returns an exit code. Exit codes: 0
success; 1 a result is infeasible or unknown, or a check failed; 2 a file, an option or standard
output cannot be used; 3 a bug in hetplan; 130 aborted from the keyboard; 141 the reader of the
output went away."""

import dataclasses
import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hetplan import __version__
from hetplan.cli.help_page import Page, description_of
from hetplan.cli.output import OutputError, drop, note, open_streams
from hetplan.errors import HetplanError, debugging, one_line

BROKEN_PIPE, ABORTED, USAGE, BUG = 141, 130, 2, 3

# typer's exception for what a user got wrong has no public name; its subclass has.
_USAGE_ERROR = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hetplan`; returns the exit code and prints at most one line for any error."""
    return run_program(program(), "hetplan", arguments)


def run_program(whole: "Group", name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code and prints at most one line for any error.

    whole: its commands. name: what its usage line calls it. arguments: None stands for those of the
    process.
    """
    open_streams()
    with warnings.catch_warnings():
        if not (sys.warnoptions or debugging()):  # those of libraries are for developers
            warnings.simplefilter("ignore")
        code = guarded(whole, name, arguments)
    if arguments is None and sys.modules.keys() & {"hetplan.solvers.native", "torch.distributed"}:
        from hetplan.solvers.native import end_process

        end_process(code)
    return code


def guarded(whole: "Group", name: str, arguments: Sequence[str] | None) -> int:
    """Run a command line with every way out of it mapped to an exit code."""
    try:
        returned = whole.main(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    # typer's way out of shell completion, and out of a pipe that nobody reads
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            return BROKEN_PIPE
        return error.code if isinstance(error.code, int) else 0
    except BrokenPipeError:
        drop(sys.stdout)
        return BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return complain("aborted", ABORTED)
    except HetplanError as error:
        if isinstance(error, OutputError):
            drop(sys.stdout)
        return complain(str(error), error.exit_code, error)
    except Exception as error:  # noqa: BLE001 (the last boundary: a bug is one line too, debugging shows it all)
        if isinstance(error, _USAGE_ERROR):
            return complain(usage_text(error), USAGE, error)
        if isinstance(error, CutShortError):
            error = error.end
        return complain(
            f"{type(error).__name__}: {error} (this is a bug; HETPLAN_DEBUG=1 shows where)",
            BUG,
            error,
        )
    if returned == ABORTED:  # what typer makes of KeyboardInterrupt, in silence
        return complain("aborted", ABORTED)
    return returned if isinstance(returned, int) else 0


class CutShortError(Exception):
    """Takes an EOFError past typer, for which that is always the user's wish to leave a prompt."""

    def __init__(self, end: EOFError) -> None:
        super().__init__(str(end))
        self.end = end


# The beginning of what typer calls a number -> what people call it.
NUMBERS = {"int": "a whole number, all its digits written out", "num": "a number"}


def usage_text(error: Exception) -> str:
    """What typer says of a wrong option or argument, as one sentence."""
    format_message = getattr(error, "format_message", error.__str__)
    text = one_line(str(format_message())).replace(": Value error, ", ": ").removesuffix(".")
    begin, _, kind = text.partition(": Input should be a valid ")
    text = f"{begin}: expected {NUMBERS.get(kind[:3], 'a ' + kind)}" if kind else text
    return f"{text[:1].lower()}{text[1:]}"


def complain(text: str, code: int, error: BaseException | None = None) -> int:
    """One line on stderr (and the traceback where HETPLAN_DEBUG is set); returns `code`."""
    if error is not None and debugging():
        traceback.print_exception(error)
    note(f"error: {text}")
    return code


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
    own = keyword_parameters(function)
    groups: dict[str, Any] = {
        p.name: p.annotation for p in own if dataclasses.is_dataclass(p.annotation)
    }
    parameters = [
        one
        for p in own
        for one in (keyword_parameters(groups[p.name]) if p.name in groups else [p])
    ]

    @functools.wraps(function)
    def call(**values: Any) -> int:
        for name, kind in groups.items():
            values[name] = kind(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
            )
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
        if not (args or self.default or ctx.resilient_parsing):
            args = ["--help"]
        named = bool(args) and args[0] in {*self.commands, *ctx.help_option_names}
        if self.default is not None and not named and (args or not ctx.resilient_parsing):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

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
        return (
            [*offered, *arguments[0].shell_complete(inner, incomplete)]
            if arguments and not incomplete.startswith("-")
            else [*offered, *inner.command.shell_complete(inner, incomplete)]
        )


# The command line: of a command the function in this package and its line in the list (one without
# a line is not listed); of a group its line, its default command and its commands.
TREE: Mapping[str, Any] = {
    "plan": (
        "Plan the training of a model on a cluster.",
        "make",
        {
            "make": ("plan:plan", ""),
            "what-if": (
                "changes:what_if",
                "Say what more or fewer devices, or faster links, would gain.",
            ),
            "replan": ("changes:replan", "Plan again without lost nodes, moving little."),
            "search": ("search:search", "Search Astra's parallel strategies on a pool of GPUs."),
            "simulate": ("show:simulate", "Replay a plan on the event-driven simulator."),
            "templates": (
                "changes:templates",
                "Proven pipeline templates for parts of a cluster.",
            ),
        },
    ),
    "fits": ("fits:fits", "Say whether a model fits a cluster's memory, and how."),
    "solve": ("solve:solve", "Solve an instance; every result has its proven bound."),
    "check": ("solve:check", "Verify decisions against an instance, price them again."),
    "run": ("run:run", "Execute a plan; measured times beside predicted ones."),
    "launch": ("run:launch", "Plan a job file and start it: here, ssh, Slurm, Kubernetes, Ray."),
    "show": ("show:show", "Draw a plan, or print a decision in full."),
    "export": (
        "Print a plan as a framework's flags or configuration.",
        "plan",
        {
            "plan": ("show:export", ""),
            "layout": (
                "layout:layout",
                "Balance virtual pipeline stages, for Megatron and torchtitan.",
            ),
        },
    ),
    "profile": (
        "Predict or measure what a model costs.",
        "measure",
        {
            "predict": (
                "profile:predict",
                "Predict every layer's times from published measurements.",
            ),
            "measure": ("profile:measure", "Measure what each layer takes on a device."),
            "batch-curve": (
                "profile:batch_curve",
                "Measure seconds per micro-batch, and what fits.",
            ),
            "collectives": (
                "profile:collectives",
                "Measure what ranks do together, under torchrun.",
            ),
            "quick": (
                "profile:quick",
                "Measure ten operators on a device in a minute, to rescale by.",
            ),
            "operators": (
                "profile:operators",
                "Measure operators of many sizes on a device.",
            ),
            "train": ("profile:train", "Learn the efficiency of devices or links."),
            "calibrate": (
                "calibrate:calibrate",
                "Estimate constants from your own measured runs.",
            ),
            "import": ("profile:import_", "Read profiles, models and systems of others."),
        },
    ),
    "cluster": (
        "Write cluster files.",
        None,
        {"detect": ("cluster:detect", "Describe the cluster that is here.")},
    ),
    "instances": (
        "List, show, generate, validate, update and export instances.",
        None,
        {
            "list": (
                "instances:show_list",
                "List the packaged instances with their best known.",
            ),
            "show": ("instances:show", "Show an instance: origin, size, best known."),
            "generate": ("instances:generate", "Make a random instance of a problem."),
            "validate": ("instances:validate", "Check instance files against their schemas."),
            "update": (
                "instances:update",
                "Improve the best-known records by what runs found.",
            ),
            "schema": ("instances:schema", "Print the JSON schema of a file."),
            "export": (
                "instances:export_model",
                "Write an instance's models for other solvers.",
            ),
        },
    ),
    "study": (
        "Run many methods on many instances, and report what was found.",
        "run",
        {
            "run": ("study:run", "Run methods on instances; each run is a row that is kept."),
            "report": ("study:report", "A study's findings."),
        },
    ),
    "doctor": ("doctor:doctor", "Report versions, solvers, cores, memory and GPUs."),
    # Programs of others ask for it by this name.
    "schema": ("instances:schema", ""),
}


def make(name: str, entry: tuple[Any, ...], package: str = "hetplan.cli") -> Command | Group:
    """The command or the group of an entry like those of TREE. package: of its modules."""
    if len(entry) == 2:
        target, line = entry
        return Command(name, f"{package}.{target}", line)
    line, default, commands = entry
    parts = {command: make(command, part, package) for command, part in commands.items()}
    return Group(name, line, parts, default)


@functools.cache
def program() -> Group:
    """The whole command line."""
    whole = Group(
        "hetplan",
        "Plan the training of one model on mixed GPUs, with a proven bound on every plan.",
        {name: make(name, entry) for name, entry in TREE.items()},
    )
    options = typer.Typer()
    options.callback()(program_options)
    whole.params += typer.main.get_command(options).params
    return whole


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"hetplan {__version__}")
        raise typer.Exit()


def program_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """The program's own options; typer adds those of completion."""
