"""The search over all degrees against an enumeration that states Megatron-LM's constraints itself,
in plain loops: same strategies, same fastest one; also where memory binds, and where nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.memory import stage_bytes
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.pricing import (
    EMBEDDING,
    HEAD,
    Priced,
    after_pipeline,
)
from hetplan.formulations.astra.search.result import Job, SearchResult
from hetplan.formulations.astra.search.space import Space
from hetplan.formulations.astra.search.table import GRANULARITIES, METHODS, NONE, Strategies
from hetplan.profiling.hardware.cluster import GIB
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, model_facts
from hetplan.replays.offers import Offer, offer_of
from hetplan.replays.overlap import uncovered

BATCH = 16
SPACE = Space(
    micro_batch=(1, 2),
    context=(1, 2),
    whole_experts=(False, True),
    exchange=("p2p", "a2a"),
    fsdp=(False, True),
    shard_groups=(1, 2),
    recompute=(None, "full", "hybrid"),
)
Row = dict[str, int]


def model(experts: Experts | None = None) -> Model:
    """Four blocks, of which a stage may hold 1, 2 or 4."""
    shape = llama(4, 1024, 8, 2048, kv_heads=4, experts=experts)
    return load_model(text_model("tiny", "test", 1024, shape), precision="bf16")


MODELS = {"dense": model(), "experts": model(Experts(count=4, active=2))}


def degrees(facts: ModelFacts, gpus: int, space: Space) -> Iterator[Row]:
    """tp, cp, ep, pp, dp, micro-batch and shards that divide what they have to."""
    N, experts = facts.layers, facts.shape.experts
    held = experts.count if experts else 1
    ranges = (range(1, gpus + 1), range(1, 9), range(1, held + 1))
    for p, t, e, b, c in product(*ranges, space.micro_batch, space.context):
        if gpus % (p * t * c) or N % p or facts.shape.kv_heads % t or held % e:
            continue
        d = gpus // (p * t * c)
        if BATCH % (b * d):
            continue
        for apart, fsdp, groups, word in product(
            space.whole_experts, space.fsdp, space.shard_groups, space.exchange
        ):
            own = 1 if apart else t
            if (apart and (experts is None or t == 1)) or t * c * d % (own * e):
                continue
            same = t * c * d // (own * e)  # ranks with the same experts
            if groups > 1 and (not fsdp or c * d % groups or c * d == groups or same % groups):
                continue
            if word == "a2a" and (c == 1 or facts.shape.kv_heads % (t * c)):
                continue
            yield {
                "num_gpus": gpus,
                "pipeline_model_parallel_size": p,
                "tensor_model_parallel_size": t,
                "expert_model_parallel_size": e,
                "data_parallel_size": d,
                "micro_batch_size": b,
                "num_micro_batches": BATCH // (b * d),
                "context_parallel_size": c,
                "expert_tensor_parallel_size": own,
                "use_fsdp": fsdp,
                "num_distributed_optimizer_instances": groups,
                "cp_comm_type": int(word == "a2a"),
                "num_layers_per_stage": N // p,
                "gpu_type": 0,
                "overlap_grad_reduce": 1,
            }


def recomputations(space: Space, most: int) -> Iterator[tuple[int, int, int]]:
    """None; in full, by blocks or groups of layers; hybrid, by blocks."""
    for word in space.recompute:
        code = NONE if word is None else GRANULARITIES.index(word)
        methods = {"full": METHODS, "hybrid": ("block",)}.get(word or "", ())
        if word is None:
            yield NONE, NONE, NONE
        for method, layers in product(methods, range(1, most + 1)):
            yield code, METHODS.index(method), layers


def options(base: Row, mixture: bool, space: Space) -> Iterator[Row]:
    """vp, sequence parallelism, ZeRO 1, recomputation, offloading of one base."""
    p, each = base["pipeline_model_parallel_size"], base["num_layers_per_stage"]
    wide = base["tensor_model_parallel_size"] > 1
    for v in (NONE, *range(1, p + 1)):
        if v != NONE and (p == 1 or each % v or each // v < 2 or base["num_micro_batches"] % p):
            continue
        for sp, zero, blocking in product((0, 1), (0, 1), (0, 1)):
            if (sp and not wide) or (mixture and wide and not sp):
                continue
            for granularity, method, layers in recomputations(space, min(each, p)):
                if layers > v != NONE:
                    continue
                yield base | {
                    "num_layers_per_virtual_pipeline_stage": v,
                    "virtual_pipeline_model_parallel_size": NONE if v == NONE else each // v,
                    "overlap_p2p_communication": int(v != NONE),
                    "sequence_parallel": sp,
                    "tp_comm_overlap": sp,
                    "use_distributed_optimizer": zero,
                    "overlap_param_gather": zero,
                    "no_overlap_offload_optimizer": blocking,
                    "recompute_granularity": granularity,
                    "recompute_method": method,
                    "recompute_num_layers": layers,
                }


def enumerated(facts: ModelFacts, gpus: int, space: Space) -> Strategies:
    """All of them as a table."""
    mixture = facts.shape.experts is not None
    rows = [row for base in degrees(facts, gpus, space) for row in options(base, mixture, space)]
    assert len({tuple(sorted(row.items())) for row in rows}) == len(rows)
    columns = {name: np.array([row[name] for row in rows], dtype=np.int64) for name in rows[0]}
    return Strategies(columns, len(rows))


def share_needed(priced: Priced) -> Any:
    """[R] the share of optimizer states that must leave so that every one of the stages fits."""
    P, worst = priced.pp, np.full(priced.table.rows, -np.inf)
    for place in range(int(P.max())):
        first, last = np.full(len(P), float(place == 0)), 1.0 * np.equal(place, P - 1)
        held, states = stage_bytes(
            priced, priced.facts.layers // P, np.minimum(place, P - 1), first, last
        )
        lacks = (held - priced.offer.spec.memory_bytes) / states
        worst = np.where(place < P, np.maximum(worst, lacks), worst)
    return np.maximum(worst, 0.0)


def seconds(priced: Priced, share: Any) -> Any:
    """[R] of the schedule, stage by stage, and what follows it."""
    P, layers = priced.pp, priced.facts.layers // priced.pp
    work = priced.layers_seconds(layers)
    window = np.where(priced.interleaved, work / priced.v, 0.0)
    base = work + priced.v * uncovered(priced.crossing_seconds, window)
    total, slowest = np.zeros(len(P)), np.zeros(len(P))
    for place in range(int(P.max())):
        stage = base + (place == 0) * priced.blocks[EMBEDDING]
        stage = stage + (place == P - 1) * priced.blocks[HEAD]
        total = total + np.where(place < P, stage, 0.0)
        slowest = np.maximum(slowest, np.where(place < P, stage, 0.0))
    embedding, head = priced.end_params
    ends = np.where(P == 1, embedding + head, np.maximum(embedding, head))
    pipeline = (total - slowest) / priced.v + priced.K * slowest
    return pipeline + sum(after_pipeline(priced, layers, ends, share))


def both(kind: str, gpus: int, offer: Offer, space: Space) -> tuple[SearchResult, Any, Any]:
    """What the search says; of the enumeration what fits, and its seconds."""
    facts = model_facts(MODELS[kind])
    table = enumerated(facts, gpus, space)
    priced = Priced(facts, table, offer, Assumptions())
    share = share_needed(priced)
    fits = share <= float(space.offload)
    result = search(Job(MODELS[kind], BATCH), homogeneous(offer), space=space)
    return result, fits, seconds(priced, np.minimum(share, 1.0))


def offer(gpus: int, node: int = 8, memory: float = 80.0) -> Offer:
    """H100, in nodes of so many, with so many GiB."""
    usual = offer_of("H100-SXM5-80GB", gpus)
    spec = usual.spec.model_copy(update={"memory_gib": memory})
    return replace(usual, node_devices=node, spec=spec)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("gpus", "node", "offload", "share"),
    [(4, 8, False, 1.0), (8, 2, False, 0.5), (8, 8, True, 0.2), (4, 2, False, 0.8)],
)
def test_the_proven_optimum_is_that_of_the_enumeration(
    kind: str, gpus: int, node: int, offload: bool, share: float
) -> None:
    """share: of the strategies that memory has room for without offloading."""
    space = replace(SPACE, offload=offload)
    facts = model_facts(MODELS[kind])
    table = enumerated(facts, gpus, space)
    priced = Priced(facts, table, offer(gpus, node), Assumptions())
    zero = np.zeros(table.rows)
    held = [
        stage_bytes(priced, facts.layers // priced.pp, place, first, last)[0]
        for place, first, last in (
            (zero.astype(np.int64), 1.0, np.equal(priced.pp, 1).astype(float)),
            (priced.pp - 1, np.equal(priced.pp, 1).astype(float), 1.0),
        )
    ]
    memory = float(np.quantile(np.max(held, axis=0), share)) / GIB
    result, fits, each = both(kind, gpus, offer(gpus, node, memory), space)
    assert result.proven and result.best is not None
    assert result.counts["after_rules"] == table.rows > 100
    assert result.counts["priced"] == fits.sum() and bool(fits.all()) == (share == 1.0)
    assert not offload or fits.mean() > share
    assert result.best.seconds == pytest.approx(float(each[fits].min()), rel=1e-9)
    order = np.sort(np.array([1 / speed for speed, _ in result.points]))
    tokens = BATCH * 1024
    assert order * tokens == pytest.approx(np.sort(each[fits]), rel=1e-9)


@pytest.mark.parametrize("kind", MODELS)
def test_where_no_strategy_fits_both_say_so(kind: str) -> None:
    result, fits, _ = both(kind, 8, offer(8, memory=1.0), replace(SPACE, offload=False))
    assert not fits.any() and result.best is None and result.proven
    assert result.reason == f"none of {len(fits)} strategies fits in memory"


def test_where_no_degrees_divide_both_say_so() -> None:
    facts = model_facts(MODELS["dense"])
    space = replace(SPACE, tensor=(3,))
    assert not [row for row in degrees(facts, 3, SPACE) if row["tensor_model_parallel_size"] == 3]
    result = search(Job(MODELS["dense"], BATCH), homogeneous(offer(3)), space=space)
    assert result.best is None and "degrees that do not divide" in result.reason
