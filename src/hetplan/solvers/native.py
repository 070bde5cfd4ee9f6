"""Shared parts of the general solvers' drivers: units, answers, and running native code
interruptibly.

Native code runs in a thread of its own while the calling thread polls. That keeps Ctrl-C alive
(Python runs signal handlers in the main thread only, between two bytecodes), calls the watcher from
the method's thread, and gives every HiGHS run a scheduler of its own (HiGHS keeps one per thread
and refuses another number of workers on it).
"""

import _thread
import atexit
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from hetplan.solvers.run import Run

T = TypeVar("T")
# (incumbent, bound) in the instance's unit; None where nothing new is known.
Sink = Callable[[float | None, float | None], None]

# Share of the gap asked for that a back end may use up; the rest is left to rounding and
# tolerances.
GAP_SHARE = 0.8
POLL_SECONDS = 0.02
# How long native code may go on after it was told to stop before its last report is taken as its
# answer.
GRACE_SECONDS = 1.0
SETTLE_SECONDS = 3.0
# The message of an answer that leaves these two open; `general.minimise` tells them apart.
UNCLEAR = "infeasible or unbounded"


@dataclass(frozen=True)
class Scale:
    """The map from a model's objective z to the instance's unit: z / per_unit + offset.

    under: the most, in the instance's unit, by which the model prices any decision too low. It
    prices none too high, so that its bound holds as it is.
    """

    per_unit: float = 1.0
    offset: float = 0.0
    under: float = 0.0

    def value(self, z: float) -> float:
        """Model objective -> instance unit, up to the stated errors."""
        return z / self.per_unit + self.offset

    def incumbent(self, z: float) -> float:
        """The most that a decision of model cost z costs."""
        return self.value(z) + self.under


@dataclass
class Latest:
    """The latest incumbent and bound of a model, in its own unit: written by native threads, read
    by ours.

    incumbent: (solution, objective), one object so that a reader never sees half of it; solution:
    whatever the driver wants to have of it.
    """

    incumbent: tuple[Any, float | None] = (None, None)
    bound: float | None = None

    def on_bound(self, bound: float) -> None:
        """Keep the best finite bound (back ends say infinity for none)."""
        if math.isfinite(bound) and (self.bound is None or bound > self.bound):
            self.bound = bound

    def relay(self, scale: Scale, run: Run, report: Sink | None) -> Callable[[], None]:
        """A function that passes news on, in the instance's unit: to `report`, or to `run` without
        one."""
        tell = report or (lambda incumbent, bound: run.report(incumbent=incumbent, bound=bound))
        last: tuple[float | None, float | None] = (None, None)

        def poll() -> None:
            nonlocal last
            seen = (self.incumbent[1], self.bound)
            if seen == last:
                return
            last = seen
            incumbent = None if seen[0] is None else scale.incumbent(seen[0])
            bound = None if seen[1] is None else scale.value(seen[1])
            tell(incumbent, bound)

        return poll


def begin(function: Callable[[], T], start_seconds: float = 10.0) -> Future[T]:
    """A function's value, computed on a thread of its own that ends with the process.

    `threading.Thread.start` waits until the new thread says that it runs. Where memory is limited,
    the thread may die before it can say so, and its starter would wait for ever. Here MemoryError
    is raised when the thread does not begin within `start_seconds`, RuntimeError when there can be
    none.
    """
    future: Future[T] = Future()
    begun = _thread.allocate_lock()  # made here: a thread without memory can still let it go
    begun.acquire()

    def work() -> None:
        try:
            begun.release()
            value = function()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the value
            future.set_exception(error)
        else:
            future.set_result(value)

    _thread.start_new_thread(work, ())
    if not begun.acquire(timeout=start_seconds):
        raise MemoryError("a thread ended before it began")
    return future


def over(work: Future[T], seconds: float) -> bool:
    """Whether the work is over, at the latest after so many seconds."""
    return bool(wait([work], seconds).done)


# Work of threads that did not stop in time.
_left: list[Future[Any]] = []


@atexit.register
def _settle() -> None:
    """At exit: native code that calls into a dying interpreter aborts the process, so give it time
    to end.

    What is deep inside an LP then still runs on, but does not call Python either.
    """
    wait(_left, SETTLE_SECONDS)


def end_process(code: int) -> None:
    """End the process with `code` if native code was left behind that still runs, or torch is
    loaded; else return.

    For the command line, which has nothing to do after its answer: an ordinary exit would wait for
    that code, and gloo's threads that outlive the interpreter may abort the process.
    """
    if "torch.distributed" in sys.modules or not all(work.done() for work in _left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def drive(
    work: Callable[[], T],
    *,
    run: Run,
    interrupt: Callable[[], None],
    poll: Callable[[], None],
    overtime: float = GRACE_SECONDS,
) -> T | None:
    """Run `work` in a fresh thread; meanwhile `poll` here, and `interrupt` it once `run` should
    stop.

    Returns what `work` returned, or None when it did not end within GRACE_SECONDS of the user's
    wish to stop or `overtime` seconds of the time limit (an LP deep inside a branch and bound hears
    nobody); the thread then ends by itself and its answer is dropped.
    What `work` or `poll` raises is raised here. `interrupt` is called repeatedly: it may come too
    early.
    """
    answer = begin(work)
    asked_at: float | None = None
    try:
        while not over(answer, POLL_SECONDS):
            poll()
            if run.should_stop:
                now = time.perf_counter()
                asked_at = now if asked_at is None else asked_at
                interrupt()
                if now - asked_at > (GRACE_SECONDS if run.cancelled else overtime):
                    _left.append(answer)
                    return None
        poll()
    except BaseException:
        interrupt()
        if not over(answer, GRACE_SECONDS):
            _left.append(answer)
        raise
    return answer.result()
