"""Pipelines of gpt2 on the small cluster, as plan files."""

from __future__ import annotations

from itertools import pairwise

from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan


def pipeline(workload: Workload, *cuts: int, name: str = "pipeline") -> Plan:
    """gpt2's 14 layers cut before the given ones, stage j on device j, micro-batches of one sample,
    1F1B."""
    bounds = [0, *cuts, len(workload.profile.layers)]
    stages = [
        {"layers": [[first, last]], "devices": [[j]]}
        for j, (first, last) in enumerate(pairwise(bounds))
    ]
    return Plan.model_validate(
        {
            "format": "hetplan-plan",
            "version": 1,
            "name": name,
            "workload": {
                "model": workload.model.name,
                "cluster": workload.cluster.name,
                "global_batch": workload.global_batch,
                "sequence": workload.sequence,
                "precision": workload.precision,
                "layers": [layer.name for layer in workload.profile.layers],
            },
            "devices": [{"type": d.type, "node": d.node} for d in workload.cluster.devices],
            "replicas": [
                {
                    "stages": stages,
                    "micro_batches": [{"count": workload.global_batch, "samples": 1}],
                }
            ],
            "schedule": "1f1b",
        }
    )
