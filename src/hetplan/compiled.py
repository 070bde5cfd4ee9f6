"""The one place that compiles: hot loops become machine code on first use, cached on disk.

The cache lies beside the source, or in the user's cache folder where numba cannot write there.

A kernel is an ordinary function of numbers and arrays. Keep kernels few and short: each one costs a
first run from a tenth of a second to a second.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """`function` compiled without the interpreter, in strict IEEE arithmetic: sums keep their
    order."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
