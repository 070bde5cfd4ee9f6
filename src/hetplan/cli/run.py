"""`hetplan run`: a plan executed with local ranks, on this machine or on the plan's devices
rehearsed on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hetplan.cli import completion, sources
from hetplan.cli.options import (
    JsonOption,
    PlanArgument,
    PlanClusterOption,
    PlanModelOption,
    ProfileOption,
    QuietOption,
)
from hetplan.cli.output import check_target, note, print_json, print_tables, write_document
from hetplan.errors import InputError
from hetplan.text import number_text

if TYPE_CHECKING:
    from hetplan.runtime.job import StepReport
    from hetplan.runtime.plan import Plan
    from hetplan.runtime.virtual import Rehearsal


def run(
    plan: PlanArgument,
    virtual: Annotated[
        bool,
        typer.Option(
            "--virtual", help="Rehearse the plan's devices: narrow layers, predicted times."
        ),
    ] = False,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Iterations to run.")] = 10,
    time_scale: Annotated[
        float | None,
        typer.Option(
            "--time-scale",
            metavar="X",
            help="Seconds here per second there; default about 1 s per iteration.",
        ),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            "--factory",
            metavar="MODULE:FUNCTION",
            help="Makes your model of the plan, its argument; default the reference of its name.",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option("--device", help="What ranks compute on; auto: GPUs where there are any."),
    ] = "auto",
    cluster: PlanClusterOption = None,
    model: PlanModelOption = None,
    profile: ProfileOption = None,
    optimizer: Annotated[
        Literal["sgd", "adamw"], typer.Option("--optimizer", help="Who updates.")
    ] = "adamw",
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", help="Of the optimizer.")
    ] = 1e-3,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of weights, data and dropout.")
    ] = 0,
    hang_after: Annotated[
        float,
        typer.Option(
            "--hang-after", metavar="SECONDS", help="A rank without progress counts as hung."
        ),
    ] = 10.0,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="FOLDER", help="Write checkpoints there.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="N", help="Steps between checkpoints; default at the end."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's latest checkpoint.")
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Replan without the node of a lost rank, and go on."),
    ] = False,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            metavar="A[,B…]",
            help="To replan with.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    replan_seconds: Annotated[
        float | None,
        typer.Option(
            "--replan-seconds", metavar="SECONDS", help="For each method of a replanning."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the last iteration for Perfetto (JSON)."
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Execute a plan with one process per device, and tell measured times beside predicted ones.

    Exit code 1 when a rank died, failed or hung; the error names it and its place in the plan.
    """
    from hetplan.cli import elastic as survival
    from hetplan.runtime.devices import on_devices
    from hetplan.runtime.job import Job, check_folder_given, check_numbers
    from hetplan.runtime.launch import launch, launch_elastic
    from hetplan.runtime.measured import Measured
    from hetplan.runtime.plan import load_plan

    check_target(trace)
    check_numbers(steps, learning_rate, hang_after, every, time_scale)
    survival.check_elastic(elastic, checkpoint, every, strategies, replan_seconds)
    check_folder_given(checkpoint, every, resume=resume)
    loaded = load_plan(plan)

    def rehearsed(of: Plan) -> Rehearsal | None:
        try:
            return rehearse(of, cluster, model, profile, time_scale, virtual=virtual)
        except InputError as error:
            if virtual or elastic or (cluster, model, profile) != (None, None, None):
                raise
            # a model of the user's own under names that are known: the run needs no prediction
            if not quiet:
                note(f"no prediction: {error}")
            return None

    job = Job(
        plan=loaded, steps=steps, factory=factory, model=model, rehearsal=rehearsed(loaded), virtual=virtual,
        optimizer=optimizer, learning_rate=learning_rate, seed=seed, hang_seconds=hang_after,
        checkpoint=None if checkpoint is None else str(checkpoint), every=every, resume=resume, device=device,
    )  # fmt: skip
    job = on_devices(job)

    def tell(report: StepReport) -> None:
        if not quiet:
            told = (
                ""
                if job.virtual and loaded.schedule == "spmd"
                else f": loss {number_text(report.loss)}"
            )
            note(f"step {report.step}{told}")

    if elastic and checkpoint is not None:
        survival.check_known(loaded, job.rehearsal)
        more = survival.options(cluster, model, profile, strategies, replan_seconds)
        again = survival.Replanner(plan, checkpoint, rehearsed, more, quiet)
        found = launch_elastic(job, again, tell, None if quiet else survival.tell_loss)
    else:
        found = Measured(job, launch(job, tell))
    if trace is not None:
        write_document(trace, found.trace())
    if json:
        print_json(found.document())
    else:
        print_tables([found.table()])
    return 0


def rehearse(
    plan: Plan,
    cluster: str | None,
    model: str | None,
    profile: Path | None,
    time_scale: float | None,
    *,
    virtual: bool,
) -> Rehearsal | None:
    """The plan's predicted times; None where they are not needed and the plan's cluster is not
    known."""
    from hetplan.profiling.cluster import example_clusters
    from hetplan.runtime.virtual import Rehearsal

    told = plan.workload
    if not virtual and time_scale is not None:
        raise InputError("--time-scale is for --virtual devices")
    if not virtual and cluster is None and told.cluster not in example_clusters():
        return None
    workload = sources.workload_of(plan, cluster, model, profile)
    return Rehearsal.of(plan, workload, time_scale if virtual else 1.0, cores=free_cores())


def free_cores() -> float:
    """Of this process's cores, the part that it gets beside what else keeps them busy."""
    cores = len(os.sched_getaffinity(0))
    return cores * cores / (cores + os.getloadavg()[0])
