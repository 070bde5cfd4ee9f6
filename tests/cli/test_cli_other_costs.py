"""A bound holds for the costs that it was proven for: no command states it of other costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fakes.cli import Call
from fakes.workloads import cluster_document

PROVEN = "no plan of stages is faster than"


@pytest.fixture
def proven(hetplan: Call, cluster: Path, two_blocks: Path) -> tuple[Path, Path]:
    """A plan of `joint`, whose file has a bound on all plans of stages; and a slower network."""
    plan, slower = cluster.with_name("plan.json"), cluster.with_name("slower.yaml")
    words = ("--model", two_blocks, "--cluster", cluster, "--global-batch", 4, "--time-limit", 6)
    assert hetplan("plan", *words, "--strategies", "dp,joint", "-q", "-o", plan).code == 0
    nodes = [node | {"network_gbit_per_s": 1} for node in cluster_document()["nodes"]]
    slower.write_text(yaml.safe_dump(cluster_document(nodes=nodes)))
    return plan, slower


def test_a_bound_is_shown_with_its_own_costs_alone(
    hetplan: Call, proven: tuple[Path, Path], cluster: Path, tmp_path: Path
) -> None:
    """The same cluster, given as a file, has the same costs; a slower network has not."""
    plan, slower = proven
    bound = json.loads(plan.read_text())["prediction"]["bound"]
    for own in ((), ("--cluster", cluster)):
        assert PROVEN in hetplan("show", plan, *own).out
        assert hetplan("show", plan, *own, "--json").json["bound"] == bound
    other = hetplan("show", plan, "--cluster", slower)
    assert other.code == 0 and PROVEN not in other.out
    assert "is of the costs that the plan was made with" in " ".join(other.out.split())
    assert hetplan("show", plan, "--cluster", slower, "--json").json["bound"] is None
    for options, states_it in (((), True), (("--cluster", slower), False)):
        page = tmp_path / "page.html"
        assert hetplan("show", plan, *options, "--html", page).code == 0
        assert (PROVEN in page.read_text()) == states_it


def test_a_plan_without_inputs_cannot_say_what_its_bound_is_of(
    hetplan: Call, proven: tuple[Path, Path], cluster: Path, two_blocks: Path
) -> None:
    plan, slower = proven
    document = json.loads(plan.read_text())
    del document["inputs"]
    plan.write_text(json.dumps(document))
    for given in (cluster, slower):  # the plan takes equally long on both
        shown = hetplan("show", plan, "--cluster", given, "--model", two_blocks)
        assert shown.code == 0 and PROVEN not in shown.out and "plan file" not in shown.out


def test_a_plan_on_what_is_left_has_no_bound_of_the_whole_cluster(
    hetplan: Call, proven: tuple[Path, Path], tmp_path: Path
) -> None:
    """What was proven without node 1 says nothing of plans that use it."""
    plan, _ = proven
    smaller = tmp_path / "smaller.json"
    words = ("--lost", "node1", "--strategies", "dp,joint", "--time-limit", 6)
    assert hetplan("plan", "replan", plan, *words, "-q", "-o", smaller).code == 0
    prediction = json.loads(smaller.read_text())["prediction"]
    assert prediction["bound"] is None
    shown = hetplan("show", smaller)
    assert PROVEN not in shown.out and "plan file" not in shown.out
