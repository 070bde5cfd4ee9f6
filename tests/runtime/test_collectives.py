"""Collectives: fits by hand, and a real job of two ranks on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.measured import OPERATIONS, fit_line, load_collectives
from hetplan.runtime.measuring.collectives import groups_of, torchrun_place

SIZES = [1e3, 1e4, 1e5, 1e6]


def test_lines_are_found_again() -> None:
    line = fit_line(SIZES, [2e-5 + n / 1e9 for n in SIZES])
    assert line.latency == pytest.approx(2e-5) and line.bandwidth == pytest.approx(1e9)
    assert line.r_squared == pytest.approx(1)


def test_neither_part_is_negative() -> None:
    through_origin = fit_line([1e6, 2e6], [1e-4, 3e-4])
    assert through_origin.latency == 0 and through_origin.bandwidth > 0
    falling = fit_line([1e6, 2e6], [3e-4, 1e-4])
    assert falling.bandwidth == pytest.approx(2e10) and falling.latency == 0


def test_groups_of_a_job() -> None:
    assert groups_of(4, 4) == {"node": [[0, 1, 2, 3]]}
    assert groups_of(2, 1) == {"all": [[0, 1]]}
    assert groups_of(4, 2) == {
        "node": [[0, 1], [2, 3]],
        "between": [[0, 2]],
        "all": [[0, 1, 2, 3]],
    }


def test_outside_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["profile", "collectives"]) == 2
    assert "torchrun" in capsys.readouterr().err
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="2 or more"):
        torchrun_place()


def test_two_ranks_on_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    target = tmp_path / "collectives.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "hetplan",
    ]
    command += ["profile", "collectives", "--repeats", "2", "-q", "-o", str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = load_collectives(target)
    assert measured.backend == "gloo" and measured.ranks == 2
    assert [fit.operation for fit in measured.fits] == list(OPERATIONS)
    for fit in measured.fits:
        assert fit.group == "node" and fit.ranks == 2 and fit.bytes_per_second > 0
        assert [p.bytes for p in fit.points] == sorted(p.bytes for p in fit.points)
        assert all(p.seconds <= p.median_seconds for p in fit.points)
