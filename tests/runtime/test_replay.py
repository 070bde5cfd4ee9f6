"""Plans replayed: against families' prices where those are exact, and by hand where they are
not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fakes.workloads import cluster_document, small
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.evaluate import peak_bytes
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.joint.schedule.pose import pose as pose_orders
from hetplan.planner.amp import AmpProblem
from hetplan.planner.explain import fullest_link
from hetplan.planner.poplar import Poplar
from hetplan.planner.proposals import propose
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.operators import CONTENTION
from hetplan.profiling.rates.collectives import collective_seconds, node_fabric
from hetplan.profiling.rates.times import Rates, kept_bytes, repeated_share
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Settings
from hetplan.replays.costs import Costs
from hetplan.replays.overlap import prefetched_pass
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import StageReplayer, replay
from hetplan.replays.simulator.tasks import Kind
from hetplan.solvers.run import Run
from present import present

GBIT = 1e9 / 8


@cache
def workload() -> Workload:
    """gpt2 on two V100 and two T4, global batch 8."""
    return small()


def plan_of(
    *cuts: tuple[int, int], batches: list[tuple[int, int]] | None = None, **changes: Any
) -> Plan:
    """gpt2's 14 layers as one pipeline, stage j on device j, micro-batches of 1."""
    stages = [{"layers": [cut], "devices": [[j]]} for j, cut in enumerate(cuts)]
    steps = [{"count": count, "samples": samples} for count, samples in batches or [(8, 1)]]
    return made([{"stages": stages, "micro_batches": steps}], **changes)


def made(replicas: list[dict[str, Any]], **changes: Any) -> Plan:
    """A plan for `workload()`."""
    return new_plan(workload(), replicas, **changes)


def two_pipelines(
    *cuts: list[tuple[int, int]], devices: tuple[list[int], list[int]] = ([0, 1], [2, 3])
) -> list[dict[str, Any]]:
    """Two replicas of two stages, cut alike where one cut is given."""
    return [
        {
            "stages": [
                {"layers": [layers], "devices": [[d]]} for layers, d in zip(cut, own, strict=True)
            ],
            "micro_batches": [{"count": 4, "samples": 1}],
        }
        for cut, own in zip((cuts[0], cuts[-1]), devices, strict=True)
    ]


def tensor_pair(*devices: list[int], first: int = 0, last: int = 14) -> dict[str, Any]:
    """A stage of tensor groups."""
    return {"layers": [(first, last)], "devices": list(devices), "tensor_shares": [1, 1]}


HALVES = [(0, 7), (7, 14)]
ACROSS = ([0, 2], [1, 3])  # each pipeline on both nodes


def test_one_stage_takes_its_passes_and_the_update() -> None:
    w = workload()
    replayed = replay(plan_of((0, 14)), w)
    table = w.profile.table("V100-SXM2-16GB", 1, 1)
    assert table is not None
    update = costs_of(w).update_seconds(0, sum(layer.param_bytes for layer in w.profile.layers))
    assert replayed.seconds == pytest.approx(8 * sum(table.layer_seconds()) + update)
    assert update > 0
    assert replayed.timeline.spent(Kind.TRANSFER).sum() == 0
    assert replayed.peak_bytes[1:] == (0.0, 0.0, 0.0)  # idle devices hold nothing


def test_two_stages_send_activations_there_and_gradients_back() -> None:
    w = workload()
    replayed = replay(plan_of((0, 7), (7, 14), batches=[(1, 8)]), w)
    layer = w.profile.layers[6]
    each = 8 * layer.activation_bytes / (170 * GBIT)
    sends = replayed.timeline.spent(Kind.TRANSFER)
    assert sends.tolist() == pytest.approx([each, each])
    table = w.profile.table("V100-SXM2-16GB", 1, 2)
    assert table is not None
    single = w.profile.table("V100-SXM2-16GB", 1, 1)
    assert single is not None
    one, two = sum(single.layer_seconds()), sum(table.layer_seconds())
    # beyond two samples, the largest in the profile, the slope goes on
    compute = two + 6 * (two - one)
    latency = 2 * w.cluster.latency()[0, 1]
    tied = replayed.timeline.spent(Kind.COLLECTIVE).sum()
    assert tied == pytest.approx(w.profile.layers[-1].tied_param_bytes / (170 * GBIT) + latency)
    updates = replayed.timeline.spent(Kind.OPTIMIZER).max()
    assert replayed.seconds == pytest.approx(compute + 2 * each + latency + tied + updates)


