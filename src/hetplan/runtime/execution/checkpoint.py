"""Checkpoints under the unsplit model's names, readable under any other plan.

Written with torch.distributed.checkpoint. A tensor is stored in chunks of its elements, its split
dimension moved to the front and flattened: whatever cuts, widths, shares and ZeRO levels wrote
them, a rank reads the elements that it holds. Keys: `model.<layer>.<parameter>` and
`optimizer.<layer>.<parameter>.<state>`.

A folder holds `step-N` of complete checkpoints only (each with `hetplan.json`: step, seed,
optimizer, shapes, kinds of states); what is being written has another name, and is renamed when
every rank is done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.errors import InputError
from hetplan.files import to_json, write_text
from hetplan.runtime.execution.chunks import RECORD, Chunk, record_of, values_in, write_chunks
from hetplan.runtime.execution.distributed import Distributed
from hetplan.runtime.execution.spmd.distributed import DistributedProgram, restore, to_save
from hetplan.runtime.execution.states import Fragment
from hetplan.runtime.execution.transport import host_group

KEPT = 2  # checkpoints in a folder


def save(model: Distributed | DistributedProgram, optimizer: Any, folder: str) -> None:
    """Write a checkpoint of the step that the model is at; all ranks together."""
    target = Path(folder) / f"step-{model.step}"
    temporary = target.with_name(f".{target.name}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier(group=host_group())
    kinds = state_kinds(optimizer)
    if isinstance(model, DistributedProgram):
        write_chunks(temporary, to_save(model, optimizer, kinds))
    else:
        write_chunks(temporary, list(chunks_of(model, optimizer, kinds, mine=True)))
    if dist.get_rank() == 0:
        record = {
            "step": model.step, "seed": model.seed, "optimizer": type(optimizer).__name__.lower(),
            "shapes": shapes_of(model), "states": kinds,
        }  # fmt: skip
        write_text(temporary / RECORD, to_json(record))
        # the same step again; anything else there is somebody's own
        if (target / RECORD).is_file():
            shutil.rmtree(target)
        os.replace(temporary, target)
        for old in complete(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier(group=host_group())


def shapes_of(model: Distributed | DistributedProgram) -> dict[str, list[int]]:
    """Name -> shape of every parameter, unsplit."""
    held = model.shards if isinstance(model, DistributedProgram) else model.chain.parameters
    return {name: list(parameter.shape) for name, parameter in held.items()}


def complete(folder: str) -> list[Path]:
    """Complete checkpoints of a folder, the latest last."""
    folders = [
        p for p in Path(folder).glob("step-*") if p.name[5:].isdecimal() and (p / RECORD).is_file()
    ]
    return sorted(folders, key=lambda p: int(p.name[5:]))


def check_same(folder: str, **options: object) -> None:
    """Raise InputError where there is no checkpoint to go on from, where the latest one is damaged,
    and where it was written with other options, such as the optimizer."""
    record = record_of(latest(folder))
    for name, value in options.items():
        if getattr(record, name) != value:
            raise InputError(
                f"cannot go on from a checkpoint with another --{name}",
                where=str(latest(folder)),
                got=value,
                expected=f"{getattr(record, name)}, as it was written with",
            )


def latest(folder: str) -> Path:
    """The latest complete checkpoint of a folder; raises InputError where there is none."""
    folders = complete(folder)
    if not folders:
        raise InputError("no complete checkpoint", where=folder)
    return folders[-1]


def check_writable(folder: str) -> None:
    """Raise InputError where checkpoints could not be written, or would be in the way of something
    else."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        strangers = [p for p in Path(folder).glob("step-*") if not (p / RECORD).is_file()]
    except OSError as error:
        raise InputError(f"cannot write checkpoints: {error.strerror}", where=folder) from None
    if strangers:
        raise InputError(
            "folder holds something else under a checkpoint's name",
            where=folder,
            got=strangers[0].name,
        )


def load(model: Distributed | DistributedProgram, optimizer: Any, folder: str) -> None:
    """Go on from the latest checkpoint of a folder; raises InputError where there is none, or one
    of another model."""
    stored = latest(folder)
    record = record_of(stored)
    kinds: dict[str, str] = dict(record.states)
    if record.shapes != shapes_of(model):
        raise InputError("checkpoint is of another model", where=str(stored))
    if isinstance(model, DistributedProgram):
        restore(model, optimizer, kinds, lambda chunks: values_in(stored, chunks))
    else:
        load_parts(model, optimizer, kinds, stored)
    model.step = record.step
    model.updated()


def load_parts(model: Distributed, optimizer: Any, kinds: dict[str, str], folder: Path) -> None:
    """Fill the parameters and states that this rank holds."""
    trained = [parameter for _, parameter in model.states.updated() if parameter.requires_grad]
    for state, kind in kinds.items():
        for parameter in trained:
            like = torch.zeros_like(parameter) if kind == "like" else torch.zeros(())
            optimizer.state[parameter][state] = like.detach()
    chunks = list(chunks_of(model, optimizer, kinds, mine=False))
    for chunk, values in zip(chunks, values_in(folder, chunks), strict=True):
        chunk.values.copy_(values.view_as(chunk.values))  # several scalars may have one source


def state_kinds(optimizer: Any) -> dict[str, str]:
    """State of the optimizer -> "like" its parameter, or "scalar"; the same on all ranks."""
    own: dict[str, str] = {}
    for parameter, states in optimizer.state.items():
        for name, value in states.items():
            if isinstance(value, Tensor):
                own[name] = "scalar" if value.dim() == 0 and parameter.dim() > 0 else "like"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own, group=host_group())
    return {name: kind for kinds in everyone for name, kind in kinds.items()}


def chunks_of(
    model: Distributed, optimizer: Any, kinds: dict[str, str], *, mine: bool
) -> Iterator[Chunk]:
    """Parameters and states of the optimizer that are here: views to be written to.

    mine: only what this rank answers for, copied where need be. Scalars are then there once per
    parameter, of the rank that has its first element.
    """

    def chunk(key: str, f: Fragment) -> Chunk:
        size, values = prod(model.chain.parameters[f.name].shape), f.values.detach()
        return Chunk(key, f.first, size, values.reshape(-1) if mine else values)

    for f in model.states.fragments(mine=mine):
        yield chunk(f"model.{f.name}", f)
    for state, kind in kinds.items():
        values = {
            id(p): optimizer.state[p][state]
            for _, p in model.states.updated()
            if state in optimizer.state.get(p, {})
        }
        for f in model.states.fragments(values, mine=mine, scalars=kind == "scalar"):
            key = f"optimizer.{f.name}.{state}"
            if kind == "like":
                yield chunk(key, f)
            elif f.first == 0 or not mine:
                yield Chunk(key, 0, 1, f.values.detach().view(1))
