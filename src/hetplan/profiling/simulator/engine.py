"""The engine: runs tasks in time order, with queues at ports. Compiled.

Events are the moment when a task may start and the moment when it lets go of its ports; at equal
moments ports are freed first, then lower task numbers go first, so every run of the same tasks is
the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.profiling.simulator.tasks import Floats, Ints, Tasks

Flags = NDArray[np.bool_]


def run(tasks: Tasks) -> tuple[Floats, Floats]:
    """(start, end) [T] in seconds from 0. Raises ValueError where tasks wait for each other in a
    circle."""
    T, ports = len(tasks), tasks.ports
    start, end = np.full(T, np.nan), np.full(T, np.nan)
    finished = _run(
        tasks.seconds, tasks.delay, tasks.port_begin, tasks.port, tasks.begin, tasks.after, tasks.waits.copy(),
        start, end, np.zeros(2 * T), np.empty(2 * T, np.int64), np.zeros(ports, np.bool_),
        np.full((2, ports), -1, np.int64), np.full(T, -1, np.int64), np.empty(ports + 1, np.int64),
    )  # fmt: skip
    if finished < len(tasks):
        stuck = int(np.flatnonzero(np.isnan(start))[0])
        raise ValueError(
            f"{len(tasks) - finished} of {len(tasks)} tasks wait for each other; the first is task {stuck} "
            f"(unit {tasks.unit[stuck]}, micro-batch {tasks.micro_batch[stuck]})"
        )
    return start, end


@kernel
def _earlier(key: Floats, a: int, b: int) -> bool:
    return key[a] < key[b] or (key[a] == key[b] and a < b)


@kernel
def _push(heap: Ints, size: int, key: Floats, event: int) -> int:
    """Put an event into the binary heap; returns the new size."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if not _earlier(key, event, heap[parent]):
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = event
    return size + 1


@kernel
def _pop(heap: Ints, size: int, key: Floats) -> int:
    """Take the first event off the heap (of `size` events); the caller lowers the size."""
    first, moved = heap[0], heap[size - 1]
    at, size = 0, size - 1
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _earlier(key, heap[child + 1], heap[child]):
            child += 1
        if not _earlier(key, heap[child], moved):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved
    return int(first)


@kernel
def _blocked(port_begin: Ints, ports: Ints, busy: Flags, task: int) -> int:
    """A port of the task that is busy, or -1."""
    for q in range(port_begin[task], port_begin[task + 1]):
        if busy[ports[q]]:
            return int(ports[q])
    return -1


@kernel
def _first_waiting(
    queues: Ints, behind: Ints, port_begin: Ints, ports: Ints, busy: Flags, port: int
) -> int:
    """Take the first task off the port's queue that can start; those before it wait at another
    port. Or -1."""
    while queues[0, port] >= 0:
        task = queues[0, port]
        queues[0, port] = behind[task]
        if behind[task] < 0:
            queues[1, port] = -1
        behind[task] = -1
        blocked = _blocked(port_begin, ports, busy, task)
        if blocked < 0:
            return int(task)
        _enqueue(queues, behind, blocked, task)
    return -1


@kernel
def _enqueue(queues: Ints, behind: Ints, port: int, task: int) -> None:
    """Put the task at the end of the port's queue; queues [2, ports]: first and last task, or
    -1."""
    if queues[1, port] >= 0:
        behind[queues[1, port]] = task
    else:
        queues[0, port] = task
    queues[1, port] = task


@kernel
def _run(
    seconds: Floats,
    delay: Floats,
    port_begin: Ints,
    ports: Ints,
    begin: Ints,
    after: Ints,
    waits: Ints,
    start: Floats,
    end: Floats,
    key: Floats,
    heap: Ints,
    busy: Flags,
    queues: Ints,
    behind: Ints,
    starting: Ints,
) -> int:
    """Fill start, end [T]; how many tasks finished. Event i < T: task i lets go of its ports; T +
    i: task i may start.

    The rest is scratch: key [2 T] 0, heap [2 T], busy [ports] False, queues [2, ports] and behind
    [T] -1, starting [ports + 1].
    """
    T = len(seconds)
    size = finished = 0
    for i in range(T):
        if waits[i] == 0:
            size = _push(heap, size, key, T + i)
    while size > 0:
        event = _pop(heap, size, key)
        size -= 1
        now = key[event]
        chosen = 0
        if event >= T:
            blocked = _blocked(port_begin, ports, busy, event - T)
            if blocked >= 0:
                _enqueue(queues, behind, blocked, event - T)
            else:
                starting[0] = event - T
                chosen = 1
        else:
            for q in range(port_begin[event], port_begin[event + 1]):
                busy[ports[q]] = False
            for q in range(port_begin[event], port_begin[event + 1]):
                if not busy[ports[q]]:
                    task = _first_waiting(queues, behind, port_begin, ports, busy, ports[q])
                    if task >= 0:
                        starting[chosen] = task
                        chosen += 1
                        for r in range(port_begin[task], port_begin[task + 1]):
                            busy[ports[r]] = True
        for c in range(chosen):
            task = starting[c]
            start[task], end[task] = now, now + seconds[task]
            finished += 1
            if port_begin[task + 1] > port_begin[task]:
                for r in range(port_begin[task], port_begin[task + 1]):
                    busy[ports[r]] = True
                key[task] = end[task]
                size = _push(heap, size, key, task)
            done = end[task] + delay[task]
            for e in range(begin[task], begin[task + 1]):
                successor = after[e]
                key[T + successor] = max(key[T + successor], done)
                waits[successor] -= 1
                if waits[successor] == 0:
                    size = _push(heap, size, key, T + successor)
    return finished
