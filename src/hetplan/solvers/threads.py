"""Work on another thread whose start cannot hang.

`threading.Thread.start` waits until the new thread says that it runs. Where memory is limited, the
thread may die before it can say so, and its starter would wait for ever.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
START_SECONDS = 10.0


class Work(Generic[T]):
    """A function's value, computed on a thread of its own that ends with the process.

    Raises MemoryError when the thread does not begin within START_SECONDS, RuntimeError when there
    can be none.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: list[T | None] = [None]
        # What stays where the thread ends without a word.
        self._error: list[BaseException | None] = [MemoryError("a thread ran out of memory")]
        # Locks are made here and only let go there: a thread without memory can still do that.
        self._begun, self._over = _thread.allocate_lock(), _thread.allocate_lock()
        self._begun.acquire()
        self._over.acquire()
        _thread.start_new_thread(self._run, ())
        if not self._begun.acquire(timeout=START_SECONDS):
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
        found = self._value[0]
        return found  # type: ignore[return-value] # None only where T is