def test_a_node_shares_its_network_card() -> None:
    costs = costs_of(workload())
    card = 10 * GBIT
    one = costs.messages([(0, 2, 1e6)])
    assert one.seconds == pytest.approx(1e6 / card)
    assert one.ports == ((0, 1.0), (3, 0.2))  # the T4s' card takes 50 Gbit/s
    both = costs.messages([(0, 2, 1e6), (1, 3, 1e6)])
    assert both.seconds == pytest.approx(2e6 / card)
    inside = costs.messages([(0, 1, 1e6), (2, 3, 1e6)])
    assert inside.seconds == pytest.approx(1e6 / (50 * GBIT))
    # a V100 sends 1e6 bytes in less time than a T4; devices' ports stand behind two nodes' cards
    assert [port for port, _ in inside.ports] == [4, 7, 8, 11]
    assert [share for _, share in inside.ports] == pytest.approx([50 / 170] * 2 + [1.0] * 2)


def test_rings_enter_a_node_once_and_share_it() -> None:
    costs = costs_of(workload())
    latency = float(workload().cluster.latency()[0, 2])
    alone = costs.ring([[0, 1, 2, 3]], 4e6)
    inside = float(workload().cluster.latency()[0, 1])
    # two hops inside nodes and one of the two between them, there and back
    assert alone.seconds == pytest.approx(6 * 1e6 / (10 * GBIT) + 4 * inside + 2 * latency)
    pairs = costs.ring([[0, 2], [1, 3]], 4e6)  # two rings through the same cards
    assert pairs.seconds == pytest.approx(2 * (2 * 2e6 / (10 * GBIT) + latency))
    assert costs.ring([[3]], 4e6).seconds == 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_is_priced_as_the_poplar_family_prices_it(zero: int) -> None:
    w = workload()
    replayed = propose(Poplar(), w, Run())
    mine = next(c for c in replayed if c.label == f"auto-zero{zero}" and c.plan is not None)
    assert mine.plan is not None
    assert mine.closed_form_seconds is not None
    again = replay(mine.plan, w)
    # Beside the family's price there is the update; under ZeRO 1 the parameters are gathered after
    # it.
    update = again.timeline.spent(Kind.OPTIMIZER).max()
    assert 0 < update < 0.05 * again.seconds
    assert again.seconds == pytest.approx(mine.closed_form_seconds + update, rel=1e-9)
    assert mine.peak_bytes is not None
    assert again.peak_bytes == pytest.approx(mine.peak_bytes)


def test_memory_is_that_of_the_amp_family() -> None:
    w = workload()
    data = pose(w)
    decision = AmpDecision(
        pipeline=2,
        data=2,
        tensor=1,
        micro_batch=2,
        placement=[[[0], [1]], [[2], [3]]],
        stages=[(0, 8), (8, 14)],
    )
    again = replay(AmpProblem(w, data).to_plan(decision), w)
    assert again.peak_bytes == pytest.approx(peak_bytes(data, decision))
    assert again.fits


def test_gradients_join_layer_by_layer_where_replicas_are_cut_differently() -> None:
    cuts = [(0, 3), (3, 14)], [(0, 10), (10, 14)]
    replayed = replay(made(two_pipelines(*cuts, devices=ACROSS)), workload())
    # Layers 0-2, 3-9, 10-13, and the tied weights.
    assert int((replayed.timeline.tasks.kind == Kind.COLLECTIVE).sum()) == 4
    assert np.isfinite(replayed.seconds)


def test_overlapping_and_not_waiting_never_take_longer() -> None:
    plan, w = made(two_pipelines(HALVES, devices=ACROSS)), workload()
    plain = replay(plan, w).seconds
    assert replay(plan, w, Settings(buckets=8)).seconds < plain
    assert replay(plan, w, Settings(sends="asynchronous")).seconds < plain
    assert replay(plan, w, Settings(sends="rendezvous")).seconds >= plain
    chunks = plan.model_copy(update={"schedule": "interleaved-1f1b"})
    with pytest.raises(UnsupportedError, match="cannot all wait for both ends"):
        replay(chunks, w, Settings(sends="rendezvous"))
    assert replay(plan, w, Settings(exchange_seconds=1e-3)).seconds > plain


