"""Memory of models whose blocks differ: each stage holds the blocks of its own places, as in the
replay."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fakes.workloads import cluster
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.memory import (
    chunks_of,
    fullest_chunk,
    interleaved_kept,
    share_needed,
    stage_bytes,
    stage_peaks,
)
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.pricing import Priced
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.planner.astra import plan_of
from hetplan.profiling.frameworks import FRAMEWORKS
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.transformer import Experts, Mamba
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.replays.offers import offer_of, offers_of_cluster
from hetplan.replays.replay import replay
from quick import rest_wide

BATCH = 8
MIXTURE = Experts(count=4, active=2, dense=3, width=512, shared=1024)
SHAPES = {
    # DeepSeek's form: dense blocks first, then experts beside a shared one
    "dense blocks first": llama(8, 512, 8, 2048, kv_heads=4, experts=MIXTURE),
    # every second block has experts
    "experts in turn": llama(
        8, 512, 8, 1024, kv_heads=4, experts=Experts(count=4, active=2, every=2)
    ),
    # too few tokens for the first and the last stage to hold most
    "experts late": llama(
        8, 512, 8, 512, kv_heads=4, vocabulary=512,
        experts=Experts(count=4, active=2, dense=4, width=1024),
    ),
    # Nemotron's form: each block is Mamba-2, attention, a network or experts
    "hybrid": llama(
        8, 512, 8, 1024, kv_heads=4, pattern="MEM*-EME", mamba=Mamba(8, 64, 8, 64),
        experts=Experts(count=4, active=2, width=512),
    ),
}  # fmt: skip


@cache
def node() -> Cluster:
    """Eight H100."""
    links = {"intra_node_gbit_per_s": 3600, "network_gbit_per_s": 3200}
    return cluster(nodes=[{"count": 1, "devices": 8, "device": "H100-SXM5-80GB", **links}])


@cache
def model_of(name: str) -> Model:
    spec = text_model(name.replace(" ", "-"), "test", 512, SHAPES[name])
    return load_model(spec, precision="bf16")


def space(**more: Any) -> Space:
    values: dict[str, Any] = {
        "pipeline": (4,),
        "tensor": (1, 2),
        "micro_batch": (1,),
        "expert": (2,),
        "context": (1, 2),
        "whole_experts": (False, True),
        "fsdp": (False, True),
        "virtual": (1,),
        "recompute": (None, "full"),
        "recompute_method": ("uniform",),
        "recompute_layers": (1,),
        "no_overlap_offload": (True,),
        "offload": False,
        "overlap": False,
    }
    return Space(**{**values, **more})


@pytest.mark.parametrize("framework", rest_wide(["megatron", "fsdp", "hetplan", "deepspeed"], 1))
@pytest.mark.parametrize("name", rest_wide(["hybrid", "dense blocks first", "experts in turn"], 1))
def test_each_stage_holds_its_own_blocks_as_in_the_replay(name: str, framework: str) -> None:
    model = model_of(name)
    profile = predict(model, node(), micro_batches=[1], tensor_degrees=[1, 2])
    workload = make_workload(model, node(), BATCH, profile=profile, framework=FRAMEWORKS[framework])
    (offer,) = offers_of_cluster(workload.cluster)
    roomy = offer.spec.model_copy(update={"memory_gib": 1e6})
    pool = homogeneous(replace(offer, spec=roomy))
    assumed = Assumptions(framework=workload.framework, profile=profile)
    found = search(Job(model, BATCH), pool, space=space(), assumed=assumed, top=10**6).top
    seen = set()
    unequal = 0
    for candidate in found[:: max(1, len(found) // 4)]:
        plan = plan_of(candidate, workload, pool)
        run = replay(plan, workload)
        replica = plan.replicas[0]
        chunks = len(replica.stages[0].layers)
        for stage, claimed in zip(replica.stages, candidate.stage_bytes, strict=True):
            held = run.peak_bytes[stage.devices[0][0]] + workload.reserved_bytes
            # with several chunks the search counts the embedding of a whole round
            assert claimed == pytest.approx(held, rel=1e-6 if chunks == 1 else 0.02)
            assert claimed >= held * (1 - 1e-6)
        seen.add(chunks)
        unequal += len({round(size) for size in candidate.stage_bytes}) > 2
    assert seen == {1, 2} and unequal


@cache
def priced(name: str, stages: int, virtual: int) -> Priced:
    """One strategy without further degrees."""
    facts = model_facts(model_of(name))
    one = space(
        pipeline=(stages,), tensor=(1,), expert=(1,), context=(1,), fsdp=(False,),
        whole_experts=(False,), recompute=(None,), interleaving=virtual > 1,
        virtual=(8 // stages // virtual,), distributed_optimizer=(False,),
        sequence_parallel=(False,),
    )  # fmt: skip
    table = strategies(facts, one, [], gpus=stages, global_batch=BATCH)
    (row,) = np.flatnonzero(
        table.columns["virtual_pipeline_model_parallel_size"] == (virtual if virtual > 1 else -1)
    )
    return Priced(facts, table.take(np.array([row])), offer_of("A800", 8), Assumptions())


def test_a_stage_of_chunks_has_the_blocks_of_every_so_many_places() -> None:
    """Stage j of two has chunks j and 2 + j of two blocks: of three dense blocks first, stage 0 has
    blocks 0, 1, 4, 5 and stage 1 has 2, 3, 6, 7."""
    one = priced("dense blocks first", 2, 2)
    layers = np.array([4])
    counts = [
        [[int(kind[0]) for kind in chunk.count] for chunk in chunks_of(one, layers, np.array([j]))]
        for j in range(2)
    ]
    assert counts == [[[2, 0], [0, 2]], [[1, 1], [0, 2]]]
    # three blocks that follow one another have at most so many of either kind
    assert [int(kind[0]) for kind in fullest_chunk(one, np.array([3])).count] == [3, 3]


@pytest.mark.parametrize(("P", "v", "rounds"), [(2, 2, 4), (3, 4, 2), (4, 3, 1), (5, 2, 3)])
def test_chunks_in_flight_are_those_of_the_schedule(P: int, v: int, rounds: int) -> None:
    """Interleaved 1F1B written out, for chunks of unlike bytes: P micro-batches through each chunk
    in turn."""
    passes = rounds * P * v
    for place in range(P):
        sizes = random.Random(place).choices([1.0, 5.0, 20.0, 100.0], k=v)
        warm_up = min(passes, 2 * (P - place - 1) + (v - 1) * P + 1)
        held = most = 0.0
        done = 0
        for number in range(passes):
            held += sizes[number // P % v]
            most = max(most, held)
            if number + 1 >= warm_up:
                held -= sizes[v - 1 - done // P % v]
                done += 1
        kept = [np.array([size]) for size in sizes]
        found = interleaved_kept(
            np.array([P]), np.array([v]), np.array([rounds * P]), np.array([place]), kept
        )
        assert found[0] == pytest.approx(most)


def test_the_fullest_stage_decides_whether_a_strategy_fits() -> None:
    """Of four stages, the third holds most, and the second lacks most over its few states."""
    one = priced("experts late", 4, 1)
    one.assumed = replace(one.assumed, memory_margin=0.99)  # so that no stage fits
    peaks = stage_peaks(one.facts, one.table, 0, [(one.offer, 2)] * 4, 0.0, one.assumed)
    assert max(peaks) == peaks[2]
    layers, states = np.array([2]), []
    for place in range(4):
        first, last = float(place == 0), float(place == 3)
        _, optimizer = stage_bytes(one, layers, np.array([place]), first, last)
        states.append(float(optimizer[0]))
    capacity = 0.01 * one.offer.spec.memory_bytes
    shares = [(p - capacity) / s for p, s in zip(peaks, states, strict=True)]
    assert max(shares) not in (shares[0], shares[-1])
    assert share_needed(one, layers)[0] == pytest.approx(max(shares))


def test_any_stage_needs_at_most_what_the_fullest_chunk_does() -> None:
    one = priced("hybrid", 4, 1)
    place = np.array([1])
    for size in range(1, 5):
        layers = np.array([size])
        bound, _ = stage_bytes(one, layers, place, 0.0, 0.0, (fullest_chunk(one, layers),))
        for begin in range(8 - size + 1):
            chunks = chunks_of(one, layers, place, begin=np.array([begin]))
            held, _ = stage_bytes(one, layers, place, 0.0, 0.0, chunks)
            assert held[0] <= bound[0] * (1 + 1e-12)
