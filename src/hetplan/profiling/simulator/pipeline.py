"""Replicas of a pipeline and what they synchronise, as tasks, in the order of their schedules.

GPipe, 1F1B and interleaved 1F1B all warm up with some forward passes, then alternate one forward
with one backward, then drain; they differ in how long they warm up and in the order of model
chunks. GPipe: Huang et al. 2019; 1F1B: PipeDream-Flush, Narayanan et al. 2021 (ICML); interleaved:
Narayanan et al. 2021 (SC), Section 2.2.

A replica has S stages of C model chunks and takes M micro-batches. Its virtual stages v = c S + s
pass activations to v + 1 and gradients back; every stage works in the order of its schedule.
Collectives join stages of several replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hetplan.profiling.simulator.tasks import (
    NO_PORT,
    Floats,
    Ints,
    Kind,
    TaskList,
    Timeline,
    simulate,
)

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]


def warm_up(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> int:
    """Forward passes of a stage before its first backward pass."""
    passes = micro_batches * chunks
    if schedule == "gpipe":
        return passes
    if schedule == "1f1b":
        return min(stages - stage - 1, passes)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages, passes)


def order(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[Ints, Ints, Ints]:
    """(backward, chunk, micro_batch), each [2 C M]: what a stage does first, second, …

    backward is 0 or 1. Interleaved: micro_batches is a multiple of stages.
    """
    passes = np.arange(micro_batches * chunks)
    if schedule == "interleaved-1f1b":
        rounds, inside = np.divmod(passes, stages * chunks)
        chunk, place = np.divmod(inside, stages)
        batch = rounds * stages + place
    else:
        chunk, batch = np.divmod(passes, micro_batches)
    warm = warm_up(schedule, stages, stage, micro_batches, chunks)
    steady = len(passes) - warm
    forward_at = np.where(passes < warm, passes, warm + 2 * (passes - warm))
    backward_at = np.where(
        passes < steady, warm + 2 * passes + 1, 2 * steady + warm + (passes - steady)
    )
    at = np.concatenate([forward_at, backward_at])
    backward, chunk_of, batch_of = (np.empty(2 * len(passes), np.int64) for _ in range(3))
    backward[at] = np.repeat([0, 1], len(passes))
    chunk_of[at] = np.concatenate([chunk, chunks - 1 - chunk])
    batch_of[at] = np.concatenate([batch, batch])
    return backward, chunk_of, batch_of


When = Literal["step", "gradients", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Hops:
    """Transfers between virtual stages v and v + 1, H = S C - 1 of them.

    forward, backward [H, M]: seconds that one holds its ports. latency [H]: seconds until the
    receiver has it, beside. forward_ports, backward_ports [H, W]: such as the network cards'
    sending and receiving sides; NO_PORT for none.
    All are broadcast to these shapes.
    """

    forward: ArrayLike = 0.0
    backward: ArrayLike = 0.0
    latency: ArrayLike = 0.0
    forward_ports: ArrayLike = (NO_PORT,)
    backward_ports: ArrayLike = (NO_PORT,)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One pipeline. forward, backward [S, C, M]: seconds; optimizer [S]: seconds of the update.

    saved_bytes [S, C, M]: held from a forward pass until the end of its backward pass. blocking: a
    sender waits for its transfer before it goes on. All are broadcast to these shapes.
    """

    stages: int
    micro_batches: int
    chunks: int = 1
    schedule: Schedule = "1f1b"
    forward: ArrayLike
    backward: ArrayLike
    optimizer: ArrayLike = 0.0
    saved_bytes: ArrayLike = 0.0
    hops: Hops = field(default_factory=Hops)
    blocking: bool = False

    @cached_property
    def pass_seconds(self) -> Floats:
        """[S, 2, C, M] of forward and backward passes."""
        grid = (self.stages, self.chunks, self.micro_batches)
        both = (self.forward, self.backward)
        return np.stack([np.broadcast_to(np.asarray(a, float), grid) for a in both], axis=1)

    @cached_property
    def hop_seconds(self) -> Floats:
        """[2, H, M] of transfers of activations and of gradients, without their latency."""
        grid = (max(self.stages * self.chunks - 1, 0), self.micro_batches)
        both = (self.hops.forward, self.hops.backward)
        return np.stack([np.broadcast_to(np.asarray(a, float), grid) for a in both])

    @cached_property
    def hop_latency(self) -> Floats:
        """[H] seconds until a receiver has what was sent."""
        return np.broadcast_to(np.asarray(self.hops.latency, float), self.hop_seconds.shape[1:2])

    @cached_property
    def hop_ports(self) -> tuple[Ints, Ints]:
        """[H, W] ports that transfers of activations hold, and of gradients; NO_PORT for none."""
        there, back = (
            np.asarray(ports, np.int64)
            for ports in (self.hops.forward_ports, self.hops.backward_ports)
        )
        hops = self.hop_seconds.shape[1]
        return (
            np.broadcast_to(there, (hops, there.shape[-1])),
            np.broadcast_to(back, (hops, back.shape[-1])),
        )


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What `members` (replica, stage) do together, `seconds` long.

    when: "gradients" after the members' last backward passes; "parameters" after their updates;
    "step" after every backward pass, before the next forward pass (ZeRO 2 and 3, replicas of one
    stage). buckets: of "gradients": the last backward pass gives its gradients in that many equal
    parts, and a part is on its way while the next is computed; 1: no overlap. overlap: of "step":
    the next step's passes begin meanwhile, and only the one after waits. ports: held meanwhile,
    such as the network card that several collectives share.
    """

    members: Sequence[tuple[int, int]]
    seconds: float
    when: When = "gradients"
    buckets: int = 1
    overlap: bool = False
    ports: Sequence[int] = ()


@dataclass(frozen=True)
class _Placed:
    """Numbers of a replica's tasks: passes [S, 2, C, M], sequence [S][2 C M], last [S], first_unit,
    updates [S]."""

    passes: Ints
    sequence: Ints
    last: Ints
    unit: int
    updates: Ints


def simulate_replicas(
    replicas: Sequence[Replica], collectives: Sequence[Collective] = ()
) -> Timeline:
    """One iteration. Units: the stages of the first replica, then those of the second, …"""
    tasks = TaskList()
    placed: list[_Placed] = []
    unit = 0
    for i, replica in enumerate(replicas):
        buckets = [
            max(
                (c.buckets for c in collectives if c.when == "gradients" and (i, s) in c.members),
                default=1,
            )
            for s in range(replica.stages)
        ]
        placed.append(_place(tasks, replica, unit, buckets))
        unit += replica.stages
    for collective in collectives:
        _join(tasks, collective, placed)
    return simulate(tasks.build(unit))


def _place(tasks: TaskList, replica: Replica, unit: int, buckets: Sequence[int]) -> _Placed:
    """Passes, transfers and updates of one replica, in order."""
    S, C, M = replica.stages, replica.chunks, replica.micro_batches
    units = unit + np.arange(S)
    grid = (S, C, M)
    seconds = replica.pass_seconds
    saved = np.broadcast_to(np.asarray(replica.saved_bytes, float), grid)
    kinds = np.array([Kind.FORWARD, Kind.BACKWARD])[None, :, None, None]
    nothing = np.zeros(grid)
    shares = np.ones((S, 2, C, M))
    # the last backward pass gives up all parts but its first
    shares[np.arange(S), 1, 0, M - 1] /= buckets
    passes = tasks.add(
        (S, 2, C, M),
        kind=kinds,
        unit=units[:, None, None, None],
        seconds=seconds * shares,
        chunk=np.arange(C)[None, None, :, None],
        micro_batch=np.arange(M)[None, None, None, :],
        takes=np.stack([saved, nothing], axis=1),
        gives=np.stack([nothing, saved], axis=1),
    )
    sequence = np.empty((S, 2 * C * M), np.int64)
    for s in range(S):
        backward, chunk, batch = order(replica.schedule, S, s, M, C)
        sequence[s] = passes[s, backward, chunk, batch]
    tasks.order(sequence[:, :-1], sequence[:, 1:])
    done = passes.copy()  # what a task behind a pass waits for: the pass, or its last part
    last = np.empty((S, max(buckets)), np.int64)
    for s in range(S):
        last[s] = _parts(
            tasks,
            sequence[s, -1],
            buckets[s],
            float(seconds[s, 1, 0, M - 1]),
            int(units[s]),
            M - 1,
            last.shape[1],
        )
        done[s, 1, 0, M - 1] = last[s, -1]
    if C * S > 1:
        _transfers(tasks, replica, passes, done, sequence, units)
    updates = tasks.add((S,), kind=Kind.OPTIMIZER, unit=units, seconds=replica.optimizer)
    tasks.order(last[:, -1], updates)
    return _Placed(passes, sequence, last, unit, updates)


def _parts(
    tasks: TaskList, first: int, parts: int, seconds: float, unit: int, batch: int, width: int
) -> Ints:
    """The task `first` and the other parts of the last backward pass; the last one repeated up to
    `width`."""
    numbers = np.array([first], np.int64)
    if parts > 1:
        rest = tasks.add(
            (parts - 1,),
            kind=Kind.BACKWARD,
            unit=unit,
            seconds=seconds / parts,
            chunk=0,
            micro_batch=batch,
        )
        numbers = np.concatenate([numbers, rest])
        tasks.order(numbers[:-1], numbers[1:])
    return np.concatenate([numbers, np.full(width - len(numbers), numbers[-1])])


def _transfers(
    tasks: TaskList, replica: Replica, passes: Ints, done: Ints, sequence: Ints, units: Ints
) -> None:
    """Activations forward and gradients backward between virtual stages."""
    S, C, M = replica.stages, replica.chunks, replica.micro_batches
    virtual = np.arange(S * C)
    stage, chunk = virtual % S, virtual // S
    following = _following(sequence, replica)
    sides = (
        (0, virtual[:-1], virtual[1:]),
        (1, virtual[1:], virtual[:-1]),
    )
    for side, source, target in sides:
        numbers = tasks.add(
            (S * C - 1, M),
            kind=Kind.TRANSFER,
            unit=units[stage[source]][:, None],
            seconds=replica.hop_seconds[side],
            delay=replica.hop_latency[:, None],
            ports=replica.hop_ports[side][:, None, :],
            chunk=chunk[source][:, None],
            micro_batch=np.arange(M)[None, :],
        )
        tasks.order(done[stage[source], side, chunk[source]], numbers)
        tasks.order(numbers, passes[stage[target], side, chunk[target]])
        if replica.blocking:
            waiting = following[stage[source], side, chunk[source]]
            tasks.order(numbers[waiting >= 0], waiting[waiting >= 0])


def _following(sequence: Ints, replica: Replica) -> Ints:
    """[S, 2, C, M] the pass that a stage does next, -1 after the last; by the passes' own
    numbers."""
    S, C, M = replica.stages, replica.chunks, replica.micro_batches
    base = int(sequence.min())
    following = np.full(S * 2 * C * M, -1, np.int64)
    following[(sequence[:, :-1] - base).ravel()] = sequence[:, 1:].ravel()
    return following.reshape(S, 2, C, M)


def _join(tasks: TaskList, collective: Collective, placed: Sequence[_Placed]) -> None:
    """One collective: between what its members do before and after it."""
    chosen = [(placed[i], s) for i, s in collective.members]
    first, stage = chosen[0]
    options: dict[str, Any] = {
        "kind": Kind.COLLECTIVE,
        "unit": first.unit + stage,
        "ports": collective.ports,
    }
    if collective.when == "step":
        _join_steps(tasks, collective, chosen, options)
        return
    if collective.when == "parameters":
        number = tasks.add((1,), seconds=collective.seconds, **options)
        for replica, s in chosen:
            tasks.order(replica.updates[s], number)
        return
    parts = collective.buckets
    numbers = tasks.add((parts,), seconds=collective.seconds / parts, **options)
    tasks.order(numbers[:-1], numbers[1:])
    for replica, s in chosen:
        ends = replica.last[s]
        # Part p of this collective needs the share (p + 1) / parts of the last backward pass.
        own = len(np.unique(ends))
        needed = np.ceil(np.arange(1, parts + 1) * own / parts).astype(int) - 1
        tasks.order(ends[needed], numbers)
        tasks.order(numbers[-1], replica.updates[s])


def _join_steps(
    tasks: TaskList,
    collective: Collective,
    chosen: Sequence[tuple[_Placed, int]],
    options: dict[str, Any],
) -> None:
    """A collective behind every micro-batch; replicas of one stage that take equally many."""
    steps = {replica.passes.shape[-1] for replica, _ in chosen}
    alone = all(len(replica.passes) == 1 and replica.passes.shape[2] == 1 for replica, _ in chosen)
    if len(steps) != 1 or not alone:
        raise ValueError(
            "a collective of every step joins replicas of one stage with equally many micro-batches"
        )
    count = steps.pop()
    numbers = tasks.add(
        (count,), seconds=collective.seconds, micro_batch=np.arange(count), **options
    )
    tasks.order(numbers[:-1], numbers[1:])
    ahead = 2 if collective.overlap else 1
    for replica, s in chosen:
        tasks.order(replica.passes[s, 1, 0], numbers)
        tasks.order(numbers[:-ahead], replica.passes[s, 0, 0, ahead:])
        tasks.order(numbers[-1], replica.updates[s])


def simulate_stages(
    compute: Floats,
    together: Sequence[float],
    *,
    backward: Sequence[bool] | None = None,
    runs: Sequence[int] | None = None,
    updates: Sequence[float] | None = None,
) -> Timeline:
    """An SPMD programme: stage i is compute[i] [m] seconds on m devices, then together[i] seconds
    of all (0: none).

    backward, runs [stages]: which pass and which run of the program a stage is of. updates [m]: the
    optimizer's seconds on each device behind all. A device goes on behind its own work where no
    collective follows.
    """
    stages, devices = compute.shape
    tasks = TaskList()
    units = np.arange(devices)
    which = np.asarray(backward if backward is not None else [False] * stages)
    batch = np.asarray(runs if runs is not None else [-1] * stages, np.int64)
    chunk = np.arange(stages)
    work = tasks.add(
        (stages, devices),
        kind=np.where(which, int(Kind.BACKWARD), int(Kind.FORWARD))[:, None],
        unit=units[None, :],
        seconds=compute,
        chunk=chunk[:, None],
        micro_batch=batch[:, None],
    )
    join = np.asarray(together, float) > 0
    joint = tasks.add(
        (int(join.sum()),), kind=Kind.COLLECTIVE, unit=0, seconds=np.asarray(together, float)[join],
        chunk=chunk[join], micro_batch=batch[join],
    )  # fmt: skip
    tasks.order(work[join], joint[:, None])
    later = join[:-1]
    tasks.order(joint[: int(later.sum()), None], work[1:][later])
    tasks.order(work[:-1][~later], work[1:][~later])
    if updates is not None:
        last = tasks.add((devices,), kind=Kind.OPTIMIZER, unit=units, seconds=updates)
        tasks.order(np.broadcast_to(joint[-1:], (devices,)) if join[-1] else work[-1], last)
    return simulate(tasks.build(devices))
