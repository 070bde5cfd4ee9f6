"""A plan replayed on the simulator: seconds per iteration and memory per device, predicted from a
workload's profile.

Beyond the families' closed forms it counts: every micro-batch's transfers in their order, network
cards that ranks of a node share, gradients joined where they belong (layer by layer when replicas
are cut differently, tied embeddings across stages), and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.poplar.zero import States, communication
from hetplan.profiling.simulator.pipeline import Collective, Hops, simulate_replicas
from hetplan.profiling.simulator.pipeline import Replica as Pipeline
from hetplan.profiling.simulator.tasks import LABELS, Ints, Kind, Timeline
from hetplan.profiling.workload import Workload
from hetplan.runtime.costs import Costs, Floats, Traffic
from hetplan.runtime.memory import (
    Held,
    Owner,
    copied_bytes,
    memory,
    owners_of,
    saved_bytes,
    single_stage,
    stage_params,
    updated_part,
)
from hetplan.runtime.plan import Plan, Replica, Stage


@dataclass(frozen=True)
class Settings:
    """buckets: parts of the last backward pass that gradients leave in (1: no overlap). blocking:
    senders wait for their transfers."""

    buckets: int = 1
    blocking: bool = False


@dataclass(frozen=True)
class Replay:
    """timeline: of units, the stages of the first replica, then those of the second, … owners [U]:
    which. devices [U].
    Of an SPMD program the units are the devices of its only stage.

    peak_bytes [D]: what the allocator counts, 0 on unused devices. limit_bytes [D]: what they may
    hold. held [D]: the peak by component; empty for SPMD programs.
    """

    timeline: Timeline
    owners: tuple[Owner, ...]
    devices: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    held: tuple[Held, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds per iteration."""
        return self.timeline.seconds

    @property
    def by_device(self) -> bool:
        """Whether the units are devices of one stage that run one program, not stages."""
        return len(set(self.owners)) < len(self.owners)

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return all(
            held <= limit for held, limit in zip(self.peak_bytes, self.limit_bytes, strict=True)
        )


def replay(plan: Plan, workload: Workload, settings: Settings | None = None) -> Replay:
    """One iteration of the plan. Raises InputError unless plan and workload belong together,
    UnsupportedError for what is not modelled."""
    settings = settings or Settings()
    check_same(plan, workload)
    if plan.program is not None:
        return replay_program(plan, workload, settings)
    costs, zero = Costs(workload, plan.recomputation), ZeroCosts.of(plan, workload)
    timeline = simulate_replicas(*simulated(plan, costs, zero, settings))
    owners = [(i, j) for i, replica in enumerate(plan.replicas) for j in range(len(replica.stages))]
    held = memory(plan, costs, zero.divided, owners, timeline)
    return Replay(
        timeline,
        tuple(owners),
        tuple(tuple(plan.replicas[i].stages[j].all_devices) for i, j in owners),
        tuple(device.allocated for device in held),
        tuple(workload.device_bytes()[device.type] for device in workload.cluster.devices),
        held,
    )


def replay_program(plan: Plan, workload: Workload, settings: Settings) -> Replay:
    """One iteration of an SPMD program; every device is a unit of its own."""
    from hetplan.runtime.spmd_replay import SpmdCosts

    if settings != Settings():
        raise UnsupportedError(
            "collectives of SPMD programs stand where the program has them", where=plan.name,
            got="overlapped gradients or blocking senders", expected="neither",
        )  # fmt: skip
    costs, usable = SpmdCosts.of(plan, workload), workload.device_bytes()
    return Replay(
        costs.timeline(),
        ((0, 0),) * len(costs.devices),
        tuple((device,) for device in costs.devices),
        costs.peak_bytes(),
        tuple(usable[device.type] for device in workload.cluster.devices),
    )


def check_same(plan: Plan, workload: Workload) -> None:
    """Raise InputError unless the plan was made for such a model, cluster and batch."""
    layers = [layer.name for layer in workload.profile.layers]
    checks = (
        ("model", plan.workload.model, workload.model.name),
        ("global_batch", plan.workload.global_batch, workload.global_batch),
        ("sequence", plan.workload.sequence, workload.sequence),
        ("precision", plan.workload.precision, workload.precision),
        ("number of layers", len(plan.workload.layers), len(layers)),
        ("devices", [d.type for d in plan.devices], [d.type for d in workload.cluster.devices]),
        ("nodes", [d.node for d in plan.devices], [d.node for d in workload.cluster.devices]),
    )
    for name, of_plan, of_workload in checks:
        if of_plan != of_workload:
            raise InputError(
                f"{name} of the plan is not the workload's",
                where=plan.name,
                got=of_plan,
                expected=repr(of_workload),
            )


