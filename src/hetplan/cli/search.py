"""`hetplan search`: Astra's strategy search on a real model and a pool of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli import completion
from hetplan.cli.options import JsonOption, OutputOption, TimeOption, make_options
from hetplan.cli.output import check_target, note, print_json, print_tables, write_document
from hetplan.cli.pools import MODES, make_pool, make_space, offers_from
from hetplan.errors import InputError
from hetplan.text import Table, number_text, seconds_text

if TYPE_CHECKING:
    from hetplan.formulations.astra.search.job import Job
    from hetplan.formulations.astra.search.pool import Pool
    from hetplan.formulations.astra.search.result import Candidate, Found
    from hetplan.formulations.astra.search.rules import Rule


def search(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME|FILE",
            help="Built-in model or config.json.",
            autocompletion=completion.models,
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpus",
            "-g",
            metavar="TYPE:COUNT[,…]",
            help="The pool, like A800:2048,H100:1024.",
            autocompletion=completion.devices,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="The pool as a cluster file instead.",
            autocompletion=completion.clusters,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="|".join(MODES),
            help="Default: by the number of types.",
            autocompletion=completion.modes,
        ),
    ] = None,
    total: Annotated[
        int | None,
        typer.Option("--total", metavar="N", help="GPUs to use (heterogeneous); default all."),
    ] = None,
    global_batch: Annotated[
        int, typer.Option("--global-batch", "-b", help="Samples per iteration.")
    ] = 1024,
    sequence: Annotated[
        int | None, typer.Option("--sequence", help="Tokens per sample; default the model's.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision", help="fp16, bf16 or fp32.", autocompletion=completion.precisions
        ),
    ] = "fp16",
    tokens: Annotated[
        float, typer.Option("--tokens", help="Of the whole training, for money.")
    ] = 1e9,
    money_limit: Annotated[
        float | None, typer.Option("--money-limit", help="Dollars for those tokens.")
    ] = None,
    rules: Annotated[
        list[Path] | None, typer.Option("--rules", help="File of rules, one a line; may repeat.")
    ] = None,
    default_rules: Annotated[
        bool,
        typer.Option("--default-rules/--no-default-rules", help="Apply the shipped rules as well."),
    ] = True,
    show_rules: Annotated[
        bool, typer.Option("--show-rules", help="Print the shipped rules and stop.")
    ] = False,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            metavar="NAME=VALUES",
            help="Like tensor=1,2,4 or pipeline=1-8; may repeat.",
            autocompletion=completion.parameters,
        ),
    ] = None,
    node_devices: Annotated[
        int | None, typer.Option("--devices-per-node", help="Of every type.")
    ] = None,
    intra_gbit: Annotated[
        float | None, typer.Option("--intra-node-gbit", help="Between devices of a node.")
    ] = None,
    network_gbit: Annotated[
        float | None, typer.Option("--network-gbit", help="Of one node.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", help="Strategies to list.")] = 10,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Pareto plot: a .svg, .html or .png file.")
    ] = None,
    instance: Annotated[
        Path | None,
        typer.Option("--instance", help="Write the best's segments as an astra instance."),
    ] = None,
    time_limit: TimeOption = None,
    json: JsonOption = False,
    output: OutputOption = None,
) -> int:
    """Search parallel strategies for a model: generate, filter by rules and memory, price, rank,
    with a proof.

    Exit code 0 when a strategy was found, 1 when none passes the rules, fits in memory and keeps
    the money limit.
    """
    from hetplan.formulations.astra.search import engine
    from hetplan.formulations.astra.search.job import Job
    from hetplan.formulations.astra.search.plot import check_plot_target, write_plot
    from hetplan.profiling.models import load_model
    from hetplan.schema import derived
    from hetplan.solvers.run import Run

    if show_rules:
        return print_rules()
    if model is None:
        raise InputError(
            "no model named", where="--model", expected="a built-in model or a config.json"
        )
    for target in (output, plot, instance):
        check_target(target)
    if plot is not None:
        check_plot_target(plot)
    if top < 1:
        raise InputError("not usable", where="--top", got=top, expected="at least 1")
    run = Run(make_options(time_limit=time_limit))
    job = Job(
        load_model(model, sequence=sequence, precision=precision), global_batch, tokens, money_limit
    )
    links = {"node_devices": node_devices, "intra_gbit": intra_gbit, "network_gbit": network_gbit}
    pool = make_pool(offers_from(gpus, cluster, links), mode, total)
    space, dropping = make_space(parameter or []), make_rules(pool, rules or [], default_rules)
    with derived(f"{job.model.name} on the pool"):
        found = engine.search(job, pool, space=space, rules=dropping, run=run, top=top)
    document = as_document(job, pool, found)
    write_document(output, document)
    if plot is not None:
        write_plot(found, plot, f"{job.model.name}, {pool.mode} pool, {job.tokens:g} tokens")
    if instance is not None:
        write_instance(found, instance, job, pool)
    for line in job.model.notes:
        note(line)
    if json:
        print_json(document)
    else:
        print_tables(tables(job, pool, found))
    return 0 if found.best is not None else 1


def make_rules(pool: Pool, paths: Sequence[Path], with_defaults: bool) -> list[Rule]:
    """The shipped rules and those of the files."""
    from hetplan.formulations.astra.search.engine import schema_of
    from hetplan.formulations.astra.search.rules import default_rules, rules_from_file

    columns = schema_of(pool).columns
    found = default_rules(columns) if with_defaults else []
    for path in paths:
        found += rules_from_file(path, columns)
    return found


def print_rules() -> int:
    """The shipped rules as they stand in their file."""
    from importlib.resources import files

    typer.echo(
        (files("hetplan.formulations.astra.search") / "default.rules").read_text(encoding="utf-8"),
        nl=False,
    )
    return 0


def as_document(job: Job, pool: Pool, found: Found) -> dict[str, Any]:
    """The search as one JSON document."""
    workload = {
        "model": job.model.name,
        "global_batch": job.global_batch,
        "sequence": job.model.sequence,
        "precision": job.model.precision,
        "tokens": job.tokens,
        "money_limit": job.money_limit,
    }
    offers = [
        {
            "type": offer.name,
            "most": offer.most,
            "devices_per_node": offer.node_devices,
            "intra_node_bytes_per_s": offer.intra,
            "network_bytes_per_s": offer.network,
            "price_per_hour": offer.spec.price_per_hour,
        }
        for offer in pool.offers
    ]
    return {
        "workload": workload,
        "pool": {"mode": pool.mode, "sizes": list(pool.sizes), "types": offers},
        **found.as_dict(),
    }


def tables(job: Job, pool: Pool, found: Found) -> list[Table]:
    """Counts, the best strategies, the Pareto set."""
    seconds = sum(found.timings.values())
    counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in found.counts.items())
    title = f"{job.model.name}, global batch {job.global_batch}: {pool.mode} pool"
    notes = [
        f"strategies: {counts}; {seconds_text(seconds)}",
        f"proof: {found.proof}" if found.proven else found.proof,
        *(f"left out: {text}" for text in found.left_out),
    ]
    if found.best is None:
        return [Table(title, (), (), notes=(*notes, f"no strategy: {found.reason}"))]
    pipeline, reduction, optimizer = (seconds_text(part) for part in found.best.parts)
    notes.append(
        f"best: {pipeline} pipeline + {reduction} exposed gradient reduction + {optimizer} optimizer"
    )
    limit = "" if job.money_limit is None else f" within {number_text(job.money_limit)} dollars"
    parts = [
        Table(title, (), (), notes=tuple(notes)),
        candidate_table(f"best{limit}", [found.best], job),
    ]
    if found.top != found.pareto[: len(found.top)]:
        parts.append(candidate_table("by throughput", found.top, job))
    return [*parts, candidate_table("Pareto set of throughput and money", found.pareto, job)]


def candidate_table(title: str, candidates: Sequence[Candidate], job: Job) -> Table:
    """One line per candidate; those whose lines would be the same share one."""
    from hetplan.formulations.astra.search.plot import summary

    header = ("tokens/s", "s/iteration", f"dollars/{job.tokens:g} tokens", "strategy")
    rows = dict.fromkeys(
        (f"{c.tokens_per_second:,.0f}", seconds_text(c.seconds), number_text(c.money), summary(c))
        for c in candidates
    )
    return Table(title, header, tuple(rows), right=(0, 1, 2))


def write_instance(found: Found, path: Path, job: Job, pool: Pool) -> None:
    """The best strategy's segments as an instance file for `hetplan solve`; says so where there are
    none."""
    from hetplan.instances.envelope import Instance, save_instance

    if found.instance is None:
        best_is_whole = found.best is not None and found.mode == "heterogeneous"
        reason = (
            "the best strategy is on one type alone"
            if best_is_whole
            else "only the heterogeneous mode chooses"
        )
        note(f"{path} not written: {reason}, so there are no segments")
        return
    types = "-".join(offer.name for offer in pool.offers)
    name = f"{job.model.name}-{types}-{pool.sizes[0]}"
    origin = (
        f"hetplan search: {job.model.name}, global batch {job.global_batch}, best strategy of {pool.sizes[0]} GPUs; "
        "times are predicted; its objective is the pipeline's seconds, without gradient reduction and optimizer"
    )
    save_instance(Instance(problem="astra", name=name, origin=origin, data=found.instance), path)
