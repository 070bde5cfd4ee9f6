"""Replicas of a pipeline and what they synchronise, as tasks, in the order of their schedules.

GPipe, 1F1B and interleaved 1F1B all warm up with some forward passes, then alternate one forward
with one backward, then drain; they differ in how long they warm up and in the order of model
chunks. GPipe: Huang et al. 2019; 1F1B: PipeDream-Flush, Narayanan et al. 2021 (ICML); interleaved:
Narayanan et al. 2021 (SC), Section 2.2.

A replica has S stages of C model chunks and takes M micro-batches. Its virtual stages v = c S + s
pass activations to v + 1 and gradients back; every stage works in the order of its schedule.
Collectives join stages of several replicas.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hetplan.answers import Answers
from hetplan.replays.simulator.tasks import (
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
    passes, stages_behind = micro_batches * chunks, stages - stage - 1
    if schedule == "gpipe":
        return passes
    if schedule == "1f1b":
        return min(stages_behind, passes)
    return min(2 * stages_behind + (chunks - 1) * stages, passes)


@lru_cache(maxsize=1024)
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
KEPT_SHAPES = 64  # of replicas, whose order of tasks is remembered


@dataclass(frozen=True, kw_only=True, eq=False)
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
    def values(self) -> Answers:
        """Seconds, delays and ports of all tasks, by the parts of last backward passes."""
        return Answers()

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
        seconds: Floats = np.stack([self._by_micro_batch(values) for values in both], axis=1)
        if not self.exchange_seconds:
            return seconds
        place = np.arange(self.stages * self.chunks).reshape(self.chunks, self.stages).T
        exchanges = 2 - (place == 0) - (place == self.stages * self.chunks - 1).astype(int)
        return np.asarray(seconds + self.exchange_seconds * exchanges[:, None, :, None])

    @cached_property
    def reach(self) -> tuple[Floats, Floats]:
        """[S] seconds until the last backward pass of a stage ends, at least, and of the gradient's
        way from there to the first stage: (2.2) to (2.4) of evidence/speed/joint_bound.md."""
        S, C, counts = self.stages, self.chunks, np.bincount(self.kind)
        both = [np.broadcast_to(t, (S, C, len(counts))) for t in (self.forward, self.backward)]
        sent, times = np.zeros((2, S * C, len(counts))), np.array(both)
        if self.reduces:
            times += [[[[t.seconds for t in b] for b in c] for c in s] for s in self.reduces]
        if self.hops and S * C > 1:
            there, back = ([[t.seconds + t.latency for t in h] for h in side] for side in self.hops)
            sent[0, 1:], sent[1, :-1] = there, back
        passes = times.swapaxes(1, 2).reshape(sent.shape)
        least = (passes + sent).min(axis=2)
        before, way = np.cumsum(least, axis=1) - least
        passes += sent * (self.sends in LATE)  # what keeps the stage from its next pass
        reach = before[:S] + (passes.sum(axis=0) @ counts).reshape(C, S).sum(axis=0)
        if C == 1:
            warm = [warm_up(self.schedule, S, s, self.micro_batches) for s in range(S)]
            ahead = np.minimum(warm, self.micro_batches - 1) * (self.schedule != "gpipe")
            behind = least.sum(axis=0)
            reach += behind.sum() - behind.cumsum() - ahead * passes[0].max(axis=1)
        return reach, way[:S]

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
            peaks[s] = np.cumsum(np.where(backward, -each, each))[backward == 0].max(initial=0.0)
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
    """The tasks of replicas of one shape, by their numbers from 0 on."""

    passes: Ints  # [S, 2, C, M] computation of forward and backward passes
    together: Ints | None  # [S, 2, C, M] all-reduces of tensor ranks behind it; None: none
    transfers: tuple[Ints, Ints]  # [H, M] messages of activations, and of gradients
    # [S] the last backward pass of every stage: tasks of equal parts of its computation, the first
    # of them the pass itself, and the same with its end (all-reduces) as the last.
    computed_parts: tuple[Ints, ...]
    parts: tuple[Ints, ...]
    updates: Ints  # [S] of the optimizer
    ends: Ints  # [S, 2, C, M] the last task of each pass
    following: Ints  # [S, 2, C, M] the first task of the stage's next pass, -1 behind the last
    owner: tuple[Ints, ...]  # (kind, unit, chunk, micro_batch) [T] of every task
    order: tuple[Ints, Ints]  # (before, after) [E]


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
    computed_parts, parts = [], []
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
        computed_parts.append(last)
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
    return _Shape(
        passes=passes,
        together=ends if reduces else None,
        transfers=(transfers[0], transfers[1]),
        computed_parts=tuple(computed_parts),
        parts=tuple(parts),
        updates=updates,
        ends=ends,
        following=following,
        owner=columns,
        order=(built.before, built.after),
    )


_Placed = tuple[int, int, _Shape]  # the first task, and the unit of the first stage
_kept_shape = lru_cache(maxsize=KEPT_SHAPES)(_new_shape)


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


def least_seconds(replicas: Sequence[Replica], collectives: Sequence[Collective] = ()) -> float:
    """Seconds that an iteration takes at least: what every stage does, the way out, and what is
    behind the last backward passes. A fraction of the work of `tasks_of`."""
    joined: dict[tuple[tuple[int, int], When], float] = {}
    for c in collectives:
        if c.buckets == 1 and c.when != "step":
            joined.update(
                {(m, c.when): max(c.seconds, joined.get((m, c.when), 0.0)) for m in c.members}
            )
    least = 0.0
    for i, replica in enumerate(replicas):
        after = np.array(
            [
                joined.get(((i, s), "gradients"), 0.0) + joined.get(((i, s), "parameters"), 0.0)
                for s in range(replica.stages)
            ]
        )
        reach, way = replica.reach
        ends = np.maximum.accumulate(np.asarray(replica.optimizer, float) + after - way)
        least = max(least, float((reach + way + ends).max()))
    return least


def simulate_replicas(
    replicas: Sequence[Replica], collectives: Sequence[Collective] = ()
) -> Timeline:
    """One iteration, as `tasks_of` has it."""
    kept = np.concatenate([replica.peak_bytes for replica in replicas])
    return simulate(tasks_of(replicas, collectives), kept)


def _place(tasks: TaskList, replica: Replica, unit: int, buckets: tuple[int, ...]) -> _Placed:
    """All tasks of one replica."""
    shape, first = _shape(replica, buckets), tasks.count
    values = replica.values.once(buckets, partial(_values, replica, buckets))
    number_of_use = np.array([tasks.use(ports) for ports in values.ports])
    columns = (values.seconds, values.delay, number_of_use[values.use])
    tasks.block(columns, shape.owner, unit, shape.order)
    return first, unit, shape


class _Values:
    """The figures of all tasks of a replica."""

    def __init__(self, tasks: int) -> None:
        self.seconds, self.delay = np.zeros(tasks), np.zeros(tasks)  # [T] each
        self.use = np.zeros(tasks, np.int64)  # [T] a number of `ports`
        self.ports: dict[Ports, int] = {(): 0}  # ports that a task holds together -> their number

    def put(self, numbers: Ints, traffic: Iterable[Traffic], kind: Ints) -> None:
        """Set the figures of messages or collectives.

        numbers [..., M]: of the tasks. traffic: of every kind of micro-batch, [..., B] in a row.
        kind [M]: which of them each micro-batch is.
        """
        shape = (*numbers.shape[:-1], -1)
        seconds, delay, uses = [], [], []
        for one in traffic:
            seconds.append(one.seconds)
            delay.append(one.latency)
            uses.append(self.ports.setdefault(one.ports, len(self.ports)))
        self.seconds[numbers] = np.reshape(seconds, shape)[..., kind]
        self.delay[numbers] = np.reshape(delay, shape)[..., kind]
        self.use[numbers] = np.reshape(uses, shape)[..., kind]


def _values(replica: Replica, buckets: tuple[int, ...]) -> _Values:
    """The figures of all tasks of a replica. buckets [S]: parts of the last backward passes."""
    shape = _shape(replica, buckets)
    values = _Values(len(shape.owner[0]))
    values.seconds[shape.passes] = replica.pass_seconds
    for s, parts in enumerate(shape.computed_parts):
        values.seconds[parts] = replica.pass_seconds[s, 1, 0, -1] / buckets[s]
    values.seconds[shape.updates] = replica.optimizer
    if shape.together is not None:
        for side, by_stage in enumerate(replica.reduces):
            traffic = chain.from_iterable(chain.from_iterable(by_stage))
            values.put(shape.together[:, side], traffic, replica.kind)
    if replica.hops and replica.stages * replica.chunks > 1:
        for side, by_hop in enumerate(replica.hops):
            traffic = chain.from_iterable(by_hop)
            values.put(shape.transfers[side], traffic, replica.kind)
    return values


def _join(tasks: TaskList, placed: list[_Placed], collectives: Sequence[Collective]) -> None:
    """Collectives, each between what its members do before and after it."""
    number, order = tasks.count, list[tuple[int, int]]()
    columns: list[tuple[float, int, int, int]] = []  # seconds, use, unit, micro-batch
    for collective in collectives:
        members = [(placed[i], s) for i, s in collective.members]
        ((_, unit, shape), stage), step = members[0], collective.when == "step"
        steps = shape.ends.shape[-1]
        if step and {own.ends.shape for (_, _, own), _ in members} != {(1, 2, 1, steps)}:
            raise ValueError(
                "a collective of every step joins replicas of one stage with equally many "
                "micro-batches"
            )
        count = steps if step else collective.buckets
        each, use = collective.seconds / collective.buckets, tasks.use(collective.ports)
        columns += [(each, use, unit + stage, m if step else -1) for m in range(count)]
        numbers = range(number, number + count)
        number += count
        order += pairwise(numbers)
        for (begin, _, own), s in members:
            update = begin + int(own.updates[s])
            if collective.when == "parameters":
                order.append((update, numbers[0]))
                continue
            if step:
                tasks.order(begin + own.ends[s, 1, 0], numbers)
                tasks.order(numbers[:-1], begin + own.following[s, 1, 0, :-1])
            else:
                # Part p needs the share (p + 1) / count of the last backward pass.
                parts = (begin + own.parts[s]).tolist()
                needed = (-(-(p + 1) * len(parts) // count) - 1 for p in range(count))
                order += [(parts[part], n) for part, n in zip(needed, numbers, strict=True)]
            order.append((numbers[-1], update))
    if columns:
        seconds, use_of, units, batch = zip(*columns, strict=True)
        tasks.add(
            (len(columns),), kind=Kind.COLLECTIVE, unit=units, seconds=seconds, use=use_of,
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
