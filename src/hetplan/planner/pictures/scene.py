"""What a picture of a plan shows, without saying how: rows of a timeline, memory, placement,
candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetplan.errors import InputError
from hetplan.planner.candidate import Candidate
from hetplan.profiling.simulator.tasks import Kind
from hetplan.profiling.simulator.timeline import LABELS
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, parse_plan
from hetplan.runtime.replay import Replay
from hetplan.text import devices_text, names_text

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
ROWS = 96  # of a timeline; more cannot be read
EXACT = 6000  # events that are drawn one by one; beyond that many the timeline is sampled
BINS = 1200


@dataclass(frozen=True)
class Span:
    """One thing that a unit does. batch: the micro-batch's number, -1 where there is none or
    several are one."""

    kind: str
    start: float
    end: float
    batch: int = -1


@dataclass(frozen=True)
class Row:
    """A unit of the timeline: what it computes, and what it sends. busy: share of the iteration
    that it computes."""

    title: str
    devices: str
    layers: str
    computes: tuple[Span, ...]
    communicates: tuple[Span, ...]
    busy: float


@dataclass(frozen=True)
class Held:
    """A device's memory, in bytes. place: `r0 s3`, empty where the device is idle. unit: number of
    its row."""

    device: int
    node: int
    kind: str
    held: float
    limit: float
    place: str
    unit: int | None


@dataclass(frozen=True)
class Offer:
    """A candidate. seconds: predicted; objective, bound: of its own problem; what is not known is
    None."""

    name: str
    status: str
    seconds: float | None
    closed_form: float | None
    bound: float | None
    money: float | None
    fits: bool
    winner: bool


@dataclass(frozen=True)
class Scene:
    """Everything. rows: at most ROWS of all `units`. offers: empty where the file has only its own
    plan."""

    title: str
    subtitle: str
    seconds: float
    bubble: float
    rows: tuple[Row, ...]
    units: int
    devices: tuple[Held, ...]
    nodes: tuple[str, ...]
    offers: tuple[Offer, ...]


def scene(plan: Plan, found: Replay, workload: Workload, offers: Sequence[Offer] = ()) -> Scene:
    """The picture's content; found: the plan replayed on the workload."""
    rows = tuple(row(plan, found, workload, unit) for unit in range(min(len(found.owners), ROWS)))
    batches = plan.replicas[0].micro_batches[0]
    subtitle = (
        f"{len(plan.replicas)} replica{'s' if len(plan.replicas) > 1 else ''} of "
        f"{len(plan.replicas[0].stages)} stage{'s' if len(plan.replicas[0].stages) > 1 else ''}, "
        f"micro-batches of {batches.samples}, {plan.schedule}, ZeRO {plan.zero}, "
        f"recomputation {plan.recomputation}; {plan.origin or 'by hand'}"
    )
    return Scene(
        title=plan.name,
        subtitle=subtitle,
        seconds=found.seconds,
        bubble=found.timeline.bubble,
        rows=rows,
        units=len(found.owners),
        devices=held(plan, found, workload),
        nodes=tuple(node_text(workload, n) for n in range(len(workload.cluster.nodes))),
        offers=tuple(offers),
    )


def row(plan: Plan, found: Replay, workload: Workload, unit: int) -> Row:
    """One unit's row."""
    replica, stage = found.owners[unit]
    ranges = plan.replicas[replica].stages[stage].layers
    names = [layer.name for layer in workload.profile.layers]
    places = [(device.node, device.type) for device in workload.cluster.devices]
    computes, communicates = spans(found, unit)
    return Row(
        title=title_of(plan, found, unit),
        devices=devices_text(places, found.devices[unit]),
        layers="; ".join(names_text(names[first:last]) for first, last in ranges),
        computes=computes,
        communicates=communicates,
        busy=float(found.timeline.busy[unit]) / found.seconds if found.seconds else 0.0,
    )


def title_of(plan: Plan, found: Replay, unit: int) -> str:
    """The stage, or the device of an SPMD program."""
    replica, stage = found.owners[unit]
    if found.by_device:
        return f"device {found.devices[unit][0]}"
    return f"replica {replica}, stage {stage}" if len(plan.replicas) > 1 else f"stage {stage}"


