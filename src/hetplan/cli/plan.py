"""`hetplan plan`: one workload, all strategies; the ranking, what is proven, the winner's plan."""

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    BatchOption,
    ClusterOption,
    FrameworkOption,
    GapOption,
    JsonOption,
    LimitOption,
    LinksOption,
    MarginOption,
    NamedModelOption,
    ProfileOption,
    QuietOption,
    SeedOption,
    SequenceOption,
    StackOption,
    StrategiesOption,
    ThreadsOption,
    TracedOption,
    make_options,
    offered,
    open_cluster,
    parse_dotted,
    split_list,
    target,
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.cli.setting import with_links
from hetplan.clock import CLOCK
from hetplan.errors import require
from hetplan.interpreter import own_command
from hetplan.plans.plan import save_plan
from hetplan.solvers.run import OPTIMAL_GAP, Run, relative_gap
from hetplan.text import (
    Column,
    Table,
    bytes_text,
    count_text,
    counted,
    devices_counted,
    digits,
    more_text,
    number_text,
    percent_text,
    seconds_text,
    share_text,
)

if TYPE_CHECKING:
    from hetplan.planner.candidate import Candidate
    from hetplan.planner.explain import Explanation
    from hetplan.planner.planning import Planning
    from hetplan.planner.strategy import Settings, Strategy
    from hetplan.profiling.workload import Workload


SCREEN_WIDTH, VALUE_WIDTH = 100, 84  # columns of the answer, and of a line beside its key


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What layers and links cost, and what training holds in memory."""

    framework: FrameworkOption = "hetplan"
    stack: StackOption = "fused"
    memory_margin: MarginOption = 0.05
    profile: ProfileOption = None
    links: LinksOption = None
    measure: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option("--measure", help="Measure every device type here first; Poplar plans by it."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The strategies that are tried, and which of their plans wins."""

    strategies: StrategiesOption = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="STRATEGY.NAME=VALUE",
            help="A strategy's own setting, as poplar.shards=memory; a wrong name lists them.",
        ),
    ] = None
    parts: Annotated[
        bool, typer.Option("--parts", help="Plan on every part of the cluster by device type, too.")
    ] = False
    money_limit: Annotated[
        float | None,
        typer.Option(
            "--money-limit",
            metavar="USD",
            help="Cost at most this per million tokens; implies --parts.",
        ),
    ] = None
    cheapest_within: Annotated[
        float | None,
        typer.Option(
            "--cheapest-within",
            metavar="PERCENT",
            help="The cheapest plan at most this much slower than the fastest; implies --parts.",
        ),
    ] = None


