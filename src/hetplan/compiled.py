"""The one place that compiles: hot loops become machine code on first use, cached on disk.

The cache lies beside the source, or in the user's cache folder where numba cannot write there.
Where it can write in neither, or a file of the cache is damaged, the kernel is compiled again.

A kernel is an ordinary function of numbers and arrays. Keep kernels few and short: each one costs a
first run from a tenth of a second to a second, during which the clock of time limits stands still.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

from hetplan.clock import CLOCK

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """`function` compiled without the interpreter, in strict IEEE arithmetic: sums keep their
    order."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    # numba raises RuntimeError where it finds no folder to write to
    with contextlib.suppress(RuntimeError):
        compiled._cache = Cache(function)
    compile_or_load = compiled.compile

    def off_the_clock(signature: Any) -> Any:
        """What numba calls on the first call with arguments of new types."""
        with CLOCK.stopped():
            return compile_or_load(signature)

    compiled.compile = off_the_clock
    return cast(F, compiled)


class Cache:
    """numba's cache of one kernel, for which a file that cannot be used is a file that is missing.

    A process that was killed, or a full disk, leaves index files and data files that are empty or
    cut. What reading them raises depends on where they were cut; numba lets all of it through.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        made_by_numba: Any = FunctionCache
        self.files = made_by_numba(function)
        self.cache_path: str = self.files.cache_path

    def flush(self) -> None:
        """Replace the index by an empty one."""
        self.files.flush()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel for these types of arguments, or None where it has to be compiled.

        An index whose entries cannot be used is replaced, so that what is compiled now can be
        saved.
        """
        try:
            return self.files.load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - unpickling what is damaged may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled kernel, where that is possible; it runs in this process in any case."""
        with contextlib.suppress(Exception):  # reads the index first, which may be damaged still
            self.files.save_overload(sig, data)
