"""The strategy `astra`: the whole strategy search on the workload's cluster, proven over the space
it enumerates.

Only what a plan file can say is searched: 1F1B with or without interleaving, the distributed
optimizer (ZeRO 1), recomputation of nothing, the attention core or everything; no sequence
parallelism, offloading or overlap. On several types the stages become segments (mode 2, every
device used); beside it stands the best on one type alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.formulations.amp.placement import megatron_placement
from hetplan.formulations.amp.problem import Configuration
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.job import Job
from hetplan.formulations.astra.search.plot import summary
from hetplan.formulations.astra.search.pool import (
    Pool,
    heterogeneous,
    homogeneous,
    offers_of_cluster,
)
from hetplan.formulations.astra.search.pricing import Assumptions
from hetplan.formulations.astra.search.result import Candidate as Found
from hetplan.formulations.astra.search.space import Space
from hetplan.planner.amp import inner_run, plan_workload
from hetplan.planner.candidate import Candidate
from hetplan.planner.known import compute_unless_known
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, PlanDevice, Recomputation, Replica, Stage
from hetplan.solvers.run import Run
from hetplan.text import Table, bytes_text


def propose(workload: Workload, run: Run) -> list[Candidate]:
    """One candidate for the whole cluster, and on a mixed cluster one for each type alone."""
    offers = offers_of_cluster(workload.cluster)
    total = sum(offer.most for offer in offers)
    pools: list[tuple[str, Pool]]
    if len(offers) == 1:
        pools = [("homogeneous", homogeneous(offers[0]))]
    else:
        pools = [("heterogeneous", heterogeneous(total, offers))]
        pools += [(f"only-{offer.name}", homogeneous(offer)) for offer in offers]
    candidates = []
    for method, pool in pools:
        if run.cancelled:
            candidates.append(nothing(method, "unknown", "not begun: stopped from the keyboard"))
        else:
            candidates.append(one(workload, method, pool, inner_run(run, f"astra/{method}")))
    return candidates


def nothing(method: str, status: str, reason: str, seconds: float = 0.0) -> Candidate:
    """A candidate without a plan."""
    return Candidate(
        strategy="astra", method=method, status=status, message=reason, solve_seconds=seconds
    )


def one(workload: Workload, method: str, pool: Pool, run: Run) -> Candidate:
    """The best of one pool as a candidate."""
    begun = time.perf_counter()
    given = Assumptions(reserved_bytes=workload.reserved_bytes, profile=workload.profile)
    job = Job(workload.model, workload.global_batch)
    try:
        space = plannable(workload, pool)
        found = compute_unless_known(
            f"astra/{method}",
            (job, pool, space, workload.reserved_bytes, times_of(workload, pool)),
            lambda result: result.proven,
            lambda: search(job, pool, space=space, given=given, run=run, top=1),
        )
    except UnsupportedError as error:
        return nothing(method, "unknown", str(error), time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    if found.best is None:
        return nothing(method, "infeasible" if found.proven else "unknown", found.reason, seconds)
    best = found.best
    return Candidate(
        strategy="astra",
        method=method,
        status="optimal" if found.proven else "feasible",
        predicted_seconds=best.seconds,
        objective=best.seconds,
        bound=best.seconds if found.proven else None,
        fits_memory=True,
        peak_bytes=device_peaks(workload, best),
        solve_seconds=seconds,
        plan=to_plan(workload, best, f"astra/{method}: {found.proof}"),
        message=found.proof,
        tables=(table(best),),
    )


def times_of(workload: Workload, pool: Pool) -> object:
    """What the profile has of the pool's types."""
    names = {offer.name for offer in pool.offers}
    return workload.profile.layers, [
        table for table in workload.profile.tables if table.device in names
    ]


def plannable(workload: Workload, pool: Pool) -> Space:
    """What a plan can say, for the tensor degrees and micro-batches that the profile has of every
    type."""
    sizes = [
        {
            (t, b)
            for t in range(1, offer.most + 1)
            for b in workload.profile.micro_batches(offer.name, t)
        }
        for offer in pool.offers
    ]
    common = set.intersection(*sizes) or {(1, 1)}
    return Space(
        tensor=tuple(sorted({t for t, _ in common})),
        micro_batch=tuple(sorted({b for _, b in common})),
        expert=(1,),
        sequence_parallel=(False,),
        recompute=(None, "selective", "full"),
        recompute_method=("uniform",),
        recompute_layers=(1,),
        no_overlap_offload=(True,),
        offload=False,
        overlap=False,
    )


