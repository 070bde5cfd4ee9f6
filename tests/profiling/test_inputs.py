"""Workloads as plan files carry them: every model, cluster and profile comes back equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.workloads import cluster
from hetplan.errors import InputError
from hetplan.files import to_json
from hetplan.profiling.hardware.cluster import example_clusters, open_cluster
from hetplan.profiling.inputs.inputs import Inputs, Named, Replaced
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.zoo import BUILT_IN
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.profiles.profile import Provenance
from hetplan.profiling.rates.efficiency import LearnedLinks, LinkCurve, LinkEfficiencyFile
from hetplan.profiling.workload import Workload
from hetplan.schema import parse
from present import present
from quick import rest_wide

CONFIGURATIONS = sorted((Path(__file__).parent.parent / "files" / "configurations").glob("*.json"))
TRACED = {
    "format": "hetplan-model",
    "version": 1,
    "name": "mine",
    "source": "a module",
    "date": "2026-01-31",
    "precision": "fp16",
    "layers": [
        {"name": "in", "params": 12, "output": 4.0, "saved": 8.0, "operators": 0},
        {"name": "middle", "params": 12, "output": 4.0, "saved": 8.0, "operators": 0},
        {"name": "out", "params": 3, "output": 1.0, "saved": 2.0, "operators": 1},
    ],
    "operator_lists": [
        [
            {"name": "mm", "backward": False, "read": [5, 7], "written": [0, 4],
             "product": [[1, 0], [0, 4], [4, 0], [3, 0]]},
            {"name": "mm", "backward": True, "read": [5, 7], "written": [0, 4]},
        ],
        [{"name": "own", "backward": False, "read": [0, 2], "written": [1, 0], "ruled": False}],
    ],
}  # fmt: skip


def workload_of(model: Model, **changes: Any) -> Workload:
    """The model on two device types, with tables of two micro-batches."""
    on = cluster()
    profile = predict(model, on, micro_batches=[1, 2], date="2026-01-31")
    return Workload(model, on, profile, 8, **changes)


def again(workload: Workload) -> Workload:
    """The workload after a journey through JSON."""
    written = to_json(present(Inputs.of(workload)).model_dump(mode="json"))
    inputs = parse(Inputs, json.loads(written), where="x")
    named = Named(
        where="x",
        model=workload.model.name,
        cluster=workload.cluster.name,
        global_batch=workload.global_batch,
        sequence=workload.sequence,
        precision=workload.precision,
        layers=[layer.name for layer in workload.profile.layers],
    )
    return inputs.workload(named, Replaced())


def check_equal(back: Workload, made: Workload) -> None:
    """Every figure of both."""
    assert back.profile == made.profile and back.cluster == made.cluster
    assert back.model.layers == made.model.layers
    assert back.model.spec.shape == made.model.spec.shape
    assert back.model.spec.encoder == made.model.spec.encoder
    assert back.model.notes == made.model.notes
    assert (back.framework, back.stack, back.links) == (made.framework, made.stack, made.links)
    assert back.device_bytes() == made.device_bytes()
    assert back.flops_per_iteration == made.flops_per_iteration
    degrees = range(1, 200)
    fits = [made.model.tensor_degree_fits(t) for t in degrees]
    assert [back.model.tensor_degree_fits(t) for t in degrees] == fits


@pytest.mark.parametrize("name", rest_wide(BUILT_IN, 8))
def test_a_built_in_model_comes_back(name: str) -> None:
    made = workload_of(load_model(name), memory_margin=0.125)
    check_equal(again(made), made)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_comes_back(path: Path) -> None:
    made = workload_of(load_model(path))
    check_equal(again(made), made)


def test_a_traced_module_comes_back(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(TRACED))
    made = workload_of(load_model(tmp_path / "mine.json"))
    check_equal(again(made), made)
    layers = again(made).model.layers
    assert layers[0].operators == layers[1].operators != layers[2].operators


def test_learned_links_come_back() -> None:
    """As `hetplan profile train` writes them."""
    curve = LinkCurve(operation="send", group="node", ranks=2, bytes=[1.0, 9.0], share=[0.1, 0.7])
    learned = LinkEfficiencyFile(
        device="T4",
        backend="nccl",
        provenance=Provenance(kind="measured", source="a test", date="2026-01-31"),
        bytes_per_second={"node": 2e11},
        trained_on=20,
        kept_apart=1,
        error=0.0,
        plain_error=0.0,
        line_error=0.0,
        curves=[curve],
    )
    made = workload_of(load_model("gpt2"), links=LearnedLinks(learned))
    check_equal(again(made), made)


@pytest.mark.parametrize("name", example_clusters())
def test_a_cluster_comes_back(name: str) -> None:
    on, model = open_cluster(name), load_model("gpt2", precision="fp32")
    made = Workload(model, on, predict(model, on, micro_batches=[1], tensor_degrees=[1]), 8)
    check_equal(again(made), made)


def test_layers_of_one_kind_stand_once() -> None:
    """Eighty equal blocks take no more room than two but for their numbers."""
    deep = workload_of(load_model("llama2-70b"))
    written = present(Inputs.of(deep)).model_dump(mode="json")
    assert len(written["model"]["kinds"]) == len(written["profile"]["kinds"]["layers"]) == 3
    assert len(written["model"]["layers"]) == 82
    assert len(to_json(written)) < 40_000


def test_a_value_that_no_file_can_hold_leaves_the_inputs_out() -> None:
    made = workload_of(load_model("gpt2"))
    odd = replace(made.model, layers=(replace(made.model.layers[0], params=10**30),))
    assert Inputs.of(made) is not None
    huge = object.__new__(Workload)
    huge.__dict__.update(vars(made) | {"model": odd})
    assert Inputs.of(huge) is None


def test_more_entries_than_a_machine_holds_are_refused() -> None:
    """A short file with many tables and a long chain would grow in memory a thousand times."""
    made = workload_of(load_model("gpt2"))
    document = present(Inputs.of(made)).model_dump(mode="json")
    table = document["profile"]["kinds"]["tables"][0]
    tables = [table | {"micro_batch": size} for size in range(1, 1001)]
    document["profile"]["kinds"]["tables"] = tables
    document["profile"]["layers"] = [0] * 4001
    with pytest.raises(InputError, match="expected at most 4000000 entries together"):
        parse(Inputs, document, where="x")
