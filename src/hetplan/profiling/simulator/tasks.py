"""Tasks as arrays: what the engine runs, put together piece by piece.

A task starts when all tasks before it are done and its ports are free, occupies them for `seconds`,
and is done `delay` after that (a message's latency occupies nobody). A port serves one task at a
time, in the order of asking.
What a device does in a fixed order needs no port: each task is before the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.compiled import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_PORT = -1
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
        given = (seconds, delay, kind, unit, chunk, micro_batch, takes, gives)
        for name, value in zip(COLUMNS, given, strict=True):
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
        begin, ordered = np.zeros(self.count + 1, np.int64), np.empty(len(after), np.int64)
        by_source(before, after, begin, ordered)
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
            begin=begin,
            after=ordered,
            waits=np.bincount(after, minlength=self.count).astype(np.int64),
            units=units,
        )


@kernel
def by_source(before: Ints, after: Ints, begin: Ints, ordered: Ints) -> None:
    """Pairs sorted by their first: fill begin [count + 1], 0 on entry, and the seconds in that
    order; a counting sort."""
    for e in range(len(before)):
        begin[before[e] + 1] += 1
    for i in range(len(begin) - 1):
        begin[i + 1] += begin[i]
    for e in range(len(before)):  # from here on begin[i] is where the next one of i goes
        ordered[begin[before[e]]] = after[e]
        begin[before[e]] += 1
    for i in range(len(begin) - 1, 0, -1):
        begin[i] = begin[i - 1]
    begin[0] = 0
