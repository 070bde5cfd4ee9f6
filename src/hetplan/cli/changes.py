"""The commands for a cluster that changes: `hetplan plan what-if`, `hetplan plan replan` and
`hetplan plan templates` (pipeline templates as in Oobleck)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    COUNTED_SECONDS,
    CUTTING_LIMIT,
    CountedOption,
    GapOption,
    InstanceArgument,
    JsonOption,
    LimitOption,
    OutputOption,
    OwnMarginOption,
    QuietOption,
    SequenceOption,
    StrategiesOption,
    ThreadsOption,
    TimeOption,
    make_options,
    number,
    open_cluster,
    open_instance,
    split_list,
    target,
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.cli.plan import SCREEN_WIDTH, devices_used, named_strategies, write_plan
from hetplan.cli.setting import Setting
from hetplan.errors import require
from hetplan.formulations.ditto.templates import readiness, rows_of, tables_of
from hetplan.planner import replan as again, what_if as asking
from hetplan.planner.fits import MEMORY_MARGIN
from hetplan.planner.replan import Replanning
from hetplan.planner.what_if import ChangeResult, WhatIf
from hetplan.planner.workloads import make_workloads
from hetplan.plans.plan import Plan, load_plan
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import CUT, Run
from hetplan.text import (
    Column,
    Table,
    bytes_text,
    digits,
    percent_text,
    seconds_text,
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The options of `what-if` that describe the workload where no plan file carries it."""

    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="N", help="Samples per iteration; not with a plan."),
    ] = None
    sequence: SequenceOption = None
    precision: Annotated[
        Precision | None,
        typer.Option("--precision", help="Precision of the training; default fp16."),
    ] = None

    def of_plan(self, setting: Setting, path: Path) -> tuple[Workload, Plan]:
        """(the workload of a plan file, the plan). Raises InputError for an option that the plan
        file makes superfluous."""
        for name, value in vars(self).items():
            option = f"--{name.replace('_', '-')}"
            require(value is None, "is not for a plan, which says it", where=option, got=value)
        plan = load_plan(path)
        return setting.workload(plan, path), plan

    def without_plan(self, setting: Setting) -> Workload:
        """The workload of the options alone; raises InputError where one is missing."""
        required = {
            "--model": setting.model,
            "--cluster": setting.cluster,
            "--global-batch": self.global_batch,
        }
        for option, value in required.items():
            require(value is not None, f"missing option '{option}'", expected="it, or a plan file")
        assert setting.model and setting.cluster and self.global_batch is not None
        workloads, _ = make_workloads(
            setting.model,
            open_cluster(setting.cluster),
            self.global_batch,
            sequence=self.sequence,
            precision=self.precision or "fp16",
            profile=setting.profile,
        )
        return workloads[0]  # one precision gives one workload


