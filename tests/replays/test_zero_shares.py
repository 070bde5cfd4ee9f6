"""The shares of model states where replicas are cut into different chunks."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.workloads import cluster_document, small
from hetplan.plans.making import new_plan
from hetplan.replays.costs import Costs
from hetplan.replays.pose import pose
from hetplan.replays.zero import ZeroCosts


def test_a_layer_may_be_in_a_later_chunk_of_another_replica() -> None:
    """Layer 4 begins the second stage of the first replica. In the second replica it is in the
    second chunk of the first stage, which has two row groups: three ranks share its states."""
    node = {**cluster_document()["nodes"][0], "devices": 5}
    on = small(nodes=[node])
    last = len(on.model.layers)
    first: list[dict[str, Any]] = [
        {"layers": [[0, 4], [5, 6]], "devices": [[0]], "tensor_shares": [1.0]},
        {"layers": [[4, 5], [6, last]], "devices": [[1]], "tensor_shares": [1.0]},
    ]
    second: list[dict[str, Any]] = [
        {
            "layers": [[0, 1], [2, 5]],
            "devices": [[2], [3]],
            "row_shares": [1.0, 1.0],
            "tensor_shares": [1.0],
        },
        {"layers": [[1, 2], [5, last]], "devices": [[4]], "tensor_shares": [1.0]},
    ]
    batches = [{"count": 2, "samples": on.global_batch // 4}]
    replicas = [{"stages": stages, "micro_batches": batches} for stages in (first, second)]
    plan = new_plan(on, replicas, schedule="interleaved-1f1b", zero=1)
    of_plan = ZeroCosts.of(plan, Costs(pose(on)))
    shares = [of_plan.shares(stage) for replica in plan.replicas for stage in replica.stages]
    assert [share[0] for share in shares] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1 / 2])
