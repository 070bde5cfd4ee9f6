"""Files of checkpoints that no run wrote: each is one line, and nothing in them is executed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hetplan.errors import InputError
from hetplan.runtime.engine.checkpoint import file_digests, stored_boxes


class Hostile:
    """An object whose pickle would run a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "content", [Hostile(), 3, [("a",)], [("a", 1, 2, 3)], [("a", (0,), (1,), "no tensor")]]
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