@described(
    sections={
        "Model, cluster and batch": "--model --cluster --profile --global-batch --sequence "
        "--precision --memory-margin",
        "Changes": "--add --remove --network-gbit-per-s",
        "Search": "--strategies --counted-seconds --time-limit --threads",
        "Output": "--json --quiet --help",
    },
    examples=(
        ("What more or fewer devices and faster links gain", "hetplan plan what-if plan.json"),
        (
            "Two more A100 in a node of their own, or a network of 100 Gbit/s",
            "hetplan plan what-if plan.json --add 2xA100-SXM4-80GB --network-gbit-per-s 100",
        ),
        (
            "A cluster without a plan",
            "hetplan plan what-if --model gpt2-medium --cluster cluster.yaml --global-batch 32",
        ),
    ),
)
def what_if(
    setting: Setting,
    question: Question,
    plan: Annotated[
        Path | None,
        typer.Argument(metavar="[PLAN]", help="A plan file; in its place --model, --cluster, …"),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            "--add",
            metavar="COUNTxDEVICE[@nodeN]",
            help="Add one node of these devices, as 2xA100-SXM4-80GB; or, with @node1, put them "
            "into that node.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="nodeN|COUNTxDEVICE", help="Remove a node, or COUNT devices."
        ),
    ] = None,
    network: Annotated[
        list[float] | None,
        typer.Option(
            "--network-gbit-per-s", metavar="GBIT", help="Give every node's network this bandwidth."
        ),
    ] = None,
    memory_margin: OwnMarginOption = None,
    strategies: StrategiesOption = None,
    counted_seconds: CountedOption = COUNTED_SECONDS,
    time_limit: LimitOption = CUTTING_LIMIT,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Plan again after each change and print what it gains; without changes, one node more or less
    of each kind, and each kind of link twice as fast. Says where a gain is within the search's own
    precision. The search begins with the plan that is given.

    Exit code 0 when a plan fits on the cluster as it is, 1 when none does.
    """
    run = Run(make_options(time_limit=time_limit, threads=threads), budget=counted_seconds)
    first_plans = []
    if plan is None:
        workload = question.without_plan(setting)
    else:
        workload, loaded = question.of_plan(setting, plan)
        first_plans = [loaded]
    workload = with_margin(workload, memory_margin)
    cluster = workload.cluster
    changes = [asking.addition(text, cluster) for text in named_entries(add, "--add")]
    changes += [asking.removal(text, cluster) for text in named_entries(remove, "--remove")]
    changes += [asking.faster_network(gbit, cluster) for gbit in network or []]
    if not changes:
        changes = list(asking.marginal(cluster))
    display = Display(f"what if, {workload.cluster.name}")
    answer = watched(
        run,
        lambda: asking.what_if(
            workload,
            changes,
            run,
            strategies=named_strategies(strategies),
            known=first_plans,
            on_candidate=display.add,
        ),
        display,
        quiet=quiet,
    )
    if plan is None:
        note(*workload.model.notes)
    emit(answer.document(), [what_if_table(answer)], json=json)
    return 0 if answer.base.best is not None else 1


def named_entries(values: Sequence[str] | None, option: str) -> list[str]:
    """The entries that an option lists; none where it is not given. Raises InputError for an option
    that is given without an entry."""
    entries = split_list(values or [])
    require(entries or not values, "names nothing", where=option, expected="an entry, or no option")
    return entries


def with_margin(workload: Workload, margin: float | None) -> Workload:
    """The workload with another memory margin; None keeps the workload's margin."""
    return workload if margin is None else replace(workload, memory_margin=margin)


def best_plan_text(changed: ChangeResult) -> str:
    """The name of the best plan after a change; `unchanged` where it is the plan before it."""
    if changed.best is None:
        return "none"
    return "unchanged" if changed.same_plan else changed.best.name


def saved_text(changed: ChangeResult, precision: float) -> str:
    """The seconds that a change saves, as `24.91 ms, 8.03 %`; `within 5.4 %` where they are within
    the precision of the search."""
    if changed.within_precision:
        return f"within {percent_text(precision)}"
    text = seconds_text(changed.gain)
    if changed.relative_gain:  # None without a plan; 0 needs no percentage
        text += f", {percent_text(changed.relative_gain)}"
    return text


def what_if_table(answer: WhatIf) -> Table:
    """The table of what-if, with one row for the cluster as it is and one for each change."""
    results = (answer.base, *answer.variants)
    workload = answer.base.workload
    columns: list[Column[ChangeResult]] = [
        Column("change", lambda result: result.change.name),
        Column("best plan", best_plan_text),
        Column("on devices", lambda result: devices_used(result.best) if result.best else ""),
        Column("iteration", iteration_seconds, seconds_text, right=True),
        Column("saves", lambda result: saved_text(result, answer.precision), right=True),
    ]
    if any(result.bound is not None for result in results):
        columns.append(Column("bound", lambda result: result.bound, seconds_text, right=True))
    columns.append(Column("$/1M tok", money, digits(4), right=True))
    notes = what_if_notes(answer, results)
    lines = (fill(text, SCREEN_WIDTH, subsequent_indent="  ") for text in notes)
    return Table.of(f"{workload.model.name} on {workload.cluster.name}", results, columns, lines)


