"""The strategy `astra`: the whole strategy search on the workload's cluster, proven over the space
it enumerates.

Only what a plan file can say is searched: 1F1B with or without interleaving, the distributed
optimizer (ZeRO 1), recomputation of nothing, the attention core or everything; no sequence
parallelism, offloading or overlap. On several types the stages become segments (mode 2, every
device used); beside it stands the best on one type alone.
"""

import time
from dataclasses import dataclass, replace

from hetplan.errors import UnsupportedError
from hetplan.formulations.amp.problem import Configuration, megatron_placement
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.links import Assumptions
from hetplan.formulations.astra.search.result import (
    Candidate as AstraCandidate,
    Job,
    summary,
)
from hetplan.formulations.astra.search.space import (
    Pool,
    Space,
    heterogeneous,
    homogeneous,
    measured_sizes,
    offers_of_cluster,
)
from hetplan.formulations.joint.plan import MicroBatches, Plan, Prediction, Replica, new_plan
from hetplan.planner.strategy import (
    Candidate,
    NoPlan,
    Problem,
    Strategy,
    StrategyMethod,
    tensor_stage,
)
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import Run


class Astra(Strategy):
    """One search over the whole cluster, and on a mixed cluster one over each type alone."""

    name = "astra"
    methods = (StrategyMethod("search", exact=True),)

    def pose(self, workload: Workload, run: Run) -> "list[PoolProblem]":
        """A search per pool of devices."""
        offers = offers_of_cluster(workload.cluster)
        if len(offers) == 1:
            return [PoolProblem(workload, "homogeneous", homogeneous(offers[0]))]
        whole = heterogeneous(sum(offer.most for offer in offers), offers)
        return [
            PoolProblem(workload, "heterogeneous", whole),
            *(PoolProblem(workload, f"only-{o.name}", homogeneous(o)) for o in offers),
        ]


@dataclass(frozen=True)
class PoolProblem(Problem):
    """Astra's search over one pool of devices. name: of the pool; its candidates bear it."""

    workload: Workload
    name: str
    pool: Pool

    def renamed(self, method: StrategyMethod) -> StrategyMethod:
        """Candidates bear the pool's name."""
        return replace(method, name=self.name)

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The best of the pool."""
        begun = time.perf_counter()
        nominal, usable = self.workload.cluster.specs, self.workload.device_bytes()
        reserve = max(nominal[kind].memory_bytes - usable[kind] for kind in usable)
        job, space = Job(self.workload.model, self.workload.global_batch), self.plannable()
        assumptions = Assumptions(
            reserved_bytes=reserve, profile=self.workload.profile, links=self.workload.links
        )
        result = search(job, self.pool, space=space, assumed=assumptions, run=run, top=1)
        seconds, best = time.perf_counter() - begun, result.best
        if best is None:
            raise NoPlan("infeasible" if result.proven else "unknown", result.reason, seconds)
        peaks = [0.0] * len(self.workload.cluster.devices)  # the planner takes the reserve off
        for stage, size in zip(self.placed(best), best.stage_bytes, strict=True):
            for device in (device for group in stage for device in group):
                peaks[device] = size - reserve
        return Candidate(
            strategy="astra",
            method=method,
            status="optimal" if result.proven else "feasible",
            closed_form_seconds=best.seconds,
            objective=best.seconds,
            bound=best.seconds if result.proven else None,
            fits_memory=True,
            peak_bytes=tuple(peaks),
            solve_seconds=seconds,
            plan=self.to_plan(best),
            message=result.proof,
        )

    def plannable(self) -> Space:
        """What a plan can say, for the tensor degrees and micro-batches that the profile has of
        every type."""
        types = [offer.name for offer in self.pool.offers]
        return Space(
            **measured_sizes(self.workload.profile, types),
            expert=(1,),
            sequence_parallel=(False,),
            recompute=(None, "selective", "full"),
            recompute_method=("uniform",),
            recompute_layers=(1,),
            no_overlap_offload=(True,),
            offload=False,
            overlap=False,
        )

    def placed(self, best: AstraCandidate) -> list[list[list[int]]]:
        """Devices [stage][data rank][tensor rank]: Megatron's order among the devices of each
        stage's type."""
        tp, dp = degree(best, "tensor_model_parallel_size"), degree(best, "data_parallel_size")
        devices, of_type = self.workload.cluster.devices, {}
        for name in best.devices:
            numbers = [d for d, device in enumerate(devices) if device.type == name]
            whole = len(numbers) // (tp * dp)
            nodes = [devices[d].node for d in numbers[: whole * tp * dp]]
            order = megatron_placement(nodes, Configuration(whole, dp, tp, 1, 1))
            of_type[name] = iter([[[numbers[int(i)] for i in g] for g in s] for s in order])
        return [next(of_type[name]) for name, _ in best.stages]

    def to_plan(self, best: AstraCandidate) -> Plan:
        """The best strategy as a plan: data rank i is replica i."""
        devices, ranges = self.placed(best), chunks(best, len(self.workload.profile.layers))
        batches = MicroBatches(
            count=degree(best, "num_micro_batches"), samples=degree(best, "micro_batch_size")
        )
        replicas = [
            Replica(
                stages=[tensor_stage(r, d[i]) for r, d in zip(ranges, devices, strict=True)],
                micro_batches=[batches],
            )
            for i in range(degree(best, "data_parallel_size"))
        ]
        repeated = best.strategy["recompute_granularity"]
        return new_plan(
            self.workload,
            replicas,
            schedule="interleaved-1f1b" if len(ranges[0]) > 1 else "1f1b",
            zero=1 if best.strategy["use_distributed_optimizer"] else 0,
            recomputation="none" if repeated is None else repeated,
        )


