"""The entry `hetplan`: one Typer application, one place where errors become a line and an exit
code.

Exit codes: 0 success; 1 a result is infeasible or unknown, or a check failed; 2 a file, an option
or standard output cannot be used; 3 a bug in hetplan; 130 aborted from the keyboard; 141 the reader
of the output went away.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from hetplan.cli import (
    calibrate,
    check,
    cluster,
    doctor,
    export,
    export_model,
    importing,
    library,
    plan,
    profile,
    replan,
    report,
    run,
    schema,
    search,
    sensitivity,
    show,
    simulate,
    solve,
    study,
    templates,
    validate,
    what_if,
)
from hetplan.cli.streams import OutputError, drop, open_streams, say
from hetplan.errors import HetplanError, one_line

BROKEN_PIPE = 141
ABORTED = 130
BUG = 3

app = typer.Typer(
    name="hetplan",
    help="Plan the training of one model on mixed GPUs, with a proven bound on every plan.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan.plan)
app.command("import")(importing.import_)
app.command("what-if")(what_if.what_if)
app.command("replan")(replan.replan)
app.command("export")(export.export)
app.command("profile")(profile.profile)
app.command("report")(report.report)
app.command("calibrate")(calibrate.calibrate)
app.command("sensitivity")(sensitivity.sensitivity)
app.command("show")(show.show)
app.command("simulate")(simulate.simulate)
app.command("run")(run.run)
app.command("solve")(solve.solve)
app.command("search")(search.search)
app.command("study")(study.study)
app.command("export-model")(export_model.export_model)
app.command("templates")(templates.templates)
app.command("check")(check.check)
app.add_typer(library.app, name="instances")
app.add_typer(validate.app, name="validate")
app.add_typer(cluster.app, name="cluster")
app.command("schema")(schema.schema)
app.command("doctor")(doctor.doctor)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        from hetplan import __version__

        typer.echo(f"hetplan {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Plan the training of one model on mixed GPUs, with a proven bound on every plan."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# typer's exception for what a user got wrong has no public name; its subclass has.
_USAGE_ERROR: type[Exception] = next(
    c
    for c in typer.BadParameter.__mro__
    if c.__name__ == "ClickException" and issubclass(c, Exception)
)


@cache
def command() -> Any:
    """The application as a command, built once (from many annotated signatures, which takes a
    while)."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and prints at most one line for any error."""
    open_streams()
    with warnings.catch_warnings():
        if not (sys.warnoptions or debugging()):  # those of libraries are for developers
            warnings.simplefilter("ignore")
        code = guarded(arguments)
    if arguments is None and "hetplan.solvers.native" in sys.modules:
        from hetplan.solvers.native import end_process

        end_process(code)
    return code


def guarded(arguments: Sequence[str] | None) -> int:
    """Run the command line with every way out of it mapped to an exit code."""
    try:
        returned = command().main(
            args=None if arguments is None else list(arguments),
            prog_name="hetplan",
            standalone_mode=False,
        )
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
    except _USAGE_ERROR as error:
        return complain(usage_text(error), 2, error)
    except OutputError as error:
        drop(sys.stdout)
        return complain(str(error), error.exit_code, error)
    except HetplanError as error:
        return complain(str(error), error.exit_code, error)
    except Exception as error:  # noqa: BLE001 (the last boundary: a bug is one line too, debugging shows it all)
        hint = "this is a bug; HETPLAN_DEBUG=1 shows where"
        return complain(f"{type(error).__name__}: {error} ({hint})", BUG, error)
    if returned == ABORTED:  # what typer makes of KeyboardInterrupt, in silence
        return complain("aborted", ABORTED)
    return returned if isinstance(returned, int) else 0


def debugging() -> bool:
    """Whether HETPLAN_DEBUG asks for tracebacks and warnings."""
    return os.environ.get("HETPLAN_DEBUG", "") not in ("", "0")


def usage_text(error: BaseException) -> str:
    """What typer says of a wrong option or argument, as one sentence."""
    format_message = getattr(error, "format_message", error.__str__)
    text = one_line(str(format_message())).replace(": Value error, ", ": ").removesuffix(".")
    return f"{text[:1].lower()}{text[1:]}"


def complain(text: str, code: int, error: BaseException | None = None) -> int:
    """One line on stderr (and the traceback where HETPLAN_DEBUG is set); returns `code`."""
    if error is not None and debugging():
        import traceback

        traceback.print_exception(error)
    say(f"error: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
