"""Seconds and bytes of strategies against a plain reading of the formulas."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from astra.cases import GPT, LLAMA, SMALL, table_of
from hetplan.formulations.astra.search.memory import offload_share, stage_peaks
from hetplan.formulations.astra.search.pricing import Priced, iteration_parts
from hetplan.formulations.astra.search.table import NONE
from hetplan.profiling.hardware.cluster import Node
from hetplan.profiling.models.operators import Matmul
from hetplan.profiling.rates.collectives import collective_seconds, node_fabric
from hetplan.profiling.rates.times import Rates, layer_time
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts
from hetplan.replays.offers import Offer, offer_of


def plain_seconds(facts: ModelFacts, row: dict[str, Any], offer: Offer, share: float) -> float:
    """One strategy priced by hand, for GPT-like models without experts: the formulas, not the
    code."""
    pp, tp, dp = (row[f"{k}_parallel_size"] for k in ("pipeline_model", "tensor_model", "data"))
    mbs, K, sp = row["micro_batch_size"], row["num_micro_batches"], row["sequence_parallel"]
    v, n = row["virtual_pipeline_model_parallel_size"] or 1, facts.layers // pp
    node = offer.node_devices

    def reduced(size: float, stride: int, ranks: int) -> float:
        """An all-reduce: as measured inside a node, between nodes by its ring's hops."""
        if stride * ranks <= node:
            latencies = (offer.intra_latency, offer.network_latency)
            on = node_fabric(Node(offer.name, node, offer.intra, offer.network, *latencies))
            return collective_seconds("all-reduce", size, ranks, on).seconds
        nodes = math.ceil(ranks / max(1, node // stride))
        bandwidth = min(offer.intra, 0.96 * offer.network / min(stride, node))
        hops = (ranks - nodes) * offer.intra_latency + (nodes - 1) * offer.network_latency
        return 2 * ((ranks - 1) / ranks * size / bandwidth + hops)

    def beside(seconds: float, window: float) -> float:
        """Half of what hides is lost all the same."""
        return seconds - min(seconds, window) / 2

    def by_bucket(operation: float, params: float, element: int, window: float) -> float:
        """The last bucket is exposed, the others hide behind the window."""
        bucket = max(40e6, 1e6 * dp)
        once = operation * reduced(min(params, bucket) * element, tp, dp)
        return once + beside(max(params / bucket - 1, 0) * once, window)

    rates = Rates(offer.name, offer.spec, facts.precision)
    block = layer_time(facts.blocks[0], rates, micro_batch=mbs, tensor=tp)
    ends = [layer_time(x, rates, micro_batch=mbs, tensor=tp) for x in (facts.embedding, facts.head)]
    end_seconds = [end.forward + end.backward for end in ends]
    assert not sp  # the plain reading is for rows without sequence parallelism
    reduce = 2 * reduced(facts.boundary_bytes * mbs, 1, tp) if tp > 1 else 0.0
    forward, backward = block.forward + reduce, block.backward + reduce
    again = {"full": {"uniform": n, "block": min((row["recompute_num_layers"] or 0) * v, n)}}.get(
        row["recompute_granularity"], {}
    ).get(row["recompute_method"], 0)
    work = n * (forward + backward) + again * forward
    crossing = 0.0
    if pp > 1:
        inside = tp * dp * pp <= node
        size, delay = facts.boundary_bytes * mbs, offer.network_latency
        one_way = size / min(offer.intra, 0.96 * offer.network / node) + delay
        if inside:
            slow = Node(offer.name, node, offer.intra, offer.network, offer.intra_latency, delay)
            one_way = collective_seconds("send", size, 2, node_fabric(slow)).seconds
        crossing = 2 * one_way
        if row["overlap_p2p_communication"]:
            crossing = beside(crossing, work / v)
    stages = [work + v * crossing] * pp
    stages[0] += end_seconds[0]
    stages[-1] += end_seconds[1]
    pipeline = (sum(stages) - max(stages)) / v + K * max(stages)
    params = [n * facts.blocks[0].params / tp] * pp
    params[0] += facts.embedding.params / tp
    params[-1] += (facts.head.params + (facts.head.tied_params if pp > 1 else 0)) / tp
    most = max(params)
    sync = 0.0
    if dp > 1 and row["use_distributed_optimizer"]:
        sync = by_bucket(0.5, most, 4, n * backward) + by_bucket(0.5, most, 2, n * forward)
    elif dp > 1:
        sync = by_bucket(1, most, 4, n * backward)
    if row["use_distributed_optimizer"]:
        most /= dp
    moved = share * most * 6 / 25e9
    if not row["no_overlap_offload_optimizer"]:
        moved = max(0.0, moved - n * backward)
    adam = most * 30 * ((1 - share) / (offer.spec.memory_bytes_per_s * 0.8) + share / 51e9)
    return float(pipeline + sync + adam + moved)


@pytest.mark.parametrize(("facts", "gpus"), [(LLAMA, 64), (LLAMA, 8), (GPT, 24)])
def test_prices_equal_a_plain_reading(facts: ModelFacts, gpus: int) -> None:
    offer = offer_of("A800", gpus)
    table = table_of(facts, gpus, SMALL if facts is GPT else None)
    priced = Priced(facts, table, offer, Assumptions())
    share = np.clip(offload_share(priced), 0, 1)
    seconds = np.sum(iteration_parts(priced, share), axis=0)
    simple = (table.columns["sequence_parallel"] == 0) & (
        np.isin(table.columns["recompute_granularity"], (NONE, 1))
    )
    rows = random.Random(0).sample(np.flatnonzero(simple).tolist(), 150)
    for r in rows:
        assert seconds[r] == pytest.approx(
            plain_seconds(facts, table.row(r), offer, float(share[r]))
        ), r


def plain_bytes(facts: ModelFacts, row: dict[str, Any], stage: int) -> tuple[float, float]:
    """(bytes, optimizer states) of a device of one stage, by hand, without experts and hybrid
    recomputation."""
    pp, tp, dp = (row[f"{k}_parallel_size"] for k in ("pipeline_model", "tensor_model", "data"))
    mbs, K, sp, r = (
        row["micro_batch_size"],
        row["num_micro_batches"],
        row["sequence_parallel"],
        row["recompute_num_layers"],
    )
    v, n = row["virtual_pipeline_model_parallel_size"] or 1, facts.layers // pp
    params = n * facts.blocks[0].params
    params += facts.embedding.params if stage == 0 else 0
    params += (
        facts.head.params + (facts.head.tied_params if pp > 1 else 0) if stage == pp - 1 else 0
    )
    # Megatron-LM: 18 bytes a parameter, two buffers of what stages exchange, its workspace, and
    # CUDA's context and three communicators that no allocator counts
    states = 12 * params / tp / (dp if row["use_distributed_optimizer"] else 1)
    beside = 64e6 + 0.5e9 + 3 * 0.688e9

    def kept(saved: Any) -> float:
        parts = (x.size(facts.precision) / (tp if x.split or sp else 1) for x in saved)
        return float(mbs * sum(parts))

    whole = kept(facts.blocks[0].saved)
    boundary = facts.boundary_bytes * mbs / (tp if sp else 1)
    # Transformer Engine: an unused 16-bit gradient for each shape of a rank's weights
    products = {
        (x.k / (tp if x.split == "k" else 1), x.n / (tp if x.split == "n" else 1))
        for x in facts.blocks[0].operators
        if isinstance(x, Matmul) and x.weight
    }
    beside += sum(2 * k * n for k, n in products)
    # gradients of a block's output and of its largest kept tensor, the input of the activation
    largest = max(facts.blocks[0].saved, key=lambda x: x.size(facts.precision))
    gradients = boundary + kept([largest])
    layers, working = n * whole, gradients
    if row["recompute_granularity"] == "selective":
        core = kept([x for x in facts.blocks[0].saved if x.name.startswith(("softmax", "scores"))])
        layers, working = n * (whole - core), core + gradients
    elif row["recompute_method"] == "uniform":
        layers, working = -(-n // r) * boundary, min(r, n) * whole - boundary + gradients
    elif row["recompute_method"] == "block":
        again = min(r * v, n)
        layers = again * boundary + (n - again) * whole
        working = whole - boundary + gradients
    flight = min(K, pp - stage)
    if row["num_layers_per_virtual_pipeline_stage"] is not None:
        flight = min(K * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1) / v
    ends, loss = 0.0, 0.0
    if stage == 0:  # of every round of chunks that is begun, pp micro-batches in the first chunk
        rounds = -(-round(flight * v) // (pp * v))
        ends = min(K, rounds * pp) * kept(facts.embedding.saved)
    if stage == pp - 1:  # 6 bytes a logit at the loss
        logits = sum(x.elements for x in facts.head.saved if x.name == "logits") * mbs / tp
        ends += kept(facts.head.saved) - 4 * logits
        # or, in the head's backward pass, the gradients of the logits in 16 bit, of its input
        # (beside the input, gathered again) and an unused one of its weight
        width, vocabulary = facts.shape.hidden, facts.shape.vocabulary
        inputs = (2 if sp else 1) * mbs * facts.sequence * width * 2
        loss = max(6 * logits, 2 * logits + inputs + 2 * width * vocabulary / tp)
    if pp > 1:
        beside += 2 * boundary
    held = 6 * params / tp + states + flight * layers + max(working, loss) + ends + beside
    return held, states


@pytest.mark.parametrize(("facts", "gpus"), [(LLAMA, 64), (GPT, 24)])
def test_memory_equals_a_plain_reading(facts: ModelFacts, gpus: int) -> None:
    offer = offer_of("A800", gpus)
    table = table_of(facts, gpus, SMALL if facts is GPT else None)
    share = offload_share(Priced(facts, table, offer, Assumptions()))
    plain = np.flatnonzero(table.columns["recompute_granularity"] != 2)
    for r in random.Random(1).sample(plain.tolist(), 120):
        row = table.row(r)
        pp = int(row["pipeline_model_parallel_size"] or 0)
        by_hand = [plain_bytes(facts, row, j) for j in range(pp)]
        stages = [(offer, facts.layers // pp)] * pp
        assert stage_peaks(facts, table, r, stages, 0.0, Assumptions()) == pytest.approx(
            [b for b, _ in by_hand]
        )
        needed = max((b - offer.spec.memory_bytes) / s for b, s in by_hand)
        assert (
            share[r] > 1 if needed > 1 else share[r] == pytest.approx(max(0.0, needed), abs=1e-12)
        )
