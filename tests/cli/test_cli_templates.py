"""`hetplan plan templates`: the list and what runs from it are proven."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.formulations.ditto import templates
from hetplan.instances.library import find
from present import present

NAME = "ditto-ex1-nb32-flat"


def test_templates(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "templates.json"
    ran = hetplan("plan", "templates", NAME, "--failures", "1", "-q", "-o", path)
    assert (ran.code, ran.err) == (0, "")
    assert "fastest template of each number of nodes" in ran.out
    assert "1 of them may be lost" in ran.out
    document = json.loads(path.read_text())
    counts = [kind.nodes for kind in present(find(NAME)).load().data.device_types]
    parts = list(product(*(range(count + 1) for count in counts)))
    assert document["complete"] and len(document["templates"]) == len(parts) - 1
    fastest = [t["node_count"] for t in document["templates"] if t["fastest_of_its_count"]]
    assert fastest == list(range(1, sum(counts) + 1))
    exact = document["instantiation"]["exact"]
    assert exact["stop"] == "optimal" and len(exact["pipelines"]) >= 2
    assert sum(p["micro_batches"] for p in exact["pipelines"]) == document["micro_batches"] == 32


def test_fewer_nodes_and_other_micro_batches(hetplan: Call) -> None:
    document = hetplan(
        "plan", "templates", NAME, "--fewest-nodes", "3", "--micro-batches", "48", "-q", "--json"
    ).json
    assert {template["node_count"] for template in document["templates"]} == {3, 4}
    assert sum(p["micro_batches"] for p in document["instantiation"]["exact"]["pipelines"]) == 48


def test_no_instantiation_is_told(hetplan: Call) -> None:
    ran = hetplan("plan", "templates", NAME, "--fewest-nodes", "3", "--failures", "1", "-q")
    assert ran.code == 1
    assert "no templates add up to 2 pipelines" in ran.out


def test_time_that_runs_out_leaves_what_is_proven(
    hetplan: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list takes all of the time, so that none is left for choosing pipelines."""
    listed = templates.template_list

    def late(*given: Any, **options: Any) -> Any:
        found = listed(*given, **options)
        given[1].cancel.set()
        return found

    monkeypatch.setattr(templates, "template_list", late)
    ran = hetplan("plan", "templates", "tiny-fast-slow", "-q", "--json")
    assert ran.code == 1 and ran.err == ""
    assert ran.json["templates"] and ran.json["instantiation"]["exact"]["stop"] == "interrupted"


def test_too_many_micro_batches_are_refused(hetplan: Call) -> None:
    ran = hetplan("plan", "templates", "tiny-fast-slow", "-q", "--micro-batches", str(10**9))
    assert ran.code == 2 and "micro-batches: not usable" in ran.error
