"""A wish to stop that comes after a number of looks: what keeps to it is tested without a clock."""

from __future__ import annotations

import threading

from hetplan.clock import CLOCK
from hetplan.solvers.run import Options, Run


class After(threading.Event):
    """Set once it was looked at more than `looks` times. looked: how often that was."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.looked = looks, 0

    def is_set(self) -> bool:
        """One more look."""
        self.looked += 1
        return super().is_set() or self.looked > self.looks


def cancelled_after(looks: int, **options: object) -> Run:
    """A run that is cancelled after that many looks."""
    return Run(Options(**{"threads": 1, **options}), cancel=After(looks))  # type: ignore[arg-type]


def over(**options: object) -> Run:
    """A run whose time was up before anything began."""
    chosen = Options(**{"threads": 1, "time_limit": 1.0, **options})  # type: ignore[arg-type]
    return Run(chosen, started=CLOCK.seconds() - 2.0)
