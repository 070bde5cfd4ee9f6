"""The constraint model against all plans of tiny instances, and its price of single plans.

All: pytest -m wide tests/joint/test_cp.py
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from hetplan.formulations.joint import cp
from hetplan.formulations.joint.cp import Parameters, Variables, build, longest, read, solve
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import decision_of, evaluate
from hetplan.formulations.joint.prices import Prices, Run as Layers, computing_alone
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.general import minimise
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.run import Options, Run, Stop, Stopped
from joint.enumeration import all_plans, random_data, random_plan
from joint.test_exact import tightened
from quick import rest_wide
from stopping import cancelled_after, over

TINY = [
    pytest.param(seed, 2, marks=pytest.mark.wide if seed >= 108 else ()) for seed in range(100, 400)
]


def run() -> Run:
    return Run(Options(time_limit=120, threads=2))


def small(seed: int, batch: int) -> JointData:
    """At most two devices and three layers; some have too little memory."""
    rng = Random(seed)
    return tightened(rng, random_data(rng, devices=2, layers=3, batch=batch))


@pytest.mark.parametrize(("seed", "batch"), TINY)
def test_equal_to_full_enumeration(seed: int, batch: int) -> None:
    data = small(seed, batch)
    replayer = ChainReplayer.of(data)
    replays = [replayer.replay(plan) for plan in all_plans(data)]
    best = min((replay.seconds for replay in replays if replay.fits), default=None)
    assert computing_alone(data) <= min(replay.seconds for replay in replays)
    outcome = solve(data, run())
    assert outcome.stop is (Stop.INFEASIBLE if best is None else Stop.OPTIMAL)
    if outcome.decision is not None:
        assert best == pytest.approx(evaluate(data, outcome.decision).objective, rel=1e-6)
        assert best == pytest.approx(outcome.bound, rel=1e-6)


def price(data: JointData, decision: JointDecision, *, free: bool = False) -> float | None:
    """The model's seconds of a plan; None where the model calls it infeasible."""
    prices = Prices(data)
    heads = [replica.stages[0].all_devices for replica in decision.replicas]
    order = sorted(range(len(heads)), key=lambda i: (len(heads[i]), heads[i]))  # (12)
    replicas = [decision.replicas[i] for i in order]
    decision = decision.model_copy(update={"replicas": replicas})
    v = build(data, prices, Run(), longest(prices), free=free)
    choose(v, decision)
    answer = minimise("cp-sat", v.model, Run(Options(threads=1, time_limit=120)))
    if answer.stop is Stop.INFEASIBLE:
        return None
    assert answer.stop is Stop.OPTIMAL
    assert evaluate(data, read(v, answer)) == evaluate(data, decision)
    return answer.objective


def choose(v: Variables, decision: JointDecision) -> None:
    """Fix the variables of a plan."""
    cp, s = v.model.cp, 0
    chunks = len(decision.replicas[0].stages[0].layers)
    fixed = {v.schedule: ("gpipe", "1f1b", "interleaved-1f1b").index(decision.schedule)}
    fixed |= {v.chunks: chunks, v.zero: decision.zero}
    fixed |= {v.mode: v.prices.data.modes.index(decision.recomputation)}
    for replica in decision.replicas:
        for j, stage in enumerate(replica.stages):
            rows = tuple(map(tuple, stage.devices))
            group = next(q for q, each in enumerate(v.prices.groups) if each.rows == rows)
            fixed |= {v.opens[s]: int(j == 0), v.samples[s]: replica.samples}
            fixed |= {v.size[s]: max(batch.samples for batch in replica.micro_batches)}
            for c, (first, last) in enumerate(stage.layers):
                fixed[v.run[s, c]] = v.prices.runs.index(Layers(group, first, last))
            s += 1
    fixed |= {v.used[t]: 0 for t in range(s, v.D)}
    for variable, value in fixed.items():
        cp.add(variable == value)


def plans(seed: int, count: int) -> tuple[JointData, list[Plan]]:
    """Data with unlike devices, so that nothing is symmetrical, and random plans that share rows
    evenly."""
    rng = Random(seed)
    while True:
        data = random_data(rng, devices=3, layers=4, batch=4)
        nodes = [node.model_copy(update={"devices": 1}) for node in data.nodes]
        data = data.model_copy(update={"nodes": nodes, "tensor_degrees": [1]})
        if len(nodes) > 1:
            break
    drawn: list[Plan] = []
    while len(drawn) < count:
        plan = random_plan(rng, data)
        if plan is None:
            continue
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        level = max(data.framework.pipeline_levels)
        in_order = all(stage.all_devices == sorted(stage.all_devices) for stage in stages)
        evenly = all(len(set(stage.row_shares)) == 1 for stage in stages)
        if in_order and evenly and (plan.in_step or plan.zero <= level):
            drawn.append(plan)
    return data, drawn


@pytest.mark.parametrize("seed", range(500, 506))
def test_no_plan_is_priced_too_high_and_many_exactly(seed: int) -> None:
    data, drawn = plans(seed, 4)
    replayer, exact = ChainReplayer.of(data), 0
    for plan in drawn:
        replay, decision = replayer.replay(plan), decision_of(plan)
        seconds = price(data, decision)
        if seconds is None:
            assert not replay.fits, plan.model_dump_json()
            continue
        assert seconds <= replay.seconds * (1 + 1e-9), plan.model_dump_json()
        exact += seconds == pytest.approx(replay.seconds, rel=1e-6)
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        alone = len(plan.replicas) == 1 and all(len(stage.devices) == 1 for stage in stages)
        if alone and len(stages) <= 2 and len(stages[0].layers) == 1:
            assert seconds == pytest.approx(replay.seconds, rel=1e-6), plan.model_dump_json()
    assert exact


