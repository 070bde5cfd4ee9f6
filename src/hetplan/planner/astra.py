"""The strategy `astra`: Astra's search on the workload's cluster, with a proof over the space that
it enumerates.

The space has the strategies that a plan file can express: 1F1B with or without interleaving, the
distributed optimizer (ZeRO 1), and recomputation of nothing, of the attention core or of
everything. Offloading and overlap are left out. On several device types the stages form segments,
one for each type (Astra's mode 2, which uses every device). The candidate `only-TYPE` is the best
on the devices of one type.

The candidate `astra/degrees` is of a space that also has context, expert, expert-tensor and
sequence parallelism, and fully sharded weights. On several device types it is searched only if all
blocks of the model are alike. The search proves its best strategies by Astra's formula; the
candidate is the one of them with the shortest replay.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, product

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
from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.strategy import NoPlan, Problem, Strategy
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MicroBatches, Plan, Prediction, Replica, Stage
from hetplan.plans.shares import split
from hetplan.profiling.workload import Workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.replays.model_states import STAGES
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.replay import replay
from hetplan.runtime.execution.choice import refusal
from hetplan.solvers.run import Options, Run


@dataclass(frozen=True)
class Limits:
    """Limits of the search over further degrees. With higher limits it takes more seconds."""

    # The search is done from this number of devices on, from this number of tokens per sample on,
    # and for every model with experts.
    devices: int = 32
    tokens: int = 16384
    # Largest micro-batch and most context ranks. The bound by computing alone holds up to these.
    samples: int = 8
    context: int = 8
    replayed: int = 8  # number of strategies, best by the formula, that are replayed


LIMITS = Limits()
DEGREES = "degrees"  # the name of the problem with further degrees


class Astra(Strategy):
    """Astra's search over the whole cluster and, on several device types, over each type alone."""

    name = "astra"
    methods = (StrategyMethod("search", exact=True),)
    slow = True

    def __init__(self, levels: Sequence[int] = STAGES) -> None:
        self.levels = levels  # ZeRO levels that plans may have

    def within_levels(self, levels: Sequence[int]) -> "Astra":
        """The strategy whose spaces have only plans of these ZeRO levels."""
        return Astra(tuple(levels))

    def pose(self, workload: Workload, run: Run) -> "list[PoolProblem]":
        """One problem for each pool of devices, and one for the space with further degrees. Raises
        NoPlan where no space has an allowed ZeRO level."""
        offers = offers_of_cluster(workload.cluster)  # one for each device type
        devices = sum(offer.most for offer in offers)
        several = len(offers) > 1
        whole = heterogeneous(devices, offers) if several else homogeneous(offers[0])
        pools: list[tuple[str, Pool]] = [(whole.mode, whole)]
        if several:
            pools += [(f"only-{offer.name}", homogeneous(offer)) for offer in offers]
        if with_degrees(workload):
            pools.append((DEGREES, whole))
        problems = [PoolProblem(workload, name, pool, tuple(self.levels)) for name, pool in pools]
        problems = [problem for problem in problems if problem.possible_levels]
        if not problems:
            levels = ", ".join(map(str, self.levels))
            raise NoPlan("infeasible", f"Astra's space has no plans of ZeRO {levels}")
        return problems


def with_degrees(workload: Workload) -> bool:
    """Whether the space with further degrees is searched, too."""
    shape, cluster = workload.model.spec.shape, workload.cluster
    if shape is None:
        return False
    many_devices = len(cluster.devices) >= LIMITS.devices
    many_tokens = workload.model.tokens_per_sample >= LIMITS.tokens
    if not (shape.experts or many_devices or many_tokens):
        return False
    return len(cluster.types) == 1 or len(model_facts(workload.model).different_blocks) == 1


