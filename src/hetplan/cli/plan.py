"""`hetplan plan`: one workload, all strategies, the winner's plan with its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.board import Board
from hetplan.cli.options import (
    GapOption,
    JsonOption,
    LinksOption,
    ProfileOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    make_options,
    parse_dotted,
    split_list,
)
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.cli.progress import watched

# Large clusters can keep an exact method busy for hours; bounds are kept when time runs out.
TIME_LIMIT = 60.0


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Built-in model, or a Hugging Face config.json.",
            autocompletion=completion.models,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="Cluster file (YAML), or an example's name.",
            autocompletion=completion.clusters,
        ),
    ],
    global_batch: Annotated[
        int, typer.Option("--global-batch", metavar="N", help="Samples per iteration.")
    ],
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", metavar="N", help="Tokens per sample; default the model's."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="fp16|bf16|fp32",
            help="Or several (fp16,fp32), or auto: those that every device has, planned together.",
            autocompletion=completion.plan_precisions,
        ),
    ] = "fp16",
    profile: ProfileOption = None,
    links: LinksOption = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            metavar="A[,B…]",
            help="Which to try; default all.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", "-t", metavar="SECONDS", help="For each method.")
    ] = TIME_LIMIT,
    money_limit: Annotated[
        float | None,
        typer.Option(
            "--money-limit", metavar="USD", help="At most this per million tokens; implies --parts."
        ),
    ] = None,
    cheapest_within: Annotated[
        float | None,
        typer.Option(
            "--cheapest-within",
            metavar="PERCENT",
            help="Not the fastest, but the cheapest at most so much slower; implies --parts.",
        ),
    ] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="Plan on every part of the cluster by device type, too.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="STRATEGY.NAME=VALUE",
            help="A strategy's own setting, as poplar.shards=memory; a wrong name lists them.",
        ),
    ] = None,
    gap: GapOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the winner's plan file."),
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Plan the training of a model on a cluster: the fastest plan that fits, replayed, with its
    bound.

    Exit code 0 when a plan fits, 1 when none does (or none was found in time).
    """
    from hetplan.cli.planning import planning_tables
    from hetplan.planner.library import make_workloads
    from hetplan.planner.ranking import Criteria, make_plans
    from hetplan.planner.strategy import chosen
    from hetplan.runtime.plan import save_plan
    from hetplan.solvers.run import Run

    check_target(output)
    options = make_options(time_limit=time_limit, gap=gap, threads=threads, seed=seed)
    choice = make_workloads(
        model,
        sources.open_cluster(cluster),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=profile,
    )
    workloads = [sources.with_links(one, links) for one in choice.workloads]
    workload = workloads[0]
    names = split_list(strategies) if strategies is not None else None
    given = parse_dotted(settings or [], "--set", "STRATEGY.NAME=VALUE")
    picked = chosen(names, given)
    criteria = Criteria(money_limit, cheapest_within, parts)
    criteria.check(workload)
    run = Run(options)
    label = f"{workload.model.name} on {workload.cluster.name}"
    board = Board(label)
    planning = watched(
        run,
        lambda: make_plans(
            workloads,
            picked,
            run,
            criteria=criteria,
            on_candidate=board.found,
            notes=choice.notes,
        ),
        label=label,
        quiet=quiet,
        on=board,
    )
    best = planning.best
    if output is not None and best is not None and best.plan is not None:
        save_plan(best.plan, output)
    elif output is not None:
        note(f"no winner: {output} is not written")
    for line in workload.model.notes:
        note(line)
    if json:
        print_json(planning.document())
    else:
        print_tables(planning_tables(planning))
    return 0 if best is not None else 1
