"""Checkpoint files: flat tensors in chunks, by torch.distributed.checkpoint. Each rank writes and
reads the elements that it holds.

Whatever cuts wrote a tensor, a chunk is read from the stored ones that it shares elements with.

Files may have been written by anybody, and nothing in them is executed. torch keeps what it knows
of a checkpoint in a pickle, `.metadata`; only the classes that it consists of are made here. (The
tensors' own files torch reads with weights_only.)
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor
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
from hetplan.files import read_json
from hetplan.runtime.execution.transport import host_group
from hetplan.schema import Count, StrictModel, parse

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
        with file.open("rb") as opened:
            metadata = _Careful(opened).load()
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
            if stored is None:
                expected = "the model that it was written of"
                raise InputError("checkpoint lacks a tensor", got=chunk.key, expected=expected)
            if stored.size[0] != chunk.size:
                raise InputError(
                    f"checkpoint is of another model: {chunk.key}",
                    got=f"{stored.size[0]} elements",
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
    planner = _Load([Chunk(c.key, c.first, c.size, c.values.reshape(-1).clone()) for c in chunks])
    try:
        dcp.load({}, storage_reader=Reader(folder), planner=planner, process_group=host_group())
    except dcp.CheckpointException as error:
        raise cause_of(error, "read") from None
    return [planner.chunks[chunk.index].values for chunk in chunks]
