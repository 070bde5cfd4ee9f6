"""Warmers of strategies (see `solvers.warm`): each proposes for a small model on two small
nodes."""

from __future__ import annotations

from hetplan.formulations.astra.warm import unequal
from hetplan.planner.simulated import simulated
from hetplan.planner.strategies import STRATEGIES
from hetplan.profiling.cluster import ClusterFile, build_cluster
from hetplan.profiling.workload import make_workload
from hetplan.solvers.run import Run


def poplar() -> None:
    """Compile what Poplar's methods use."""
    propose("poplar")


def astra() -> None:
    """Compile what Astra's search uses, and its segments where no type is better in everything."""
    unequal()
    propose("astra")


def replays() -> None:
    """Compile the simulator."""
    propose("dp", replayed=True)


def propose(strategy: str, *, replayed: bool = False) -> None:
    """One proposal of the strategy; `replayed`: on the simulator, too."""
    nodes = [
        {"devices": 2, "device": device, "intra_node_gbit_per_s": 100.0, "network_gbit_per_s": 10.0}
        for device in ("V100-SXM2-16GB", "T4")
    ]
    header = {"format": "hetplan-cluster", "version": 1, "name": "two small nodes"}
    cluster = build_cluster(ClusterFile.model_validate({**header, "nodes": nodes}))
    workload = make_workload("gpt2", cluster, 8)
    for candidate in STRATEGIES[strategy].propose(workload, Run()):
        if replayed:
            simulated(candidate, workload)
