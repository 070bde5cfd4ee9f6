"""The strategy `astra`: the whole strategy search on the workload's cluster, proven over the space
it enumerates.

Only what a plan file can say is searched: 1F1B with or without interleaving, the distributed
optimizer (ZeRO 1), recomputation of nothing, the attention core or everything; no offloading or
overlap. On several types the stages become segments (mode 2, every device used); beside it stands
the best on one type alone.

`astra/degrees`: context, expert, expert-tensor and sequence parallelism and full shards, too; on
several types where all blocks are alike. Of the best by the formula, which is proven, the one with
the shortest replay is proposed.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.amp.problem import Configuration, megatron_placement
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.pool import Pool, heterogeneous, homogeneous
from hetplan.formulations.astra.search.pricing import (
    BACKWARD,
    EMBEDDING,
    FORWARD,
    HEAD,
    block_seconds,
)
from hetplan.formulations.astra.search.result import (
    Candidate as AstraCandidate,
    Job,
    summary,
)
from hetplan.formulations.astra.search.space import Space, measured_sizes
from hetplan.formulations.astra.search.table import EXCHANGES
from hetplan.formulations.joint.bound import computing_alone
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.strategy import NoPlan, Problem, Strategy
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MicroBatches, Plan, Prediction, Replica, Stage
from hetplan.plans.shares import split
from hetplan.profiling.workload import Workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.replay import replay
from hetplan.runtime.execution.choice import refusal
from hetplan.solvers.run import Options, Run


@dataclass(frozen=True)
class Limits:
    """Limits of the search over context, expert and further degrees; higher ones take more seconds.
    devices, tokens: from so many on, of a model with experts from one on. samples, context: of a
    micro-batch, and context ranks, at most; the bound by computing alone holds up to these.
    replayed: of the best by the formula."""

    devices: int = 32
    tokens: int = 16384
    samples: int = 8
    context: int = 8
    replayed: int = 8


LIMITS = Limits()


class Astra(Strategy):
    """One search over the whole cluster, and on a mixed cluster one over each type alone."""

    name = "astra"
    methods = (StrategyMethod("search", exact=True),)
    slow = True

    def pose(self, workload: Workload, run: Run) -> "list[PoolProblem]":
        """A search per pool of devices."""
        offers = offers_of_cluster(workload.cluster)
        devices, one = sum(offer.most for offer in offers), len(offers) == 1
        whole = homogeneous(offers[0]) if one else heterogeneous(devices, offers)
        return [
            PoolProblem(workload, whole.mode, whole),
            *(PoolProblem(workload, f"only-{o.name}", homogeneous(o)) for o in offers if not one),
            *([PoolProblem(workload, "degrees", whole)] if with_degrees(workload) else []),
        ]


def with_degrees(workload: Workload) -> bool:
    """Whether further degrees are searched, too."""
    shape, cluster = workload.model.spec.shape, workload.cluster
    many = shape is not None and (
        shape.experts
        or len(cluster.devices) >= LIMITS.devices
        or workload.model.tokens_per_sample >= LIMITS.tokens
    )
    return bool(
        many and (len(cluster.types) == 1 or len(model_facts(workload.model).different_blocks) == 1)
    )


@dataclass(frozen=True)
class PoolProblem(Problem):
    """Astra's search over one pool of devices. name: of the pool; its candidates bear it."""

    workload: Workload
    name: str
    pool: Pool

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """Candidates bear the pool's name."""
        return replace(method, name=self.name)

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The best of the pool."""
        begun = time.perf_counter()
        job, space = Job(self.workload.model, self.workload.global_batch), self.plannable()
        assumptions = Assumptions(
            framework=self.workload.framework,
            reserved_bytes=self.workload.reserved_bytes,
            memory_margin=self.workload.memory_margin,
            profile=self.workload.profile,
            links=self.workload.links,
            stack=self.workload.stack,
        )
        top = LIMITS.replayed if self.name == "degrees" else 1
        result = search(job, self.pool, space=space, assumed=assumptions, run=run, top=top)
        best, message = result.best, result.proof
        if best is None:
            raise NoPlan(
                "infeasible" if result.proven else "unknown",
                result.reason,
                time.perf_counter() - begun,
            )
        bound, alone = best.seconds if result.proven else None, None
        if top > 1:
            alone = least_seconds(job, space, self.pool, assumptions)
            best = self.fastest(result.top, run)
            message = joined(
                message, f"of the {len(result.top)} best by the formula, the shortest replay"
            )
        # the planner takes the reserve off
        reserve, peaks = assumptions.reserved, [0.0] * len(self.workload.cluster.devices)
        for stage, size in zip(self.placed(best), best.stage_bytes, strict=True):
            for device in (device for group in stage for device in group):
                peaks[device] = size - reserve
        return Candidate(
            strategy="astra",
            method=method,
            status="optimal" if bound == best.seconds else "feasible",
            closed_form_seconds=best.seconds,
            objective=best.seconds,
            bound=bound,
            computing_alone=alone,
            fits_memory=True,
            peak_bytes=tuple(peaks),
            solve_seconds=time.perf_counter() - begun,
            plan=self.to_plan(best),
            message=message,
        )

    def fastest(self, top: Sequence[AstraCandidate], run: Run) -> AstraCandidate:
        """The strategy with the shortest replay that fits, as far as time allows; the first where
        none does."""
        said = [candidate for candidate in top if not unsaid(candidate)]
        require(said, f"a plan file cannot say {unsaid(top[0])}", kind=UnsupportedError)
        shortest, best = math.inf, said[0]
        for candidate in said:
            replayed = replay(self.to_plan(candidate), self.workload)
            if replayed.fits and replayed.seconds < shortest:
                shortest, best = replayed.seconds, candidate
            if run.should_stop:
                break
        return best

    def plannable(self) -> Space:
        """The space of strategies that a plan can say, with the tensor degrees and micro-batches
        that the profile has of every type."""
        space = Space(
            **measured_sizes(self.workload.profile, [offer.name for offer in self.pool.offers]),
            expert=(1,),
            sequence_parallel=(False,),
            recompute=(None, "selective", "full"),
            recompute_method=("uniform",),
            recompute_layers=(1,),
            no_overlap_offload=(True,),
            offload=False,
            overlap=False,
        )
        if self.name != "degrees":
            return space
        model, most = self.workload.model, sum(offer.most for offer in self.pool.offers)
        mixture = model.spec.shape.experts if model.spec.shape else None
        powers = [2**e for e in range(most.bit_length())]
        return replace(
            space,
            pipeline=divisors(most),
            micro_batch=tuple(b for b in space.micro_batch if b <= LIMITS.samples),
            virtual=(1, 2, 4),
            context=tuple(
                c for c in powers if c <= LIMITS.context and model.tokens_per_sample % c == 0
            ),
            exchange=EXCHANGES,
            expert=divisors(mixture.count if mixture else 1),
            whole_experts=(False, True),
            fsdp=(False, True),
            uneven=True,
            sequence_parallel=(False, True),
            recompute=(None, "full"),
        )

    def placed(self, best: AstraCandidate) -> list[list[list[int]]]:
        """Devices [stage][data and context rank][tensor rank]: Megatron's order among the devices
        of each stage's type."""
        tp, cp = degree(best, "tensor_model_parallel_size"), degree(best, "context_parallel_size")
        dp = cp * degree(best, "data_parallel_size")
        devices, of_type = self.workload.cluster.devices, {}
        for name in best.devices:
            numbers = [d for d, device in enumerate(devices) if device.type == name]
            whole = len(numbers) // (tp * dp)
            nodes = [devices[d].node for d in numbers[: whole * tp * dp]]
            order = megatron_placement(nodes, Configuration(whole, dp, tp, 1, 1))
            of_type[name] = iter([[[numbers[int(i)] for i in g] for g in s] for s in order])
        return [next(of_type[name]) for name, _ in best.stages]

    def to_plan(self, best: AstraCandidate) -> Plan:
        """The best strategy as a plan: data rank i is replica i, context ranks are row groups."""
        context = degree(best, "context_parallel_size")
        devices, ranges = self.placed(best), chunks(best, len(self.workload.profile.layers))
        batches = MicroBatches(
            count=degree(best, "num_micro_batches"), samples=degree(best, "micro_batch_size")
        )
        replicas = []
        for i in range(degree(best, "data_parallel_size")):
            stages = []
            for layers, groups in zip(ranges, devices, strict=True):
                stage = Stage(  # equal context ranks, each of equal tensor ranks
                    layers=list(layers),
                    devices=groups[i * context : (i + 1) * context],
                    row_shares=[1.0] * context,
                    tensor_shares=[1.0] * len(groups[0]),
                )
                stages.append(stage)
            replicas.append(Replica(stages=stages, micro_batches=[batches]))
        repeated, sharded = best.strategy["recompute_granularity"], best.strategy["use_fsdp"]
        return new_plan(
            self.workload,
            replicas,
            schedule="interleaved-1f1b" if len(ranges[0]) > 1 else "1f1b",
            zero=3 if sharded else int(bool(best.strategy["use_distributed_optimizer"])),
            recomputation="none" if repeated is None else repeated,
            degrees=degrees_of(best),
        )


