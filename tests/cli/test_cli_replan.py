"""`hetplan plan what-if` and `plan replan`: tables, documents, plan files, nonsense in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fakes.cli import Call
from fakes.workloads import cluster_document, small
from hetplan.planner.amp import DataParallel
from hetplan.planner.strategy import propose
from hetplan.runtime.plan import Plan, load_plan, save_plan
from hetplan.solvers.run import Run


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A plan of gpt2 on two by two devices, and the cluster's file."""
    plan = propose(DataParallel(), small(), Run())[0].plan
    assert isinstance(plan, Plan)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_document()))
    return tmp_path / "plan.json", tmp_path / "cluster.yaml"


def test_replan(hetplan: Call, files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, cluster = files
    more = ("--cluster", cluster, "--strategies", "dp", "-q")
    ran = hetplan("plan", "replan", plan, "--lost", "node1", *more, "-o", tmp_path / "new.json")
    assert (ran.code, ran.err) == (0, "")
    assert "without node 1" in ran.out and "before the loss" in ran.out
    new = load_plan(tmp_path / "new.json")
    assert set(new.ranks) == {0, 1} and len(new.devices) == 4
    again = hetplan("plan", "replan", plan, "--lost", "node0", *more, "--json").json
    assert again["lost_nodes"] == [0]
    assert again["candidates"][again["winner"]]["bytes_from_checkpoint"] == 0.0


def test_replan_where_nothing_is_left_that_fits(
    hetplan: Call, files: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, cluster = files
    tight = cluster_document(devices={"V100-SXM2-16GB": {"memory_gib": 2}})
    cluster.write_text(yaml.safe_dump(tight))
    target = tmp_path / "new.json"
    ran = hetplan(
        "plan",
        "replan",
        plan,
        "--cluster",
        cluster,
        "--lost",
        "node1",
        "--strategies",
        "dp",
        "-o",
        target,
    )
    assert ran.code == 1 and "nothing fits" in ran.out
    assert "is not written" in ran.err and not target.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--lost", "node9"), "no such node (got 'node9'"),
        (("--lost", "node0,node1"), "nothing is left"),
        (("--lost", "node1", "--within", "-1"), "--within: not usable (got -1.0"),
        (("--lost", "node1", "--strategies", "foo"), "unknown strategy 'foo'"),
        (("--lost", "node1", "--model", "gpt2-medium"), "model of the plan is not the workload's"),
    ],
)
def test_nonsense_is_one_line(
    hetplan: Call, files: tuple[Path, Path], more: tuple[str, ...], message: str
) -> None:
    plan, cluster = files
    assert message in hetplan("plan", "replan", plan, "--cluster", cluster, *more, "-q").error


def test_what_if(hetplan: Call, files: tuple[Path, Path]) -> None:
    _, cluster = files
    base = (
        "plan",
        "what-if",
        "--model",
        "gpt2",
        "--cluster",
        cluster,
        "--global-batch",
        8,
        "--strategies",
        "dp",
        "-q",
    )
    ran = hetplan(*base, "--add", "2xT4", "--remove", "node0", "--network-gbit-per-s", 100)
    assert (ran.code, ran.err) == (0, "")
    for expected in ("as it is", "add 2xT4", "remove node0", "network at 100 Gbit/s", "4 T4"):
        assert expected in ran.out
    found = hetplan(*base, "--json").json
    assert "network at 100 Gbit/s" in [v["change"] for v in found["variants"]]
    assert "--add: not usable" in hetplan(*base, "--add", "T4").error