def simulated(
    plan: Plan, costs: Costs, zero: ZeroCosts, settings: Settings
) -> tuple[list[Pipeline], list[Collective]]:
    """What the simulator takes: every replica, and what they do together."""
    pipelines = [pipeline(plan, replica, costs, zero, settings) for replica in plan.replicas]
    return pipelines, [*gradient_collectives(plan, costs, settings), *zero.collectives(plan)]


def pipeline(
    plan: Plan, replica: Replica, costs: Costs, zero: ZeroCosts, settings: Settings
) -> Pipeline:
    """The replica's passes, transfers and updates as the simulator takes them."""
    S, C = len(replica.stages), len(replica.stages[0].layers)
    assert plan.schedule != "spmd", "programs are replayed apart"
    sizes = np.array([b.samples for b in replica.micro_batches])
    which = np.repeat(np.arange(len(sizes)), [b.count for b in replica.micro_batches])
    passes = np.array(
        [
            [[costs.passes(stage, stage.layers[c], int(n)) for n in sizes] for c in range(C)]
            for stage in replica.stages
        ]
    )
    saved = np.array(
        [[saved_bytes(stage, c, sizes, costs) for c in range(C)] for stage in replica.stages]
    )
    return Pipeline(
        stages=S,
        micro_batches=len(which),
        chunks=C,
        schedule=plan.schedule,
        forward=passes[:, :, which, 0],
        backward=passes[:, :, which, 1],
        optimizer=[zero.update_seconds(plan, stage, costs) for stage in replica.stages],
        saved_bytes=saved[:, :, which],
        hops=hops(replica, sizes, which, costs),
        blocking=settings.blocking,
    )