def least_seconds(job: Job, space: Space, pool: Pool, assumed: Assumptions) -> float:
    """Seconds that no strategy of the space takes less than, by computing alone: of embedding,
    blocks and head the best device-seconds of a sample on each type over all degrees and
    micro-batches, where it suits best."""
    facts = model_facts(job.model)
    names = ("tensor", "micro_batch", "sequence_parallel", "context", "expert", "whole_experts")
    grid = np.array(list(product(*[getattr(space, name) for name in names])), dtype=np.int64).T
    work, counts = [], [offer.most for offer in pool.offers]
    possible = (grid[0] > grid[2]) & (grid[0] > grid[5]) & (grid[4] <= sum(counts))
    for offer in pool.offers:
        t, b, sp, c, e, whole = grid[:, possible & (grid[0] * grid[3] <= offer.most)]
        block = block_seconds(facts, offer, (t, b, sp, c, e, np.where(whole, t, 1)), assumed)
        passes = facts.layers * (block[FORWARD] + block[BACKWARD])
        work.append((np.stack([passes, block[EMBEDDING], block[HEAD]]) * t * c / b).min(axis=1))
    return computing_alone(job.global_batch * np.array(work), counts, Options())


def divisors(count: int) -> tuple[int, ...]:
    """The divisors of a number, ascending."""
    return tuple(n for n in range(1, count + 1) if count % n == 0)


