"""The content of a plan's picture, without its looks: rows of a timeline, memory, placement,
candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hetplan.errors import InputError
from hetplan.planner.explain import folded, name_of, why
from hetplan.plans.plan import Plan, parse_plan
from hetplan.plans.words import summary
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import LABELS, Kind
from hetplan.schema import NonNegative, parse
from hetplan.text import devices_text, names_text

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
ROWS = 96  # of a timeline; more cannot be read
EXACT = 6000  # events that are drawn one by one; beyond that many the timeline is sampled
BINS = 1200


@dataclass(frozen=True)
class Span:
    """One thing that a unit does."""

    kind: str
    start: float
    end: float
    batch: int = -1  # the micro-batch's number, -1 where there is none or several are one


@dataclass(frozen=True)
class Row:
    """A stage of the timeline, or a device of a program: what it computes, and what it sends. Like
    pipelines share one; the first of them is drawn."""

    title: str
    devices: str
    layers: str
    computes: tuple[Span, ...]
    communicates: tuple[Span, ...]
    busy: float  # share of the iteration that it computes; of the slowest of its pipelines
    alike: int  # pipelines that share it


@dataclass(frozen=True)
class Held:
    """A device's memory, in bytes."""

    device: int
    node: int
    kind: str
    held: float
    limit: float
    place: str  # `stage 3`, empty where the device is idle
    row: int | None  # number of its row


class Printed(BaseModel):
    """The part that is drawn of what a command printed as JSON."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Offer(Printed):
    """The part of a candidate of a planning document that is drawn; what is not known is None."""

    strategy: str = ""
    method: str = ""
    status: str = ""
    predicted_seconds: NonNegative | None = None
    closed_form_seconds: NonNegative | None = None
    bound: NonNegative | None = None  # of its strategy's own problem
    money_per_million_tokens: NonNegative | None = None
    fits_memory: bool | None = None
    plan: Any = Field(None, exclude=True)

    @property
    def name(self) -> str:
        """`amp/auto`."""
        return f"{self.strategy}/{self.method}"[:200]


class PlanningDocument(Printed):
    """The document that `hetplan plan --json` prints."""

    winner: int | None
    candidates: list[Offer]
    bound: NonNegative | None = None


class ChangeDocument(Printed):
    """A change of the cluster, in what `hetplan plan what-if --json` prints."""

    change: str
    seconds_saved: float | None = None
    within_precision: bool = False
    best: Offer | None = None


class WhatIfDocument(Printed):
    """The document that `hetplan plan what-if --json` prints."""

    base: ChangeDocument
    variants: list[ChangeDocument]
    precision: NonNegative = 0.0


@dataclass(frozen=True)
class Scene:
    """Everything."""

    title: str
    subtitle: str
    seconds: float
    bubble: float
    rows: tuple[Row, ...]  # at most ROWS of all
    more: int  # rows beyond these
    devices: tuple[Held, ...]
    nodes: tuple[str, ...]
    why: Mapping[str, str]  # what the iteration's time goes to, what has least to spare
    offers: tuple[Offer, ...] = ()  # empty where the file has only its own plan
    winner: int | None = None  # number of the offer that is drawn
    bound: float | None = None  # seconds that no plan of stages replays below
    changes: tuple[ChangeDocument, ...] = ()  # the cluster as it is, then changed
    margin: float = 0.0  # share of each device's memory that the limits leave free

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        models = {"offers": self.offers, "changes": self.changes}
        plain = {name: [one.model_dump() for one in every] for name, every in models.items()}
        return {**asdict(self), **plain}

    @property
    def used(self) -> list[Held]:
        """The devices in use."""
        return [device for device in self.devices if device.row is not None]


def scene(
    plan: Plan, run: Replay, workload: Workload, planning: PlanningDocument | None = None
) -> Scene:
    """The picture's content; run: the plan replayed on the workload. planning: what it won."""
    units = folded(plan, run)
    rows = [row(plan, run, workload, own) for own in units[:ROWS]]
    if sum(len(one.computes) + len(one.communicates) for one in rows) > EXACT:
        rows = [
            replace(
                one,
                computes=sampled(one.computes, run.seconds),
                communicates=sampled(one.communicates, run.seconds),
            )
            for one in rows
        ]
    bound = None if planning is None else planning.bound
    if planning is None and plan.prediction and plan.prediction.strategy == "joint":
        bound = plan.prediction.bound  # of joint's own problem, which is this one
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
        more=len(units) - len(rows),
        devices=memory(plan, run, workload, units),
        nodes=tuple(nodes),
        why=why(plan, run, workload, bound),
        offers=() if planning is None else tuple(planning.candidates),
        winner=None if planning is None else planning.winner,
        bound=bound,
        margin=workload.memory_margin,
    )