def test_recomputation_trades_time_for_memory() -> None:
    w = workload()
    runs = {
        mode: replay(plan_of((0, 7), (7, 14), recomputation=mode), w)
        for mode in ("none", "selective", "full")
    }
    times = [runs[mode].seconds for mode in ("none", "selective", "full")]
    peaks = [max(runs[mode].peak_bytes) for mode in ("none", "selective", "full")]
    assert times == sorted(times) and times[0] < times[2]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[1] > peaks[2]
    block, rates = w.model.layers[1], Rates("T4", w.cluster.specs["T4"], "fp16")
    assert repeated_share(block, "full", rates, 1, 1) == 1.0
    assert 0 < repeated_share(block, "selective", rates, 1, 1) < 1
    assert repeated_share(w.model.layers[0], "full", rates, 1, 1) == 0.0
    assert kept_bytes(block, "full", "fp16", 1, 77.0) == 77.0


def test_uneven_rows_and_widths_are_sent_where_they_belong() -> None:
    wide = {"layers": [(0, 7)], "devices": [[0], [1]], "row_shares": [3.0, 1.0]}
    narrow = {"layers": [(7, 14)], "devices": [[2, 3]], "tensor_shares": [1.0, 1.0]}
    plan = made([{"stages": [wide, narrow], "micro_batches": [{"count": 1, "samples": 8}]}])
    costs = costs_of(workload())
    here, there = plan.replicas[0].stages
    sent = costs.transfer(here, there, 6, 8)
    size = 8 * workload().profile.layers[6].activation_bytes
    assert sent.seconds == pytest.approx(size / (10 * GBIT))  # all of it through the V100s' card
    replayed = replay(plan, workload())
    assert replayed.seconds > sum(costs.passes(here, (0, 7), 8)) + sum(
        costs.passes(there, (7, 14), 8)
    )


