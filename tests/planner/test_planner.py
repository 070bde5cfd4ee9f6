"""The planner: what each strategy proposes is a plan that holds, and the ranking never lets a
misfit win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fakes.workloads import one_thread, small
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.pose import pose
from hetplan.planner import STRATEGIES
from hetplan.planner.amp import AmpProblem, decision_of
from hetplan.planner.ranking import Criteria, Planning, make_plans
from hetplan.planner.strategy import Candidate, Method, Strategy, chosen, propose
from hetplan.planner.variant import Part, Variant
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.runtime.replay import replay
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run
from hetplan.text import share_text
from present import present


def test_every_candidate_is_a_plan_worth_its_objective(
    workload: Workload, planning: Planning
) -> None:
    names = {"amp/auto", "amp/paper", "amp/megatron", "dp/enumeration"}
    assert {c.name for c in planning.candidates} == names
    data = pose(workload)
    for candidate in planning.candidates:
        assert candidate.plan is not None and candidate.fits_memory
        evaluation = evaluate(family("amp"), data, decision_of(candidate.plan))
        assert evaluation.violations == ()
        assert evaluation.objective == pytest.approx(candidate.closed_form_seconds, rel=1e-12)
        assert candidate.plan.world_size == 4 and candidate.plan.origin == candidate.name
        assert candidate.plan.workload.layers == [layer.name for layer in workload.profile.layers]


def test_plain_data_parallelism_by_hand(workload: Workload) -> None:
    (candidate,) = make_plans(workload, chosen(["dp"]), one_thread()).candidates
    assert candidate.plan is not None and candidate.peak_bytes is not None
    assert [r.stages[0].devices for r in candidate.plan.replicas] == [[[d]] for d in range(4)]
    parameters = sum(layer.held_param_bytes for layer in workload.profile.layers)
    sync = 2 * 3 / 4 * parameters / (10e9 / 8)
    tables = {size: workload.profile.table("T4", 1, size) for size in (1, 2)}
    expected = {b: 8 / (4 * b) * sum(t.seconds()) + sync for b, t in tables.items() if t}
    assert candidate.closed_form_seconds == pytest.approx(min(expected.values()), rel=1e-12)
    (size,) = {b.samples for r in candidate.plan.replicas for b in r.micro_batches}
    assert size == min(expected, key=expected.__getitem__)
    copied = workload.profile.layers[-1].tied_param_bytes  # one device, one copy
    states = workload.state_bytes_per_param_byte * (parameters - copied)
    saved = size * sum(layer.saved_bytes for layer in workload.profile.layers)
    assert candidate.peak_bytes == pytest.approx([states + saved] * 4, rel=1e-12)
    usable = min(workload.device_bytes().values())
    assert candidate.tables[0].rows[0][-1] == share_text(candidate.peak_bytes[0], usable)


def test_data_parallelism_that_does_not_fit_is_priced_and_never_wins() -> None:
    planning = make_plans(small(model="gpt2-xl"), chosen(["amp", "dp"]), one_thread())
    misfit = next(c for c in planning.candidates if c.strategy == "dp")
    assert (misfit.fits_memory, misfit.status, misfit.bound) == (False, "infeasible", None)
    assert misfit.predicted_seconds is not None and "does not fit" in misfit.message
    assert misfit.peak_bytes is not None and max(misfit.peak_bytes) > 14.5 * 2**30
    assert planning.best is not None and planning.best.strategy == "amp"


def test_an_indivisible_batch_has_a_reason() -> None:
    planning = make_plans(small(7), chosen(["dp"]), one_thread())
    (candidate,) = planning.candidates
    assert planning.winner is None
    assert candidate.plan is None and candidate.fits_memory is None
    assert candidate.message == "no micro-batch size with a table divides 7 samples over 4 devices"


@dataclass
class Offer(Strategy):
    """A strategy that proposes one candidate, which is not replayed."""

    candidate: Candidate
    name = "offer"
    methods = (Method("given", exact=True),)

    def pose(self, workload: Workload, run: Run) -> list[Offer]:
        """Itself, on the whole cluster."""
        return [self] if len(workload.cluster.devices) == 4 else []

    def method(self, asked: Method) -> Method:
        """Its candidate's."""
        return self.candidate.method

    def solve(self, method: Method, run: Run) -> Candidate:
        """The candidate."""
        return self.candidate


