"""`hetplan plan`: one workload, all strategies, the winner's plan with its bound."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import (
    GapOption,
    JsonOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    make_options,
    parse_dotted,
    split_list,
)
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.cli.progress import watched
from hetplan.text import Table, bytes_text, count_text, number_text, percent_text, seconds_text, share_text

if TYPE_CHECKING:
    from hetplan.planner.candidate import Candidate
    from hetplan.planner.ranking import Planning
    from hetplan.profiling.workload import Workload

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
    global_batch: Annotated[int, typer.Option("--global-batch", metavar="N", help="Samples per iteration.")],
    sequence: Annotated[
        int | None, typer.Option("--sequence", metavar="N", help="Tokens per sample; default the model's.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option("--precision", metavar="fp16|bf16|fp32", autocompletion=completion.precisions),
    ] = "fp16",
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Measured profile; default a prediction.")
    ] = None,
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
        float | None, typer.Option("--money-limit", metavar="USD", help="At most this per million tokens.")
    ] = None,
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
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the winner's plan file.")
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Plan the training of a model on a cluster: the fastest plan that fits, with its bound.

    Exit code 0 when a plan fits, 1 when none does (or none was found in time).
    """
    from hetplan.planner.ranking import make_plans, picked_strategies
    from hetplan.profiling.workload import make_workload
    from hetplan.runtime.plan import save_plan
    from hetplan.solvers.run import Run
    from hetplan.solvers.warm import prepare

    check_target(output)
    options = make_options(time_limit=time_limit, gap=gap, threads=threads, seed=seed)
    workload = make_workload(
        model,
        sources.open_cluster(cluster),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=profile,
    )
    names = split_list(strategies) if strategies is not None else None
    given = parse_dotted(settings or [], "--set", "STRATEGY.NAME=VALUE")
    picked = picked_strategies(workload, names, money_limit=money_limit, settings=given)
    prepare([w for strategy in picked for w in strategy.warmers], None if quiet else note)
    run = Run(options)
    planning = watched(
        run,
        lambda: make_plans(workload, names, run, money_limit=money_limit, settings=given),
        label=f"{workload.model.name} on {workload.cluster.name}",
        quiet=quiet,
    )
    best = planning.best
    if output is not None and best is not None and best.plan is not None:
        save_plan(best.plan, output)
    elif output is not None:
        note(f"no plan fits: {output} is not written")
    for line in workload.model.notes:
        note(line)
    if json:
        print_json(planning.document())
    else:
        print_tables(planning_tables(planning))
    return 0 if best is not None else 1


def planning_tables(planning: Planning) -> list[Table]:
    """The ranking, what is proven about the winner, and the winner's stages."""
    workload, best = planning.workload, planning.best
    # A strategy whose own price leaves something out: its bound would stand beside another sum.
    apart = any(priced_apart(candidate) for candidate in planning.candidates)
    rows = tuple(candidate_row(candidate, workload, best, apart) for candidate in planning.candidates)
    header = (
        "plan",
        "status",
        "iteration",
        "vs best",
        *(("objective",) if apart else ()),
        "bound",
        "gap",
        "least headroom",
        "tokens/s",
        "$/1M tok",
        "solve",
    )
    reasons = tuple(f"{c.strategy}/{c.method}: {c.message}" for c in planning.candidates if c.message)
    if apart:
        reasons = (
            "status, objective, bound and gap are of each strategy's own problem; iteration is the prediction",
            *reasons,
        )
    ranking = Table(workload_title(workload), header, rows, reasons, right=tuple(range(2, len(header))))
    if best is None:
        return [
            ranking,
            Table("no winner: nothing found fits in memory and the limits", (), (), needs(workload)),
        ]
    first, *rest = best.tables
    title = f"winner {best.strategy}/{best.method}: {first.title}"
    return [
        ranking,
        Table(title, first.header, first.rows, (*first.notes, verdict(best)), first.right),
        *rest,
    ]


def workload_title(workload: Workload) -> str:
    """`gpt2-medium (406 M parameters) on amp-mixed (12 V100 + 4 T4), batch 32 x 1024 tokens, fp16 …`."""
    devices = " + ".join(f"{count} {name}" for name, count in workload.cluster.counts().items())
    tokens = "" if workload.sequence is None else f" x {workload.sequence} tokens"
    return (
        f"{workload.model.name} ({count_text(workload.model.params)} parameters) on {workload.cluster.name} "
        f"({devices}), batch {workload.global_batch}{tokens}, {workload.precision}, "
        f"{workload.profile.provenance.kind} profile"
    )


def priced_apart(candidate: Candidate) -> bool:
    """Whether the predicted iteration is another figure than the objective that the bound belongs to."""
    seconds, objective = candidate.predicted_seconds, candidate.objective
    return seconds is not None and objective is not None and abs(seconds - objective) > 1e-9 * seconds


def candidate_row(
    candidate: Candidate, workload: Workload, best: Candidate | None, apart: bool
) -> tuple[str, ...]:
    """One line of the ranking; with `apart` the objective has a column of its own."""
    return (
        f"{candidate.strategy}/{candidate.method}",
        candidate.status,
        seconds_text(candidate.predicted_seconds),
        relative_text(candidate, best),
        *((seconds_text(candidate.objective),) if apart else ()),
        seconds_text(candidate.bound),
        percent_text(candidate.gap),
        memory_text(candidate, workload),
        count_text(candidate.tokens_per_second(workload)),
        number_text(candidate.money_per_million_tokens(workload), 4),
        seconds_text(candidate.solve_seconds),
    )


def relative_text(candidate: Candidate, best: Candidate | None) -> str:
    """How much longer an iteration takes than the winner's: `+65.2 %`; nothing for what does not fit."""
    if best is None or candidate is best or candidate.predicted_seconds is None or not best.predicted_seconds:
        return ""
    more = candidate.predicted_seconds / best.predicted_seconds - 1
    return percent_text(more) if more < 0 else f"+{percent_text(more)}"


def memory_text(candidate: Candidate, workload: Workload) -> str:
    """What the device in use nearest to (or furthest above) its limit holds, of what it can use."""
    if candidate.peak_bytes is None:
        return "-"
    usable = workload.device_bytes()
    limits = [usable[device.type] for device in workload.cluster.devices]
    left = [
        limit - peak if peak else math.inf for limit, peak in zip(limits, candidate.peak_bytes, strict=True)
    ]
    tightest = left.index(min(left))
    text = share_text(candidate.peak_bytes[tightest], limits[tightest])
    return text if candidate.fits_memory else f"{text} !"


def needs(workload: Workload) -> tuple[str, ...]:
    """What the model's states alone take, beside what there is."""
    usable = workload.device_bytes()
    total = sum(usable[name] * count for name, count in workload.cluster.counts().items())
    return (
        f"weights, gradients and optimizer states: {bytes_text(workload.state_bytes)} in one copy of the model; "
        f"all devices together can use {bytes_text(total)}",
    )


def verdict(best: Candidate) -> str:
    """What is proven, and what it would run."""
    counts = Counter(best.plan.devices[device].type for device in best.plan.ranks) if best.plan else Counter()
    devices = " + ".join(f"{count} {name}" for name, count in counts.items())
    if best.gap is None:
        proven = "no bound is proven"
    elif best.status == "optimal":
        proven = "proven optimal for its problem"
    else:
        proven = f"proven within {percent_text(best.gap)} of the optimum of its problem"
    return f"uses {devices}; {proven}"