@dataclass(frozen=True)
class PoolProblem(Problem):
    """Astra's search over one pool of devices."""

    workload: Workload
    name: str  # of the pool and its candidates; DEGREES for the space with further degrees
    pool: Pool
    levels: tuple[int, ...] = STAGES  # ZeRO levels that plans may have

    @property
    def has_further_degrees(self) -> bool:
        """Whether the searched space has further degrees."""
        return self.name == DEGREES

    @property
    def possible_levels(self) -> set[int]:
        """The allowed ZeRO levels of the space: replicated or sharded optimizer states (0, 1), and
        with further degrees fully sharded weights (3)."""
        of_space = {0, 1, 3} if self.has_further_degrees else {0, 1}
        return of_space & {*self.levels}

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method under the pool's name."""
        return replace(method, name=self.name)

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The best strategy of the pool as a candidate. Raises NoPlan where there is none."""
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
        top = LIMITS.replayed if self.has_further_degrees else 1
        result = search(job, self.pool, space=space, assumed=assumptions, run=run, top=top)
        best, message = result.best, result.proof
        if best is None:
            raise NoPlan(
                "infeasible" if result.proven else "unknown",
                result.reason,
                time.perf_counter() - begun,
            )
        bound = best.seconds if result.proven else None
        least_by_computing = None
        if self.has_further_degrees:
            least_by_computing = least_seconds(job, space, self.pool, assumptions)
            best = self.fastest(result.top, run)
            message = joined(
                message, f"of the {len(result.top)} best by the formula, the shortest replay"
            )
        peaks = [0.0] * len(self.workload.cluster.devices)
        for stage, size in zip(self.placed(best), best.stage_bytes, strict=True):
            for device in chain.from_iterable(stage):
                # the planner's limits do not include the reserved bytes
                peaks[device] = size - assumptions.reserved
        return Candidate(
            strategy="astra",
            method=method,
            status="optimal" if bound == best.seconds else "feasible",
            closed_form_seconds=best.seconds,
            objective=best.seconds,
            bound=bound,
            computing_alone=least_by_computing,
            fits_memory=True,
            peak_bytes=tuple(peaks),
            solve_seconds=time.perf_counter() - begun,
            plan=self.to_plan(best),
            message=message,
        )

    def fastest(self, top: Sequence[AstraCandidate], run: Run) -> AstraCandidate:
        """The strategy with the shortest replay that fits, among those that are replayed before the
        time is over; the first strategy if none fits. Strategies that a plan file cannot express
        are left out. Raises UnsupportedError where it can express none."""
        expressible = [candidate for candidate in top if not inexpressible(candidate)]
        require(
            expressible, f"a plan file cannot say {inexpressible(top[0])}", kind=UnsupportedError
        )
        shortest, best = math.inf, expressible[0]
        for candidate in expressible:
            replayed = replay(self.to_plan(candidate), self.workload)
            if replayed.fits and replayed.seconds < shortest:
                shortest, best = replayed.seconds, candidate
            if run.should_stop:
                break
        return best

    def plannable(self) -> Space:
        """The space of the strategies that a plan file can express, with the tensor degrees and
        micro-batches for which the profile has tables of every device type."""
        levels = self.possible_levels
        plain = levels & {0, 1} or {0}  # under level 3 it does not matter whether it is 0 or 1
        space = Space(
            **measured_sizes(self.workload.profile, [offer.name for offer in self.pool.offers]),
            expert=(1,),
            sequence_parallel=(False,),
            distributed_optimizer=tuple(sorted({level == 1 for level in plain})),
            recompute=(None, "selective", "full"),
            recompute_method=("uniform",),
            recompute_layers=(1,),
            no_overlap_offload=(True,),
            offload=False,
            overlap=False,
        )
        if not self.has_further_degrees:
            return space
        model, devices = self.workload.model, sum(offer.most for offer in self.pool.offers)
        mixture = model.spec.shape.experts if model.spec.shape else None
        powers = [2**e for e in range(devices.bit_length())]
        contexts = [c for c in powers if c <= LIMITS.context and model.tokens_per_sample % c == 0]
        return replace(
            space,
            pipeline=divisors(devices),
            micro_batch=tuple(b for b in space.micro_batch if b <= LIMITS.samples),
            virtual=(1, 2, 4),
            context=tuple(contexts),
            exchange=EXCHANGES,
            expert=divisors(mixture.count if mixture else 1),
            whole_experts=(False, True),
            fsdp=tuple(sorted({level == 3 for level in levels})),
            uneven=True,
            sequence_parallel=(False, True),
            recompute=(None, "full"),
        )

    def placed(self, best: AstraCandidate) -> list[list[list[int]]]:
        """Devices [stage][data and context rank][tensor rank]. The devices of each type are in
        Megatron's order, and the stages take their groups one after the other."""
        tp, cp = degree(best, "tensor_model_parallel_size"), degree(best, "context_parallel_size")
        dp = cp * degree(best, "data_parallel_size")
        devices = self.workload.cluster.devices
        stages_of_type: dict[str, Iterator[list[list[int]]]] = {}
        for name in best.devices:
            numbers = [d for d, device in enumerate(devices) if device.type == name]
            # The order of all stages for which the type has devices. The strategy's stages are the
            # first of them, because Megatron numbers ranks stage by stage.
            stages = len(numbers) // (tp * dp)
            nodes = [devices[d].node for d in numbers[: stages * tp * dp]]
            order = megatron_placement(nodes, Configuration(stages, dp, tp, 1, 1))
            # `order` has indices into `numbers`
            placed = [[[numbers[int(i)] for i in group] for group in stage] for stage in order]
            stages_of_type[name] = iter(placed)
        return [next(stages_of_type[name]) for name, _ in best.stages]

    def to_plan(self, best: AstraCandidate) -> Plan:
        """The plan of a strategy: data rank i is replica i, and context ranks are row groups."""
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
        zero = int(bool(best.strategy["use_distributed_optimizer"]))
        if best.strategy["use_fsdp"]:
            zero = 3
        recomputed = best.strategy["recompute_granularity"]
        return new_plan(
            self.workload,
            replicas,
            schedule="interleaved-1f1b" if len(ranges[0]) > 1 else "1f1b",
            zero=zero,
            recomputation="none" if recomputed is None else recomputed,
            degrees=degrees_of(best),
        )


