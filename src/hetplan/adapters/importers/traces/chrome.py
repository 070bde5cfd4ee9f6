"""Traces in the Trace Event Format: of torch.profiler (Kineto), and of hetplan.

torch.profiler writes one file for each rank. Its passes are spans with these names, which torch's
pipeline schedules give and hetplan's engine too:

    Forward 3, Backward 3        micro-batch 3 on the rank's only virtual stage
    PP:1F3, PP:1B3               forward and backward pass of micro-batch 3 on virtual stage 1
    PP:1I3, PP:1W3               the backward pass of inputs, and that of weights

Spans on the GPU count where there are some, since those of the host only launch work. A span
`ProfilerStep#5` is a step. Sources: torch/distributed/pipelining/schedules.py of torch 2.13, and
the Kineto plugin of torch.profiler.

`hetplan run --trace` and `hetplan plan simulate --trace` write one file for all ranks. Its process
is the replica, and its spans are called `forward 3`, `backward 3` or `weights 3`, with the model
chunk among their arguments. Rows are called after their stage.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hetplan.errors import InputError, require
from hetplan.files import parse_foreign_json, read_bytes
from hetplan.plans.passes import FOLDED, virtual_stages
from hetplan.plans.plan import Plan
from hetplan.replays.observed.kernels import Kernel, RankStep
from hetplan.replays.observed.steps import Pass, PassKind

MICRO = 1e-6  # seconds of a microsecond, the unit of the format
NANO = 1e-9
MOST_BYTES = 512 * 2**20
MOST_VALUES = 20_000_000  # some two million spans
MOST_CHUNKS = 1024

ACTION = re.compile(r"PP:(\d+)([FBIW])(\d+)")
NUMBERED = re.compile(r"(forward|backward|weights) (\d+)", re.IGNORECASE)
STEP = re.compile(r"ProfilerStep ?#(\d+)")
STAGE_ROW = re.compile(r"stage (\d+)")
RANK_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
ACTION_KINDS: Mapping[str, PassKind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weights",
}
WORD_KINDS: Mapping[str, PassKind] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weights",
}
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a GPU does
ON_GPU = "gpu_user_annotation"
NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)


class Span(NamedTuple):
    """A complete event."""

    name: str
    category: str
    process: Any
    row: Any
    begin: float  # seconds
    end: float
    chunk: int  # number of the model chunk, where the event has one


class RankPass(NamedTuple):
    """A pass that one rank recorded."""

    kind: PassKind
    virtual_stage: int | None  # None: the name of the span does not tell it
    micro_batch: int
    begin: float  # seconds
    end: float


@dataclass
class RankTrace:
    """What the file of one rank holds."""

    where: str
    rank: int | None
    # (number of the step, begin, end) of each `ProfilerStep`, in order; empty without such spans
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    passes: list[RankPass] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def step_of(self, moment: float) -> int | None:
        """The number of the step around a moment; 0 without steps, None outside of them."""
        if not self.steps:
            return 0
        for number, begin, end in self.steps:
            if begin <= moment < end:
                return number
        return None

    def rank_steps(self) -> dict[int, RankStep]:
        """Number of each step -> the work of the GPU in it."""
        by_step: dict[int, list[Kernel]] = {}
        for kernel in self.kernels:
            number = self.step_of(kernel.begin)
            if number is not None:
                by_step.setdefault(number, []).append(kernel)
        steps = {}
        for number, kernels in by_step.items():
            kernels.sort(key=lambda kernel: kernel.begin)
            begin, end = kernels[0].begin, max(kernel.end for kernel in kernels)
            for stated, first, last in self.steps:
                if stated == number:
                    begin, end = first, max(last, end)
            steps[number] = RankStep(self.rank or 0, begin, end, tuple(kernels))
        return steps


def read_events(path: Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """(the document beside its events, the events) of a file. Raises InputError."""
    where = str(path)
    value = parse_foreign_json(read_bytes(path, MOST_BYTES), where=where, most_values=MOST_VALUES)
    document = value if isinstance(value, dict) else {}
    events = document.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(events, list):
        raise InputError(
            "is no trace", where=where, expected="a list of events, or one under `traceEvents`"
        )
    return document, [event for event in events if isinstance(event, dict)]


def spans(events: Sequence[Mapping[str, Any]], offset: float = 0.0) -> Iterator[Span]:
    """The complete events that have a name, a begin and a duration of 0 or more. offset: seconds
    that are added to their times."""
    for event in events:
        name, begin, duration = event.get("name"), event.get("ts"), event.get("dur")
        if event.get("ph") != "X" or not isinstance(name, str):
            continue
        if not isinstance(begin, int | float) or not isinstance(duration, int | float):
            continue
        if not (0 <= duration < float("inf") and abs(begin) < float("inf")):
            continue
        category = str(event.get("cat", ""))
        first = begin * MICRO + offset
        last = first + duration * MICRO
        chunk = chunk_of(event.get("args"))
        yield Span(name, category, event.get("pid"), event.get("tid"), first, last, chunk)


def chunk_of(arguments: Any) -> int:
    """The number of the model chunk in an event's arguments; 0 without one."""
    chunk = arguments.get("chunk") if isinstance(arguments, dict) else None
    return chunk if isinstance(chunk, int) and 0 <= chunk < MOST_CHUNKS else 0


