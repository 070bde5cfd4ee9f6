"""One device, a configuration in a file, and the only layout of a model there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from hetplan.planner.fits import CutLayout, fits
from hetplan.profiling.frameworks import HETPLAN
from hetplan.profiling.hardware.cluster import Cluster, load_cluster
from hetplan.profiling.models.model import Model


def config_file(folder: Path, kind: str, sizes: dict[str, Any]) -> tuple[Path, Any]:
    """(a config.json in the folder, the same configuration of transformers)."""
    config = transformers.AutoConfig.for_model(kind, **sizes)
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    return path, config


def one_device(tmp_path: Path) -> Cluster:
    path = tmp_path / "one.yaml"
    path.write_text(
        "format: hetplan-cluster\nversion: 1\nname: one\nnodes:\n"
        "  - {count: 1, devices: 1, device: A100-SXM4-80GB, intra_node_gbit_per_s: 100, "
        "network_gbit_per_s: 10}\n"
    )
    return load_cluster(path)


def only_layout(model: Model, cluster: Cluster, framework: Any = HETPLAN) -> CutLayout:
    fit = fits(model, cluster, global_batch=1, framework=framework, recomputation="none")
    assert len(fit.layouts) == 1
    return fit.layouts[0]
