"""The one place that compiles: hot kernels become machine code on first use, cached on disk beside
the source.

numba falls back to the user's cache folder where the package's is not writable. What a kernel costs
to compile is mostly its length; each array that it made would cost a tenth of a second for every
other shape, and so would each assignment of slices: kernels fill arrays that they are given, one
element after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.types import unliteral

F = TypeVar("F", bound=Callable[..., Any])

# Strict IEEE arithmetic: sums must not be reordered. The rest leaves out what kernels do not use
# and a first run would wait for: pointers for C, counting references to arrays (a kernel that makes
# one does not compile), rewriting of array expressions.
OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "no_rewrites": True,
}


def kernel(function: F) -> F:
    """`function` compiled without the interpreter; it fills arrays and makes none."""
    made: Any = numba.njit(**OPTIONS)(function)
    template, plain = made.get_call_template, cast(Any, unliteral)
    # a constant in another kernel's call would have this one compiled once more, for that very
    # constant
    made.get_call_template = lambda args, kws: template(
        tuple(plain(a) for a in args), {name: plain(a) for name, a in dict(kws).items()}
    )
    return cast(F, made)