def row(plan: Plan, run: Replay, workload: Workload, units: Sequence[int]) -> Row:
    """The row of these units."""
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
    """Spans of the unit's computation, and of the messages and collectives that it takes part
    in."""
    tasks, timeline = run.timeline.tasks, run.timeline
    own = tasks.unit == unit
    if run.by_device:
        own |= tasks.kind == int(Kind.COLLECTIVE)  # of all devices
    events = np.flatnonzero(own & (timeline.end > timeline.start))
    lanes: tuple[list[Span], list[Span]] = ([], [])
    for i in events[np.argsort(timeline.start[events], kind="stable")]:
        kind = LABELS[Kind(int(tasks.kind[i]))]
        ends = float(timeline.start[i]), float(timeline.end[i])
        lanes[kind in COMMUNICATES].append(Span(kind, *ends, int(tasks.micro_batch[i])))
    return tuple(lanes[0]), tuple(lanes[1])


def sampled(lane: Sequence[Span], seconds: float, bins: int = BINS) -> tuple[Span, ...]:
    """At most `bins` spans: of each part of the iteration what takes most of it, neighbours of one
    kind as one."""
    if not lane or seconds <= 0:
        return ()
    kinds = list(dict.fromkeys(span.kind for span in lane))
    share = np.zeros((len(kinds) + 1, bins))
    width = seconds / bins
    for span in lane:
        first, last = int(span.start / width), min(int(span.end / width), bins - 1)
        for b in range(first, last + 1):
            inside = min(span.end, (b + 1) * width) - max(span.start, b * width)
            share[kinds.index(span.kind), b] += inside
    share[-1] = width - share[:-1].sum(axis=0)  # idle
    most = share.argmax(axis=0)
    ends = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), bins]
    return tuple(
        Span(kinds[most[begin]], begin * width, end * width)
        for begin, end in pairwise(ends)
        if most[begin] < len(kinds)
    )


def memory(
    plan: Plan, run: Replay, workload: Workload, rows: Sequence[Sequence[int]]
) -> tuple[Held, ...]:
    """Memory and place of every device of the cluster. rows: the units of each."""
    place: dict[int, tuple[str, int | None]] = {}
    for number, units in enumerate(rows):
        name = name_of(plan, run, units)
        for unit in units:
            place |= dict.fromkeys(run.devices[unit], (name, number))
    sizes = zip(workload.cluster.devices, run.peak_bytes, run.limit_bytes, strict=True)
    return tuple(
        Held(d, device.node, device.type, held, limit, *place.get(d, ("", None)))
        for d, (device, held, limit) in enumerate(sizes)
    )


def read(value: Any, where: str) -> tuple[Plan, PlanningDocument | None]:
    """The plan of a plan file; or of what `hetplan plan --json` prints the winner's, and the whole.
    Raises InputError."""
    if not isinstance(value, dict) or "candidates" not in value:
        return parse_plan(value, where=where), None
    document = parse(PlanningDocument, value, where=where)
    offers, winner = document.candidates, document.winner
    if winner is None or not 0 <= winner < len(offers):
        raise InputError("no winner to show", where=f"{where}: winner", got=winner)
    return parse_plan(offers[winner].plan, where=f"{where}: candidates[{winner}].plan"), document
