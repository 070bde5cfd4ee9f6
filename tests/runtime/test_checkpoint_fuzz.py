"""Checkpoints that are damaged, or that somebody made whose digests are right: reading one ends
with a whole model or with one line, never with another exception and never without an end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzzing.mutations import NASTY, as_json, damage, mutate
from hetplan.errors import HetplanError
from hetplan.runtime.engine.checkpoint import RECORD_FILE, Record, SavedPart, digest_of
from hetplan.runtime.engine.loop import Box, LossScale

# What stands for a number or a list of an entry of a rank's file.
ODD: tuple[Any, ...] = (*NASTY[:20], "ab", (-1,), (0, 0), (2**62,), (1.5,), ("a",), [[0]], None)
ODD_TENSORS: tuple[Any, ...] = (
    torch.zeros(()),
    torch.zeros(4, 3, dtype=torch.complex64),
    torch.zeros(4, 3, dtype=torch.bool),
    torch.zeros(1).expand(2**40),
    torch.zeros(0, 3),
    torch.zeros(4, 3, device="meta"),
    torch.zeros(4, 3).to_sparse(),
    torch.full((4, 3), float("nan")),
    nn.Parameter(torch.ones(4, 3)),
    "no tensor",
    3,
)


class NoEnd(BaseException):
    """Raised where a checkpoint is read without an end; no code that reads one catches it."""


class OnePart(SavedPart):
    """A model of one weight, all of it on one rank."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3))
        self.shapes = {"0.weight": (4, 3)}
        self.step, self.seed, self.device = 1, 0, "cpu"

    def updated(self) -> list[tuple[str, nn.Parameter]]:
        return [("0.weight", self.weight)]

    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        deduplicated: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        found = self.weight.detach() if values is None else values.get(id(self.weight))
        if found is not None:
            yield Box("0.weight", (0, 0), (4, 3), (4, 3), found)

    def iteration(self, step: int, rows: Any) -> float:
        raise NotImplementedError


def adam(model: OnePart) -> torch.optim.Adam:
    return torch.optim.Adam([model.weight], lr=0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two complete checkpoints of a process group of one rank."""
    place = tmp_path_factory.mktemp("kept")
    rendezvous = f"file://{place}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    model = OnePart()
    optimizer = adam(model)
    model.weight.grad = torch.ones(4, 3)
    optimizer.step()
    for step in (1, 2):
        model.step = step
        model.save(str(place / "folder"), optimizer)
    yield place / "folder"
    dist.destroy_process_group()


@contextmanager
def ending_within(seconds: int) -> Iterator[None]:
    """Raise NoEnd where the block waits for something that does not come. It is far more
    than any block computes, on a busy machine too."""

    def late(*_: object) -> None:
        raise NoEnd

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(folder: Path) -> str:
    """The error of reading the folder's latest checkpoint; empty where it is read."""
    model = OnePart()
    try:
        with ending_within(20):
            model.load(str(folder), adam(model))
    except HetplanError as error:
        text = str(error)
        assert text and "\n" not in text and "bug" not in text
        assert "weights_only" not in text
        return text
    assert model.weight.shape == (4, 3) and isinstance(model.scale, LossScale)
    return ""


def sign(checkpoint: Path) -> None:
    """Make the digests of a checkpoint right, as its author would."""
    path = checkpoint / RECORD_FILE
    document = json.loads(path.read_text())
    others = [file for file in checkpoint.iterdir() if file != path and file.is_file()]
    document["files"] = {file.name: digest_of(file) for file in others}
    document["files"][RECORD_FILE] = Record.model_validate(document, strict=True).digest()
    path.write_text(json.dumps(document))


def damaged_bytes(rng: Random, checkpoint: Path) -> None:
    file = rng.choice(sorted(checkpoint.iterdir()))
    file.write_bytes(damage(rng, file.read_bytes()))


def edited_record(rng: Random, checkpoint: Path) -> None:
    """Another record; where it is one, its digests are right."""
    path = checkpoint / RECORD_FILE
    document = mutate(rng, json.loads(path.read_text()))
    path.write_bytes(as_json(document))
    try:
        sign(checkpoint)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # no record
        path.write_bytes(as_json(document))


def edited_entries(rng: Random, checkpoint: Path) -> None:
    """Other entries of a rank's file, with right digests."""
    path = checkpoint / "rank-0.pt"
    stored: list[Any] = [list(entry) for entry in torch.load(path, weights_only=True)]
    for _ in range(rng.randint(1, 3)):
        entry = rng.choice(stored)
        if not isinstance(entry, list) or not entry:
            continue
        place = rng.randrange(len(entry))
        entry[place] = rng.choice(ODD_TENSORS if place == 3 else ODD)
        if rng.random() < 0.1:
            del entry[rng.randrange(len(entry))]
        if rng.random() < 0.1:
            stored[rng.randrange(len(stored))] = rng.choice((*ODD, entry))
    torch.save(
        rng.choice((stored, [tuple(each) for each in stored if isinstance(each, list)])), path
    )
    sign(checkpoint)


def other_kinds(rng: Random, checkpoint: Path) -> None:
    """Something that is no file, in place of a file or beside it, here or in the other
    checkpoint."""
    place = rng.choice((checkpoint, checkpoint.with_name("step-1")))
    path = place / rng.choice((RECORD_FILE, "rank-0.pt", "rank-7.pt"))
    if path.exists() and rng.random() < 0.8:
        path.unlink()
    path = path if not path.exists() else place / "more"
    kind = rng.choice(("pipe", "folder", "loop", "nowhere", "null", "empty"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "nowhere":
        path.symlink_to("/nowhere/at/all")
    elif kind == "null":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
    if rng.random() < 0.5:
        damaged_bytes_of_files(rng, checkpoint)


def damaged_bytes_of_files(rng: Random, checkpoint: Path) -> None:
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    if files:
        file = rng.choice(files)
        file.write_bytes(damage(rng, file.read_bytes()[: 2**20]))


KINDS = (damaged_bytes, edited_record, edited_entries, other_kinds)
EACH = 10  # damaged checkpoints of a kind and a seed


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.wide) for s in range(1, 26))]
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damaged_checkpoints(
    kind: Any, seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetplan.files.PIPE_SECONDS", 0)
    errors = []
    for number in range(EACH):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        kind(Random(f"{kind.__name__} {seed} {number}"), folder / "step-2")
        errors.append(read(folder))
    assert sum(map(bool, errors)) > EACH / 4


def test_a_whole_checkpoint_is_read(whole: Path) -> None:
    assert read(whole) == ""
