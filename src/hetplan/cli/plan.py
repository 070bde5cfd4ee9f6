"""`hetplan plan` plans one workload by all strategies, ranks their plans, prints the best plan with
its proof, and writes it to a file."""

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import (
    BatchOption,
    ClusterOption,
    GapOption,
    JsonOption,
    LengthsOption,
    LimitOption,
    LinksOption,
    MarginOption,
    NamedModelOption,
    ProbeOption,
    ProfileOption,
    QuietOption,
    SeedOption,
    SequenceOption,
    StackOption,
    StrategiesOption,
    ThreadsOption,
    TracedOption,
    Trainer,
    make_options,
    offered,
    open_cluster,
    parse_dotted,
    split_list,
    target,
    whole_numbers,
)
from hetplan.cli.output import Display, emit, note, watched
from hetplan.cli.setting import with_links
from hetplan.clock import CLOCK
from hetplan.errors import require
from hetplan.interpreter import own_command
from hetplan.plans.plan import PASS_SCHEDULES, PassSchedule, save_plan
from hetplan.solvers.run import Run
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
    from hetplan.planner.lengths.drawn import LengthsAnswer
    from hetplan.planner.planning import Planning
    from hetplan.planner.strategy import Settings, Strategy
    from hetplan.profiling.frameworks import Framework
    from hetplan.profiling.workload import Workload


# A relative change from which on `more_text` writes a factor in place of percent.
MANY_TIMES = 10.0
SCREEN_WIDTH = 100  # characters of a line
# Characters of a line beside its key in the table of the best plan: what SCREEN_WIDTH leaves beside
# the longest key, `hetplan run` in backquotes.
VALUE_WIDTH = 84
# Schedules by the names that people say.
SHORT_SCHEDULES = {"interleaved": "interleaved-1f1b"}
LARGEST_MEASURED = 256  # samples: as far as `hetplan profile batch-curve` tries by default


@dataclass(frozen=True, kw_only=True)
class Costs(Trainer):
    """The options that determine the seconds of layers and links, and the memory of the
    training."""

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
    """The options that say which strategies are tried, and which of their plans wins."""

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
    zero: Annotated[
        str | None,
        typer.Option(
            "--zero",
            metavar="N[,N…]",
            help="ZeRO levels that the best plan may have, or `framework` for those that the "
            "framework has; default all.",
        ),
    ] = None
    schedules: Annotated[
        str | None,
        typer.Option(
            "--schedules",
            metavar="NAME[,NAME…]",
            help="Schedules of passes that the best plan may have, as 1f1b,zb-h1,explicit; default "
            "all; a wrong name lists them.",
        ),
    ] = None
    seconds_limit: Annotated[
        float | None,
        typer.Option(
            "--seconds-limit",
            metavar="SECONDS",
            help="The cheapest plan whose iteration takes at most this; implies --parts.",
        ),
    ] = None


