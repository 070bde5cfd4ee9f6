"""Checkpoints under the unsplit model's names, which any other plan of the model can read.

A folder has one subfolder `step-N` for each complete checkpoint. The ranks write a checkpoint into
a temporary folder, which is renamed when all of them are done. A checkpoint has a record
`hetplan.json` (`Record`) and one file `rank-N.pt` for each rank, which `torch.load` opens: a list
of (name, offsets, sizes of the unsplit tensor, values), one entry for each box (`loop.Box`). The
files of all ranks together have every element once.

Names are `model.<layer>.<parameter>` and `optimizer.<layer>.<parameter>.<state>`. Plans of stages
move a tensor's split dimension to the front and flatten the tensor, so that a box is a range of its
elements. SPMD programs flatten nothing, and their boxes are slices of any dimension.

A rank that reads a checkpoint maps all its files into memory, and copies the elements that its own
boxes need. The plan that wrote the files may have had other stages, tensor ranks, replicas or ZeRO
levels.

Files may come from anybody, and nothing in them is executed: torch reads them with weights_only. A
checkpoint whose files differ from their digests in the record is refused.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from errno import EDQUOT, ENOSPC
from hashlib import file_digest, sha256
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field, field_validator
from torch import Tensor

from hetplan.errors import HetplanError, InputError, kind_and_text, require
from hetplan.files import read_json, to_json, write_text
from hetplan.runtime.engine.loop import Box, LossScale, TrainedPart, overlap
from hetplan.runtime.engine.transport import gather_objects, host_group
from hetplan.schema import Count, StrictModel, parse
from hetplan.text import grouped

T = TypeVar("T")

FULL_BYTES = 1 << 20  # a disk with less free space counts as full, where torch hides the error
MOST_CHECKPOINTS = 2  # complete ones that a folder keeps, the latest
RECORD_FILE = "hetplan.json"

StateKind = Literal["like", "scalar"]
"""Shape of an optimizer state: "like" its parameter's, or a single number."""


class Record(StrictModel):
    """`hetplan.json` of a checkpoint."""

    step: Count
    """Iterations done."""
    seed: int
    """Seed of dropout and of synthetic data."""
    optimizer: Annotated[str, Field(min_length=1)]
    """The optimizer's class, in lower case."""
    shapes: dict[str, list[Count]]
    """Parameter -> sizes of the unsplit parameter."""
    states: dict[str, StateKind]
    """Optimizer state -> its kind."""
    scale: dict[str, float]
    """Fields of the `LossScale`."""
    files: dict[str, str]
    """File -> its SHA-256; for the record itself its `digest`."""

    @field_validator("scale")
    @classmethod
    def _of_a_loss_scale(cls, scale: dict[str, float]) -> dict[str, float]:
        names = {field.name for field in fields(LossScale)}
        require(scale.keys() == names, "not the fields of a loss scale", expected=", ".join(names))
        return scale

    def digest(self) -> str:
        """SHA-256 of all fields but `files`."""
        return sha256(to_json(self.model_dump(exclude={"files"})).encode()).hexdigest()


def read_record(folder: Path) -> Record:
    """The record of a complete checkpoint, without its own digest among `files`. Raises InputError
    where the record does not match this digest."""
    where = str(folder / RECORD_FILE)
    record = parse(Record, read_json(folder / RECORD_FILE), where=where)
    require(
        record.files.pop(RECORD_FILE, None) == record.digest(),
        "checkpoint is not what was written",
        where=where,
    )
    return record


def on_all_ranks(what: str, act: Callable[[], None], folder: Path | None = None) -> None:
    """Call `act` on every rank; all ranks call this together.

    what: the participle of the error, such as "written". folder: to which `act` writes; None: it
    writes nothing. Where ranks fail, all ranks raise HetplanError with the failure of the lowest
    one.
    """
    failure = ""
    try:
        act()
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        failure = kind_and_text(error)
        if folder is not None and is_full(error, folder):
            failure = f"the disk is full ({folder})"
    for rank, text in enumerate(gather_objects(failure)):
        if text:
            raise HetplanError(f"checkpoint cannot be {what}: rank {rank}: {text[:300]}")


