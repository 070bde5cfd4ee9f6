"""Tasks as arrays, the compiled event loop that runs them, and the timeline that comes of it.

Rules. A task asks when all tasks before it are done. It starts as soon as all its ports are free,
holds each of them for its own share of its seconds, ends when its seconds have passed, and is done
`delay` after that (a message's latency occupies nobody). A task without ports starts when it asks.
What a device does in a fixed order needs no port: each task is before the next.

Who is served first where several ask. Moments (when a task with ports asks, or when a port that
somebody waits for becomes free) are taken in their order; those that are at most `TIE` of the first
of them later are one moment, so that noise does not decide. In one moment the ports become free
first. Then those who wait try again in the order in which they have asked, and then those who ask
now: lower micro-batches first (what has none behind all: a stage sends its last gradient before it
joins gradients with other replicas, as Megatron and DeepSpeed do), then lower task numbers. Who
finds a port held waits for the first such port, in the order of its ports. What a start brings
about belongs to a later moment. Start times are exact: the latest of the asking and of the moments
in which the ports become free.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Ports = tuple[tuple[int, float], ...]  # (port, share of a task's seconds that it holds it)

# Relative: a thousand times the noise of 1e-9 that must not decide, and far below any duration that
# is known.
TIE = 1e-6
LAST = 2**62  # behind all micro-batches


class Kind(IntEnum):
    """What a task is."""

    FORWARD = 0
    BACKWARD = 1
    TRANSFER = 2
    COLLECTIVE = 3
    OPTIMIZER = 4


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)


class Traffic(NamedTuple):
    """What is sent at once, to another stage or within a group: seconds, then `latency` seconds
    that occupy nobody."""

    seconds: float = 0.0
    latency: float = 0.0
    ports: Ports = ()


@dataclass(frozen=True)
class Tasks:
    """T tasks of U units (a unit: what computes as one, such as the devices of a stage).

    seconds, delay [T]. use [T]: which ports the task holds, -1 for none. Use u: the ports
    port[use_begin[u] : use_begin[u + 1]], each for its `share` of the task's seconds. kind, unit,
    chunk, micro_batch [T] (of a collective: its first unit; -1 where it does not apply). before,
    after [E]: each of the first is before its counterpart.
    """

    seconds: Floats
    delay: Floats
    use: Ints
    use_begin: Ints
    port: Ints
    share: Floats
    kind: Ints
    unit: Ints
    chunk: Ints
    micro_batch: Ints
    before: Ints
    after: Ints
    units: int

    def __len__(self) -> int:
        """T."""
        return len(self.seconds)

    @property
    def ports(self) -> int:
        """Ports are numbered 0 .. ports - 1."""
        return int(self.port.max(initial=-1)) + 1

    @cached_property
    def holds(self) -> tuple[Ints, Ints, Floats]:
        """(task, port, seconds) of everything that is held."""
        holders = np.flatnonzero(self.use >= 0)
        begin = self.use_begin[self.use[holders]]
        width = self.use_begin[self.use[holders] + 1] - begin
        task = np.repeat(holders, width)
        entry = np.arange(len(task)) + np.repeat(begin - np.cumsum(width) + width, width)
        return task, self.port[entry], self.share[entry] * self.seconds[task]


COLUMNS = ("seconds", "delay", "use", "kind", "unit", "chunk", "micro_batch")


def type_of(column: str) -> type:
    """What a column of tasks holds."""
    return np.float64 if column in ("seconds", "delay") else np.int64


class TaskList:
    """Collects tasks and their order; `build` makes the arrays. Whole arrays at a time: there are
    millions."""

    def __init__(self) -> None:
        self.count = 0
        self._columns: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
        self._uses: dict[Ports, int] = {}
        self._order: list[tuple[Ints, Ints]] = []

    def use(self, ports: Ports) -> int:
        """The number of a use of ports, -1 for none."""
        return self._uses.setdefault(ports, len(self._uses)) if ports else -1

    def add(
        self,
        shape: tuple[int, ...],
        *,
        kind: ArrayLike,
        unit: ArrayLike,
        seconds: ArrayLike,
        delay: ArrayLike = 0.0,
        use: ArrayLike = -1,
        chunk: ArrayLike = -1,
        micro_batch: ArrayLike = -1,
    ) -> Ints:
        """Numbers of new tasks, in the given shape; every column is broadcast to it."""
        values = (seconds, delay, use, kind, unit, chunk, micro_batch)
        for name, value in zip(COLUMNS, values, strict=True):
            column: NDArray[Any] = np.empty(shape, type_of(name))
            column[...] = value
            self._columns[name].append(column.ravel())
        first, self.count = self.count, self.count + int(np.prod(shape))
        return np.arange(first, self.count, dtype=np.int64).reshape(shape)

    def block(
        self,
        values: Sequence[Floats],
        owner: Sequence[Ints],
        unit: int,
        order: tuple[Ints, Ints],
    ) -> None:
        """Many tasks of known shape: their (seconds, delay, use); owner: (kind, unit, chunk,
        micro_batch) with units from `unit` on; order: (before, after) among themselves."""
        for name, column in zip(COLUMNS, (*values, *owner), strict=True):
            self._columns[name].append(column + unit if name == "unit" else column)
        self._order.append((order[0] + self.count, order[1] + self.count))
        self.count += len(owner[0])

    def order(self, before: ArrayLike, after: ArrayLike) -> None:
        """Each of `before` is before its counterpart in `after` (broadcast against each other)."""
        pairs = np.broadcast_arrays(np.asarray(before, np.int64), np.asarray(after, np.int64))
        self._order.append((pairs[0].ravel(), pairs[1].ravel()))

    def build(self, units: int) -> Tasks:
        """The arrays."""
        none = [np.empty(0, np.int64)]
        held = [pair for ports in self._uses for pair in ports]
        return Tasks(
            **{
                name: np.concatenate(parts).astype(type_of(name), copy=False)
                for name, parts in self._columns.items()
            },
            use_begin=np.cumsum([0, *map(len, self._uses)]),
            port=np.array([port for port, _ in held], np.int64),
            share=np.array([share for _, share in held], np.float64),
            before=np.concatenate(none + [before for before, _ in self._order]),
            after=np.concatenate(none + [after for _, after in self._order]),
            units=units,
        )


def simulate(tasks: Tasks, kept_bytes: Floats | None = None) -> "Timeline":
    """Run the tasks. kept_bytes [U]: what the units keep at once, default nothing. Raises
    ValueError where tasks wait for each other in a circle."""
    batch = np.where(tasks.micro_batch < 0, LAST, tasks.micro_batch)  # lower ones first at a tie
    start = run_events(
        tasks.seconds, tasks.delay, tasks.use, tasks.use_begin, tasks.port, tasks.share,
        batch, (tasks.before, tasks.after), tasks.ports,
    )  # fmt: skip
    stuck = np.flatnonzero(np.isnan(start))
    if stuck.size:
        first = stuck[0]
        raise ValueError(
            f"{stuck.size} of {len(tasks)} tasks wait for each other; the first is task {first} "
            f"(unit {tasks.unit[first]}, micro-batch {tasks.micro_batch[first]})"
        )
    kept = np.zeros(tasks.units) if kept_bytes is None else kept_bytes
    return Timeline(tasks, start, start + tasks.seconds, kept)


@kernel
def grouped(before: Ints, after: Ints, count: int) -> tuple[Ints, Ints, Ints]:
    """(begin [T + 1], targets [E], unmet [T]): targets[begin[i] : begin[i + 1]] are the tasks that
    task i is before, unmet how many are before a task."""
    begin, targets = np.zeros(count + 1, np.int64), np.empty(len(after), np.int64)
    unmet = np.zeros(count, np.int64)
    for e in range(len(before)):
        begin[before[e] + 1] += 1
        unmet[after[e]] += 1
    for i in range(count):
        begin[i + 1] += begin[i]
    filled = begin[:-1].copy()
    for e in range(len(before)):
        targets[filled[before[e]]] = after[e]
        filled[before[e]] += 1
    return begin, targets, unmet


@kernel
def stand(task: int, first: Ints, last: Ints, behind: Ints, asked: Ints, port: int) -> None:
    """In the line at a port: `first` and `last` by port, who stands `behind` by task, in the order
    of `asked`."""
    here, ahead = first[port], -1
    if here >= 0 and asked[last[port]] < asked[task]:
        here, ahead = -1, last[port]
    while here >= 0 and asked[here] < asked[task]:
        here, ahead = behind[here], here
    behind[task] = here
    if ahead < 0:
        first[port] = task
    else:
        behind[ahead] = task
    if here < 0:
        last[port] = task


@kernel
def run_events(
    seconds: Floats,
    delay: Floats,
    use: Ints,
    use_begin: Ints,
    port: Ints,
    share: Floats,
    batch: Ints,
    order: tuple[Ints, Ints],
    ports: int,
) -> Floats:
    """Start [T] of tasks, NaN: never. Event p < ports: port p is free; ports + i: task i asks."""
    count = len(seconds)
    begin, targets, unmet = grouped(order[0], order[1], count)
    start, ready, asked = np.full(count, np.nan), np.zeros(count), np.full(count, -1)
    free, expected = np.zeros(ports), np.zeros(ports, np.bool_)
    first, last, behind = np.full(ports, -1), np.full(ports, -1), np.full(count, -1)
    stack, events, asking = np.empty(count, np.int64), [(0.0, 0) for _ in range(0)], 0

    def begins(task: int, moment: float) -> None:
        start[task], stack[0], depth = moment, task, 1
        while depth > 0:
            depth -= 1
            i = stack[depth]
            done = start[i] + seconds[i] + delay[i]
            for j in targets[begin[i] : begin[i + 1]]:
                ready[j] = max(ready[j], done)
                unmet[j] -= 1
                if unmet[j] == 0 and use[j] < 0:
                    start[j], stack[depth] = ready[j], j
                    depth += 1
                elif unmet[j] == 0:
                    heapq.heappush(events, (ready[j], ports + j))

    def tries(task: int, limit: float) -> None:
        moment, held = ready[task], range(use_begin[use[task]], use_begin[use[task] + 1])
        for h in held:
            p = port[h]
            moment = max(moment, free[p])
            if free[p] > limit:
                stand(task, first, last, behind, asked, p)
                if not expected[p]:
                    expected[p] = True
                    heapq.heappush(events, (free[p], p))
                return
        for h in held:
            p = port[h]
            free[p] = moment + share[h] * seconds[task]
            if first[p] >= 0 and not expected[p] and free[p] > limit:
                expected[p] = True
                heapq.heappush(events, (free[p], p))
        begins(task, moment)

    for i in [task for task in range(count) if unmet[task] == 0]:
        if use[i] >= 0:
            heapq.heappush(events, (0.0, ports + i))
        else:
            begins(i, 0.0)
    askers, freed = [(0, 0) for _ in range(0)], [(0, 0) for _ in range(0)]
    while events:
        limit = events[0][0] * (1 + TIE)
        while events and events[0][0] <= limit:
            event = heapq.heappop(events)[1]
            if event >= ports:
                heapq.heappush(askers, (batch[event - ports], event - ports))
            else:
                expected[event] = False
                heapq.heappush(freed, (asked[first[event]], event))
        while freed:  # whoever waits longest at a port that is free now
            p = heapq.heappop(freed)[1]
            if free[p] <= limit:
                task, first[p] = first[p], behind[first[p]]
                tries(task, limit)
                if first[p] >= 0:
                    heapq.heappush(freed, (asked[first[p]], p))
        while askers:
            task = heapq.heappop(askers)[1]
            asked[task], asking = asking, asking + 1
            tries(task, limit)
    return start


LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.TRANSFER: "transfer",
    Kind.COLLECTIVE: "synchronisation",
    Kind.OPTIMIZER: "optimizer",
}


@dataclass(frozen=True)
class Timeline:
    """Tasks with their start and end [T], seconds from the iteration's beginning; U units.
    peak_bytes [U]: the most that each unit keeps at once, beside what it always holds."""

    tasks: Tasks
    start: Floats
    end: Floats
    peak_bytes: Floats

    @property
    def seconds(self) -> float:
        """Seconds of one iteration, until the last task is done."""
        return float((self.end + self.tasks.delay).max(initial=0.0))

    @cached_property
    def busy(self) -> Floats:
        """[U] seconds in which each unit computes."""
        return self.spent(*COMPUTES)

    def spent(self, *kinds: Kind) -> Floats:
        """[U] seconds of tasks of these kinds, unit by unit."""
        of = np.isin(self.tasks.kind, kinds)
        units, seconds = self.tasks.unit[of], self.tasks.seconds[of]
        return np.bincount(units, seconds, minlength=self.tasks.units).astype(float)

    @property
    def idle(self) -> Floats:
        """[U] seconds in which each unit does not compute."""
        return self.seconds - self.busy

    @property
    def bubble(self) -> float:
        """Share of the units' time in which they do not compute, all units alike; 0 where nothing
        takes time."""
        return float(self.idle.mean() / self.seconds) if self.seconds > 0 else 0.0

    @cached_property
    def port_seconds(self) -> Floats:
        """[ports] seconds in which each port is held."""
        _, port, seconds = self.tasks.holds
        return np.bincount(port, seconds, minlength=self.tasks.ports).astype(float)

    def events(self) -> list[dict[str, Any]]:
        """One entry per task that takes time, by start: kind, unit, chunk, micro_batch, start,
        end."""
        tasks = self.tasks
        chosen = np.flatnonzero(self.end > self.start)
        return [
            {
                "kind": LABELS[Kind(int(tasks.kind[i]))],
                "unit": int(tasks.unit[i]),
                "chunk": int(tasks.chunk[i]),
                "micro_batch": int(tasks.micro_batch[i]),
                "start": float(self.start[i]),
                "end": float(self.end[i]),
            }
            for i in chosen[np.argsort(self.start[chosen], kind="stable")]
        ]


def path_to_end(timeline: Timeline) -> Ints:
    """Tasks of one chain without waiting that decides the iteration's length, first to last.

    Each begins when the one before it was done or let go of a port. What to speed up is among them.
    """
    tasks, start, end = timeline.tasks, timeline.start, timeline.end
    done = end + tasks.delay
    tight = done[tasks.before] == start[tasks.after]
    cause = np.full(len(tasks), -1, np.int64)
    cause[tasks.after[tight]] = tasks.before[tight]
    holder, port, seconds = (column[tasks.holds[2] > 0] for column in tasks.holds)
    free = start[holder] + seconds
    for p in np.unique(port):
        users = np.flatnonzero(port == p)
        users = users[np.argsort(free[users], kind="stable")]
        place = np.searchsorted(free[users], start[holder[users]]).clip(max=len(users) - 1)
        follows = (free[users[place]] == start[holder[users]]) & (cause[holder[users]] < 0)
        cause[holder[users[follows]]] = holder[users[place[follows]]]
    chain = [int(np.argmax(done))]
    while cause[chain[-1]] >= 0:
        chain.append(int(cause[chain[-1]]))
    return np.array(chain[::-1], dtype=np.int64)
