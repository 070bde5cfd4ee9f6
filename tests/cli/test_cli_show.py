"""`hetplan show PLAN`: on the terminal, as files, from a plan or a whole planning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fakes.cli import Call
from fakes.workloads import cluster_document


@pytest.fixture
def files(hetplan: Call, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A plan, the planning that it is of, and the cluster."""
    cluster, plan, planning = (
        tmp_path / "c.yaml",
        tmp_path / "plan.json",
        tmp_path / "planning.json",
    )
    cluster.write_text(yaml.safe_dump(cluster_document()))
    base = (
        "plan",
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
    planning.write_text(hetplan(*base, "--json", "-o", plan).out)
    return plan, planning, cluster


def test_terminal(hetplan: Call, files: tuple[Path, Path, Path]) -> None:
    plan, planning, cluster = files
    ran = hetplan("show", plan, "--cluster", cluster)
    assert (ran.code, ran.err) == (0, "")
    assert (
        "replica 3, stage 0" in ran.out and "F forward" in ran.out and "candidates" not in ran.out
    )
    assert "dp/enumeration *" in hetplan("show", planning, "--cluster", cluster).out
    found = hetplan("show", plan, "--cluster", cluster, "--json").json
    assert len(found["rows"]) == 4 and found["offers"] == []


def test_files(hetplan: Call, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, planning, cluster = files
    target = tmp_path / "page.html"
    ran = hetplan("show", planning, "--cluster", cluster, "--html", target)
    assert (ran.code, ran.out) == (0, "") and f"written: {target}" in ran.err
    assert target.read_text().startswith("<!doctype html>")


def test_nonsense_is_one_line(
    hetplan: Call, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    plan, _, cluster = files
    assert "no such file" in hetplan("show", "nothing.json", "--cluster", cluster).error
    assert (
        "no such folder"
        in hetplan("show", plan, "--cluster", cluster, "--html", "no/such/x.html").error
    )
    (tmp_path / "x.json").write_text(json.dumps({"candidates": [], "winner": None}))
    assert "no winner to show" in hetplan("show", tmp_path / "x.json", "--cluster", cluster).error
