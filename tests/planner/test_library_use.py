"""`import hetplan as hp`: typed objects in and out, nothing heavy until it is used, and the
quick-start notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hetplan as hp
from fakes.workloads import cluster, cluster_document
from hetplan.errors import InputError
from hetplan.planner.strategy import make_strategies
from hetplan.text import seconds_text
from markdown_pages import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def test_plan_returns_typed_objects(tmp_path: Path) -> None:
    planning = hp.plan("gpt2", cluster(), global_batch=8, strategies=["dp"], threads=1)
    assert isinstance(planning, hp.Planning)
    best = planning.best
    assert isinstance(best, hp.Candidate) and isinstance(best.plan, hp.Plan)
    assert best.replay is not None and best.predicted_seconds == best.replay.seconds
    hp.save_plan(best.plan, tmp_path / "plan.json")
    again = hp.load_plan(tmp_path / "plan.json")
    assert again == best.plan
    assert json.loads(hp.export(again, "deepspeed"))["train_batch_size"] == 8
    assert hp.replay(again, planning.workload).seconds == best.predicted_seconds
    full = hp.plan("gpt2", cluster(), global_batch=8, strategies=["dp"], memory_margin=0.9)
    assert full.best is None and full.workload.memory_margin == 0.9
    took, *misfit = str(planning), *str(full).splitlines()
    assert took.startswith(f"dp/enumeration {seconds_text(best.predicted_seconds)}, 0 % from its")
    assert misfit[0].startswith("dp/enumeration") and len(misfit) == 1 + len(full.advice)


def test_clusters_by_file_name_or_object(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(cluster_document()))
    by_file = hp.plan("gpt2", tmp_path / "c.yaml", global_batch=8, strategies=["dp"])
    by_object = hp.plan(
        hp.load_model("gpt2"),
        hp.load_cluster(tmp_path / "c.yaml"),
        global_batch=8,
        strategies=["dp"],
    )
    assert by_file.candidates[0].predicted_seconds == by_object.candidates[0].predicted_seconds
    by_name = hp.plan("gpt2", "g4dn-4", global_batch=32, strategies=["dp"])
    assert by_name.workload.cluster.counts() == {"T4": 16}
    with pytest.raises(InputError, match="unknown example cluster 'g4dn-5'; did you mean g4dn-4"):
        hp.plan("gpt2", "g4dn-5", global_batch=32)


def test_strategies_may_be_one_text() -> None:
    assert [s.name for s in make_strategies("dp")] == ["dp"]
    assert [s.name for s in make_strategies("amp, dp")] == ["amp", "dp"]
    with pytest.raises(InputError, match="unknown strategy 'dpp'; did you mean dp"):
        hp.plan("gpt2", cluster(), global_batch=8, strategies="dpp")


def test_everything_promised_is_there_and_nothing_is_loaded_before() -> None:
    code = (
        "import sys, hetplan as hp\n"
        "assert not {m for m in sys.modules if m.split('.')[0] in ('numpy', 'pydantic', 'numba')}\n"
        "assert set(hp.__all__) <= set(dir(hp))\n"
        "for name in hp.__all__: assert getattr(hp, name) is not None, name\n"
        "assert callable(hp.plan)\n"
        "try: hp.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.pages
def test_the_quick_start_notebook_runs(tmp_path: Path) -> None:
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert document["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "per iteration" in ran.stdout and (tmp_path / "plan.json").exists()