@described(
    sections={
        "Model, cluster and batch": "--model --factory --probe --cluster --global-batch "
        "--sequence --lengths --precision",
        "Costs": "--stack --profile --links --measure",
        "Memory": "--framework --memory-margin --optimizer --gradient-bytes --moment-bytes --loss "
        "--reshard",
        "Adapters": "--adapters --base",
        "Choice of plans": "--strategies --set --parts --money-limit --cheapest-within "
        "--seconds-limit --zero --schedules",
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
    probe: ProbeOption = None,
    sequence: SequenceOption = None,
    lengths: LengthsOption = None,
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
    time_limit: LimitOption = 600.0,
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
    begun = CLOCK.seconds()  # the import of the planner counts as well
    # Imported here, since shell completion does not need the planner's compiled kernels.
    from hetplan.cli.lengths import lengths_table, stages_only, usable_lengths
    from hetplan.cli.profile import named, traced_model
    from hetplan.planner.criteria import Criteria
    from hetplan.planner.lengths.drawn import plan_lengths, planned_lengths
    from hetplan.planner.ranking import make_plans
    from hetplan.planner.workloads import make_workloads, the_one_precision
    from hetplan.profiling.models.operators import load_stack
    from hetplan.profiling.rates.collectives import borrowed_curves

    writes_files = costs.measure is not None or steps is not None
    require(output or not writes_files, "--measure and --run need --output FILE")
    run = Run(
        make_options(time_limit=time_limit, gap=gap, threads=threads, seed=seed), started=begun
    )
    if factory is not None:
        require(
            costs.adapters is None,
            "a traced module brings its own adapters",
            where="--adapters",
            expected="--model",
        )
        # The traced operators have the sizes of one precision.
        trained: Any = traced_model(
            factory, model, the_one_precision(precision), output=None, quiet=quiet, probe=probe
        )
    else:
        trained = costs.trained(named(model))
    on_cluster = open_cluster(cluster)

    def workloads_at(tokens: int | None) -> "tuple[list[Workload], list[str]]":
        """The workloads at a sequence length, one for each precision, and notes."""
        by_precision, notes = make_workloads(
            trained,
            on_cluster,
            global_batch,
            sequence=tokens,
            precision=precision,
            profile=costs.profile,
            framework=costs.trainer(),
            stack=costs.reducing(load_stack(costs.stack, where="--stack")),
            memory_margin=costs.memory_margin,
        )
        return [with_links(workload, costs.links) for workload in by_precision], notes

    if lengths is None:
        workloads, notes = workloads_at(sequence)
        curves = []
        if costs.measure is not None and output is not None:
            # curves are measured in the first precision alone
            curves = measured_curves(workloads[0], costs.measure, output, quiet=quiet)
        strategies = chosen_strategies(choice, curves)
        of_lengths = None
    else:
        refused = {
            "--factory": factory,
            "--profile": costs.profile,
            "--measure": costs.measure,
            "--run": steps,
        }
        of_lengths = usable_lengths(lengths, named(model), sequence, refused)
        workloads, notes = workloads_at(planned_lengths(of_lengths)[0][1])
        strategies = chosen_strategies(
            replace(choice, strategies=stages_only(choice.strategies)), []
        )
    workload = workloads[0]
    criteria = Criteria(
        choice.money_limit,
        choice.cheapest_within,
        choice.parts,
        choice.seconds_limit,
        zero_levels=asked_levels(choice.zero, workload.framework),
        schedules=named_schedules(choice.schedules),
    )
    display = Display(f"{workload.model.name} on {workload.cluster.name}")

    def plans_of(workloads: "list[Workload]", notes: list[str], run: Run) -> "Planning":
        """The planning of workloads."""
        return make_plans(
            workloads, strategies, run, criteria=criteria, on_candidate=display.add, notes=notes
        )

    def answered() -> "tuple[Planning, LengthsAnswer | None]":
        """The planning, and its answer for samples of unequal lengths where there are any."""
        if of_lengths is None:
            return plans_of(workloads, notes, run), None
        answer = plan_lengths(
            of_lengths,
            lambda tokens: workloads_at(tokens)[0],
            lambda tokens, part: plans_of(*workloads_at(tokens), part),
            run,
            seed or 0,
        )
        return answer.planning, answer

    planning, answer = watched(run, answered, display, quiet=quiet)
    best = planning.best
    write_plan(best, output)
    note(*workload.model.notes)
    if workload.links is None:  # measured links leave the curves of fabrics out
        note(*borrowed_curves(workload.cluster.nodes))
    document, tables = planning.document(), [*planning_tables(planning, everything)]
    if answer is not None:
        document["lengths"] = answer.document()
        tables.append(lengths_table(answer))
    emit(document, tables, json=json)
    if best is None:
        return 1
    if steps is None:
        return 0
    words = [str(output), "--steps", str(steps), "--device", costs.measure or "auto"]
    if factory is not None:
        words += ["--factory", factory]
    if probe is not None:
        words += ["--probe" if probe else "--no-probe"]
    return run_here(words, json=json)


def asked_levels(text: str | None, framework: "Framework") -> tuple[int, ...]:
    """The ZeRO levels that `--zero` asks for; empty: all."""
    if text is None:
        return ()
    if text.strip() == "framework":
        return framework.all_levels
    return whole_numbers([text], "--zero", 0, 3)


def named_schedules(text: str | None) -> tuple[PassSchedule, ...]:
    """The schedules that `--schedules` names; none where it is not given. Raises InputError."""
    if text is None:
        return ()
    names = split_list([text])
    expected = f"some of {', '.join(PASS_SCHEDULES)}"
    require(names, "no schedule named", where="--schedules", expected=expected)
    named = []
    for name in names:
        full = SHORT_SCHEDULES.get(name, name)
        known = [schedule for schedule in PASS_SCHEDULES if schedule == full]
        require(known, "unknown schedule", where="--schedules", got=name, expected=expected)
        named += known
    return tuple(dict.fromkeys(named))


def run_here(words: Sequence[str], *, json: bool) -> int:
    """Execute `hetplan run` and return its exit code.

    It runs in a new process: solvers and measurements leave threads behind, and a process with
    threads cannot fork ranks. json: whether this process prints a JSON document on standard output;
    the new process then prints on standard error.
    """
    stdout = 2 if json else None  # 2: the descriptor of standard error
    return subprocess.run(own_command("run", *words), stdout=stdout, check=False).returncode


def chosen_strategies(choice: Choice, curves: Sequence[Path]) -> "list[Strategy]":
    """The strategies to try, with the settings of `--set`.

    curves: files of measured batch curves. Where there are some, Poplar plans by them, and it is
    the only strategy unless the user names others.
    """
    settings = parse_dotted(choice.settings or [], "--set", "STRATEGY.NAME=VALUE")
    names = choice.strategies
    if curves:
        settings.setdefault("poplar", {})["curves"] = ",".join(str(path) for path in curves)
        names = names or ["poplar"]
    return named_strategies(names, settings)


def measured_curves(workload: "Workload", device: str, plan: Path, *, quiet: bool) -> list[Path]:
    """Measure a batch curve for each device type; returns the files of the curves.

    device: "cuda" measures on the GPU of this machine whose number is that of the type's first
    device in the cluster; "cpu" measures on the CPU, within the type's memory. plan: the plan's
    file, which the curves' files stand beside.
    """
    from hetplan.runtime.measuring.batches import measure_batch_curve

    types = [member.type for member in workload.cluster.devices]
    on_cpu = device == "cpu"
    paths = []
    for name, usable_bytes in workload.device_bytes().items():
        curve = measure_batch_curve(
            workload.model,
            device if on_cpu else f"cuda:{types.index(name)}",
            memory=usable_bytes if on_cpu else None,
            name=name,
            devices=len(types),  # that share ZeRO's shards
            largest=min(workload.global_batch, LARGEST_MEASURED),
            tell=None if quiet else note,
        )
        name_in_path = name.replace("/", "-")
        path = plan.with_name(f"{plan.stem}-{name_in_path}.json")
        curve.save(path)
        paths.append(path)
    return paths


def named_strategies(
    names: Sequence[str] | None, settings: "Settings | None" = None
) -> "list[Strategy]":
    """The strategies that `--strategies` names; all strategies where it is None. Raises
    InputError."""
    from hetplan.planner import STRATEGIES
    from hetplan.planner.strategy import make_strategies

    listed = None if names is None else split_list(names)
    expected = f"some of {', '.join(STRATEGIES)}"
    require(listed != [], "no strategy named", where="--strategies", expected=expected)
    return make_strategies(listed, settings)


def write_plan(winner: "Candidate | None", path: Path | None) -> None:
    """Write the winner's plan to a file. Without a path, write nothing; without a winner, print a
    note."""
    if path is None:
        return
    if winner is None or winner.plan is None:
        note(f"no winner: {path} is not written")
    else:
        save_plan(winner.plan, path)


def planning_tables(planning: "Planning", everything: bool) -> Iterator[Table]:
    """The tables of a planning: the best plan, its stages, and the best plan of each strategy.

    everything: all plans in place of each strategy's best one, and the explanation of the best
    plan's seconds.
    """
    workload, best, explained = planning.workload, planning.best, planning.explanation
    if everything or best is None:
        yield ranking_table(planning)
    if best is None or explained is None:
        yield no_winner(planning)
        return
    # Imported here, since shell completion does not need the simulator's compiled kernels.
    from hetplan.planner.proofs import ladder_table
    from hetplan.replays.stages import stage_table

    yield verdict_table(planning, best, explained)
    if best.plan is not None and best.replay is not None:
        yield stage_table(best.plan, best.replay, "")
    if everything:
        if planning.ladder:
            criteria = planning.criteria
            levels = criteria.levels_text if criteria.zero_levels else ""
            yield ladder_table(planning.ladder, levels)
        yield explained.table(workload)
        yield from pareto_tables(planning)
    else:
        yield paradigms_table(planning, explained)


def verdict_table(planning: "Planning", best: "Candidate", explained: "Explanation") -> Table:
    """The best plan in words: its name and stages, its seconds, its proof, its speed, its devices
    and their memory. Rows without a text are left out."""
    from hetplan.plans.words import summary

    workload, plan = planning.workload, best.plan
    seconds = best.predicted_seconds or 1.0  # without any, there is no activity to divide by them
    longest = [
        f"{activity} {percent_text(spent / seconds)}"
        for activity, spent in islice(explained.critical.items(), 3)
    ]
    refused = None if best.plan is None else best.plan.refused  # why `hetplan run` refuses it
    lines = {
        "best plan": f"{best.name}: {summary(plan)}" if plan else best.name,
        "iteration": iteration_text(best, workload),
        "schedule": schedule_text(best, planning),
        "proven": proven_text(best, planning),
        "speed": speed_text(best, workload),
        "devices": f"{devices_used(best)} in {workload.precision}{idle_text(best, planning)}",
        "free memory": free_text(best, workload),
        "time goes to": ", ".join(longest),
        "chosen": explained.why_chosen,
        "`hetplan run`": refused,
        "note": "; ".join(planning.notes),
    }
    rows = tuple((key, fill(text, VALUE_WIDTH)) for key, text in lines.items() if text)
    return Table(fill(workload_title(workload, planning.precisions), SCREEN_WIDTH), ("", ""), rows)


def speed_text(best: "Candidate", workload: "Workload") -> str:
    """The best plan's tokens or samples per second and its model FLOP/s utilization (MFU), and its
    FLOP/s per device and its money where they are known."""
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
    """The table of the best plan of each strategy, fastest first, with a note for each strategy
    without a plan."""
    workload = planning.workload
    fastest: dict[str, Candidate] = {}  # strategy -> its best plan that fits
    reasons: dict[str, str] = {}  # strategy -> why it has no plan
    # The best candidate comes first: in reversed order it replaces its strategy's other ones.
    for candidate in reversed(planning.candidates):
        name = candidate.strategy
        if name in explained.prices:  # then the strategy has a plan that fits
            if candidate.fits_memory:
                fastest[name] = candidate
        elif not candidate.failed:  # `fault_lines` has the failed ones
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
            versus_best(planning),
            Column("tokens/s", lambda c: c.tokens_per_second(workload), count_text, right=True),
            Column("MFU", lambda c: c.utilisation(workload), percent_text, right=True),
            Column(
                "$/1M tok",
                lambda c: c.money_per_million_tokens(workload),
                digits(4),
                right=True,
            ),
            Column("objective", lambda c: c.closed_form_seconds, seconds_text, right=True),
            # The status is of the objective, and says nothing without one.
            Column("solved", lambda c: c.status if c.closed_form_seconds is not None else ""),
        ],
        notes,
    )