def hops(replica: Replica, sizes: Ints, which: Ints, costs: Costs) -> Hops:
    """Transfers between the replica's virtual stages."""
    S, C = len(replica.stages), len(replica.stages[0].layers)
    there, back = [], []  # [virtual stage][size]
    for v in range(S * C - 1):
        here, after = replica.stages[v % S], replica.stages[(v + 1) % S]
        layer = here.layers[v // S][1] - 1
        there.append([costs.transfer(here, after, layer, int(n)) for n in sizes])
        back.append([costs.transfer(after, here, layer, int(n)) for n in sizes])
    if not there:
        return Hops()
    return Hops(
        forward=np.array([[t.seconds for t in row] for row in there])[:, which],
        backward=np.array([[t.seconds for t in row] for row in back])[:, which],
        latency=[max(t.latency for t in row) for row in there],
        forward_ports=padded([max((t.cards for t in row), key=len) for row in there]),
        backward_ports=padded([max((t.cards for t in row), key=len) for row in back]),
    )


def padded(cards: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Rows of equal length, -1 where there is none."""
    width = max(map(len, cards))
    return [[*row, *[-1] * (width - len(row))] for row in cards]


def gradient_collectives(plan: Plan, costs: Costs, settings: Settings) -> list[Collective]:
    """All-reduces of the gradients of layers that several devices hold: ZeRO 0, and ZeRO 1 to 3 on
    pipelines.

    Layers with the same owners go together. ZeRO reduces and scatters first, and gathers after the
    update.
    """
    if plan.zero and single_stage(plan):
        return []
    by_owners: dict[tuple[Owner, ...], float] = {}
    for owners, size in shared_parts(plan, costs):
        by_owners[owners] = by_owners.get(owners, 0.0) + size
    joined = []
    for owners, size in by_owners.items():
        traffic = ring_of(plan, owners, size, costs)
        if traffic.seconds == 0:
            continue
        seconds = traffic.seconds / (2 if plan.zero else 1)
        joined.append(
            Collective(
                members=owners, seconds=seconds, ports=traffic.cards, buckets=settings.buckets
            )
        )
        if plan.zero:
            joined.append(replace(joined[-1], when="parameters", buckets=1))
    return joined


def shared_parts(plan: Plan, costs: Costs) -> Iterator[tuple[tuple[Owner, ...], float]]:
    """(who holds them, bytes) of all weights; tied weights in two stages have the holders of
    both."""
    for layer, described in enumerate(costs.workload.profile.layers):
        owners, copied = owners_of(plan, layer), copied_bytes(plan, layer, costs)
        yield tuple(owners), described.param_bytes
        if copied:
            first = owners_of(plan, 0)
            yield tuple(first), -copied  # the first layer's own, joined with the copies instead
            yield tuple(sorted({*first, *owners})), copied


def ring_of(plan: Plan, owners: Sequence[Owner], size: float, costs: Costs) -> Traffic:
    """Rings over the owners' row groups, one per tensor rank, each with its part of `size`
    bytes."""
    groups = [group for i, j in owners for group in plan.replicas[i].stages[j].devices]
    ranks = max(map(len, groups))
    rings = [[group[r * len(group) // ranks] for group in groups] for r in range(ranks)]
    return costs.ring(rings, size / ranks)


@dataclass(frozen=True)
class ZeroCosts:
    """Sharded states: shares [D] of each device, seconds of the collectives of a step and of an
    iteration."""

    shares: Floats
    per_step: float
    per_iteration: float
    sharded: bool

    @classmethod
    def of(cls, plan: Plan, workload: Workload) -> ZeroCosts:
        """Poplar's collectives over all devices in use, for replicas of one device each.

        In pipelines ZeRO 2 and 3 join gradients and gather weights once per iteration, as the
        runtime does (their ranks take no steps together): time and peak are those of ZeRO 1. Raises
        UnsupportedError for ZeRO 2 and 3 on replicas of one stage on several devices.
        """
        used = sorted(plan.ranks)
        shares = np.zeros(len(plan.devices))
        parts = plan.zero_shares or [1.0] * len(plan.devices)
        for device in used:
            shares[device] = parts[device] / sum(parts[d] for d in used)
        if plan.zero == 0 or not single_stage(plan):
            if plan.zero >= 2 and plan.in_step:
                raise UnsupportedError(
                    "ZeRO 2 and 3 are replayed for pipelines, and for replicas of one device each",
                    where=plan.name,
                    got=f"ZeRO {plan.zero} on replicas of one stage on several devices",
                    expected="ZeRO 0 or 1",
                )
            return cls(shares, 0.0, 0.0, False)
        spent = communication(
            States.of(workload), plan.zero, workload.cluster, shares[used], used, used
        )
        return cls(shares, spent.per_step, spent.per_iteration, True)

    @property
    def divided(self) -> Floats | None:
        """[D] each device's share of the states that the collectives divide; None without them."""
        return self.shares if self.sharded else None

    def collectives(self, plan: Plan) -> list[Collective]:
        """Of every step, and once after the update."""
        if not self.sharded or plan.world_size == 1:
            return []
        members = [(i, 0) for i in range(len(plan.replicas))]
        if plan.zero == 1:
            half = Collective(members=members, seconds=self.per_iteration / 2)
            return [half, replace(half, when="parameters")]
        joined = [Collective(members=members, seconds=self.per_step, when="step")]
        if self.per_iteration:
            joined.append(
                Collective(members=members, seconds=self.per_iteration, when="parameters")
            )
        return joined

    def update_seconds(self, plan: Plan, stage: Stage, costs: Costs) -> float:
        """The optimizer's step on the slowest device of a stage."""
        held, _ = stage_params(plan, stage, costs)
        return max(
            costs.update_seconds(d, held * updated_part(plan, stage, d, self.divided))
            for d in stage.all_devices
        )


COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
MICRO = 1e6  # seconds to microseconds


def trace(replayed: Replay) -> dict[str, Any]:
    """The replay as a trace; 2 row for computing, 2 row + 1 for communicating.

    A row is a stage, or of an SPMD program a device; its collectives stand on the first one's.
    """
    units = [(i, unit if replayed.by_device else j) for unit, (i, j) in enumerate(replayed.owners)]
    rows = []
    for (replica, row), devices in zip(units, replayed.devices, strict=True):
        names = ", ".join(map(str, devices))
        label = f"device {names}" if replayed.by_device else f"stage {row} (devices {names})"
        rows += [
            (replica, 2 * row, f"{label} computes"),
            (replica, 2 * row + 1, f"{label} communicates"),
        ]
    spans = []
    for event in replayed.timeline.events():
        (replica, row), kind = units[event["unit"]], event["kind"]
        name = kind if event["micro_batch"] < 0 else f"{kind} {event['micro_batch']}"
        place = (replica, 2 * row + (kind in COMMUNICATES))
        spans.append((*place, name, kind, event["start"], event["end"]))
    return trace_document(rows, spans)


def trace_document(
    rows: Iterable[tuple[int, int, str]],
    spans: Iterable[tuple[int, int, str, str, float, float]],
) -> dict[str, Any]:
    """The Trace Event Format, which chrome://tracing and Perfetto open.

    rows: (replica, number, label). spans: (replica, row, name, category, start, end) in seconds.
    """
    events: list[dict[str, Any]] = []
    for replica, row, label in rows:
        head = {"ph": "M", "pid": replica}
        events.append({**head, "name": "process_name", "args": {"name": f"replica {replica}"}})
        events.append({**head, "tid": row, "name": "thread_name", "args": {"name": label}})
    for replica, row, name, category, start, end in spans:
        times = {"ts": start * MICRO, "dur": (end - start) * MICRO}
        place = {"pid": replica, "tid": row}
        events.append({"name": name, "cat": category, "ph": "X", **times, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