@pytest.fixture
def offered(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, planning: Planning
) -> Callable[..., Planning]:
    """Plans with strategies that each propose one given candidate, ranked by given criteria."""
    monkeypatch.setattr("hetplan.planner.search.simulated", lambda candidate, _: candidate)
    base = next(c for c in planning.candidates if c.strategy == "dp")

    def plan(criteria: Criteria | None = None, **offers: dict[str, Any]) -> Planning:
        made = [Offer(replace(base, strategy=name, **changes)) for name, changes in offers.items()]
        return make_plans(workload, made, one_thread(), criteria=criteria)

    return plan


def test_ranking(offered: Callable[..., Planning]) -> None:
    misfits: dict[str, dict[str, Any]] = {
        "nothing": {"predicted_seconds": None, "plan": None, "fits_memory": None},
        "misfit": {"predicted_seconds": 1.0, "fits_memory": False},
        "quick_misfit": {"predicted_seconds": 0.5, "fits_memory": False},
    }
    fits = {"slow": {"predicted_seconds": 9.0}, "fast": {"predicted_seconds": 3.0}}
    ranked = offered(**misfits, **fits)
    order = [c.strategy for c in ranked.candidates]
    assert order == ["fast", "slow", "quick_misfit", "misfit", "nothing"] and ranked.winner == 0
    only = offered(**misfits)
    assert only.winner is None
    assert [c.strategy for c in only.candidates] == ["quick_misfit", "misfit", "nothing"]


def test_money_limit(offered: Callable[..., Planning], workload: Workload) -> None:
    offers = {"dear": {"predicted_seconds": 2.0}, "cheap": {"predicted_seconds": 1.0}}
    money = offered(**offers).candidates[0].money_per_million_tokens(workload)
    price = workload.cluster.price_per_hour()
    assert price is not None and money is not None
    assert money == pytest.approx(price / 3600 * 1.0 / (8 * 1024) * 1e6)
    limited = offered(Criteria(1.5 * money), **offers)
    cheap, dear, *_ = limited.candidates
    assert (cheap.strategy, dear.strategy, limited.winner) == ("cheap", "dear", 0)
    assert "above the limit" in dear.message and "limit" not in cheap.message
    assert offered(Criteria(0.5 * money), **offers).winner is None


def test_equal_times_are_ranked_by_money(
    offered: Callable[..., Planning], planning: Planning
) -> None:
    plan = present(next(c.plan for c in planning.candidates if c.strategy == "dp"))
    document = plan.model_dump(mode="json")
    document["replicas"] = document["replicas"][2:]  # the two T4 alone
    for replica in document["replicas"]:
        replica["micro_batches"] = [{"count": 4, "samples": 1}]
    half = {"predicted_seconds": 1.0, "plan": Plan(**document)}
    ranked = offered(whole={"predicted_seconds": 1.0}, half=half)
    assert [c.strategy for c in ranked.candidates] == ["half", "whole"]


