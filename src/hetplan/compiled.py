"""The one place that compiles: hot kernels become machine code on first use, cached on disk beside the source.

numba falls back to the user's cache folder where the package's is not writable. What a kernel costs to compile is
mostly its length, then a tenth of a second or so for each allocation of another shape, each assignment of slices and
each kernel that it calls; so kernels fill arrays that they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.types import unliteral

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """`function` compiled without the interpreter, strict IEEE arithmetic (sums must not be reordered).

    It makes no arrays, which spares the counting of references (an attempt does not compile); see `maker`.
    """
    return _compiled(function, counts_references=False)


def maker(function: F) -> F:
    """A `kernel` that makes arrays."""
    return _compiled(function, counts_references=True)


def _compiled(function: F, *, counts_references: bool) -> F:
    made: Any = numba.njit(
        cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, _nrt=counts_references
    )(function)
    template, plain = made.get_call_template, cast(Any, unliteral)
    # a constant in another kernel's call would have this one compiled once more, for that very constant
    made.get_call_template = lambda args, kws: template(
        tuple(plain(a) for a in args), {name: plain(a) for name, a in dict(kws).items()}
    )
    return cast(F, made)
