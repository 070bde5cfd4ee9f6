"""Folders of checkpoints that are damaged, somebody else's, or made to do harm: one line before any
process starts."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from hetplan.errors import InputError  # noqa: E402
from hetplan.files import read_json, to_json  # noqa: E402
from hetplan.runtime.execution.chunks import cause_of  # noqa: E402
from hetplan.runtime.plan import save_plan  # noqa: E402
from parity.asking import ENVIRONMENT, refused  # noqa: E402
from parity.cases import Case, R, even  # noqa: E402

Damage = Callable[[Path], None]
RUN = ("--factory", "parity.cases:two", "--steps", 1, "--checkpoint")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan file, and a folder with a checkpoint of one step."""
    folder = tmp_path_factory.mktemp("written")
    save_plan(Case("kept", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan, folder / "plan.json")
    command = ("run", folder / "plan.json", "--factory", "parity.cases:two", "--steps", 1)
    subprocess.run(
        [sys.executable, "-m", "hetplan", *map(str, command), "--checkpoint", str(folder / "kept")],
        check=True, env=ENVIRONMENT, capture_output=True,
    )  # fmt: skip
    return folder / "plan.json", folder / "kept"


def record(**changed: Any) -> Damage:
    """hetplan.json with other entries; None: without."""

    def damage(step: Path) -> None:
        document = read_json(step / "hetplan.json") | changed
        (step / "hetplan.json").write_text(
            to_json({k: v for k, v in document.items() if v is not None})
        )

    return damage


def text(name: str, content: str | bytes | None) -> Damage:
    """A file with another content, or without one."""

    def damage(step: Path) -> None:
        if content is None:
            (step / name).unlink()
        else:
            (step / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


class Harm:
    """Unpickled as the torch that one knows does it, it makes a folder."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.where,)


def harmful(step: Path) -> None:
    """Metadata that would make a folder `harm` beside the step."""
    (step / ".metadata").write_bytes(pickle.dumps(Harm(str(step.parent / "harm"))))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (text("hetplan.json", "[]"), "hetplan.json: not usable"),
        (text("hetplan.json", "{}"), "hetplan.json: step"),
        (text("hetplan.json", "{"), "hetplan.json"),
        (record(step=-3), "hetplan.json: step"),
        (record(step=5), "step (got 5, expected step-1's)"),
        (record(states={}), "states (got 'none', expected exp_avg, exp_avg_sq, step)"),
        (record(shapes=None), "hetplan.json: shapes"),
        (record(optimizer=None), "hetplan.json: optimizer"),
        (text(".metadata", None), "checkpoint cannot be read: No such file"),
        (text(".metadata", b"\x80\x04garbage"), "checkpoint's metadata is damaged"),
        (text(".metadata", pickle.dumps([1])), "checkpoint's metadata is damaged (got 'list')"),
        (harmful, "it holds posix.mkdir, which no checkpoint does"),
    ],
)
def test_damaged_checkpoints_are_refused(
    damage: Damage, message: str, written: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan, kept = written
    shutil.copytree(kept, tmp_path / "kept")
    damage(tmp_path / "kept" / "step-1")
    told = refused(capsys, "run", plan, *RUN, tmp_path / "kept", "--resume")
    assert message in told and str(tmp_path / "kept") in told
    assert not (tmp_path / "kept" / "harm").exists()


def test_folders_that_cannot_hold_checkpoints(
    written: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, file = written[0], tmp_path / "a file"
    file.touch()
    for folder, message in (
        (file, "cannot write checkpoints: File exists"),
        (tmp_path / ("x" * 300), "cannot write checkpoints: File name too long"),
    ):
        assert message in refused(capsys, "run", plan, *RUN, folder)
    assert "no complete checkpoint" in refused(
        capsys, "run", plan, *RUN, tmp_path / "new", "--resume"
    )


def test_what_is_no_checkpoint_is_left_alone(
    written: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "step-1" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")
    told = refused(capsys, "run", written[0], *RUN, tmp_path)
    assert (
        "something else under a checkpoint's name (got 'step-1')" in told
        and own.read_text() == "mine"
    )


def test_the_cause_of_a_failure_of_many_is_told() -> None:
    full = OSError(28, "No space left on device")
    failed: Any = CheckpointException("", {3: (full, None), 5: (ValueError("later"), None)})
    assert str(cause_of(failed, "written")) == (
        "checkpoint cannot be written: rank 3: OSError: No space left on device"
    )
    lacking = InputError("checkpoint lacks a tensor")
    assert cause_of(CheckpointException("", {0: (lacking, None)}), "read") is lacking
