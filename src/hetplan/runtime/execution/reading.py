"""Checkpoints read from files that anybody may have written: nothing in them is executed.

torch.distributed.checkpoint keeps what it knows of a checkpoint in a pickle, `.metadata`; only the
classes that it consists of are made here. (The tensors' own files torch reads with weights_only.)
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from hetplan.errors import HetplanError, InputError, one_line
from hetplan.files import read_json
from hetplan.schema import Count, StrictModel, parse

RECORD = "hetplan.json"
_OF_TORCH = "torch.distributed.checkpoint."
ALLOWED = {
    *((f"{_OF_TORCH}metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_OF_TORCH}filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


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
            found = _Careful(opened).load()
    except OSError as error:
        raise InputError(f"checkpoint cannot be read: {error.strerror}", where=str(file)) from None
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise InputError(
            f"checkpoint's metadata is damaged: {one_line(str(error))[:200]}", where=str(file)
        ) from error
    if not isinstance(found, Metadata):
        raise InputError(
            "checkpoint's metadata is damaged", where=str(file), got=type(found).__name__
        )
    return found


def record_of(folder: Path) -> Record:
    """The record of a complete checkpoint, checked against its name and its metadata. Raises
    InputError."""
    where = str(folder / RECORD)
    found = parse(Record, read_json(folder / RECORD), where=where)
    if found.step != int(folder.name.removeprefix("step-")):
        raise InputError("step", where=where, got=found.step, expected=f"{folder.name}'s")
    keys = [key for key in metadata_of(folder).state_dict_metadata if key.startswith("optimizer.")]
    stored = {key.rpartition(".")[2] for key in keys}
    if stored != set(found.states):
        raise InputError("states", where=where, got=listed(found.states), expected=listed(stored))
    return found


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
