"""The command line `hetplan`: its tree of commands, and the one place where an error becomes a line
on stderr and an exit code.

Exit codes: 0 success; 1 a result is infeasible or unknown, or a check failed; 2 a file, an option
or standard output cannot be used; 3 a bug in hetplan; 130 aborted from the keyboard; 141 the reader
of the output went away.
"""

import functools
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from hetplan import __version__
from hetplan.cli.commands import CommandEntry, CutShortError, Group, GroupEntry, make
from hetplan.cli.output import OutputError, drop, note, open_streams
from hetplan.errors import HetplanError, debugging, one_line, short_repr

BROKEN_PIPE, ABORTED, USAGE, BUG = 141, 130, 2, 3

# typer's exception for a user's mistake. It has no public name, but its subclass BadParameter has.
_USAGE_ERROR = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hetplan`; returns the exit code and prints at most one line for any error."""
    return run_program(program(), "hetplan", arguments)


def run_program(whole: Group, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code and prints at most one line for any error.

    whole: the group of all commands. name: the program's name in usage lines. arguments: None
    stands for the arguments of the process.
    """
    open_streams()
    with warnings.catch_warnings():
        if not (sys.warnoptions or debugging()):  # warnings of libraries are for developers
            warnings.simplefilter("ignore")
        code = guarded(whole, name, arguments)
    may_have_threads = sys.modules.keys() & {"hetplan.solvers.native", "torch.distributed"}
    if arguments is None and may_have_threads:
        from hetplan.solvers.native import end_process

        end_process(code)
    return code


def guarded(whole: Group, name: str, arguments: Sequence[str] | None) -> int:
    """Run a command line and map its result, or whatever it raises, to an exit code."""
    try:
        returned = whole.main(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    # typer raises it after shell completion, and when nobody reads the pipe of the output
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
    if returned == ABORTED:  # typer returns it for KeyboardInterrupt and prints nothing
        return complain("aborted", ABORTED)
    return returned if isinstance(returned, int) else 0


def usage_text(error: Exception) -> str:
    """typer's message about a wrong option or argument, as one sentence in hetplan's form.

    typer checks values with pydantic and passes on pydantic's texts, such as `Input should be a
    valid integer, unable to parse string as an integer`.
    """
    format_message = getattr(error, "format_message", error.__str__)
    text = one_line(str(format_message())).replace(": Value error, ", ": ").removesuffix(".")
    begin, of_pydantic, _ = text.partition(": Input should be ")
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if of_pydantic and problems:
        text = f"{begin} (got {short_repr(problems[0]['input'])}, expected {wanted(problems[0])})"
    return f"{text[:1].lower()}{text[1:]}"


def wanted(problem: Mapping[str, Any]) -> str:
    """The expectation of one of pydantic's errors about a value of the command line."""
    from hetplan.schema import expectation

    expected = expectation(problem)
    if expected == "a whole number":  # 1e3 is refused
        return "a whole number, all its digits written out"
    return expected


def complain(text: str, code: int, error: BaseException | None = None) -> int:
    """Print an error as one line on stderr, and its traceback where HETPLAN_DEBUG is set. Returns
    `code`."""
    if error is not None and debugging():
        traceback.print_exception(error)
    note(f"error: {text}")
    return code


# Name -> command or group of commands; functions are named relative to `hetplan.cli`.
TREE: Mapping[str, CommandEntry | GroupEntry] = {
    "plan": GroupEntry(
        "Plan the training of a model on a cluster.",
        {
            "make": CommandEntry("plan:plan"),
            "what-if": CommandEntry(
                "changes:what_if", "Say what more or fewer devices, or faster links, would gain."
            ),
            "replan": CommandEntry(
                "changes:replan", "Plan again without lost nodes, moving little."
            ),
            "order": CommandEntry(
                "order:order", "Seek and prove the best order of a plan's passes."
            ),
            "search": CommandEntry(
                "search:search", "Search Astra's parallel strategies on a pool of GPUs."
            ),
            "simulate": CommandEntry(
                "show:simulate", "Replay a plan on the event-driven simulator."
            ),
            "templates": CommandEntry(
                "changes:templates", "Proven pipeline templates for parts of a cluster."
            ),
        },
        default="make",
    ),
    "fits": CommandEntry("fits:fits", "Say whether a model fits a cluster's memory, and how."),
    "recommend": CommandEntry(
        "recommend:recommend", "Recommend the fewest or cheapest nodes for a target."
    ),
    "solve": CommandEntry("solve:solve", "Solve an instance; every result has its proven bound."),
    "check": CommandEntry("solve:check", "Verify decisions against an instance, price them again."),
    "run": CommandEntry("run:run", "Execute a plan; measured times beside predicted ones."),
    "launch": CommandEntry(
        "run:launch", "Plan a job file and start it: here, ssh, Slurm, Kubernetes, Ray."
    ),
    "show": CommandEntry("show:show", "Draw a plan, or print a decision in full."),
    "export": GroupEntry(
        "Print a plan as a framework's flags or configuration.",
        {
            "plan": CommandEntry("show:export"),
            "layout": CommandEntry(
                "layout:layout", "Balance virtual pipeline stages, for Megatron and torchtitan."
            ),
        },
        default="plan",
    ),
    "profile": GroupEntry(
        "Predict or measure what a model costs.",
        {
            "predict": CommandEntry(
                "profile:predict", "Predict every layer's times from published measurements."
            ),
            "measure": CommandEntry(
                "profile:measure", "Measure what each layer takes on a device."
            ),
            "batch-curve": CommandEntry(
                "profile:batch_curve", "Measure seconds per micro-batch, and what fits."
            ),
            "collectives": CommandEntry(
                "profile:collectives", "Measure what ranks do together, under torchrun."
            ),
            "quick": CommandEntry(
                "profile:quick", "Measure ten operators on a device in a minute, to rescale by."
            ),
            "operators": CommandEntry(
                "profile:operators", "Measure operators of many sizes on a device."
            ),
            "train": CommandEntry("profile:train", "Learn the efficiency of devices or links."),
            "calibrate": CommandEntry(
                "calibrate:calibrate", "Estimate constants from your own measured runs."
            ),
            "import": CommandEntry(
                "profile:import_", "Read profiles, models and systems of others."
            ),
        },
        default="measure",
    ),
    "cluster": GroupEntry(
        "Write cluster files.",
        {
            "detect": CommandEntry("cluster:detect", "Describe the cluster that is here."),
        },
    ),
    "instances": GroupEntry(
        "List, show, generate, validate, update and export instances.",
        {
            "list": CommandEntry(
                "instances:show_list", "List the packaged instances with their best known."
            ),
            "show": CommandEntry("instances:show", "Show an instance: origin, size, best known."),
            "generate": CommandEntry("instances:generate", "Make a random instance of a problem."),
            "validate": CommandEntry(
                "validate:validate", "Check instance files, and what runs say of them."
            ),
            "update": CommandEntry(
                "instances:update", "Improve the best-known records by what runs found."
            ),
            "schema": CommandEntry("instances:schema", "Print the JSON schema of a file."),
            "export": CommandEntry(
                "instances:export_model", "Write an instance's models for other solvers."
            ),
        },
    ),
    "study": GroupEntry(
        "Run many methods on many instances, and report what was found.",
        {
            "run": CommandEntry(
                "study:run", "Run methods on instances; each run is a row that is kept."
            ),
            "report": CommandEntry("study:report", "A study's findings."),
        },
        default="run",
    ),
    "doctor": CommandEntry("doctor:doctor", "Report versions, solvers, cores, memory and GPUs."),
    # Not listed in the help: other programs call `instances schema` by this name.
    "schema": CommandEntry("instances:schema"),
}


@functools.cache
def program() -> Group:
    """The group of all commands, with the program's options."""
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
    """The callback of `--version`: print the version and stop."""
    if wanted:
        typer.echo(f"hetplan {__version__}")
        raise typer.Exit()


def program_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Declares the options of the program itself; typer adds those of shell completion."""
