"""`hetplan plan order` seeks the best order of a plan's passes, and writes it into the plan."""

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    JsonOption,
    LimitOption,
    PlanArgument,
    QuietOption,
    SeedOption,
    ThreadsOption,
    make_options,
    target,
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.cli.setting import Setting
from hetplan.planner.order import Ordering, order as order_passes
from hetplan.plans.plan import load_plan
from hetplan.solvers.run import OPTIMAL_GAP, Run, relative_gap
from hetplan.text import Table, percent_text, seconds_text


@described(
    sections={
        "In place of what the plan carries": "--cluster --model --profile",
        "Order": "--whole",
        "Limits of the search": "--time-limit --threads --seed",
        "Output": "--output --json --quiet --help",
    },
    examples=(
        (
            "The best order of a plan's passes, as a plan",
            "hetplan plan order plan.json -o ordered.json",
        ),
        (
            "Without split backward passes",
            "hetplan plan order plan.json --whole -o ordered.json",
        ),
    ),
)
def order(
    plan: PlanArgument,
    setting: Setting,
    whole: Annotated[
        bool, typer.Option("--whole", help="Keep every backward pass whole; default split.")
    ] = False,
    time_limit: LimitOption = 60.0,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    json: JsonOption = False,
    output: Annotated[
        Path | None, target("--output", "-o", help="Write the plan with the order.")
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Seek the order of a plan's passes with the least seconds, on the same stages and in the same
    memory, and prove how much faster another order could be. Where the order is not faster than the
    plan's own schedule, the plan stays as it is."""
    loaded = load_plan(plan)
    workload = setting.workload(loaded, plan)
    run = Run(make_options(time_limit=time_limit, threads=threads, seed=seed))
    found = watched(
        run,
        lambda: order_passes(loaded, workload, run, split=not whole),
        Display(f"order of {loaded.name}"),
        quiet=quiet,
    )
    emit(found.document(), [order_table(loaded.schedule, found)], json=json)
    if output is not None:
        found.plan.save(output)
        note(f"written: {output}")
    return 0


def order_table(schedule: str, found: Ordering) -> Table:
    """The table of an order: what the plan takes before and after, and the proof."""
    gap, passes = relative_gap(found.seconds, found.bound), "split" if found.split else "whole"
    if gap is not None and gap <= OPTIMAL_GAP:
        proven = f"no order of {passes} passes is faster: it is optimal"
    else:
        faster = f"no order of {passes} passes is faster than {seconds_text(found.bound)}"
        proven = f"{faster} (gap {percent_text(gap)})"
    after = "not faster"
    if found.is_faster:
        saved = 1 - found.seconds / found.seconds_before
        after = f"{seconds_text(found.seconds)}, {percent_text(saved)} less"
    rows = (
        (schedule, seconds_text(found.seconds_before)),
        ("best order", after),
        ("proven", proven),
    )
    return Table(found.plan.name, ("", ""), rows)
