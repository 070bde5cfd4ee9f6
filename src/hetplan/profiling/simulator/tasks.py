"""Tasks as arrays, the compiled event loop that runs them, and the timeline that comes of it.

A task starts when all tasks before it are done and its ports are free, occupies them for `seconds`,
and is done `delay` after that (a message's latency occupies nobody). A port serves one task at a
time, in the order of asking.
What a device does in a fixed order needs no port: each task is before the next.

An event is the moment when a task may start, or when it lets go of its ports. At equal moments
ports are freed first, then lower task numbers go first, so that every run of the same tasks is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_PORT = -1
FIRST, LAST, BUSY = 0, 1, 2  # what the event loop knows of a port
COLUMNS = ("seconds", "delay", "kind", "unit", "chunk", "micro_batch", "takes", "gives")
WHOLE = ("kind", "unit", "chunk", "micro_batch")


class Kind(IntEnum):
    """What a task is."""

    FORWARD = 0
    BACKWARD = 1
    TRANSFER = 2
    COLLECTIVE = 3
    OPTIMIZER = 4


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)


@dataclass(frozen=True)
class Tasks:
    """T tasks of U units (a unit: what computes as one, such as the devices of a stage).

    seconds, delay [T]. port[port_begin[i] : port_begin[i + 1]]: the ports that task i holds. kind,
    unit, chunk, micro_batch [T]: for people (of a collective: its first unit; -1 where it does not
    apply). takes, gives [T]: bytes that the unit holds from the task's start on, and no longer from
    its end on. waits [T]: how many tasks are before it. after[begin[i] : begin[i + 1]]: the tasks
    that task i is before.
    """

    seconds: Floats
    delay: Floats
    port_begin: Ints
    port: Ints
    kind: Ints
    unit: Ints
    chunk: Ints
    micro_batch: Ints
    takes: Floats
    gives: Floats
    begin: Ints
    after: Ints
    waits: Ints
    units: int

    def __len__(self) -> int:
        """T."""
        return len(self.seconds)

    @property
    def ports(self) -> int:
        """Ports are numbered 0 .. ports - 1."""
        return int(self.port.max(initial=-1)) + 1

    @property
    def holders(self) -> Ints:
        """The task of each entry of `port`."""
        return np.repeat(np.arange(len(self)), np.diff(self.port_begin))


class TaskList:
    """Collects tasks and their order; `build` makes the arrays. Whole arrays at a time: there are
    millions."""

    def __init__(self) -> None:
        self.count = 0
        self._columns: dict[str, list[Floats]] = {name: [] for name in COLUMNS}
        self._ports: list[Ints] = []
        self._port_counts: list[Ints] = []
        self._before: list[Ints] = []
        self._after: list[Ints] = []

    def add(
        self,
        shape: tuple[int, ...],
        *,
        kind: ArrayLike,
        unit: ArrayLike,
        seconds: ArrayLike,
        delay: ArrayLike = 0.0,
        ports: ArrayLike = (),
        chunk: ArrayLike = -1,
        micro_batch: ArrayLike = -1,
        takes: ArrayLike = 0.0,
        gives: ArrayLike = 0.0,
    ) -> Ints:
        """Numbers of new tasks, in the given shape; every column is broadcast to it.

        ports: broadcast to shape + [ports of one task]; NO_PORT stands for none.
        """
        columns = (seconds, delay, kind, unit, chunk, micro_batch, takes, gives)
        for name, value in zip(COLUMNS, columns, strict=True):
            self._columns[name].append(
                np.broadcast_to(np.asarray(value, dtype=float), shape).ravel()
            )
        size = int(np.prod(shape))
        held = np.asarray(ports, dtype=np.int64)
        width = held.shape[-1] if held.ndim else 1
        held = np.broadcast_to(held, (*shape, width)).reshape(size, width)
        self._ports.append(held[held != NO_PORT])
        self._port_counts.append((held != NO_PORT).sum(axis=1))
        numbers = np.arange(self.count, self.count + size, dtype=np.int64).reshape(shape)
        self.count += size
        return numbers

    def order(self, before: ArrayLike, after: ArrayLike) -> None:
        """Each of `before` is before its counterpart in `after` (broadcast against each other)."""
        first, second = np.broadcast_arrays(
            np.asarray(before, np.int64), np.asarray(after, np.int64)
        )
        self._before.append(first.ravel())
        self._after.append(second.ravel())

    def build(self, units: int) -> Tasks:
        """The arrays."""
        columns = {
            name: np.concatenate([np.empty(0), *parts]) for name, parts in self._columns.items()
        }
        whole = {name: columns.pop(name).astype(np.int64) for name in WHOLE}
        empty = np.empty(0, np.int64)
        before, after = (
            np.concatenate([empty, *self._before]),
            np.concatenate([empty, *self._after]),
        )
        return Tasks(
            seconds=columns["seconds"],
            delay=columns["delay"],
            takes=columns["takes"],
            gives=columns["gives"],
            **whole,
            port_begin=np.concatenate(
                [[0], np.cumsum(np.concatenate([empty, *self._port_counts]))]
            ),
            port=np.concatenate([empty, *self._ports]),
            begin=np.concatenate([[0], np.cumsum(np.bincount(before, minlength=self.count))]),
            after=after[np.argsort(before, kind="stable")],
            waits=np.bincount(after, minlength=self.count).astype(np.int64),
            units=units,
        )


def run(tasks: Tasks) -> tuple[Floats, Floats]:
    """(start, end) [T] in seconds from 0. Raises ValueError where tasks wait for each other in a
    circle."""
    count = len(tasks)
    times, ports = np.full((2, count), np.nan), np.full((3, tasks.ports), -1, np.int64)
    ports[BUSY] = 0
    finished = _run(
        tasks.seconds, tasks.delay, tasks.port_begin, tasks.port, tasks.begin, tasks.after,
        tasks.waits.copy(), times, np.zeros(2 * count), np.empty(2 * count, np.int64), ports,
        np.full(count, -1, np.int64),
    )  # fmt: skip
    start, end = times
    if finished < count:
        stuck = int(np.flatnonzero(np.isnan(start))[0])
        raise ValueError(
            f"{count - finished} of {count} tasks wait for each other; the first is task {stuck} "
            f"(unit {tasks.unit[stuck]}, micro-batch {tasks.micro_batch[stuck]})"
        )
    return start, end


@kernel
def _push(heap: Ints, size: int, key: Floats, event: int) -> int:
    """Put an event into the binary heap, ordered by (key, number); returns the new size."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        other = heap[parent]
        if key[other] < key[event] or (key[other] == key[event] and other < event):
            break
        heap[at] = other
        at = parent
    heap[at] = event
    return size + 1


