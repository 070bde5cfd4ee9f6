"""Replicas of a pipeline and what they synchronise, as tasks, in the order of their schedules.

GPipe, 1F1B and interleaved 1F1B all warm up with some forward passes, then alternate one forward
with one backward, then drain; they differ in how long they warm up and in the order of model
chunks. GPipe: Huang et al. 2019; 1F1B: PipeDream-Flush, Narayanan et al. 2021 (ICML); interleaved:
Narayanan et al. 2021 (SC), Section 2.2.

A replica has S stages of C model chunks and takes M micro-batches. Its virtual stages v = c S + s
pass activations to v + 1 and gradients back; every stage works in the order of its schedule.
Collectives join stages of several replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hetplan.profiling.simulator.tasks import (
    Floats,
    Ints,
    Kind,
    Ports,
    TaskList,
    Tasks,
    Timeline,
    Traffic,
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
Sends = Literal["asynchronous", "waiting", "blocking", "rendezvous"]
LATE: tuple[Sends, ...] = ("waiting", "rendezvous")  # a message waits for its receiver
HELD: tuple[Sends, ...] = ("blocking", "rendezvous")  # a sender waits for its message
NOTHING = Traffic()


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One pipeline. forward, backward, saved_bytes [S, C, B]: seconds of a pass, and bytes kept
    from a forward pass until the end of its backward pass, of each kind of micro-batch. kinds [M]:
    which of them every micro-batch is; None: B = M, all different. optimizer [S]: seconds of the
    update. These are broadcast to their shapes.

    hops [2][H][B]: activations from virtual stage h to h + 1, and gradients back; H = S C - 1, ():
    they take no time. reduces [2][S][C][B]: what the tensor ranks of a stage do together in forward
    and backward passes, behind their computation; (): nothing.

    sends: `asynchronous`: a message leaves when it is made, and its sender goes on. `waiting`: it
    leaves when its receiver has also finished the pass before the one that needs it. `blocking`:
    as asynchronous, but the sender goes on when the message is sent. `rendezvous`: both wait.
    exchange_seconds: of the host, for each message that a pass needs or makes, at both ends.
    """

    stages: int
    micro_batches: int
    chunks: int = 1
    schedule: Schedule = "1f1b"
    sends: Sends = "asynchronous"
    exchange_seconds: float = 0.0
    forward: ArrayLike
    backward: ArrayLike
    kinds: Ints | None = None
    optimizer: ArrayLike = 0.0
    saved_bytes: ArrayLike = 0.0
    hops: Sequence[Sequence[Sequence[Traffic]]] = ()
    reduces: Sequence[Sequence[Sequence[Sequence[Traffic]]]] = ()

    @cached_property
    def kind(self) -> Ints:
        """[M] which kind every micro-batch is."""
        return np.arange(self.micro_batches) if self.kinds is None else self.kinds

    def _by_micro_batch(self, values: ArrayLike) -> Floats:
        """[S, C, M] of values by kind."""
        shape = (self.stages, self.chunks, int(self.kind.max()) + 1)
        table: Floats = np.asarray(values, float)
        if table.shape != shape:
            table = np.broadcast_to(table, shape)
        return np.asarray(table.take(self.kind, axis=-1))

    @cached_property
    def pass_seconds(self) -> Floats:
        """[S, 2, C, M] of forward and backward passes with the host's part of their exchanges,
        without what tensor ranks do together."""
        both = (self.forward, self.backward)
        place = np.arange(self.stages * self.chunks).reshape(self.chunks, self.stages).T
        exchanges = 2 - (place == 0) - (place == self.stages * self.chunks - 1).astype(int)
        host: Floats = self.exchange_seconds * exchanges[:, None, :, None]
        seconds: Floats = np.stack([self._by_micro_batch(values) for values in both], axis=1)
        return np.asarray(seconds + host)

    def hop(self, side: int, hop: int, batch: int) -> Traffic:
        """The message of a micro-batch; side 0: its activation, 1: its gradient."""
        return self.hops[side][hop][self.kind[batch]] if self.hops else NOTHING

    def reduce(self, side: int, stage: int, chunk: int, batch: int) -> Traffic:
        """What tensor ranks do together in a pass."""
        return self.reduces[side][stage][chunk][self.kind[batch]] if self.reduces else NOTHING

    @property
    def peak_bytes(self) -> Floats:
        """[S] the most that a stage keeps at once; what ends as something begins ends first."""
        saved, peaks = self._by_micro_batch(self.saved_bytes), np.zeros(self.stages)
        for s in range(self.stages):
            shape = (self.schedule, self.stages, s, self.micro_batches, self.chunks)
            backward, chunk, batch = order(*shape)
            each = saved[s, chunk, batch]
            held = np.cumsum(np.where(backward, -each, each))
            peaks[s] = held[backward == 0].max(initial=0.0)
        return peaks


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What `members` (replica, stage) do together, `seconds` long.

    when: "gradients" after the members' last backward passes; "parameters" after their updates;
    "step" after every backward pass, before the next pass (ZeRO 2 and 3, replicas of one stage).
    buckets: of "gradients", else 1: the last backward pass gives its gradients in that many equal
    parts, and a part is on its way while the next is computed; 1: no overlap. ports: held
    meanwhile, such as the network card that several collectives share.
    """

    members: Sequence[tuple[int, int]]
    seconds: float
    when: When = "gradients"
    buckets: int = 1
    ports: Ports = ()


@dataclass(frozen=True)
class _Shape:
    """The tasks of replicas of one shape, numbered from 0: passes [S, 2, C, M], what tensor ranks
    do together [the same, or none], transfers [2, H, M], the further parts of last backward passes,
    updates [S].

    ends [S, 2, C, M]: the last task of each pass. parts: the last backward pass of every stage, in
    parts. owner: (kind, unit, chunk, micro_batch) [T]. order: (before, after) [E].
    """

    ends: Ints
    parts: tuple[Ints, ...]
    updates: Ints
    owner: tuple[Ints, ...]
    order: tuple[Ints, Ints]


def _shape(replica: Replica, buckets: tuple[int, ...]) -> _Shape:
    """Large ones are not kept in memory."""
    S, C, M = replica.stages, replica.chunks, replica.micro_batches
    make = _kept_shape if S * C * M <= 4096 else _new_shape
    return make(replica.schedule, S, C, M, replica.sends, bool(replica.reduces), buckets)


def _new_shape(
    schedule: Schedule, S: int, C: int, M: int, sends: Sends, reduces: bool, buckets: Sequence[int]
) -> _Shape:
    tasks, grid = TaskList(), (S, 2, C, M)
    unit, chunk, batch = np.ogrid[:S, :C, :M]
    kind = np.array([Kind.FORWARD, Kind.BACKWARD])[:, None, None]
    owner = {"unit": unit[:, None], "chunk": chunk, "micro_batch": batch[0]}
    passes = tasks.add(grid, kind=kind, seconds=0.0, **owner)
    ends = tasks.add(grid, kind=kind, seconds=0.0, **owner) if reduces else passes.copy()
    stage, chunk_of = np.arange(S * C) % S, np.arange(S * C) // S
    ways = ((0, slice(None, -1), slice(1, None)), (1, slice(1, None), slice(None, -1)))
    transfers = [
        tasks.add(
            (S * C - 1, M),
            kind=Kind.TRANSFER,
            unit=stage[source][:, None],
            seconds=0.0,
            chunk=chunk_of[source][:, None],
            micro_batch=np.arange(M),
        )
        for _, source, _ in ways
    ]
    previous, following = (np.full(grid, -1) for _ in range(2))
    parts = []
    for s in range(S):
        backward, chunk_at, batch_at = order(schedule, S, s, M, C)
        sequence = s, backward, chunk_at, batch_at
        last = passes[s, 1, 0, -1:]
        if buckets[s] > 1:
            rest = (buckets[s] - 1,)
            more = tasks.add(
                rest, kind=Kind.BACKWARD, unit=s, seconds=0.0, chunk=0, micro_batch=M - 1
            )
            last = np.append(last, more)
            tasks.order(last[:-1], more)
            if not reduces:
                ends[s, 1, 0, -1] = last[-1]
        parts.append(np.append(last[:-1], ends[s, 1, 0, -1]))
        if reduces:
            into = passes[s].copy()
            into[1, 0, -1] = last[-1]
            tasks.order(into, ends[s])
        tasks.order(ends[sequence][:-1], passes[sequence][1:])
        at = [np.stack(sequence[1:])[:, part] for part in (slice(None, -1), slice(1, None))]
        following[s, at[0][0], at[0][1], at[0][2]] = passes[sequence][1:]
        previous[s, at[1][0], at[1][1], at[1][2]] = ends[sequence][:-1]
    for (side, source, target), numbers in zip(ways, transfers, strict=True):
        made = stage[source], side, chunk_of[source]
        needed = stage[target], side, chunk_of[target]
        tasks.order(ends[made], numbers)
        tasks.order(numbers, passes[needed])
        if sends in LATE:
            before = previous[needed]
            tasks.order(before[before >= 0], numbers[before >= 0])
        if sends in HELD:
            behind = following[made]
            tasks.order(numbers[behind >= 0], behind[behind >= 0])
    updates = tasks.add((S,), kind=Kind.OPTIMIZER, unit=np.arange(S), seconds=0.0)
    tasks.order(ends[:, 1, 0, -1], updates)
    built = tasks.build(S)
    columns = (built.kind, built.unit, built.chunk, built.micro_batch)
    return _Shape(ends, tuple(parts), updates, columns, (built.before, built.after))


_kept_shape = lru_cache(maxsize=64)(_new_shape)


@dataclass(frozen=True)
class _Placed:
    """Numbers of a replica's first and last tasks of passes [S, 2, C, M], of the parts of its last
    backward passes and of its updates. unit: of its first stage. next_side: of the pass that
    follows a backward pass on a single stage."""

    unit: int
    next_side: int
    begins: Ints
    ends: Ints
    parts: list[Ints]
    updates: Ints


def tasks_of(replicas: Sequence[Replica], collectives: Sequence[Collective] = ()) -> Tasks:
    """One iteration as tasks. Units: the stages of the first replica, then those of the second, …

    Tasks are numbered replica by replica: passes, what tensor ranks do together, transfers of
    activations hop by hop, those of gradients, updates; then the collectives.
    """
    tasks = TaskList()
    placed: list[_Placed] = []
    unit = 0
    parts: dict[tuple[int, int], int] = {}
    for collective in collectives:
        for member in collective.members if collective.buckets > 1 else ():
            parts[member] = max(parts.get(member, 1), collective.buckets)
    for i, replica in enumerate(replicas):
        buckets = tuple(parts.get((i, s), 1) for s in range(replica.stages))
        placed.append(_place(tasks, replica, unit, buckets))
        unit += replica.stages
    _join(tasks, placed, collectives)
    return tasks.build(unit)


def simulate_replicas(
    replicas: Sequence[Replica], collectives: Sequence[Collective] = ()
) -> Timeline:
    """One iteration, as `tasks_of` has it."""
    kept = np.concatenate([replica.peak_bytes for replica in replicas])
    return simulate(tasks_of(replicas, collectives), kept)


def _place(tasks: TaskList, replica: Replica, unit: int, buckets: tuple[int, ...]) -> _Placed:
    """All tasks of one replica."""
    shape, first = _shape(replica, buckets), tasks.count
    parts, S, M = np.array(buckets), replica.stages, replica.micro_batches
    passes = replica.pass_seconds.copy()
    passes[:, 1, 0, -1] /= parts
    rest = np.repeat(passes[:, 1, 0, -1], parts - 1)
    count = passes.size
    sent = _columns(tasks, replica.hops, (2, S * replica.chunks - 1, M), replica.kind)
    met = [np.empty(0)] * 3
    if replica.reduces:
        sides = [
            _columns(tasks, side, (S, replica.chunks, M), replica.kind) for side in replica.reduces
        ]
        met = [np.stack(columns, axis=1) for columns in zip(*sides, strict=True)]
    none, no_use = np.zeros(len(rest) + S), np.full(len(rest) + S, -1)
    ending = np.broadcast_to(np.asarray(replica.optimizer, float), (S,))
    tasks.block(
        seconds=(passes.ravel(), met[0].ravel(), sent[0].ravel(), rest, ending),
        delay=(np.zeros(count), met[1].ravel(), sent[1].ravel(), none),
        use=(np.full(count, -1), met[2].ravel(), sent[2].ravel(), no_use),
        owner=shape.owner,
        unit=unit,
        order=shape.order,
    )
    moved = [first + part for part in shape.parts]
    begins = first + np.arange(count).reshape(passes.shape)
    next_side = int(replica.schedule == "gpipe")
    return _Placed(unit, next_side, begins, first + shape.ends, moved, first + shape.updates)


def _columns(
    tasks: TaskList,
    table: Sequence[Sequence[Sequence[Traffic]]],
    shape: tuple[int, int, int],
    kind: Ints,
) -> list[Floats]:
    """(seconds, delay, use) in `shape` [.., .., M] of a table by kind; nothing without a table."""
    if not table or 0 in shape:
        return [np.full(shape, value) for value in (0.0, 0.0, -1.0)]
    values = np.array(
        [
            [[t.seconds, t.latency, tasks.use(t.ports)] for t in row]
            for rows in table
            for row in rows
        ]
    )
    return [values.reshape(*shape[:2], -1, 3)[:, :, kind, column] for column in range(3)]


def _join(tasks: TaskList, placed: list[_Placed], collectives: Sequence[Collective]) -> None:
    """Collectives, each between what its members do before and after it."""
    number, order = tasks.count, list[tuple[int, int]]()
    columns: list[tuple[float, int, int, int]] = []  # seconds, use, unit, micro-batch
    for collective in collectives:
        members = [(placed[i], s) for i, s in collective.members]
        (first, stage), step = members[0], collective.when == "step"
        steps = first.ends.shape[-1]
        if step and {r.ends.shape for r, _ in members} != {(1, 2, 1, steps)}:
            raise ValueError(
                "a collective of every step joins replicas of one stage with equally many "
                "micro-batches"
            )
        count = steps if step else collective.buckets
        each, use = collective.seconds / collective.buckets, tasks.use(collective.ports)
        columns += [(each, use, first.unit + stage, m if step else -1) for m in range(count)]
        numbers = range(number, number + count)
        number += count
        order += pairwise(numbers)
        for replica, s in members:
            if collective.when == "parameters":
                order.append((int(replica.updates[s]), numbers[0]))
                continue
            if step:
                tasks.order(replica.ends[s, 1, 0], numbers)
                tasks.order(numbers[:-1], replica.begins[s, replica.next_side, 0, 1:])
            else:
                # Part p needs the share (p + 1) / count of the last backward pass.
                own = replica.parts[s]
                needed = (-(-(p + 1) * len(own) // count) - 1 for p in range(count))
                order += [(int(own[part]), n) for part, n in zip(needed, numbers, strict=True)]
            order.append((numbers[-1], int(replica.updates[s])))
    if columns:
        seconds, use_of, unit, batch = zip(*columns, strict=True)
        tasks.add(
            (len(columns),), kind=Kind.COLLECTIVE, unit=unit, seconds=seconds, use=use_of,
            micro_batch=batch,
        )  # fmt: skip
        tasks.order(*np.array(order, np.int64).T)


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
