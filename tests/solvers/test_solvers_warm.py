"""Warming: what has not run before is run in processes of its own, once; failures leave no mark."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hetplan.formulations import FAMILIES, family
from hetplan.solvers import warm
from hetplan.solvers.registry import load

QUICK = ("os:getcwd", "os:getpid")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return tmp_path / "hetplan"


def test_each_warmer_runs_once(cache: Path) -> None:
    told: list[str] = []
    warm.prepare(QUICK, told.append)
    assert len(list(cache.iterdir())) == 2
    assert len(told) == 1
    warm.prepare(QUICK, told.append)
    assert len(told) == 1


def test_a_failing_warmer_leaves_no_mark_and_stops_nothing(cache: Path) -> None:
    warm.prepare(("os:abort", "os:getcwd"))
    assert len(list(cache.iterdir())) == 1


def test_after_failures_a_new_process_goes_on(cache: Path) -> None:
    # `_exit` lacks its argument: an exception, not a signal
    warm.prepare(("os:abort", "os:_exit", *QUICK))
    assert len(list(cache.iterdir())) == 2


def test_a_process_takes_one_warmer_after_another(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four warmers on two cores, each of which prints and notes its process."""
    module = cache.parent / "noting.py"
    module.write_text(
        "import os, pathlib\n"
        "def note():\n"
        "    print('not an answer', flush=True)\n"
        "    with open(pathlib.Path(__file__).parent / 'processes', 'a') as file:\n"
        "        file.write(f'{os.getpid()}\\n')\n"
        "one = two = three = four = note\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(cache.parent), os.environ.get("PYTHONPATH", "")])
    )
    warm.prepare([f"noting:{name}" for name in ("one", "two", "three", "four")])
    processes = (cache.parent / "processes").read_text().split()
    assert len(processes) == len(list(cache.iterdir())) == 4
    assert len(set(processes)) <= 2


def test_one_warmer_or_one_core_is_left_to_first_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm.prepare(QUICK[:1])
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    warm.prepare(QUICK)
    assert not cache.exists()


def test_a_hung_warmer_is_killed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "PATIENCE_SECONDS", 0.5)
    warm.prepare(("signal:pause", "os:getcwd"))
    assert len(list(cache.glob("*"))) <= 1


def test_late_warmers_are_waited_for_where_they_are_needed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prepare` returns while the late one is stopped; `finish` returns when it has ended."""
    go_on, module = cache.parent / "go on", cache.parent / "slow_warmer.py"
    module.write_text(
        "import time, pathlib\n"
        "def run():\n"
        f"    while not pathlib.Path({str(go_on)!r}).exists():\n"
        "        time.sleep(0.01)\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(cache.parent), os.environ.get("PYTHONPATH", "")])
    )
    warm.prepare(QUICK[:1], late=("slow_warmer:run",))
    assert len(list(cache.iterdir())) == 1
    ended = threading.Event()

    def use() -> None:
        warm.finish(("slow_warmer:run", "os:getcwd"))
        ended.set()

    waiting = threading.Thread(target=use)
    waiting.start()
    waiting.join(0.2)
    assert not ended.is_set()
    go_on.touch()
    waiting.join(60)
    assert ended.is_set() and len(list(cache.iterdir())) == 2
    warm.finish(("slow_warmer:run",))  # nothing is left to wait for


@pytest.mark.parametrize("name", FAMILIES)
def test_every_warmer_named_by_a_family_runs(name: str) -> None:
    for warmer in family(name).warmers:
        load(warmer)()


def test_marks_lie_beside_the_cached_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(warm, "__file__", str(tmp_path / "warm.py"))
    assert warm._folder() == tmp_path / "__pycache__"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert warm._folder() == tmp_path / "hetplan"
