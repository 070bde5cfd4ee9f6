"""The clock of time limits, which stands still while kernels are compiled.

A kernel is compiled once on a machine and then read from a cache. If a limit counted that, the
first run after an installation would stop earlier, and answer worse, than the same run later.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Clock:
    """Seconds that pass, without those for which somebody stopped the clock."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: seconds since some moment, which never decrease."""
        self.now = now
        self._lock = threading.RLock()
        self._stops = 0  # not ended yet, of all threads
        self._stopped_at = 0.0  # `now` when the first of them began
        self._stopped_seconds = 0.0  # of all that have ended

    def seconds(self) -> float:
        """Seconds since some moment; only differences mean something."""
        with self._lock:
            now = self._stopped_at if self._stops else self.now()
            return now - self._stopped_seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The clock stands still inside, for all threads; it may be stopped again inside."""
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


CLOCK = Clock()  # of this process