def iteration_seconds(changed: ChangeResult) -> float | None:
    """The replayed seconds of the best plan after a change; None without a plan."""
    return None if changed.best is None else changed.best.predicted_seconds


def what_if_notes(answer: WhatIf, results: Sequence[ChangeResult]) -> Iterator[str]:
    """Notes on the columns, on the precision of the search, and on single changes.

    results: the rows of the table.
    """
    yield "iterations are replayed; money counts the devices that the plan uses"
    # `planner.what_if.addition`: an added node has the links of a node of the cluster with the same
    # device, or the best links of all its nodes where there is no such node
    yield "added nodes are linked as the cluster's of that device, else as its best"
    precision = percent_text(answer.precision)
    if answer.precision:
        yield (
            f"precision of the search: {precision}; the cluster as it is was planned twice, and "
            "its plan improved by no more than that"
        )
    for name in answer.cut:
        yield f"{name}: {CUT}"
    for changed in answer.variants:
        if changed.within_precision:
            what = "loss" if changed.change.added_devices < 0 else "gain"
            yield f"{changed.change.name}: no {what} within the search's precision of {precision}"
    for changed in answer.variants:
        for reason in changed.reasons:
            yield f"{changed.change.name}: {reason}"
    for changed in results:
        # A plan won here that this row's own search did not find: another row's, or the given one.
        message = "" if changed.best is None else changed.best.message
        if message.startswith((asking.FOUND_FOR, asking.GIVEN)):
            yield f"{changed.change.name}: {message}"
    for text in answer.left_out:
        yield f"the plan that was given is left out: {text}"


def money(changed: ChangeResult) -> float | None:
    """Dollars per million tokens of the best plan after a change; None without a plan, or where a
    price is unknown."""
    best = changed.best
    return None if best is None else best.money_per_million_tokens(changed.workload)


