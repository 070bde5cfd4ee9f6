"""`hetplan plan simulate`: tables, JSON and traces of a plan file, and what does not belong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.workloads import small
from hetplan.cli.main import main
from hetplan.planner.amp import DataParallel
from hetplan.planner.strategy import propose
from hetplan.runtime.plan import Plan, save_plan
from hetplan.solvers.run import Run


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A data-parallel plan of gpt2, and its cluster."""
    import yaml

    from fakes.workloads import cluster_document

    plan = propose(DataParallel(), small(), Run())[0].plan
    assert isinstance(plan, Plan)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_document()))
    return str(tmp_path / "plan.json"), str(tmp_path / "cluster.yaml")


def test_people_get_a_line_per_stage(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, cluster = files
    assert main(["plan", "simulate", plan, "--cluster", cluster]) == 0
    out = capsys.readouterr().out
    assert "per iteration, predicted" in out
    assert out.count("V100-SXM2-16GB") == 2


def test_programs_get_seconds_and_bytes(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, cluster = files
    assert main(["plan", "simulate", plan, "--cluster", cluster, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["peak_bytes"]) == 4
    assert document["fits_memory"] is True
    for stage in document["stages"]:
        assert stage["busy_seconds"] + stage["idle_seconds"] == pytest.approx(
            document["predicted_seconds"]
        )
    assert main(["plan", "simulate", plan, "--cluster", cluster, "--json", "--overlap", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_seconds"] < document["predicted_seconds"]


def test_the_trace_holds_every_task_within_the_iteration(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, cluster = files
    target = tmp_path / "trace.json"
    assert (
        main(["plan", "simulate", plan, "--cluster", cluster, "--trace", str(target), "--json"])
        == 0
    )
    seconds = json.loads(capsys.readouterr().out)["predicted_seconds"]
    events = json.loads(target.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {
        "forward",
        "backward",
        "synchronisation",
        "optimizer",
    }
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(seconds * 1e6)
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "amp-mixed"], "devices of the plan is not the workload's"),
        (["--model", "gpt2-medium"], "model of the plan is not the workload's"),
        (["--overlap", "0"], "--overlap"),
    ],
)
def test_what_does_not_belong_together_is_one_line(
    files: tuple[str, str], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, cluster = files
    given = arguments if "--cluster" in arguments else ["--cluster", cluster, *arguments]
    assert main(["plan", "simulate", plan, *given]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
