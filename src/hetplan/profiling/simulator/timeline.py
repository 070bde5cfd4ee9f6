"""What came of a simulation: seconds, busy and idle time, bubble, memory over time, and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hetplan.profiling.simulator.tasks import COMPUTES, Floats, Ints, Kind, Tasks, run

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
