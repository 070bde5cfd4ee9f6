"""Checkpoints under the unsplit model's names, readable under any other plan.

Written with torch.distributed.checkpoint. A tensor is stored in chunks of its elements, its split
dimension moved to the front and flattened: whatever cuts, widths, shares and ZeRO levels wrote
them, a rank reads the elements that it holds from the stored chunks that it shares them with. Keys:
`model.<layer>.<parameter>` and `optimizer.<layer>.<parameter>.<state>`. SPMD programs store
parameters and states whole: ranks take turns in writing them, and every rank cuts its part out of
what it reads.

A folder holds `step-N` of complete checkpoints only (each with `hetplan.json`: step, seed,
optimizer, shapes, kinds of states); what is being written has another name, and is renamed when
every rank is done.

Files may have been written by anybody, and nothing in them is executed. torch keeps what it knows
of a checkpoint in a pickle, `.metadata`; only the classes that it consists of are made here. (The
tensors' own files torch reads with weights_only.)
"""

import io
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hetplan.errors import HetplanError, InputError, one_line
from hetplan.files import read_json, to_json, write_text
from hetplan.formulations.hap.spmd.whole import Shard
from hetplan.runtime.execution.distributed import Distributed
from hetplan.runtime.execution.spmd.distributed import DistributedProgram, held_by
from hetplan.runtime.execution.spmd.machine import Ranks
from hetplan.runtime.execution.states import Fragment
from hetplan.runtime.execution.transport import gather_objects, host_group
from hetplan.schema import Count, StrictModel, parse

