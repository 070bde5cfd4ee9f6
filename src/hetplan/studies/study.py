"""A study: tasks that have no row yet are done, and each row is written as it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetplan.studies.rows import Row, keys, write_row
from hetplan.studies.tasks import Task

Runner = Callable[[Iterable[Task]], Iterator[Row]]


@dataclass
class Tally:
    """How far a study is. known: rows from before; counts: rows of now, by status."""

    total: int
    known: int
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """Rows there are."""
        return self.known + sum(self.counts.values())

    def text(self) -> str:
        """`12 of 40 runs: 9 optimal, 2 feasible, 1 unknown`."""
        parts = [f"{n} {status}" for status, n in sorted(self.counts.items())]
        earlier = [f"{self.known} from before"] if self.known else []
        told = ", ".join(earlier + parts)
        return f"{self.done} of {self.total} runs" + (f": {told}" if told else "")


def carry_out(
    tasks: Sequence[Task],
    folder: Path,
    runner: Runner,
    watch: Callable[[Tally], None] | None = None,
) -> Tally:
    """Do what has no row in `folder` yet; the tally at the end, or where the runner stopped
    early."""
    there = keys(folder)
    left = [task for task in tasks if task.key not in there]
    tally = Tally(len(tasks), len(tasks) - len(left))
    if watch is not None:
        watch(tally)
    for row in runner(left):
        write_row(folder, row)
        tally.counts[row["status"]] += 1
        if watch is not None:
            watch(tally)
    return tally