def placed(workload: Workload, best: Found) -> list[list[list[int]]]:
    """Devices [stage][data rank][tensor rank]: Megatron's order among the devices of each stage's
    type."""
    tp, dp = (int(best.strategy[f"{k}_parallel_size"] or 1) for k in ("tensor_model", "data"))
    of_type: dict[str, Iterator[Any]] = {}
    for name in best.devices:
        numbers = [d for d, device in enumerate(workload.cluster.devices) if device.type == name]
        whole = len(numbers) // (tp * dp)
        nodes = [workload.cluster.devices[d].node for d in numbers]
        order = megatron_placement(nodes[: whole * tp * dp], Configuration(whole, dp, tp, 1, 1))
        of_type[name] = iter(
            [[[numbers[int(i)] for i in group] for group in stage] for stage in order]
        )
    return [next(of_type[name]) for name, _ in best.stages]


def chunks(best: Found, layers: int) -> list[list[tuple[int, int]]]:
    """Ranges [first, last) of the chain for every stage, one per virtual stage; embedding and head
    at the ends."""
    virtual = int(best.strategy["virtual_pipeline_model_parallel_size"] or 1)
    ranges: list[list[tuple[int, int]]] = [[] for _ in best.stages]
    begin = 0
    for c in range(virtual):
        for j, (_, blocks) in enumerate(best.stages):
            end = begin + blocks // virtual + (begin == 0)
            if c == virtual - 1 and j == len(best.stages) - 1:
                end = layers
            ranges[j].append((begin, end))
            begin = end
    return ranges


def to_plan(workload: Workload, best: Found, source: str) -> Plan:
    """The best strategy as a plan: data rank i is replica i."""
    s, devices = best.strategy, placed(workload, best)
    ranges = chunks(best, len(workload.profile.layers))
    batches = [
        MicroBatches(
            count=int(s["num_micro_batches"] or 1), samples=int(s["micro_batch_size"] or 1)
        )
    ]
    tp = int(s["tensor_model_parallel_size"] or 1)
    recomputation: Recomputation = "none"
    if s["recompute_granularity"] is not None:
        recomputation = "full" if s["recompute_granularity"] == "full" else "selective"
    replicas = [
        Replica(
            stages=[
                Stage(layers=ranges[j], devices=[devices[j][i]], tensor_shares=[1.0] * tp)
                for j in range(len(ranges))
            ],
            micro_batches=batches,
        )
        for i in range(int(s["data_parallel_size"] or 1))
    ]
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        origin=source,
        workload=plan_workload(workload),
        devices=[
            PlanDevice(type=device.type, node=device.node) for device in workload.cluster.devices
        ],
        schedule="interleaved-1f1b" if len(ranges[0]) > 1 else "1f1b",
        zero=1 if s["use_distributed_optimizer"] else 0,
        recomputation=recomputation,
        replicas=replicas,
    )


def device_peaks(workload: Workload, best: Found) -> tuple[float, ...]:
    """[D] predicted bytes of each device beyond what it reserves; one that the plan leaves out
    holds nothing.

    The search counts the reserve as used; the planner takes it off what a device has.
    """
    peaks = [0.0] * len(workload.cluster.devices)
    for stage, size in zip(placed(workload, best), best.stage_bytes, strict=True):
        for group in stage:
            for device in group:
                peaks[device] = size - workload.reserved_bytes
    return tuple(peaks)


def table(best: Found) -> Table:
    """The stages for people."""
    rows = tuple(
        (str(j), name, str(layers), bytes_text(size))
        for j, ((name, layers), size) in enumerate(zip(best.stages, best.stage_bytes, strict=True))
    )
    return Table(
        summary(best),
        ("stage", "type", "blocks", "memory and reserve per device"),
        rows,
        right=(0, 2, 3),
    )
