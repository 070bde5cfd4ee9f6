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
from typing import Literal

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
            np.broadcast_to(
                np.asarray(ports, np.int64), (len(self.hop_latency), np.shape(ports)[-1])
            )
            for ports in (self.hops.forward_ports, self.hops.backward_ports)
        )
        return there, back


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What `members` (replica, stage) do together, `seconds` long.

    when: "gradients" after the members' last backward passes; "parameters" after their updates;
    "step" after every backward pass, before the next forward pass (ZeRO 2 and 3, replicas of one
    stage). buckets: of "gradients", else 1: the last backward pass gives its gradients in that many
    equal parts, and a part is on its way while the next is computed; 1: no overlap. overlap: of
    "step": the next step's passes begin meanwhile, and only the one after waits. ports: held
    meanwhile, such as the network card that several collectives share.
    """

    members: Sequence[tuple[int, int]]
    seconds: float
    when: When = "gradients"
    buckets: int = 1
    overlap: bool = False
    ports: Sequence[int] = ()


@dataclass(frozen=True)
class _Placed:
    """Numbers of a replica's tasks: passes [S, 2, C, M]; of every stage the parts of its last
    backward pass; updates [S]. units [S]: of the stages."""

    units: Ints
    passes: Ints
    last_parts: list[Ints]
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
            max((c.buckets for c in collectives if (i, s) in c.members), default=1)
            for s in range(replica.stages)
        ]
        placed.append(_place(tasks, replica, unit, buckets))
        unit += replica.stages
    for collective in collectives:
        _join(tasks, collective, [(placed[i], s) for i, s in collective.members])
    return simulate(tasks.build(unit))


def _place(tasks: TaskList, replica: Replica, unit: int, buckets: Sequence[int]) -> _Placed:
    """Passes, transfers and updates of one replica, in order."""
    S, C, M = replica.stages, replica.chunks, replica.micro_batches
    units = unit + np.arange(S)
    seconds = replica.pass_seconds.copy()
    seconds[:, 1, 0, -1] *= 1 / np.asarray(buckets)  # its other parts are tasks of their own
    takes, gives = np.zeros((2, *seconds.shape))
    takes[:, 0] = gives[:, 1] = replica.saved_bytes
    passes = tasks.add(
        seconds.shape,
        kind=np.array([Kind.FORWARD, Kind.BACKWARD])[:, None, None],
        unit=units[:, None, None, None],
        seconds=seconds,
        chunk=np.arange(C)[:, None],
        micro_batch=np.arange(M),
        takes=takes,
        gives=gives,
    )
    following = np.full(passes.shape, -1)  # the pass that the stage does next
    done = passes.copy()  # what a task behind a pass waits for: the pass, or its last part
    last_parts = []
    for s in range(S):
        backward, chunk, batch = order(replica.schedule, S, s, M, C)
        sequence = passes[s, backward, chunk, batch]
        tasks.order(sequence[:-1], sequence[1:])
        following[s, backward[:-1], chunk[:-1], batch[:-1]] = sequence[1:]
        last_parts.append(sequence[-1:])
        if buckets[s] > 1:
            rest = tasks.add(
                (buckets[s] - 1,),
                kind=Kind.BACKWARD,
                unit=units[s],
                seconds=replica.pass_seconds[s, 1, 0, -1] / buckets[s],
                chunk=0,
                micro_batch=M - 1,
            )
            last_parts[s] = np.append(sequence[-1], rest)
            tasks.order(last_parts[s][:-1], rest)
            done[s, 1, 0, -1] = rest[-1]
    _transfer(tasks, replica, units, passes, done, following)
    updates = tasks.add((S,), kind=Kind.OPTIMIZER, unit=units, seconds=replica.optimizer)
    tasks.order(done[:, 1, 0, -1], updates)
    return _Placed(units, passes, last_parts, updates)


def _transfer(
    tasks: TaskList, replica: Replica, units: Ints, passes: Ints, done: Ints, following: Ints
) -> None:
    """Activations forward and gradients backward between virtual stages."""
    S, M = replica.stages, replica.micro_batches
    chunk, stage = np.divmod(np.arange(S * replica.chunks), S)
    here, behind = slice(None, -1), slice(1, None)
    for side, source, target in ((0, here, behind), (1, behind, here)):
        numbers = tasks.add(
            (len(stage) - 1, M),
            kind=Kind.TRANSFER,
            unit=units[stage[source]][:, None],
            seconds=replica.hop_seconds[side],
            delay=replica.hop_latency[:, None],
            ports=replica.hop_ports[side][:, None, :],
            chunk=chunk[source][:, None],
            micro_batch=np.arange(M),
        )
        tasks.order(done[stage[source], side, chunk[source]], numbers)
        tasks.order(numbers, passes[stage[target], side, chunk[target]])
        if replica.blocking:
            waiting = following[stage[source], side, chunk[source]]
            tasks.order(numbers[waiting >= 0], waiting[waiting >= 0])


def _join(tasks: TaskList, collective: Collective, members: Sequence[tuple[_Placed, int]]) -> None:
    """One collective: between what its members do before and after it."""
    first, stage = members[0]
    when, steps = collective.when, first.passes.shape[-1]
    if when == "step" and {r.passes.shape for r, _ in members} != {(1, 2, 1, steps)}:
        raise ValueError(
            "a collective of every step joins replicas of one stage with equally many micro-batches"
        )
    numbers = tasks.add(
        (steps if when == "step" else collective.buckets,),
        kind=Kind.COLLECTIVE,
        unit=first.units[stage],
        seconds=collective.seconds / collective.buckets,
        ports=collective.ports,
        micro_batch=np.arange(steps) if when == "step" else -1,
    )
    tasks.order(numbers[:-1], numbers[1:])
    for replica, s in members:
        if when == "parameters":
            tasks.order(replica.updates[s], numbers)
            continue
        if when == "step":
            ahead = 2 if collective.overlap else 1
            tasks.order(replica.passes[s, 1, 0], numbers)
            tasks.order(numbers[:-ahead], replica.passes[s, 0, 0, ahead:])
        else:
            # Part p of this collective needs the share (p + 1) / parts of the last backward pass.
            own, parts = replica.last_parts[s], len(numbers)
            needed = np.ceil(np.arange(1, parts + 1) * len(own) / parts).astype(int) - 1
            tasks.order(own[needed], numbers)
        tasks.order(numbers[-1], replica.updates[s])


def simulate_stages(
    compute: Floats,
    together: Sequence[float],
    *,
    backward: ArrayLike = False,
    runs: ArrayLike = -1,
    updates: ArrayLike = 0.0,
) -> Timeline:
    """An SPMD programme: stage i is compute[i] [m] seconds on m devices, then together[i] seconds
    of all (0: none).

    backward, runs [stages]: which pass and which run of the program a stage is of. updates [m]: the
    optimizer's seconds on each device behind all. A device goes on behind its own work where no
    collective follows.
    """
    stages, devices = compute.shape
    tasks = TaskList()
    chunk, batch = np.arange(stages), np.broadcast_to(runs, stages)
    work = tasks.add(
        (stages, devices),
        kind=np.where(np.broadcast_to(backward, stages), Kind.BACKWARD, Kind.FORWARD)[:, None],
        unit=np.arange(devices),
        seconds=compute,
        chunk=chunk[:, None],
        micro_batch=batch[:, None],
    )
    seconds = np.asarray(together, float)
    joined = seconds > 0
    joints = tasks.add(
        seconds[joined].shape,
        kind=Kind.COLLECTIVE,
        unit=0,
        seconds=seconds[joined],
        chunk=chunk[joined],
        micro_batch=batch[joined],
    )
    update = tasks.add((devices,), kind=Kind.OPTIMIZER, unit=np.arange(devices), seconds=updates)
    tasks.order(work[joined], joints[:, None])
    after = np.vstack([work[1:], update])
    tasks.order(joints[:, None], after[joined])
    tasks.order(work[~joined], after[~joined])
    return simulate(tasks.build(devices))
