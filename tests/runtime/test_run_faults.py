"""What happens when a rank dies, hangs or fails: one line that names it, no process left, an exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.plan import Plan, save_plan  # noqa: E402
from parity.cases import Case, R, S, even  # noqa: E402

TESTS = Path(__file__).parent.parent
PLACE = "rank 1 (replica 0, stage 1, row group 0, tensor rank 0; device 1, A on node 0)"
PATH = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))


def plan() -> Plan:
    """Two stages beside one on two tensor ranks."""
    return Case("faults", "two", [R(even([0, 1, 2]), [(2, 2)]), R([S((0, 2), tensor=(1, 1))], [(1, 2)])]).plan


def start(folder: Path, *options: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`hetplan run` in a process group of its own."""
    save_plan(plan(), folder / "plan.json")
    return subprocess.Popen(
        [sys.executable, "-m", "hetplan", "run", str(folder / "plan.json"), *options],
        env=os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def nobody_left(group: int) -> bool:
    """Whether no process of a group is there, after a moment."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", "was killed by SIGKILL"),
        pytest.param("stopped", "hangs; no sign of life", marks=pytest.mark.slow),
        pytest.param("stuck", "hangs; at forward of chunk 0, micro-batch 0", marks=pytest.mark.slow),
        pytest.param("hungry", "out of memory", marks=pytest.mark.slow),
        ("wrong", "KeyError: 'no such key'"),
    ],
)
def test_a_rank_that_ends_badly_is_named(fault: str, words: str, tmp_path: Path) -> None:
    running = start(tmp_path, "--factory", f"parity.faulty:{fault}", "--hang-after", "4", "--quiet")
    _, told = running.communicate(timeout=120)
    assert running.returncode == 1
    assert told.startswith(f"hetplan: error: {PLACE}: ") and words in told, told
    assert told.count("\n") == 1
    assert nobody_left(running.pid)


@pytest.mark.slow
def test_a_slow_rank_is_no_fault(tmp_path: Path) -> None:
    running = start(
        tmp_path, "--factory", "parity.faulty:slow", "--hang-after", "60", "--steps", "3", "--json"
    )
    shown, told = running.communicate(timeout=120)
    assert running.returncode == 0, told
    assert '"measured_seconds"' in shown


def test_a_model_that_does_not_match_is_told_before_anything_starts(tmp_path: Path) -> None:
    running = start(tmp_path, "--factory", "parity.faulty:short")
    _, told = running.communicate(timeout=120)
    assert running.returncode == 2
    assert told.startswith("hetplan: error: model does not match the plan"), told
    running = start(tmp_path, "--factory", "parity.faulty:nothing")
    assert "--factory cannot be imported" in running.communicate(timeout=120)[1]
    assert running.returncode == 2


def losses(folder: Path, kill_at: str, *options: str) -> tuple[int, dict[int, float]]:
    """Exit code and losses by step of a run that dies at `rank:pass`, if it comes there."""
    command = ("--factory", "parity.faulty:unlucky", "--steps", "6", *options)
    running = start(folder, *command, environment={"KILL_AT": kill_at})
    _, told = running.communicate(timeout=120)
    found = re.findall(r"step (\d+): loss (\S+)", told)
    return running.returncode, {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 30))])
def test_only_the_steps_since_the_last_checkpoint_are_lost(seed: int, tmp_path: Path) -> None:
    """A rank is killed at a random moment; what is resumed has the losses of a run without interruption."""
    rng = Random(seed)
    whole = losses(tmp_path, "0:0")[1]
    assert sorted(whole) == list(range(6))
    kept = ("--checkpoint", str(tmp_path / "kept"), "--every", "2")
    code, before = losses(tmp_path, f"{rng.randint(0, 3)}:{rng.randint(3, 8)}", *kept)
    assert code == 1
    complete = sorted(int(p.name[5:]) for p in (tmp_path / "kept").glob("step-*"))
    saved = complete[-1] if complete else 0
    assert saved >= max(before, default=-1) // 2 * 2 - 2
    code, after = losses(tmp_path, "0:0", *kept, *(["--resume"] if complete else []))
    assert code == 0 and min(after) == saved
    for step, loss in (before | after).items():
        if step in whole:
            assert loss == pytest.approx(whole[step], rel=1e-4), step


@pytest.mark.slow
def test_no_rank_survives_whoever_started_it(tmp_path: Path) -> None:
    """The parent is killed outright: its ranks notice that nobody listens."""
    running = start(tmp_path, "--factory", "parity.faulty:stuck", "--hang-after", "100", "--steps", "1000")
    assert running.stderr is not None
    assert running.stderr.readline().startswith("hetplan: step 0")
    running.kill()
    running.wait()
    assert nobody_left(running.pid)


def test_the_keyboard_and_sigterm_end_a_run(tmp_path: Path) -> None:
    """Ctrl-C at once; SIGTERM behind the step, with a checkpoint."""
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        folder = tmp_path / sent.name
        running = start(
            tmp_path, "--factory", "parity.cases:two", "--steps", "100000", "--checkpoint", str(folder)
        )
        assert running.stderr is not None
        assert running.stderr.readline().startswith("hetplan: step 0")
        os.kill(running.pid, sent)
        running.communicate(timeout=60)
        assert running.returncode == code
        assert len(list(folder.glob("step-*"))) == (1 if sent is signal.SIGTERM else 0)
        assert nobody_left(running.pid)