@described(
    sections={
        "Model, cluster and batch": "--model --factory --cluster --global-batch --sequence "
        "--precision",
        "Costs": "--framework --stack --memory-margin --profile --links --measure",
        "Choice of plans": "--strategies --set --parts --money-limit --cheapest-within",
        "Limits of the search": "--time-limit --gap --threads --seed",
        "Output": "--output --json --all --quiet --run --help",
    },
    examples=(
        (
            "GPT-2 medium on 16 GPUs of two types: the fastest plan as a file",
            "hetplan plan --model gpt2-medium --cluster amp-mixed --global-batch 32 -o plan.json",
        ),
        (
            "Your own cluster file and a Hugging Face config.json, in ten minutes at most",
            "hetplan plan --model config.json --cluster cluster.yaml -t 600 --global-batch 256",
        ),
        (
            "At most 2 dollars for a million tokens, on any part of the cluster",
            "hetplan plan --model llama2-7b --cluster department --global-batch 64 --money-limit 2",
        ),
    ),
)
def plan(
    cluster: ClusterOption,
    global_batch: BatchOption,
    costs: Costs,
    choice: Choice,
    model: NamedModelOption = None,
    factory: TracedOption = None,
    sequence: SequenceOption = None,
    precision: Annotated[
        str,
        offered(
            "precisions",
            "--precision",
            metavar="fp16|bf16|fp32",
            help="One; several (fp16,fp32); or auto: all that every device has, planned together.",
            many=True,
        ),
    ] = "fp16",
    time_limit: LimitOption = 60.0,
    gap: GapOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    steps: Annotated[
        int | None,
        typer.Option("--run", metavar="N", help="Run the plan here for N iterations.", min=1),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Print all plans, their notes, and why the best one is best."),
    ] = False,
    json: JsonOption = False,
    output: Annotated[
        Path | None,
        target("--output", "-o", help="Write the winner's plan file."),
    ] = None,
    quiet: QuietOption = False,
) -> int:
    """Plan the training of a model on a cluster: the fastest plan that fits, replayed, with its
    bound. Exit code 0 when a plan fits, 1 when none does (or none was found in time)."""
    begun = CLOCK.seconds()  # loading the planner counts, too
    # the planner's compiled kernels are not needed for completion
    from hetplan.cli.profile import named, traced_model
    from hetplan.planner.criteria import Criteria
    from hetplan.planner.ranking import make_plans
    from hetplan.planner.workloads import make_workloads, only

    writes_files = costs.measure is not None or steps is not None
    require(output or not writes_files, "--measure and --run need --output FILE")
    run = Run(
        make_options(time_limit=time_limit, gap=gap, threads=threads, seed=seed), started=begun
    )
    if factory is not None:
        trained: Any = traced_model(factory, model, only(precision), None, quiet=quiet)
    else:
        trained = named(model)
    posed, notes = make_workloads(
        trained,
        open_cluster(cluster),
        global_batch,
        sequence=sequence,
        precision=precision,
        profile=costs.profile,
        framework=costs.framework,
        stack=costs.stack,
        memory_margin=costs.memory_margin,
    )
    workloads = [with_links(one, costs.links) for one in posed]
    workload = workloads[0]
    curves = []
    if costs.measure is not None and output is not None:
        curves = measured_curves(workload, costs.measure, output, quiet=quiet)
    strategies = chosen_strategies(choice, curves)
    criteria = Criteria(choice.money_limit, choice.cheapest_within, choice.parts)
    display = Display(f"{workload.model.name} on {workload.cluster.name}")
    planning = watched(
        run,
        lambda: make_plans(
            workloads, strategies, run, criteria=criteria, on_candidate=display.add, notes=notes
        ),
        display,
        quiet=quiet,
    )
    best = planning.best
    write_plan(best, output)
    note(*workload.model.notes)
    emit(planning.document(), planning_tables(planning, everything), json=json)
    if best is None:
        return 1
    if steps is None:
        return 0
    words = [str(output), "--steps", str(steps), "--device", costs.measure or "auto"]
    if factory is not None:
        words += ["--factory", factory]
    return run_here(words, json=json)


def run_here(words: Sequence[str], *, json: bool) -> int:
    """`hetplan run` in a process of its own: solvers and measurements leave threads, and ranks are
    forked. json: standard output is another document's, so that it prints to standard error."""
    done = subprocess.run(own_command("run", *words), stdout=2 if json else None, check=False)
    return done.returncode


def chosen_strategies(choice: Choice, curves: Sequence[Path]) -> "list[Strategy]":
    """The strategies with their settings. curves: files of measured batch curves; where there are
    some, Poplar plans by them, and alone unless others are named."""
    settings = parse_dotted(choice.settings or [], "--set", "STRATEGY.NAME=VALUE")
    names = choice.strategies
    if curves:
        settings.setdefault("poplar", {})["curves"] = ",".join(str(path) for path in curves)
        names = names or ["poplar"]
    return named_strategies(names, settings)


def measured_curves(workload: "Workload", device: str, plan: Path, *, quiet: bool) -> list[Path]:
    """Files beside the plan's, one per device type: its batch curve, measured on this machine's
    GPU of the type's first number, or on the CPU within the memory of the type."""
    from hetplan.runtime.measuring.batches import measure_batch_curve

    types = [one.type for one in workload.cluster.devices]
    paths = []
    for name, held in workload.device_bytes().items():
        curve = measure_batch_curve(
            workload.model,
            device if device == "cpu" else f"cuda:{types.index(name)}",
            memory=held if device == "cpu" else None,
            name=name,
            devices=len(types),
            largest=min(workload.global_batch, 256),
            tell=None if quiet else note,
        )
        in_a_file_name = name.replace("/", "-")
        paths.append(plan.with_name(f"{plan.stem}-{in_a_file_name}.json"))
        curve.save(paths[-1])
    return paths


def named_strategies(
    names: Sequence[str] | None, settings: "Settings | None" = None
) -> "list[Strategy]":
    """The strategies of `--strategies`, all without it; raises InputError."""
    from hetplan.planner.strategy import make_strategies

    return make_strategies(None if names is None else split_list(names), settings)


def write_plan(winner: "Candidate | None", path: Path | None) -> None:
    """The winner's plan file, where one is asked for."""
    if path is None:
        return
    if winner is None or winner.plan is None:
        note(f"no winner: {path} is not written")
    else:
        save_plan(winner.plan, path)


