"""One iteration of pipelines as tasks for the event loop: passes in the order of their schedule,
messages between stages, and collectives between replicas.

A replica is one pipeline of S stages with C model chunks each; an iteration has M micro-batches.
Chunk c of stage s is the virtual stage v = c S + s, or on a V, where odd chunks go back from the
last stage, v = (c + 1) S - 1 - s. It sends activations to virtual stage v + 1 and gradients to
v - 1. Micro-batches are of B kinds; those of a kind take equally long.

GPipe, 1F1B and interleaved 1F1B all warm up with some forward passes, then alternate one forward
with one backward pass, then drain. They differ in the length of the warm-up and in the order of
model chunks. Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (ICML), PipeDream-Flush
(1F1B); Narayanan et al. 2021 (SC), Section 2.2 (interleaved 1F1B).

Other schedules split backward passes into one of inputs and one of weights (`simulator.splits`), or
are explicit. A stage's passes then have K = 3 sides: forward, backward, and weights, whose pass
takes no time where the backward pass is whole. Otherwise K = 2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.answers import Answers
from hetplan.plans.passes import (
    WHOLE_SCHEDULES,
    Orders,
    Pass,
    PassKind,
    WholeSchedule,
    virtual_stages,
)
from hetplan.replays.simulator.splits import SplitSchedule, split_orders
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


def warm_up(
    schedule: WholeSchedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> int:
    """The number of forward passes in a stage's warm-up, before it alternates."""
    passes, stages_behind = micro_batches * chunks, stages - stage - 1
    if schedule == "gpipe":
        return passes
    if schedule == "1f1b":
        return min(stages_behind, passes)
    # A round of `stages` passes for each chunk but the last one. The first micro-batch's last chunk
    # then goes through the stages behind and back, hence 2 for each of them.
    return min(2 * stages_behind + (chunks - 1) * stages, passes)