def least_seconds(job: Job, space: Space, pool: Pool, assumed: Assumptions) -> float:
    """A lower bound on the seconds per iteration of every strategy of the space, by computing
    alone.

    Embedding, blocks and head take on each device type at least their least device-seconds per
    sample over all degrees and micro-batches. The bound divides the samples of this work over the
    devices as is best (`computing_alone`). grid: [name of a degree][combination of degrees].
    """
    facts = model_facts(job.model)
    names = ("tensor", "micro_batch", "sequence_parallel", "context", "expert", "whole_experts")
    combinations = list(product(*[getattr(space, name) for name in names]))
    grid = np.array(combinations, dtype=np.int64).T
    tensor, _, sequence_parallel, context, expert, whole_experts = grid
    counts = [offer.most for offer in pool.offers]
    # sequence parallelism and whole experts on each tensor rank need several tensor ranks
    needs_several = (sequence_parallel == 1) | (whole_experts == 1)
    possible = (~needs_several | (tensor > 1)) & (expert <= sum(counts))
    work = []  # [type][part of the model] device-seconds per sample
    for offer in pool.offers:
        t, b, sp, c, e, whole = grid[:, possible & (tensor * context <= offer.most)]
        # `Cut.whole`: tensor ranks with the same columns of experts
        same_columns = np.where(whole, t, 1)
        block = block_seconds(facts, offer, (t, b, sp, c, e, same_columns), assumed)
        passes = facts.layers * (block[FORWARD] + block[BACKWARD])
        work.append((np.stack([passes, block[EMBEDDING], block[HEAD]]) * t * c / b).min(axis=1))
    return computing_alone(job.global_batch * np.array(work), counts, Options())


def divisors(count: int) -> tuple[int, ...]:
    """The divisors of a number, ascending."""
    return tuple(n for n in range(1, count + 1) if count % n == 0)


def plan_of(best: AstraCandidate, workload: Workload, pool: Pool) -> Plan:
    """The plan file of a strategy that `hetplan plan search` found, with its seconds by the formula
    and, where it can be replayed, by its replay. Raises UnsupportedError for a strategy that a plan
    file cannot express."""
    require(
        not inexpressible(best),
        f"a plan file cannot say {inexpressible(best)}",
        where=summary(best),
        expected="--param recompute=none,selective,full instead of hybrid recomputation; "
        "--param interleaving=false, or more layers in --param virtual=LAYERS, instead of virtual "
        "stages without layers",
        kind=UnsupportedError,
    )
    plan = PoolProblem(workload, pool.mode, pool).to_plan(best)
    prediction = Prediction(
        strategy="astra",
        method="search",
        predicted_seconds=replayed_seconds(plan, workload),
        closed_form_seconds=best.seconds,
    )
    origin = f"hetplan plan search: {summary(best)}"
    plan = plan.model_copy(update={"prediction": prediction, "origin": origin})
    return plan.model_copy(update={"refused": refusal(plan, workload.model)})