def is_full(error: BaseException, folder: Path) -> bool:
    """Whether a file could not be written to a folder because its disk is full. torch and
    safetensors hide the system's error, or say it in their own words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (ENOSPC, EDQUOT):
            return True
        if "No space left" in str(cause) or "os error 28" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    is_writers = "inline_container" in str(error)  # torch's writer of archives
    return is_writers and shutil.disk_usage(existing(folder)).free < FULL_BYTES


def existing(folder: Path) -> Path:
    """A folder, or the first one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def written(act: Callable[[], None], folder: Path) -> None:
    """Write files to a folder on this rank. Raises HetplanError where they cannot be written."""
    try:
        act()
    except (OSError, RuntimeError) as error:
        cause = "the disk is full" if is_full(error, folder) else kind_and_text(error)[:300]
        raise HetplanError(f"{folder}: model cannot be written: {cause}") from error


def write_boxes(folder: Path, boxes: Iterable[Box]) -> None:
    """Write boxes to this rank's file."""
    stored = []
    for box in boxes:
        values = box.values.reshape(box.sizes).cpu().clone()
        stored.append((box.name, box.offsets, box.whole, values))
    with (folder / f"rank-{dist.get_rank()}.pt").open("wb") as stream:
        torch.save(stored, stream)


def stored_boxes(folder: Path) -> Iterator[tuple[str, Box]]:
    """(name, box) for every box in the files of a checkpoint, whose values are mapped into memory.
    Raises ValueError for a file that holds something else."""
    for file in folder.glob("*.pt"):
        try:
            stored = torch.load(file, mmap=True, weights_only=True)
            boxes = [(box.name, box) for box in map(stored_box, stored)]
        # Whatever a file holds: torch's own message would advise to run what is in it.
        except Exception as error:
            raise ValueError(f"{file.name} is no file of tensors that a run wrote") from error
        yield from boxes


def stored_box(entry: Any) -> Box:
    """The box of an entry of a rank's file. Raises ValueError or TypeError for what is no range of
    an unsplit tensor with its values in this process's memory."""
    name, offsets, whole, values = entry
    if not isinstance(name, str) or not isinstance(values, Tensor):
        raise TypeError("an entry has a name and a tensor")
    if values.layout != torch.strided or values.device.type != "cpu":
        raise TypeError("the values are a dense tensor in memory")
    for offset, size, most in zip(offsets, values.shape, whole, strict=True):
        numbers = isinstance(offset, int) and isinstance(most, int)
        if not numbers or not 0 <= offset <= offset + size <= most:
            raise ValueError("the range lies within the whole tensor")
    return Box(name, tuple(offsets), tuple(values.shape), tuple(whole), values)


def read_boxes(folder: Path, boxes: Iterable[Box]) -> None:
    """Copy the elements of boxes from a checkpoint into the boxes' values. Raises ValueError where
    a stored tensor has other sizes, and where elements are missing."""
    stored = grouped(stored_boxes(folder))
    for box in boxes:
        read = torch.empty(box.sizes, dtype=box.values.dtype)
        missing = box.values.numel()
        for source in stored.get(box.name, ()):
            if source.whole != box.whole:
                raise ValueError(
                    f"{box.name} has sizes {list(source.whole)}, not {list(box.whole)}"
                )
            shared = read[shared_slices(box, source)]
            shared.copy_(source.values[shared_slices(source, box)])
            missing -= shared.numel()
        if missing:
            raise ValueError(f"{missing} elements of {box.name} are missing")
        box.values.copy_(read.view_as(box.values))


def shared_slices(box: Box, other: Box) -> tuple[slice, ...]:
    """Slices of an array of `box.sizes`: the elements that are in both boxes."""
    slices = []
    dimensions = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    for first, size, other_first, other_size in dimensions:
        other_range = (other_first, other_first + other_size)
        slices.append(slice(*overlap((first, first + size), other_range, origin=first)))
    return tuple(slices)


def file_digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256, for all files of a checkpoint but the record. All ranks call this
    together, and each reads some of the files. Raises InputError for a folder or a pipe."""
    files = files_of_ranks(folder)
    own_files = files[dist.get_rank() :: dist.get_world_size()]
    return merged({file.name: digest_of(file) for file in own_files})


def files_of_ranks(folder: Path) -> list[Path]:
    """All files of a checkpoint but the record. Raises InputError for a folder, and for a pipe or a
    device, which would never end."""
    entries = sorted(entry for entry in folder.iterdir() if entry.name != RECORD_FILE)
    others = [entry.name for entry in entries if not entry.is_file()]
    if others:
        what = "holds something that is no file"
        raise InputError(what, where=str(folder), got=others[0])
    return entries


def merged(of_rank: dict[str, T]) -> dict[str, T]:
    """The entries of all ranks' dictionaries. All ranks call this together."""
    entries: dict[str, T] = {}
    for part in gather_objects(of_rank):
        entries |= part
    return entries