@lru_cache(maxsize=1024)
def order(
    schedule: WholeSchedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[Ints, Ints, Ints]:
    """(backward, chunk, micro_batch), each [2 C M]: the passes of a stage in their order.

    backward: 0 for a forward, 1 for a backward pass. For the interleaved schedule, `micro_batches`
    is a multiple of `stages`.
    """
    passes = np.arange(micro_batches * chunks)  # number of a pass among those of its direction
    if schedule == "interleaved-1f1b":
        # rounds of S micro-batches, which pass one chunk after the other
        rounds, in_round = np.divmod(passes, stages * chunks)
        chunk, in_chunk = np.divmod(in_round, stages)
        batch = rounds * stages + in_chunk
    else:
        chunk, batch = np.divmod(passes, micro_batches)
    # Positions in the stage's order: `warm` forward passes, then `alternating` pairs of a forward
    # and a backward pass, then the other backward passes.
    warm = warm_up(schedule, stages, stage, micro_batches, chunks)
    alternating = len(passes) - warm
    forward_at = np.where(passes < warm, passes, warm + 2 * (passes - warm))
    backward_at = np.where(
        passes < alternating,
        warm + 2 * passes + 1,
        2 * alternating + warm + (passes - alternating),
    )
    at = np.concatenate([forward_at, backward_at])
    backward, chunk_of, batch_of = (np.empty(2 * len(passes), np.int64) for _ in range(3))
    backward[at] = np.repeat([0, 1], len(passes))
    chunk_of[at] = np.concatenate([chunk, chunks - 1 - chunk])  # backward: the last chunk first
    batch_of[at] = np.concatenate([batch, batch])
    return backward, chunk_of, batch_of


class OrderKey(NamedTuple):
    """The values on which the orders of a pipeline's passes depend."""

    schedule: WholeSchedule | SplitSchedule | Literal["explicit"]
    stages: int
    micro_batches: int
    chunks: int = 1
    explicit: Orders | None = None  # the passes of an explicit schedule

    @property
    def split(self) -> bool:
        """Whether some backward passes are split, so that there are K = 3 sides."""
        if self.explicit is None:
            return self.schedule in get_args(SplitSchedule)
        return any(one.kind == "W" for passes in self.explicit for one in passes)


@lru_cache(maxsize=256)
def orders_of(key: OrderKey) -> Orders:
    """[stage] the passes of a pipeline in their order."""
    if key.explicit is not None:
        return key.explicit
    if key.schedule in get_args(SplitSchedule):
        return split_orders(key.schedule, key.stages, key.micro_batches)
    kinds: tuple[PassKind, PassKind] = ("F", "D")
    of_stages = [
        order(key.schedule, key.stages, stage, key.micro_batches, key.chunks)
        for stage in range(key.stages)
    ]
    return tuple(
        tuple(Pass(kinds[b], int(c), int(m)) for b, c, m in zip(*of_stage, strict=True))
        for of_stage in of_stages
    )


@lru_cache(maxsize=1024)
def sides_of(key: OrderKey, stage: int) -> tuple[Ints, Ints, Ints]:
    """(side, chunk, micro_batch) of a stage's passes in their order. With K = 3 sides, a whole
    backward pass is followed by one of weights, which takes no time."""
    if key.schedule in WHOLE_SCHEDULES:
        return order(key.schedule, key.stages, stage, key.micro_batches, key.chunks)
    sides: dict[PassKind, tuple[int, ...]] = {"F": (0,), "B": (1,), "W": (2,), "D": (1,)}
    if key.split:
        sides["D"] = (1, 2)
    passes = orders_of(key)[stage]
    rows = [(side, one.chunk, one.batch) for one in passes for side in sides[one.kind]]
    side, chunk, batch = np.array(rows, np.int64).T
    return side, chunk, batch


When = Literal["step", "gradients", "parameters"]
Sends = Literal["asynchronous", "waiting", "blocking", "rendezvous"]
MESSAGE_WAITS: tuple[Sends, ...] = ("waiting", "rendezvous")  # a message waits for its receiver
SENDER_WAITS: tuple[Sends, ...] = ("blocking", "rendezvous")  # a sender waits for its message
NOTHING = Traffic()
# Shapes of replicas that are cached. The largest ones have some 2 MB each, a full cache 110 MB.
MOST_SHAPES = 64
LARGEST_CACHED_SHAPE = 4096  # passes S C M of a shape that is cached


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """One pipeline with its seconds, bytes and messages; `replays.chains` makes it from a plan.

    Arrays are broadcast to the shapes given at the fields.
    """

    stages: int  # S
    micro_batches: int  # M
    chunks: int = 1  # C
    schedule: WholeSchedule | SplitSchedule | Literal["explicit"] = "1f1b"
    explicit: Orders | None = None  # the passes of an explicit schedule
    folded: bool = False  # whether odd chunks go from the last stage back to the first one
    # asynchronous: a message leaves when it is computed, and its sender goes on.
    # waiting: the message leaves when its receiver has also finished the pass before the one that
    # needs it; its sender goes on.
    # blocking: as asynchronous, but the sender goes on only when the message is sent.
    # rendezvous: the message waits as in `waiting`, its sender as in `blocking`.
    sends: Sends = "asynchronous"
    # the host's seconds for each message that a pass receives or sends, at both ends
    exchange_seconds: float = 0.0
    forward: ArrayLike  # [S, C, B] seconds of a forward pass
    backward: ArrayLike  # [S, C, B] seconds of a backward pass
    kinds: Ints | None = None  # [M] the kind of each micro-batch; None: B = M, all different
    weights: ArrayLike = 0.0  # [S, C, B] the part of `backward` that a pass of weights takes
    added: ArrayLike = 0.0  # [S, C, B] seconds by which a split backward pass takes longer
    optimizer: ArrayLike = 0.0  # [S] seconds of the update
    # [S, C, B] bytes kept from a forward pass until the end of its backward pass
    saved_bytes: ArrayLike = 0.0
    # [S, C, B] bytes kept from a backward pass of inputs until the end of its pass of weights
    held_bytes: ArrayLike = 0.0
    # [2][S C - 1][B] messages from virtual stage h to h + 1 with activations, and back with
    # gradients; (): they take no time
    hops: Sequence[Sequence[Sequence[Traffic]]] = ()
    # [2][S][C][B] all-reduces of a stage's tensor ranks after the computation of forward and of
    # backward passes; (): none
    reduces: Sequence[Sequence[Sequence[Sequence[Traffic]]]] = ()
    # [S][C][B] those after the computation of backward passes of inputs; (): as after whole ones
    inputs_reduces: Sequence[Sequence[Sequence[Traffic]]] = ()

    @cached_property
    def values(self) -> Answers:
        """Cache of `_values`: the seconds, delays and ports of all tasks, by `buckets`."""
        return Answers()

    @cached_property
    def kind(self) -> Ints:
        """[M] the kind of each micro-batch."""
        return np.arange(self.micro_batches) if self.kinds is None else self.kinds

    @cached_property
    def order_key(self) -> OrderKey:
        """The values on which the orders of its passes depend."""
        return OrderKey(self.schedule, self.stages, self.micro_batches, self.chunks, self.explicit)

    @cached_property
    def split(self) -> bool:
        """Whether some backward passes are split."""
        return self.order_key.split

    @cached_property
    def is_split(self) -> NDArray[np.bool_]:
        """[S, C, M] whether a backward pass is split."""
        split = np.zeros((self.stages, self.chunks, self.micro_batches), bool)
        if self.split:
            for s, passes in enumerate(orders_of(self.order_key)):
                for kind, chunk, batch in passes:
                    split[s, chunk, batch] |= kind == "W"
        return split

    @cached_property
    def placed(self) -> list[tuple[int, int]]:
        """[S C] (stage, chunk) of each virtual stage."""
        return virtual_stages(self.stages, self.chunks, folded=self.folded)

    def _by_micro_batch(self, values: ArrayLike) -> Floats:
        """[S, C, M] the values [S, C, B] of each micro-batch's kind."""
        shape = (self.stages, self.chunks, int(self.kind.max()) + 1)
        table: Floats = np.asarray(values, float)
        if table.shape != shape:
            table = np.broadcast_to(table, shape)
        return np.asarray(table.take(self.kind, axis=-1))

    @cached_property
    def pass_seconds(self) -> Floats:
        """[S, K, C, M] seconds of the passes with the host's part of their messages, without the
        all-reduces of tensor ranks."""
        return self._split_seconds(self.whole_seconds) if self.split else self.whole_seconds

    @cached_property
    def whole_seconds(self) -> Floats:
        """[S, 2, C, M] those of the forward passes and of backward passes that are not split."""
        both = (self.forward, self.backward)
        seconds: Floats = np.stack([self._by_micro_batch(values) for values in both], axis=1)
        if not self.exchange_seconds:
            return seconds
        # A pass has one message in and one out, but for the first and the last virtual stage.
        messages = np.full((self.stages, self.chunks), 2)
        messages[self.placed[0]] -= 1
        messages[self.placed[-1]] -= 1
        return seconds + self.exchange_seconds * messages[:, None, :, None]

    def _split_seconds(self, seconds: Floats) -> Floats:
        """[S, 3, C, M] the seconds [S, 2, C, M] with a side of weights, which is part of the
        backward pass where that is split."""
        weights = np.where(self.is_split, self._by_micro_batch(self.weights), 0.0)
        added = np.where(self.is_split, self._by_micro_batch(self.added), 0.0)
        forward, backward = seconds[:, 0], seconds[:, 1]
        return np.stack([forward, backward + added - weights, weights], axis=1)

    @cached_property
    def reach(self) -> tuple[Floats, Floats]:
        """Two lower bounds for each stage, [S] each: seconds until its last backward pass ends, and
        seconds in which the gradient goes from there to the first stage.

        They are (2.2) to (2.4) of evidence/speed/joint_bound.md.
        """
        schedule = self.schedule
        if schedule not in WHOLE_SCHEDULES:
            return self._reach_of_any_order
        S, C, counts = self.stages, self.chunks, np.bincount(self.kind)
        both = [np.broadcast_to(t, (S, C, len(counts))) for t in (self.forward, self.backward)]
        times = np.array(both)  # [2, S, C, B]
        received = np.zeros((2, S * C, len(counts)))  # seconds of the message that a pass needs
        if self.reduces:
            # their latencies are part of their seconds (`Links.ring`)
            times += [[[[t.seconds for t in b] for b in c] for c in s] for s in self.reduces]
        if self.hops and S * C > 1:
            activations, gradients = self.hops
            received[0, 1:] = [[t.seconds + t.latency for t in hop] for hop in activations]
            received[1, :-1] = [[t.seconds + t.latency for t in hop] for hop in gradients]
        passes = times.swapaxes(1, 2).reshape(received.shape)  # [2, S C, B] by virtual stage
        fastest = (passes + received).min(axis=2)  # [2, S C] of any kind of micro-batch
        # of all virtual stages before this one: the way in forward, the way out backward
        way_in, way_out = np.cumsum(fastest, axis=1) - fastest
        # the seconds that keep the stage from its next pass: a message that waits for its receiver
        # moves while the receiver does nothing else
        if self.sends in MESSAGE_WAITS:
            passes += received
        reach = way_in[:S] + (passes.sum(axis=0) @ counts).reshape(C, S).sum(axis=0)
        if C == 1:  # (2.3): the first micro-batch goes to the last stage and back
            warm = [warm_up(schedule, S, s, self.micro_batches) for s in range(S)]
            # the passes that the stage computes meanwhile; under GPipe none, because the last stage
            # begins its backward passes after its last forward pass
            ahead = np.minimum(warm, self.micro_batches - 1)
            if self.schedule == "gpipe":
                ahead = np.zeros_like(ahead)
            there_and_back = fastest.sum(axis=0)
            of_later_stages = there_and_back.sum() - there_and_back.cumsum()
            reach += of_later_stages - ahead * passes[0].max(axis=1)
        return reach, way_out[:S]

    @property
    def _reach_of_any_order(self) -> tuple[Floats, Floats]:
        """`reach` whatever the order: a stage begins when the first micro-batch can have reached it
        at the earliest, then does all its passes."""
        in_forward = self.pass_seconds[:, 0].min(axis=-1)  # [S, C]
        way_in, seconds = np.zeros(self.stages), 0.0
        for stage, chunk in self.placed[: self.stages]:
            way_in[stage] = seconds
            seconds += in_forward[stage, chunk]
        return way_in + self.pass_seconds.sum(axis=(1, 2, 3)), np.zeros(self.stages)

    def hop(self, side: int, hop: int, batch: int) -> Traffic:
        """The message of a micro-batch between virtual stages `hop` and `hop` + 1. side 0: its
        activation, 1: its gradient."""
        return self.hops[side][hop][self.kind[batch]] if self.hops else NOTHING

    def reduce(self, side: int, stage: int, chunk: int, batch: int) -> Traffic:
        """The all-reduces of tensor ranks in a pass. side 0: forward, 1: backward."""
        return self.reduces[side][stage][chunk][self.kind[batch]] if self.reduces else NOTHING

    @property
    def peak_bytes(self) -> Floats:
        """[S] the most bytes that a stage keeps at the same time. A backward pass frees its bytes
        before the next pass begins, but for those that a pass of weights needs."""
        saved, peaks = self._by_micro_batch(self.saved_bytes), np.zeros(self.stages)
        held = np.where(self.is_split, self._by_micro_batch(self.held_bytes), 0.0)
        changes = np.stack([saved, held - saved, -held])  # by the passes of each side
        for s in range(self.stages):
            side, chunk, batch = sides_of(self.order_key, s)
            kept = np.cumsum(changes[side, s, chunk, batch])  # after each pass
            peaks[s] = kept.max(initial=0.0)
        return peaks


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, which stages of several replicas begin and end together."""

    members: Sequence[tuple[int, int]]  # (replica, stage) of each member
    seconds: float  # seconds of all buckets together
    # gradients: after the members' last backward passes, before their updates.
    # parameters: after the members' updates.
    # step: after every backward pass, before the next pass (ZeRO 2 and 3, replicas of one stage).
    when: When = "gradients"
    # Number of equal parts of the last backward pass, each with its gradients: the gradients of a
    # part are reduced while the next part is computed. 1: no overlap; always 1 unless `gradients`.
    buckets: int = 1
    ports: Ports = ()  # ports that it occupies, such as a network card


@dataclass(frozen=True)
class _Shape:
    """The T tasks of replicas of one shape and their E precedences, without seconds and ports. The
    arrays hold numbers of tasks, which count from 0."""

    passes: Ints  # [S, K, C, M] the computation of passes
    reduces: Ints | None  # [S, 2, C, M] the all-reduces of tensor ranks after it; None: none
    transfers: tuple[Ints, Ints]  # [S C - 1, M] messages with activations, and with gradients
    last: tuple[tuple[int, int, int], ...]  # [S] (side, chunk, micro-batch) of each last pass
    # [S] for each stage, the tasks of its last pass: one for each equal part of its computation,
    # the first of them the task in `passes`
    computed_parts: tuple[Ints, ...]
    # [S] the tasks after which the gradients of each part are ready: those of `computed_parts`, but
    # with the pass's end in place of the last one
    parts: tuple[Ints, ...]
    updates: Ints  # [S] the optimizer's updates
    ends: Ints  # [S, K, C, M] the last task of each pass
    following: Ints  # [S, K, C, M] the first task of the stage's next pass; -1 after the last pass
    owner: tuple[Ints, ...]  # (kind, unit, chunk, micro_batch) [T] of every task
    order: tuple[Ints, Ints]  # (before, after) [E]


def _shape(replica: Replica, buckets: tuple[int, ...]) -> _Shape:
    """The shape of a replica; small shapes are cached. buckets [S]: parts of the stages' last
    passes."""
    S, C, M = replica.stages, replica.chunks, replica.micro_batches
    shape = _cached_shape if S * C * M <= LARGEST_CACHED_SHAPE else _new_shape
    return shape(replica.order_key, replica.folded, replica.sends, bool(replica.reduces), buckets)


def _new_shape(
    key: OrderKey, folded: bool, sends: Sends, reduces: bool, buckets: Sequence[int]
) -> _Shape:
    """The shape of replicas whose passes have all-reduces of tensor ranks or not (`reduces`)."""
    S, M, C, split = key.stages, key.micro_batches, key.chunks, key.split
    tasks, grid = TaskList(), (S, 2 + split, C, M)
    unit, chunk, batch = np.ogrid[:S, :C, :M]
    kind = np.array([Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS])[: 2 + split, None, None]
    owner = {"unit": unit[:, None], "chunk": chunk, "micro_batch": batch[0]}
    passes = tasks.add(grid, kind=kind, seconds=0.0, **owner)
    ends = passes.copy()
    if reduces:
        ends[:, :2] = tasks.add((S, 2, C, M), kind=kind[:2], seconds=0.0, **owner)
    # [S C] stage and chunk of each virtual stage
    stage, chunk_of = np.array(virtual_stages(S, C, folded=folded)).T
    # (side, virtual stages that send, virtual stages that receive) of each hop: side 0 has the
    # activations, side 1 the gradients
    all_but_last, all_but_first = slice(None, -1), slice(1, None)
    sides = ((0, all_but_last, all_but_first), (1, all_but_first, all_but_last))
    transfers = [
        tasks.add(
            (S * C - 1, M),
            kind=Kind.TRANSFER,
            unit=stage[source][:, None],
            seconds=0.0,
            chunk=chunk_of[source][:, None],
            micro_batch=np.arange(M),
        )
        for _, source, _ in sides
    ]
    # [S, 2, C, M] the last task of the stage's pass before, the first task of its next pass
    previous, following = (np.full(grid, -1) for _ in range(2))
    computed_parts, parts, last_passes = [], [], []
    for s in range(S):
        side_at, chunk_at, batch_at = sides_of(key, s)
        # The stage's last pass completes its gradients: a backward pass, or one of weights.
        at_end = int(side_at[-1]), int(chunk_at[-1]), int(batch_at[-1])
        last_passes.append(at_end)
        last = passes[s][at_end].reshape(1)  # its tasks
        if buckets[s] > 1:
            other_parts = tasks.add(
                (buckets[s] - 1,),
                kind=Kind.WEIGHTS if split else Kind.BACKWARD,
                unit=s,
                seconds=0.0,
                chunk=at_end[1],
                micro_batch=at_end[2],
            )
            last = np.append(last, other_parts)
            tasks.order(last[:-1], other_parts)
            if not reduces or split:
                ends[s][at_end] = last[-1]
        computed_parts.append(last)
        parts.append(np.append(last[:-1], ends[s][at_end]))
        if reduces:
            computed = passes[s, :2].copy()  # the last task of each pass's computation
            if not split:
                computed[at_end] = last[-1]
            tasks.order(computed, ends[s, :2])
        pass_order = s, side_at, chunk_at, batch_at
        begins, finishes = passes[pass_order], ends[pass_order]
        tasks.order(finishes[:-1], begins[1:])
        following[s, side_at[:-1], chunk_at[:-1], batch_at[:-1]] = begins[1:]
        previous[s, side_at[1:], chunk_at[1:], batch_at[1:]] = finishes[:-1]
    for (side, source, target), messages in zip(sides, transfers, strict=True):
        sending = stage[source], side, chunk_of[source]  # the passes that compute the messages
        needing = stage[target], side, chunk_of[target]  # the passes that need them
        tasks.order(ends[sending], messages)
        tasks.order(messages, passes[needing])
        if sends in MESSAGE_WAITS:
            before = previous[needing]
            tasks.order(before[before >= 0], messages[before >= 0])
        if sends in SENDER_WAITS:
            after = following[sending]
            tasks.order(messages[after >= 0], after[after >= 0])
    updates = tasks.add((S,), kind=Kind.OPTIMIZER, unit=np.arange(S), seconds=0.0)
    tasks.order([ends[s][at_end] for s, at_end in enumerate(last_passes)], updates)
    built = tasks.build(S)
    columns = (built.kind, built.unit, built.chunk, built.micro_batch)
    return _Shape(
        passes=passes,
        reduces=ends[:, :2] if reduces else None,
        transfers=(transfers[0], transfers[1]),
        last=tuple(last_passes),
        computed_parts=tuple(computed_parts),
        parts=tuple(parts),
        updates=updates,
        ends=ends,
        following=following,
        owner=columns,
        order=(built.before, built.after),
    )


_cached_shape = lru_cache(maxsize=MOST_SHAPES)(_new_shape)


class _Placed(NamedTuple):
    """A replica whose tasks are part of a task list."""

    first_task: int  # number in the list of the task 0 of `shape`
    first_unit: int  # unit of the replica's first stage
    shape: _Shape


def tasks_of(replicas: Sequence[Replica], collectives: Sequence[Collective] = ()) -> Tasks:
    """One iteration as tasks. Its units are the stages of the first replica, then the stages of the
    second one, and so on.

    Tasks are numbered replica by replica: passes, all-reduces of tensor ranks, transfers of
    activations hop by hop, transfers of gradients, further parts of last backward passes, updates;
    then the collectives.
    """
    tasks = TaskList()
    placed: list[_Placed] = []
    unit = 0
    parts: dict[tuple[int, int], int] = {}  # (replica, stage) -> parts of its last backward pass
    for collective in collectives:
        if collective.buckets == 1:
            continue
        for member in collective.members:
            parts[member] = max(parts.get(member, 1), collective.buckets)
    for i, replica in enumerate(replicas):
        buckets = tuple(parts.get((i, s), 1) for s in range(replica.stages))
        placed.append(_place(tasks, replica, unit, buckets))
        unit += replica.stages
    _join(tasks, placed, collectives)
    return tasks.build(unit)


def lower_bound_seconds(
    replicas: Sequence[Replica], collectives: Sequence[Collective] = ()
) -> float:
    """A lower bound of the seconds of an iteration, for a fraction of the work of `tasks_of`.

    For each stage, the bound adds up the seconds until its last backward pass ends
    (`Replica.reach`), then the longer one of the gradient's way to an earlier stage and that
    stage's collectives and update.
    """
    longest: dict[tuple[tuple[int, int], When], float] = {}  # seconds of a stage's collectives
    for collective in collectives:
        # Buckets may hide in the last backward pass, and collectives of steps are not in `reach`.
        # Both are left out, which only lowers the bound.
        if collective.buckets == 1 and collective.when != "step":
            for member in collective.members:
                key = (member, collective.when)
                longest[key] = max(collective.seconds, longest.get(key, 0.0))
    bound = 0.0
    for i, replica in enumerate(replicas):
        stages = [(i, s) for s in range(replica.stages)]
        joined = np.array(
            [
                longest.get((stage, "gradients"), 0.0) + longest.get((stage, "parameters"), 0.0)
                for stage in stages
            ]
        )
        reach, way_out = replica.reach
        # A stage's gradient comes to every earlier stage; way_out[s] - way_out[e] is its way from
        # stage s to stage e.
        ends = np.maximum.accumulate(np.asarray(replica.optimizer, float) + joined - way_out)
        bound = max(bound, float((reach + way_out + ends).max()))
    return bound


def simulate_replicas(
    replicas: Sequence[Replica], collectives: Sequence[Collective] = ()
) -> Timeline:
    """The timeline of one iteration. `tasks_of` says what its units are."""
    kept = np.concatenate([replica.peak_bytes for replica in replicas])
    return simulate(tasks_of(replicas, collectives), kept)


def _place(tasks: TaskList, replica: Replica, unit: int, buckets: tuple[int, ...]) -> _Placed:
    """Add all tasks of one replica to the list. unit: number of the unit of its first stage.
    buckets [S]: parts of the stages' last backward passes."""
    shape, first_task = _shape(replica, buckets), tasks.count
    values = replica.values.once(buckets, partial(_values, replica, buckets))
    number_of_use = np.array([tasks.use(ports) for ports in values.ports])
    columns = (values.seconds, values.delay, number_of_use[values.use])
    tasks.block(columns, shape.owner, unit, shape.order)
    return _Placed(first_task, unit, shape)


class _Values:
    """The seconds, delays and ports of all tasks of a replica."""

    def __init__(self, tasks: int) -> None:
        self.seconds, self.delay = np.zeros(tasks), np.zeros(tasks)  # [T] each
        self.use = np.zeros(tasks, np.int64)  # [T] a number of `ports`
        self.ports: dict[Ports, int] = {(): 0}  # ports that one task occupies -> their number

    def put(
        self,
        numbers: Ints,
        traffic: Iterable[Traffic],
        kind: Ints,
        where: NDArray[np.bool_] | slice = slice(None),
    ) -> None:
        """Set the seconds, delays and ports of messages or collectives.

        numbers [..., M]: their tasks. traffic: the entries of [..., B] in a row, for each kind of
        micro-batch. kind [M]: the kind of each micro-batch. where [..., M]: of which tasks.
        """
        shape = (*numbers.shape[:-1], -1)
        seconds, delay, uses = [], [], []
        for entry in traffic:
            seconds.append(entry.seconds)
            delay.append(entry.latency)
            uses.append(self.ports.setdefault(entry.ports, len(self.ports)))
        self.seconds[numbers[where]] = np.reshape(seconds, shape)[..., kind][where]
        self.delay[numbers[where]] = np.reshape(delay, shape)[..., kind][where]
        self.use[numbers[where]] = np.reshape(uses, shape)[..., kind][where]


def _values(replica: Replica, buckets: tuple[int, ...]) -> _Values:
    """The values of all tasks of a replica. buckets [S]: parts of the last backward passes."""
    shape = _shape(replica, buckets)
    values = _Values(len(shape.owner[0]))
    values.seconds[shape.passes] = replica.pass_seconds
    for s, parts in enumerate(shape.computed_parts):
        values.seconds[parts] = replica.pass_seconds[s][shape.last[s]] / buckets[s]
    values.seconds[shape.updates] = replica.optimizer
    if shape.reduces is not None:
        for side, by_stage in enumerate(replica.reduces):
            traffic = chain.from_iterable(chain.from_iterable(by_stage))
            values.put(shape.reduces[:, side], traffic, replica.kind)
        if replica.split and replica.inputs_reduces:
            traffic = chain.from_iterable(chain.from_iterable(replica.inputs_reduces))
            values.put(shape.reduces[:, 1], traffic, replica.kind, replica.is_split)
    if replica.hops and replica.stages * replica.chunks > 1:
        for side, by_hop in enumerate(replica.hops):
            traffic = chain.from_iterable(by_hop)
            values.put(shape.transfers[side], traffic, replica.kind)
    return values


def _join(tasks: TaskList, placed: list[_Placed], collectives: Sequence[Collective]) -> None:
    """Add the collectives, each between the tasks of its members before and after it."""
    first_number, order = tasks.count, list[tuple[int, int]]()
    columns: list[tuple[float, int, int, int]] = []  # seconds, use, unit, micro-batch
    for collective in collectives:
        members = [(placed[i], s) for i, s in collective.members]
        first_member, first_stage = members[0]
        unit = first_member.first_unit + first_stage
        every_step = collective.when == "step"
        steps = first_member.shape.ends.shape[-1]
        if every_step and {member.shape.ends.shape for member, _ in members} != {(1, 2, 1, steps)}:
            raise ValueError(
                "a collective of every step joins replicas of one stage with equally many "
                "micro-batches"
            )
        seconds, use = collective.seconds / collective.buckets, tasks.use(collective.ports)
        if every_step:
            count = steps
            columns += [(seconds, use, unit, m) for m in range(count)]
        else:
            count = collective.buckets
            columns += [(seconds, use, unit, -1)] * count
        numbers = range(first_number, first_number + count)
        first_number += count
        order += pairwise(numbers)
        for member, s in members:
            begin, shape = member.first_task, member.shape
            update = begin + int(shape.updates[s])
            if collective.when == "parameters":
                order.append((update, numbers[0]))
                continue
            if every_step:
                tasks.order(begin + shape.ends[s, 1, 0], numbers)
                tasks.order(numbers[:-1], begin + shape.following[s, 1, 0, :-1])
            else:
                parts = (begin + shape.parts[s]).tolist()
                for bucket, number in enumerate(numbers):
                    # the bucket needs the share (bucket + 1) / count of the last backward pass
                    needed_parts = -(-(bucket + 1) * len(parts) // count)  # rounded up
                    order.append((parts[needed_parts - 1], number))
            order.append((numbers[-1], update))
    if columns:
        seconds_of, use_of, units, batch = zip(*columns, strict=True)
        tasks.add(
            (len(columns),),
            kind=Kind.COLLECTIVE,
            unit=units,
            seconds=seconds_of,
            use=use_of,
            micro_batch=batch,
        )
        tasks.order(*np.array(order, np.int64).T)


def simulate_stages(
    compute: Floats,
    together: Sequence[float],
    *,
    backward: ArrayLike = False,
    runs: ArrayLike = -1,
    updates: ArrayLike = 0.0,
) -> Timeline:
    """The timeline of an SPMD program on m devices, which are its units.

    In each stage every device computes, then all devices wait for each other and for the stage's
    collective. After a stage without a collective, a device goes on without waiting.

    compute [stages, m]: seconds of computation. together [stages]: seconds of the collective; 0:
    none. backward [stages]: whether the stage is of a backward pass. runs [stages]: the run of the
    program that the stage is of. updates [m]: seconds of the optimizer's update after all stages.
    """
    stages, devices = compute.shape
    tasks = TaskList()
    chunk, batch = np.arange(stages), np.broadcast_to(runs, stages)
    kind = np.where(np.broadcast_to(backward, stages), Kind.BACKWARD, Kind.FORWARD)
    computing = tasks.add(
        (stages, devices),
        kind=kind[:, None],
        unit=np.arange(devices),
        seconds=compute,
        chunk=chunk[:, None],
        micro_batch=batch[:, None],
    )
    seconds = np.asarray(together, float)
    has_collective = seconds > 0
    collectives = tasks.add(
        seconds[has_collective].shape,
        kind=Kind.COLLECTIVE,
        unit=0,
        seconds=seconds[has_collective],
        chunk=chunk[has_collective],
        micro_batch=batch[has_collective],
    )
    update = tasks.add((devices,), kind=Kind.OPTIMIZER, unit=np.arange(devices), seconds=updates)
    after = np.vstack([computing[1:], update])  # [stages, m] the device's next task
    tasks.order(computing[has_collective], collectives[:, None])
    tasks.order(collectives[:, None], after[has_collective])
    tasks.order(computing[~has_collective], after[~has_collective])
    return simulate(tasks.build(devices))