def inexpressible(best: AstraCandidate) -> str:
    """The feature of a strategy that a plan file cannot express; empty if it can express all."""
    if best.strategy["recompute_granularity"] == "hybrid":
        return "hybrid recomputation"
    virtual_stages = len(best.stages) * degree(best, "virtual_pipeline_model_parallel_size")
    blocks = sum(count for _, count in best.stages)
    return "virtual stages without layers" if virtual_stages > blocks else ""


def replayed_seconds(plan: Plan, workload: Workload) -> float | None:
    """Replayed seconds of an iteration; None for a plan that the replay does not support."""
    with suppress(UnsupportedError):
        return replay(plan, workload).seconds
    return None


# Entry of `Degrees.overlap` -> Megatron's flag for that communication beside computation.
OVERLAP = {
    "tensor": "tp_comm_overlap",
    "gradients": "overlap_grad_reduce",
    "weights": "overlap_param_gather",
    "messages": "overlap_p2p_communication",
}


def degrees_of(best: AstraCandidate) -> Degrees | None:
    """The further degrees of a strategy; None if all of them are defaults. A pipeline with fully
    sharded weights always has degrees: without them its plan would be replayed as ZeRO 1."""
    s, tp = best.strategy, degree(best, "tensor_model_parallel_size")
    overlap = [name for name, flag in OVERLAP.items() if s[flag]]
    if tp == 1 and "tensor" in overlap:
        overlap.remove("tensor")
    if best.offloaded and not s["no_overlap_offload_optimizer"]:
        overlap.append("offload")
    some_layers = s["recompute_num_layers"] not in (None, 1) or s["recompute_method"] == "block"
    degrees = Degrees.model_validate(
        {
            "context": s["context_parallel_size"],
            "exchange": "all-to-all" if s["cp_comm_type"] == "a2a" else "ring",
            "expert": s["expert_model_parallel_size"],
            "expert_tensor": s["expert_tensor_parallel_size"],
            "sequence_parallel": bool(s["sequence_parallel"]) and tp > 1,
            "overlap": overlap,
            "recompute_method": s["recompute_method"] if some_layers else None,
            "recompute_layers": s["recompute_num_layers"] if some_layers else None,
            "offloaded": best.offloaded,
            "shard_groups": s["num_distributed_optimizer_instances"],
        }
    )
    sharded_pipeline = s["use_fsdp"] and degree(best, "pipeline_model_parallel_size") > 1
    only_defaults = degrees == Degrees(expert_tensor=tp)
    return None if only_defaults and not sharded_pipeline else degrees


def degree(best: AstraCandidate, name: str) -> int:
    """The number `name` of a strategy; 1 where it is None."""
    return int(best.strategy[name] or 1)


def chunks(best: AstraCandidate, layers: int) -> list[list[tuple[int, int]]]:
    """[stage][virtual stage] the layers [first, last). The first layer is the embedding, and the
    last one the head. The blocks of each stage are divided evenly over its virtual stages. Where
    that is impossible, all blocks are divided over all virtual stages, whose sizes then differ by
    at most one, the larger ones first."""
    virtual, count = degree(best, "virtual_pipeline_model_parallel_size"), len(best.stages)
    all_blocks = layers - 2
    sizes = [blocks // virtual for _ in range(virtual) for _, blocks in best.stages]
    if sum(sizes) < all_blocks:
        sizes = [last - first for first, last in split(all_blocks, [1.0] * (virtual * count))]
    inner_ends = [1 + end for end in accumulate(sizes[:-1])]  # 1: the embedding
    ranges = list(pairwise([0, *inner_ends, layers]))
    # virtual stages are numbered chunk by chunk, and stage by stage within a chunk
    return [ranges[stage::count] for stage in range(count)]
