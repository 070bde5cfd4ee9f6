"""Small workloads: a few layers with measured-looking times on a few devices."""

from __future__ import annotations

from random import Random
from typing import Any

from hetplan.profiling.cluster import Cluster, ClusterFile, build_cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.profiling.workload import Workload, make_workload


def cluster_document(**changes: Any) -> dict[str, Any]:
    """One node of two fast devices and one of two slow ones, as a cluster file's content."""
    return {
        "format": "hetplan-cluster",
        "version": 1,
        "name": "two-by-two",
        "nodes": [
            {
                "count": 1,
                "devices": 2,
                "device": "V100-SXM2-16GB",
                "intra_node_gbit_per_s": 170,
                "network_gbit_per_s": 10,
            },
            {
                "count": 1,
                "devices": 2,
                "device": "T4",
                "intra_node_gbit_per_s": 50,
                "network_gbit_per_s": 50,
            },
        ],
    } | changes


def cluster(**changes: Any) -> Cluster:
    """`cluster_document` as a cluster."""
    return build_cluster(ClusterFile.model_validate(cluster_document(**changes)))


def small(global_batch: int = 8, model: str = "gpt2", **changes: Any) -> Workload:
    """A small model on `cluster(**changes)` with a profile of micro-batches of 1 and 2."""
    on = cluster(**changes)
    profile = predict(load_model(model), on, micro_batches=[1, 2], date="2026-01-01")
    return make_workload(model, on, global_batch, profile=profile)


def profile_document(rng: Random | None = None) -> dict[str, Any]:
    """A profile of gpt2 for `cluster_document`, with one micro-batch size."""
    profile = predict(
        load_model("gpt2"), cluster(), micro_batches=[1], tensor_degrees=[1, 2], date="2026-01-01"
    )
    return profile.model_dump(mode="json")
