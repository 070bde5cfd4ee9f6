"""The strategy `hap`: programs of the planner's models, priced as their profiles say, and plans
that hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes.workloads import cluster, small_model
from hetplan.adapters.exports import EXPORTERS, export
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.hap.data import Communication, Compute, HapDecision
from hetplan.formulations.hap.pose import Posed, pose, priced, runs_that_fit
from hetplan.planner.candidate import Candidate
from hetplan.planner.explain import same_plan
from hetplan.planner.hap import Hap, HapSettings
from hetplan.planner.pictures.scene import scene
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import on_devices, replay_candidate
from hetplan.planner.strategy import make_strategies
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.programs.forms import WHOLE, Run as Operation
from hetplan.programs.networks import program_of
from hetplan.programs.speeds import profile_tables
from hetplan.programs.work import products_of
from hetplan.replays.chains import Settings
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run, Stopped

V100, T4 = {"device": "V100-SXM2-16GB", "devices": 2}, {"device": "T4", "devices": 2}


def on(*nodes: dict[str, Any]) -> Cluster:
    """A cluster of nodes given as its file has them."""
    links = {"intra_node_gbit_per_s": 80.0, "network_gbit_per_s": 10.0}
    return cluster(nodes=[{**links, **n} for n in nodes])


PRODUCTS = [
    "gpt2",
    "gpt2-medium",
    "llama2-7b",
    "llama3-8b",
    "llama-1.1b",
    "vgg19",
    "vit-base",
    "glm-67b",
]


@pytest.mark.parametrize("name", PRODUCTS)
def test_programs_and_profiles_count_the_same_products(name: str) -> None:
    """Layer by layer, forward; attention's mask is counted in full by both."""
    model = load_model(name)
    program = program_of(model, 2)
    gradients = program.needs_gradient()
    found = {layer.name: 0.0 for layer in model.layers}
    for node in program.computations:
        found[node.layer] += products_of(program, node, gradients).forward
    for layer in model.layers:
        # a class token and its positions are one patch more in the program's embedding
        tolerance = 0.01 if name.startswith("vit") else 1e-12
        assert found[layer.name] == pytest.approx(2 * layer.forward_flops(), rel=tolerance), (
            layer.name
        )


def test_priced_as_the_profile_says() -> None:
    """All work at a device's speed takes the profile's seconds, and each layer its part where one
    type is alone."""
    for nodes in ((V100,), (V100, T4)):
        workload = make_workload(small_model(), on(*nodes), 8)
        program = program_of(workload.model, 8)
        devices, weights = priced(workload, program)
        theory = pose(workload).theory
        whole = {
            run.node: triple
            for run, triple in zip(theory.instructions, theory.data.triples, strict=True)
            if isinstance(run, Operation) and isinstance(triple, Compute) and triple.fixed_flops
            and run.rule.output == WHOLE and not run.factors
        }  # fmt: skip
        layers: dict[str, float] = {}
        for node in program.computations:
            if node.name in whole:
                layers[node.layer] = layers.get(node.layer, 0.0) + whole[node.name].fixed_flops
        for device in devices:
            table = profile_tables(workload)[device.name]
            scale = 8 / table.micro_batch
            total = sum(layers.values()) / device.flops_per_second
            assert total == pytest.approx(scale * sum(table.layer_seconds()), rel=1e-9)
            if len(nodes) == 1:
                for name, seconds in zip(layers, table.layer_seconds(), strict=True):
                    assert layers[name] / device.flops_per_second == pytest.approx(
                        scale * seconds, rel=1e-9
                    )
        assert min(weights.values()) > 0


@pytest.fixture(scope="module")
def workload() -> Workload:
    """A small model on two V100 and two T4."""
    return make_workload(small_model(layers=3), on(V100, T4), 8)


@pytest.fixture(scope="module")
def candidates(workload: Workload) -> dict[str, Candidate]:
    """What the strategy proposes for it, by label."""
    return {c.label: c for c in propose(Hap(), workload, Run(Options(threads=1)))}


@pytest.fixture(scope="module")
def plan(candidates: dict[str, Candidate]) -> Plan:
    """The first of the strategy's plans for it."""
    return next(c.plan for c in candidates.values() if c.plan is not None)


