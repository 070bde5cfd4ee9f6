"""The replay against a second one that shares no code with it, on random tiny plans; and what the
rule for ties promises."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, get_args

import numpy as np
import pytest

from fakes.workloads import small
from hetplan.plans.making import new_plan
from hetplan.plans.passes import virtual_stages
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Noise, Settings
from hetplan.replays.replay import Replayer, replay
from hetplan.replays.simulator.pipeline import Sends
from hetplan.replays.simulator.tasks import simulate
from plain_replay import seconds_of
from quick import rest_wide
from random_orders import random_orders

LAYERS = 14


def workload(
    global_batch: int, uplinks: bool = False, rails: bool = False, flows: bool = False
) -> Workload:
    """That of `profiled` with so many samples."""
    return replace(profiled(uplinks, rails, flows), global_batch=global_batch)


@cache
def profiled(uplinks: bool, rails: bool, flows: bool) -> Workload:
    """gpt2 on three nodes: two V100s, four T4s with PCIe, one V100 with a slow card. uplinks: the
    first node and, in one entry of a node each, the last are under switches with slow links.
    rails: each of the first V100s and of the T4s has a card of its own. flows: one message of the
    first V100s or of the T4s does not fill their cards."""
    fast, slow = "V100-SXM2-16GB", "T4"
    nodes: list[dict[str, Any]] = [
        {"devices": 2, "device": fast, "intra_node_gbit_per_s": 170, "network_gbit_per_s": 10},
        {"devices": 4, "device": slow, "intra_node_gbit_per_s": 50, "network_gbit_per_s": 50},
        {"devices": 1, "device": fast, "intra_node_gbit_per_s": 170, "network_gbit_per_s": 1},
    ]
    if uplinks:
        nodes[0] |= {"nodes_per_switch": 1, "uplink_gbit_per_s": 4}
        nodes[2] |= {"nodes_per_switch": 1, "uplink_gbit_per_s": 0.5}
    for node in nodes[: 2 * rails]:
        node["rails"] = True
    for node in nodes[: 2 * flows]:
        node["flow_gbit_per_s"] = 0.3 * node["network_gbit_per_s"]
    return small(nodes=nodes)


def cuts(rng: Random, parts: int) -> list[int]:
    """Ends of consecutive ranges of layers."""
    return [0, *sorted(rng.sample(range(1, LAYERS), parts - 1)), LAYERS]


def random_plan(rng: Random, family: str) -> Plan:
    """A plan of a family: pipelines of groups of one to three devices, or replicas in step."""
    free = rng.sample(range(7), 7)
    replicas = rng.choice([1, 2])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved-1f1b"])
    zero = rng.choice([0, 0, 1])
    more: dict[str, Any] = {}
    chunks = rng.choice([2, 3]) if schedule == "interleaved-1f1b" and family == "pipelines" else 1
    if family != "pipelines":
        replicas, zero = rng.choice([2, 3]), rng.choice([1, 2, 3])
        schedule = rng.choice(["gpipe", "1f1b"])
    counts = rng.choice([1, 2, 4])
    made: list[dict[str, Any]] = []
    for _ in range(replicas):
        stages = 1 if family != "pipelines" else rng.choice([1, 2, 3])
        ends = cuts(rng, stages * chunks)
        devices: list[dict[str, Any]] = []
        for s in range(stages):
            wide, rows = 1, 1
            spare = len(free) - (stages - s) - 3 * (replicas - len(made) - 1)
            if family != "replicas" and spare > 0:
                wide, rows = rng.choice([(2, 1), (1, 2), (1, 1)])
            devices.append(
                {
                    "layers": [
                        (ends[c * stages + s], ends[c * stages + s + 1]) for c in range(chunks)
                    ],
                    "devices": [[free.pop() for _ in range(wide)] for _ in range(rows)],
                    "row_shares": [rng.choice([1.0, 2.0]) for _ in range(rows)],
                    "tensor_shares": rng.choice([[1.0, 1.0], [1.0, 2.0]]) if wide == 2 else [1.0],
                }
            )
        steps = counts if family != "pipelines" else rng.choice([1, 2, 4])
        batches = [(steps * stages if chunks > 1 else steps, rng.choice([1, 2, 3]))]
        if chunks == 1 and family == "pipelines" and rng.random() < 0.5:
            batches.append((rng.choice([1, 2]), rng.choice([1, 2, 4])))
        made.append(
            {
                "stages": devices,
                "micro_batches": [{"count": n, "samples": b} for n, b in batches],
            }
        )
    if family == "pipelines" and chunks == 1 and rng.random() < 0.5:
        schedule, more = split_schedule(rng, made)
    batch = sum(b["count"] * b["samples"] for r in made for b in r["micro_batches"])
    used = {d for r in made for s in r["stages"] for g in s["devices"] for d in g}
    if zero and family != "pipelines" and rng.random() < 0.5:
        more["zero_shares"] = [float(rng.choice([1, 2])) if d in used else 0.0 for d in range(7)]
    return new_plan(workload(batch), made, schedule=schedule, zero=zero, **more)


def split_schedule(rng: Random, replicas: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """(schedule, more fields of the plan) with split backward passes. Under random orders, the
    replicas become Vs at times."""
    if rng.random() < 0.5:
        return rng.choice(["zb-h1", "zb-h2"]), {}
    passes, on_a_v = [], rng.random() < 0.5
    for replica in replicas:
        stages = replica["stages"]
        S, steps = len(stages), sum(b["count"] for b in replica["micro_batches"])
        if on_a_v:
            ends = cuts(rng, 2 * S)
            for s, stage in enumerate(stages):
                back = (ends[2 * S - 1 - s], ends[2 * S - s])
                stage["layers"] = [(ends[s], ends[s + 1]), back]
        places = virtual_stages(S, 1 + on_a_v, folded=on_a_v)
        passes.append(random_orders(rng, places, steps, split=rng.choice([0.0, 0.5, 1.0])))
    return "explicit", {"passes": passes}


def random_settings(rng: Random, plan: Plan) -> Settings:
    """Half of the time the defaults."""
    chunks = plan.schedule not in ("gpipe", "1f1b")
    if rng.random() < 0.5:
        return Settings(prefetch=rng.choice([0, 1, 2]))
    return Settings(
        buckets=rng.choice([1, 3]),
        sends=rng.choice(get_args(Sends)[: 3 if chunks else 4]),
        exchange_seconds=rng.choice([0.0, 1e-4]),
        prefetch=rng.choice([0, 1, 2]),
    )


@pytest.mark.parametrize("family", ["pipelines", "replicas", "tensor replicas"])
@pytest.mark.parametrize("seed", rest_wide(range(17), 4))
def test_a_second_replay_agrees(family: str, seed: int) -> None:
    rng = Random(f"{family} {seed}")
    for draw in range(10):
        plan = random_plan(rng, family)
        settings = random_settings(rng, plan)
        w = workload(
            plan.workload.global_batch, uplinks=draw > 6, rails=draw % 2 == 0, flows=draw % 3 == 0
        )
        if draw % 3 == 0:  # gradients of another size than the weights
            w = replace(w, stack=replace(w.stack, gradient_bytes=4))
        again = seconds_of(
            plan, w, settings.sends, settings.exchange_seconds, settings.buckets, settings.prefetch
        )
        replayed, replayer = replay(plan, w, settings).seconds, Replayer(w, settings)
        assert replayed == pytest.approx(again, rel=1e-9), settings
        assert replayer.seconds(plan) == replayed
        assert 0 < replayer.seconds(plan, 0.0) <= again * (1 + 1e-9), settings


@pytest.mark.parametrize("seed", range(10))
def test_noise_that_nobody_can_measure_decides_nothing(seed: int) -> None:
    rng = Random(seed)
    for _ in range(10):
        plan = random_plan(rng, "pipelines")
        replayer = Replayer(workload(plan.workload.global_batch))
        tasks, plain = replayer.stages.tasks(plan), replayer.seconds(plan)
        draw = np.random.default_rng(seed).uniform
        for _ in range(5):
            noisy = replace(tasks, seconds=tasks.seconds * draw(1 - 1e-9, 1 + 1e-9, len(tasks)))
            assert simulate(noisy).seconds == pytest.approx(plain, rel=1e-6)


def test_robust_seconds_are_a_median_of_the_same_draws() -> None:
    plan = random_plan(Random(5), "pipelines")
    replayer = Replayer(workload(plan.workload.global_batch))
    plain, robust = replayer.seconds(plan), replayer.robust_seconds(plan)
    assert robust == replayer.robust_seconds(plan)
    assert robust != plain and robust == pytest.approx(plain, rel=0.02)
    assert replayer.robust_seconds(plan, Noise(share=0.0)) == plain
    assert replayer.robust_seconds(plan, Noise(seed=1)) != robust