def planning_tables(planning: "Planning", everything: bool) -> Iterator[Table]:
    """The best plan, its stages, and the best plan of each paradigm; with `everything` all plans
    instead, and why the best one takes that long."""
    workload, best, explained = planning.workload, planning.best, planning.explanation
    if everything or best is None:
        yield ranking_table(planning)
    if best is None or explained is None:
        yield no_winner(planning)
        return
    # loaded with the simulator's kernels, which completion of this command does not need
    from hetplan.replays.stages import stage_table

    yield verdict_table(planning, best, explained)
    if best.plan is not None and best.replay is not None:
        yield stage_table(best.plan, best.replay, "")
    if everything:
        yield explained.table(workload)
        yield from pareto_tables(planning)
    else:
        yield paradigms_table(planning, explained)


def verdict_table(planning: "Planning", best: "Candidate", explained: "Explanation") -> Table:
    """The best plan in words: what it is, how long an iteration takes, what is proven, what it
    costs and holds."""
    from hetplan.plans.words import summary

    workload, plan = planning.workload, best.plan
    seconds = best.predicted_seconds or 1.0
    longest = [
        f"{what} {percent_text(spent / seconds)}"
        for what, spent in islice(explained.critical.items(), 3)
    ]
    lines = {
        "best plan": best.name + (f": {summary(plan)}" if plan else ""),
        "iteration": iteration_text(best, workload),
        "proven": proven_text(best, planning),
        "speed": speed_text(best, workload),
        "devices": f"{devices_used(best)} in {workload.precision}{idle_text(best, planning)}",
        "free memory": free_text(best, workload),
        "time goes to": ", ".join(longest),
        "chosen": explained.why_chosen,
        "`hetplan run`": (best.plan and best.plan.refused) or "",
        "note": "; ".join(planning.notes),
    }
    rows = tuple((key, fill(text, VALUE_WIDTH)) for key, text in lines.items() if text)
    return Table(fill(workload_title(workload, planning.precisions), SCREEN_WIDTH), ("", ""), rows)


def speed_text(best: "Candidate", workload: "Workload") -> str:
    """Tokens or samples per second, the share of the devices' peak, FLOP/s and money, where they
    are known."""
    unit = "tokens" if workload.sequence else "samples"
    parts = [
        f"{count_text(best.tokens_per_second(workload))} {unit}/s",
        f"MFU {percent_text(best.utilisation(workload))}",
    ]
    flops, money = best.flops_per_device(workload), best.money_per_million_tokens(workload)
    if flops is not None:
        parts.append(f"{flops / 1e12:.3g} TFLOP/s per device")
    if money is not None:
        parts.append(f"${number_text(money, 4)} per million {unit}")
    return ", ".join(parts)


def paradigms_table(planning: "Planning", explained: "Explanation") -> Table:
    """The best plan of each strategy, fastest first; a note for each strategy without a plan."""
    workload = planning.workload
    fastest: dict[str, Candidate] = {}
    reasons: dict[str, str] = {}
    # of a strategy's candidates the best one comes last, and replaces the others
    for candidate in reversed(planning.candidates):
        name = candidate.strategy
        if name in explained.prices:
            if candidate.fits_memory:
                fastest[name] = candidate
        elif not candidate.failed:
            reasons[name] = candidate.message or candidate.status
    shown = sorted(fastest.values(), key=lambda candidate: candidate.predicted_seconds or 0.0)
    lines = [f"no plan of {name}: {reason}" for name, reason in reasons.items()]
    notes = [fill(line, SCREEN_WIDTH) for line in lines]
    notes += fault_lines(planning)
    hidden = len(planning.candidates) - len(shown)
    others = f"{counted(hidden, 'other plan')}, " if hidden else ""
    notes.append(f"{others}notes, and why: --all")
    return Table.of(
        "the best plan of each paradigm",
        shown,
        [
            Column("plan", lambda c: c.name),
            Column("iteration", lambda c: c.predicted_seconds, seconds_text, right=True),
            Column("vs best", lambda c: relative_text(c, planning.best), right=True),
            Column("tokens/s", lambda c: c.tokens_per_second(workload), count_text, right=True),
            Column("MFU", lambda c: c.utilisation(workload), percent_text, right=True),
            Column(
                "$/1M tok",
                lambda c: c.money_per_million_tokens(workload),
                digits(4),
                right=True,
            ),
            Column("objective", lambda c: c.closed_form_seconds, seconds_text, right=True),
            Column("solved", lambda c: c.status if c.closed_form_seconds is not None else ""),
        ],
        notes,
    )


def fault_lines(planning: "Planning") -> list[str]:
    """A line for each candidate that a fault of hetplan cost."""
    failed = [candidate for candidate in planning.candidates if candidate.failed]
    return [fill(f"{c.name} {c.message}", SCREEN_WIDTH) for c in failed]


