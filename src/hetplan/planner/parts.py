"""Plans on parts of the cluster: devices that do not pay are left out.

Every nonempty subset of the device types is a cluster of its own (all nodes of these types), on
which every strategy's exact methods are solved: 2^T - 1 clusters for T types, at most six; of more
those of one, of two, or of all types but one. What comes of it are plans for the whole cluster
whose other devices are idle, so that they compare in seconds and in money; only devices in use are
paid for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from hetplan.planner.candidate import Candidate
from hetplan.planner.candidates import Search, Tell
from hetplan.planner.settings import Settings
from hetplan.planner.strategies import Strategy
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, PlanDevice, Replica, Stage
from hetplan.runtime.replay import replay
from hetplan.solvers.run import Run

# Beyond that many types the subsets are too many to solve each: single types, pairs, and all but
# one are.
MOST_TYPES = 6


def parts(workload: Workload) -> Iterator[tuple[str, list[int]]]:
    """(name, nodes) of every part of the cluster but the whole, smaller ones first; the name says
    which types."""
    types = workload.cluster.types
    few = len(types) <= MOST_TYPES
    for size in range(1, len(types) + 1) if few else (1, 2, len(types) - 1):
        for chosen in combinations(types, size):
            nodes = [n for n, node in enumerate(workload.cluster.nodes) if node.device in chosen]
            if len(nodes) < len(workload.cluster.nodes):
                yield "+".join(chosen), nodes


def on_parts(
    workload: Workload,
    strategies: Sequence[Strategy],
    run: Run,
    settings: Settings,
    tell: Tell | None = None,
    precision_named: bool = False,
) -> list[Candidate]:
    """The candidates of every part, as plans for the whole cluster; those of heuristics are left
    out."""
    found: list[Candidate] = []
    for name, nodes in parts(workload):
        whole = workload.cluster
        shown = tuple((whole.devices[d].node, d) for d in whole.devices_of(nodes))
        part = replace(whole.part(nodes, f"{whole.name}: {name}"[:200]), shown=shown)
        inner = replace(workload, cluster=part)
        for strategy in strategies:
            if run.cancelled:
                return found
            search = Search(
                strategy,
                inner,
                run,
                settings.get(strategy.name),
                methods=strategy.exact,
                precision_named=precision_named,
            )
            for candidate in search.candidates()[0]:
                if candidate.plan is None or not candidate.fits_memory:
                    continue
                there = lifted(candidate, workload, nodes, name)
                if tell is not None:
                    tell(there)
                found.append(there)
    return found


def lifted(candidate: Candidate, workload: Workload, nodes: Sequence[int], name: str) -> Candidate:
    """A part's candidate on the whole cluster, replayed there (the seconds are the same)."""
    assert candidate.plan is not None
    numbers = workload.cluster.devices_of(nodes)
    plan = lifted_plan(candidate.plan, workload, numbers)
    found = replay(plan, workload) if candidate.replayed is not None else None
    peaks = [0.0] * len(workload.cluster.devices)
    for own, held in zip(numbers, candidate.peak_bytes or (), strict=True):
        peaks[own] = held
    return replace(
        candidate,
        method=f"{candidate.method}@{name}",
        plan=plan,
        replayed=found,
        peak_bytes=tuple(peaks) if found is None else found.peak_bytes,
    )


def lifted_plan(plan: Plan, workload: Workload, numbers: Sequence[int]) -> Plan:
    """The plan with the whole cluster's devices; numbers: the device that each of the part's is
    there, below 0 for one that is not and that the plan does not use."""
    shares = None
    if plan.zero_shares is not None:
        shares = [0.0] * len(workload.cluster.devices)
        for own, share in zip(numbers, plan.zero_shares, strict=True):
            if own >= 0:
                shares[own] = share
    return plan.model_copy(
        update={
            "name": f"{workload.model.name} on {workload.cluster.name}"[:200],
            "workload": plan.workload.model_copy(update={"cluster": workload.cluster.name}),
            "devices": [PlanDevice(type=d.type, node=d.node) for d in workload.cluster.devices],
            "zero_shares": shares,
            "replicas": [lifted_replica(replica, numbers) for replica in plan.replicas],
        }
    )


def lifted_replica(replica: Replica, numbers: Sequence[int]) -> Replica:
    """The replica on other device numbers."""
    stages = [
        Stage(
            layers=stage.layers,
            devices=[[numbers[d] for d in group] for group in stage.devices],
            row_shares=stage.row_shares,
            tensor_shares=stage.tensor_shares,
        )
        for stage in replica.stages
    ]
    return Replica(stages=stages, micro_batches=replica.micro_batches)


def pareto(candidates: Sequence[Candidate], workload: Workload) -> list[int]:
    """Indices of the candidates that fit and than which none is both faster and cheaper, fastest
    first."""
    priced = [
        (c.predicted_seconds, money, i)
        for i, c in enumerate(candidates)
        if c.fits_memory
        and c.predicted_seconds is not None
        and (money := c.money_per_million_tokens(workload)) is not None
    ]
    found: list[int] = []
    least = float("inf")
    for _, money, i in sorted(priced):
        if money < least:
            least = money
            found.append(i)
    return found


def cheapest_within(
    candidates: Sequence[Candidate], workload: Workload, percent: float
) -> int | None:
    """Index of the cheapest that is at most `percent` slower than the fastest; None where no price
    is known."""
    front = pareto(candidates, workload)
    if not front:
        return None
    fastest = min(
        c.predicted_seconds for c in candidates if c.fits_memory and c.predicted_seconds is not None
    )
    near = [
        i
        for i in front
        if (candidates[i].predicted_seconds or 0.0) <= fastest * (1 + percent / 100)
    ]
    return near[-1] if near else None
