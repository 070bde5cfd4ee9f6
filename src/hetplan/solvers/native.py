"""What the drivers of the general solvers share: units, answers, and running native code
interruptibly.

Native code runs in a thread of its own while the calling thread polls. That is what keeps Ctrl-C
alive
(Python runs signal handlers in the main thread only, between two bytecodes), calls the watcher from
the method's thread, and gives every HiGHS run a scheduler of its own (HiGHS keeps one per thread
and refuses another number of workers on it).
"""

from __future__ import annotations

import _thread
import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hetplan.solvers.result import Stop
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
    """How a model's objective z maps to the instance's unit: z / per_unit + offset.

    under, over: the most, in the instance's unit, by which the model prices any decision too low or
    too high.
    A model whose costs are all rounded down has over = 0, and its bound holds as it is.
    """

    per_unit: float = 1.0
    offset: float = 0.0
    under: float = 0.0
    over: float = 0.0

    def value(self, z: float) -> float:
        """Model objective -> instance unit, up to the stated errors."""
        return z / self.per_unit + self.offset

    def incumbent(self, z: float) -> float:
        """What a decision of model cost z costs at most."""
        return self.value(z) + self.under

    def bound(self, z: float) -> float:
        """What every decision costs at least, when the model's optimum is proven to be z or
        more."""
        return self.value(z) - self.over


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a general solver said, before any decision is read out of it.

    objective: the model's own price of the incumbent in the instance's unit (None without one).
    bound: proven, in the instance's unit, corrected for rounding; kept at time-outs; None without
    one. solver: name and version. statistics: JSON types only.
    """

    stop: Stop
    objective: float | None = None
    bound: float | None = None
    seconds: float = 0.0
    solver: str = ""
    message: str = ""
    statistics: Mapping[str, object] = field(default_factory=dict)

    @property
    def has_solution(self) -> bool:
        """Whether there is an incumbent to read."""
        return self.objective is not None


def stopped(run: Run) -> Stop:
    """Why a back end that ended without a proof did so: by the user's wish or by a limit."""
    return Stop.INTERRUPTED if run.cancelled else Stop.LIMIT


class Latest:
    """The latest incumbent and bound of a model, in its own unit: written by native threads, read
    by ours."""

    def __init__(self) -> None:
        self.bound: float | None = None
        # one object, so that a reader never sees half of an incumbent
        self._incumbent: tuple[Any, float] | None = None

    def on_solution(self, solution: Any, objective: float) -> None:
        """Keep an incumbent; solution: whatever the driver wants to have of it."""
        self._incumbent = (solution, objective)

    @property
    def incumbent(self) -> tuple[Any, float | None]:
        """(solution, objective) of the incumbent, (None, None) without one."""
        return self._incumbent or (None, None)

    def on_bound(self, bound: float) -> None:
        """Keep the best finite bound (back ends say infinity for none)."""
        if math.isfinite(bound) and (self.bound is None or bound > self.bound):
            self.bound = bound

    def relay(self, scale: Scale, run: Run, report: Sink | None) -> Callable[[], None]:
        """A function that passes news on, in the instance's unit: to `report`, or to `run` without
        one."""
        last: tuple[float | None, float | None] = (None, None)

        def poll() -> None:
            nonlocal last
            seen = (self.incumbent[1], self.bound)
            if seen == last:
                return
            last = seen
            incumbent = None if seen[0] is None else scale.incumbent(seen[0])
            bound = None if seen[1] is None else scale.bound(seen[1])
            if report is None:
                run.report(incumbent=incumbent, bound=bound)
            else:
                report(incumbent, bound)

        return poll


class Work(Generic[T]):
    """A function's value, computed on a thread of its own that ends with the process.

    `threading.Thread.start` waits until the new thread says that it runs. Where memory is limited,
    the thread may die before it can say so, and its starter would wait for ever. Here MemoryError
    is raised when the thread does not begin within `start_seconds`, RuntimeError when there can be
    none.
    """

    def __init__(self, function: Callable[[], T], start_seconds: float = 10.0) -> None:
        self._function = function
        self._value: list[T | None] = [None]
        # What stays where the thread ends without a word.
        self._error: list[BaseException | None] = [MemoryError("a thread ran out of memory")]
        # Locks are made here and only let go there: a thread without memory can still do that.
        self._begun, self._over = _thread.allocate_lock(), _thread.allocate_lock()
        self._begun.acquire()
        self._over.acquire()
        _thread.start_new_thread(self._run, ())
        if not self._begun.acquire(timeout=start_seconds):
            raise MemoryError("a thread ended before it began")

    def _run(self) -> None:
        try:
            self._begun.release()
            self._value[0] = self._function()
            self._error[0] = None
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the value
            self._error[0] = error
        finally:
            self._over.release()

    def wait(self, seconds: float) -> bool:
        """Whether the work is over, at the latest after so many seconds."""
        if not self._over.acquire(timeout=seconds):
            return False
        self._over.release()
        return True

    @property
    def alive(self) -> bool:
        """Whether the work goes on."""
        return not self.wait(0.0)

    def value(self) -> T:
        """What the function returned; raises what it raised. Only when the work is over."""
        assert not self.alive, "asked too early"
        if self._error[0] is not None:
            raise self._error[0]
        return self._value[0]  # type: ignore[return-value] # None only where T is


# Threads that did not stop in time.
_left: list[Work[Any]] = []


def _leave(thread: Work[Any]) -> None:
    _left[:] = [*(other for other in _left if other.alive), thread]


@atexit.register
def _settle() -> None:
    """At exit: native code that calls into a dying interpreter aborts the process, so give it time
    to end.

    What is deep inside an LP then still runs on, but does not call Python either.
    """
    deadline = time.perf_counter() + SETTLE_SECONDS
    for thread in _left:
        thread.wait(max(0.0, deadline - time.perf_counter()))


def end_process(code: int) -> None:
    """End the process with `code` if native code was left behind that still runs; else return.

    For the command line, which has nothing to do after its answer: an ordinary exit would wait for
    that code.
    """
    if any(thread.alive for thread in _left):
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
    thread = Work(work)
    asked_at: float | None = None
    try:
        while not thread.wait(POLL_SECONDS):
            poll()
            if run.should_stop:
                now = time.perf_counter()
                asked_at = now if asked_at is None else asked_at
                interrupt()
                if now - asked_at > (GRACE_SECONDS if run.cancelled else overtime):
                    _leave(thread)
                    return None
        poll()
    except BaseException:
        interrupt()
        if not thread.wait(GRACE_SECONDS):
            _leave(thread)
        raise
    return thread.value()