def ranking_table(planning: "Planning") -> Table:
    """One line per candidate; reasons and notes under it."""
    workload = planning.workload
    columns: list[Column[Candidate]] = [
        Column("plan", lambda c: c.name),
        Column("status", lambda c: c.status),
        Column("iteration", lambda c: c.predicted_seconds, seconds_text, right=True),
        Column("vs best", lambda c: relative_text(c, planning.best), right=True),
        Column("plan's objective", lambda c: c.closed_form_seconds, seconds_text, right=True),
        Column("objective", lambda c: c.objective, seconds_text, right=True),
        Column("bound", lambda c: c.bound, seconds_text, right=True),
        Column("gap", lambda c: c.gap, percent_text, right=True),
        Column("fullest device", lambda c: memory_text(c, workload), right=True),
        Column("tokens/s", lambda c: c.tokens_per_second(workload), count_text, right=True),
        Column("MFU", lambda c: c.utilisation(workload), percent_text, right=True),
        Column("$/1M tok", lambda c: c.money_per_million_tokens(workload), digits(4), right=True),
        Column("solve", lambda c: c.solve_seconds, seconds_text, right=True),
    ]
    notes = (
        *figures_notes(planning),
        *(f"{c.name}: {c.message}" for c in planning.candidates if c.message),
        *planning.notes,
    )
    return Table.of(
        fill(workload_title(workload, planning.precisions), SCREEN_WIDTH),
        planning.candidates,
        columns,
        (fill(text, SCREEN_WIDTH, subsequent_indent="  ") for text in notes),
    )


def no_winner(planning: "Planning") -> Table:
    """Why there is none: methods ended without an answer, nothing fits in memory, or all that fits
    costs too much."""
    prices = []
    for candidate in planning.candidates:
        if not candidate.fits_memory or candidate.plan is None:
            continue
        price = candidate.money_per_million_tokens(planning.workload)
        if price is not None:
            prices.append((price, candidate.name))
    if not prices:
        undecided = [
            f"{c.name} has no answer: {c.message}"
            for c in planning.candidates
            if c.status == "unknown"
        ]
        if len(undecided) == len(planning.candidates):
            return Table("no winner: no method had time for an answer", (), (), tuple(undecided))
        advice = [f"would fit: {line}" for line in planning.advice]
        if not advice:
            advice = ["no number of devices would do"]
        notes = (needs(planning.workload), *advice, *undecided)
        return Table("no winner: nothing found fits in memory", (), (), notes)
    least, name = min(prices)
    return Table(
        "no winner: nothing that fits costs at most "
        f"{number_text(planning.criteria.money_limit, 4)} per million tokens",
        (),
        (),
        (f"cheapest that fits: {name}, {number_text(least, 4)} per million tokens",),
    )


def pareto_tables(planning: "Planning") -> Iterator[Table]:
    """The candidates that nothing beats in both time and money, where there are several."""
    from hetplan.planner.criteria import pareto

    workload = planning.workload
    front = [planning.candidates[i] for i in pareto(planning.candidates, workload)]
    if len(front) >= 2:
        yield Table.of(
            "time and money: of the plans found, nothing is both faster and cheaper than these",
            front,
            [
                Column("plan", lambda c: c.name),
                Column("iteration", lambda c: c.predicted_seconds, seconds_text, right=True),
                Column(
                    "$/1M tok",
                    lambda c: c.money_per_million_tokens(workload),
                    digits(4),
                    right=True,
                ),
                Column("devices", devices_used),
            ],
        )


def devices_used(candidate: "Candidate") -> str:
    """`12 V100-SXM2-16GB + 4 T4`."""
    plan = candidate.plan
    return devices_counted(
        Counter(plan.devices[device].type for device in plan.ranks) if plan else Counter[str]()
    )


def figures_notes(planning: "Planning") -> tuple[str, ...]:
    """Notes on the columns, and on how far replayed seconds are from the objectives of plans."""
    ratios = [c.optimism for c in planning.candidates if c.optimism is not None]
    if not ratios:
        return ()
    times = " to ".join(dict.fromkeys(f"{end:.3g}" for end in (min(ratios), max(ratios))))
    return (
        f"iteration: replayed event by event, {times} times the plan's objective; "
        "status, objective, bound and gap are of each strategy's own problem",
    )


