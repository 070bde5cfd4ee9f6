"""No bound is ever above a replay."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.formulations.joint.bound.driver import all_parts, lower_bound
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import (
    ANY_ORDER,
    STANDARD,
    WARM_UP,
    Lump,
    Parameters,
    Replicas,
)
from hetplan.formulations.joint.bound.tables import Homes, Relaxation
from hetplan.formulations.joint.data import JointData
from hetplan.plans.plan import MicroBatches, Plan, Replica, Stage
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Options, Run
from joint.enumeration import home_nodes, in_any_order, random_data, random_plan
from quick import rest_wide
from stopping import cancelled_after

LOOKS = 1000  # of a bound that rises: a quarter of a second
SLOW = [pytest.param(seed, 200, marks=pytest.mark.wide) for seed in range(100, 150)]


def homes_of(plan: Plan, data: JointData, of: Relaxation) -> Homes:
    """The nodes that hold some layer alone in this plan, as the bound counts them."""
    alone = home_nodes(plan)
    counts = np.zeros((3, len(of.types)), int)
    for n, node in enumerate(data.nodes):
        q, is_home = of.types.index(node.device), n in alone or not of.several
        alike = is_home and of.several
        counts[:, q] += (alike, node.devices * is_home, node.devices * (not is_home))
    nodes, home, other = (tuple(row.tolist()) for row in counts)
    chosen = tuple(
        sum(
            data.nodes[n].device == of.types[alike.q] and data.nodes[n].devices == alike.devices
            for n in alone
        )
        for alike in of.node_classes
    )
    return Homes(nodes, home, other, len(data.devices), chosen)


def lumps_with(rng: Random, b: int, g: int, most: int) -> list[Lump]:
    """One with this replica alone, and one with others beside it."""
    around = Lump(
        rng.randint(1, b),
        b + rng.randint(0, 2),
        rng.randint(1, g),
        min(g + rng.randint(0, 3), most),
    )
    return [Lump(b, b, g, g), around]


def refuted(
    rng: Random,
    plan: Plan,
    data: JointData,
    of: Relaxation,
    seconds: float,
    *,
    any_order: bool = False,
) -> list[str]:
    """What the bound says wrongly of the plan's replicas, at random prices: that none like them is
    as fast. any_order: by the inequalities that hold for any order of passes."""
    homes, alone, wrong = homes_of(plan, data, of), home_nodes(plan), []
    prices = np.array([[rng.uniform(0.2, 2.0) for _ in of.types] for _ in range(2)])
    tries = Parameters(states=rng.choice((1, 10_000)))
    whole = len(plan.replicas) == 1
    for replica in plan.replicas:
        P = 0.0
        for device in (d for stage in replica.stages for d in stage.all_devices):
            kind, node = data.devices[device]
            P += prices[int(of.several and node not in alone), of.types.index(kind)]
        b, g = max(batch.samples for batch in replica.micro_batches), replica.samples
        S, C = len(replica.stages), len(replica.stages[0].layers)
        with_chunks = S > 1 and C > 1
        most = g if whole else data.global_batch - 1
        for lump, cut in product(lumps_with(rng, b, g, most), (True, False)):
            in_rounds = plan.schedule == "interleaved-1f1b" and not any_order
            pairs = lump.fewest_samples(S if in_rounds else 1)
            assert pairs, lump
            of_class = Replicas(of, homes, prices, pairs, whole=whole, cut=cut, chunks=with_chunks)
            if of_class.work > P * seconds * (1 + 1e-9):
                wrong.append(f"{lump}, {cut}: too much")
            if with_chunks and any_order:
                if of_class.chunks_are_slower(seconds, P, S, C, tries, any_order=True):
                    wrong.append(f"{lump}, {cut}: {S} stages of {C} chunks in any order")
                continue
            if with_chunks:
                for turn, stage in product(tries.turns, tries.stages):
                    one = replace(tries, turns=(turn,), stages=(stage,))
                    if of_class.chunks_are_slower(seconds, P, S, C, one):
                        wrong.append(f"{lump}, {cut}: {S} stages of {C} chunks, {turn}, {stage}")
                if of_class.chunks_are_slower(seconds, P, S, C, tries):
                    wrong.append(f"{lump}, {cut}: {S} stages of {C} chunks")
                continue
            kinds = {"interleaved-1f1b", plan.schedule} if S > 1 else {*WARM_UP}
            for kind in {ANY_ORDER} if any_order else kinds:
                if of_class.chain_is_slower(kind, seconds, P, tries, exact=True):
                    wrong.append(f"{lump}, {cut}: {S} stages, {kind}")
    return wrong


@pytest.mark.parametrize(("seed", "plans"), [*((seed, 20) for seed in (*range(20), 42)), *SLOW])
def test_no_replica_is_faster_than_its_bound(seed: int, plans: int) -> None:
    rng = Random(seed)
    data = random_data(rng)
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    checked = 0
    for _ in range(10 * plans):
        plan = random_plan(rng, data)
        if plan is None or checked == plans:
            continue
        checked += 1
        seconds = replayer.seconds(plan)
        wrong = refuted(rng, plan, data, of, seconds * (1 + 1e-9))
        assert not wrong, plan.model_dump_json()
    assert checked


@pytest.mark.parametrize(("seed", "plans"), [*((seed, 3) for seed in (*range(12), 42)), *SLOW])
def test_no_replica_in_any_order_is_faster_than_its_bound(seed: int, plans: int) -> None:
    """Split passes, two chunks on a V and the best orders that are found, too."""
    rng = Random(seed)
    data = random_data(rng)
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    checked = 0
    for _ in range(10 * plans):
        plan = random_plan(rng, data)
        if plan is None or checked >= plans:
            continue
        for other in (plan, *in_any_order(rng, data, plan)):
            checked += 1
            seconds = replayer.seconds(other) * (1 + 1e-9)
            wrong = refuted(rng, other, data, of, seconds, any_order=True)
            assert not wrong, other.model_dump_json()
    assert checked


@pytest.mark.parametrize(
    ("sizes", "samples"),
    # no message is between the two chunks of the last stage; each card receives all samples twice
    [((1e3, 1e9, 1e3, 0.0), 1), ((1e6, 1e6, 1e6, 0.0), 8)],
)
def test_a_v_sends_less_than_chunks_in_turn(sizes: tuple[float, ...], samples: int) -> None:
    rng = Random(2)
    data = random_data(rng)
    L, [node] = len(sizes), [data.nodes[0].model_copy(update={"devices": 1})]
    table = data.tables[0].model_copy(update={"type": node.device, "tensor": 1, "repeated": {}})
    ones = {name: [1e-5] * L for name in ("forward_seconds", "backward_seconds")} | {
        name: [0.0] * L for name in ("forward_host_seconds", "backward_host_seconds")
    }
    layers = [
        data.layers[0].model_copy(
            update={"name": f"l{l}", "activation_bytes": size, "tied_param_bytes": 0.0}
        )
        for l, size in enumerate(sizes)
    ]
    slow = node.model_copy(update={"network_bandwidth": 1e8, "network_latency": 0.0})
    data = data.model_copy(
        update={
            "nodes": [slow, slow],
            "layers": layers,
            "tables": [table.model_copy(update=ones)],
            "global_batch": samples,
            "tensor_degrees": [1],
        }
    )
    stages = [
        Stage(layers=[(0, 1), (3, 4)], devices=[[0]]),
        Stage(layers=[(1, 2), (2, 3)], devices=[[1]]),
    ]
    batches = [MicroBatches(count=samples, samples=1)]
    plan = data.plan([Replica(stages=stages, micro_batches=batches)], schedule="zbv")
    of, seconds = Relaxation(data), ChainReplayer.of(data).seconds(plan) * (1 + 1e-9)
    for _ in range(5):
        assert not refuted(rng, plan, data, of, seconds, any_order=True)
    homes, parts = homes_of(plan, data, of), all_parts(of, Run(), 1e-9, STANDARD, any_order=True)
    like_it = [p for p in parts if p.homes.chosen == homes.chosen and not p.several]
    assert {p.chunks for p in like_it} == {False, True}
    nodes = NodeModel(of, seconds / 100, Run(Options(threads=1)))
    assert all(nodes.seconds(*part.case) <= seconds for part in like_it)
    assert lower_bound(of, cancelled_after(LOOKS), any_order=True) <= seconds


def nodes_of(of: Relaxation) -> NodeModel:
    """The model over nodes, in a unit that is no bound."""
    return NodeModel(of, 1e-9, Run(Options(threads=1)))


def with_slower_links(data: JointData, network: float, inside: float) -> JointData:
    """The instance with cards and links that are slower by these factors, so that plans spend their
    seconds there."""
    nodes = [
        node.model_copy(
            update={
                "network_bandwidth": node.network_bandwidth / network,
                "intra_bandwidth": node.intra_bandwidth / inside,
                "all_reduce": {},
            }
        )
        for node in data.nodes
    ]
    return data.model_copy(update={"nodes": nodes})


def busy_plans(data: JointData) -> Iterator[Plan]:
    """Plans that keep all devices busy: as many replicas as devices, as nodes, and a chain of
    stages over nodes and over devices, under every schedule."""
    layers, G = len(data.layers), data.global_batch
    kinds = data.devices
    nodes: list[list[int]] = [[] for _ in data.nodes]
    for device, (_, node) in enumerate(kinds):
        nodes[node].append(device)
    devices = [[device] for device in range(len(kinds))]
    for groups in (devices, nodes):
        parts = [G // len(groups) + (i < G % len(groups)) for i in range(len(groups))]
        replicas = [
            replica([group], [[(0, layers)]], samples, samples)
            for group, samples in zip(groups, parts, strict=True)
            if samples
        ]
        yield from plans_of_all_schedules(data, replicas, ("1f1b",))
        for b, chunks in product((1, 2, G), (1, 2)):
            virtual = len(groups) * chunks
            if virtual > layers:
                continue
            at = [layers * v // virtual for v in range(virtual + 1)]
            runs = [
                [(at[v], at[v + 1]) for v in range(s, virtual, len(groups))]
                for s in range(len(groups))
            ]
            schedules = ("gpipe", "1f1b", "interleaved-1f1b")[2 * (chunks > 1) :]
            yield from plans_of_all_schedules(data, [replica(groups, runs, G, b)], schedules)


def replica(groups: Any, runs: Any, samples: int, b: int) -> dict[str, Any]:
    """A replica whose stages have such devices, each a row group, and such runs of layers."""
    full, last = divmod(samples, b)
    return {
        "stages": [
            {
                "layers": layers,
                "devices": [[device] for device in group],
                "row_shares": [1.0] * len(group),
                "tensor_shares": [1.0],
            }
            for group, layers in zip(groups, runs, strict=True)
        ],
        "micro_batches": [
            {"count": n, "samples": size} for n, size in ((full, b), (1, last)) if n and size
        ],
    }


def plans_of_all_schedules(
    data: JointData, replicas: list[dict[str, Any]], schedules: Sequence[str]
) -> Iterator[Plan]:
    """The plans of these schedules that the rules of a plan file allow."""
    for schedule, zero in product(schedules, (0, 1)):
        with contextlib.suppress(ValidationError):
            yield data.plan(replicas, schedule=schedule, zero=zero, recomputation="none")


@pytest.mark.parametrize(("network", "inside"), [(1, 1), (30, 1), (30, 100), (1000, 1)])
@pytest.mark.parametrize("seed", range(100, 150))
def test_no_plan_is_faster_than_its_nodes(seed: int, network: float, inside: float) -> None:
    """With the plan's own homes, and with none told."""
    rng = Random(seed)
    data = with_slower_links(random_data(rng), network, inside)
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    nodes = node_model(of)
    drawn = (random_plan(rng, data) for _ in range(20))
    for plan in (*busy_plans(data), *drawn):
        if plan is None:
            continue
        seconds = replayer.seconds(plan) * (1 + 1e-9)
        several, chunks = len(plan.replicas) > 1, len(plan.replicas[0].stages[0].layers) > 1
        homes = homes_of(plan, data, of)
        assert nodes.seconds(homes, several, chunks) <= seconds, plan.model_dump_json()
        assert nodes.seconds(homes._replace(chosen=()), several, chunks) <= seconds


