"""ATen's operators that only move entries: views, permutations, slices, joins, copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hetplan.runtime.tracing.walk import MissingRule, Rule, Tensor, Walker, positive


def view(w: Walker, x: Tensor, shape: Sequence[int]) -> Tensor:
    """A reshape; one length may be -1."""
    wanted = [int(n) for n in shape]
    if -1 in wanted:
        wanted[wanted.index(-1)] = math.prod(x.shape) // -math.prod(wanted)
    return w.reshape(x, wanted)


def unsqueeze(w: Walker, x: Tensor, dim: int) -> Tensor:
    """A dimension of length 1."""
    d = positive(dim, len(x.shape) + 1)
    return w.reshape(x, (*x.shape[:d], 1, *x.shape[d:]))


def squeeze(w: Walker, x: Tensor, dim: Any = None) -> Tensor:
    """Dimensions of length 1 left out."""
    rank = len(x.shape)
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {positive(d, rank) for d in dims}
    return w.reshape(x, [n for d, n in enumerate(x.shape) if n != 1 or d not in gone])


def permute(w: Walker, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Dimensions in another order."""
    return w.apply("permute", x, order=tuple(positive(d, len(x.shape)) for d in dims))


def expand(w: Walker, x: Tensor, shape: Sequence[int], *, implicit: bool = False) -> Tensor:
    """Dimensions of length 1 repeated, new ones in front."""
    lead = len(shape) - len(x.shape)
    x = w.reshape(x, (*[1] * lead, *x.shape))
    wanted = tuple(
        have if want == -1 else int(want) for want, have in zip(shape, x.shape, strict=True)
    )
    return x if wanted == x.shape else w.apply("repeat", x, shape=wanted)


def narrow(w: Walker, x: Tensor, d: int, start: int, stop: int) -> Tensor:
    """The range [start, stop) of dimension d."""
    if (start, stop) == (0, x.shape[d]):
        return x
    return w.apply("select", x, label="slice", dimension=d, start=start, stop=stop)


def slice_(
    w: Walker,
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """A slice with step 1."""
    if step != 1:
        raise MissingRule("slices with a step")
    d = positive(dim, len(x.shape))
    first, last, _ = slice(start, end).indices(x.shape[d])
    return narrow(w, x, d, first, last)


def select(w: Walker, x: Tensor, dim: int, index: int) -> Tensor:
    """One index of a dimension, which is left out."""
    d = positive(dim, len(x.shape))
    i = positive(index, x.shape[d])
    return w.reshape(narrow(w, x, d, i, i + 1), (*x.shape[:d], *x.shape[d + 1 :]))


def split_with_sizes(
    w: Walker, x: Tensor, sizes: Sequence[int], dim: int = 0
) -> tuple[Tensor, ...]:
    """Ranges one after the other."""
    d, begin, found = positive(dim, len(x.shape)), 0, []
    for size in sizes:
        found.append(narrow(w, x, d, begin, begin + size))
        begin += size
    return tuple(found)


def cat(w: Walker, tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """One after the other."""
    parts = [w.tensor(part) for part in tensors]
    return w.apply("join", *parts, label="cat", dimension=positive(dim, len(parts[0].shape)))


def unchanged(w: Walker, x: Any, *_: Any, **__: Any) -> Any:
    """Copies and conversions between floating types."""
    return x


RULES: dict[str, Rule] = {
    **dict.fromkeys(("aten.view", "aten._unsafe_view"), view),
    "aten.unsqueeze": unsqueeze,
    "aten.squeeze": squeeze,
    "aten.permute": permute,
    "aten.expand": expand,
    "aten.slice": slice_,
    "aten.select": select,
    "aten.split_with_sizes": split_with_sizes,
    "aten.cat": cat,
    **dict.fromkeys(("aten.clone", "aten.alias", "aten._to_copy"), unchanged),
}
