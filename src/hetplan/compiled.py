"""The one place that compiles: hot kernels become machine code on first use, cached on disk beside the source.

numba falls back to the user's cache folder where the package's is not writable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """`function` compiled without the interpreter, strict IEEE arithmetic (sums must not be reordered)."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