def fault_lines(planning: "Planning") -> list[str]:
    """A line for each candidate that was lost to a fault of hetplan."""
    failed = [candidate for candidate in planning.candidates if candidate.failed]
    return [fill(f"{c.name} {c.message}", SCREEN_WIDTH) for c in failed]


def ranking_table(planning: "Planning") -> Table:
    """The table of all candidates, ranked, with the messages of their solvers as notes.

    The column `plan's objective` has seconds of the plan, by the formula of the strategy's paper;
    `objective` has what the solver minimised, in the unit of the strategy's problem.
    """
    workload = planning.workload
    columns: list[Column[Candidate]] = [
        Column("plan", lambda c: c.name),
        Column("status", lambda c: c.status),
        Column("iteration", lambda c: c.predicted_seconds, seconds_text, right=True),
        versus_best(planning),
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
    """The table that says why no plan wins: the methods ended without an answer, nothing fits in
    memory, or every plan that fits has a wrong ZeRO level, takes too long or costs too much."""
    fitting = [c for c in planning.candidates if c.fits_memory and c.plan is not None]
    if not fitting:
        return nothing_fits(planning)
    # A plan that fits wins unless it breaks a criterion.
    if planning.criteria.zero_levels:
        levels = planning.criteria.levels_text
        title = f"no winner: no plan that fits has a ZeRO level of {levels} and exceeds no limit"
        return Table(title, (), ())
    seconds_limit = planning.criteria.seconds_limit
    if seconds_limit is not None:
        least_seconds, name = min((c.predicted_seconds or 0.0, c.name) for c in fitting)
        return Table(
            f"no winner: no plan that fits takes at most {number_text(seconds_limit, 4)} s and "
            "exceeds no other limit",
            (),
            (),
            (f"fastest that fits: {name}, {seconds_text(least_seconds)}",),
        )
    prices = []  # (dollars per million tokens, name)
    for candidate in fitting:
        price = candidate.money_per_million_tokens(planning.workload)
        assert price is not None, "`Criteria.check` refuses a limit of money without prices"
        prices.append((price, candidate.name))
    least, name = min(prices)
    return Table(
        "no winner: nothing that fits costs at most "
        f"{number_text(planning.criteria.money_limit, 4)} per million tokens",
        (),
        (),
        (f"cheapest that fits: {name}, {number_text(least, 4)} per million tokens",),
    )


def nothing_fits(planning: "Planning") -> Table:
    """The table of a planning without a plan that fits: what would fit, and which methods ended
    without an answer."""
    undecided = [
        f"{c.name} has no answer: {c.message}" for c in planning.candidates if c.status == "unknown"
    ]
    if len(undecided) == len(planning.candidates):
        return Table("no winner: no method had time for an answer", (), (), tuple(undecided))
    advice = [f"would fit: {line}" for line in planning.advice]
    if not advice:
        advice = ["no number of devices would do"]
    notes = (needs(planning.workload), *advice, *undecided)
    return Table("no winner: nothing found fits in memory", (), (), notes)


def pareto_tables(planning: "Planning") -> Iterator[Table]:
    """The table of the candidates that no other candidate beats in both time and money; none where
    there are fewer than two."""
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
    """The devices that a candidate's plan uses, counted by type: `12 V100-SXM2-16GB + 4 T4`; an
    empty text without a plan."""
    counts = Counter[str]()
    plan = candidate.plan
    if plan:
        counts.update(plan.devices[device].type for device in plan.ranks)
    return devices_counted(counts)


def figures_notes(planning: "Planning") -> tuple[str, ...]:
    """A note on the table's columns, with the range of the ratios of replayed seconds to the plans'
    objectives; no note where no ratio is known."""
    ratios = [c.optimism for c in planning.candidates if c.optimism is not None]
    if not ratios:
        return ()
    least, most = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
    times = least if least == most else f"{least} to {most}"
    return (
        f"iteration: replayed event by event, {times} times the plan's objective; "
        "status, objective, bound and gap are of each strategy's own problem",
    )


def workload_title(workload: "Workload", precisions: Sequence[str] = ()) -> str:
    """The workload in a line: `gpt2-medium (406 M parameters) on amp-mixed (12 V100 + 4 T4), batch
    32 x 1024 tokens, fp16 …`.

    precisions: all precisions that were planned; empty: the workload's alone.
    """
    planned = " or ".join(precisions or (workload.precision,))
    model = workload.model
    trained = f", {count_text(model.trained)} trained" if model.trained < model.params else ""
    devices = devices_counted(workload.cluster.counts())
    tokens = "" if workload.sequence is None else f" x {workload.sequence} tokens"
    return (
        f"{model.name} ({count_text(model.params)} parameters{trained}) on "
        f"{workload.cluster.name} "
        f"({devices}), batch {workload.global_batch}{tokens}, {planned}, "
        f"{workload.profile.provenance.kind} profile"
    )


def versus_best(planning: "Planning") -> "Column[Candidate]":
    """The column `vs best`: how much longer a candidate's iteration takes than the winner's, as
    `+65.2 %`; as a factor, `1.65x`, where some candidate takes more than ten times as long. An
    empty text for the winner, and where that is unknown or the candidate does not fit."""
    from hetplan.planner.explain import longer

    best = planning.best

    def ratio(candidate: "Candidate") -> float | None:
        """The candidate's seconds over the winner's, less 1; None for an empty text."""
        return None if best is None or candidate is best else longer(candidate, best)

    ratios = [value for value in map(ratio, planning.candidates) if value is not None]
    as_factors = max(ratios, default=0.0) >= MANY_TIMES

    def text(value: float | None) -> str:
        if value is None:
            return ""
        return f"{1 + value:.3g}x" if as_factors else more_text(value)

    return Column("vs best", ratio, text, right=True)


def memory_text(candidate: "Candidate", workload: "Workload") -> str:
    """The memory in use on the device with the largest share of its usable memory in use, as
    `3.59 / 14.5 GiB`, with `!` where the plan does not fit; `-` where it is unknown."""
    if candidate.peak_bytes is None:
        return "-"
    usable = workload.device_bytes()
    shares = [
        (peak, usable[device.type])
        for peak, device in zip(candidate.peak_bytes, workload.cluster.devices, strict=True)
    ]
    peak_of_fullest, usable_of_fullest = max(
        shares,
        key=lambda share: share[0] / max(share[1], 1.0),  # a device may have no usable byte
    )
    text = share_text(peak_of_fullest, usable_of_fullest)
    return text if candidate.fits_memory else f"{text} !"


def needs(workload: "Workload") -> str:
    """The bytes of the model's weights, gradients and optimizer states, beside the memory of all
    devices together."""
    usable = workload.device_bytes()
    total = sum(usable[name] * count for name, count in workload.cluster.counts().items())
    return (
        "weights, gradients and optimizer states: "
        f"{bytes_text(workload.state_bytes)} in one copy of the model; "
        f"all devices together can use {bytes_text(total)}"
    )


def iteration_text(best: "Candidate", workload: "Workload") -> str:
    """The seconds of the best plan's iteration, and the interval that the predicted operators'
    error allows, where it is known."""
    source = "replayed"
    if best.measured:
        source = "measured"
    elif best.replay is None:
        source = "by the objective, not replayed"
    text = f"{seconds_text(best.predicted_seconds)}, {source}"
    ends = best.interval_seconds(workload)
    if ends is None:
        return text
    low, high = map(seconds_text, ends)
    return f"{text}; {low} to {high} by the error of predicted operators"


def schedule_text(best: "Candidate", planning: "Planning") -> str:
    """The best plan's schedule where its backward passes are split, what its stages take under
    1F1B, and the best plan with whole backward passes; an empty text under another schedule."""
    if best.plan is None or not best.plan.splits_backward:
        return ""
    text = f"{best.plan.schedule}, with split backward passes"
    under_1f1b = best.details.get("seconds_under_1f1b")
    if isinstance(under_1f1b, float):
        text += f"; under 1f1b the same devices take {seconds_text(under_1f1b)}"
    for candidate in planning.candidates:  # the best first
        plan = candidate.plan
        if candidate.fits_memory and plan is not None and not plan.splits_backward:
            seconds = seconds_text(candidate.predicted_seconds)
            return f"{text}; the best plan without, {candidate.name}, takes {seconds}"
    return text


def proven_text(best: "Candidate", planning: "Planning") -> str:
    """The proof in words: how much faster any plan could be when replayed, and whether the best
    plan is optimal for its strategy's objective."""
    from hetplan.planner.proofs import PLANS_OF_STAGES, WITH_WHOLE, claim

    criteria = planning.criteria
    seconds, bound, bound_whole = best.predicted_seconds, planning.bound, planning.bound_whole
    levels = criteria.levels_text if criteria.zero_levels else ""
    kinds = []  # of plans that the bound is of
    if levels:
        kinds.append(f"with ZeRO {levels}")
    if bound is None or not criteria.splits_backward:
        bound, bound_whole = bound_whole, None
        kinds.append(WITH_WHOLE)
    if seconds is None or bound is None:
        proven = "how much faster another plan could be is not known"
    else:
        proven = claim(
            best.plan,
            seconds,
            bound,
            planning.ladder,
            plans=" ".join(filter(None, [PLANS_OF_STAGES, " and ".join(kinds)])),
            bound_whole=bound_whole,
            further=bool(planning.computing_alone),
            levels=levels,
        )
    if best.closed_form_seconds is not None and best.status == "optimal":
        proven += f"; optimal for {best.strategy}'s objective"
    return proven


def idle_text(best: "Candidate", planning: "Planning") -> str:
    """The number of devices that the best plan leaves idle, and the seconds of the best plan on all
    devices; an empty text where none is idle."""
    devices = len(planning.workload.cluster.devices)
    idle = devices - len(best.plan.ranks if best.plan else ())
    if idle == 0:
        return ""
    text = f"; {counted(idle, 'device')} idle"
    fitting = [c for c in planning.candidates if c.fits_memory]  # the best first
    for candidate in fitting:
        if candidate.plan is not None and len(candidate.plan.ranks) == devices:
            seconds = seconds_text(candidate.predicted_seconds)
            return f"{text}; the best plan on all {devices}, {candidate.name}, takes {seconds}"
    return text


def free_text(candidate: "Candidate", workload: "Workload") -> str:
    """For each device type in use, the memory that its fullest device leaves free, of the memory
    that training can use; an empty text where it is unknown."""
    if candidate.peak_bytes is None:
        return ""
    used = range(len(candidate.peak_bytes)) if candidate.plan is None else candidate.plan.ranks
    peaks: dict[str, float] = {}  # device type -> peak bytes of its fullest device
    for device in used:
        kind = workload.cluster.devices[device].type
        peaks[kind] = max(candidate.peak_bytes[device], peaks.get(kind, 0.0))
    parts = [
        f"{bytes_text(limit - peaks[kind])} of {bytes_text(limit)} on {kind}"
        for kind, limit in workload.device_bytes().items()
        if kind in peaks
    ]
    if workload.memory_margin:
        margin = percent_text(workload.memory_margin)
        parts.append(f"{margin} of each device stays free for its allocator")
    return "; ".join(parts)
