"""The content of a plan's picture, without its appearance: the rows of the timeline, the memory and
the placement of devices, and the candidates. `terminal`, `html` and `figure` draw it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hetplan.errors import InputError
from hetplan.planner.explain import (
    PLANS_OF_STAGES,
    WITH_WHOLE,
    folded,
    made_with_these_costs,
    name_of,
    why,
)
from hetplan.planner.joint import SCHEDULES, Joint
from hetplan.plans.plan import Plan, parse_plan
from hetplan.plans.words import summary
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import LABELS, Kind
from hetplan.schema import NonNegative, parse
from hetplan.text import devices_text, names_text

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
ROWS = 96  # most rows of a timeline; more cannot be read
EXACT = 6000  # most events that are drawn one by one; a timeline of more events is sampled
OF_OTHER_COSTS = "iterations and bounds are of the costs that the plans were made with"
BINS = 1200  # spans of a sampled row, at most


@dataclass(frozen=True)
class Span:
    """A time in which a unit does one thing. A unit is a stage of a replica, or a device of an SPMD
    program."""

    kind: str  # kind of the task, one of `LABELS`
    start: float  # seconds
    end: float  # seconds
    batch: int = -1  # number of the micro-batch; -1 for tasks without one, and for sampled spans


@dataclass(frozen=True)
class Row:
    """A row of the timeline: a stage, or a device of an SPMD program. Pipelines that do the same
    share their rows, in which the first of them is drawn."""

    title: str
    devices: str  # the devices of all pipelines that share the row, as text
    layers: str  # the layers of the stage, as text
    computes: tuple[Span, ...]
    communicates: tuple[Span, ...]
    busy: float  # share of the iteration in which it computes, of the slowest of its pipelines
    alike: int  # number of units that share the row


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device."""

    device: int
    node: int
    kind: str  # device type
    peak_bytes: float
    limit: float  # bytes
    place: str  # name of its row, such as `stage 3`; empty for an idle device
    row: int | None  # number of its row; None for an idle device