def test_candidates_hold_and_are_replayed(
    workload: Workload, candidates: dict[str, Candidate]
) -> None:
    """Stages of both passes, the optimizer's step; even shares on devices that differ wait for the
    slow ones."""
    assert tuple(candidates) == ("auto", "paper", "dp-even", "dp-proportional")
    for candidate in candidates.values():
        if candidate.plan is None:
            assert candidate.message
            continue
        plan = Plan.model_validate_json(candidate.plan.model_dump_json())
        assert plan == candidate.plan and plan.schedule == "spmd" and plan.program is not None
        assert candidate.fits_memory and len(candidate.peak_bytes or ()) == 4
        assert candidate.objective is not None
        assert candidate.bound is None or candidate.bound <= candidate.objective * (1 + 1e-9)
        after = replay_candidate(candidate, workload)
        replayed = after.replay
        assert replayed is not None and replayed.by_device and len(replayed.owners) == 4
        assert after.predicted_seconds == replayed.seconds > (after.closed_form_seconds or np.inf)
        assert after.fits_memory and after.peak_bytes == pytest.approx(replayed.peak_bytes)
    auto, even = candidates["auto"], candidates["dp-even"]
    assert auto.objective is not None and auto.objective <= (even.objective or 0.0)
    # even ratios of 8 samples over 4 devices are whole: nothing is lost in whole units
    assert even.closed_form_seconds == pytest.approx(even.objective, rel=1e-12)
    even = replay_candidate(even, workload)
    assert even.replay is not None and even.closed_form_seconds is not None
    # equal work on each type: every stage waits for the T4, which also update more slowly
    params = sum(layer.param_bytes for layer in workload.profile.layers)
    update = max(costs_of(workload, "none").update_seconds(d, params) for d in range(4))
    assert even.predicted_seconds == pytest.approx(even.closed_form_seconds + update, rel=1e-9)
    busy = even.replay.timeline.busy
    assert busy[0] == busy[1] < busy[2] == busy[3]


