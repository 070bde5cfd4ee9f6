"""Process groups, each made once, by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# whoever watches over the ranks notices earlier; NCCL's own are 10
PATIENCE = timedelta(minutes=30)
_made: dict[Any, Any] = {}
_of: list[Any] = [None]  # the process group that these are parts of


def kept() -> dict[Any, Any]:
    """What was made, or found out together, since the process group was initialised."""
    if _of[0] is not dist.group.WORLD:
        _made.clear()
        _of[0] = dist.group.WORLD
    return _made


def host_group() -> Any:
    """All ranks, for tensors in host memory: the process group itself where it has gloo."""
    made = kept()
    if "host" not in made:
        made["host"] = (
            dist.group.WORLD
            if "gloo" in dist.get_backend_config()
            else dist.new_group(backend="gloo", timeout=PATIENCE)
        )
    return made["host"]


def make_groups(members: Iterable[Sequence[int]], backend: str) -> dict[tuple[int, ...], Any]:
    """A group for each set of two ranks or more; the same call on every rank."""
    found = {}
    for ranks in sorted({tuple(sorted(ranks)) for ranks in members}):
        if len(ranks) > 1:
            found[ranks] = one_group(ranks, backend)
    return found


def one_group(ranks: tuple[int, ...], backend: str, number: int = 0) -> Any:
    """The group of these ranks; number: where several of the same ranks are to be told apart."""
    made = kept()
    if (ranks, backend, number) not in made:
        host = host_group()
        whole = len(ranks) == dist.get_world_size() and backend == "gloo" and number == 0
        made[ranks, backend, number] = (
            host if whole else dist.new_group(list(ranks), backend=backend, timeout=PATIENCE)
        )
    return made[ranks, backend, number]
