"""Checkpoint files: flat tensors in chunks, by torch.distributed.checkpoint. Each rank writes and
reads the elements that it holds.

Whatever cuts wrote a tensor, a chunk is read from the stored ones that it shares elements with.

Files may have been written by anybody, and nothing in them is executed. torch keeps what it knows
of a checkpoint in a pickle, `.metadata`; only the classes that it consists of are made here. (The
tensors' own files torch reads with weights_only.)
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
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
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

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


class _Save(DefaultSavePlanner):
    """Writes the chunks that a rank answers for."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__()
        self.chunks = {chunk.index: chunk for chunk in chunks}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the chunks are known."""

    def create_local_plan(self) -> SavePlan:
        """One item per chunk."""
        return SavePlan([written(chunk) for chunk in self.chunks.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The metadata of all chunks."""
        stored: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                entry = stored.setdefault(
                    item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
                )
                entry.chunks.append(data.chunk)
        return all_plans, Metadata(stored)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A chunk's values."""
        return self.chunks[write_item.index].values


class _Load(DefaultLoadPlanner):
    """Reads into chunks what stored ones share with them."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__()
        self.chunks = {chunk.index: chunk for chunk in chunks}
        self.metadata: Any = None

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Keep the metadata."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """One item per intersection of a chunk here with one that is stored."""
        return LoadPlan([item for chunk in self.chunks.values() for item in self._reads(chunk)])

    def _reads(self, chunk: Chunk) -> Iterator[ReadItem]:
        stored = self.metadata.state_dict_metadata.get(chunk.key)
        if stored is None:
            raise InputError(
                "checkpoint lacks a tensor",
                got=chunk.key,
                expected="the model that it was written of",
            )
        if stored.size[0] != chunk.size:
            raise InputError(
                f"checkpoint is of another model: {chunk.key}",
                got=f"{stored.size[0]} elements",
                expected=f"{chunk.size}",
            )
        for other in stored.chunks:
            begin, end = other.offsets[0], other.offsets[0] + other.sizes[0]
            first, last = max(chunk.first, begin), min(chunk.first + len(chunk.values), end)
            if first < last:
                yield ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=chunk.index,
                    dest_offsets=torch.Size([first - chunk.first]),
                    storage_index=MetadataIndex(chunk.key, torch.Size([begin])),
                    storage_offsets=torch.Size([first - begin]),
                    lengths=torch.Size([last - first]),
                )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The place that an item goes to."""
        values = self.chunks[read_item.dest_index].values
        return values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])


def written(chunk: Chunk) -> WriteItem:
    """A chunk as an item to write."""
    part = ChunkStorageMetadata(torch.Size([chunk.first]), torch.Size([len(chunk.values)]))
    data = TensorWriteData(
        part, TensorProperties.create_from_tensor(chunk.values), torch.Size([chunk.size])
    )
    return WriteItem(chunk.index, WriteItemType.SHARD, tensor_data=data)


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
