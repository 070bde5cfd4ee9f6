"""Degrees beyond the paper: what context and expert parallelism leave to a rank, their prices by
hand, and the search over all of them against enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from hetplan.formulations.astra.search.engine import columns_of, search
from hetplan.formulations.astra.search.memory import offload_share
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.pricing import Priced, iteration_parts
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.astra.search.rules import default_rules
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import Layer, Matmul
from hetplan.profiling.models.transformer import Cut, Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.rates.collectives import collective_seconds, node_fabric
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, model_facts
from hetplan.replays.groups import group_seconds
from hetplan.replays.offers import Offer, offer_of


def mixture(layers: int = 8, sequence: int = 2048) -> Model:
    """A small Mixtral."""
    shape = llama(layers, 1024, 16, 4096, kv_heads=8, experts=Experts(count=8, active=2))
    return load_model(text_model("mixture", "test", sequence, shape), precision="bf16")


FACTS = model_facts(mixture())
OFFER = offer_of("H100-SXM5-80GB", 16)


def flops(layer: Layer, tensor: int = 1) -> float:
    """Of the products of one rank."""
    return sum(op.shape(1, tensor).flops for op in layer.operators if isinstance(op, Matmul))


def expert_elements(facts: ModelFacts, tensor: int = 1) -> float:
    shapes = [
        op.shape(1, tensor)
        for op in facts.blocks[0].operators
        if isinstance(op, Matmul) and op.name.startswith("experts")
    ]
    return sum(shape.count * shape.k * shape.n for shape in shapes)


def test_context_ranks_share_tokens_and_keep_all_keys() -> None:
    for layer, part in zip(FACTS.model.layers, whole_chain(Cut(context=4)), strict=True):
        assert 4 * flops(part) == pytest.approx(flops(layer))
        assert 4 * part.saved_bytes("bf16") == pytest.approx(layer.saved_bytes("bf16"), rel=1e-3)
        assert part.params == layer.params


def whole_chain(cut: Cut) -> tuple[Layer, ...]:
    part = FACTS.divided(cut)
    return (part.embedding, *part.blocks, part.head)


def test_expert_ranks_hold_fewer_experts_and_do_as_much() -> None:
    spread = FACTS.divided(Cut(expert=4))
    assert 4 * expert_elements(spread) == expert_elements(FACTS)
    assert flops(spread.blocks[0]) == pytest.approx(flops(FACTS.blocks[0]))
    whole = FACTS.divided(Cut(expert=4, whole=2))
    assert expert_elements(whole, 2) == expert_elements(spread)  # all columns on each of two ranks
    assert flops(whole.blocks[0], 2) == pytest.approx(flops(FACTS.blocks[0], 2))


def priced(space: Space, gpus: int = 16) -> Priced:
    """The one strategy of a space."""
    table = strategies(FACTS, space, [], gpus=gpus, global_batch=64)
    assert table.rows == 1
    return Priced(FACTS, table, OFFER, Assumptions())


ONE: dict[str, Any] = {
    "pipeline": (1,), "tensor": (1,), "micro_batch": (1,), "expert": (1,), "interleaving": False,
    "sequence_parallel": (False,), "distributed_optimizer": (True,), "recompute": (None,),
    "no_overlap_offload": (True,), "offload": False,
}  # fmt: skip


def test_keys_and_values_go_round_the_context_ranks() -> None:
    one = priced(Space(**{**ONE, "context": (4,)}))
    size = 2 * 8 * 64 * 2 * 2048 / 4  # keys and values of 8 heads in 16 bit, of a rank's tokens
    hop = collective_seconds("send", size, 4, node_fabric(OFFER.node)).seconds
    assert one.exchanges.ring[0] == pytest.approx(3 * hop)
    alone = priced(Space(**ONE))
    assert alone.exchanges.ring[0] == 0.0 and one.forward[0] < alone.forward[0]


def test_tokens_are_exchanged_for_heads() -> None:
    one = priced(Space(**{**ONE, "context": (4,), "exchange": ("a2a",)}))
    size = (16 + 8) * 2 * 64 * 2 * 2048 / 4 / 4  # a fourth of all four tensors of a rank's tokens
    once = collective_seconds("all-to-all", size, 4, node_fabric(OFFER.node)).seconds
    assert one.exchanges.heads[0] == pytest.approx(4 * once)
    ring = priced(Space(**{**ONE, "context": (4,)}))
    work = one.blocks[0, 0] + one.exchanges.experts[0]  # nothing hides the exchange
    assert one.forward[0] == pytest.approx(work + 4 * once) and ring.forward[0] != one.forward[0]
    every = Space(**{**ONE, "tensor": (1, 2), "context": (4, 8), "exchange": ("p2p", "a2a")})
    table = strategies(FACTS, every, [], gpus=16, global_batch=64)
    heads = table.columns["tensor_model_parallel_size"] * table.columns["context_parallel_size"]
    assert {*heads[table.columns["cp_comm_type"] == 1]} == {4, 8}  # of eight with keys
    assert {*heads[table.columns["cp_comm_type"] == 0]} == {4, 8, 16}


def test_shard_groups_gather_near_and_reduce_far() -> None:
    more = {**ONE, "fsdp": (True,), "overlap": False}
    far, near = priced(Space(**more)), priced(Space(**{**more, "shard_groups": (2,)}))
    assert near.forward[0] < far.forward[0]  # within a node of eight
    layers = FACTS.layers
    dense = layers * near.stage_params + sum(near.end_params)
    sizes = [4 * part / 8 for part in (dense, layers * near.expert_stage_params)]
    stride, ranks = np.array([8]), np.array([2])
    expected = [
        group_seconds(OFFER, Assumptions(), "all-reduce", size, stride, ranks)[0] for size in sizes
    ]
    assert iteration_parts(near, np.zeros(1))[1][0] == pytest.approx(sum(expected))
    assert iteration_parts(far, np.zeros(1))[1][0] == 0.0
    table = strategies(FACTS, Space(**{**more, "shard_groups": (1, 2, 3, 8, 16)}), [], gpus=16,
                       global_batch=64)  # fmt: skip
    assert table.columns["num_distributed_optimizer_instances"].tolist() == [1, 2, 8]


def test_switches_slow_what_passes_them() -> None:
    """Nodes of eight, two under a switch: a ring of four nodes passes it once, an all-to-all with
    every node."""
    flat = replace(OFFER, most=32, intra_latency=0.0, network_latency=0.0)
    slow = replace(flat, switch_nodes=2, uplink=flat.network / 8)
    size, one = np.array([1e9]), np.array([1])

    def seconds(offer: Offer, operation: str, ranks: int, stride: int = 1) -> float:
        of = np.array([stride]), np.array([ranks])
        return float(group_seconds(offer, Assumptions(), operation, size * one, *of)[0])

    assert seconds(slow, "all-gather", 16) == seconds(flat, "all-gather", 16)
    reached = 0.96 * 2 * slow.uplink
    assert seconds(slow, "all-gather", 32) == pytest.approx(31 / 32 * 1e9 / reached)
    # eight rings meet in a node, each with two nodes under every switch
    assert seconds(slow, "all-gather", 4, 8) == pytest.approx(3 / 4 * 1e9 / (reached / 8))
    assert seconds(slow, "all-to-all", 32) == pytest.approx(8 * seconds(flat, "all-to-all", 32))


def test_a_rack_is_one_domain() -> None:
    rack, nodes = offer_of("GB200", 144), offer_of("B200", 144)
    assert (rack.node_devices, nodes.node_devices) == (72, 8) and rack.intra == nodes.intra
    wide = np.array([1]), np.array([64])
    seconds = [
        group_seconds(offer, Assumptions(), "all-to-all", np.array([1e9]), *wide)[0]
        for offer in (rack, nodes)
    ]
    assert seconds[0] == collective_seconds("all-to-all", 1e9, 64, node_fabric(rack.node)).seconds
    assert 10 * seconds[0] < seconds[1]


def test_shards_take_less_memory_and_more_time() -> None:
    shards, alone = priced(Space(**{**ONE, "fsdp": (True,)})), priced(Space(**ONE))
    assert offload_share(shards)[0] <= offload_share(alone)[0]
    assert shards.forward[0] > alone.forward[0]
    parts = [iteration_parts(each, np.zeros(1)) for each in (shards, alone)]
    assert parts[0][1][0] == 0.0 < parts[1][1][0]  # reduced layer by layer


def test_the_search_over_all_degrees_equals_enumeration() -> None:
    gpus, powers = 8, (1, 2, 4, 8)
    space = Space(
        pipeline=(1, 2, 4),
        tensor=(1, 2),
        micro_batch=(1, 2),
        expert=powers,
        context=(1, 2),
        whole_experts=(False, True),
        fsdp=(False, True),
        uneven=True,
        virtual=(1, 2),
        distributed_optimizer=(True,),
        sequence_parallel=(True, False),
        recompute=(None,),
        no_overlap_offload=(True,),
        offload=False,
    )
    pool = homogeneous(offer_of("H100-SXM5-80GB", gpus))
    result = search(Job(FACTS.model, 64), pool, space=space)
    rules, fastest, count = default_rules(columns_of(pool)), np.inf, 0
    axes = ("pipeline", "tensor", "micro_batch", "expert", "context", "whole_experts", "fsdp")
    for values in product(*(getattr(space, axis) for axis in axes)):
        p, t, b, e, c, whole, _ = values
        d = gpus // (p * t * c)
        if p * t * c * d != gpus or 64 % (b * d) or t * c * d % ((1 if whole else t) * e):
            continue
        if whole and t == 1:
            continue
        own: dict[str, Any] = {axis: (value,) for axis, value in zip(axes, values, strict=True)}
        further: dict[str, Any] = {
            name: getattr(space, name) for name in vars(space) if name not in axes
        }
        table = strategies(
            FACTS, Space(**own, **further), rules, gpus=gpus, global_batch=64, whole_stages=False
        )
        for r in range(table.rows):
            one = Priced(FACTS, table.take(np.array([r])), pool.offers[0], Assumptions())
            if offload_share(one)[0] <= 0:
                count += 1
                fastest = min(fastest, float(np.sum(iteration_parts(one, np.zeros(1)))))
    assert result.best is not None and result.proven and count > 200
    assert result.counts["priced"] == count
    assert result.best.seconds == pytest.approx(fastest)
