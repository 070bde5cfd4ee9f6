"""The published samples of other planners, where they lie beside this checkout."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from fakes.foreign import imported
from hetplan.cli.main import main
from hetplan.profiling.cluster import load_cluster
from hetplan.profiling.models import load_model

SHARED = Path(__file__).parents[3] / "shared" / "data"
beside = pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the published samples in {SHARED}")


@beside
@pytest.mark.parametrize("name", ["gnmt", "resnet50", "vgg16"])
def test_published_pipedream(name: str, tmp_path: Path) -> None:
    path = SHARED / "pipedream" / f"{name}.txt"
    found = imported("pipedream", path, tmp_path)
    text = path.read_text()

    def total(key: str) -> float:
        return math.fsum(map(float, re.findall(rf"{key}=([\d.]+)", text)))

    (table,) = found.tables
    assert sum(table.forward_seconds) == pytest.approx(total("forward_compute_time") / 1e3)
    assert sum(table.backward_seconds) == pytest.approx(total("backward_compute_time") / 1e3)
    assert sum(layer.param_bytes for layer in found.layers) == pytest.approx(
        total("parameter_size")
    )
    assert found.layers[-1].activation_bytes == 0


@beside
def test_published_graphs(tmp_path: Path) -> None:
    for name in ("bert24_training", "bert24_inference", "resnet50_training"):
        path = SHARED / "dnn-partitioning" / f"{name}.json"
        found = imported("dnn-partitioning", path, tmp_path)
        nodes = json.loads(path.read_text())["nodes"]
        assert sum(found.tables[0].seconds()) == pytest.approx(
            sum(n["fpgaLatency"] for n in nodes) / 1e3
        )
    found = imported("piper", SHARED / "piper/bert32a100.json", tmp_path)
    nodes = json.loads((SHARED / "piper/bert32a100.json").read_text())["nodes"]
    for table in found.tables:
        given = sum(n["TMPCs"][str(table.tensor)][0]["timePerSample"] for n in nodes)
        assert sum(table.seconds()) == pytest.approx(given)


@beside
def test_published_calculon(tmp_path: Path) -> None:
    target = tmp_path / "out.yaml"
    for path in sorted((SHARED / "calculon/systems").glob("*.json")):
        assert main(["profile", "import", "calculon", str(path), "-o", str(target)]) == 0
        assert (
            len(load_cluster(target).devices) == json.loads(path.read_text())["networks"][0]["size"]
        )
    target = tmp_path / "out.json"
    for path in sorted((SHARED / "calculon/models").glob("*.json")):
        assert main(["profile", "import", "calculon", str(path), "-o", str(target)]) == 0
        model, given = load_model(target), json.loads(path.read_text())
        assert len(model.layers) == given["num_blocks"] + 2 and model.spec.shape is not None
        assert model.spec.shape.query_width == given["attn_heads"] * given["attn_size"]


@beside
def test_published_sailor(tmp_path: Path) -> None:
    for folder in sorted((SHARED / "sailor/profiles").iterdir()):
        found = imported("sailor", folder, tmp_path)
        for gpu in sorted(folder.iterdir()):
            given = json.loads((gpu / "profile.json").read_text())
            for batch, degrees in given.items():
                for degree, rows in degrees.items():
                    table = found.table(gpu.name, int(degree), int(batch))
                    assert table is not None
                    assert sum(table.seconds()) == pytest.approx(
                        sum(r[0] + r[1] for r in rows.values())
                    )
