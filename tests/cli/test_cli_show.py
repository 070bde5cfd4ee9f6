"""`hetplan show PLAN`: on the terminal, as files, from a plan or a whole planning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.adapters.exports import EXPORTERS


@pytest.fixture
def files(hetplan: Call, cluster: Path) -> tuple[Path, Path, Path]:
    """A plan, the planning that it is of, and the cluster."""
    plan, planning = cluster.with_name("plan.json"), cluster.with_name("planning.json")
    words = ("--model", "gpt2", "--cluster", cluster, "--global-batch", 8, "--strategies", "dp")
    planning.write_text(hetplan("plan", *words, "-q", "--json", "-o", plan).out)
    return plan, planning, cluster


def test_terminal(hetplan: Call, files: tuple[Path, Path, Path]) -> None:
    plan, planning, cluster = files
    ran = hetplan("show", plan, "--cluster", cluster)
    assert (ran.code, ran.err) == (0, "")
    assert "stage 0 of pipelines 0-1 (x2)" in ran.out and "F forward" in ran.out
    assert "candidates" not in ran.out and "\n0-1      V100-SXM2-16GB" in ran.out  # hold the same
    assert "dp/enumeration *" in hetplan("show", planning, "--cluster", cluster).out
    found = hetplan("show", plan, "--cluster", cluster, "--json").json
    assert sum(row["alike"] for row in found["rows"]) == 4 and found["offers"] == []


def test_a_model_of_the_users_own_is_asked_for(
    hetplan: Call, files: tuple[Path, Path, Path]
) -> None:
    """An older plan file has its name alone."""
    plan, _, cluster = files
    document = json.loads(plan.read_text())
    del document["inputs"]
    document["workload"]["model"] = "mine"
    plan.write_text(json.dumps(document))
    asked = hetplan("show", plan, "--cluster", cluster).error
    assert "give the model 'mine' with --model" in asked


def test_files(hetplan: Call, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, planning, cluster = files
    target = tmp_path / "page.html"
    ran = hetplan("show", planning, "--cluster", cluster, "--html", target)
    assert (ran.code, ran.out) == (0, "") and f"written: {target}" in ran.err
    assert target.read_text().startswith("<!doctype html>")


def test_a_planning_without_a_winner_is_one_line(
    hetplan: Call, cluster: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"candidates": [], "winner": None}))
    assert "no winner to show" in hetplan("show", tmp_path / "x.json", "--cluster", cluster).error


def test_the_librarys_best_program(hetplan: Call) -> None:
    ran = hetplan("show", "hap-chain-2x2")
    assert (ran.code, ran.err) == (0, "")
    for expected in (
        "sharding ratios",
        "Reduce-Scatter e4",
        "e4|All-Reduce",
        "slowest takes",
        "takes",
    ):
        assert expected in ran.out
    document = hetplan("show", "hap-chain-2x2", "--json").json
    (shown,) = document["decisions"]
    assert document["problem"] == "hap" and len(shown["instructions"]) == len(shown["stages"]) + 11
    assert abs(shown["seconds"] - shown["objective"]) < 1e-9


def test_an_answer(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    assert hetplan("solve", "hap-chain-2x2", "--method", "auto,dp-even", "-q", "-o", path).code == 0
    shown = hetplan("show", "hap-chain-2x2", path, "--json").json["decisions"]
    assert [d["source"] for d in shown] == ["auto", "dp-even"]


def test_other_families_are_described(hetplan: Call) -> None:
    ran = hetplan("show", "tiny-mixed")
    assert ran.code == 0 and "stage" in ran.out
    assert "decision" in hetplan("show", "tiny-mixed", "--json").json["decisions"][0]


def test_what_cannot_be_shown(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"program": [0], "ratios": [[1, 0, 0, 0, 0, 0, 0, 0]]}')
    assert "decision breaks a constraint" in hetplan("show", "hap-chain-2x2", path).error
    source = Path(__file__).parents[2] / "src/hetplan/instances/library/hap/hap-chain-2x2.json"
    copy = tmp_path / "mine.json"
    copy.write_text(source.read_text())
    assert "no best-known decision of this instance" in hetplan("show", copy).error


def test_a_replay_for_people_and_for_programs(hetplan: Call, plan_files: tuple[Path, Path]) -> None:
    plan, cluster = plan_files
    command = ("plan", "simulate", plan, "--cluster", cluster)
    ran = hetplan(*command)
    assert ran.code == 0
    assert "per iteration, predicted" in ran.out and ran.out.count("V100-SXM2-16GB") == 1
    document = hetplan(*command, "--json").json
    assert len(document["peak_bytes"]) == 4 and document["fits_memory"] is True
    for stage in document["stages"]:
        assert stage["busy_seconds"] + stage["idle_seconds"] == pytest.approx(
            document["predicted_seconds"]
        )
    assert document["robust_seconds"] == pytest.approx(document["predicted_seconds"], rel=0.02)
    assert hetplan(*command, "--sends", "never").code == 2
    overlapped = hetplan(*command, "--json", "--overlap", 8).json
    assert overlapped["predicted_seconds"] < document["predicted_seconds"]


def test_the_trace_holds_every_task_within_the_iteration(
    hetplan: Call, plan_files: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, cluster = plan_files
    target = tmp_path / "trace.json"
    ran = hetplan("plan", "simulate", plan, "--cluster", cluster, "--trace", target, "--json")
    events = json.loads(target.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    kinds = {"forward", "backward", "synchronisation", "optimizer"}
    assert {event["cat"] for event in spans} == kinds
    last = max(event["ts"] + event["dur"] for event in spans)
    assert last == pytest.approx(ran.json["predicted_seconds"] * 1e6)
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= rows


def test_export_to_standard_output_or_a_file(
    hetplan: Call, plan_files: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, target = plan_files[0], tmp_path / "ds.json"
    shown = hetplan("export", plan, "--to", "deepspeed")
    assert (shown.code, shown.err) == (0, "")
    assert shown.json["train_batch_size"] == 8
    assert hetplan("export", plan, "--to", "deepspeed", "-o", target).out == ""
    assert target.read_text() == shown.out


def test_every_framework_is_offered_in_the_help(hetplan: Call) -> None:
    help_text = "".join(hetplan("export", "--help").out.split())
    *others, last = EXPORTERS
    assert f"{','.join(others)}or{last}" in help_text
