"""Machines as virtual devices: what a collective of three steps takes, what one GPU in each machine
leaves as it is, and plans whose shares are equal inside machines."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.workloads import cluster
from hetplan.errors import InputError
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.pose import pose
from hetplan.planner.hap import SpmdProblem
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.programs.links import Links, ring, three_steps
from hetplan.solvers.run import Options, Run

SPEEDS = ("all_gather", "broadcast", "all_reduce", "reduce_scatter", "all_to_all")


def on(counts: list[int], kinds: list[str]) -> Workload:
    """GPT-2 on nodes of so many devices of these kinds."""
    nodes = [
        {
            "devices": count,
            "device": kind,
            "intra_node_gbit_per_s": 100,
            "network_gbit_per_s": 10,
        }
        for count, kind in zip(counts, kinds, strict=True)
    ]
    made = cluster(nodes=nodes)
    return make_workload(load_model("gpt2", sequence=128), made, 16)


def test_three_steps_by_hand() -> None:
    """1000 bytes: 1 s inside, between at 500 bytes/s for an all-reduce of half the ring's speed,
    1 s inside."""
    links = ring(2, 500.0, latency=0.0)
    assert links.all_reduce == 500.0
    assert three_steps(links, 1000.0).price("All-Reduce", 1000.0).fixed == pytest.approx(4.0)
    free: Links = three_steps(links, np.inf)
    assert [getattr(free, name) for name in SPEEDS] == [getattr(links, name) for name in SPEEDS]


def test_machines_of_one_device_are_devices() -> None:
    workload = on([1, 1, 1], ["V100-SXM2-16GB", "V100-SXM2-16GB", "T4"])
    assert pose(workload, 1, machines=True).theory.data == pose(workload, 1).theory.data


def test_a_machine_is_as_fast_as_its_devices_and_writes_the_same_program() -> None:
    workload = on([2, 4], ["V100-SXM2-16GB", "T4"])
    flat, machines = pose(workload, 1), pose(workload, 1, machines=True)
    assert [d.flops_per_second for d in machines.theory.data.devices] == [
        sum(d.flops_per_second for d in flat.theory.data.devices[:2]),
        sum(d.flops_per_second for d in flat.theory.data.devices[2:]),
    ]
    assert machines.theory.instructions == flat.theory.instructions
    kept, saved = machines.theory.holding, flat.theory.holding
    assert kept is not None and saved is not None
    assert kept.saved == {name: size / 2 for name, size in saved.saved.items()}


def test_the_part_of_a_machine_is_divided_over_its_devices() -> None:
    workload = on([2, 4], ["V100-SXM2-16GB", "T4"])
    flat, machines = pose(workload, 1), pose(workload, 1, machines=True)
    problem = SpmdProblem(flat, machines, search_seconds=1.0, posing_seconds=0.0)
    decision = problem.on_every_device(HapDecision(program=[0], ratios=[[0.4, 0.6]]))
    assert decision.ratios == [pytest.approx([0.2, 0.2, 0.15, 0.15, 0.15, 0.15])]


@pytest.mark.wide
def test_plans_share_equally_inside_machines() -> None:
    workload = on([2, 2], ["V100-SXM2-16GB", "T4"])
    settings = {"hap": {"devices": "machines", "seconds": 600.0}}
    planning = make_plans(workload, make_strategies("hap", settings), Run(Options(time_limit=600)))
    for candidate in planning.candidates:
        if candidate.plan is None:  # a busy machine leaves the later methods no time
            continue
        assert candidate.plan.program is not None
        for first, second, third, fourth in candidate.plan.program.ratios:
            assert first == second and third == fourth
    auto = next(c for c in planning.candidates if c.method.name == "auto")
    assert auto.plan is not None and auto.replay is not None
    assert "of machines as devices" in auto.message


def test_measured_collectives_are_not_of_machines() -> None:
    workload = on([2, 2], ["V100-SXM2-16GB", "T4"])
    settings = {"hap": {"devices": "machines", "collectives": "links.json"}}
    with pytest.raises(InputError, match="measured collectives are between GPUs"):
        make_plans(workload, make_strategies("hap", settings), Run(Options(time_limit=5)))
