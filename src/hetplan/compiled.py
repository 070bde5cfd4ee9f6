"""Kernels: hot loops that numba compiles to machine code on first use and caches on disk.

No other module of hetplan calls numba. The cache lies beside the source, or in the user's cache
folder where numba cannot write beside the source. Where numba can write to neither folder, or a
file of the cache is damaged, the kernel is compiled again.

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
    """`function` as a compiled kernel, in strict IEEE arithmetic: sums keep their order, and a
    division by 0 gives an infinity or nan instead of an exception."""
    # nogil: the other threads of the process go on while a kernel runs
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    # `_cache` is what `njit(cache=True)` sets, with numba's own class. numba raises RuntimeError
    # where it finds no folder to write to.
    with contextlib.suppress(RuntimeError):
        compiled._cache = Cache(function)
    compile_or_load = compiled.compile

    def off_the_clock(signature: Any) -> Any:
        """Compile or load the kernel for the types `signature`, while the clock stands still. numba
        calls this on the first call with arguments of new types."""
        with CLOCK.stopped():
            return compile_or_load(signature)

    compiled.compile = off_the_clock
    return cast(F, compiled)


class Cache:
    """numba's cache of one kernel, in which a file that cannot be read counts as missing.

    A process that was killed, or a full disk, leaves index files and data files that are empty or
    cut. Reading such a file raises an exception that depends on where it was cut, and numba catches
    none of these exceptions.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        untyped_class: Any = FunctionCache
        self.files = untyped_class(function)
        self.cache_path: str = self.files.cache_path

    def flush(self) -> None:
        """Replace the index by an empty one."""
        self.files.flush()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel for these types of arguments, or None where it has to be compiled.

        An index whose entries cannot be used is replaced by an empty one, so that the kernel that
        numba compiles next can be saved.
        """
        try:
            return self.files.load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - unpickling a damaged file may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled kernel where that is possible. It runs in this process in any case."""
        # numba reads the index before it writes; the index may still be damaged
        with contextlib.suppress(Exception):
            self.files.save_overload(sig, data)