def even_data(
    nodes: Sequence[int], layers: int, batch: int, *, network: float, inside: float, tied: bool
) -> JointData:
    """Nodes of one type with so many devices; layers that take 1 ms and 1.5 ms a sample, and have
    1 MB of weights and of activations; tied weights are larger, and activations small beside them.
    network, inside: bytes per second."""
    weights = 1e7 if tied else 1e6
    drawn = random_data(Random(5), devices=2, layers=2)
    node = drawn.nodes[0].model_copy(
        update={
            "network_bandwidth": network, "network_latency": 0.0, "intra_bandwidth": inside,
            "intra_latency": 0.0, "all_reduce": {}, "device": "slow",
        }
    )  # fmt: skip
    host = [0.0] * layers
    tables = [
        drawn.tables[0].model_copy(
            update={
                "type": "slow", "tensor": 1, "micro_batch": b, "repeated": {},
                "forward_seconds": [1e-3 * b] * layers, "backward_seconds": [1.5e-3 * b] * layers,
                "forward_host_seconds": host, "backward_host_seconds": host,
            }
        )
        for b in (1, 2)
    ]  # fmt: skip
    every = [
        drawn.layers[0].model_copy(
            update={
                "name": f"l{i}", "param_bytes": weights, "tensor_bytes": 0.0,
                "activation_bytes": 1e3 if tied else 1e6,
                "tied_param_bytes": weights if tied and i == layers - 1 else 0.0,
            }
        )
        for i in range(layers)
    ]  # fmt: skip
    room = drawn.types["slow"].model_copy(update={"memory_bytes": 1e12})
    return drawn.model_copy(
        update={
            "nodes": [node.model_copy(update={"devices": count}) for count in nodes],
            "types": {"slow": room}, "layers": every, "tables": tables, "global_batch": batch,
            "tensor_degrees": [1],
        }
    )  # fmt: skip


