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
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hetplan import __version__
from hetplan.cli import (
    changes,
    cluster,
    doctor,
    importing,
    instances,
    learning,
    plan,
    profile,
    report,
    run,
    search,
    show,
    simulate,
    solve,
    study,
    truth,
)
from hetplan.cli.options import GroupWithDefault, add, group
from hetplan.cli.output import OutputError, drop, open_streams, say
from hetplan.errors import HetplanError, one_line

BROKEN_PIPE = 141
ABORTED = 130
BUG = 3

# What was on the top level before it had a place of its own; kept for a release (`schema` for
# good: programs ask for it).
MOVED: dict[str, Callable[..., int]] = {
    "what-if": changes.what_if,
    "replan": changes.replan,
    "templates": changes.templates,
    "search": search.search,
    "simulate": simulate.simulate,
    "import": importing.import_,
    "schema": instances.schema,
    "export-model": instances.export_model,
    "report": report.report,
    "calibrate": truth.calibrate,
    "sensitivity": truth.sensitivity,
}

plan_app = group("Plan the training of a model on a cluster.", GroupWithDefault)
add(plan_app, {"make": plan.plan}, hidden=True)
add(
    plan_app,
    {name: MOVED[name] for name in ("what-if", "replan", "search", "simulate", "templates")},
)

profile_app = group("Predict or measure what a model costs.", profile.ProfileGroup)
add(
    profile_app,
    {
        "predict": profile.predict,
        "measure": profile.measure,
        "batch-curve": profile.batch_curve,
        "collectives": profile.collectives,
        "operators": learning.operators,
        "train": learning.train,
        "import": importing.import_,
    },
)

instances_app = group("List, show, generate, validate, update and export instances.")
add(
    instances_app,
    {
        "list": instances.show_list,
        "show": instances.show,
        "generate": instances.generate,
        "validate": instances.validate,
        "update": instances.update,
        "schema": instances.schema,
        "export": instances.export_model,
    },
)

study_app = group(
    "Run many methods on many instances, and report what was found.", study.StudyGroup
)
add(study_app, {"run": study.run, "report": report.report})

validate_app = group("Hold predictions against plans that were really run.")
add(validate_app, {"sailor": truth.sailor, "rehearsal": truth.rehearsal})
truth_app = group("Hold predictions against what was measured.")
truth_app.add_typer(validate_app, name="validate")
add(truth_app, {"calibrate": truth.calibrate, "sensitivity": truth.sensitivity})

cluster_app = group("Write cluster files.")
cluster_app.callback()(lambda: None)  # a group although it has one command only
add(cluster_app, {"detect": cluster.detect})


class Root(TyperGroup):
    """The program's commands in the order in which people meet them."""

    order = (
        "plan",
        "solve",
        "check",
        "run",
        "show",
        "export",
        "profile",
        "cluster",
        "instances",
        "study",
        "truth",
        "doctor",
    )

    def list_commands(self, ctx: Any) -> list[str]:
        """Those of `order`, then what has moved."""
        return [*self.order, *(name for name in self.commands if name not in self.order)]


app = group(
    "Plan the training of one model on mixed GPUs, with a proven bound on every plan.", Root
)
for name, part in {
    "plan": plan_app,
    "profile": profile_app,
    "cluster": cluster_app,
    "instances": instances_app,
    "study": study_app,
    "truth": truth_app,
}.items():
    app.add_typer(part, name=name)
add(
    app,
    {
        "solve": solve.solve,
        "check": solve.check,
        "run": run.run,
        "show": show.show,
        "export": show.export,
        "doctor": doctor.doctor,
    },
)
add(app, MOVED, hidden=True)
app.add_typer(validate_app, name="validate", hidden=True)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
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
