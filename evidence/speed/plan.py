"""The planner as a whole: how soon a complete table stands, when everything is proven, how far
bounds are, and memory.

    python -m evidence.speed plan [--case 16|64|1024]… [--time-limit S] [--output FILE]

Three workloads: 16 devices of two types, 64 of four, 1024 of four, each planned by all strategies
in a process of its own, kernels compiled before. `complete`: seconds until every strategy has
proposed a plan that is replayed, or its exact method has said why there is none. `proven`: seconds
until all exact candidates are proven, where they are. Gaps are to the bounds of the candidates' own
problems.
In brackets stand seconds of the processors, which other work on the machine makes little longer.
Everything is predicted: no device is touched.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from evidence.speed.harness import markdown, measured, save
from hetplan.planner import STRATEGIES
from hetplan.planner.candidate import Candidate
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster, example_cluster
from hetplan.profiling.workload import make_workload
from hetplan.solvers.run import Options, Run
from hetplan.text import bytes_text, percent_text, seconds_text

TYPES = ("H100-SXM5-80GB", "A100-SXM4-80GB", "A100-SXM4-40GB", "V100-SXM2-32GB")


@dataclass(frozen=True)
class Case:
    """A workload, the seconds of each method, those of everything, and what is asked for."""

    model: str
    batch: int
    nodes: int
    time_limit: float
    total: float
    asked: str


CASES = {
    "16": Case("gpt2-medium", 32, 0, 60.0, 90.0, "complete < 5 s, all proven < 90 s"),
    "64": Case("llama2-13b", 512, 2, 60.0, 300.0, "every gap <= 5 % in 300 s"),
    "1024": Case("llama3-70b", 1024, 32, 120.0, 300.0, "some gap <= 5 % in 300 s, < 4 GB"),
}


def cluster_of(nodes: int) -> Cluster:
    """So many nodes of eight devices of each of four types; without nodes AMP's cluster of 16."""
    if not nodes:
        return example_cluster("amp-mixed")
    entries = [
        {
            "count": nodes, "devices": 8, "device": name,
            "intra_node_gbit_per_s": intra, "network_gbit_per_s": network,
        }
        for name, intra, network in zip(
            TYPES, (3600, 2400, 2400, 1200), (400, 200, 200, 100), strict=True
        )
    ]  # fmt: skip
    header = {"format": "hetplan-cluster", "version": 1, "name": f"{nodes * 32} of four types"}
    return build_cluster(ClusterFile.model_validate({**header, "nodes": entries}))


def planned(name: str, time_limit: float | None, strategies: list[str]) -> dict[str, Any]:
    """One case, with when every candidate was found."""
    case = CASES[name]
    begun = time.perf_counter()
    workload = make_workload(case.model, cluster_of(case.nodes), case.batch)
    run = Run(Options(time_limit=time_limit or case.time_limit))
    worked = time.process_time()
    first: dict[str, tuple[float, float]] = {}
    last: dict[str, float] = {}

    def tell(candidate: Candidate) -> None:
        at = time.perf_counter() - begun
        if candidate.plan is not None or candidate.method.exact:
            first.setdefault(candidate.strategy, (at, time.process_time() - worked))
        last[candidate.name] = at

    timer = threading.Timer(case.total, run.cancel.set)
    timer.start()
    planning = make_plans(workload, make_strategies(strategies), run, on_candidate=tell)
    timer.cancel()
    seconds = time.perf_counter() - begun
    rows = [
        {
            "name": c.name, "status": c.status, "iteration": c.predicted_seconds,
            "objective": c.objective,
            "bound": c.bound, "gap": c.gap, "fits": c.fits_memory, "found": last.get(c.name),
            "solve": c.solve_seconds, "message": c.message, "exact": c.method.exact,
        }
        for c in planning.candidates
    ]  # fmt: skip
    exact = [row for row in rows if row["exact"]]
    complete = max(first.values()) if set(first) == set(strategies) else (None, None)
    return {
        "case": name,
        "complete": complete[0],
        "complete_cpu": complete[1],
        "cpu": time.process_time() - worked,
        "proven": max(row["found"] or seconds for row in exact)
        if all(row["status"] in ("optimal", "infeasible") for row in exact)
        else None,
        "seconds": seconds,
        "winner": None if planning.best is None else planning.best.name,
        "rows": rows,
    }


def tables(found: dict[str, Any], peak: int) -> list[str]:
    """What was reached, and the exact candidates."""
    case = CASES[found["case"]]
    exact = [row for row in found["rows"] if row["exact"]]
    gaps = [row["gap"] for row in exact if row["gap"] is not None and row["fits"]]
    head = (
        found["case"], case.model, both(found, "complete", "complete_cpu"),
        seconds_text(found["proven"]),
        both(found, "seconds", "cpu"), percent_text(min(gaps, default=None)),
        percent_text(max(gaps, default=None)),
        bytes_text(peak), found["winner"], case.asked,
    )  # fmt: skip
    header = (
        "devices", "model", "complete", "all proven", "everything", "least gap", "largest gap",
        "peak memory",
        "winner", "asked",
    )  # fmt: skip
    rows = [
        (
            row["name"], row["status"], seconds_text(row["iteration"]),
            seconds_text(row["objective"]),
            seconds_text(row["bound"]), percent_text(row["gap"]), seconds_text(row["solve"]),
            row["message"] if row["iteration"] is None else "",
        )
        for row in exact
    ]  # fmt: skip
    columns = ("candidate", "status", "iteration", "objective", "bound", "gap", "solve", "")
    return [
        markdown(f"{found['case']} devices", header, [head]),
        markdown(f"{found['case']} devices: exact candidates", columns, rows),
    ]


def both(found: dict[str, Any], seconds: str, cpu: str) -> str:
    """Seconds by the clock, and of the processors."""
    return f"{seconds_text(found[seconds])} ({seconds_text(found[cpu])})"


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--strategies", help="separated by commas; default all")
    parser.add_argument("--output")
    given = parser.parse_args(arguments)
    strategies = given.strategies.split(",") if given.strategies else list(STRATEGIES)
    printed, kept = [], []
    for name in given.case or CASES:
        found = measured(planned, name, given.time_limit, strategies)
        printed += tables(found.value, found.peak_bytes)
        kept.append({**found.value, "peak_bytes": found.peak_bytes})
    save(given.output, printed, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
