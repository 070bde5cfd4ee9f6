"""`hetplan export`: to standard output or a file, and one line for what cannot be said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call
from fakes.workloads import small
from hetplan.planner.amp import DataParallel
from hetplan.planner.strategy import propose
from hetplan.runtime.export import EXPORTERS
from hetplan.runtime.plan import Plan, save_plan
from hetplan.solvers.run import Run


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A data-parallel plan of gpt2 in fp16."""
    found = propose(DataParallel(), small(), Run())[0].plan
    assert isinstance(found, Plan)
    save_plan(found, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_to_standard_output_or_a_file(hetplan: Call, plan: Path, tmp_path: Path) -> None:
    shown = hetplan("export", plan, "--to", "deepspeed")
    assert (shown.code, shown.err) == (0, "")
    assert json.loads(shown.out)["train_batch_size"] == 8
    target = tmp_path / "ds.json"
    assert hetplan("export", plan, "--to", "deepspeed", "-o", target).out == ""
    assert target.read_text() == shown.out


def test_every_framework_is_offered_in_the_help(hetplan: Call) -> None:
    help_text = "".join(hetplan("export", "--help").out.split())
    assert "|".join(EXPORTERS) in help_text


def test_refusals_and_nonsense_are_one_line(hetplan: Call, plan: Path, tmp_path: Path) -> None:
    refused = hetplan("export", plan, "--to", "torchtitan")
    assert refused.code == 2 and "precision fp16 (only bf16, fp32)" in refused.error
    assert (
        "unknown framework 'megatorn'; did you mean megatron"
        in hetplan("export", plan, "--to", "megatorn").error
    )
    assert (
        "no-such.json: no such file" in hetplan("export", "no-such.json", "--to", "megatron").error
    )
    assert (
        "no such folder" in hetplan("export", plan, "--to", "megatron", "-o", "no/such/x.sh").error
    )
