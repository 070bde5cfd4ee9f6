"""`hetplan recommend`: the fewest GPUs, or the least money, for a target."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    COUNTED_SECONDS,
    CUTTING_LIMIT,
    BatchOption,
    CountedOption,
    FrameworkOption,
    JsonOption,
    LimitOption,
    MarginOption,
    ModelOption,
    OutputOption,
    PrecisionOption,
    ProfileOption,
    QuietOption,
    SequenceOption,
    StackOption,
    check_picture,
    make_options,
    number,
    offered,
    open_cluster,
    target,
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.errors import require
from hetplan.files import write_bytes
from hetplan.planner.recommend import (
    HOUR,
    MOVES,
    Choice,
    Goal,
    Least,
    Recommendation,
    choice_text,
    document_of,
    recommendation,
)
from hetplan.plans.plan import save_plan
from hetplan.profiling.models.operators import DEFAULT_STACK
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import CUT, Run
from hetplan.studies.charts import as_picture, figure
from hetplan.text import Column, Table, counted, number_text, seconds_text

DAY = 24 * HOUR
LARGEST_TARGET = 1e18  # the largest number of tokens, and of dollars, that an option takes


@described(
    sections={
        "Model and batch": "--model --global-batch --sequence --precision",
        "Nodes that can be had": "--offers",
        "Target": "--tokens-per-second --tokens --days --budget --least",
        "Predictions": "--profile --framework --stack --memory-margin",
        "Search": "--moves --counted-seconds --time-limit --frontier",
        "Output": "--plan --plot --output --json --quiet --help",
    },
    examples=(
        (
            "The fewest GPUs that train a billion tokens a day",
            "hetplan recommend --model gpt2-xl --offers offers.yaml --global-batch 64 "
            "--tokens 1e9 --days 1 --least gpus",
        ),
        (
            "The cheapest nodes that reach 20,000 tokens per second, with their plan",
            "hetplan recommend --model gpt2-xl --offers offers.yaml --global-batch 64 "
            "--tokens-per-second 20000 --plan plan.json",
        ),
        (
            "The fastest training of a billion tokens for 300 dollars",
            "hetplan recommend --model gpt2-xl --offers offers.yaml --global-batch 64 "
            "--tokens 1e9 --budget 300",
        ),
    ),
)
def recommend(
    model: ModelOption,
    offers: Annotated[
        str,
        offered(
            "clusters",
            "--offers",
            metavar="FILE|NAME",
            help="A cluster file of all nodes that can be had: `count` says how many, "
            "price_per_hour under `devices` what a device costs.",
        ),
    ],
    global_batch: BatchOption,
    tokens_per_second: Annotated[
        float | None,
        number("--tokens-per-second", least=1e-6, most=LARGEST_TARGET, help="The least speed."),
    ] = None,
    tokens: Annotated[
        float | None,
        number("--tokens", least=1, most=LARGEST_TARGET, help="Tokens of the whole training."),
    ] = None,
    days: Annotated[
        float | None,
        number("--days", least=1e-6, most=1e6, help="The most that all --tokens may take."),
    ] = None,
    budget: Annotated[
        float | None,
        number(
            "--budget",
            least=1e-6,
            most=LARGEST_TARGET,
            help="The most dollars for all --tokens; the fastest such choice wins.",
        ),
    ] = None,
    least: Annotated[
        Least | None,
        typer.Option(
            "--least",
            help="The quantity to minimize; default time under a budget, else money where all "
            "prices are known, else gpus.",
        ),
    ] = None,
    sequence: SequenceOption = None,
    precision: PrecisionOption = "fp16",
    profile: ProfileOption = None,
    framework: FrameworkOption = "hetplan",
    stack: StackOption = DEFAULT_STACK.name,
    memory_margin: MarginOption = 0.05,
    counted_seconds: CountedOption = COUNTED_SECONDS,
    time_limit: LimitOption = CUTTING_LIMIT,
    moves: Annotated[
        int,
        number(
            "--moves",
            least=1,
            most=10**9,
            help="Moves of the local search for each choice; more give faster plans.",
        ),
    ] = MOVES,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier", help="Plan all choices that may be the fastest of their price, too."
        ),
    ] = False,
    plan: Annotated[
        Path | None, target("--plan", help="Write the plan of the recommended nodes.")
    ] = None,
    plot: Annotated[
        Path | None, target("--plot", help="Price and speed as a .svg or .png file.")
    ] = None,
    json: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> int:
    """Recommend nodes for a target: how many of each kind, and the plan to train on them.

    Choices that no plan can make fast or cheap enough are ruled out by bounds. Exit code 0 when a
    choice meets the target, 1 when none is found.
    """
    check_picture(plot)
    check_target(tokens_per_second, tokens, days, budget)
    # Made before the search, so that a missing matplotlib is noticed at once.
    empty_plot = None if plot is None else figure(height=4.8)
    without_margin = make_workload(
        model,
        open_cluster(offers),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=profile,
        framework=framework,
        stack=stack,
    )
    workload = replace(without_margin, memory_margin=memory_margin)
    speed = tokens_per_second
    if tokens is not None and days is not None:
        speed = tokens / (days * DAY)
    goal = goal_of(workload, speed, tokens, budget, least)
    note(*workload.model.notes)
    run = Run(make_options(time_limit=time_limit), budget=counted_seconds)
    answer = watched(
        run,
        lambda: recommendation(workload, goal, run, moves=moves, whole_frontier=frontier),
        Display(f"nodes for {workload.model.name}"),
        quiet=quiet,
    )
    if plot is not None and empty_plot is not None:
        canvas, axes = empty_plot
        write_bytes(plot, frontier_picture(answer, workload, canvas, axes, plot))
    best = answer.best
    if plan is not None and best is not None and best.plan is not None:
        save_plan(best.plan, plan)
    elif plan is not None:
        note(f"no choice meets the target: {plan} is not written")
    document = document_of(answer, workload)
    return emit(document, tables(answer, workload), json=json, output=output, ok=best is not None)


def check_target(
    tokens_per_second: float | None,
    tokens: float | None,
    days: float | None,
    budget: float | None,
) -> None:
    """Raise InputError for options that state no target, or contradict each other. The options
    --days and --budget say in how many days, and for how many dollars, all --tokens are trained."""
    require(
        tokens is not None or (days is None and budget is None),
        "--days and --budget need a number of tokens",
        expected="--tokens as well",
    )
    require(
        days is None or tokens_per_second is None,
        "the speed is given twice, by --tokens-per-second and by --days",
        expected="one of the two",
    )
    require(
        tokens_per_second is not None or days is not None or budget is not None,
        "no target",
        expected="--tokens-per-second, --tokens with --days, or --tokens with --budget",
    )


def goal_of(
    workload: Workload,
    speed: float | None,
    tokens: float | None,
    budget: float | None,
    least: Least | None,
) -> Goal:
    """The goal of the options. speed: tokens per second at least; None: any."""
    prices = [workload.cluster.specs[name].price_per_hour for name in workload.cluster.types]
    default: Least = "money"
    if budget is not None:
        default = "time"
    elif None in prices:
        default = "gpus"
    return Goal(
        least=least or default,
        seconds=math.inf if speed is None else workload.tokens_per_iteration / speed,
        iterations=None if tokens is None else tokens / workload.tokens_per_iteration,
        budget=math.inf if budget is None else budget,
    )


def tables(answer: Recommendation, workload: Workload) -> Iterator[Table]:
    """The table of all planned choices, with what the answer proves, and the frontier of price and
    speed."""
    goal, kinds = answer.goal, answer.kinds

    def speed(choice: Choice) -> str:
        if choice.seconds is None:
            return "no plan"
        return number_text(workload.tokens_per_iteration / choice.seconds, 4)

    def verdict(choice: Choice) -> str:
        if choice is answer.best:
            return "recommended"
        return "" if answer.meets_target(choice) else "misses"

    def price(choice: Choice) -> str:
        return "-" if choice.per_hour is None else number_text(choice.per_hour, 4)

    def money(choice: Choice) -> str:
        if choice.seconds is None or choice.per_hour is None or goal.iterations is None:
            return "-"
        return number_text(goal.dollars(choice.per_hour, choice.seconds), 4)

    columns: list[Column[Choice]] = [
        Column("nodes", lambda choice: choice_text(choice.counts, kinds)),
        Column("GPUs", lambda choice: choice.devices, right=True),
        Column("$/hour", price, right=True),
        Column("tokens/s", speed, right=True),
    ]
    if goal.iterations is not None:
        columns.append(Column("$ in all", money, right=True))
    with_verdicts = [*columns, Column("", verdict)]
    yield Table.of("choices that were planned", answer.choices, with_verdicts, list(notes(answer)))
    front = [answer.choices[i] for i in answer.frontier()]
    if 1 < len(front) < len(answer.choices):
        yield Table.of("of these, none is both cheaper and faster than", front, columns)


def notes(answer: Recommendation) -> Iterator[str]:
    """Lines with the recommended choice, and with what the bounds prove about the others."""
    goal, best = answer.goal, answer.best
    if goal.least == "gpus":
        unit = "GPUs"
    elif goal.least == "time":
        unit = "seconds an iteration"
    elif goal.iterations is None:
        unit = "dollars per hour"
    else:
        unit = "dollars"
    if best is None or best.seconds is None:
        yield "no choice meets the target"
    else:
        yield (
            f"recommended: {choice_text(best.counts, answer.kinds)}, "
            f"{number_text(answer.value(best), 4)} {unit}; "
            f"an iteration takes {seconds_text(best.seconds)} (predicted by the replay)"
        )
    yield f"{counted(answer.ruled_out, 'choice')} ruled out by bounds alone"
    if answer.left:
        yield f"{counted(answer.left, 'choice')} not looked at before the budget was used up"
    if answer.cut:
        yield CUT
    if answer.undecided:
        yield (
            f"{counted(len(answer.undecided), 'planned choice')} would be better if their devices "
            "did nothing but compute; with the plans found for them they are not better"
        )
    if answer.least < math.inf:
        yield f"no choice has less than {number_text(answer.least, 4)} {unit}"


def frontier_picture(
    answer: Recommendation, workload: Workload, canvas: Any, axes: Any, path: Path
) -> bytes:
    """The planned choices by price and speed, with the frontier as a line. canvas, axes: an empty
    figure of matplotlib. Raises InputError where no choice has a plan."""
    priced = all(kind.price is not None for kind in answer.kinds)

    def point(choice: Choice) -> tuple[float, float]:
        assert choice.seconds is not None
        return choice.cost, workload.tokens_per_iteration / choice.seconds

    planned = [point(choice) for choice in answer.choices if choice.seconds is not None]
    require(planned, "nothing to plot", where=str(path), expected="a choice that has a plan")
    front = [point(answer.choices[i]) for i in answer.frontier()]
    axes.scatter(*zip(*planned, strict=True), s=12, color="#9aa5b1")
    axes.plot(*zip(*front, strict=True), "o-", color="#c0392b", markersize=5)
    if answer.best is not None:
        axes.plot(*point(answer.best), "*", color="#c0392b", markersize=14)
    axes.set(xlabel="dollars per hour" if priced else "GPUs", ylabel="tokens per second")
    axes.set(xlim=(0, None), ylim=(0, None))
    return as_picture(canvas, path.suffix[1:].lower())
