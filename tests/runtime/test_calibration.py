"""Constants from measured runs: found again where runs were made with them, refused where runs do
not tell."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from fakes.workloads import cluster_document, pipeline, small
from hetplan.cli.main import main
from hetplan.plans.plan import Plan
from hetplan.profiling.models.operators import STACKS
from hetplan.profiling.workload import Workload
from hetplan.runtime.calibration import (
    RULES,
    Calibration,
    Estimate,
    Fit,
    MeasuredRun,
    calibrate,
    predicted_seconds,
    selected,
    slots,
)

CUTS = [(7,), (5,), (4, 8), (3, 9), (4, 8, 12), (3, 6, 10), (5, 7, 9), (2, 6, 11), (1, 7, 13), (6,)]


@cache
def workload() -> Workload:
    return replace(small(), stack=STACKS["eager-2021"])  # a name that files know


def plans(count: int) -> list[Plan]:
    return [pipeline(workload(), *cuts, name=f"p{i}") for i, cuts in enumerate(CUTS[:count])]


def made_with(count: int, **changes: float) -> list[MeasuredRun]:
    """Runs that take what the model says with these constants."""
    return [
        MeasuredRun(p, predicted_seconds(p, workload(), changes), None, p.name)
        for p in plans(count)
    ]


def calibrated(runs: list[MeasuredRun]) -> Estimate:
    return calibrate(runs, [workload()] * len(runs))


def test_constants_are_found_again() -> None:
    estimate = calibrated(made_with(9, between=0.3, slot_seconds=0.002))
    assert estimate.calibration is not None, estimate.reason
    assert estimate.calibration.between == pytest.approx(0.3, rel=0.3)  # the T4s explain a part
    assert set(estimate.calibration.fitted) == {"compute T4", "slot_seconds", "between"}
    assert "0 runs depend on it" in estimate.calibration.refused["within"]
    assert "2 runs depend on it" in estimate.calibration.refused["compute V100-SXM2-16GB"]
    assert estimate.calibration.slot_seconds == pytest.approx(0.002, rel=0.05)
    assert estimate.calibration.error_left_out is not None
    assert estimate.calibration.error_left_out < 0.01 < estimate.calibration.error_before


@pytest.mark.parametrize("seed", [1, 3])
def test_noise_is_not_calibrated_away(seed: int) -> None:
    random = Random(seed)
    runs = [
        replace(run, seconds=run.seconds * (1 + random.choice((-0.2, 0.2)))) for run in made_with(9)
    ]
    estimate = calibrated(runs)
    assert estimate.calibration is None
    assert "hardly better with constants" in estimate.reason or "no better" in estimate.reason


def test_too_few_runs_are_said_to_be() -> None:
    estimate = calibrated(made_with(2, slot_seconds=0.01))
    assert estimate.calibration is None and "2 runs are too few" in estimate.reason


def test_there_are_two_runs_for_each_constant_and_one_more() -> None:
    runs = made_with(9, between=0.3, slot_seconds=0.002)
    names = ["slot_seconds", "between"]
    for count in (4, 5):
        fit = Fit(runs[:count], [workload()] * count, names, RULES)
        assert len(selected(fit, names).names) == (count - 1) // 2


def test_slots_are_the_passes_of_the_longest_replica() -> None:
    assert slots(pipeline(workload(), 7)) == 2 * (8 + 2 - 1)


def write_runs(folder: Path, runs: list[MeasuredRun], **more: Any) -> list[str]:
    names = []
    for i, run in enumerate(runs):
        path = folder / f"run{i}.json"
        path.write_text(
            json.dumps({"plan": run.plan.model_dump(mode="json"), "seconds": run.seconds, **more})
        )
        names.append(str(path))
    return names


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, cluster, target = (
        tmp_path / "profile.json",
        tmp_path / "cluster.yaml",
        tmp_path / "c.json",
    )
    workload().profile.save(profile)
    cluster.write_text(yaml.safe_dump(cluster_document()))
    runs = made_with(9, between=0.5, slot_seconds=0.001)
    names = write_runs(tmp_path, runs, peak_bytes=15e9)
    options = ["--cluster", str(cluster), "-o", str(target)]
    assert main(["profile", "calibrate", str(profile), *names, *options]) == 0
    assert "mean error" in capsys.readouterr().out
    estimate = Calibration.load(target)
    assert estimate.framework_bytes is not None and 0 < estimate.framework_bytes < 15e9
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(runs[4].plan.model_dump(mode="json")))
    arguments = [
        "plan",
        "simulate",
        str(plan),
        "--cluster",
        str(cluster),
        "--profile",
        str(profile),
        "--json",
    ]
    main([*arguments, "--calibration", str(target)])
    document = json.loads(capsys.readouterr().out)
    assert document["calibrated"] is True
    assert document["predicted_seconds"] == pytest.approx(runs[4].seconds, rel=0.02)
    main(arguments)
    assert json.loads(capsys.readouterr().out)["calibrated"] is False
    target.unlink()
    assert main(["profile", "calibrate", str(profile), names[0], *options, "--json"]) == 1
    assert "too few" in json.loads(capsys.readouterr().out)["reason"]
    assert not target.exists()


def test_broken_runs_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    workload().profile.save(profile)
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"plan": {}, "seconds": 1}))
    assert main(["profile", "calibrate", str(profile), str(run)]) == 2
    run.write_text(json.dumps({"plan": plans(1)[0].model_dump(mode="json"), "seconds": -1}))
    assert main(["profile", "calibrate", str(profile), str(run)]) == 2
    assert "run.json: seconds: not usable" in capsys.readouterr().err
