"""`hetplan truth validate rehearsal`: its workload, comparison and verdict; the runs themselves are
`test_rehearsal`'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.workloads import cluster
from hetplan.cli.main import main
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.profiling.profile import Profile
from hetplan.runtime import rehearsals
from hetplan.runtime.rehearsals import FAST, PLANS, SLOW, SLOWED, Rehearsed, rank_correlation
from hetplan.runtime.replay import replay


def profile() -> Profile:
    """As one measured on a single device."""
    model = load_model(rehearsals.MODEL, sequence=rehearsals.SEQUENCE, precision="fp32")
    found = predict(model, cluster(), micro_batches=[1, 2, 4], tensor_degrees=[1])
    return Profile(**{**dict(found), "tables": [t for t in found.tables if t.device == "T4"]})


def test_plans_are_uneven_and_run_on_a_device_and_a_slower_one() -> None:
    model = load_model(rehearsals.MODEL, sequence=rehearsals.SEQUENCE, precision="fp32")
    workload = rehearsals.workload_here(model, profile())
    fast, slow = (workload.profile.table(name, 1, 2) for name in (FAST, SLOW))
    assert fast is not None and slow is not None
    assert sum(slow.seconds()) == pytest.approx(SLOWED * sum(fast.seconds()))
    seconds = [replay(rehearsals.plan(name, workload), workload).seconds for name in PLANS]
    assert len(seconds) >= 10 and len(set(seconds)) == len(seconds)


def test_rank_correlation() -> None:
    def made(*pairs: tuple[float, float]) -> list[Rehearsed]:
        return [Rehearsed("x", predicted, measured) for predicted, measured in pairs]

    assert rank_correlation(made((1, 10), (2, 20), (3, 30))) == 1
    assert rank_correlation(made((1, 30), (2, 20), (3, 10))) == -1
    assert rank_correlation(made((1, 10), (2, 30), (3, 20))) == pytest.approx(0.5)
    assert rank_correlation(made((1, 1))) is None


@pytest.mark.parametrize(("late", "code"), [(1.02, 0), (1.2, 1)])
def test_verdict(
    late: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch", reason="the command needs torch")
    path = tmp_path / "profile.json"
    profile().save(path)

    def run(name: str, workload: Any, **_: Any) -> Rehearsed:
        seconds = replay(rehearsals.plan(name, workload), workload).seconds
        return Rehearsed(name, seconds, seconds * (late if name == "interleaved" else 1.001))

    monkeypatch.setattr(rehearsals, "rehearse_plan", run)
    assert main(["truth", "validate", "rehearsal", "--profile", str(path), "--json", "-q"]) == code
    found = json.loads(capsys.readouterr().out)
    assert len(found["plans"]) == len(PLANS) and found["spearman"] > 0.97
    assert main(["truth", "validate", "rehearsal", "--profile", str(path), "-q"]) == code
    assert f"largest error {100 * (late - 1):.3g} %" in capsys.readouterr().out
    assert main(["truth", "validate", "rehearsal", "--profile", str(path), "--steps", "1"]) == 2
