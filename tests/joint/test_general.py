"""The model for general solvers against all plans of tiny instances, and its parts.

All 200: pytest -m wide tests/joint/test_general.py
"""

import math
from dataclasses import replace
from random import Random

import pytest

from hetplan.errors import UnsupportedError
from hetplan.formulations.joint import general
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import design_of
from hetplan.formulations.joint.evaluate import evaluate
from hetplan.formulations.joint.general import Master, Parameters, solve_by
from hetplan.formulations.joint.ways import ReplicaWay
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.run import Options, Run, Stop
from joint.enumeration import all_plans, random_data, random_plan
from joint.test_exact import tightened

QUICK = [
    pytest.param(seed, 2, 3, 3, marks=pytest.mark.wide if seed >= 5 else ()) for seed in range(10)
]
SLOW = [pytest.param(seed, 3, 3, 3, marks=pytest.mark.wide) for seed in range(2000, 2200)]


def run(limit: float = 120) -> Run:
    return Run(Options(time_limit=limit))


def drawn(seed: int, devices: int, layers: int, batch: int) -> JointData:
    """Several devices and samples. In half of the instances several types, and links a thousand
    times as fast, so that unlike replicas pay."""
    rng, data, odd = Random(seed), None, seed % 2
    while data is None or data.global_batch == 1 or len({kind for kind, _ in data.devices}) <= odd:
        data = tightened(rng, random_data(rng, devices=devices, layers=layers, batch=batch))
        if len(data.devices) == 1:
            data = None
    faster = 1000.0**odd
    links = ("intra_bandwidth", "network_bandwidth")
    nodes = [
        node.model_copy(update={name: faster * getattr(node, name) for name in links})
        for node in data.nodes
    ]
    return data.model_copy(update={"nodes": nodes})


@pytest.mark.parametrize(("seed", "devices", "layers", "batch"), [*QUICK, *SLOW])
def test_equal_to_full_enumeration(seed: int, devices: int, layers: int, batch: int) -> None:
    data = drawn(seed, devices, layers, batch)
    replayer = Master(data, run()).space(data.global_batch).replayer
    replays = (replayer.replay(plan) for plan in all_plans(data))
    best = min((replay.seconds for replay in replays if replay.fits), default=None)
    for method in ("cp-sat-linear", "milp"):
        outcome = solve_by(method, data, run())
        assert outcome.stop is (Stop.INFEASIBLE if best is None else Stop.OPTIMAL)
        if outcome.decision is not None:
            assert best == pytest.approx(evaluate(data, outcome.decision).objective, rel=1e-9)
            assert best == pytest.approx(outcome.bound, rel=1e-6)


@pytest.mark.parametrize("seed", range(300, 315))
def test_no_plan_is_faster_than_any_of_its_replicas(seed: int) -> None:
    rng = Random(seed)
    data = random_data(rng, devices=4, layers=5, batch=6)
    master, checked = Master(data, run()), 0
    for plan in filter(None, (random_plan(rng, data) for _ in range(30))):
        design = design_of(plan)
        if len(design.pipelines) == 1:
            continue
        replay = master.replay(design)
        rounds = design.schedule == "interleaved-1f1b"
        steps = design.pipelines[0].steps if design.zero > 1 else 0
        layout = replace(
            design,
            pipelines=tuple(
                replace(
                    pipeline,
                    cuts=(),
                    micro_batch=1,
                    samples=steps or (len(pipeline.groups) if rounds else 1),
                )
                for pipeline in design.pipelines
            ),
        )
        for i, pipe in enumerate(design.pipelines):
            least = master.least(ReplicaWay(layout, i, pipe, 0.0))
            assert least <= replay.seconds * (1 + 1e-9) or not replay.fits, plan.model_dump_json()
            checked += least < math.inf
    assert checked or len(data.devices) == 1 or data.global_batch == 1


def test_a_time_limit_leaves_the_best_plan_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_data(Random(19), devices=3, layers=4, batch=3)
    least, whole = Master.least, solve_by("cp-sat-linear", data, run())
    assert whole.bound is not None

    def stops(self: Master, way: ReplicaWay) -> float:
        if self.best is not None:
            self.run.cancel.set()
        return least(self, way)

    monkeypatch.setattr(Master, "least", stops)
    outcome = solve_by("cp-sat-linear", data, run())
    assert outcome.stop is Stop.INTERRUPTED and outcome.decision is not None
    assert outcome.bound is not None and 0 < outcome.bound <= whole.bound
    assert evaluate(data, outcome.decision).objective is not None


@pytest.mark.parametrize("parameters", [Parameters(devices=2), Parameters(ways=100)])
def test_what_is_not_small_is_refused(parameters: Parameters) -> None:
    data = random_data(Random(19), devices=3, layers=4, batch=3)
    with pytest.raises(UnsupportedError, match="too many ways to run replicas"):
        solve_by("milp", data, run(), parameters)


@pytest.mark.parametrize("stop", [Stop.LIMIT, Stop.ERROR])
def test_a_solver_without_an_answer_leaves_its_message_and_a_bound(
    stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(method: str, model: object, run: Run, report: object) -> ModelAnswer:
        return ModelAnswer(stop=stop, solver="highs", message="highs did not stop in time")

    data = drawn(0, 2, 3, 3)
    optimum = solve_by("milp", data, run()).bound
    monkeypatch.setattr(general, "minimise", silent)
    outcome = solve_by("pyomo", data, run())
    assert outcome.stop is stop and outcome.message == "highs did not stop in time"
    assert outcome.bound is not None and optimum is not None
    assert 0 < outcome.bound <= optimum * (1 + 1e-9)
