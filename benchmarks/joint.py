"""How good plans are by their replays: the papers' winner, the local search, and the bound.

    python benchmarks/joint.py [--case a]… [--seconds 10] [--seconds 60] [--seeds 5] [--bound 60]

Four workloads; the search begins with what all strategies of the planner propose. Prints a Markdown
table: replayed milliseconds of the papers' best plan and, after each number of seconds, of the
search's (median over seeds); then the proven bound after so many seconds, and the gap to it. In
brackets stand the same plans where senders block until their message is sent.
"""

from __future__ import annotations

import argparse
import math
from statistics import median
from typing import Any

from hetplan.formulations.joint.bound import lower_bound
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import decision_of, evaluate, plan_of
from hetplan.formulations.joint.pose import pose
from hetplan.formulations.joint.replay import ChainReplayer, Settings
from hetplan.formulations.joint.search import search
from hetplan.planner.library import plan
from hetplan.profiling.cluster import Cluster, ClusterFile, build_cluster, example_cluster
from hetplan.profiling.workload import make_workload
from hetplan.solvers.options import Options
from hetplan.solvers.run import Progress, Run

# Model, global batch, and nodes: count, devices, type, Gbit/s inside and of the network card.
CASES: dict[str, tuple[str, int, tuple[tuple[int, int, str, float, float], ...]]] = {
    "a": ("gpt2-medium", 32, ()),
    "b": (
        "gpt2-xl",
        128,
        ((1, 8, "A100-SXM4-80GB", 4800, 100), (2, 4, "V100-SXM2-32GB", 1200, 25)),
    ),
    "c": ("llama2-7b", 256, ((2, 8, "A100-SXM4-40GB", 4800, 100), (4, 4, "A6000", 128, 25))),
    "d": ("gpt2-large", 24, ((1, 2, "RTX-3090", 128, 10), (1, 1, "RTX-4090", 128, 10))),
}
NODE = ("count", "devices", "device", "intra_node_gbit_per_s", "network_gbit_per_s")
PAPERS_SECONDS = 20.0  # of each method of the planner


def cluster_of(case: str) -> Cluster:
    """The case's nodes; without any AMP's cluster of 16 devices."""
    nodes = [dict(zip(NODE, node, strict=True)) for node in CASES[case][2]]
    if not nodes:
        return example_cluster("amp-mixed")
    document = {"format": "hetplan-cluster", "version": 1, "name": case, "nodes": nodes}
    return build_cluster(ClusterFile.model_validate(document))


def milliseconds(data: JointData, decision: JointDecision) -> str:
    """Of a plan, and in brackets of the same where senders block."""
    blocking = ChainReplayer.of(data, Settings(sends="blocking")).seconds(plan_of(data, decision))
    return f"{1e3 * seconds_of(data, decision):,.1f} ({1e3 * blocking:,.1f})"


def seconds_of(data: JointData, decision: JointDecision) -> float:
    """Replayed seconds; infinite where the plan does not fit."""
    objective = evaluate(data, decision).objective
    return math.inf if objective is None else objective


def proven(data: JointData, seconds: float) -> float:
    """The bound after so many seconds."""
    return lower_bound(data, Run(Options(time_limit=seconds)))


def row(case: str, limits: list[float], seeds: int, bound: float) -> list[str]:
    """The case's line of the table."""
    model, batch, _ = CASES[case]
    cluster = cluster_of(case)
    data = pose(make_workload(model, cluster, batch), ("none", "selective", "full"))
    planning = plan(model, cluster, global_batch=batch, time_limit=PAPERS_SECONDS)
    chains = [c.plan for c in planning.candidates if c.plan and not c.plan.program]
    starts = [decision_of(each) for each in chains]
    cells = [milliseconds(data, min(starts, key=lambda start: seconds_of(data, start)))]
    reached: list[list[float]] = [[] for _ in limits]
    last: list[tuple[float, JointDecision]] = []
    for seed in range(seeds):
        seen: list[Progress] = []
        run = Run(Options(time_limit=limits[-1], seed=seed), seen.append)
        decision = search(data, run, starts).decision
        assert decision is not None, case
        for values, limit in zip(reached, limits, strict=True):
            known: list[Any] = [p.incumbent for p in seen if p.incumbent and p.seconds <= limit]
            values.append(known[-1])
        last.append((seconds_of(data, decision), decision))
    cells += [f"{1e3 * median(values):,.1f}" for values in reached[:-1]]
    middle = sorted(last, key=lambda pair: pair[0])[len(last) // 2]
    cells.append(milliseconds(data, middle[1]))
    least = proven(data, bound)
    return [case, *cells, f"{1e3 * least:,.1f}", f"{100 * (1 - least / middle[0]):.1f} %"]


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--seconds", action="append", type=float)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bound", type=float, default=60.0)
    asked = parser.parse_args()
    limits = sorted(asked.seconds or [10.0, 60.0])
    heads = ["workload", "papers, ms", *(f"after {limit:g} s, ms" for limit in limits)]
    heads += [f"bound after {asked.bound:g} s, ms", "gap"]
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for case in asked.case or CASES:
        print(f"| {' | '.join(row(case, limits, asked.seeds, asked.bound))} |", flush=True)


if __name__ == "__main__":
    main()