@described(
    sections={
        "Loss and choice": "--lost --within",
        "Search": "--strategies --counted-seconds --time-limit --threads --memory-margin",
        "In place of what the plan carries": "--cluster --model --profile",
        "Output": "--output --json --quiet --help",
    },
    examples=(
        (
            "A plan without node 1, which moves little",
            "hetplan plan replan plan.json --lost node1 -o smaller.json",
        ),
        (
            "The fastest plan without two nodes, whatever it moves",
            "hetplan plan replan plan.json --lost node1,node3 --within 0",
        ),
    ),
)
def replan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan that runs now.")],
    lost: Annotated[
        list[str], typer.Option("--lost", metavar="nodeN[,nodeM…]", help="The nodes that are lost.")
    ],
    setting: Setting,
    memory_margin: OwnMarginOption = None,
    strategies: StrategiesOption = None,
    within: Annotated[
        float,
        number(
            "--within",
            least=0,
            most=1e9,
            metavar="PERCENT",
            help="Take the plan that moves least of those at most this much slower than the best.",
        ),
    ] = 5.0,
    counted_seconds: CountedOption = COUNTED_SECONDS,
    time_limit: LimitOption = CUTTING_LIMIT,
    threads: ThreadsOption = None,
    json: JsonOption = False,
    output: Annotated[
        Path | None,
        target("--output", "-o", help="Write the new plan's file."),
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Plan again on what is left, and say which weights move where; the new plan leaves the lost
    nodes idle.

    Exit code 0 when a plan fits, 1 when none does.
    """
    run = Run(make_options(time_limit=time_limit, threads=threads), budget=counted_seconds)
    loaded = load_plan(plan)
    margin = memory_margin
    if margin is None and loaded.inputs is None:  # then the plan states no margin of its own
        margin = MEMORY_MARGIN
    workload = with_margin(setting.workload(loaded, plan), margin)
    nodes = again.parse_lost(split_list(lost), workload)
    display = Display(f"replanning {loaded.name}")
    answer = watched(
        run,
        lambda: again.replan(
            loaded,
            workload,
            nodes,
            run,
            strategies=None if strategies is None else named_strategies(strategies),
            within=within,
            on_candidate=display.add,
        ),
        display,
        quiet=quiet,
    )
    best = answer.best
    write_plan(best.candidate if best is not None else None, output)
    emit(answer.document(), replan_tables(answer), json=json)
    return 0 if best is not None else 1


def replan_tables(answer: Replanning) -> Iterator[Table]:
    """The tables of a replanning: the plans to choose from, and the bytes that the chosen plan
    moves."""
    nodes = ", ".join(f"node {number}" for number in answer.lost)
    before = f"before the loss {seconds_text(answer.before)} per iteration"
    best = answer.best
    if best is None:
        yield Table(f"without {nodes}: nothing fits", (), (), (before,))
        return
    yield Table.of(
        f"without {nodes}",
        answer.choices,
        [
            Column("", lambda choice: "*" if choice is best else ""),
            Column("plan", lambda choice: choice.candidate.name),
            Column(
                "iteration",
                lambda choice: choice.candidate.predicted_seconds,
                seconds_text,
                right=True,
            ),
            Column("to move", lambda choice: choice.moves.total, bytes_text, right=True),
            Column(
                "from a checkpoint",
                lambda choice: choice.moves.from_checkpoint,
                bytes_text,
                right=True,
            ),
            Column(
                "at least",
                lambda choice: choice.moves.least_seconds(answer.workload),
                seconds_text,
                right=True,
            ),
        ],
        (
            before,
            f"chosen: what moves least of all plans within {answer.within:g} % of the fastest, "
            "checkpoint included",
            "at least: to move over the links, without reading the checkpoint",
        ),
    )
    rows = []
    for (sender, receiver), size in best.moves.between_nodes(answer.workload).items():
        target = "itself" if sender == receiver else f"node {receiver}"
        rows.append((f"node {sender}", target, bytes_text(size)))
    notes = []
    lost_bytes = best.moves.from_checkpoint
    if lost_bytes:
        notes.append(f"{bytes_text(lost_bytes)} were on lost nodes only and come from a checkpoint")
    yield Table(
        f"weights and optimizer states that {best.candidate.name} moves",
        ("from", "to", "bytes"),
        tuple(rows),
        tuple(notes),
    )


@described(
    examples=(
        (
            "A template for every part of the cluster of an instance",
            "hetplan plan templates ditto-ex1-nb32-head",
        ),
        (
            "Pipelines of them that survive the loss of one node",
            "hetplan plan templates ditto-ex1-nb32-head --failures 1 --micro-batches 32",
        ),
    ),
)
def templates(
    instance: InstanceArgument,
    fewest: Annotated[
        int, typer.Option("--fewest-nodes", metavar="N", help="Leave out templates of fewer nodes.")
    ] = 1,
    failures: Annotated[
        int,
        typer.Option(
            "--failures", metavar="F", help="Pipelines that may fail; at least F + 1 run."
        ),
    ] = 0,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            metavar="N",
            help="Micro-batches of all pipelines together; default the instance's.",
        ),
    ] = None,
    time_limit: TimeOption = None,
    gap: GapOption = None,
    json: JsonOption = False,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> int:
    """List a proven pipeline template for every part of a cluster (an instance of problem ditto),
    and the pipelines to run from them.

    Exit code 0 when the list is complete and an instantiation is found, 1 otherwise.
    """
    run = Run(make_options(time_limit=time_limit, gap=gap))
    opened = open_instance(instance)
    require(
        opened.problem == "ditto",
        "has no templates",
        where=instance,
        got=f"problem {opened.problem}",
        expected="ditto",
    )
    ready = watched(
        run,
        lambda: readiness(
            opened.data, run, fewest=fewest, micro_batches=micro_batches, failures=failures
        ),
        Display(f"{opened.name}: templates"),
        quiet=quiet,
    )
    emit(
        {"instance": opened.name, "problem": "ditto", **rows_of(ready)},
        tables_of(ready),
        json=json,
        output=output,
    )
    return 0 if ready.listed.complete and ready.exact.pipelines else 1