def save(model: TrainedPart, optimizer: Any, folder: str) -> None:
    """Write a checkpoint of the model's current step. All ranks call this together."""
    target = Path(folder) / f"step-{model.step}"
    temporary = target.with_name(f".{target.name}.tmp")
    is_first = dist.get_rank() == 0

    def make_folder() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        record.files[RECORD_FILE] = record.digest()
        write_text(temporary / RECORD_FILE, to_json(record.model_dump()))
        # Only an earlier checkpoint of this step is replaced, never a user's folder of its name.
        if (target / RECORD_FILE).is_file():
            shutil.rmtree(target)
        os.replace(temporary, target)

    on_all_ranks("written", make_folder if is_first else nothing, temporary)
    kinds = state_kinds(optimizer)
    boxes = checkpoint_boxes(model, optimizer, kinds, deduplicated=True)
    try:
        on_all_ranks("written", lambda: write_boxes(temporary, boxes), temporary)
        record = Record(
            step=model.step,
            seed=model.seed,
            optimizer=type(optimizer).__name__.lower(),
            shapes={name: list(shape) for name, shape in model.shapes.items()},
            states=kinds,
            scale=asdict(model.scale),
            files=file_digests(temporary),
        )
        on_all_ranks("written", finish if is_first else nothing, temporary)
    except HetplanError:
        if is_first:  # what has been written takes room, and is no checkpoint
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if is_first:
        for old in complete_checkpoints(folder)[:-MOST_CHECKPOINTS]:
            shutil.rmtree(old)
    dist.barrier(group=host_group())


def nothing() -> None:
    """Do nothing, while the first rank acts alone."""


def complete_checkpoints(folder: str) -> list[Path]:
    """The complete checkpoints of a folder, in the order of their steps."""
    steps = []
    for record in Path(folder).glob(f"step-*/{RECORD_FILE}"):
        number = record.parent.name.removeprefix("step-")
        if number.isdecimal():
            steps.append((int(number), record.parent))
    return [checkpoint for _, checkpoint in sorted(steps)]


def latest_checkpoint(folder: str) -> Path:
    """The latest complete checkpoint of a folder. Raises InputError where there is none."""
    checkpoints = complete_checkpoints(folder)
    require(checkpoints, "no complete checkpoint", where=folder)
    return checkpoints[-1]


def intact_record(checkpoint: Path) -> Record:
    """The record of a checkpoint. The error of a damaged one names a whole checkpoint beside it."""
    try:
        return read_record(checkpoint)
    except InputError as error:
        advice = whole_beside(checkpoint)
        raise InputError(f"{error}{advice}") from error


def whole_beside(damaged: Path) -> str:
    """A text for errors that names the latest whole checkpoint in the folder of a damaged one."""
    for checkpoint in reversed(complete_checkpoints(str(damaged.parent))):
        if checkpoint != damaged and is_whole(checkpoint):
            return (
                f"; {checkpoint.name} beside it is whole: move {damaged.name} away to go on from it"
            )
    return "; no other checkpoint beside it is whole"


