"""Configurations of published models: each is counted and planned, or refused with its reason.

`tests/files/published_shapes.jsonl` has the sizes of their `config.json` and the billions of
parameters that their pages or the index of their weights give. Those of Ling-lite, MiMo, K-EXAONE
and InternLM 3 are counted by hand from the sizes, as their pages have two or three digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import UnsupportedError
from hetplan.planner.fits import fits
from hetplan.planner.library import plan
from hetplan.profiling.models.configurations import from_config
from present import present

FILE = Path(__file__).parents[1] / "files" / "published_shapes.jsonl"
SHAPES: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
PLANNED = [shape for shape in SHAPES if "billions" in shape]
CLUSTER = """
format: hetplan-cluster
version: 1
name: large
nodes: [{count: 128, devices: 8, device: H200-SXM-141GB, intra_node_gbit_per_s: 3600,
         network_gbit_per_s: 400}]
"""


def test_published_configurations_have_their_parameters() -> None:
    assert len(SHAPES) >= 86 and len({shape["name"] for shape in SHAPES}) == len(SHAPES)
    wrong = {}
    for shape in PLANNED:
        _, layers = from_config(shape["config"], name="x").chain(16)
        billions = sum(layer.params for layer in layers) / 1e9
        if billions != pytest.approx(shape["billions"], rel=2e-4):
            wrong[shape["name"]] = billions
    assert not wrong


def test_other_published_models_are_refused_with_what_they_have() -> None:
    for shape in SHAPES:
        if "refused" in shape:
            with pytest.raises(UnsupportedError, match=shape["refused"]):
                from_config(shape["config"], name="x")


@pytest.mark.wide
@pytest.mark.parametrize("shape", PLANNED, ids=[shape["name"] for shape in PLANNED])
def test_published_configurations_are_planned(shape: dict[str, Any], tmp_path: Path) -> None:
    """On 1,024 cards of 141 GB every one of them has a layout, the small ones also a plan."""
    model, cluster = tmp_path / "config.json", tmp_path / "large.yaml"
    model.write_text(json.dumps(shape["config"]))
    cluster.write_text(CLUSTER)
    assert fits(model, cluster, sequence=1024, precision="bf16").fits
    if shape["billions"] < 10:
        cluster.write_text(CLUSTER.replace("count: 128", "count: 1"))
        planning = plan(
            model,
            cluster,
            global_batch=8,
            sequence=1024,
            precision="bf16",
            strategies="poplar",
            time_limit=60,
        )
        assert present(planning.best).fits_memory
