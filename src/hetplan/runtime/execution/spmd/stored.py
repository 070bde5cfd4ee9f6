"""Checkpoints of programs: parameters and optimizer states whole, each rank writes an even part of
every tensor.

Slices of any dimension are gathered and cut evenly, so that what is stored does not depend on the
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.formulations.hap.spmd.axes import Bounds
from hetplan.runtime.execution.chunks import Chunk
from hetplan.runtime.execution.spmd.distributed import DistributedProgram, held_by
from hetplan.runtime.execution.spmd.ranks import Ranks
from hetplan.runtime.plan import split
from hetplan.runtime.spmd_decision import Shard

Tensors = Iterator[tuple[str, Shard, Tensor]]


def tensors(model: DistributedProgram, optimizer: Any, kinds: dict[str, str]) -> Tensors:
    """(key, how it is held, what is here) of parameters and of states that are like them."""
    for name, parameter in model.parameters.items():
        yield f"model.{name}", model.shards[name], parameter.detach()
        for state, kind in kinds.items():
            if kind == "like":
                value = optimizer.state[parameter][state]
                yield f"optimizer.{name}.{state}", model.shards[name], value


def scalars(
    model: DistributedProgram, optimizer: Any, kinds: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """(key, value) of states that are single numbers."""
    for name, parameter in model.parameters.items():
        for state, kind in kinds.items():
            if kind == "scalar":
                yield f"optimizer.{name}.{state}", optimizer.state[parameter][state]


def parts_of(shard: Shard) -> tuple[int, Bounds]:
    """Entries of a tensor, and each rank's even part of them."""
    size = math.prod(shard.shape)
    return size, tuple(split(size, [1.0] * dist.get_world_size()))


def to_save(model: DistributedProgram, optimizer: Any, kinds: dict[str, str]) -> list[Chunk]:
    """What this rank writes; all ranks together."""
    ranks, chunks = Ranks(model.everyone), []
    for key, shard, value in tensors(model, optimizer, kinds):
        size, parts = parts_of(shard)
        if shard.dimension is not None:
            (value,) = ranks.gather([value], shard.dimension, shard.bounds, "padded")
        first, last = parts[ranks.rank]
        if last > first:
            mine = value.reshape(-1)[first:last].cpu().clone()
            chunks.append(Chunk(key, first, size, mine))
    if ranks.rank == 0:
        singles = scalars(model, optimizer, kinds)
        chunks += [Chunk(key, 0, 1, value.cpu().view(1)) for key, value in singles]
    return chunks


def restore(
    model: DistributedProgram,
    optimizer: Any,
    kinds: dict[str, str],
    read: Callable[[list[Chunk]], list[Tensor]],
) -> None:
    """Fill parameters and states; `read` gives the stored values of chunks. All ranks together."""
    for parameter in model.parameters.values():
        for state, kind in kinds.items():
            like = torch.zeros_like(parameter) if kind == "like" else torch.zeros(())
            optimizer.state[parameter][state] = like.detach()
    ranks, places, chunks = Ranks(model.everyone), list(tensors(model, optimizer, kinds)), []
    for key, shard, value in places:
        size, parts = parts_of(shard)
        first, last = parts[ranks.rank]
        chunks.append(Chunk(key, first, size, torch.zeros(last - first, dtype=value.dtype)))
    single = list(scalars(model, optimizer, kinds))
    values = read([*chunks, *(Chunk(key, 0, 1, value.view(1)) for key, value in single)])
    for (_, shard, into), part in zip(places, values, strict=False):
        here = part.to(into.device)
        (flat,) = ranks.gather([here], 0, parts_of(shard)[1], "padded")
        into.copy_(held_by(ranks.rank, shard, flat.view(shard.shape)))
    for (_, into), value in zip(single, values[len(places) :], strict=True):
        into.copy_(value.view(()))
