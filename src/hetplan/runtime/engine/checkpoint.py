"""Checkpoints under the unsplit model's names, readable under any other plan.

A rank writes `rank-N.pt`, which `torch.load` opens: boxes (name, offsets, sizes of the whole,
values) of parameters and of the optimizer's states, all ranks' together every element once. A
tensor's split dimension is moved to the front and the tensor flattened, so that a box is a range of
its elements; those of SPMD programs are not flattened, and their boxes are slices of any dimension.
Whatever cuts, widths, shares and ZeRO levels wrote them, a rank maps the files into memory and
copies what they share with its own boxes. Names: `model.<layer>.<parameter>` and
`optimizer.<layer>.<parameter>.<state>`.

A folder holds `step-N` of complete checkpoints only (each with `hetplan.json`: step, seed,
optimizer, shapes, kinds of states, checksums of all that); what is being written has another name,
and is renamed when every rank is done.

Files may have been written by anybody, and nothing in them is executed: torch reads them with
weights_only. What was changed since it was written is refused.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from hashlib import file_digest, sha256
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from hetplan.errors import HetplanError, InputError, kind_and_text, require
from hetplan.files import read_json, to_json, write_text
from hetplan.runtime.engine.loop import Box, LossScale, Trained, overlap
from hetplan.runtime.engine.transport import gather_objects, host_group
from hetplan.schema import Count, StrictModel, parse
from hetplan.text import grouped

KEPT = 2  # checkpoints in a folder
RECORD = "hetplan.json"


class Record(StrictModel):
    """`hetplan.json` of a checkpoint. states: of the optimizer, "like" their parameters or single
    numbers. scale: a `LossScale`. files: SHA-256 of those beside it, and of what else is in it."""

    step: Count
    seed: int
    optimizer: Annotated[str, Field(min_length=1)]
    shapes: dict[str, list[Count]]
    states: dict[str, Literal["like", "scalar"]]
    scale: dict[str, float]
    files: dict[str, str]

    def digest(self) -> str:
        """Of all but the digests."""
        return sha256(to_json(self.model_dump(exclude={"files"})).encode()).hexdigest()


def record_of(folder: Path) -> Record:
    """The record of a complete checkpoint. Raises InputError where it is not what was written."""
    where = str(folder / RECORD)
    record = parse(Record, read_json(folder / RECORD), where=where)
    require(
        record.files.pop(RECORD, None) == record.digest(),
        "checkpoint is not what was written",
        where=where,
    )
    return record


def together(what: str, act: Callable[[], None]) -> None:
    """Done on all ranks, or a HetplanError with what the first of them ran into."""
    failure = ""
    try:
        act()
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        failure = kind_and_text(error)
    for rank, text in enumerate(gather_objects(failure)):
        if text:
            raise HetplanError(f"checkpoint cannot be {what}: rank {rank}: {text[:300]}")


def write_boxes(folder: Path, boxes: Iterable[Box]) -> None:
    """Those that this rank answers for."""
    stored = [(b.name, b.offsets, b.whole, b.values.reshape(b.sizes).cpu().clone()) for b in boxes]
    with (folder / f"rank-{dist.get_rank()}.pt").open("wb") as stream:
        torch.save(stored, stream)


def read_boxes(folder: Path, boxes: Iterable[Box]) -> None:
    """Fill some from stored ones."""
    files = (torch.load(file, mmap=True, weights_only=True) for file in folder.glob("*.pt"))
    stored = grouped((name, part) for file in files for name, *part in file)
    for box in boxes:
        into, left = torch.empty(box.sizes, dtype=box.values.dtype), box.values.numel()
        for offsets, whole, values in stored.get(box.name, ()):
            if tuple(whole) != box.whole:
                raise ValueError(f"{box.name} has sizes {list(whole)}, not {list(box.whole)}")
            sides = zip(box.offsets, box.sizes, offsets, values.shape, strict=True)
            pairs = [((a, a + size), (b, b + length)) for a, size, b, length in sides]
            here = tuple(slice(*overlap(own, other, own[0])) for own, other in pairs)
            there = tuple(slice(*overlap(own, other, other[0])) for own, other in pairs)
            left -= into[here].numel()
            into[here] = values[there]
        if left:
            raise ValueError(f"{left} elements of {box.name} are missing")
        box.values.copy_(into.view_as(box.values))


def digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of a checkpoint's files but the record. All ranks together."""
    files = sorted(file for file in folder.iterdir() if file.name != RECORD)
    own = {}
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        with file.open("rb") as stream:
            own[file.name] = file_digest(stream, "sha256").hexdigest()
    return {name: digest for part in gather_objects(own) for name, digest in part.items()}


