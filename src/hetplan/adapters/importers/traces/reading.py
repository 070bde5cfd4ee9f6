"""Tells what kind of trace a file or a folder holds, and reads it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetplan.adapters.importers.traces.chrome import (
    RankTrace,
    is_own,
    own_passes,
    read_events,
    read_rank,
)
from hetplan.adapters.importers.traces.operations import read_operations
from hetplan.errors import InputError, require
from hetplan.plans.plan import Plan
from hetplan.replays.observed.kernels import RankStep
from hetplan.replays.observed.steps import Pass, Step, make_step

TABLES = (".parquet", ".csv")
TRACES = (".json", ".json.gz")
MOST_FILES = 4096


@dataclass(frozen=True)
class RunTrace:
    """A trace of a run: steps with passes or, without any, the work of the ranks' GPUs."""

    steps: tuple[Step, ...] = ()
    # number of each step -> the work of every rank
    ranks: dict[int, list[RankStep]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was assumed or left out


def read_run(path: Path, plan: Plan | None) -> RunTrace:
    """The trace in a file, or in the files of a folder with one for each rank.

    plan: the plan of the run; it tells which rank has which stage. Raises InputError.
    """
    files = files_of(path)
    if files[0].suffix in TABLES:
        require(len(files) == 1, "several tables", where=str(path), expected="one file")
        return RunTrace(steps=tuple(read_operations(files[0])))
    document, events = read_events(files[0])
    if len(files) == 1 and is_own(document, events):
        passes, end = own_passes(events, str(path), plan)
        return RunTrace(steps=(make_step(0, passes, end, str(path)),))
    ranks = [read_rank(document, events, files[0])]
    for file in files[1:]:
        ranks.append(read_rank(*read_events(file), file))
    return of_ranks(ranks, plan, str(path))


def files_of(path: Path) -> list[Path]:
    """The files of a trace. Raises InputError where there are none."""
    if not path.is_dir():
        return [path]
    endings = (*TABLES, *TRACES)
    files = sorted(file for file in path.iterdir() if file.name.endswith(endings))
    require(
        files, "has no traces", where=str(path), expected="files *.json, *.json.gz or *.parquet"
    )
    require(len(files) <= MOST_FILES, "has too many files", where=str(path), got=len(files))
    return files


def of_ranks(ranks: Sequence[RankTrace], plan: Plan | None, where: str) -> RunTrace:
    """The trace of a run from the traces of its ranks: by passes where all have some and a plan
    tells their stages, else by the work of the GPUs. Raises InputError where neither is
    possible."""
    numbers = [trace.rank for trace in ranks]
    stated_ranks = {number for number in numbers if number is not None}
    if len(ranks) > 1 and len(stated_ranks) < len(ranks):
        texts = ["unknown" if number is None else str(number) for number in numbers]
        raise InputError(
            "ranks of the files are not known, or not different",
            where=where,
            got=", ".join(texts)[:100],
            expected="files with different ranks in `distributedInfo` or in their names (rank0 …)",
        )
    have_passes = all(trace.passes for trace in ranks)
    if have_passes and plan is not None:
        return with_passes(ranks, plan, where)
    by_step: dict[int, list[RankStep]] = {}
    for trace in ranks:
        for number, step in trace.rank_steps().items():
            by_step.setdefault(number, []).append(step)
    whole = {number: steps for number, steps in by_step.items() if len(steps) == len(ranks)}
    if not whole:
        cause = "has passes, but which rank has which stage is not known"
        remedy = "PLAN, the plan of the run"
        if not have_passes:
            cause, remedy = "has no passes and no work of GPUs", "a trace of torch.profiler on GPUs"
        raise InputError(cause, where=where, expected=remedy)
    notes = []
    if have_passes:
        notes.append("the passes are left out, since no plan tells which rank has which stage")
    return RunTrace(ranks=whole, notes=tuple(notes))


def with_passes(ranks: Sequence[RankTrace], plan: Plan, where: str) -> RunTrace:
    """The trace of a run by the passes of its ranks. Raises InputError where a rank is not in the
    plan, or where no step has passes of every stage."""
    place_of = {place.rank: place for place in plan.places}
    by_step: dict[int, list[tuple[int, int, Pass]]] = {}
    for trace in ranks:
        rank = trace.rank or 0
        require(
            rank in place_of,
            "rank is not in the plan",
            where=trace.where,
            got=rank,
            expected=f"0 to {len(place_of) - 1}",
        )
        place = place_of[rank]
        for recorded in trace.passes:
            number = trace.step_of(recorded.begin)
            if number is None:
                continue
            virtual_stage = recorded.virtual_stage
            if virtual_stage is None:
                virtual_stage = place.stage
            one = Pass(
                recorded.kind, virtual_stage, recorded.micro_batch, recorded.begin, recorded.end
            )
            by_step.setdefault(number, []).append((place.replica, place.stage, one))
    stages = sum(len(replica.stages) for replica in plan.replicas)
    steps = [
        make_step(number, passes, None, where)
        for number, passes in sorted(by_step.items())
        if len({(replica, stage) for replica, stage, _ in passes}) == stages
    ]
    require(
        steps,
        "no step has passes of every stage of the plan",
        where=where,
        expected=f"a file for at least one rank of each of {stages} stages",
    )
    return RunTrace(steps=tuple(steps))