def is_whole(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are those that its record names."""
    try:
        record = read_record(checkpoint)
        digests = {file.name: digest_of(file) for file in files_of_ranks(checkpoint)}
        return digests == record.files
    except (InputError, OSError):
        return False


def digest_of(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def check_resumable(folder: str, **options: object) -> None:
    """Raise InputError where a run with these options cannot go on from the latest checkpoint:
    there is none, its record is damaged, or it was written with another value of an option.

    options: values of fields of the record, such as `optimizer` and `seed`.
    """
    checkpoint = latest_checkpoint(folder)
    record = intact_record(checkpoint)
    for name, value in options.items():
        require(
            getattr(record, name) == value,
            f"cannot go on from a checkpoint with another --{name}",
            where=str(checkpoint),
            got=value,
            expected=f"{getattr(record, name)}, as it was written with",
        )


def check_writable(folder: str) -> None:
    """Raise InputError where checkpoints cannot be written to a folder, and where a subfolder that
    is no checkpoint has the name of one."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        others = [p for p in Path(folder).glob("step-*") if not (p / RECORD_FILE).is_file()]
    except OSError as error:
        raise InputError(f"cannot write checkpoints: {error.strerror}", where=folder) from None
    if others:
        raise InputError(
            "folder holds something else under a checkpoint's name",
            where=folder,
            got=others[0].name,
        )


def load(model: TrainedPart, optimizer: Any, folder: str) -> None:
    """Read the latest checkpoint of a folder into the model and the optimizer. All ranks call this
    together.

    Raises InputError where there is no checkpoint, or one that is damaged or of another model.
    """
    checkpoint = latest_checkpoint(folder)
    record = intact_record(checkpoint)
    require(
        {name: tuple(shape) for name, shape in record.shapes.items()} == model.shapes,
        "checkpoint is of another model",
        where=str(checkpoint),
    )
    digests = file_digests(checkpoint)
    names = sorted(digests.keys() | record.files.keys())
    changed = [name for name in names if digests.get(name) != record.files.get(name)]
    if changed:
        (advice, *_) = gather_objects(whole_beside(checkpoint) if dist.get_rank() == 0 else "")
        raise InputError(
            f"checkpoint is not what was written: {', '.join(changed)}{advice}",
            where=str(checkpoint),
        )
    add_zero_states(model, optimizer, record.states)
    boxes = checkpoint_boxes(model, optimizer, record.states, deduplicated=False)
    on_all_ranks("read", lambda: read_boxes(checkpoint, boxes))
    model.step, model.scale = record.step, LossScale(**record.scale)  # type: ignore[arg-type]


def add_zero_states(model: TrainedPart, optimizer: Any, kinds: Mapping[str, StateKind]) -> None:
    """Give each parameter that is trained all its optimizer states, with the value 0. A checkpoint
    is read into them, and an optimizer of torch makes them only in its first step."""
    for _, parameter in model.updated():
        if not parameter.requires_grad:
            continue
        for state, kind in kinds.items():
            value = torch.zeros_like(parameter) if kind == "like" else torch.zeros(())
            optimizer.state[parameter][state] = value.detach()


def state_kinds(optimizer: Any) -> dict[str, StateKind]:
    """Optimizer state -> its kind, the same on all ranks. All ranks call this together."""
    kinds: dict[str, StateKind] = {}
    for parameter, states in optimizer.state.items():
        for name, value in states.items():
            if isinstance(value, Tensor):
                # of a parameter that is a single number itself, the state is like the parameter
                single = value.dim() == 0 and parameter.dim() > 0
                kinds[name] = "scalar" if single else "like"
    return merged(kinds)


def checkpoint_boxes(
    model: TrainedPart, optimizer: Any, kinds: Mapping[str, StateKind], *, deduplicated: bool
) -> Iterator[Box]:
    """Boxes of this rank's parameters and optimizer states, under the names of a checkpoint. Their
    values are views, which `read_boxes` writes to.

    deduplicated: only the boxes that this rank saves, as in `TrainedPart.boxes`. The rank that
    saves a parameter's first element saves its single numbers.
    """
    for box in model.boxes(deduplicated=deduplicated):
        yield replace(box, name=f"model.{box.name}")
    for state, kind in kinds.items():
        values: dict[int, Tensor] = {}
        for _, parameter in model.updated():
            states = optimizer.state.get(parameter, {})
            if state in states:
                values[id(parameter)] = states[state]
        for box in model.boxes(values, deduplicated=deduplicated, scalars=kind == "scalar"):
            name = f"optimizer.{box.name}.{state}"
            has_first_element = not any(box.offsets)
            if kind == "like":
                yield replace(box, name=name)
            elif has_first_element or not deduplicated:
                yield Box(name, (0,), (1,), (1,), box.values.view(1))


class SavedPart(TrainedPart):
    """A rank's part of a model in training that writes checkpoints, and reads them under this plan
    or another one."""

    def save(self, folder: str, optimizer: Any) -> None:
        """Write a checkpoint of this step into a folder, which keeps the last two. All ranks call
        this together, behind the optimizer's step.

        optimizer: the one that `optimizer` made. Raises HetplanError where a file cannot be
        written.
        """
        save(self, optimizer, str(folder))

    def load(self, folder: str, optimizer: Any) -> None:
        """Go on from the latest checkpoint of a folder: its parameters, the optimizer's states and
        the number of the step. All ranks call this together, before the first step.

        Raises InputError where there is none, or one that is damaged or of another model.
        """
        load(self, optimizer, str(folder))
