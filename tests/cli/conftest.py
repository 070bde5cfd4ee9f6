"""The command line in-process, with a fake problem beside the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fakes.cli import Call, Ran, Write
from fakes.workloads import TWO_BLOCKS, cluster as two_by_two, cluster_document
from hetplan.cli.main import main
from hetplan.formulations import FAMILIES
from hetplan.planner.amp import DataParallel
from hetplan.planner.proposals import propose
from hetplan.plans.plan import save_plan
from hetplan.profiling.workload import make_workload
from hetplan.solvers.run import Run
from present import present


@pytest.fixture
def hetplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call `hetplan` as the installed program does; the problem `fake` is registered."""
    monkeypatch.setitem(FAMILIES, "fake", "fakes.family:FAMILY")
    monkeypatch.delenv("HETPLAN_DEBUG", raising=False)

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def numbers(tmp_path: Path) -> Write:
    """Write an instance of the fake problem."""

    def write(*values: float, name: str = "numbers") -> Path:
        document = {"format": "hetplan-instance", "version": 1, "problem": "fake", "name": name}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document | {"origin": "test", "data": {"numbers": values}}))
        return path

    return write


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A cluster file of two fast and two slow devices."""
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster_document()))
    return path


@pytest.fixture
def two_blocks(tmp_path: Path) -> Path:
    """The configuration of a gpt2 of two blocks."""
    path = tmp_path / "two-blocks.json"
    path.write_text(json.dumps(TWO_BLOCKS))
    return path


@pytest.fixture
def plan_files(cluster: Path) -> tuple[Path, Path]:
    """A data-parallel plan of gpt2 in fp16 on that cluster, and the cluster's file."""
    plan, workload = cluster.with_name("plan.json"), make_workload("gpt2", two_by_two(), 8)
    save_plan(present(propose(DataParallel(), workload, Run())[0].plan), plan)
    return plan, cluster
