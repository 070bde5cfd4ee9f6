"""`hetplan replan`: the best plan on what a loss has left, and what has to move for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.board import Board
from hetplan.cli.options import JsonOption, QuietOption, ThreadsOption, make_options, split_list
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.cli.progress import watched
from hetplan.text import Table, bytes_text, seconds_text

if TYPE_CHECKING:
    from hetplan.planner.replan import Choice, Replanning

TIME_LIMIT = 20.0


def replan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan that runs now.")],
    lost: Annotated[
        list[str], typer.Option("--lost", metavar="nodeN[,nodeM…]", help="Nodes that are gone.")
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="The cluster as it was; default an example of the plan's cluster's name.",
            autocompletion=completion.clusters,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Default the plan's.",
            autocompletion=completion.models,
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option("--profile", metavar="FILE")] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategies", metavar="A[,B…]", autocompletion=completion.strategies),
    ] = None,
    within: Annotated[
        float,
        typer.Option(
            "--within",
            metavar="PERCENT",
            help="Take the plan that moves least of those at most so much slower.",
        ),
    ] = 5.0,
    time_limit: Annotated[
        float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each method.")
    ] = TIME_LIMIT,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the new plan's file."),
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Plan again on what is left, and say which weights move where; the new plan leaves the lost
    nodes idle.

    Exit code 0 when a plan fits, 1 when none does.
    """
    from hetplan.errors import InputError
    from hetplan.planner.replan import parse_lost
    from hetplan.planner.replan import replan as planned
    from hetplan.planner.strategy import chosen
    from hetplan.runtime.plan import load_plan, save_plan
    from hetplan.solvers.run import Run

    check_target(output)
    if not 0 <= within < float("inf"):
        raise InputError("--within", got=within, expected="percent, from 0 on")
    options = make_options(time_limit=time_limit, threads=threads)
    loaded = load_plan(plan)
    workload = sources.workload_of(loaded, cluster, model, profile)
    gone = parse_lost(split_list(lost), workload)
    picked = chosen(split_list(strategies) if strategies is not None else None)
    run, label = Run(options), f"replanning {loaded.name}"
    board = Board(label)
    found = watched(
        run,
        lambda: planned(
            loaded, workload, gone, run, strategies=picked, within=within, on_candidate=board.found
        ),
        label=label,
        quiet=quiet,
        on=board,
    )
    best = found.best
    if output is not None and best is not None and best.candidate.plan is not None:
        save_plan(best.candidate.plan, output)
    elif output is not None:
        note(f"no plan fits: {output} is not written")
    if json:
        print_json(found.document())
    else:
        print_tables(tables(found))
    return 0 if best is not None else 1


def tables(found: Replanning) -> list[Table]:
    """The choices, and what moves for the chosen one."""
    rows = tuple(row(choice, found, i == found.chosen) for i, choice in enumerate(found.choices))
    header = ("", "plan", "iteration", "to move", "from a checkpoint", "at least")
    nodes = ", ".join(f"node {n}" for n in found.lost)
    before = f"before the loss {seconds_text(found.before)} per iteration"
    chosen = f"chosen: what moves least of all plans within {found.within:g} % of the fastest, checkpoint included"
    least = "at least: to move over the links, without reading the checkpoint"
    ranking = Table(f"without {nodes}", header, rows, (before, chosen, least), right=(2, 3, 4, 5))
    best = found.best
    if best is None:
        return [Table(f"without {nodes}: nothing fits", (), (), (before,))]
    return [ranking, moving(best, found)]


def row(choice: Choice, found: Replanning, chosen: bool) -> tuple[str, ...]:
    """One plan."""
    return (
        "*" if chosen else "",
        choice.candidate.name,
        seconds_text(choice.candidate.predicted_seconds),
        bytes_text(choice.moves.total),
        bytes_text(choice.moves.from_checkpoint),
        seconds_text(choice.moves.seconds(found.workload)),
    )


def moving(best: Choice, found: Replanning) -> Table:
    """Bytes per link."""
    rows = tuple(
        (f"node {a}", f"node {b}" if a != b else "itself", bytes_text(size))
        for (a, b), size in best.moves.between_nodes(found.workload).items()
    )
    lost = best.moves.from_checkpoint
    notes = (
        (f"{bytes_text(lost)} were on lost nodes only and come from a checkpoint",) if lost else ()
    )
    return Table(
        f"weights and optimizer states that {best.candidate.name} moves",
        ("from", "to", "bytes"),
        rows,
        notes,
    )