def test_unequal_micro_batches_keep_their_own_times() -> None:
    mixed = replay(plan_of((0, 7), (7, 14), batches=[(2, 1), (3, 2)]), workload())
    even = replay(plan_of((0, 7), (7, 14), batches=[(4, 2)]), workload())
    assert mixed.seconds != even.seconds
    work = mixed.timeline.spent(Kind.FORWARD)
    costs = costs_of(workload())
    stage = plan_of((0, 7), (7, 14)).replicas[0].stages[0]
    expected = 2 * costs.passes(stage, (0, 7), 1)[0] + 3 * costs.passes(stage, (0, 7), 2)[0]
    assert work[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: small(global_batch=4), "global_batch of the plan"),
        (lambda: small(model="gpt2-medium"), "model of the plan"),
        (
            lambda: small(nodes=[cluster_document()["nodes"][0]]),
            "devices of the plan",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused(other: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replay(plan_of((0, 14)), other())


def test_sharded_pipelines_join_once_per_iteration() -> None:
    whole, one, *others = (
        replay(made(two_pipelines(HALVES), zero=zero), workload()) for zero in (0, 1, 2, 3)
    )
    assert max(one.peak_bytes) < max(whole.peak_bytes)
    for other in others:
        assert (other.seconds, other.peak_bytes) == (one.seconds, one.peak_bytes)
    # ZeRO 1 moves as much as an all-reduce, and each updates its part
    for kind, share in ((Kind.COLLECTIVE, 1), (Kind.OPTIMIZER, 2)):
        spent = whole.timeline.spent(kind) / share
        assert one.timeline.spent(kind) == pytest.approx(spent, abs=5e-6)  # a kernel's start


def test_gathers_hide_behind_layers() -> None:
    """By hand: three layers, weights before each, gradients behind each."""
    compute, gather, scatter = [4.0, 1.0, 4.0], [1.0, 3.0, 2.0], [1.0, 1.0, 2.0]
    # nothing ahead: all one after the other, but the last layer's gradients
    assert prefetched_pass(compute, gather, scatter, 0) == (9 + 6 + 2, 2.0)
    # weights there at 1 and 4; computed at 5, gradients until 6, weights until 8; computed at 6,
    # gradients until 9; computed at 12, gradients until 14
    assert prefetched_pass(compute, gather, scatter, 1) == (12.0, 2.0)
    # weights there at 1, 4 and 6
    assert prefetched_pass(compute, gather, scatter, 2) == (10.0, 2.0)
    assert prefetched_pass(compute, gather, [0.0] * 3, 2) == (10.0, 0.0)


@pytest.mark.parametrize("zero", [2, 3])
def test_sharded_tensor_groups_gather_their_parts(zero: int) -> None:
    w = workload()
    plan = made(
        [
            {"stages": [tensor_pair(pair)], "micro_batches": [{"count": 4, "samples": 1}]}
            for pair in ([0, 1], [2, 3])
        ],
        zero=zero,
    )
    layers, latency = w.profile.layers, float(w.cluster.latency()[0, 2])
    # each of two rings moves half of everything once, and both share the cards
    moved = sum(layer.param_bytes for layer in layers) / 2 / (10 * GBIT)
    once = moved + len(layers) * latency
    serial = replay(plan, w)
    joined = serial.timeline.spent(Kind.COLLECTIVE)[0]
    expected = 4 * (3 * once if zero == 3 else once) + (moved + latency if zero == 2 else 0)
    assert joined == pytest.approx(expected)
    ahead = replay(plan, w, Settings(prefetch=1))
    assert ahead.seconds < serial.seconds
    assert ahead.seconds > max(4 * (zero * 2 - 3) * moved, serial.seconds - joined)
    # sharded over two replicas, cut over two tensor ranks
    assert max(ahead.peak_bytes) < max(replay(plan.model_copy(update={"zero": 1}), w).peak_bytes)


def test_interleaved_chunks_visit_every_stage_again() -> None:
    stages = [
        {"layers": [(0, 4), (7, 10)], "devices": [[0]]},
        {"layers": [(4, 7), (10, 14)], "devices": [[1]]},
    ]
    replica = {"stages": stages, "micro_batches": [{"count": 8, "samples": 1}]}
    plan = made([replica], schedule="interleaved-1f1b")
    replayed = replay(plan, workload())
    tasks = replayed.timeline.tasks
    assert int((tasks.kind == Kind.TRANSFER).sum()) == 2 * 3 * 8
    assert replayed.seconds > 0


def test_tensor_groups_pay_for_their_all_reduces() -> None:
    w, count = workload(), {"count": 8, "samples": 1}
    plan = made([{"stages": [tensor_pair([0, 1])], "micro_batches": [count]}])
    costs, stage = costs_of(w), plan.replicas[0].stages[0]
    passes = costs.layer_seconds("V100-SXM2-16GB", 2, 1).sum(axis=1)
    assert costs.passes(stage, (0, 14), 1) == pytest.approx(passes[:2])
    size = sum(layer.tensor_bytes for layer in w.profile.layers)
    ring = 2 * (size / 2 / (170 * GBIT) + w.cluster.latency()[0, 1])
    # the device is busy for longer, the host is not
    seconds, host = passes[:2], passes[2:]
    longer = np.hypot(np.sqrt(seconds**2 - host**2) + ring / 2, host)
    assert (longer > seconds).all()
    reduces = [traffic.seconds for traffic in costs.reduces(stage, (0, 14), 1)]
    assert reduces == pytest.approx(longer - seconds)
    again = costs_of(w, "full").reduces(stage, (0, 14), 1)
    assert again[1].seconds > 1.5 * reduces[1]
    # beside a pass of inputs is its own part of the computation alone
    part = 1 - costs.weight_seconds(stage, (0, 14), 1) / seconds[1]
    device, its_host = part * np.sqrt(seconds[1] ** 2 - host[1] ** 2), part * host[1]
    in_inputs = np.hypot(device + ring / 2, its_host) - part * seconds[1]
    assert costs.reduces_of_inputs(stage, (0, 14), 1).seconds == pytest.approx(in_inputs)
    larger = [
        layer.model_copy(update={"tensor_bytes": 6 * layer.tensor_bytes})
        for layer in costs.data.layers
    ]
    hiding = Costs(costs.data.model_copy(update={"hidden_reduces": True, "layers": larger}))
    of_larger = 6 * size / 2 / (170 * GBIT) + w.cluster.latency()[0, 1]
    assert of_larger > device
    beside = device + of_larger - (1 - CONTENTION) * device
    in_inputs = np.hypot(beside, its_host) - part * seconds[1]
    assert hiding.reduces_of_inputs(stage, (0, 14), 1).seconds == pytest.approx(in_inputs)
    busy = replay(plan, w).timeline.spent(Kind.FORWARD, Kind.BACKWARD)
    assert busy.tolist() == pytest.approx([8 * longer.sum()])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "explicit"])
