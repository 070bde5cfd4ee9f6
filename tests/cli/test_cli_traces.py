"""Traces of runs by the command line: every kind of file, and files that are refused."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.replays.observed.steps import Pass
from traces.run_cases import even, two_stages

COLUMNS = ("step", "dp_rank", "stage", "optype", "start_ts", "duration", "gmc", "mb_id")


def table_rows(step: int, passes: list[tuple[int, int, Pass]]) -> list[dict[str, Any]]:
    """The operations of a step as StragglerAnalysis' tables have them, with an update of 0.5 s."""
    rows: list[dict[str, Any]] = []
    for replica, stage, one in passes:
        rows.append(
            {
                "step": step,
                "dp_rank": replica,
                "stage": stage,
                "optype": f"{one.kind}-compute",
                "start_ts": 100.0 * step + one.begin,
                "duration": one.seconds,
                "gmc": one.virtual_stage,
                "mb_id": one.micro_batch,
            }
        )
    last = max(one.end for _, _, one in passes)
    update = {"optype": "optimizer", "start_ts": 100.0 * step + last, "duration": 0.5}
    return [*rows, {**rows[0], **update, "gmc": "", "mb_id": ""}]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


PLAN = Path(__file__).parents[2] / "docs" / "llama3-8b-two-generations.plan.json"


def kineto(path: Path, rank: int, spans: list[tuple[str, str, float, float]]) -> None:
    """A file of torch.profiler. spans: (category, name, begin, end)."""
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": 1,
         "ts": begin * 1e6, "dur": (end - begin) * 1e6}
        for category, name, begin, end in spans
    ]  # fmt: skip
    document = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))


def test_a_table_of_operations(hetplan: Call, tmp_path: Path) -> None:
    rows = table_rows(0, two_stages(even)) + table_rows(1, two_stages(even))
    path = write_table(tmp_path / "trace.csv", rows)
    document = hetplan("show", "--trace-in", path, "--json").json
    assert document["seconds"] == pytest.approx(12.5)
    assert document["parts"]["computing"] == pytest.approx(9.0)
    assert document["parts"]["schedule"] == pytest.approx(3.0)
    assert document["parts"]["after"] == pytest.approx(0.5)
    assert [step["step"] for step in document["steps"]] == [0, 1]


def test_a_parquet_table_of_operations(hetplan: Call, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = table_rows(7, two_stages(even, message=0.25))
    for row in rows:
        row.update({name: None for name in ("gmc", "mb_id") if row[name] == ""})
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "trace.parquet")
    document = hetplan("show", "--trace-in", tmp_path / "trace.parquet", "--json").json
    assert document["parts"]["messages"] > 0.4
    assert document["messages"][0]["seconds"] == pytest.approx(0.25)


def test_a_plans_own_replay_has_the_predicted_parts(hetplan: Call, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert hetplan("plan", "simulate", PLAN, "--trace", trace).code == 0
    document = hetplan("show", PLAN, "--trace-in", trace, "--json").json
    assert document["parts"] == pytest.approx(document["predicted_parts"], abs=1e-9)
    table = hetplan("show", PLAN, "--trace-in", trace).out
    assert "predicted" in table and "schedule" in table


def test_files_of_ranks_with_kernels(hetplan: Call, tmp_path: Path) -> None:
    for rank, computing in enumerate((2.0, 5.0)):
        kineto(
            tmp_path / f"rank{rank}.json.gz",
            rank,
            [
                ("user_annotation", "ProfilerStep#3", 0.0, 7.0),
                ("kernel", "gemm", 0.0, computing),
                ("kernel", "ncclDevKernel_AllReduce_Sum_f32", computing, 6.0),
                ("kernel", "of another step", 8.0, 9.0),
            ],
        )
    document = hetplan("show", "--trace-in", tmp_path, "--json").json
    assert document["steps"] == [3]
    waiting = [rank["waiting"] for rank in document["ranks"]]
    assert waiting == pytest.approx([3.0, 0.0])
    assert "slow: rank 1" in hetplan("show", "--trace-in", tmp_path).out


def test_files_of_ranks_with_passes_need_a_plan(hetplan: Call, tmp_path: Path) -> None:
    plan = json.loads(PLAN.read_text())
    folder = tmp_path / "ranks"
    folder.mkdir()
    rank = 0
    for replica in plan["replicas"]:
        for stage in range(len(replica["stages"])):
            spans = [("user_annotation", f"PP:{stage}F0", 0.0 + stage, 1.0 + stage)]
            spans.append(("user_annotation", f"PP:{stage}B0", 20.0 - 2 * stage, 22.0 - 2 * stage))
            for _ in range(sum(len(group) for group in replica["stages"][stage]["devices"])):
                kineto(folder / f"rank{rank}.json.gz", rank, spans)
                rank += 1
    document = hetplan("show", PLAN, "--trace-in", folder, "--json").json
    assert document["seconds"] == pytest.approx(22.0)
    assert "which rank has which stage" in hetplan("show", "--trace-in", folder).error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "no passes and no work of GPUs"),
        ("{}", "is no trace"),
        ('{"traceEvents": 3}', "is no trace"),
        ("{", "ends in the middle"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "x", "dur": 1}, 4, null]}', "no passes"),
    ],
)
def test_other_files_are_refused(hetplan: Call, tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert says in hetplan("show", "--trace-in", path).error


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        ("duration", "-1", "negative duration"),
        ("duration", "x", "duration is no number"),
        ("duration", "nan", "duration is no number"),
        ("mb_id", "0.5", "mb_id is no number"),
        ("dp_rank", "-2", "dp_rank is no number"),
    ],
)
def test_damaged_tables_are_refused(
    hetplan: Call, tmp_path: Path, column: str, cell: str, says: str
) -> None:
    rows = table_rows(0, two_stages(even))
    rows[2][column] = cell
    path = write_table(tmp_path / "trace.csv", rows)
    assert says in hetplan("show", "--trace-in", path).error


def test_missing_columns_and_files_are_named(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("step,stage\n0,0\n")
    assert "has no column dp_rank" in hetplan("show", "--trace-in", path).error
    path.write_text(",".join(COLUMNS) + "\n")
    assert "has no forward or backward passes" in hetplan("show", "--trace-in", path).error
    assert "no such file" in hetplan("show", "--trace-in", tmp_path / "none.json").error
    (tmp_path / "empty").mkdir()
    assert "has no traces" in hetplan("show", "--trace-in", tmp_path / "empty").error


def test_two_files_of_one_rank_are_refused(hetplan: Call, tmp_path: Path) -> None:
    for name in ("a", "b"):
        kineto(tmp_path / f"{name}.json.gz", 0, [("kernel", "gemm", 0.0, 1.0)])
    assert "not different" in hetplan("show", "--trace-in", tmp_path).error


def test_something_to_show_is_asked_for(hetplan: Call) -> None:
    assert "PLAN or INSTANCE" in hetplan("show").error
