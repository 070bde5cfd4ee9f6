"""Checkpoints whose files were changed, and one written to a disk that is full."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetplan.errors import HetplanError
from hetplan.files import to_json
from hetplan.runtime import distribute
from hetplan.runtime.engine import checkpoint
from parity.cases import Case, Perceptron, R, even
from parity.frozen import rows

WORLDS = [2]
PLAN = Case("spoiled", "perceptron", [R(even([0, 2, 4]), [(1, 5)])]).plan


class Harm:
    """Unpickled as pickle does it, it makes a folder."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.where,)


def flip(step: Path) -> None:
    """One bit of a rank's values."""
    data = bytearray((step / "rank-1.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "rank-1.pt").write_bytes(data)


def harm(step: Path) -> None:
    """A file of somebody else's, with the digests that belong to it."""
    torch.save(Harm(str(step.parent / "harm")), step / "rank-1.pt")
    record = checkpoint.read_record(step)
    with (step / "rank-1.pt").open("rb") as stream:
        record.files["rank-1.pt"] = file_digest(stream, "sha256").hexdigest()
    record.files[checkpoint.RECORD_FILE] = record.digest()
    (step / checkpoint.RECORD_FILE).write_text(to_json(record.model_dump()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": bool,
    "flip": flip,
    "lost": lambda step: (step / "rank-0.pt").unlink(),
    "more": lambda step: (step / "rank-7.pt").write_bytes(b""),
    "harm": harm,
}


def message(act: Callable[[], object]) -> str:
    """What an error says, if there is one."""
    try:
        act()
    except HetplanError as error:
        return str(error)
    return ""


def work(rank: int, world: int, folder: Path) -> None:
    """What every rank is told of each damage."""
    torch.set_default_dtype(torch.float64)
    model: Any = distribute(Perceptron(), PLAN)
    optimizer = model.optimizer(torch.optim.AdamW)
    model.train_step(rows)
    optimizer.step()
    checkpoint.save(model, optimizer, str(folder / "none"))
    told: dict[str, str] = {}
    for name, damage in DAMAGES.items():
        if rank == 0 and name != "none":
            shutil.copytree(folder / "none", folder / name)
            damage(folder / name / "step-1")
        dist.barrier()
        told[name] = message(lambda at=folder / name: checkpoint.load(model, optimizer, str(at)))  # type: ignore[misc]
    if rank == 1:
        (folder / "rank-1.pt").symlink_to("/dev/full")
    boxes = list(model.boxes(deduplicated=True))
    full = lambda: checkpoint.write_boxes(folder, boxes)  # noqa: E731
    told["full"] = message(lambda: checkpoint.on_all_ranks("written", full, folder))
    model.train_step(rows)
    optimizer.step()
    model.save(folder / "none", optimizer)
    dist.barrier()
    if rank == 0:
        flip(folder / "none" / "step-2")
    dist.barrier()
    told["beside"] = message(lambda: model.load(folder / "none", optimizer))
    torch.save(told, folder / f"told-{rank}.pt")