def spans(found: Replay, unit: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """What the unit computes, and what it sends or joins in; sampled where all units' events are
    too many to draw."""
    tasks, timeline = found.timeline.tasks, found.timeline
    own = tasks.unit == unit
    if found.by_device:
        own |= tasks.kind == int(Kind.COLLECTIVE)  # of all devices
    of = np.flatnonzero(own & (timeline.end > timeline.start))
    exact = len(tasks) <= EXACT
    lanes: tuple[list[Span], list[Span]] = ([], [])
    for i in of[np.argsort(timeline.start[of], kind="stable")]:
        kind = LABELS[Kind(int(tasks.kind[i]))]
        span = Span(
            kind, float(timeline.start[i]), float(timeline.end[i]), int(tasks.micro_batch[i])
        )
        lanes[kind in COMMUNICATES].append(span)
    if exact:
        return tuple(lanes[0]), tuple(lanes[1])
    return sampled(lanes[0], found.seconds), sampled(lanes[1], found.seconds)


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
        k = kinds.index(span.kind)
        for b in range(first, last + 1):
            share[k, b] += min(span.end, (b + 1) * width) - max(span.start, b * width)
    share[-1] = width - share[:-1].sum(axis=0)  # idle
    chosen = share.argmax(axis=0)
    found: list[Span] = []
    begin = 0
    for b in range(1, BINS + 1):
        if b == BINS or chosen[b] != chosen[begin]:
            if chosen[begin] < len(kinds):
                found.append(Span(kinds[chosen[begin]], begin * width, b * width))
            begin = b
    return tuple(found)


def held(plan: Plan, found: Replay, workload: Workload) -> tuple[Held, ...]:
    """Memory and place of every device of the cluster."""
    place: dict[int, tuple[str, int]] = {}
    for unit, ((replica, stage), devices) in enumerate(
        zip(found.owners, found.devices, strict=True)
    ):
        for device in devices:
            place[device] = (
                f"r{replica} s{stage}" if len(plan.replicas) > 1 else f"s{stage}",
                unit,
            )
    return tuple(
        Held(
            d,
            device.node,
            device.type,
            found.peak_bytes[d],
            found.limit_bytes[d],
            place[d][0] if d in place else "",
            place[d][1] if d in place else None,
        )
        for d, device in enumerate(workload.cluster.devices)
    )


def node_text(workload: Workload, number: int) -> str:
    """`node 0: 170 Gbit/s inside, 10 Gbit/s to others`."""
    node = workload.cluster.nodes[number]
    inside, outside = node.intra_bandwidth * 8e-9, node.network_bandwidth * 8e-9
    return f"node {number}: {inside:.4g} Gbit/s inside, {outside:.4g} Gbit/s to others"


def offers_of(
    candidates: Sequence[Candidate], workload: Workload, winner: int | None
) -> list[Offer]:
    """Of a ranking."""
    return [
        Offer(
            c.name,
            c.status,
            c.predicted_seconds,
            c.closed_form_seconds,
            c.bound,
            c.money_per_million_tokens(workload),
            c.fits_memory is True,
            i == winner,
        )
        for i, c in enumerate(candidates)
    ]


def read(value: Any, where: str) -> tuple[Plan, list[Offer]]:
    """The plan of a plan file, or the winner's and all candidates of what `hetplan plan --json`
    prints."""
    if not isinstance(value, Mapping) or "candidates" not in value:
        return parse_plan(value, where=where), []
    winner, candidates = value.get("winner"), value["candidates"]
    if (
        not isinstance(candidates, list)
        or not isinstance(winner, int)
        or not 0 <= winner < len(candidates)
    ):
        raise InputError("no winner to show", where=f"{where}: winner", got=winner)
    offers = [offer(c, f"{where}: candidates[{i}]", i == winner) for i, c in enumerate(candidates)]
    return parse_plan(
        candidates[winner].get("plan"), where=f"{where}: candidates[{winner}].plan"
    ), offers


def offer(value: Any, where: str, winner: bool) -> Offer:
    """A candidate of a planning document; raises InputError for what is none."""
    if not isinstance(value, Mapping):
        raise InputError("not an object", where=where, got=value)

    def number(key: str) -> float | None:
        entry = value.get(key)
        if entry is None:
            return None
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 <= entry < 1e30:
            raise InputError(
                "not usable",
                where=f"{where}.{key}",
                got=entry,
                expected="a number from 0 on, or null",
            )
        return float(entry)

    return Offer(
        name=f"{value.get('strategy')}/{value.get('method')}"[:200],
        status=str(value.get("status"))[:40],
        seconds=number("predicted_seconds"),
        closed_form=number("closed_form_seconds"),
        bound=number("bound"),
        money=number("money_per_million_tokens"),
        fits=value.get("fits_memory") is True,
        winner=winner,
    )