def test_a_split_pass_reduces_beside_its_inputs(schedule: str) -> None:
    """Where all-reduces hide, in the replay and in the problem of orders; a whole backward pass has
    more to hide them behind, in an order that splits others, too."""
    w = workload()
    w = replace(w, stack=replace(w.stack, hidden_reduces=True))
    stages = [tensor_pair([0, 2], last=7), tensor_pair([1, 3], first=7)]
    passes = [[["F0", "F1", "B0", "W0", "D1"], ["F0", "D0", "F1", "D1"]]]
    more = {"passes": passes} if schedule == "explicit" else {}
    replicas = [{"stages": stages, "micro_batches": [{"count": 2, "samples": 4}]}]
    plan = new_plan(w, replicas, schedule=schedule, **more)
    costs, stage = costs_of(w), plan.replicas[0].stages[0]
    whole = costs.passes(stage, (0, 7), 4)[1]
    later = costs.weight_seconds(stage, (0, 7), 4)
    of_whole = costs.reduces(stage, (0, 7), 4)[1].seconds
    of_inputs = costs.reduces_of_inputs(stage, (0, 7), 4).seconds
    assert of_inputs > 1.01 * of_whole > 0
    tasks = replay(plan, w).timeline.tasks
    for batch in (0, 1):
        mine = (tasks.kind == Kind.BACKWARD) & (tasks.unit == 0) & (tasks.micro_batch == batch)
        split = schedule == "zb-h1" or (schedule == "explicit" and batch == 0)
        expected = whole - later + of_inputs if split else whole + of_whole
        assert tasks.seconds[mine].sum() == pytest.approx(expected)
    (problem,) = pose_orders(plan, StageReplayer(w))
    latency = costs.reduces_of_inputs(stage, (0, 7), 4).latency
    assert problem.backward[0][0] == pytest.approx(whole - later + of_inputs + latency)
    assert problem.weight[0][0] == pytest.approx(later)


def test_tensor_groups_across_nodes_share_the_cards() -> None:
    """Two replicas whose tensor groups both span the nodes: their all-reduces take turns."""
    w = workload()
    pairs = [
        {"stages": [tensor_pair(pair)], "micro_batches": [{"count": 4, "samples": 1}]}
        for pair in ([0, 2], [1, 3])
    ]
    plan = made(pairs)
    both = costs_of(w).reduces(plan.replicas[0].stages[0], (0, 14), 1)
    assert [port for port, _ in both[0].ports] == [0, 1, 2, 3]
    busy = replay(plan, w).timeline.port_seconds
    once = 8 * sum(reduce.seconds * reduce.ports[0][1] for reduce in both)
    assert busy[0] == pytest.approx(once)
    # 16 all-reduces in a row, whoever makes them
    assert replay(plan, w).seconds > once


def test_gradients_are_as_wide_as_the_stack_has_them() -> None:
    """fp32 gradients of an fp16 model: twice the bytes before the update, as many behind it."""
    w = workload()
    wide = replace(w, stack=replace(w.stack, gradient_bytes=4))
    narrow = replace(w, stack=replace(w.stack, gradient_bytes=None))
    for zero, ratio in ((0, 2.0), (1, 1.5)):
        plan = made(two_pipelines(HALVES, devices=ACROSS), zero=zero)
        spent = [replay(plan, x).timeline.spent(Kind.COLLECTIVE).sum() for x in (narrow, wide)]
        assert spent[1] / spent[0] == pytest.approx(ratio, rel=1e-3)


def test_measured_fabrics_say_what_an_all_reduce_takes() -> None:
    nodes = [{"devices": 8, "device": "A100-SXM4-80GB", "intra_node_gbit_per_s": 2400,
              "network_gbit_per_s": 200}]  # fmt: skip
    w = small(nodes=nodes)
    costs = costs_of(w)
    node = w.cluster.nodes[0]
    eight = costs.ring([list(range(8))], 1e8)
    known = collective_seconds("all-reduce", 1e8, 8, node_fabric(node)).seconds
    assert eight.seconds == known
    assert len(eight.ports) == 16 and all(0 < share < 1 for _, share in eight.ports)
    assert eight.seconds > 14 * 1e8 / 8 / 300e9  # the ring by the datasheet