KEPT = 2  # checkpoints in a folder
RECORD = "hetplan.json"
_OF_TORCH = "torch.distributed.checkpoint."
ALLOWED = {
    *(
        (f"{_OF_TORCH}metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_OF_TORCH}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
}


class Record(StrictModel):
    """`hetplan.json` of a checkpoint. states: of the optimizer, "like" their parameters or single
    numbers."""

    step: Count
    seed: int
    optimizer: Annotated[str, Field(min_length=1)]
    shapes: dict[str, list[Count]]
    states: dict[str, Literal["like", "scalar"]]


class _Careful(pickle.Unpickler):
    """Makes the classes of ALLOWED, and types of numbers."""

    def find_class(self, module: str, name: str) -> Any:
        """Of a name that the file holds."""
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in ALLOWED or is_type:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no checkpoint does")


class Reader(dcp.FileSystemReader):
    """torch's, with metadata read carefully."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's, but for whatever a pickle may run."""
        return metadata_of(Path(self.path))


def metadata_of(folder: Path) -> Metadata:
    """What torch.distributed.checkpoint knows of a checkpoint. Raises InputError where that is not
    to be had."""
    file = folder / ".metadata"
    try:
        metadata = _Careful(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise InputError(f"checkpoint cannot be read: {error.strerror}", where=str(file)) from None
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise InputError(
            f"checkpoint's metadata is damaged: {one_line(str(error))[:200]}", where=str(file)
        ) from error
    if not isinstance(metadata, Metadata):
        raise InputError(
            "checkpoint's metadata is damaged", where=str(file), got=type(metadata).__name__
        )
    return metadata


def record_of(folder: Path) -> Record:
    """The record of a complete checkpoint, checked against its name and its metadata. Raises
    InputError."""
    where = str(folder / RECORD)
    record = parse(Record, read_json(folder / RECORD), where=where)
    if record.step != int(folder.name.removeprefix("step-")):
        raise InputError("step", where=where, got=record.step, expected=f"{folder.name}'s")
    keys = [key for key in metadata_of(folder).state_dict_metadata if key.startswith("optimizer.")]
    stored = {key.rpartition(".")[2] for key in keys}
    if stored != set(record.states):
        raise InputError("states", where=where, got=listed(record.states), expected=listed(stored))
    return record


def listed(names: Iterable[str]) -> str:
    """In order, or none."""
    return ", ".join(sorted(names)) or "none"


def cause_of(error: CheckpointException, what: str) -> HetplanError:
    """What a rank of many ran into, in one line. what: "written", say."""
    rank, (first, _) = min(error.failures.items())
    text = first.strerror if isinstance(first, OSError) and first.strerror else str(first)
    if isinstance(first, HetplanError):
        return first
    return HetplanError(
        f"checkpoint cannot be {what}: rank {rank}: {type(first).__name__}: {one_line(text)[:200]}"
    )


@dataclass(frozen=True)
class Chunk:
    """Elements [first, first + len(values)) of a flat tensor of `size` elements."""

    key: str
    first: int
    size: int
    values: Tensor

    @property
    def index(self) -> MetadataIndex:
        """Its name in the checkpoint."""
        return MetadataIndex(self.key, torch.Size([self.first]))

    @property
    def part(self) -> ChunkStorageMetadata:
        """Where it stands in its tensor."""
        return ChunkStorageMetadata(torch.Size([self.first]), torch.Size([len(self.values)]))


class _Save(DefaultSavePlanner):
    """Writes the chunks that a rank answers for; torch checks that all ranks' together are every
    tensor once."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self.chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """One item per chunk."""
        items = []
        for index, chunk in self.chunks.items():
            properties = TensorProperties.create_from_tensor(chunk.values)
            data = TensorWriteData(chunk.part, properties, torch.Size([chunk.size]))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """A chunk's values."""
        return self.chunks[index].values


class _Load(DefaultLoadPlanner):
    """Reads into chunks what stored ones share with them."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__()
        self.chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        """One item per intersection of a chunk here with one that is stored."""
        items: list[ReadItem] = []
        for chunk in self.chunks.values():
            stored: Any = self.metadata.state_dict_metadata.get(chunk.key)
            if stored is None or stored.size[0] != chunk.size:
                raise InputError(
                    f"checkpoint is of another model: {chunk.key}",
                    got="nothing" if stored is None else f"{stored.size[0]} elements",
                    expected=f"{chunk.size}",
                )
            items += create_read_items_for_chunk_list(chunk.key, stored, [chunk.part])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The place that an item goes to."""
        return self.chunks[index].values


def write_chunks(folder: Path, chunks: list[Chunk]) -> None:
    """All ranks together; raises HetplanError with what one of them ran into."""
    writer = dcp.FileSystemWriter(folder)
    try:
        dcp.save({}, storage_writer=writer, planner=_Save(chunks), process_group=host_group())
    except dcp.CheckpointException as error:
        raise cause_of(error, "written") from None


def values_in(folder: Path, chunks: list[Chunk]) -> list[Tensor]:
    """Stored values of chunks, flat."""
    planner = _Load([replace(c, values=c.values.reshape(-1).clone()) for c in chunks])
    try:
        dcp.load({}, storage_reader=Reader(folder), planner=planner, process_group=host_group())
    except dcp.CheckpointException as error:
        raise cause_of(error, "read") from None
    return [planner.chunks[chunk.index].values for chunk in chunks]


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
        write_chunks(temporary, whole_chunks(model, optimizer, kinds))
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
        empty_states(optimizer, model.parameters.values(), kinds)
        for name in model.parameters:
            restore(model, optimizer, kinds, name, stored)
    else:
        empty_states(optimizer, [p for _, p in model.states.updated() if p.requires_grad], kinds)
        chunks = list(chunks_of(model, optimizer, kinds, mine=False))
        for chunk, values in zip(chunks, values_in(stored, chunks), strict=True):
            chunk.values.copy_(values.view_as(chunk.values))  # several scalars may have one source
    model.step = record.step


def state_kinds(optimizer: Any) -> dict[str, str]:
    """State of the optimizer -> "like" its parameter, or "scalar"; the same on all ranks."""
    own = {
        name: "scalar" if value.dim() == 0 and parameter.dim() > 0 else "like"
        for parameter, states in optimizer.state.items()
        for name, value in states.items()
        if isinstance(value, Tensor)
    }
    return {name: kind for kinds in gather_objects(own) for name, kind in kinds.items()}


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


# (key in a checkpoint, how it is held or None for a single number, what is here)
Entry = tuple[str, Shard | None, Tensor]


def entries_of(
    model: DistributedProgram, optimizer: Any, kinds: dict[str, str], name: str
) -> list[Entry]:
    """A parameter and the optimizer's states of it; kinds: "like" the parameter, or "scalar"."""
    parameter, shard = model.parameters[name], model.shards[name]
    entries: list[Entry] = [(f"model.{name}", shard, parameter.detach())]
    for state, kind in kinds.items():
        held = shard if kind == "like" else None
        entries.append((f"optimizer.{name}.{state}", held, optimizer.state[parameter][state]))
    return entries


def whole_chunks(model: DistributedProgram, optimizer: Any, kinds: dict[str, str]) -> list[Chunk]:
    """What this rank writes; all ranks together."""
    ranks, chunks = Ranks(model.everyone, dist.get_rank()), []
    for number, name in enumerate(model.parameters):
        for key, shard, value in entries_of(model, optimizer, kinds, name):
            if shard is not None and shard.dimension is not None:
                value = ranks.gather(value, shard.dimension, shard.bounds, "padded")
            if number % dist.get_world_size() == ranks.rank:
                chunks.append(Chunk(key, 0, value.numel(), value.reshape(-1).cpu().clone()))
    return chunks


def empty_states(optimizer: Any, parameters: Iterable[nn.Parameter], kinds: dict[str, str]) -> None:
    """Make an optimizer's states of some parameters, to be filled."""
    for state, kind in kinds.items():
        for parameter in parameters:
            like = torch.zeros_like(parameter) if kind == "like" else torch.zeros(())
            optimizer.state[parameter][state] = like.detach()


def restore(
    model: DistributedProgram, optimizer: Any, kinds: dict[str, str], name: str, stored: Path
) -> None:
    """Fill a parameter and its states. All ranks together."""
    entries = entries_of(model, optimizer, kinds, name)
    whole = [
        torch.zeros(() if shard is None else shard.shape, dtype=into.dtype)
        for _, shard, into in entries
    ]
    chunks = [Chunk(key, 0, w.numel(), w) for w, (key, _, _) in zip(whole, entries, strict=True)]
    for values, like, (_, shard, into) in zip(
        values_in(stored, chunks), whole, entries, strict=True
    ):
        made = values.view_as(like)
        into.copy_(made if shard is None else held_by(dist.get_rank(), shard, made))
