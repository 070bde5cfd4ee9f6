"""Shared parts of the general solvers' drivers: units, latest answers, and native code that can be
interrupted.

Native code runs in a thread of its own while the calling thread polls. That has three effects.
Ctrl-C works, because Python runs signal handlers in the main thread only, between two bytecodes.
The watcher is called from the method's thread. And every run of HiGHS has a scheduler of its own:
HiGHS keeps one per thread and refuses another number of workers on it.
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

from hetplan.clock import CLOCK
from hetplan.solvers.run import Run

T = TypeVar("T")
# Receives (incumbent, bound) in the instance's unit; None where there is none yet.
Sink = Callable[[float | None, float | None], None]

# Share of the gap asked for that a back end may use up. The rest is left to rounding and
# tolerances.
GAP_SHARE = 0.8
POLL_SECONDS = 0.02  # between two polls
# Seconds that native code may go on after it was asked to stop. Then its last report is taken as
# its answer.
GRACE_SECONDS = 1.0
SETTLE_SECONDS = 3.0  # that native code is given to end when the process exits
# The message of an answer that leaves open which of the two holds; `general.minimise` tells them
# apart.
UNCLEAR = "infeasible or unbounded"


def wall_seconds_left(run: Run) -> float:
    """Seconds of the wall that native code may take before the time limit of `run`; infinite
    without a limit.

    Back ends count the wall's seconds. Where CLOCK counts the processor's, they get no limit of
    their own, and `drive` alone stops them.
    """
    return run.seconds_left if CLOCK.counts_the_wall else math.inf


@dataclass(frozen=True)
class Scale:
    """The map from a model's objective z to the instance's unit: z / per_unit + offset.

    The model prices no decision too high, so that its bound holds as it is.
    """

    per_unit: float = 1.0  # units of z per unit of the instance
    offset: float = 0.0  # the part of the objective that z leaves out, in the instance's unit
    under: float = 0.0  # the most by which the model prices a decision too low, same unit

    def value(self, z: float) -> float:
        """The objective z in the instance's unit, up to the error `under`."""
        return z / self.per_unit + self.offset

    def incumbent(self, z: float) -> float:
        """An upper bound on the objective of a decision with model objective z."""
        return self.value(z) + self.under


@dataclass
class Latest:
    """The latest incumbent and bound of a model, in the model's unit.

    Native threads write them, and the method's thread reads them.
    """

    # (solution in the driver's form, objective): one object, so that a reader never sees half of it
    incumbent: tuple[Any, float | None] = (None, None)
    bound: float | None = None

    def on_bound(self, bound: float) -> None:
        """Keep a bound if it is finite and the best so far. Back ends report infinity for none."""
        if math.isfinite(bound) and (self.bound is None or bound > self.bound):
            self.bound = bound

    def relay(self, scale: Scale, run: Run, report: Sink | None) -> Callable[[], None]:
        """A function that passes changes since its last call on to `report`, in the instance's
        unit. Without `report` it passes them on to `run`."""
        tell = report or (lambda incumbent, bound: run.report(incumbent=incumbent, bound=bound))
        # what the last call passed on: (objective of the incumbent, bound)
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
    """The future value of a function, computed on a thread of its own that ends with the process.

    `threading.Thread.start` waits until the new thread signals that it runs. Where memory is
    limited, the thread may die before it can, and its starter would wait for ever. Here MemoryError
    is raised when the thread does not begin within `start_seconds`, long after any live thread
    would have begun, RuntimeError when no thread can be started.
    """
    future: Future[T] = Future()
    begun = _thread.allocate_lock()  # made here: a thread without memory can still release it
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
    """Whether the work is over. It waits for the work, for `seconds` at most."""
    return bool(wait([work], seconds).done)


# Abandoned work, which was left to run because it did not stop in time.
_left: list[Future[Any]] = []


def is_settled() -> bool:
    """Whether all work that was abandoned has ended."""
    return all(work.done() for work in _left)


@atexit.register
def _settle() -> None:
    """Wait at exit for abandoned work to end, for SETTLE_SECONDS at most.

    Native code that calls into a dying interpreter aborts the process. Code deep inside an LP may
    run for longer, but does not call Python.
    """
    wait(_left, SETTLE_SECONDS)


def end_process(code: int) -> None:
    """End the process with `code` if abandoned work still runs or torch is loaded; else return.

    The command line calls this after its answer. An ordinary exit would wait for that work, and
    gloo's threads, which outlive the interpreter, may abort the process.
    """
    if "torch.distributed" in sys.modules or not is_settled():
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
    """The value of `work`, which runs in a fresh thread; None where it did not end in time.

    Meanwhile `poll` is called in this thread. Once `run` should stop, `interrupt` is called again
    and again, because a call may come too early. The work is in time if it ends within
    GRACE_SECONDS of the user's wish to stop, or within `overtime` seconds of the time limit. An LP
    deep inside a branch and bound reacts to nothing. Work that is late is abandoned: its thread
    ends by itself, and its value is dropped. Exceptions of `work` and `poll` are raised here.
    """
    answer = begin(work)
    asked_at: float | None = None
    try:
        while not over(answer, POLL_SECONDS):
            poll()
            if run.should_stop:
                now = time.perf_counter()  # not CLOCK, which stands still while kernels compile
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