def plan_of(best: AstraCandidate, workload: Workload, pool: Pool) -> Plan:
    """The strategy as a plan file with its price; raises UnsupportedError for options that the file
    cannot say, with what leaves them out of the search."""
    missing = unsayable(best)
    if missing:
        raise UnsupportedError(
            f"a plan file cannot say {', '.join(missing)}",
            where=summary(best),
            expected=" ".join(f"--param {param}" for param in dict.fromkeys(missing.values())),
        )
    price = Prediction(strategy="astra", method="search", closed_form_seconds=best.seconds)
    plan = PoolProblem(workload, pool.mode, pool).to_plan(best)
    origin = f"hetplan plan search: {summary(best)}"
    return plan.model_copy(update={"prediction": price, "origin": origin})


def unsayable(best: AstraCandidate) -> dict[str, str]:
    """Options in use that a plan file has no word for, with the search's parameter without them."""
    s, tp = best.strategy, degree(best, "tensor_model_parallel_size")
    dp, off = degree(best, "data_parallel_size"), "overlap=false"
    simple = s["recompute_num_layers"] in (None, 1) and s["recompute_method"] != "block"
    unlike = len(set(best.stages)) > 1 and s["virtual_pipeline_model_parallel_size"] is not None
    whole = "recompute=none,selective,full --param recompute_method=uniform"
    used = {
        ("sequence parallelism", "sequence_parallel=false"): s["sequence_parallel"] and tp > 1,
        ("overlapped tensor-parallel collectives", off): s["tp_comm_overlap"] and tp > 1,
        ("overlapped reduction of gradients", off): s["overlap_grad_reduce"] and dp > 1,
        ("overlapped gathering of weights", off): s["overlap_param_gather"] and dp > 1,
        ("overlapped messages between stages", off): s["overlap_p2p_communication"],
        ("offloaded optimizer states", "offload=false"): best.offloaded > 0,
        ("recomputation of some layers", f"{whole} --param recompute_layers=1"): not simple,
        ("expert parallelism", "expert=1"): s["expert_model_parallel_size"] != 1,
        ("context parallelism", "context=1"): s["context_parallel_size"] != 1,
        ("whole experts", "whole_experts=false"): s["expert_tensor_parallel_size"] != tp,
        ("fully sharded stages", "fsdp=false"): s["use_fsdp"],
        ("virtual stages of unlike sizes", "uneven=false"): unlike,
    }
    return {name: param for (name, param), holds in used.items() if holds}


def degree(best: AstraCandidate, name: str) -> int:
    """A number of the strategy, 1 where it is left out."""
    return int(best.strategy[name] or 1)


def chunks(best: AstraCandidate, layers: int) -> list[list[tuple[int, int]]]:
    """Ranges [first, last) of the chain for every stage, one per virtual stage; embedding and head
    at the ends."""
    virtual = degree(best, "virtual_pipeline_model_parallel_size")
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
