"""What a picture of a plan shows, without saying how: rows of a timeline, memory, placement,
candidates."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hetplan.errors import InputError
from hetplan.formulations.joint.plan import Plan, parse_plan
from hetplan.profiling.simulator.tasks import LABELS, Kind
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import Replay
from hetplan.schema import NonNegative, parse
from hetplan.text import counted, devices_text, names_text

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
    """A unit of the timeline: what it computes, and what it sends."""

    title: str
    devices: str
    layers: str
    computes: tuple[Span, ...]
    communicates: tuple[Span, ...]
    busy: float  # share of the iteration that it computes


@dataclass(frozen=True)
class Held:
    """A device's memory, in bytes."""

    device: int
    node: int
    kind: str
    held: float
    limit: float
    place: str  # `r0 s3`, empty where the device is idle
    unit: int | None  # number of its row


class Offer(BaseModel):
    """The part of a candidate of a planning document that is drawn; what is not known is None."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

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


class PlanningDocument(BaseModel):
    """What `hetplan plan --json` prints."""

    model_config = ConfigDict(extra="ignore", strict=True)

    winner: int | None
    candidates: list[Offer]


@dataclass(frozen=True)
class Scene:
    """Everything."""

    title: str
    subtitle: str
    seconds: float
    bubble: float
    rows: tuple[Row, ...]  # at most ROWS of all units
    units: int
    devices: tuple[Held, ...]
    nodes: tuple[str, ...]
    offers: tuple[Offer, ...]  # empty where the file has only its own plan
    winner: int | None  # number of the offer that is drawn

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        offers = [offer.model_dump() for offer in self.offers]
        return {**asdict(self), "offers": offers}

    @property
    def used(self) -> list[Held]:
        """The devices in use."""
        return [device for device in self.devices if device.unit is not None]


def scene(
    plan: Plan,
    run: Replay,
    workload: Workload,
    offers: Sequence[Offer] = (),
    winner: int | None = None,
) -> Scene:
    """The picture's content; run: the plan replayed on the workload."""
    replicas, stages = len(plan.replicas), len(plan.replicas[0].stages)
    subtitle = (
        f"{counted(replicas, 'replica')} of {counted(stages, 'stage')}, "
        f"micro-batches of {plan.replicas[0].micro_batches[0].samples}, {plan.schedule}, "
        f"ZeRO {plan.zero}, recomputation {plan.recomputation}; {plan.origin or 'by hand'}"
    )
    nodes = [
        f"node {n}: {node.intra_bandwidth * 8e-9:.4g} Gbit/s inside, "
        f"{node.network_bandwidth * 8e-9:.4g} Gbit/s to others"
        for n, node in enumerate(workload.cluster.nodes)
    ]
    return Scene(
        title=plan.name,
        subtitle=subtitle,
        seconds=run.seconds,
        bubble=run.timeline.bubble,
        rows=tuple(row(plan, run, workload, u) for u in range(min(len(run.owners), ROWS))),
        units=len(run.owners),
        devices=memory(plan, run, workload),
        nodes=tuple(nodes),
        offers=tuple(offers),
        winner=winner,
    )


def row(plan: Plan, run: Replay, workload: Workload, unit: int) -> Row:
    """One unit's row: a stage, or a device of an SPMD program."""
    replica, stage = run.owners[unit]
    names = [layer.name for layer in workload.profile.layers]
    places = [(device.node, device.type) for device in workload.cluster.devices]
    title = f"replica {replica}, stage {stage}" if len(plan.replicas) > 1 else f"stage {stage}"
    ranges = plan.replicas[replica].stages[stage].layers
    computes, communicates = spans(run, unit)
    return Row(
        title=f"device {run.devices[unit][0]}" if run.by_device else title,
        devices=devices_text(places, run.devices[unit]),
        layers="; ".join(names_text(names[first:last]) for first, last in ranges),
        computes=computes,
        communicates=communicates,
        busy=float(run.timeline.busy[unit]) / run.seconds if run.seconds else 0.0,
    )


def spans(run: Replay, unit: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """What the unit computes, and what it sends or joins in; sampled where all units' events are
    too many to draw."""
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
    if len(tasks) <= EXACT:
        return tuple(lanes[0]), tuple(lanes[1])
    return sampled(lanes[0], run.seconds), sampled(lanes[1], run.seconds)


def sampled(lane: Sequence[Span], seconds: float) -> tuple[Span, ...]:
    """At most BINS spans: of each part of the iteration what takes most of it, neighbours of one
    kind as one."""
    if not lane or seconds <= 0:
        return ()
    kinds = list(dict.fromkeys(span.kind for span in lane))
    share = np.zeros((len(kinds) + 1, BINS))
    width = seconds / BINS
    for span in lane:
        first, last = int(span.start / width), min(int(span.end / width), BINS - 1)
        for b in range(first, last + 1):
            inside = min(span.end, (b + 1) * width) - max(span.start, b * width)
            share[kinds.index(span.kind), b] += inside
    share[-1] = width - share[:-1].sum(axis=0)  # idle
    most = share.argmax(axis=0)
    ends = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), BINS]
    return tuple(
        Span(kinds[most[begin]], begin * width, end * width)
        for begin, end in pairwise(ends)
        if most[begin] < len(kinds)
    )


def memory(plan: Plan, run: Replay, workload: Workload) -> tuple[Held, ...]:
    """Memory and place of every device of the cluster."""
    place: dict[int, tuple[str, int | None]] = {}
    for unit, (replica, stage) in enumerate(run.owners):
        name = f"r{replica} s{stage}" if len(plan.replicas) > 1 else f"s{stage}"
        place |= dict.fromkeys(run.devices[unit], (name, unit))
    sizes = zip(workload.cluster.devices, run.peak_bytes, run.limit_bytes, strict=True)
    return tuple(
        Held(d, device.node, device.type, held, limit, *place.get(d, ("", None)))
        for d, (device, held, limit) in enumerate(sizes)
    )


def read(value: Any, where: str) -> tuple[Plan, list[Offer], int | None]:
    """The plan of a plan file; or of what `hetplan plan --json` prints the winner's, all candidates
    and the winner's number. Raises InputError."""
    if not isinstance(value, dict) or "candidates" not in value:
        return parse_plan(value, where=where), [], None
    document = parse(PlanningDocument, value, where=where)
    offers, winner = document.candidates, document.winner
    if winner is None or not 0 <= winner < len(offers):
        raise InputError("no winner to show", where=f"{where}: winner", got=winner)
    plan = parse_plan(offers[winner].plan, where=f"{where}: candidates[{winner}].plan")
    return plan, offers, winner
