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

import heapq
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


# What is kept of one task while tasks are collected.
TASK = np.dtype(
    [(name, np.float64) for name in ("seconds", "delay", "takes", "gives")]
    + [(name, np.int64) for name in ("kind", "unit", "chunk", "micro_batch")]
)


class TaskList:
    """Collects tasks and their order; `build` makes the arrays. Whole arrays at a time: there are
    millions."""

    def __init__(self) -> None:
        self.count = 0
        self._tasks = [np.empty(0, TASK)]
        self._ports = [np.empty(0, np.int64)]
        self._port_counts = [np.zeros(1, np.int64)]
        self._before = [np.empty(0, np.int64)]
        self._after = [np.empty(0, np.int64)]

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
        tasks = np.empty(shape, TASK)
        columns = (seconds, delay, takes, gives, kind, unit, chunk, micro_batch)
        for name, column in zip(TASK.fields or (), columns, strict=True):
            tasks[name] = column
        self._tasks.append(tasks.ravel())
        width = np.shape(ports)[-1]
        held = np.broadcast_to(np.asarray(ports, np.int64), (*shape, width))
        held = held.reshape(tasks.size, width)
        self._ports.append(held[held != NO_PORT])
        self._port_counts.append((held != NO_PORT).sum(axis=1))
        first, self.count = self.count, self.count + tasks.size
        return np.arange(first, self.count, dtype=np.int64).reshape(shape)

    def order(self, before: ArrayLike, after: ArrayLike) -> None:
        """Each of `before` is before its counterpart in `after` (broadcast against each other)."""
        first, second = np.broadcast_arrays(
            np.asarray(before, np.int64), np.asarray(after, np.int64)
        )
        self._before.append(first.ravel())
        self._after.append(second.ravel())

    def build(self, units: int) -> Tasks:
        """The arrays."""
        tasks = np.concatenate(self._tasks)
        before, after = np.concatenate(self._before), np.concatenate(self._after)
        return Tasks(
            **{name: tasks[name].copy() for name in TASK.fields or ()},
            port_begin=np.cumsum(np.concatenate(self._port_counts)),
            port=np.concatenate(self._ports),
            begin=np.concatenate([[0], np.cumsum(np.bincount(before, minlength=self.count))]),
            after=after[np.argsort(before, kind="stable")],
            waits=np.bincount(after, minlength=self.count).astype(np.int64),
            units=units,
        )


def simulate(tasks: Tasks) -> Timeline:
    """Run the tasks. Raises ValueError where they wait for each other in a circle."""
    start, end = run_events(
        tasks.seconds, tasks.delay, tasks.port_begin, tasks.port, tasks.begin, tasks.after,
        tasks.waits, tasks.ports,
    )  # fmt: skip
    stuck = np.flatnonzero(np.isnan(start))
    if stuck.size:
        first = stuck[0]
        raise ValueError(
            f"{stuck.size} of {len(tasks)} tasks wait for each other; the first is task {first} "
            f"(unit {tasks.unit[first]}, micro-batch {tasks.micro_batch[first]})"
        )
    return Timeline(tasks, start, end)


@kernel
def run_events(
    seconds: Floats,
    delay: Floats,
    port_begin: Ints,
    port: Ints,
    begin: Ints,
    after: Ints,
    waits: Ints,
    ports: int,
) -> tuple[Floats, Floats]:
    """Start and end [T] of every task, NaN of those that never may start; arrays as in `Tasks`.

    An event i < T: task i lets go of its ports; T + i: task i may start. Those who wait for a port
    stand in a line: `first` and `last` by port, and who stands `behind` each task.
    """
    count = len(seconds)
    start, end = np.full(count, np.nan), np.full(count, np.nan)
    ready, waiting_for = np.zeros(count), waits.copy()
    busy = np.zeros(ports, np.bool_)
    first, last, behind = np.full(ports, -1), np.full(ports, -1), np.full(count, -1)
    events = [(0.0, count + task) for task in range(count) if waits[task] == 0]

    def start_or_stand_in_line(task: int, moment: float) -> None:
        held = range(port_begin[task], port_begin[task + 1])
        for h in held:
            p = port[h]
            if busy[p]:
                if first[p] < 0:
                    first[p] = task
                else:
                    behind[last[p]] = task
                last[p], behind[task] = task, -1
                return
        start[task], end[task] = moment, moment + seconds[task]
        for h in held:
            busy[port[h]] = True
        if len(held) > 0:
            heapq.heappush(events, (end[task], task))
        for a in range(begin[task], begin[task + 1]):
            successor = after[a]
            ready[successor] = max(ready[successor], end[task] + delay[task])
            waiting_for[successor] -= 1
            if waiting_for[successor] == 0:
                heapq.heappush(events, (ready[successor], count + successor))

    while events:
        moment, event = heapq.heappop(events)
        if event >= count:
            start_or_stand_in_line(event - count, moment)
            continue
        held = range(port_begin[event], port_begin[event + 1])
        for h in held:
            busy[port[h]] = False
        for h in held:
            while first[port[h]] >= 0 and not busy[port[h]]:
                task = first[port[h]]
                first[port[h]] = behind[task]
                start_or_stand_in_line(task, moment)
    return start, end


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
        tasks = self.tasks
        held = np.bincount(tasks.port, tasks.seconds[tasks.holders], minlength=tasks.ports)
        return held.astype(float)

    @cached_property
    def peak_bytes(self) -> Floats:
        """[U] the most that each unit's tasks hold at once, beside what it always holds.

        Where something ends as something begins, the end comes first.
        """
        peaks = np.zeros(self.tasks.units)
        for unit in range(self.tasks.units):
            of = self.tasks.unit == unit
            moments = np.concatenate([self.end[of], self.start[of]])
            change = np.concatenate([-self.tasks.gives[of], self.tasks.takes[of]])
            held = np.cumsum(change[np.argsort(moments, kind="stable")])
            peaks[unit] = max(0.0, held.max(initial=0.0))
        return peaks

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
