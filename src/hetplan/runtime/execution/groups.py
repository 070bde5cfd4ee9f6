"""Process groups, and collectives with parts of any size on top of them.

All ranks make all groups in the same order. On gloo, all-gathers of unequal parts are padded, and a reduce-scatter is
an all-reduce of which a part is kept: gloo's own is slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.schema import Range

_made: dict[tuple[int, ...], Any] = {}


def make_groups(members: Iterable[Sequence[int]]) -> dict[tuple[int, ...], Any]:
    """A group for each set of two ranks or more; the same call on every rank. Groups are kept for later calls."""
    for ranks in sorted({tuple(sorted(ranks)) for ranks in members}):
        if len(ranks) > 1 and ranks not in _made:
            whole = len(ranks) == dist.get_world_size()
            _made[ranks] = dist.group.WORLD if whole else dist.new_group(list(ranks))
    return dict(_made)


def forget_groups() -> None:
    """After the process group was destroyed."""
    _made.clear()


def sum_over(x: Tensor, group: Any) -> None:
    """All-reduce in place."""
    dist.all_reduce(x, group=group)


def gather_parts(part: Tensor, parts: Sequence[Range], group: Any) -> Tensor:
    """All parts [first, last) of a flat tensor, from every member its own."""
    longest = max(last - first for first, last in parts)
    padded = torch.zeros(longest, dtype=part.dtype, device=part.device)
    padded[: len(part)] = part
    received = [torch.empty_like(padded) for _ in parts]
    dist.all_gather(received, padded, group=group)
    return torch.cat([r[: last - first] for r, (first, last) in zip(received, parts, strict=True)])
