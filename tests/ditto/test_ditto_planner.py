"""The strategy `ditto`: templates become plans that hold, priced by Ditto's formula."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from ditto.ditto_cases import workload_on
from fakes.workloads import small_model
from hetplan.formulations import family
from hetplan.formulations.ditto.data import DittoDecision, DittoStage
from hetplan.formulations.ditto.pose import group_size, pose
from hetplan.planner.amp import DataParallel
from hetplan.planner.candidate import Candidate
from hetplan.planner.ditto import Ditto, DittoSettings, free_devices, place
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.planner.replan import replan
from hetplan.plans.plan import Plan
from hetplan.plans.templates import ReadyTemplates, TemplateStage
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Options, Run
from present import present

V100, T4 = {"device": "V100-SXM2-16GB", "devices": 2}, {"device": "T4", "devices": 4}


@pytest.fixture(scope="module")
def workload() -> Workload:
    """gpt2-medium on twelve V100 and four T4."""
    return make_workload("gpt2-medium", example_cluster("amp-mixed"), 32)


@pytest.fixture(scope="module")
def candidates(workload: Workload) -> dict[str, Candidate]:
    return {c.label: c for c in propose(Ditto(), workload, Run(Options(threads=1)))}


def template_price(workload: Workload, plan: Plan) -> float | None:
    """Ditto's price of a plan that is a template, by the evaluator."""
    (replica,) = plan.replicas
    stages = [
        DittoStage(
            first=stage.layers[0][0],
            last=stage.layers[0][1],
            type=plan.devices[stage.devices[0][0]].type,
            devices=len(stage.devices[0]),
        )
        for stage in replica.stages
    ]
    data = pose(workload, replica.micro_batches[0].samples)
    return evaluate(family("ditto"), data, DittoDecision(stages=stages)).objective


def test_templates_become_plans_that_hold(
    workload: Workload, candidates: dict[str, Candidate]
) -> None:
    assert tuple(candidates) == ("auto", "paper", "oobleck", "greedy-joined")
    best = candidates["auto"]
    assert best.status == "optimal" and best.bound is not None and best.objective is not None
    assert best.bound <= best.objective * (1 + 1e-9)
    assert candidates["paper"].plan is None and "as many layers" in candidates["paper"].message
    for candidate in candidates.values():
        if candidate.plan is None:
            continue
        plan = Plan.model_validate_json(candidate.plan.model_dump_json())
        assert plan == candidate.plan
        (replica,) = plan.replicas
        assert replica.samples == workload.global_batch
        assert candidate.objective == template_price(workload, plan)
        for stage in replica.stages:
            (group,) = stage.devices
            assert len({plan.devices[d] for d in group}) == 1  # one node of one type
            assert stage.tensor_shares == [1.0] * len(group)
        usable = workload.device_bytes()
        assert candidate.fits_memory and candidate.peak_bytes is not None
        for device, peak in zip(workload.cluster.devices, candidate.peak_bytes, strict=True):
            assert peak <= usable[device.type] * (1 + 1e-9)
        used = {d for stage in replica.stages for d in stage.all_devices}
        assert {d for d, peak in enumerate(candidate.peak_bytes) if peak} == used
    widths = [len(stage.devices[0]) for stage in best.plan.replicas[0].stages] if best.plan else []
    assert len(set(widths)) > 1  # the four T4 share the head: no plan of equal widths says that


@pytest.fixture(scope="module")
def both_types() -> Profile:
    """A profile of a small model on both types of device; nodes of any size can use it."""
    nodes = [{"device": name, "devices": 12} for name in ("T4", "P100-PCIE-16GB")]
    return workload_on(*nodes, model=small_model(layers=12)).profile