def plan_of(best: AstraCandidate, workload: Workload, pool: Pool) -> Plan:
    """The strategy as a plan file with its price, and that of its replay where there is one; raises
    UnsupportedError for what the file cannot say."""
    require(
        not unsaid(best),
        f"a plan file cannot say {unsaid(best)}",
        where=summary(best),
        expected="--param recompute=none,selective,full instead of hybrid recomputation; for "
        "virtual stages without layers --param interleaving=false, or larger ones by virtual",
        kind=UnsupportedError,
    )
    plan = PoolProblem(workload, pool.mode, pool).to_plan(best)
    price = Prediction(
        strategy="astra",
        method="search",
        predicted_seconds=replayed_seconds(plan, workload),
        closed_form_seconds=best.seconds,
    )
    more = {"prediction": price, "origin": f"hetplan plan search: {summary(best)}"}
    plan = plan.model_copy(update=more)
    return plan.model_copy(update={"refused": refusal(plan, workload.model)})


def unsaid(best: AstraCandidate) -> str:
    """The feature of the strategy that a plan file has no words for; empty: there is none."""
    if best.strategy["recompute_granularity"] == "hybrid":
        return "hybrid recomputation"
    parts = len(best.stages) * degree(best, "virtual_pipeline_model_parallel_size")
    return "virtual stages without layers" if parts > sum(n for _, n in best.stages) else ""


def replayed_seconds(plan: Plan, workload: Workload) -> float | None:
    """Replayed seconds of an iteration; None for what the replay does not have."""
    with suppress(UnsupportedError):
        return replay(plan, workload).seconds
    return None


# Megatron's flags of communication beside computation, as `Degrees.overlap` has them.
OVERLAP = {
    "tensor": "tp_comm_overlap",
    "gradients": "overlap_grad_reduce",
    "weights": "overlap_param_gather",
    "messages": "overlap_p2p_communication",
}


def degrees_of(best: AstraCandidate) -> Degrees | None:
    """The strategy's degrees beside stages, tensor ranks and replicas; None for none. Pipelines
    of full shards always have degrees, without which their plan would be replayed as ZeRO 1."""
    s, tp = best.strategy, degree(best, "tensor_model_parallel_size")
    useful = {"tensor": tp > 1, "gradients": True, "weights": True, "messages": True}
    overlap = [name for name, flag in OVERLAP.items() if s[flag] and useful[name]]
    if best.offloaded and not s["no_overlap_offload_optimizer"]:
        overlap.append("offload")
    some = s["recompute_num_layers"] not in (None, 1) or s["recompute_method"] == "block"
    degrees = Degrees.model_validate(
        {
            "context": s["context_parallel_size"],
            "exchange": "all-to-all" if s["cp_comm_type"] == "a2a" else "ring",
            "expert": s["expert_model_parallel_size"],
            "expert_tensor": s["expert_tensor_parallel_size"],
            "sequence_parallel": bool(s["sequence_parallel"]) and tp > 1,
            "overlap": overlap,
            "recompute_method": s["recompute_method"] if some else None,
            "recompute_layers": s["recompute_num_layers"] if some else None,
            "offloaded": best.offloaded,
            "shard_groups": s["num_distributed_optimizer_instances"],
        }
    )
    fully_sharded = s["use_fsdp"] and degree(best, "pipeline_model_parallel_size") > 1
    return None if degrees == Degrees(expert_tensor=tp) and not fully_sharded else degrees


def degree(best: AstraCandidate, name: str) -> int:
    """A number of the strategy, 1 where it is left out."""
    return int(best.strategy[name] or 1)


def chunks(best: AstraCandidate, layers: int) -> list[list[tuple[int, int]]]:
    """Ranges [first, last) of the chain for every stage, one per virtual stage; embedding and head
    at the ends. Virtual stages that cannot be equal differ by one block, the larger ones first."""
    virtual, count = degree(best, "virtual_pipeline_model_parallel_size"), len(best.stages)
    sizes = [blocks // virtual for _ in range(virtual) for _, blocks in best.stages]
    if sum(sizes) < layers - 2:
        sizes = [last - first for first, last in split(layers - 2, [1.0] * (virtual * count))]
    ranges = list(pairwise([0, *[end + 1 for end in accumulate(sizes)][:-1], layers]))
    return [ranges[stage::count] for stage in range(count)]