def save(model: Trained, optimizer: Any, folder: str) -> None:
    """Write a checkpoint of the step that the model is at; all ranks together."""
    target = Path(folder) / f"step-{model.step}"
    temporary = target.with_name(f".{target.name}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier(group=host_group())
    kinds = state_kinds(optimizer)
    boxes = boxes_of(model, optimizer, kinds, mine=True)
    together("written", lambda: write_boxes(temporary, boxes))
    files = digests(temporary)
    if dist.get_rank() == 0:
        record = Record.model_validate(
            {
                "step": model.step, "seed": model.seed, "states": kinds,
                "shapes": {name: list(shape) for name, shape in model.shapes.items()},
                "optimizer": type(optimizer).__name__.lower(), "scale": asdict(model.scale),
                "files": files,
            }
        )  # fmt: skip
        record.files[RECORD] = record.digest()
        write_text(temporary / RECORD, to_json(record.model_dump()))
        # the same step again; anything else there is somebody's own
        if (target / RECORD).is_file():
            shutil.rmtree(target)
        os.replace(temporary, target)
        for old in complete(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier(group=host_group())


def complete(folder: str) -> list[Path]:
    """Complete checkpoints of a folder, the latest last."""
    written = (path.parent for path in Path(folder).glob(f"step-*/{RECORD}"))
    return sorted((p for p in written if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]))


def check_same(folder: str, **options: object) -> None:
    """Raise InputError where there is no checkpoint to go on from, where the latest one is damaged,
    and where it was written with other options, such as the optimizer."""
    record = record_of(latest(folder))
    for name, value in options.items():
        require(
            getattr(record, name) == value,
            f"cannot go on from a checkpoint with another --{name}",
            where=str(latest(folder)),
            got=value,
            expected=f"{getattr(record, name)}, as it was written with",
        )


def latest(folder: str) -> Path:
    """The latest complete checkpoint of a folder; raises InputError where there is none."""
    folders = complete(folder)
    require(folders, "no complete checkpoint", where=folder)
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


def load(model: Trained, optimizer: Any, folder: str) -> None:
    """Go on from the latest checkpoint of a folder; raises InputError where there is none, or one
    of another model."""
    stored = latest(folder)
    record = record_of(stored)
    require(
        {name: tuple(shape) for name, shape in record.shapes.items()} == model.shapes,
        "checkpoint is of another model",
        where=str(stored),
    )
    changed = {name for name, _ in digests(stored).items() ^ record.files.items()}
    require(
        not changed,
        f"checkpoint is not what was written: {', '.join(sorted(changed))}",
        where=str(stored),
    )
    for _, parameter in model.updated():
        for state, kind in record.states.items():
            if parameter.requires_grad:
                like = torch.zeros_like(parameter) if kind == "like" else torch.zeros(())
                optimizer.state[parameter][state] = like.detach()
    boxes = boxes_of(model, optimizer, record.states, mine=False)
    together("read", lambda: read_boxes(stored, boxes))
    model.step, model.scale = record.step, LossScale(**record.scale)  # type: ignore[arg-type]


def state_kinds(optimizer: Any) -> dict[str, str]:
    """State of the optimizer -> "like" its parameter, or "scalar"; the same on all ranks."""
    everyone = gather_objects(
        {
            name: "scalar" if value.dim() == 0 and parameter.dim() > 0 else "like"
            for parameter, states in optimizer.state.items()
            for name, value in states.items()
            if isinstance(value, Tensor)
        }
    )
    return {name: kind for kinds in everyone for name, kind in kinds.items()}


def boxes_of(
    model: Trained, optimizer: Any, kinds: Mapping[str, str], *, mine: bool
) -> Iterator[Box]:
    """Parameters and states of the optimizer that are here: views to be written to.

    mine: only what this rank answers for. Scalars are then there once per parameter, of the rank
    that has its first element.
    """
    yield from (replace(box, name=f"model.{box.name}") for box in model.boxes(mine=mine))
    for state, kind in kinds.items():
        values = {
            id(p): optimizer.state[p][state]
            for _, p in model.updated()
            if state in optimizer.state.get(p, {})
        }
        for box in model.boxes(values, mine=mine, scalars=kind == "scalar"):
            key = f"optimizer.{box.name}.{state}"
            if kind == "like":
                yield replace(box, name=key)
            elif not (mine and any(box.offsets)):
                yield Box(key, (0,), (1,), (1,), box.values.view(1))
