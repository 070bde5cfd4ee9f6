"""Every exchange of a group, on values that tell who sent them; as a target of `parity.forked`, of
one rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.runtime.engine.transport import Group, Staging, Transport, one_group
from hetplan.runtime.launch.devices import local_device
from parity.device import DEVICE

WORLDS = [1]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WAYS: tuple[Staging, ...] = ("auto", "always")


def work(rank: int, world: int, folder: Path) -> None:
    """All of them, by the way that tensors go and by the host's memory; what goes wrong is an
    assertion."""
    backends = set()
    for way in WAYS:
        transport = Transport.over(local_device(DEVICE), way)
        backends.add(transport.backend)
        group = Group(transport, one_group(tuple(range(world)), transport.backend, 99))
        for dtype in DTYPES:
            check(group, rank, world, dtype, transport.device)
    (folder / f"exchanged-{world}-{rank}").write_text(" ".join(sorted(backends)))


def check(group: Group, rank: int, world: int, dtype: torch.dtype, device: torch.device) -> None:
    """One type."""

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    def same(x: Tensor, y: Tensor) -> None:
        assert x.device == y.device and x.dtype == y.dtype and torch.equal(x, y), (x, y)

    x = filled(rank + 1, 2, 3)
    group.total(x)
    same(x, filled(world * (world + 1) / 2, 2, 3))
    across = filled(rank, 4, 2).t()  # not contiguous
    group.total(across, dist.ReduceOp.MAX)
    same(across, filled(world - 1, 2, 4))
    group.total(filled(rank, 0))
    x = filled(rank, 3)
    group.broadcast(x, world - 1)
    same(x, filled(world - 1, 3))
    x = filled(rank + 1, 2)
    group.reduce(x, 0)
    if rank == 0:
        same(x, filled(world * (world + 1) / 2, 2))
    lengths = [2 * r for r in range(world)]  # the first has none
    for r, part in enumerate(group.gather(filled(rank, lengths[rank], 2), lengths)):
        same(part, filled(r, lengths[r], 2))
    assert [len(p) for p in group.gather(filled(0, 0), [0] * world)] == [0] * world
    leaving = list(range(world))  # r entries for rank r
    sent = torch.cat([filled(10 * rank + to, n) for to, n in enumerate(leaving)])
    came = group.swap(sent, leaving, [rank] * world)
    same(came, torch.cat([filled(10 * of + rank, rank) for of in range(world)]))
