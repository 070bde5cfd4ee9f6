"""`hetplan show --trace-in`: the parts of the seconds of steps that a trace recorded."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

from hetplan.adapters.importers.traces.reading import RunTrace, read_run
from hetplan.cli.output import emit, note
from hetplan.planner.step_parts import PassParts, mean_rank_parts, pass_parts
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.observed.kernels import RankParts
from hetplan.replays.observed.what_if import Parts
from hetplan.text import Column, Table, counted, percent_text, seconds_text

# A part is named in a note from this share of the step on.
NOTABLE = 0.01
# A rank is named that computes this many times as long as the mean of all ranks.
SLOW = 1.05
MEANINGS = {
    "computing": "the busiest stage, if alike passes took equally long",
    "schedule": "filling, draining and waiting by the order of passes",
    "messages": "waiting for activations and gradients of other stages",
    "slow_workers": "workers whose passes take longer than those of alike workers",
    "spread": "passes of one worker that take unequally long: lengths of samples, noise",
    "unexplained": "delays of the host, waiting for ports, clocks that differ",
    "after": "gradients and update behind the last pass",
}


def show_trace(path: Path, plan: Plan | None, workload: Workload | None, *, json: bool) -> int:
    """Print the parts of the seconds of a trace's steps.

    plan, workload: those of the run; None: unknown. Raises InputError for a path without a trace
    that can be read.
    """
    run = read_run(path, plan)
    note(*run.notes)
    if run.steps:
        parts = pass_parts(run, plan, workload)
        emit({"trace": str(path), **parts.document()}, [parts_table(path, parts)], json=json)
        return 0
    ranks = mean_rank_parts(run)
    document = {
        "trace": str(path),
        "steps": sorted(run.ranks),
        "ranks": [asdict(rank) | {"seconds": rank.seconds} for rank in ranks],
    }
    emit(document, [ranks_table(path, run, ranks)], json=json)
    return 0


class PartRow(NamedTuple):
    """A row of the table of parts."""

    name: str
    seconds: float
    share: float  # of the step
    predicted: float | None  # seconds in the plan's own replay
    meaning: str


def part_rows(parts: PassParts) -> list[PartRow]:
    """The rows of the table of parts; the last one is the step."""
    rows = []
    for field in fields(Parts):
        seconds = getattr(parts.mean, field.name)
        predicted = None if parts.predicted is None else getattr(parts.predicted, field.name)
        share = seconds / parts.seconds
        name = field.name.replace("_", " ")
        rows.append(PartRow(name, seconds, share, predicted, MEANINGS[field.name]))
    whole = None if parts.predicted is None else parts.predicted.seconds
    return [*rows, PartRow("step", parts.seconds, 1.0, whole, "from the first pass on")]


def parts_table(path: Path, parts: PassParts) -> Table:
    """The parts of a mean step, with what makes it longer."""
    columns = [
        Column[PartRow]("part", lambda row: row.name),
        Column[PartRow]("measured", lambda row: row.seconds, seconds_text, right=True),
        Column[PartRow]("share", lambda row: row.share, percent_text, right=True),
        Column[PartRow]("of", lambda row: row.meaning),
    ]
    if parts.predicted is not None:
        predicted = Column[PartRow](
            "predicted", lambda row: row.predicted, seconds_text, right=True
        )
        columns.insert(3, predicted)
    steps = [of_step.seconds for _, of_step in parts.steps]
    title = f"{path.name}: the seconds of a step, in the mean of {counted(len(steps), 'step')}"
    return Table.of(title, part_rows(parts), columns, part_notes(parts, steps))


def part_notes(parts: PassParts, steps: list[float]) -> list[str]:
    """Lines on the longest and shortest step, the slowest worker and the most costly messages."""
    lines = []
    if len(steps) > 1:
        lines.append(f"steps take {seconds_text(min(steps))} to {seconds_text(max(steps))}")
    name, effect = max(parts.workers.items(), key=lambda item: item[1])
    if effect > NOTABLE * parts.seconds:
        share = percent_text(effect / parts.seconds)
        lines.append(f"slow: {name}; with the mean of alike workers a step is {share} shorter")
    if parts.messages and parts.messages[0].effect > NOTABLE * parts.seconds:
        worst = parts.messages[0]
        share = percent_text(worst.effect / parts.seconds)
        lines.append(
            f"messages: {seconds_text(worst.seconds)} before each {worst.kind} pass of virtual "
            f"stage {worst.virtual_stage}; without them a step is {share} shorter"
        )
    return lines


def ranks_table(path: Path, run: RunTrace, ranks: list[RankParts]) -> Table:
    """The parts of a mean step on every rank."""

    def share_of(seconds: float, rank: RankParts) -> str:
        return f"{seconds_text(seconds)} ({percent_text(seconds / rank.seconds)})"

    number = Column[RankParts]("rank", lambda rank: rank.rank, right=True)
    step = Column[RankParts]("step", lambda rank: rank.seconds, seconds_text, right=True)
    computing = Column[RankParts](
        "computing", lambda rank: share_of(rank.computing, rank), right=True
    )
    transfers = Column[RankParts](
        "transfers", lambda rank: share_of(rank.transfers, rank), right=True
    )
    waiting = Column[RankParts]("waiting", lambda rank: share_of(rank.waiting, rank), right=True)
    idle = Column[RankParts]("idle", lambda rank: share_of(rank.idle, rank), right=True)
    columns = [number, step, computing, transfers, waiting, idle]
    notes = [
        "transfers and waiting: no kernel computes beside them; waiting ends when the last rank "
        "comes to a collective",
    ]
    mean = sum(rank.computing for rank in ranks) / len(ranks)
    slowest = max(ranks, key=lambda rank: rank.computing)
    if slowest.computing > SLOW * mean:
        more = percent_text(slowest.computing / mean - 1)
        notes.append(f"slow: rank {slowest.rank} computes {more} longer than the mean of all ranks")
    title = f"{path.name}: the seconds of a step by rank, in the mean of "
    return Table.of(title + counted(len(run.ranks), "step"), ranks, columns, notes)