def test_a_program_that_does_not_hold_stays_where_no_time_is_left(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the program is not searched again with tied weights held whole."""

    def stopped(*_: object, **__: object) -> None:
        raise Stopped

    run = Run(Options(threads=1))
    (problem,) = Hap().pose(workload, run)
    monkeypatch.setattr("hetplan.planner.hap.pose", stopped)
    monkeypatch.setattr(Posed, "fits", lambda *_: False)
    candidate = problem.solve(Hap.methods[-1], run)
    assert candidate is not None and candidate.plan is not None


def test_rankings_and_pictures_tell_devices(workload: Workload) -> None:
    """Of a program like devices share a row, and all join its collectives."""
    planning = make_plans(workload, [Hap()], Run(Options(threads=1)))
    best = planning.best
    assert best is not None and best.plan is not None and best.replay is not None
    explained = planning.explanation
    assert explained is not None and explained.busiest is not None
    parts = set(explained.critical)
    assert "collectives of the program" in parts
    assert parts <= {
        "collectives of the program",
        *(f"device {d} {does}" for d in range(4) for does in ("computes", "updates weights")),
    }
    slowest = int(np.argmax(best.replay.timeline.busy))
    assert explained.busiest.facts["device"] == slowest
    assert ("busiest", f"device {slowest}") in [
        (what, told.partition(" computes")[0]) for what, told in explained.table(workload).rows
    ]
    # another program of the same devices is another plan
    assert best.plan.program is not None and same_plan(best, best)
    shorter = best.plan.program.model_copy(
        update={"instructions": best.plan.program.instructions[:-1]}
    )
    assert not same_plan(
        best, replace(best, plan=best.plan.model_copy(update={"program": shorter}))
    )
    drawn = scene(best.plan, best.replay, workload)
    assert [(row.title, row.alike) for row in drawn.rows] == [
        ("device 0 (x2)", 2),
        ("device 2 (x2)", 2),
    ]
    assert all(row.communicates and row.computes for row in drawn.rows)
    assert best.plan.prediction is not None
    assert best.plan.prediction.predicted_seconds == replay(best.plan, workload).seconds


def test_parts_of_a_cluster_are_replayed_alike(workload: Workload) -> None:
    """A program on the second node takes what it takes where that node is all there is."""
    alone = replace(workload, cluster=workload.cluster.part([1]))
    candidate = replay_candidate(
        next(c for c in propose(Hap(), alone, Run()) if c.label == "dp-even"), alone
    )
    on_all = on_devices(candidate, workload, [2, 3])
    assert on_all.replay is not None and on_all.replay.seconds == candidate.predicted_seconds
    assert on_all.peak_bytes is not None and on_all.peak_bytes[:2] == (0.0, 0.0)


def test_a_program_that_is_not_the_models_is_refused(workload: Workload, plan: Plan) -> None:
    assert plan.program is not None
    renamed = plan.program.instructions[3].model_copy(update={"tensor": "elsewhere"})
    wrong = [*plan.program.instructions[:3], renamed, *plan.program.instructions[4:]]
    program = plan.program.model_copy(update={"instructions": wrong})
    with pytest.raises(
        InputError, match=r"instructions\[3\] is about an unknown tensor .got 'elsewhere'"
    ):
        replay(plan.model_copy(update={"program": program}), workload)


def test_programs_are_exported_to_the_own_runtime_alone(workload: Workload, plan: Plan) -> None:
    assert "-m hetplan run" in export(plan, "torchrun")
    for name in set(EXPORTERS) - {"torchrun"}:
        with pytest.raises(UnsupportedError, match=f"{name} cannot express SPMD programs"):
            export(plan, name)
    with pytest.raises(UnsupportedError, match="stand where the program has them"):
        replay(plan, workload, Settings(buckets=2))


def test_data_parallelism_by_hand(workload: Workload) -> None:
    """Even shares: the slower type's compute, one all-reduce for each operator with parameters, all
    of which every device holds."""
    posed = pose(workload)
    result = solve(family("hap"), posed.theory.data, "dp-even", Run())
    assert isinstance(result.decision, HapDecision) and result.objective is not None
    slow = min(d.flops_per_second for d in posed.theory.data.devices)
    work = sum(
        t.fixed_flops + t.shared_flops / 4
        for t in (posed.theory.data.triples[i] for i in result.decision.program)
        if isinstance(t, Compute)
    )
    syncs = [
        t
        for t in (posed.theory.data.triples[i] for i in result.decision.program)
        if isinstance(t, Communication)
    ]
    assert all("gradient" in t.instruction for t in syncs)
    size = sum(p.elements for p in posed.theory.program.parameters) * 2
    ring = 2 * 3 / 4 * size / (10e9 / 8)
    latency = sum(t.fixed_seconds for t in syncs) - ring
    assert latency == pytest.approx(
        len(syncs) * 3 * workload.cluster.latency().max(), abs=len(syncs) * 1.1e-6
    )
    assert result.objective == pytest.approx(work / slow + ring + latency, rel=1e-9)
    shards = posed.theory.decided(result.decision).shards
    assert all(shard.dimension is None for shard in shards.values())
    saved = sum(layer.saved_bytes for layer in workload.profile.layers) * 2  # samples per device
    expected = 16 * size / 2 + saved
    # single values (a mean loss, say) are whole everywhere
    assert posed.device_bytes(result.decision) == pytest.approx([expected] * 4, rel=0.01)


def test_runs_are_as_few_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of 64 samples in a device that holds the states and a little more."""
    workload = make_workload(small_model(layers=3), on(V100, T4), 64)
    assert runs_that_fit(workload) == 1
    saved = sum(layer.saved_bytes for layer in workload.profile.layers)
    # a V100 takes about 30 % of each run's samples
    for samples, runs in ((24.0, 1), (12.0, 2), (5.0, 4), (0.0, 16)):
        limit = workload.state_bytes + samples * saved
        monkeypatch.setattr(
            Workload,
            "device_bytes",
            lambda self, limit=limit: dict.fromkeys(self.cluster.types, limit),
        )
        assert runs_that_fit(workload) == runs
    posed = pose(workload, 16)
    plain = pose(workload, 1)
    assert posed.samples == 4
    sync = {
        t.instruction: t
        for t in posed.theory.data.triples
        if "All-Reduce gradient" in t.instruction
    }
    for triple in plain.theory.data.triples:
        if triple.instruction in sync:
            other = sync[triple.instruction]
            assert isinstance(triple, Communication) and isinstance(other, Communication)
            assert other.fixed_seconds * 16 == pytest.approx(triple.fixed_seconds)
    with pytest.raises(InputError, match=r"hap.steps: runs per iteration \(got 3"):
        pose(workload, 3)


def test_settings() -> None:
    (hap,) = make_strategies(["hap"], {"hap": {"seconds": 60.0, "steps": 2}})
    assert hap == Hap(HapSettings(seconds=60.0, steps=2))
    workload = make_workload(small_model(layers=1), on(V100, T4), 8)
    candidates = propose(hap, workload, Run(Options(threads=1)))
    plans = [c.plan for c in candidates if c.plan is not None]
    assert plans and all(p.replicas[0].micro_batches[0].count == 2 for p in plans)
    with pytest.raises(InputError, match="setting hap: steps"):
        make_strategies(["hap"], {"hap": {"steps": 0}})


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("llama2-70b", "infeasible", "one copy of the model states"),
        ("transgan-amp", "unknown", "no single-device program"),
    ],
)
def test_models_without_a_plan_say_why(model: str, status: str, message: str) -> None:
    candidates = propose(Hap(), make_workload(model, on(V100), 8), Run())
    assert [(c.status, c.plan) for c in candidates] == [(status, None)] * 4
    assert message in candidates[0].message


def test_plans_with_a_program_are_checked(plan: Plan) -> None:
    assert plan.program is not None
    good = plan.model_dump(mode="json")

    def refused(text: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=text):
            Plan.model_validate({**good, **changes}, strict=False)

    refused("program is given under 1f1b", schedule="1f1b")
    refused("program is missing under spmd", program=None)
    refused("zero is 1, expected 0", zero=1)
    samples = plan.replicas[0].samples
    unequal = [{"count": 1, "samples": samples - 1}, {"count": 1, "samples": 1}]
    refused(
        r"micro_batches\[1\]\.samples is 1, expected those of micro_batches\[0\]",
        replicas=[{**good["replicas"][0], "micro_batches": unequal}],
    )
    ratios = good["program"]["ratios"]
    refused("sums to", program={**good["program"], "ratios": [[0.5, 0.1, 0.1, 0.1]]})
    refused("expected one per device", program={**good["program"], "ratios": [[0.5, 0.5]]})
    first = {**good["program"]["instructions"][0], "segment": 1}
    refused(
        "expected less than the rows of ratios", program={"ratios": ratios, "instructions": [first]}
    )
    refused(
        "pattern",
        program={"ratios": ratios, "instructions": [{**first, "segment": 0, "after": "Gather"}]},
    )