def workload_title(workload: "Workload", precisions: Sequence[str] = ()) -> str:
    """`gpt2-medium (406 M parameters) on amp-mixed (12 V100 + 4 T4), batch 32 x 1024 tokens, fp16
    …`.

    precisions: all that were planned, where the workload's is but one of them.
    """
    planned = " or ".join(precisions or (workload.precision,))
    devices = devices_counted(workload.cluster.counts())
    tokens = "" if workload.sequence is None else f" x {workload.sequence} tokens"
    return (
        f"{workload.model.name} ({count_text(workload.model.params)} parameters) on "
        f"{workload.cluster.name} "
        f"({devices}), batch {workload.global_batch}{tokens}, {planned}, "
        f"{workload.profile.provenance.kind} profile"
    )


def relative_text(candidate: "Candidate", best: "Candidate | None") -> str:
    """How much longer an iteration takes than the winner's: `+65.2 %`; nothing for what does not
    fit."""
    from hetplan.planner.explain import longer

    more = None if best is None or candidate is best else longer(candidate, best)
    return "" if more is None else more_text(more)


def memory_text(candidate: "Candidate", workload: "Workload") -> str:
    """What the device with the largest share of its memory in use holds, of what it can use."""
    if candidate.peak_bytes is None:
        return "-"
    usable = workload.device_bytes()
    shares = [
        (peak, usable[device.type])
        for peak, device in zip(candidate.peak_bytes, workload.cluster.devices, strict=True)
    ]
    text = share_text(*max(shares, key=lambda share: share[0] / max(share[1], 1.0)))
    return text if candidate.fits_memory else f"{text} !"


def needs(workload: "Workload") -> str:
    """What the model's states alone take, beside what there is."""
    usable = workload.device_bytes()
    total = sum(usable[name] * count for name, count in workload.cluster.counts().items())
    return (
        "weights, gradients and optimizer states: "
        f"{bytes_text(workload.state_bytes)} in one copy of the model; "
        f"all devices together can use {bytes_text(total)}"
    )


def iteration_text(best: "Candidate", workload: "Workload") -> str:
    """What an iteration takes, and between which seconds it lies."""
    text = f"{seconds_text(best.predicted_seconds)}, {'replayed' if best.replay else 'measured'}"
    ends = best.interval_seconds(workload)
    if ends is None:
        return text
    low, high = map(seconds_text, ends)
    return f"{text}; {low} to {high} by the error of predicted operators"


def proven_text(best: "Candidate", planning: "Planning") -> str:
    """The proof for all plans, and for the objective of the best one's problem, in words."""
    seconds, bound = best.predicted_seconds, planning.bound
    gap, plans = relative_gap(seconds, bound), "plan of stages"
    if planning.computing_alone:
        plans += ", with context and expert ranks or without,"
    if gap is None:
        proven = "how much faster another plan could be is not known"
    elif gap <= OPTIMAL_GAP:
        proven = f"no {plans} is faster when replayed: it is optimal"
    else:
        faster = f"no {plans} is faster than {seconds_text(bound)}"
        proven = f"{faster} when replayed (gap {percent_text(gap)})"
    if best.closed_form_seconds is not None and best.status == "optimal":
        proven += f"; optimal for {best.strategy}'s objective"
    return proven


def idle_text(best: "Candidate", planning: "Planning") -> str:
    """How many devices the best plan leaves idle, and what the best plan on all of them takes."""
    devices = len(planning.workload.cluster.devices)
    idle = devices - len(best.plan.ranks if best.plan else ())
    if idle == 0:
        return ""
    text = f"; {counted(idle, 'device')} idle"
    fitting = [c for c in planning.candidates if c.fits_memory]
    for candidate in fitting:
        if candidate.plan is not None and len(candidate.plan.ranks) == devices:
            seconds = seconds_text(candidate.predicted_seconds)
            return f"{text}; the best plan on all {devices}, {candidate.name}, takes {seconds}"
    return text


def free_text(candidate: "Candidate", workload: "Workload") -> str:
    """By device type in use, what the fullest device leaves free of what training can use."""
    if candidate.peak_bytes is None:
        return ""
    used = range(len(candidate.peak_bytes)) if candidate.plan is None else candidate.plan.ranks
    peaks: dict[str, float] = {}  # of the fullest device of each type
    for device in used:
        kind, peak = workload.cluster.devices[device].type, candidate.peak_bytes[device]
        peaks[kind] = max(peak, peaks.get(kind, 0.0))
    parts = [
        f"{bytes_text(limit - peaks[kind])} of {bytes_text(limit)} on {kind}"
        for kind, limit in workload.device_bytes().items()
        if kind in peaks
    ]
    if workload.memory_margin:
        margin = percent_text(workload.memory_margin)
        parts.append(f"{margin} of each device stays free for its allocator")
    return "; ".join(parts)
