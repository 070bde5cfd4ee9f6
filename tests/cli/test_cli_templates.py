"""`hetplan plan templates`: the list is proven and what runs from it is no worse than Oobleck's
choice."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.formulations.ditto.data import DittoDecision
from hetplan.formulations.ditto.evaluate import evaluate
from hetplan.formulations.ditto.templates import cluster_part
from hetplan.instances.library import find

NAME = "ditto-ex1-nb32-flat"


def test_templates(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    ran = hetplan("plan", "templates", NAME, "--failures", "1", "-q", "-o", path)
    assert (ran.code, ran.err) == (0, "")
    assert (
        "fastest template of each number of nodes" in ran.out and "1 of them may be lost" in ran.out
    )
    document = json.loads(path.read_text())
    entry = find(NAME)
    assert entry is not None
    data = entry.load().data
    counts = [kind.nodes for kind in data.device_types]
    assert (
        document["complete"]
        and len(document["templates"]) == len(list(product(*(range(n + 1) for n in counts)))) - 1
    )
    for template in document["templates"]:
        part = cluster_part(data, tuple(template["nodes"].values()))
        price = evaluate(part, DittoDecision.model_validate(template["decision"])).objective
        assert price == pytest.approx(template["predicted_seconds"], rel=1e-9)
        assert template["bound"] == pytest.approx(price, rel=2e-6)
    fastest = [t["node_count"] for t in document["templates"] if t["fastest_of_its_count"]]
    assert fastest == list(range(1, sum(counts) + 1))
    exact, oobleck = document["instantiation"]["exact"], document["instantiation"]["oobleck"]
    assert exact["stop"] == "optimal" and len(exact["pipelines"]) >= 2
    assert exact["predicted_seconds"] <= oobleck["predicted_seconds"] * (1 + 1e-9)
    assert sum(p["micro_batches"] for p in exact["pipelines"]) == document["micro_batches"] == 32
    for name, count in zip(document["templates"][0]["nodes"], counts, strict=True):
        assert sum(p["nodes"][name] for p in exact["pipelines"]) <= count


def test_fewer_nodes_and_other_micro_batches(hetplan: Call) -> None:
    document = hetplan(
        "plan", "templates", NAME, "--fewest-nodes", "3", "--micro-batches", "48", "-q", "--json"
    ).json
    assert {template["node_count"] for template in document["templates"]} == {3, 4}
    assert sum(p["micro_batches"] for p in document["instantiation"]["exact"]["pipelines"]) == 48


def test_what_has_no_templates(hetplan: Call) -> None:
    assert "expected ditto" in hetplan("plan", "templates", "amp-homogeneous").error
    assert "expected 1 to 4" in hetplan("plan", "templates", NAME, "--fewest-nodes", "5").error
    assert "expected 0 to 3" in hetplan("plan", "templates", NAME, "--failures", "4").error
    assert "expected at least 1" in hetplan("plan", "templates", NAME, "--micro-batches", "0").error


def test_no_instantiation_is_told(hetplan: Call) -> None:
    ran = hetplan("plan", "templates", NAME, "--fewest-nodes", "3", "--failures", "1", "-q")
    assert ran.code == 1
    assert "no templates add up to 2 pipelines" in ran.out