def is_own(document: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a trace is hetplan's: all its passes are in one file, whose rows tell stages."""
    if "schemaVersion" in document or "deviceProperties" in document:
        return False
    return bool(stage_rows(events))


def stage_rows(events: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], int]:
    """(process, row) -> the stage that the name of the row tells."""
    stages = {}
    for event in events:
        arguments = event.get("args")
        if event.get("name") == "thread_name" and isinstance(arguments, dict):
            match = STAGE_ROW.search(str(arguments.get("name", "")))
            if match:
                stages[event.get("pid"), event.get("tid")] = int(match[1])
    return stages


def own_passes(
    events: Sequence[Mapping[str, Any]], where: str, plan: Plan | None
) -> tuple[list[tuple[int, int, Pass]], float]:
    """((replica, stage, pass) of hetplan's own trace, the end of the last event).

    plan: the plan of the run; without it, chunks are taken to begin at the first stage each. Raises
    InputError where a pass stands twice.
    """
    rows = stage_rows(events)
    stages: dict[Any, int] = {}  # process -> number of its stages
    for (process, _), number in rows.items():
        stages[process] = max(stages.get(process, 0), number + 1)
    folded = plan is not None and is_folded(plan)
    found: dict[tuple[Any, ...], tuple[int, int, Pass]] = {}
    end = 0.0
    for span in spans(events):
        end = max(end, span.end)
        match = NUMBERED.fullmatch(span.name)
        stage = rows.get((span.process, span.row))
        if match is None or stage is None:
            continue
        kind, batch = kind_of(match[1]), int(match[2])
        key = (span.process, span.row, kind, span.chunk, batch)
        require(
            key not in found,
            f"has the pass `{span.name}` twice in one row",
            where=where,
            expected="the trace of one step",
        )
        along = virtual_stages(stages[span.process], span.chunk + 1, folded=folded)
        virtual_stage = along.index((stage, span.chunk))
        one = Pass(kind, virtual_stage, batch, span.begin, span.end)
        found[key] = (int(span.process or 0), stage, one)
    return list(found.values()), end


def is_folded(plan: Plan) -> bool:
    """Whether chunks lie on the stages as a V."""
    return plan.schedule in FOLDED or (
        plan.schedule == "explicit" and any(replica.folded for replica in plan.replicas)
    )


def kind_of(word: str) -> PassKind:
    """The kind of pass that a word names, in any case."""
    return WORD_KINDS[word.lower()]


def read_rank(
    document: Mapping[str, Any], events: Sequence[Mapping[str, Any]], path: Path
) -> RankTrace:
    """The trace of one rank."""
    trace = RankTrace(str(path), rank_of(document, path))
    base = document.get("baseTimeNanoseconds")  # of all times; ranks may have different ones
    offset = base * NANO if isinstance(base, int) else 0.0
    on_host: list[RankPass] = []
    on_gpu: list[RankPass] = []
    for span in spans(events, offset):
        if span.category in WORK:
            communicates = span.category == "kernel" and NCCL.search(span.name) is not None
            trace.kernels.append(Kernel(span.name, communicates, span.begin, span.end))
            continue
        step = STEP.fullmatch(span.name)
        if step and span.category != ON_GPU:
            trace.steps.append((int(step[1]), span.begin, span.end))
        named = pass_named(span.name)
        if named is not None:
            of_device = on_gpu if span.category == ON_GPU else on_host
            of_device.append(RankPass(*named, span.begin, span.end))
    trace.steps.sort(key=lambda step: step[1])
    trace.passes = on_gpu or on_host
    return trace


def pass_named(name: str) -> tuple[PassKind, int | None, int] | None:
    """(kind, virtual stage where it is told, micro-batch) of the pass that a span is named after;
    None for another span."""
    action = ACTION.fullmatch(name)
    if action:
        return ACTION_KINDS[action[2]], int(action[1]), int(action[3])
    numbered = NUMBERED.fullmatch(name)
    if numbered:
        return kind_of(numbered[1]), None, int(numbered[2])
    return None


def rank_of(document: Mapping[str, Any], path: Path) -> int | None:
    """The rank that a file states, or else that its name tells; None where neither does."""
    stated = document.get("distributedInfo")
    if isinstance(stated, dict):
        rank = stated.get("rank")
        if isinstance(rank, int) and rank >= 0:
            return rank
    match = RANK_NAME.search(path.name)
    return int(match[1]) if match else None