def node_model(of: Relaxation) -> NodeModel:
    """With what computing alone takes as its unit, as the bound has it."""
    options = Options(threads=1)
    work = of.data.global_batch * of.least_works
    return NodeModel(of, computing_alone(work, of.counts, options), Run(options))


HALVES = [[(0, 3)], [(3, 6)]]
TURNS = [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]


@pytest.mark.parametrize(
    ("why", "nodes", "network", "inside", "tied", "schedule", "replicas", "attained"),
    [
        # The card of either node receives the messages, and nothing else takes time.
        ("chain", (1, 1), 1e7, 1e4, False, "1f1b", [replica([[0], [1]], HALVES, 16, 1)], 0.8),
        # Every round of chunks enters each node again.
        (
            "chunks", (1, 1), 1e7, 1e4, False, "interleaved-1f1b",
            [replica([[0], [1]], TURNS, 16, 1)], 0.7,
        ),
        # All devices hold all layers, and compute them all the time.
        (
            "data parallelism", (4, 4), 1e11, 1e11, False, "1f1b",
            [replica([[device]], [[(0, 6)]], 2, 2) for device in range(8)], 0.9,
        ),
        # One node holds the first layer and the last one, which share weights.
        (
            "tied weights", (2, 1), 1e7, 1e11, True, "1f1b",
            [replica([[0], [1]], HALVES, 16, 1)], 0.3,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_programme_over_nodes_is_near_plans_that_it_describes(
    why: str, nodes: tuple[int, ...], network: float, inside: float, tied: bool, schedule: str,
    replicas: list[dict[str, Any]], attained: float,
) -> None:  # fmt: skip
    data = even_data(nodes, 6, 16, network=network, inside=inside, tied=tied)
    of = Relaxation(data)
    plan = data.plan(replicas, schedule=schedule, zero=0, recomputation="none")
    seconds = ChainReplayer.of(data).seconds(plan)
    several, chunks = len(replicas) > 1, schedule == "interleaved-1f1b"
    model = node_model(of)
    bound = model.whole(homes_of(plan, data, of), several, chunks, 20)
    assert attained * seconds <= bound <= seconds * (1 + 1e-9), (why, bound / seconds)


def test_one_of_several_copies_of_weights_is_joined_alone() -> None:
    """A large copy stays beside the first layer, and a small one is on another node."""
    data = even_data((1, 1), 3, 2, network=1e7, inside=1e11, tied=True)
    copies = [0.0, 9e6, 1e5]  # bytes
    layers = [
        layer.model_copy(update={"tied_param_bytes": size})
        for layer, size in zip(data.layers, copies, strict=True)
    ]
    data = data.model_copy(update={"layers": layers})
    stages = replica([[0], [1]], [[(0, 2)], [(2, 3)]], 2, 1)
    plan = data.plan([stages], schedule="1f1b", zero=0, recomputation="none")
    of, seconds = Relaxation(data), ChainReplayer.of(data).seconds(plan)
    bound = node_model(of).whole(homes_of(plan, data, of), False, False, 20)
    assert 0 < bound <= seconds < 0.1


def test_a_path_need_not_return_to_copies_in_the_middle() -> None:
    """The second layer has a copy of the first one's weights, on the first node."""
    data = even_data((1, 1), 3, 2, network=1e7, inside=1e11, tied=True)
    layers = [
        layer.model_copy(update={"tied_param_bytes": 1e7 if l == 1 else 0.0})
        for l, layer in enumerate(data.layers)
    ]
    data = data.model_copy(update={"layers": layers})
    stages = replica([[0], [1]], [[(0, 2)], [(2, 3)]], 2, 1)
    plan = data.plan([stages], schedule="1f1b", zero=0, recomputation="none")
    seconds = ChainReplayer.of(data).seconds(plan)
    assert lower_bound(Relaxation(data), cancelled_after(LOOKS)) <= seconds < 0.1


@pytest.mark.parametrize("seed", rest_wide(range(10), 4))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    rng = Random(seed)
    data = random_data(rng, batch=6)
    replayer = ChainReplayer.of(data)
    plans = (random_plan(rng, data) for _ in range(200))
    best = min(replayer.seconds(plan) for plan in plans if plan is not None)
    bound = lower_bound(Relaxation(data), cancelled_after(LOOKS))
    assert 0.02 * best < bound <= best


@pytest.mark.parametrize("seed", rest_wide(range(10), 1))
def test_no_plan_in_any_order_is_faster_than_the_bound(seed: int) -> None:
    rng = Random(seed)
    data = random_data(rng, batch=6)
    replayer, best = ChainReplayer.of(data), math.inf
    for plan in filter(None, (random_plan(rng, data) for _ in range(20))):
        for other in (plan, *in_any_order(rng, data, plan)):
            best = min(best, replayer.seconds(other))
    bound = lower_bound(Relaxation(data), cancelled_after(LOOKS), any_order=True)
    assert 0.02 * best < bound <= best


def test_replicas_of_a_single_micro_batch_are_among_the_plans() -> None:
    """Where a micro-batch takes as long for all samples as for one, they are the fastest."""
    data = random_data(Random(1), devices=4, layers=5, batch=8)
    tables = [table.model_copy(update={"micro_batch": 64}) for table in data.tables]
    first = {(table.type, table.tensor): table for table in tables}
    data = data.model_copy(update={"tables": list(first.values()), "global_batch": 8})
    rng, replayer = Random(2), ChainReplayer.of(data)
    plans = [plan for plan in (random_plan(rng, data) for _ in range(400)) if plan is not None]
    fastest = min(plans, key=replayer.seconds)
    several = [plan for plan in plans if all(r.steps > 1 for r in plan.replicas)]
    assert {replica.steps for replica in fastest.replicas} == {1}
    best = replayer.seconds(fastest)
    assert best < 0.7 * min(replayer.seconds(plan) for plan in several)
    assert 0.5 * best < lower_bound(Relaxation(data), cancelled_after(LOOKS)) <= best


def test_types_that_suit_different_layers_are_not_taken_for_slow_ones() -> None:
    """A layer takes 1 ms on one type and 100 ms on the other, the next one the other way round: a
    pipeline of both types is far faster than whole samples on each."""
    data = random_data(Random(5), devices=1, layers=2, batch=8)
    (node,) = data.nodes
    near = {"network_bandwidth": 1e12, "network_latency": 0.0, "devices": 1, "all_reduce": {}}
    nodes = [node.model_copy(update={"device": kind, **near}) for kind in ("slow", "fast")]
    first = next(iter(data.types.values()))
    room = first.model_copy(update={"memory_bytes": 1e12})
    seconds = {"slow": [1e-3, 1e-1], "fast": [1e-1, 1e-3]}
    host = {"forward_host_seconds": [0.0, 0.0], "backward_host_seconds": [0.0, 0.0]}
    tables = [
        data.tables[0].model_copy(
            update={
                "type": kind, "tensor": 1, "micro_batch": 1, "repeated": {},
                "forward_seconds": row, "backward_seconds": row, **host,
            }
        )
        for kind, row in seconds.items()
    ]  # fmt: skip
    layers = [layer.model_copy(update={"tied_param_bytes": 0.0}) for layer in data.layers]
    data = data.model_copy(
        update={
            "nodes": nodes, "types": dict.fromkeys(seconds, room), "tables": tables,
            "layers": layers, "global_batch": 8, "tensor_degrees": [1],
        }
    )  # fmt: skip
    rng, replayer = Random(1), ChainReplayer.of(data)
    plans = (random_plan(rng, data) for _ in range(400))
    best = min(replayer.seconds(plan) for plan in plans if plan is not None)
    bound = lower_bound(Relaxation(data), cancelled_after(LOOKS))
    assert best < 0.1  # whole samples on each device take 0.8 s
    assert 0.016 * (1 - 1e-6) <= bound <= best
