"""The rank that has the cause of a failure says it in its own words; the others name that rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

import torch.distributed as dist  # noqa: E402

from hetplan.runtime.engine import failures  # noqa: E402
from hetplan.runtime.engine.checkpoint import is_full  # noqa: E402
from hetplan.runtime.engine.failures import LostPeer, is_lost, told_to_peers  # noqa: E402
from parity.asking import run_forked  # noqa: E402

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:8078"


def test_the_first_failure_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(failures, "store", lambda: store)
    with pytest.raises(LostPeer) as lost, told_to_peers("rank 1"):
        raise RuntimeError(GLOO)
    assert str(lost.value) == "rank 1: lost a peer: its own error says why"
    with pytest.raises(ValueError, match="no row") as cause, told_to_peers("rank 2"):
        raise ValueError("no row\nof this number")
    assert cause.value.__notes__ == ["hetplan: on rank 2"]
    with pytest.raises(KeyError), told_to_peers("rank 3"):
        raise KeyError("a later one")
    with pytest.raises(LostPeer) as lost, told_to_peers("rank 0"):
        raise RuntimeError(GLOO)
    expected = "rank 0: lost a peer: rank 2: ValueError: no row of this number"
    assert str(lost.value) == expected and is_lost(lost.value)
    assert lost.value.__suppress_context__, "no page of the collective that it waited in"


def test_a_full_disk_is_called_one_whoever_writes(tmp_path: Path) -> None:
    tensors = [torch.zeros(1 << 20)]
    for buffering in (0, -1):
        with pytest.raises(OSError) as full, open("/dev/full", "wb", buffering) as stream:
            torch.save(tensors, stream)
        assert is_full(full.value, tmp_path)
    with pytest.raises(RuntimeError) as hidden:
        torch.save(tensors, "/dev/full")
    assert not is_full(hidden.value, tmp_path), "the disk of this folder has room"
    assert is_full(Exception("I/O error: No space left on device (os error 28)"), tmp_path)
    assert not is_full(PermissionError(13, "Permission denied"), tmp_path)


@pytest.mark.engine
def test_the_other_rank_names_the_one_with_the_cause(tmp_path: Path) -> None:
    run_forked("parity.failing", tmp_path)
    texts = [(tmp_path / f"told-{rank}.txt").read_text() for rank in range(2)]
    cause = "IndexError: Target 99 is out of bounds."
    assert texts[1].startswith(cause) and "hetplan: on rank 1 (replica 0, stage 1" in texts[1]
    assert texts[0].startswith("LostPeer: rank 0 (replica 0, stage 0")
    assert "step 1: lost a peer: rank 1 (replica 0, stage 1" in texts[0]
    assert f"step 1: {cause}" in texts[0] and "\n" not in texts[0]