@kernel
def _pop(heap: Ints, size: int, key: Floats) -> int:
    """Take the first event off the heap (of `size` events); the caller lowers the size."""
    first, moved = heap[0], heap[size - 1]
    at, child = 0, 1
    while child < size - 1:
        if child + 2 < size:
            a, b = heap[child], heap[child + 1]
            if key[b] < key[a] or (key[b] == key[a] and b < a):
                child += 1
        smaller = heap[child]
        if key[moved] < key[smaller] or (key[moved] == key[smaller] and moved < smaller):
            break
        heap[at] = smaller
        at, child = child, 2 * child + 1
    heap[at] = moved
    return int(first)


@kernel
def _run(
    seconds: Floats,
    delay: Floats,
    port_begin: Ints,
    held: Ints,
    begin: Ints,
    after: Ints,
    waits: Ints,
    times: Floats,
    key: Floats,
    heap: Ints,
    ports: Ints,
    behind: Ints,
) -> int:
    """Fill times [2, T], starts and ends; how many tasks finished. Event i < T: task i lets go of
    its ports; T + i: task i may start.

    The rest is scratch: key [2 T] 0 and heap [2 T]; ports [3, ports], of each the first and the
    last task that wait for it, -1, and whether it is busy, 0; behind [T], who waits behind a task,
    -1.
    """
    count, size, finished = len(seconds), 0, 0
    for i in range(count):
        if waits[i] == 0:
            size = _push(heap, size, key, count + i)
    while size > 0:
        event = _pop(heap, size, key)
        size -= 1
        frees = event < count
        place, stop = (port_begin[event], port_begin[event + 1]) if frees else (0, 1)
        if frees:
            for q in range(place, stop):
                ports[BUSY, held[q]] = 0
        while place < stop:
            task = event - count  # the one that may start; or who is first in line at a free port
            if frees:
                port = held[place]
                if ports[BUSY, port] or ports[FIRST, port] < 0:
                    place += 1
                    continue
                task = ports[FIRST, port]
                ports[FIRST, port], behind[task] = behind[task], -1
            else:
                place += 1
            blocked = -1
            for q in range(port_begin[task], port_begin[task + 1]):
                if ports[BUSY, held[q]]:
                    blocked = held[q]
                    break
            if blocked >= 0:
                if ports[FIRST, blocked] < 0:
                    ports[FIRST, blocked] = task
                else:
                    behind[ports[LAST, blocked]] = task
                ports[LAST, blocked] = task
                continue
            times[0, task], times[1, task] = key[event], key[event] + seconds[task]
            finished += 1
            if port_begin[task + 1] > port_begin[task]:
                for q in range(port_begin[task], port_begin[task + 1]):
                    ports[BUSY, held[q]] = 1
                key[task] = times[1, task]
                size = _push(heap, size, key, task)
            for e in range(begin[task], begin[task + 1]):
                successor = count + after[e]
                key[successor] = max(key[successor], times[1, task] + delay[task])
                waits[after[e]] -= 1
                if waits[after[e]] == 0:
                    size = _push(heap, size, key, successor)
    return finished


LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.TRANSFER: "transfer",
    Kind.COLLECTIVE: "synchronisation",
    Kind.OPTIMIZER: "optimizer",
}


@dataclass(frozen=True)
class Timeline:
    """Tasks with their start and end [T], seconds from the iteration's beginning; U units."""

    tasks: Tasks
    start: Floats
    end: Floats

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
        of = np.isin(self.tasks.kind, [int(kind) for kind in kinds])
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
        tasks = self.tasks
        held = np.bincount(tasks.port, tasks.seconds[tasks.holders], minlength=tasks.ports)
        return held.astype(float)

    def memory(self, unit: int) -> tuple[Floats, Floats]:
        """(moments, bytes from each on): what the unit's tasks hold beside what it always holds.

        Where something ends as something begins, the end comes first.
        """
        of = np.flatnonzero(self.tasks.unit == unit)
        takes, gives = self.tasks.takes[of], self.tasks.gives[of]
        moments = np.concatenate([self.end[of], self.start[of]])
        change = np.concatenate([-gives, takes])
        kept = change != 0
        at = np.argsort(moments[kept], kind="stable")
        return moments[kept][at], np.cumsum(change[kept][at])

    @cached_property
    def peak_bytes(self) -> Floats:
        """[U] the most that each unit's tasks hold at once."""
        return np.array(
            [max(self.memory(u)[1].max(initial=0.0), 0.0) for u in range(self.tasks.units)]
        )

    def events(self, kinds: Sequence[Kind] = tuple(Kind)) -> list[dict[str, Any]]:
        """One entry per task that takes time, by start: kind, unit, chunk, micro_batch, start,
        end."""
        tasks = self.tasks
        of = np.isin(tasks.kind, [int(kind) for kind in kinds]) & (self.end > self.start)
        chosen = np.flatnonzero(of)
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


def simulate(tasks: Tasks) -> Timeline:
    """Run the tasks. Raises ValueError where they wait for each other in a circle."""
    return Timeline(tasks, *run(tasks))


def path_to_end(timeline: Timeline) -> Ints:
    """Tasks of one chain without waiting that decides the iteration's length, first to last.

    Each begins when the one before it was done or let go of a port. What to speed up is among them.
    """
    tasks, start, end = timeline.tasks, timeline.start, timeline.end
    done = end + tasks.delay
    before = np.repeat(np.arange(len(tasks)), np.diff(tasks.begin))
    tight = done[before] == start[tasks.after]
    cause = np.full(len(tasks), -1, np.int64)
    cause[tasks.after[tight]] = before[tight]
    holders = tasks.holders
    for port in range(tasks.ports):
        users = holders[tasks.port == port]
        users = users[np.argsort(start[users], kind="stable")]
        released = users[:-1][end[users[:-1]] == start[users[1:]]]
        followers = users[1:][end[users[:-1]] == start[users[1:]]]
        free = cause[followers] < 0
        cause[followers[free]] = released[free]
    chain = [int(np.argmax(done))]
    while cause[chain[-1]] >= 0:
        chain.append(int(cause[chain[-1]]))
    return np.array(chain[::-1], dtype=np.int64)
