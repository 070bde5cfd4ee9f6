"""One workload that many tests of the planner share, and its plans by AMP and data parallelism."""

from __future__ import annotations

import pytest

from fakes.workloads import one_thread, small
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.profiling.workload import Workload


@pytest.fixture(scope="session")
def workload() -> Workload:
    """gpt2 on node 0 with two V100 and node 1 with two T4, global batch 8."""
    return small()


@pytest.fixture(scope="session")
def planning(workload: Workload) -> Planning:
    """Pipelines and the floor; what other families propose is held by their own tests."""
    return make_plans(workload, make_strategies(["amp", "dp"]), one_thread())
