"""The clock of time limits, which stands still while kernels are compiled.

A kernel is compiled once on a machine and then read from a cache. If a limit counted that, the
first run after an installation would stop earlier, and answer worse, than the same run later.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Clock:
    """A clock that can be stopped; `seconds` counts only the time in which it ran."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now  # seconds since some moment, which never decrease
        # whether solvers may have its seconds as limits of their own, which they count by the wall
        self.counts_the_wall = True
        self._lock = threading.RLock()
        self._stops = 0  # number of `stopped` blocks that any thread is inside
        self._stopped_at = 0.0  # `now` when the clock last stopped
        self._stopped_seconds = 0.0  # total length of the earlier stops

    def count_the_processor(self) -> None:
        """Count seconds of this process's processor from now on, on which other work tells little.
        It suits measurements, and begins before the first run."""
        self.now = time.process_time
        self.counts_the_wall = False

    def seconds(self) -> float:
        """Seconds since some moment; only differences mean something."""
        with self._lock:
            now = self._stopped_at if self._stops else self.now()
            return now - self._stopped_seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """A context in which the clock stands still, for all threads. Contexts may be nested."""
        with self._lock:
            if self._stops == 0:
                self._stopped_at = self.now()
            self._stops += 1
        try:
            yield
        finally:
            with self._lock:
                self._stops -= 1
                if self._stops == 0:
                    self._stopped_seconds += self.now() - self._stopped_at


CLOCK = Clock()  # the clock of every time limit in this process