def test_unknown_price_is_no_price() -> None:
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    node = {"devices": 2, "device": "mine", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 10}
    workload = small(devices=own, nodes=[node])
    planning = make_plans(workload, chosen(["dp"]), one_thread())
    assert planning.candidates[0].money_per_million_tokens(workload) is None
    assert planning.document()["pareto"] == []
    for criteria, what in ((Criteria(1.0), "money limit"), (Criteria(None, 5.0), "cheapest plan")):
        with pytest.raises(InputError, match=f"{what}, but device 'mine' has no price"):
            criteria.check(workload)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_criteria(workload: Workload, limit: float) -> None:
    with pytest.raises(InputError, match="money limit"):
        make_plans(workload, chosen(["dp"]), criteria=Criteria(limit))
    if limit != 0.0:
        with pytest.raises(InputError, match="percent that a cheaper plan may be slower"):
            make_plans(workload, chosen(["dp"]), criteria=Criteria(cheapest_within=limit))


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["foo"], {}, "unknown strategy 'foo' (expected one of amp, "),
        ([], {}, "no strategy named"),
        (["dp"], {"poplar": {"zero": 1}}, "no such setting (got 'poplar.zero', expected none: "),
        (["dp", "hap"], {"dp": {"a": 1}}, "no such setting (got 'dp.a', expected one of hap.s"),
        (["hap"], {"hap": {"secs": 1}}, "no such setting (got 'hap.secs', expected one of hap.s"),
        (["hap"], {"hap": {"seconds": "x"}}, "setting hap: seconds: not usable"),
    ],
)
def test_strategies_and_settings_that_there_are_not(
    names: list[str], settings: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        chosen(names, settings)
    assert message in str(caught.value)


def test_strategies_by_name() -> None:
    assert [s.name for s in chosen(["dp", "amp", "dp"])] == ["dp", "amp"]
    for every in (chosen(), chosen(["all"]), chosen(["dp", "all"])):
        assert [s.name for s in every] == list(STRATEGIES)
    for strategy in chosen():
        names = [method.name for method in strategy.methods]
        assert len(set(names)) == len(names)
        assert any(method.exact for method in strategy.methods)
        assert not any(method.exact and method.quick for method in strategy.methods)


def test_an_interrupted_planning_tells_what_was_not_begun_in_its_order(workload: Workload) -> None:
    """What answers at once comes first, then what proves, and of that last what may take all its
    time; no method is asked twice."""
    run, told = one_thread(), list[Candidate]()
    run.cancel.set()
    assert make_plans(workload, run=run, on_candidate=told.append).winner is None
    for candidate in told:  # hap has not even written its theory down
        assert candidate.message.startswith(("not begun: stopped", "no time to write its theory"))
    assert [c.name for c in told[:2]] == ["amp/megatron", "hap/dp-proportional"]
    exact = dict.fromkeys(c.strategy for c in told if c.method.exact)
    assert list(exact) == ["poplar", "astra", "ditto", "dp", "amp", "hap"]
    assert len({c.name for c in told}) == len(told)


def test_progress_of_a_method_shows_under_its_name(workload: Workload) -> None:
    notes = []
    run = one_thread()
    run.watch = lambda progress: notes.append(progress.note)
    make_plans(workload, chosen(["amp"]), run)
    assert {note.split()[0] for note in notes} == {"amp/auto", "amp/paper", "amp/megatron"}


def test_plan_of_a_decision_with_every_degree(workload: Workload) -> None:
    """Two stages of one data rank of two tensor ranks: groups, cuts and micro-batches arrive in the
    plan."""
    decision = AmpDecision(
        pipeline=2,
        data=1,
        tensor=2,
        micro_batch=2,
        placement=[[[2, 3]], [[0, 1]]],
        stages=[(0, 3), (3, len(workload.profile.layers))],
    )
    plan = AmpProblem(workload, pose(workload)).to_plan(decision)
    (replica,) = plan.replicas
    assert [stage.devices for stage in replica.stages] == [[[2, 3]], [[0, 1]]]
    assert [stage.layers for stage in replica.stages] == [[(0, 3)], [(3, 14)]]
    assert [stage.tensor_shares for stage in replica.stages] == [[1.0, 1.0]] * 2
    assert (replica.micro_batches[0].count, replica.micro_batches[0].samples) == (4, 2)
    assert decision_of(plan) == decision


def test_a_variant_names_itself_and_its_plans(workload: Workload) -> None:
    (candidate,) = propose(chosen(["dp"])[0], workload, one_thread())
    assert candidate.plan is not None and Variant().marked(candidate.plan) == candidate.plan
    variant = Variant("full", "bf16", Part("T4", (1,)))
    plan = variant.marked(candidate.plan)
    assert plan.recomputation == "full"
    assert replace(candidate, variant=variant).name == "dp/enumeration+full+bf16@T4"
    assert replay(plan, workload).seconds > replay(candidate.plan, workload).seconds