def pair_of_devices(seed: int) -> JointData:
    """Two devices of one node, which tensor ranks, row groups or replicas may share, four samples,
    and layers whose tensor groups reduce much in both modes of recomputation."""
    rng = Random(seed)
    while True:
        data = random_data(rng, devices=2, layers=3, batch=4)
        if len(data.modes) == 2 and data.tensor_degrees == [1, 2]:
            break
    node = data.nodes[0].model_copy(update={"devices": 2, "intra_bandwidth": 1e8})
    layers = [layer.model_copy(update={"tensor_bytes": 1e5}) for layer in data.layers]
    changed = {"nodes": [node], "layers": layers, "global_batch": 4}
    return JointData.model_validate({**data.model_dump(), **changed})


SHARED = {  # devices [replica][stage][row group][tensor rank]
    "tensor ranks": [[[[0, 1]]]],
    "row groups": [[[[0], [1]]]],
    "replicas": [[[[0]]], [[[1]]]],
    "stages": [[[[0]], [[1]]]],
}


@pytest.mark.parametrize("shape", SHARED)
@pytest.mark.parametrize("seed", rest_wide(range(3), 1))
def test_what_two_devices_share_is_priced_exactly(shape: str, seed: int) -> None:
    data = pair_of_devices(600 + seed)
    replicas: list[dict[str, object]] = []
    for stages in SHARED[shape]:
        first, last = [0, len(data.layers) - 1], [len(data.layers) - 1, len(data.layers)]
        runs = [first, last] if len(stages) > 1 else [[0, len(data.layers)]]
        made = [
            {
                "layers": [run],
                "devices": rows,
                "row_shares": [1.0] * len(rows),
                "tensor_shares": [1.0] * len(rows[0]),
            }
            for run, rows in zip(runs, stages, strict=True)
        ]
        samples = 4 // len(SHARED[shape])
        replicas.append({"stages": made, "micro_batches": [{"count": samples, "samples": 1}]})
    for zero, mode in product(range(2), data.modes):
        plan = data.plan(replicas, schedule="1f1b", zero=zero, recomputation=mode)
        seconds = ChainReplayer.of(data).replay(plan).seconds
        assert price(data, decision_of(plan)) == pytest.approx(seconds, rel=1e-6)


def test_what_does_not_fit_is_infeasible() -> None:
    data = pair_of_devices(600)
    stage = {"layers": [[0, len(data.layers)]], "devices": [[0]]}
    batches = [{"count": 4, "samples": 1}]
    plan = data.plan([{"stages": [stage], "micro_batches": batches}], schedule="gpipe")
    needed = ChainReplayer.of(data).replay(plan).peak_bytes[0]
    for share, fits in ((1.001, True), (0.999, False)):
        types = {
            name: kind.model_copy(update={"memory_bytes": share * needed})
            for name, kind in data.types.items()
        }
        limited = data.model_copy(update={"types": types})
        assert (price(limited, decision_of(plan)) is not None) is fits
        # GPipe's order keeps all micro-batches; another one keeps fewer.
        assert price(limited, decision_of(plan), free=True) is not None


def test_an_order_that_is_free_is_no_slower() -> None:
    data, drawn = plans(510, 3)
    for plan in drawn:
        named = price(data, decision_of(plan))
        free = price(data, decision_of(plan), free=True)
        if named is not None:
            assert free is not None and free <= named * (1 + 1e-9)


def test_what_is_too_large_has_the_bound_by_computing_alone() -> None:
    data = random_data(Random(19), devices=3, layers=4, batch=3)
    outcome = solve(data, run(), Parameters(devices=2))
    assert outcome.stop is Stop.LIMIT and outcome.decision is None
    assert outcome.bound == computing_alone(data) > 0
    assert "the model takes at most 2 devices" in outcome.message


@pytest.mark.parametrize("looks", [0, 1, 5, 300])
def test_stopped_anywhere_there_is_a_bound(looks: int) -> None:
    data = small(102, 2)
    best = solve(data, run()).bound
    outcome = solve(data, cancelled_after(looks))
    assert outcome.stop in (Stop.INTERRUPTED, Stop.OPTIMAL)
    assert best is not None and outcome.bound is not None
    assert 0 < outcome.bound <= best * (1 + 1e-9)


def test_without_any_time_there_is_a_bound() -> None:
    outcome = solve(small(102, 2), over())
    assert outcome.stop is Stop.LIMIT and outcome.bound is not None and outcome.bound > 0


@pytest.mark.parametrize(
    "constrain", [cp.take_passes, cp.send_messages, cp.join_and_update, cp.fit_in_memory]
)
def test_constraints_with_tables_hear_that_the_run_is_over(constrain: cp.Constrain) -> None:
    data, going = pair_of_devices(600), Run(Options(threads=1))
    node = data.nodes[0].model_copy(update={"devices": 1})
    data = data.model_copy(update={"nodes": [node], "tensor_degrees": [1]})
    prices = Prices(data)
    prices.__dict__["ample"] = False  # `fit_in_memory` has nothing to do where all plans fit
    v = build(data, prices, going, longest(prices))
    going.cancel.set()
    with pytest.raises(Stopped):
        constrain(v)


def test_what_the_solver_says_of_its_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(method: str, model: object, run: Run, report: object) -> ModelAnswer:
        return ModelAnswer(stop=Stop.ERROR, solver="CP-SAT", message="CP-SAT refuses the model")

    monkeypatch.setattr(cp, "minimise", failing)
    outcome = solve(small(102, 2), run())
    assert outcome.stop is Stop.ERROR and outcome.message == "CP-SAT refuses the model"
    assert outcome.bound is not None and outcome.bound > 0
