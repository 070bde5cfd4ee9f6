"""Files of checkpoints that no run wrote: each is one line, and nothing in them is executed."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from hetplan.errors import InputError
from hetplan.files import to_json
from hetplan.runtime.engine.checkpoint import Record, file_digests, is_whole, stored_boxes
from hetplan.runtime.engine.loop import LossScale
from hetplan.schema import parse

SCALE = asdict(LossScale())


class Hostile:
    """An object whose pickle would run a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "content",
    [
        Hostile(),
        3,
        [("a",)],
        [("a", 1, 2, 3)],
        [("a", (0,), (1,), "no tensor")],
        [("a", ("x",), (1,), torch.ones(1))],
        [("a", (0,), (1.5,), torch.ones(1))],
        [("a", (-1,), (1,), torch.ones(1))],
        [("a", (0,), (3,), torch.ones(4))],
        [("a", (0, 0), (4,), torch.ones(4))],
        [(3, (0,), (4,), torch.ones(4))],
        [("a", (0,), (4,), torch.ones(4).to_sparse())],
    ],
)
def test_what_is_no_list_of_tensors_is_refused(
    content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "rank-0.pt")
    with pytest.raises(ValueError, match=r"^rank-0\.pt is no file of tensors that a run wrote$"):
        list(stored_boxes(tmp_path))
    assert not (tmp_path / "executed").exists()


def test_a_damaged_file_gives_no_advice_to_trust_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.pt"
    torch.save([("a", (0,), (4,), torch.ones(4))], path)
    [(name, box)] = stored_boxes(tmp_path)
    assert name == "a" and box.values.tolist() == [1.0] * 4
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"^rank-0\.pt is no file of tensors") as caught:
        list(stored_boxes(tmp_path))
    assert "weights_only" not in str(caught.value)


def test_a_pipe_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.pt")
    with pytest.raises(InputError, match=r"holds something that is no file.*rank-0\.pt"):
        file_digests(tmp_path)


def test_a_pipe_in_the_checkpoint_beside_a_damaged_one_is_not_read(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        record = Record(
            step=step, seed=0, optimizer="adam", shapes={}, states={}, scale=SCALE, files={}
        )
        record.files["hetplan.json"] = record.digest()
        (tmp_path / f"step-{step}" / "hetplan.json").write_text(to_json(record.model_dump()))
    assert is_whole(tmp_path / "step-1")
    os.mkfifo(tmp_path / "step-1" / "rank-0.pt")
    assert not is_whole(tmp_path / "step-1")


def test_the_fields_of_a_loss_scale_are_those_that_it_has() -> None:
    more = SCALE | {"unknown": 1.0}
    for scale in (more, {}):
        fields = {"step": 1, "seed": 0, "optimizer": "adam", "shapes": {}, "states": {}}
        with pytest.raises(InputError, match="scale: not the fields of a loss scale"):
            parse(Record, {**fields, "scale": scale, "files": {}}, where="hetplan.json")
