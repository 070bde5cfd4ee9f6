"""Options that several commands share, and how their text becomes `hetplan.solvers.Options`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion
from hetplan.errors import InputError

if TYPE_CHECKING:
    from hetplan.solvers.options import NativeValue, Options

TimeOption = Annotated[
    float | None,
    typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each method; default none."),
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
NativeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--native",
        metavar="BACKEND.NAME=VALUE",
        help="A back end's own option; BACKEND: cp-sat, highs, pyomo.",
    ),
]
PyomoOption = Annotated[
    str | None,
    typer.Option(
        "--pyomo-solver", metavar="NAME", help="Solver behind the pyomo method; default highs."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the JSON document to a file as well."
    ),
]
LinksOption = Annotated[
    Path | None,
    typer.Option(
        "--links",
        metavar="FILE",
        help="Learned efficiency of links, as `hetplan profile train` writes it.",
    ),
]
PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, as `hetplan plan -o` writes it.")
]
PlanClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME",
        help="Cluster file (YAML); default an example of the plan's cluster's name.",
        autocompletion=completion.clusters,
    ),
]
PlanModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="Built-in model or config.json; default the plan's.",
        autocompletion=completion.models,
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Measured profile; default a prediction."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]


def make_options(**given: Any) -> Options:
    """`Options` from what was given on the command line; None keeps the default. Raises
    InputError."""
    from hetplan.solvers.options import Options

    entries = {name: value for name, value in given.items() if value is not None}
    if "native" in entries:
        entries["native"] = parse_native(entries["native"])
    return Options(**entries)


def parse_native(texts: Sequence[str]) -> dict[str, dict[str, NativeValue]]:
    """`["cp-sat.linearization_level=2"]` as {"cp-sat": {"linearization_level": 2}}; raises
    InputError."""
    return parse_dotted(texts, "--native", "BACKEND.NAME=VALUE")


def parse_dotted(texts: Sequence[str], option: str, form: str) -> dict[str, dict[str, NativeValue]]:
    """`["owner.name=value"]` as {"owner": {"name": value}}; raises InputError naming `option` and
    its `form`."""
    found: dict[str, dict[str, NativeValue]] = {}
    for text in texts:
        left, equals, value = text.partition("=")
        owner, dot, name = left.strip().partition(".")
        if not (equals and dot and owner and name):
            raise InputError("not usable", where=option, got=text, expected=form)
        entries = found.setdefault(owner, {})
        if name in entries:
            raise InputError(f"{owner}.{name} is given twice", where=option)
        entries[name] = native_value(value.strip())
    return found


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