def test_nodes_share_the_uplink_of_their_switch() -> None:
    """Two replicas of two stages, the first stages under one switch and the second ones under
    another: their messages take turns at the links between the switches, which carry what one card
    does; under one switch they do not."""

    def seconds(**links: Any) -> float:
        nodes = [
            {
                "count": 4, "devices": 1, "device": "T4", "intra_node_gbit_per_s": 100,
                "network_gbit_per_s": 8, "network_latency_us": 0, **links,
            }
        ]  # fmt: skip
        workload = small(2, nodes=nodes)
        replicas = [
            {
                "stages": [
                    {"layers": [(0, 7)], "devices": [[i]]},
                    {"layers": [(7, 14)], "devices": [[2 + i]]},
                ],
                "micro_batches": [{"count": 1, "samples": 1}],
            }
            for i in range(2)
        ]
        run = replay(new_plan(workload, replicas), workload)
        tasks = run.timeline.tasks
        starts = run.timeline.start[(tasks.kind == Kind.TRANSFER) & (tasks.unit % 2 == 0)]
        sent = workload.profile.layers[6].activation_bytes / 1e9
        assert max(starts) - min(starts) == pytest.approx(sent if links else 0.0)
        return run.seconds

    alone = seconds()
    shared = seconds(nodes_per_switch=2, uplink_gbit_per_s=4)
    assert shared > alone


def test_devices_with_cards_of_their_own_share_none() -> None:
    """Two nodes of two devices. A message takes as long as on half of the network, and two do not
    wait for each other; a ring of all four passes on through both cards of each node."""

    def both(rails: bool) -> tuple[Costs, Workload]:
        node = {
            "count": 2, "devices": 2, "device": "T4", "intra_node_gbit_per_s": 800,
            "network_gbit_per_s": 8, "network_latency_us": 0, "intra_node_latency_us": 0,
            "rails": rails,
        }  # fmt: skip
        workload = small(2, nodes=[node])
        return costs_of(workload), workload

    (shared, _), (own, w) = both(rails=False), both(rails=True)
    size = 1e6
    assert shared.messages([(0, 2, size)]).seconds == pytest.approx(size / 1e9)
    assert own.messages([(0, 2, size)]).seconds == pytest.approx(2 * size / 1e9)
    two = [(0, 2, size), (1, 3, size)]
    assert shared.messages(two).seconds == own.messages(two).seconds == 2 * size / 1e9
    ports = [{port for port, _ in own.messages([pair]).ports} for pair in two]
    assert not ports[0] & ports[1] and all(len(each) == 2 for each in ports)
    # 6 rounds of a fourth of the bytes, through both cards at once, or one
    rings = [costs.ring([[0, 1, 2, 3]], size).seconds for costs in (shared, own)]
    assert rings == pytest.approx([6 * size / 4 / 1e9] * 2)
    pairs = [costs.ring([[0, 2], [1, 3]], size).seconds for costs in (shared, own)]
    assert pairs == pytest.approx([2 * size / 2 / 0.5e9] * 2)
    assert own.ring([[0, 2]], size).seconds == pytest.approx(
        2 * shared.ring([[0, 2]], size).seconds
    )
    replicas = [
        {
            "stages": [
                {"layers": [(0, 7)], "devices": [[0]]},
                {"layers": [(7, 14)], "devices": [[2]]},
            ],
            "micro_batches": [{"count": 2, "samples": 1}],
        }
    ]
    plan = new_plan(w, replicas)
    link = fullest_link(replay(plan, w), w)
    assert link is not None and "the card of device 0 sends at 4 Gbit/s" in link.text


def test_one_message_may_not_fill_a_card() -> None:
    """Two nodes of two devices with cards of 8 Gbit/s, of which one message reaches 2."""
    node = {
        "count": 2, "devices": 2, "device": "T4", "intra_node_gbit_per_s": 800,
        "network_gbit_per_s": 8, "network_latency_us": 0, "intra_node_latency_us": 0,
        "flow_gbit_per_s": 2,
    }  # fmt: skip
    w = small(2, nodes=[node])
    costs, size = costs_of(w), 1e6
    assert costs.messages([(0, 2, size)]).seconds == pytest.approx(size / 0.25e9)
    two = [(0, 2, size), (1, 3, size)]
    assert costs.messages(two).seconds == pytest.approx(size / 0.25e9)
    eight = [(a, b, size) for a in (0, 1) for b in (2, 3) for _ in range(2)]
    assert costs.messages(eight).seconds == pytest.approx(8 * size / 1e9)
    # 2 rounds of half of the bytes
    assert costs.ring([[0, 2]], size).seconds == pytest.approx(2 * size / 2 / 0.25e9)
    assert w.cluster.bandwidth()[0, 2] == 0.25e9 and w.cluster.bandwidth()[0, 1] == 100e9
    assert present(Inputs.of(w)).cluster.nodes[0].node() == w.cluster.nodes[0]
