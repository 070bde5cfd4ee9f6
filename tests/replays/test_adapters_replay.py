"""Adapters in the replay: what is held, sharded, reduced and gathered, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fakes.workloads import cluster as cluster_of, cluster_document
from hetplan.formulations.astra.search.memory import held_by
from hetplan.formulations.astra.search.pricing import Priced
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan
from hetplan.profiling.frameworks import FSDP, HETPLAN
from hetplan.profiling.models.adapters import NF4_BITS, parse_adapters
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.costs import Costs
from hetplan.replays.degrees import bytes_of_rank
from hetplan.replays.facts import model_facts
from hetplan.replays.model_states import States
from hetplan.replays.offers import offer_of
from hetplan.replays.pose import pose
from hetplan.replays.ranks import Ranks
from hetplan.replays.replay import replay
from hetplan.replays.zero import ZeroCosts

H, F, BLOCKS, V, RANK = 64, 128, 3, 256, 4
IN_A_BLOCK = 4 * H * H + 3 * H * F  # frozen weights of the modules
OF_MODULES = 4 * (H + H) + 3 * (H + F)  # sizes of all A and B, per rank
TRAINED = RANK * OF_MODULES * BLOCKS
NORMS = 2 * H


@pytest.fixture
def two() -> Any:
    """A cluster of two nodes with one device each."""
    node = {**cluster_document()["nodes"][0], "count": 2, "devices": 1}
    return cluster_of(nodes=[node])


def workload(cluster: Any, *, bits: int = 4, tied: bool = True) -> Workload:
    shape = replace(llama(BLOCKS, H, 4, F), vocabulary=V, tied=tied)
    spec = text_model("little", "test", 8, shape)
    adapters = parse_adapters(f"lora:{RANK}", bits)
    model = load_model(spec, precision="fp16", adapters=adapters)
    return make_workload(model, cluster, 4)


def stages(*cuts: int) -> list[dict[str, Any]]:
    return [
        {"layers": [[first, last]], "devices": [[device]], "tensor_shares": [1.0]}
        for device, (first, last) in enumerate(pairwise(cuts))
    ]


def of(on: Workload, replicas: list[Any], **more: Any) -> ZeroCosts:
    return ZeroCosts.of(new_plan(on, replicas, **more), Costs(pose(on)))


def data_parallel(on: Workload, zero: int) -> Any:
    stage = {"layers": [[0, BLOCKS + 2]], "tensor_shares": [1.0]}
    replicas = [
        {"stages": [{**stage, "devices": [[d]]}], "micro_batches": [{"count": 1, "samples": 2}]}
        for d in (0, 1)
    ]
    return new_plan(on, replicas, zero=zero)


def test_only_adapters_are_reduced(two: Any) -> None:
    on = workload(two)
    zero = ZeroCosts.of(data_parallel(on, 0), Costs(pose(on)))
    (parts,) = zero.shared_parts().values()
    assert parts == (2 * TRAINED, 0)
    seconds = [replay(data_parallel(on, 0), on).seconds for on in (on, workload(two, bits=16))]
    assert seconds[0] > seconds[1]  # casts


def test_a_device_holds_frozen_weights_in_their_bits(two: Any) -> None:
    """Every trained parameter has 2 + 2 + 12 bytes; of ZeRO 3 a half is on each device."""
    on = workload(two)
    frozen = BLOCKS * IN_A_BLOCK * NF4_BITS / 8 + 2 * (BLOCKS * NORMS + H + V * H)
    whole, sharded = (replay(data_parallel(on, zero), on).held[0] for zero in (0, 3))
    assert whole.weights == pytest.approx(2 * TRAINED + frozen, abs=BLOCKS)
    assert (whole.gradients, whole.optimizer) == (2 * TRAINED, 12 * TRAINED)
    assert whole.casts == sharded.casts == 2 * H * F
    assert sharded.weights == pytest.approx(TRAINED + frozen / 2, abs=BLOCKS)
    block = 2 * RANK * OF_MODULES
    # two gathered layers and a gradient; of frozen weights, the embedding has the most
    assert sharded.collectives == pytest.approx(3 * block + 2 * 2 * V * H)


def test_frozen_weights_are_gathered_in_their_bits(two: Any) -> None:
    on = workload(two)
    zero = ZeroCosts.of(data_parallel(on, 3), Costs(pose(on)))
    block = on.profile.layers[1]
    assert block.frozen_bytes == pytest.approx(IN_A_BLOCK * NF4_BITS / 8 + 2 * NORMS, abs=1)
    gather, scatter = zero.layers(weights=True)[1], zero.layers(weights=False)[1]
    assert gather == zero.half_ring(block.param_bytes + block.frozen_bytes)[0]
    assert scatter == zero.half_ring(zero.costs.gradient_bytes(block.param_bytes))[0]
    states = States.of(on)
    assert states.frozen == sum(layer.frozen_bytes for layer in on.profile.layers)
    assert states.frozen_layer == 2 * V * H and states.casts == 2 * H * F


def test_a_last_stage_holds_a_frozen_copy_of_tied_weights(two: Any) -> None:
    """It is not reduced; a stage with both embedding and head holds it once."""
    batches = {"micro_batches": [{"count": 2, "samples": 2}]}
    peaks = []
    for tied in (True, False):
        on = workload(two, tied=tied)
        plan = new_plan(on, [{"stages": stages(0, 2, BLOCKS + 2), **batches}])
        peaks.append(replay(plan, on).held)
        assert not of(on, [{"stages": stages(0, 2, BLOCKS + 2), **batches}]).copies
    assert peaks[0][1].weights == peaks[1][1].weights
    costs = Costs(pose(workload(two)))
    whole = costs.stage_bytes(((0, BLOCKS + 2),), 1, ())
    untied = Costs(pose(workload(two, tied=False))).stage_bytes(((0, BLOCKS + 2),), 1, ())
    assert untied.frozen - whole.frozen == 2 * V * H


@pytest.mark.parametrize("tied", [True, False])
def test_many_stages_at_once_are_those_of_each(two: Any, tied: bool) -> None:
    costs, last = Costs(pose(workload(two, tied=tied))), BLOCKS + 2
    for first in range(last):
        at_once = costs.stages_from(first, 2, 0.0)
        for end in range(first + 1, last + 1):
            one = costs.stage_bytes(((first, end),), 2, ())
            for name in ("weights", "largest", "frozen", "largest_frozen", "casts"):
                row = np.asarray(getattr(at_once, name))
                assert row[end - first - 1] == pytest.approx(getattr(one, name)), name


@pytest.mark.parametrize("fsdp", [False, True])
def test_astras_search_holds_what_the_replay_holds(two: Any, fsdp: bool) -> None:
    """Of one stage: the states of every device, whole or in shards over both."""
    on = workload(two, tied=False)
    facts = model_facts(on.model)
    space = Space(
        pipeline=(1,), tensor=(1,), micro_batch=(1,), expert=(1,), context=(1,),
        fsdp=(fsdp,), shard_groups=(1,), interleaving=False, sequence_parallel=(False,),
        distributed_optimizer=(False,), recompute=(None,),
    )  # fmt: skip
    table = strategies(facts, space, [], gpus=2, global_batch=4)
    table = table.take(np.array([0]))
    assumed = Assumptions(framework=HETPLAN, reserved_bytes=0.0)
    priced = Priced(facts, table, offer_of("V100-SXM2-16GB", 2), assumed)
    held = held_by(priced, np.array([BLOCKS]), np.zeros(1, np.int64), 1.0, 1.0)
    same = replay(data_parallel(on, 3 if fsdp else 0), on).held[0]
    for name in ("weights", "gradients", "optimizer", "casts", "collectives"):
        assert np.ravel(getattr(held, name))[0] == pytest.approx(getattr(same, name)), name


def test_frozen_experts_are_spread_over_ranks(two: Any) -> None:
    """Each of two ranks holds half of the experts in their bits, and all other frozen weights."""
    mixture = Experts(count=4, active=2)
    shape = replace(llama(1, H, 4, F, experts=mixture), vocabulary=V, tied=False)
    adapters = parse_adapters(f"lora:{RANK}", 4)
    model = load_model(text_model("little", "test", 8, shape), adapters=adapters)
    on = make_workload(model, two, 4)
    ranks = Ranks(tensor=1, context=1, data=2, expert=2, expert_tensor=1, shard_groups=1)
    costs = bytes_of_rank(on, ranks, Degrees(expert=2), "none")
    of_experts = 4 * 3 * H * F
    held = costs.frozen_sums[2] - costs.frozen_sums[1]
    dense = 4 * H * H * NF4_BITS / 8 + 2 * (NORMS + 4 * H)  # attention; norms and router
    assert held == pytest.approx(dense + of_experts / 2 * NF4_BITS / 8, abs=2)
    trained = costs.param_sums[2] - costs.param_sums[1]
    assert trained == 2 * RANK * (8 * H + 4 * 3 * (H + F) / 2)


def test_fsdp_gathers_packed_weights(two: Any) -> None:
    """Under FSDP the shards of frozen weights stay in their bits, and are gathered so."""
    held = FSDP.held_bytes(200.0, 20.0, 2, 3, 0.25, frozen=1000.0, largest_frozen=100.0)
    plain = FSDP.held_bytes(200.0, 20.0, 2, 3, 0.25)
    assert held.weights - plain.weights == 250.0
    assert held.buffers - plain.buffers == 2 * 100.0
    staged = FSDP.held_bytes(
        200.0, 20.0, 2, 3, 0.25, staged=True, frozen=1000.0, largest_frozen=100.0
    )
    assert staged.buffers - FSDP.held_bytes(200.0, 20.0, 2, 3, 0.25, staged=True).buffers == 1000.0
    assert held.gradients == plain.gradients and held.optimizer == plain.optimizer