@settings(max_examples=30)
@given(st.data())
def test_every_template_finds_its_devices(both_types: Profile, draw: st.DataObject) -> None:
    """Any stages within the posed problem's devices are placed: whole groups in one node, no device
    twice."""
    sizes = draw.draw(st.lists(st.sampled_from([2, 4, 6, 8, 12]), min_size=1, max_size=4))
    w = workload_on(
        *(
            {"device": draw.draw(st.sampled_from(["T4", "P100-PCIE-16GB"])), "devices": n}
            for n in sizes
        ),
        model=small_model(layers=12),
        profile=both_types,
    )
    data = pose(w, 1)
    left = Counter({kind.name: kind.nodes * data.devices_per_node for kind in data.device_types})
    stages: list[DittoStage] = []
    while len(stages) < data.layers and left:
        name = draw.draw(st.sampled_from(sorted(left)))
        fitting = [x for x in (1, 2, 4) if x <= min(group_size(w), left[name])]
        x = draw.draw(st.sampled_from(fitting))
        stages.append(DittoStage(first=len(stages), last=len(stages) + 1, type=name, devices=x))
        left[name] -= x
        left = +left
    groups = place(stages, free_devices(w))
    taken = [device for group in groups for device in group]
    assert len(taken) == len(set(taken)) == sum(stage.devices for stage in stages)
    for stage, group in zip(stages, groups, strict=True):
        assert len(group) == stage.devices
        assert {w.cluster.devices[d].type for d in group} == {stage.type}
        assert len({w.cluster.devices[d].node for d in group}) == 1


def test_pipelines_from_several_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five nodes of one T4 under a model of which one device holds too little: a pipeline on two
    and one on three, the batch by speed. When nodes are lost, the same templates make the plan,
    and nothing is solved."""
    w = workload_on({"device": "T4", "devices": 1, "count": 5}, model="gpt2-large", batch=20)
    strategy = Ditto(DittoSettings(failures=1))
    (candidate,) = make_plans(w, [strategy], Run(Options(threads=1))).candidates
    plan = candidate.plan
    assert plan is not None and plan.templates is not None and candidate.fits_memory
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert sorted(len(replica.stages) for replica in plan.replicas) == [2, 3]
    two, three = sorted(plan.replicas, key=lambda replica: len(replica.stages))
    assert two.samples + three.samples == 20 and 1.2 < three.samples / two.samples < 2
    assert sorted(plan.ranks) == [0, 1, 2, 3, 4]

    def unwanted(*_: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr("hetplan.formulations.ditto.exact.solve", unwanted)
    one = present(replan(plan, w, [0], Run(Options(threads=1))).best).candidate.plan
    assert one is not None and one.origin == "ditto/templates" and one.templates == plan.templates
    assert [len(replica.stages) for replica in one.replicas] == [2, 2] and 0 not in one.ranks
    lost = [0, 1]  # more than the one failure asked for
    fewer = present(replan(one, w, lost, Run(Options(threads=1))).best).candidate.plan
    assert fewer is not None and [len(r.stages) for r in fewer.replicas] == [3]


def test_where_no_template_is_left_all_strategies_plan_again() -> None:
    w = workload_on({"device": "T4", "devices": 1, "count": 2}, model=small_model())
    layers = len(w.profile.layers)
    stages = [TemplateStage(first=0, last=layers, type="V100-SXM2-16GB", devices=1)]
    ready = ReadyTemplates(failures=0, samples=1, pipelines=[stages])
    (candidate,) = propose(DataParallel(), w, Run())
    plan = present(candidate.plan).model_copy(update={"templates": ready})
    again = replan(plan, w, [1], Run(Options(threads=1, time_limit=600)))
    assert present(again.best).candidate.strategy != "ditto" and len(again.choices) > 1


def test_memory_that_no_template_meets_has_a_reason() -> None:
    found = propose(
        Ditto(),
        workload_on({"device": "T4", "devices": 1}, model="llama2-7b"),
        Run(Options(threads=1)),
    )
    assert [c.status for c in found if c.method.exact] == ["infeasible"]
    assert all(c.plan is None and c.message for c in found)


def test_a_profile_without_single_devices_has_a_reason(workload: Workload) -> None:
    document = workload.profile.model_dump()
    tables = [table for table in document["tables"] if table["tensor"] > 1]
    profile = Profile.model_validate(document | {"tables": tables})
    found = propose(
        Ditto(), make_workload("gpt2-medium", workload.cluster, 32, profile=profile), Run()
    )
    assert all(c.plan is None and "times of single devices" in c.message for c in found)


def test_nothing_begins_after_an_interruption(workload: Workload) -> None:
    run = Run()
    run.cancel.set()
    assert all(c.plan is None and "not begun" in c.message for c in propose(Ditto(), workload, run))
