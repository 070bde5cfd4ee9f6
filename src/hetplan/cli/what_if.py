"""`hetplan what-if`: what more devices, fewer, or a faster network would be worth."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.board import Board
from hetplan.cli.options import JsonOption, QuietOption, ThreadsOption, make_options, split_list
from hetplan.cli.output import print_json, print_tables
from hetplan.cli.progress import watched
from hetplan.text import Table, devices_counted, number_text, seconds_text

if TYPE_CHECKING:
    from hetplan.planner.what_if import Changed, WhatIf

TIME_LIMIT = 20.0


def what_if(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|FILE", autocompletion=completion.models)
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="FILE|NAME", autocompletion=completion.clusters)
    ],
    global_batch: Annotated[
        int, typer.Option("--global-batch", metavar="N", help="Samples per iteration.")
    ],
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="COUNTxDEVICE", help="A node more, as 2xA100-SXM4-80GB."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="nodeN|COUNTxDEVICE", help="A node or some devices less."),
    ] = None,
    network: Annotated[
        list[float] | None,
        typer.Option(
            "--network-gbit-per-s", metavar="GBIT", help="Every node's network at that bandwidth."
        ),
    ] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", metavar="N")] = None,
    precision: Annotated[
        str,
        typer.Option("--precision", metavar="fp16|bf16|fp32", autocompletion=completion.precisions),
    ] = "fp16",
    profile: Annotated[Path | None, typer.Option("--profile", metavar="FILE")] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategies", metavar="A[,B…]", autocompletion=completion.strategies),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each method and change."),
    ] = TIME_LIMIT,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Plan again after each change and print what it gains; without changes, one node more or less
    of each kind, and each kind of link twice as fast.

    Exit code 0 when a plan fits on the cluster as it is, 1 when none does.
    """
    from hetplan.planner.strategy import chosen
    from hetplan.planner.what_if import addition, faster_network, marginal, removal
    from hetplan.planner.what_if import what_if as asked
    from hetplan.profiling.workload import make_workload
    from hetplan.solvers.run import Run

    options = make_options(time_limit=time_limit, threads=threads)
    workload = make_workload(
        model, sources.open_cluster(cluster), global_batch,
        sequence=sequence, precision=precision, profile=profile,
    )  # fmt: skip
    picked = chosen(split_list(strategies) if strategies is not None else None)
    changes = [
        *(addition(text, workload.cluster) for text in split_list(add or [])),
        *(removal(text, workload.cluster) for text in split_list(remove or [])),
        *(faster_network(gbit, workload.cluster) for gbit in network or []),
    ] or marginal(workload.cluster)
    run = Run(options)
    label = f"what if, {workload.cluster.name}"
    board = Board(label)
    found = watched(
        run,
        lambda: asked(workload, changes, run, strategies=picked, on_candidate=board.found),
        label=label,
        quiet=quiet,
        on=board,
    )
    if json:
        print_json(found.document())
    else:
        print_tables([table(found)])
    return 0 if found.base.best is not None else 1


def table(found: WhatIf) -> Table:
    """One line per change."""
    rows = tuple(row(variant, found.base) for variant in (found.base, *found.variants))
    header = (
        "change",
        "devices",
        "best plan",
        "iteration",
        "saves",
        "per device",
        "tokens/s",
        "$/1M tok",
    )
    title = f"{found.base.workload.model.name} on {found.base.workload.cluster.name}"
    notes: tuple[str, ...] = (
        "iterations are replayed; added nodes are linked as the cluster's of that device, else as its best",
    )
    if found.decided:
        counts = Counter(found.decided)
        listed = "; ".join(
            f"{count} x {text}" if count > 1 else text for text, count in counts.items()
        )
        notes = (*notes, f"decided without solving: {listed}")
    return Table(title, header, rows, notes, right=(3, 4, 5, 6, 7))


def row(variant: Changed, base: Changed) -> tuple[str, ...]:
    """A change and what comes of it."""
    best, devices = variant.best, variant.change.devices
    counts = devices_counted(variant.workload.cluster.counts())
    if best is None:
        return (variant.change.name, counts, "nothing fits", *("-",) * 5)
    saves, per_device = "", ""
    if variant.gain is not None:
        saves = signed(variant.gain)
        per_device = signed(variant.gain / devices) if devices else ""
    return (
        variant.change.name,
        counts,
        best.name,
        seconds_text(best.predicted_seconds),
        saves,
        per_device,
        number_text(best.tokens_per_second(variant.workload), 4),
        number_text(best.money_per_million_tokens(variant.workload), 4),
    )


def signed(seconds: float) -> str:
    """`12 ms`, or `-3 ms` where it costs."""
    return seconds_text(seconds) if seconds >= 0 else f"-{seconds_text(-seconds)}"
