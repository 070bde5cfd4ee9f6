"""The strategy `astra` of the planner: its plans stand up to the plan file's own checks and to the
search's numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes.workloads import cluster
from hetplan.cli.plan import proven_text
from hetplan.errors import UnsupportedError
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.result import Job, summary
from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.planner.astra import Astra, PoolProblem, plan_of
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.workload import make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.replay import replay
from hetplan.solvers.run import Options, Run
from present import present


def test_mixed_cluster_uses_every_device_once() -> None:
    workload = make_workload("gpt2-amp", example_cluster("amp-mixed"), 32)
    mixed, *alone = propose(Astra(), workload, Run())
    assert (
        mixed.status == "optimal"
        and mixed.plan is not None
        and mixed.closed_form_seconds is not None
    )
    assert [c.label for c in alone] == ["only-V100-SXM2-16GB", "only-T4"]
    assert mixed.plan.world_size == 16
    for replica in mixed.plan.replicas:
        for stage in replica.stages:
            assert len({mixed.plan.devices[d].type for d in stage.all_devices}) == 1
    blocks = [
        (mixed.plan.devices[s.all_devices[0]].type, s.layers[0][1] - s.layers[0][0])
        for s in mixed.plan.replicas[0].stages
    ]
    assert max(n for t, n in blocks if t == "T4") < max(n for t, n in blocks if t != "T4")
    for candidate in alone:
        assert candidate.closed_form_seconds is not None
        assert candidate.closed_form_seconds > mixed.closed_form_seconds
    capacity = workload.cluster.specs
    assert mixed.peak_bytes is not None
    for size, device in zip(mixed.peak_bytes, workload.cluster.devices, strict=True):
        assert 0 < size <= capacity[device.type].memory_bytes - workload.reserved_bytes


def test_a_homogeneous_plan_survives_its_file_and_its_peaks_leave_the_reserve_out() -> None:
    """The planner takes it off the limit: counted twice, a plan that fits would seem not to."""
    workload = make_workload("gpt2-medium", example_cluster("p3-4"), 16)
    (candidate,) = propose(Astra(), workload, Run())
    assert candidate.plan is not None and candidate.label == "homogeneous"
    assert Plan.model_validate_json(candidate.plan.model_dump_json()) == candidate.plan
    assert candidate.bound == candidate.objective == candidate.closed_form_seconds
    found = search(
        Job(workload.model, 16),
        (pool := homogeneous(offers_of_cluster(workload.cluster)[0])),
        space=PoolProblem(workload, "homogeneous", pool).plannable(),
        assumed=Assumptions(
            framework=workload.framework, reserved_bytes=0.0, profile=workload.profile
        ),
    )
    assert candidate.peak_bytes is not None and found.best is not None
    assert max(candidate.peak_bytes) == pytest.approx(max(found.best.stage_bytes))
    many = {**found.best.strategy, "virtual_pipeline_model_parallel_size": 25}
    with pytest.raises(UnsupportedError, match="virtual stages without layers"):
        plan_of(replace(found.best, strategy=many), workload, pool)
    stages = (("T4", 1), ("V100", 3), ("V100", 2), ("T4", 6))  # not in the order of the pool
    mixed = replace(found.best, stages=stages, segments=(("V100", 2, 5), ("T4", 2, 7)))
    assert "[1 x T4: 1 layer | 2 x V100: 5 layers | 1 x T4: 6 layers]" in summary(mixed)


def test_interleaved_strategies_become_interleaved_plans() -> None:
    workload = make_workload("gpt2-medium", example_cluster("p3-4"), 64)
    pool = homogeneous(offers_of_cluster(workload.cluster)[0])
    space = replace(PoolProblem(workload, "homogeneous", pool).plannable(), pipeline=(4,))
    found = search(Job(workload.model, 64), pool, space=space, top=1000)
    virtual = [
        c for c in found.top if c.strategy["virtual_pipeline_model_parallel_size"] is not None
    ]
    assert virtual
    for candidate in virtual[::20]:
        plan = PoolProblem(workload, "homogeneous", pool).to_plan(candidate)
        assert plan.schedule == "interleaved-1f1b"
        chunks = candidate.strategy["virtual_pipeline_model_parallel_size"]
        assert all(len(stage.layers) == chunks for stage in plan.replicas[0].stages)


def test_models_without_blocks_get_a_reason() -> None:
    workload = make_workload("vgg19", example_cluster("g4dn-4"), 16)
    for candidate in propose(Astra(), workload, Run()):
        assert candidate.plan is None and "takes transformers" in candidate.message


def test_degrees_of_a_mixture_are_planned_and_the_bound_covers_them() -> None:
    """Too many experts for one device: they are spread over ranks. Of the best by the formula the
    one with the shortest replay is proposed; nothing replays below the bound."""
    shape = llama(4, 1024, 16, 3584, kv_heads=8, experts=Experts(count=8, active=2))
    model = load_model(text_model("mixture", "test", 1024, shape), precision="bf16")
    node = {
        "count": 2, "devices": 4, "device": "A100-SXM4-80GB", "intra_node_gbit_per_s": 2400,
        "network_gbit_per_s": 800,
    }  # fmt: skip
    on = cluster(nodes=[node], devices={"A100-SXM4-80GB": {"memory_gib": 12}})
    workload = make_workload(model, on, 16)
    strategies = make_strategies("astra,joint", {"joint": {"seconds": 0.5}})
    planning = make_plans(workload, strategies, Run(Options(time_limit=600.0, threads=1)))
    (own,) = (c for c in planning.candidates if c.name == "astra/degrees")
    assert own.plan is not None and own.plan.degrees is not None and own.fits_memory
    assert own.plan.degrees.expert > 1 and own.replay is not None
    assert own.bound is not None and own.closed_form_seconds is not None
    assert own.bound <= own.closed_form_seconds * (1 + 1e-12)
    assert (own.status == "optimal") == (own.bound == own.closed_form_seconds)
    joint, chosen, further = (
        next(c for c in planning.candidates if c.name == f"joint/{name}")
        for name in ("auto", "schedules", "degrees")
    )
    better = present(further.predicted_seconds) < present(own.predicted_seconds)
    assert planning.best is (further if better else own) and further.plan is not None
    assert present(further.predicted_seconds) <= present(own.predicted_seconds)
    assert further.plan.degrees is not None
    assert further.bound is None and further.status == "feasible" and further.fits_memory
    assert joint.bound is not None and own.computing_alone is not None
    assert joint.plan is None or joint.plan.degrees is None
    assert planning.bound == min(present(chosen.bound), own.computing_alone)
    whole = max(present(chosen.bound), joint.bound)
    assert planning.bound_whole == min(whole, own.computing_alone)
    assert own.predicted_seconds is not None and planning.bound < own.predicted_seconds
    tighter = replace(own, computing_alone=joint.bound / 2)
    assert replace(planning, candidates=(tighter, joint, chosen)).bound == joint.bound / 2
    said = "no plan of stages, with context and expert ranks or without, is faster than"
    assert said in proven_text(own, planning)
    problem = PoolProblem(workload, "degrees", homogeneous(offers_of_cluster(on)[0]))
    space, pool = problem.plannable(), problem.pool
    (name, usable), *_ = workload.device_bytes().items()
    assumed = Assumptions(
        reserved_bytes=on.specs[name].memory_bytes - usable, profile=workload.profile,
        stack=workload.stack,
    )  # fmt: skip
    found = search(Job(model, 16), pool, space=space, assumed=assumed, top=8)
    each = [replay(problem.to_plan(c), workload) for c in found.top]
    assert sum(run.fits for run in each) > 1
    assert own.predicted_seconds == min(run.seconds for run in each if run.fits)


def test_degrees_of_a_mixture_are_planned_over_two_types_of_device() -> None:
    """Each stage on one type, the faster one with more blocks; no plan computes less than the
    bound."""
    shape = llama(6, 1024, 16, 3584, kv_heads=8, experts=Experts(count=8, active=2))
    model = load_model(text_model("mixture", "test", 1024, shape), precision="bf16")
    kinds = ("A100-SXM4-80GB", "H100-SXM5-80GB")
    nodes = [
        {
            "count": 1, "devices": 4, "device": kind, "intra_node_gbit_per_s": 2400,
            "network_gbit_per_s": 800,
        }
        for kind in kinds
    ]  # fmt: skip
    on = cluster(nodes=nodes, devices={kind: {"memory_gib": 12} for kind in kinds})
    workload = make_workload(model, on, 16)
    made = {c.name: c for c in propose(Astra(), workload, Run(Options(threads=1, time_limit=600)))}
    own = made["astra/degrees"]
    plan = present(own.plan)
    assert plan.degrees is not None and plan.degrees.expert > 1
    stages = plan.replicas[0].stages
    types = [{plan.devices[d].type for d in stage.all_devices} for stage in stages]
    assert all(len(kind) == 1 for kind in types) and set().union(*types) == set(kinds)
    blocks = {
        kind: sum(
            last - first
            for stage, of in zip(stages, types, strict=True)
            for first, last in stage.layers
            if of == {kind}
        )
        for kind in kinds
    }
    assert blocks[kinds[1]] > blocks[kinds[0]]
    replayed = replay(plan, workload)
    assert replayed.fits and present(own.computing_alone) < replayed.seconds
    others = [c for c in made.values() if c is not own and c.plan is not None]
    fitting = [run.seconds for c in others if (run := replay(present(c.plan), workload)).fits]
    assert all(replayed.seconds < seconds for seconds in fitting)


def test_layers_are_computed_where_they_suit_best() -> None:
    """Device-seconds by type and kind of layer: together they take less than either type's rate
    says."""
    work = np.array([[1.0, 9.0], [9.0, 1.0]])
    assert computing_alone(work, [1, 1], Options()) == pytest.approx(1.0)
    assert computing_alone(work[:1], [2], Options()) == pytest.approx(5.0)
    assert computing_alone(work, [1, 2], Options()) == pytest.approx(10 / 11)