class PrintedDocument(BaseModel):
    """The base class of documents that commands print as JSON. A subclass lists the keys that are
    drawn; all other keys are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Offer(PrintedDocument):
    """A candidate of a planning document. A figure that is not known is None."""

    strategy: str = ""
    method: str = ""
    status: str = ""
    predicted_seconds: NonNegative | None = None
    closed_form_seconds: NonNegative | None = None
    bound: NonNegative | None = None  # lower bound of the problem of its strategy
    money_per_million_tokens: NonNegative | None = None
    fits_memory: bool | None = None
    plan: Any = Field(None, exclude=True)

    @property
    def name(self) -> str:
        """The strategy and the method: `amp/auto`."""
        return f"{self.strategy}/{self.method}"[:200]


class PlanningDocument(PrintedDocument):
    """The document that `hetplan plan --json` prints."""

    winner: int | None
    candidates: list[Offer]
    bound: NonNegative | None = None
    bound_whole: NonNegative | None = None
    """None in documents of before there were plans with split backward passes."""


class ChangeDocument(PrintedDocument):
    """A change of the cluster, in what `hetplan plan what-if --json` prints."""

    change: str
    seconds_saved: float | None = None
    within_precision: bool = False
    best: Offer | None = None


class WhatIfDocument(PrintedDocument):
    """The document that `hetplan plan what-if --json` prints."""

    base: ChangeDocument
    variants: list[ChangeDocument]
    precision: NonNegative = 0.0


@dataclass(frozen=True)
class Scene:
    """The whole content of a picture. `scene` makes it."""

    title: str
    subtitle: str
    seconds: float  # replayed seconds of an iteration
    bubble: float  # share of the devices' time in which they do not compute
    rows: tuple[Row, ...]  # the rows that are drawn, at most ROWS
    more: int  # number of rows that are left out
    devices: tuple[DeviceMemory, ...]  # the memory of each device of the whole cluster
    nodes: tuple[str, ...]  # [node] its links, as text
    why: Mapping[str, str]  # `explain.why`: heading -> text
    offers: tuple[Offer, ...] = ()  # all candidates; empty for a plan file
    winner: int | None = None  # index of the offer that is drawn
    bound: float | None = None  # lower bound on the replayed seconds of the plans of `bounded`
    bounded: str = PLANS_OF_STAGES
    # Whether the plan is drawn with other costs than it was made with. The figures of `offers` are
    # then of the costs that the plan was made with, and `bound` is None.
    other_costs: bool = False
    # What `hetplan plan what-if` found, for the unchanged cluster and for each change.
    changes: tuple[ChangeDocument, ...] = ()
    margin: float = 0.0  # share of each device's memory that the limits leave free

    def document(self) -> dict[str, Any]:
        """The content as JSON types."""
        offers = [offer.model_dump() for offer in self.offers]
        changes = [change.model_dump() for change in self.changes]
        return {**asdict(self), "offers": offers, "changes": changes}

    @property
    def used(self) -> list[DeviceMemory]:
        """The devices in use."""
        return [device for device in self.devices if device.row is not None]


def bound_of(plan: Plan, planning: PlanningDocument | None) -> tuple[float | None, str]:
    """(a lower bound on replayed seconds, the plans that it is of in words); (None, …) where none
    is known. The problem `joint` is about replayed seconds, so that its bound in a plan file is
    one; but for the choice of a schedule it is of whole backward passes."""
    whole = f"{PLANS_OF_STAGES} {WITH_WHOLE}"
    if planning is not None:
        of_any_order = planning.bound_whole is not None and planning.bound is not None
        if of_any_order and planning.bound != planning.bound_whole:
            return planning.bound, PLANS_OF_STAGES
        return planning.bound_whole or planning.bound, whole
    prediction = plan.prediction
    if prediction is None or prediction.strategy != Joint.name:
        return None, PLANS_OF_STAGES
    chosen = prediction.method.startswith(SCHEDULES.name)
    return prediction.bound, PLANS_OF_STAGES if chosen else whole


def scene(
    plan: Plan, run: Replay, workload: Workload, planning: PlanningDocument | None = None
) -> Scene:
    """The content of the picture of a plan. run: its replay on the workload. planning: the document
    of the planning whose winner it is."""
    units_of_rows = folded(plan, run)
    rows = [row(plan, run, workload, units) for units in units_of_rows[:ROWS]]
    events = sum(len(drawn.computes) + len(drawn.communicates) for drawn in rows)
    if events > EXACT:
        rows = [
            replace(
                drawn,
                computes=sampled(drawn.computes, run.seconds),
                communicates=sampled(drawn.communicates, run.seconds),
            )
            for drawn in rows
        ]
    stated_bound, bounded = bound_of(plan, planning)
    other_costs = not made_with_these_costs(plan, run, workload)
    # A bound holds only for the costs for which it was proven.
    bound, foreign_bound = (None, stated_bound) if other_costs else (stated_bound, None)
    nodes = [
        f"{node.intra_bandwidth * 8e-9:.4g} Gbit/s inside, "
        f"{node.network_bandwidth * 8e-9:.4g} Gbit/s to others"
        for node in workload.cluster.nodes
    ]
    return Scene(
        title=plan.name,
        subtitle=f"{summary(plan)}; {plan.origin or 'by hand'}",
        seconds=run.seconds,
        bubble=run.timeline.bubble,
        rows=tuple(rows),
        more=len(units_of_rows) - len(rows),
        devices=memory(plan, run, workload, units_of_rows),
        nodes=tuple(nodes),
        why=why(plan, run, workload, bound, foreign_bound=foreign_bound, bounded=bounded),
        offers=() if planning is None else tuple(planning.candidates),
        winner=None if planning is None else planning.winner,
        bound=bound,
        bounded=bounded,
        other_costs=other_costs,
        margin=workload.memory_margin,
    )


def row(plan: Plan, run: Replay, workload: Workload, units: Sequence[int]) -> Row:
    """The row of units that do the same; the first of them is drawn."""
    replica, stage = run.owners[units[0]]
    names = [layer.name for layer in workload.profile.layers]
    places = [(device.node, device.type) for device in workload.cluster.devices]
    title = name_of(plan, run, units)
    ranges = plan.replicas[replica].stages[stage].layers
    computes, communicates = spans(run, units[0])
    busy = max(float(run.timeline.busy[unit]) for unit in units)
    return Row(
        title=title if len(units) == 1 else f"{title} (x{len(units)})",
        devices=devices_text(places, chain.from_iterable(run.devices[unit] for unit in units)),
        layers="; ".join(names_text(names[first:last]) for first, last in ranges),
        computes=computes,
        communicates=communicates,
        busy=busy / run.seconds if run.seconds else 0.0,
        alike=len(units),
    )


def spans(run: Replay, unit: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """(spans of a unit's computation, spans of the messages that it sends and of its collectives),
    each in the order of their starts."""
    tasks, timeline = run.timeline.tasks, run.timeline
    # The unit of a message is its sender. That of a collective is the first of its units, for which
    # alone the collective is drawn.
    drawn = tasks.unit == unit
    if run.by_device:
        drawn |= tasks.kind == int(Kind.COLLECTIVE)  # all devices take part
    events = np.flatnonzero(drawn & (timeline.end > timeline.start))
    computes: list[Span] = []
    communicates: list[Span] = []
    for i in events[np.argsort(timeline.start[events], kind="stable")]:
        kind = LABELS[Kind(int(tasks.kind[i]))]
        start, end = float(timeline.start[i]), float(timeline.end[i])
        lane = communicates if kind in COMMUNICATES else computes
        lane.append(Span(kind, start, end, int(tasks.micro_batch[i])))
    return tuple(computes), tuple(communicates)


def sampled(lane: Sequence[Span], seconds: float, bins: int = BINS) -> tuple[Span, ...]:
    """At most `bins` spans in the place of those of a lane. The iteration of `seconds` is cut into
    bins of equal length; each bin shows the kind that takes most of it, or idle time, and
    neighbouring bins of the same kind form one span."""
    if not lane or seconds <= 0:
        return ()
    kinds = list(dict.fromkeys(span.kind for span in lane))
    idle = len(kinds)  # number of the row of idle time
    taken = np.zeros((idle + 1, bins))  # [kind, or idle][bin] seconds
    width = seconds / bins
    for span in lane:
        first, last = int(span.start / width), min(int(span.end / width), bins - 1)
        for b in range(first, last + 1):
            inside = min(span.end, (b + 1) * width) - max(span.start, b * width)
            taken[kinds.index(span.kind), b] += inside
    taken[idle] = width - taken[:idle].sum(axis=0)
    most = taken.argmax(axis=0)
    changes = (np.flatnonzero(np.diff(most)) + 1).tolist()  # bins of another kind than before
    return tuple(
        Span(kinds[most[begin]], begin * width, end * width)
        for begin, end in pairwise([0, *changes, bins])
        if most[begin] != idle
    )


def memory(
    plan: Plan, run: Replay, workload: Workload, rows: Sequence[Sequence[int]]
) -> tuple[DeviceMemory, ...]:
    """The memory and the place of every device of the cluster. rows: the units of each row."""
    place: dict[int, tuple[str, int | None]] = {}
    for number, units in enumerate(rows):
        name = name_of(plan, run, units)
        for unit in units:
            place |= dict.fromkeys(run.devices[unit], (name, number))
    sizes = zip(workload.cluster.devices, run.peak_bytes, run.limit_bytes, strict=True)
    return tuple(
        DeviceMemory(d, device.node, device.type, held, limit, *place.get(d, ("", None)))
        for d, (device, held, limit) in enumerate(sizes)
    )


def read(value: Any, where: str) -> tuple[Plan, PlanningDocument | None]:
    """(plan, planning document) of a parsed JSON file. The file is a plan file, which gives no
    planning document; or the document that `hetplan plan --json` prints, which gives the winner's
    plan. Raises InputError."""
    if not isinstance(value, dict) or "candidates" not in value:
        return parse_plan(value, where=where), None
    document = parse(PlanningDocument, value, where=where)
    offers, winner = document.candidates, document.winner
    if winner is None or not 0 <= winner < len(offers):
        raise InputError("no winner to show", where=f"{where}: winner", got=winner)
    return parse_plan(offers[winner].plan, where=f"{where}: candidates[{winner}].plan"), document
