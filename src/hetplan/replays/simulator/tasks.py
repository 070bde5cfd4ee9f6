"""Tasks as arrays, the compiled event loop that runs them, and the timeline that it gives.

Rules. A task is ready when all tasks before it are done, and then requests its ports. It starts as
soon as all its ports are free. It holds each port for a share of its seconds, ends when its seconds
have passed, and is done `delay` seconds after that (a message's latency occupies no port). A task
without ports starts when it is ready. The tasks that a device runs in a fixed order need no port:
each of them is before the next.

Order of service. Two kinds of events are taken by their time: a task requests its ports, and a port
that a task waits for becomes free. Events later than the first one by at most the relative
difference `TIE` belong to one moment, so that rounding errors do not decide. In one moment:

(1) ports become free;
(2) waiting tasks try again, in the order of their requests;
(3) tasks that request now try, lower micro-batches first, then lower task numbers. Tasks without a
    micro-batch come last: a stage sends its last gradient before it reduces gradients with other
    replicas, as Megatron and DeepSpeed do.

A task that finds a port occupied waits for the first such port, in the order of its ports. Events
that a start causes belong to a later moment. Start times are exact: the latest of the time when the
task is ready and of the times when its ports become free.
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
Ports = tuple[tuple[int, float], ...]  # (port, share of a task's seconds for which it is held)

# A relative difference. Rounding errors are far below it (about 1e-10 in a sum of a million
# durations), and measured durations are far less accurate.
TIE = 1e-6
LAST = 2**62  # a micro-batch number above all others


class Kind(IntEnum):
    """The kinds of tasks."""

    FORWARD = 0
    BACKWARD = 1
    TRANSFER = 2
    COLLECTIVE = 3
    OPTIMIZER = 4
    WEIGHTS = 5  # a backward pass of weights alone


PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS)
COMPUTES = (*PASSES, Kind.OPTIMIZER)


class Traffic(NamedTuple):
    """Messages or collectives that run at the same time: between two stages, or within groups."""

    seconds: float = 0.0  # seconds in which the ports are occupied
    latency: float = 0.0  # seconds after these that occupy no port
    ports: Ports = ()


@dataclass(frozen=True)
class Tasks:
    """T tasks of U units, with E precedences.

    A unit is a group of devices that compute together, such as the devices of a stage. A use is a
    set of ports that a task holds; tasks that hold the same ports have the same use.
    """

    seconds: Floats  # [T] from start to end
    delay: Floats  # [T] seconds from the end until the task is done
    use: Ints  # [T] number of the task's use; -1: it holds no ports
    use_begin: Ints  # use u holds port[i] for i from use_begin[u] to use_begin[u + 1] - 1
    port: Ints  # the ports of all uses, in a row
    share: Floats  # the share of the task's seconds for which each entry of `port` is held
    kind: Ints  # [T] a `Kind`
    unit: Ints  # [T] the unit; for a collective, its first unit
    chunk: Ints  # [T] model chunk; -1 without one
    micro_batch: Ints  # [T] number of the micro-batch; -1 without one
    before: Ints  # [E] task before[e] is done before task after[e] is ready
    after: Ints  # [E]
    units: int  # U

    def __len__(self) -> int:
        """T."""
        return len(self.seconds)

    @property
    def ports(self) -> int:
        """The number of ports, which are numbered from 0."""
        return int(self.port.max(initial=-1)) + 1

    @cached_property
    def holds(self) -> tuple[Ints, Ints, Floats]:
        """(task, port, seconds) for each port that each task holds."""
        holders = np.flatnonzero(self.use >= 0)
        begin = self.use_begin[self.use[holders]]
        width = self.use_begin[self.use[holders] + 1] - begin  # number of ports of each holder
        task = np.repeat(holders, width)
        # A holder's rows of the result are consecutive, and so are its entries of `port`: the two
        # differ by a constant.
        first_row = np.cumsum(width) - width
        entry = np.arange(len(task)) + np.repeat(begin - first_row, width)
        return task, self.port[entry], self.share[entry] * self.seconds[task]


COLUMNS = ("seconds", "delay", "use", "kind", "unit", "chunk", "micro_batch")


def type_of(column: str) -> type:
    """The type of the entries of a column of tasks."""
    return np.float64 if column in ("seconds", "delay") else np.int64


class TaskList:
    """Collects tasks and their precedences; `build` gives the arrays. Whole arrays of tasks are
    added at a time, because there may be millions."""

    def __init__(self) -> None:
        self.count = 0  # tasks so far
        self._columns: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
        self._uses: dict[Ports, int] = {}  # ports -> number of the use
        self._order: list[tuple[Ints, Ints]] = []  # (before, after) arrays

    def use(self, ports: Ports) -> int:
        """The number of the use that holds the given ports; -1 for no ports."""
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
        """Add tasks, and return their numbers in the given shape. Every column is broadcast to that
        shape."""
        values = (seconds, delay, use, kind, unit, chunk, micro_batch)
        for name, value in zip(COLUMNS, values, strict=True):
            column: NDArray[Any] = np.empty(shape, type_of(name))
            column[...] = value
            self._columns[name].append(column.ravel())
        first, self.count = self.count, self.count + int(np.prod(shape))
        return np.arange(first, self.count, dtype=np.int64).reshape(shape)

    def block(
        self,
        values: Sequence[NDArray[Any]],
        owner: Sequence[Ints],
        unit: int,
        order: tuple[Ints, Ints],
    ) -> None:
        """Add all tasks of a replica.

        values: the columns (seconds, delay, use) of this replica alone. owner: the columns (kind,
        unit, chunk, micro_batch), which replicas of one shape share; units count from 0 there.
        unit: the number of the replica's first unit in this list. order: (before, after), which
        these replicas share as well; tasks count from 0 there.
        """
        for name, column in zip(COLUMNS, (*values, *owner), strict=True):
            self._columns[name].append(column + unit if name == "unit" else column)
        self._order.append((order[0] + self.count, order[1] + self.count))
        self.count += len(owner[0])

    def order(self, before: ArrayLike, after: ArrayLike) -> None:
        """Add precedences: each task in `before` is before its counterpart in `after`. The two are
        broadcast against each other."""
        pairs = np.broadcast_arrays(np.asarray(before, np.int64), np.asarray(after, np.int64))
        self._order.append((pairs[0].ravel(), pairs[1].ravel()))

    def build(self, units: int) -> Tasks:
        """The collected tasks. units: the number of units."""
        columns: dict[str, NDArray[Any]] = {
            name: np.concatenate(parts).astype(type_of(name), copy=False)
            for name, parts in self._columns.items()
        }
        entries = [entry for ports in self._uses for entry in ports]
        none = [np.empty(0, np.int64)]  # np.concatenate needs at least one array
        return Tasks(
            **columns,
            use_begin=np.cumsum([0, *map(len, self._uses)]),
            port=np.array([port for port, _ in entries], np.int64),
            share=np.array([share for _, share in entries], np.float64),
            before=np.concatenate(none + [before for before, _ in self._order]),
            after=np.concatenate(none + [after for _, after in self._order]),
            units=units,
        )


def simulate(tasks: Tasks, kept_bytes: Floats | None = None) -> "Timeline":
    """The timeline of the tasks. Raises ValueError where tasks wait for each other in a circle.

    kept_bytes [U]: the most bytes that each unit keeps at the same time; 0 unless given.
    """
    batch = np.where(tasks.micro_batch < 0, LAST, tasks.micro_batch)  # lower ones first at a tie
    start = run_events(
        tasks.seconds,
        tasks.delay,
        tasks.use,
        tasks.use_begin,
        tasks.port,
        tasks.share,
        batch,
        (tasks.before, tasks.after),
        tasks.ports,
    )
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
    """(begin [T + 1], targets [E], unmet [T]) of T = `count` tasks.

    targets[begin[i] : begin[i + 1]] are the tasks that task i is before; unmet[i] is the number of
    tasks before task i.
    """
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
def enqueue(task: int, first: Ints, last: Ints, behind: Ints, request: Ints, port: int) -> None:
    """Put a task into the queue of a port, which is a linked list in the order of requests.

    first, last [ports]: the first and the last task of each queue. Where a queue is empty, its
    `first` is -1 and its `last` has no meaning. behind [T]: the task behind each queued task; -1:
    none. request [T]: number of each task's request.
    """
    here, ahead = first[port], -1  # the task goes between `ahead` and `here`
    if here >= 0 and request[last[port]] < request[task]:
        here, ahead = -1, last[port]
    while here >= 0 and request[here] < request[task]:
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
    """[T] start of each task; NaN for tasks that never start. The arguments are fields of `Tasks`;
    `batch` orders requests of one moment.

    Event p < ports says that port p becomes free, event ports + i that task i requests its ports.
    A port for which tasks wait always has its event in `events`; in the moment of this event, the
    port is in `freed` instead, until its tasks have tried again. Other ports need no event.
    """
    count = len(seconds)
    begin, targets, unmet = grouped(order[0], order[1], count)
    start = np.full(count, np.nan)
    ready = np.zeros(count)  # when all tasks before it are done, as far as they are known
    request = np.full(count, -1)  # number of the task's request
    requests = 0  # so far
    free = np.zeros(ports)  # when each port becomes free
    expected = np.zeros(ports, np.bool_)  # whether `events` has the event of the port
    # the queues of tasks that wait for a port, see `enqueue`
    first, last, behind = np.full(ports, -1), np.full(ports, -1), np.full(count, -1)
    stack = np.empty(count, np.int64)
    events = [(0.0, 0) for _ in range(0)]  # heap of (time, event), empty but typed for the compiler

    def begins(task: int, moment: float) -> None:
        """Start a task, and all tasks without ports that are ready because of it."""
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
        """Start a task if all its ports are free by `limit`; else let it wait for the first port
        that is not."""
        moment, entries = ready[task], range(use_begin[use[task]], use_begin[use[task] + 1])
        for h in entries:
            p = port[h]
            moment = max(moment, free[p])
            if free[p] > limit:
                enqueue(task, first, last, behind, request, p)
                if not expected[p]:
                    expected[p] = True
                    heapq.heappush(events, (free[p], p))
                return
        for h in entries:
            p = port[h]
            free[p] = moment + share[h] * seconds[task]
            # tasks wait for the port, and it becomes free only after this moment
            if first[p] >= 0 and not expected[p] and free[p] > limit:
                expected[p] = True
                heapq.heappush(events, (free[p], p))
        begins(task, moment)

    # These are listed before the first one begins: `begins` lowers `unmet`, and starts every task
    # that becomes ready by that.
    without_predecessors = [task for task in range(count) if unmet[task] == 0]
    for i in without_predecessors:
        if use[i] >= 0:
            heapq.heappush(events, (0.0, ports + i))
        else:
            begins(i, 0.0)
    # heaps of one moment: (batch, task) that request, (request of the first waiting task, port)
    requesting, freed = [(0, 0) for _ in range(0)], [(0, 0) for _ in range(0)]
    while events:
        limit = events[0][0] * (1 + TIE)
        while events and events[0][0] <= limit:
            event = heapq.heappop(events)[1]
            if event >= ports:
                heapq.heappush(requesting, (batch[event - ports], event - ports))
            else:
                expected[event] = False
                heapq.heappush(freed, (request[first[event]], event))
        while freed:  # rule (2)
            p = heapq.heappop(freed)[1]
            if free[p] <= limit:
                task, first[p] = first[p], behind[first[p]]
                tries(task, limit)
                if first[p] >= 0:
                    heapq.heappush(freed, (request[first[p]], p))
        while requesting:  # rule (3)
            task = heapq.heappop(requesting)[1]
            request[task], requests = requests, requests + 1
            tries(task, limit)
    return start


LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.TRANSFER: "transfer",
    Kind.COLLECTIVE: "synchronisation",
    Kind.OPTIMIZER: "optimizer",
    Kind.WEIGHTS: "weights",
}


@dataclass(frozen=True)
class Timeline:
    """The times of T tasks of U units in one iteration."""

    tasks: Tasks
    start: Floats  # [T] seconds from the iteration's beginning
    end: Floats  # [T] seconds from the iteration's beginning
    # [U] the most bytes of micro-batches that each unit keeps at the same time
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
        """[U] seconds of each unit's tasks of the given kinds."""
        chosen = np.isin(self.tasks.kind, kinds)
        units, seconds = self.tasks.unit[chosen], self.tasks.seconds[chosen]
        return np.bincount(units, seconds, minlength=self.tasks.units).astype(float)

    @property
    def idle(self) -> Floats:
        """[U] seconds in which each unit does not compute."""
        return self.seconds - self.busy

    @property
    def bubble(self) -> float:
        """The bubble: the mean share of the iteration in which a unit does not compute; 0 where
        nothing takes time."""
        return float(self.idle.mean() / self.seconds) if self.seconds > 0 else 0.0

    @cached_property
    def port_seconds(self) -> Floats:
        """[ports] seconds in which each port is held."""
        _, port, seconds = self.tasks.holds
        return np.bincount(port, seconds, minlength=self.tasks.ports).astype(float)

    def events(self) -> list[dict[str, Any]]:
        """One entry per task that takes time, in the order of their starts: kind (of `LABELS`),
        unit, chunk, micro_batch, start and end."""
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
    """The tasks of a critical path, first to last.

    Each task starts exactly when the task before it in the path is done, or releases a port. The
    path ends with the last task of the iteration, so that the iteration becomes shorter only where
    a task of the path does.
    """
    tasks, start, end = timeline.tasks, timeline.start, timeline.end
    done = end + tasks.delay
    cause = np.full(len(tasks), -1, np.int64)  # the task whose end lets a task start; -1: none
    tight = done[tasks.before] == start[tasks.after]
    cause[tasks.after[tight]] = tasks.before[tight]
    # A task that held a port for 0 seconds would release it at its own start, and so be its own
    # cause.
    takes_time = tasks.holds[2] > 0
    holder, port, seconds = (column[takes_time] for column in tasks.holds)
    released = start[holder] + seconds
    for p in np.unique(port):
        rows = np.flatnonzero(port == p)
        rows = rows[np.argsort(released[rows], kind="stable")]
        starts = start[holder[rows]]
        # the first row of the port whose release is not before each start
        place = np.searchsorted(released[rows], starts).clip(max=len(rows) - 1)
        follows = (released[rows[place]] == starts) & (cause[holder[rows]] < 0)
        cause[holder[rows[follows]]] = holder[rows[place[follows]]]
    path = [int(np.argmax(done))]
    while cause[path[-1]] >= 0:
        path.append(int(cause[path[-1]]))
    return np.array(path[::-1], dtype=np.int64)
