"""The planner: what each strategy proposes is a plan that holds, and the ranking never lets a
misfit win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest

from fakes.workloads import small
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.pose import pose
from hetplan.planner.amp import to_plan
from hetplan.planner.candidate import Candidate
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategies import STRATEGIES, Strategy
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.solvers.options import Options
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run
from hetplan.text import share_text

# The strategies of this module's tests; those of other families are held by their own.
OWN = ("amp", "dp")


def a_run() -> Run:
    """One thread, and no longer than a test should take."""
    return Run(Options(time_limit=30, threads=1))


def decision_of(plan: Plan) -> AmpDecision:
    """The AMP decision that an even 1F1B plan stands for, read off the plan alone."""
    first = plan.replicas[0]
    return AmpDecision(
        pipeline=len(first.stages),
        data=len(plan.replicas),
        tensor=len(first.stages[0].tensor_shares),
        micro_batch=first.micro_batches[0].samples,
        placement=[
            [r.stages[j].devices[0] for r in plan.replicas] for j in range(len(first.stages))
        ],
        stages=[stage.layers[0] for stage in first.stages],
    )


@pytest.fixture(scope="module")
def workload() -> Workload:
    """gpt2 on two fast and two slow devices."""
    return small()


def test_every_candidate_is_a_plan_worth_its_objective(workload: Workload) -> None:
    planning = make_plans(workload, OWN, a_run())
    assert {(c.strategy, c.method) for c in planning.candidates} == {
        ("amp", "auto"),
        ("amp", "paper"),
        ("amp", "megatron"),
        ("dp", "enumeration"),
    }
    data = pose(workload)
    for candidate in planning.candidates:
        assert candidate.plan is not None and candidate.fits_memory
        evaluation = evaluate(family("amp"), data, decision_of(candidate.plan))
        assert evaluation.violations == ()
        assert evaluation.objective == pytest.approx(candidate.closed_form_seconds, rel=1e-12)
        assert candidate.plan.world_size == 4
        assert candidate.plan.workload.layers == [layer.name for layer in workload.profile.layers]


def test_the_proven_optimum_wins(workload: Workload) -> None:
    planning = make_plans(workload, OWN, a_run())
    assert planning.winner == 0 and planning.best is not None
    assert planning.best.status == "optimal"
    seconds = [c.predicted_seconds for c in planning.candidates]
    assert seconds == sorted(s for s in seconds if s is not None)
    for other in planning.candidates:
        if other.strategy == "amp":
            assert planning.best.bound is not None and other.closed_form_seconds is not None
            assert planning.best.bound <= other.closed_form_seconds * (1 + 1e-6)


def test_plain_data_parallelism_by_hand(workload: Workload) -> None:
    (candidate,) = make_plans(workload, ["dp"], a_run()).candidates
    assert candidate.plan is not None
    assert [r.stages[0].devices for r in candidate.plan.replicas] == [[[d]] for d in range(4)]
    sizes = {b.samples for r in candidate.plan.replicas for b in r.micro_batches}
    parameters = sum(layer.held_param_bytes for layer in workload.profile.layers)
    sync = 2 * 3 / 4 * parameters / (10e9 / 8)
    expected = {}
    for size in (1, 2):
        table = workload.profile.table("T4", 1, size)
        assert table is not None
        expected[size] = 8 / (4 * size) * sum(table.seconds()) + sync
    assert candidate.closed_form_seconds == pytest.approx(min(expected.values()), rel=1e-12)
    assert sizes == {min(expected, key=expected.__getitem__)}
    states = workload.state_bytes_per_param_byte * parameters
    saved = min(sizes) * sum(layer.saved_bytes for layer in workload.profile.layers)
    copied = workload.state_bytes_per_param_byte * workload.profile.layers[-1].tied_param_bytes
    assert candidate.peak_bytes == pytest.approx(
        [states - copied + saved] * 4, rel=1e-12
    )  # one device, one copy
    assert candidate.peak_bytes is not None
    usable = min(workload.device_bytes().values())
    assert candidate.tables[0].rows[0][-1] == share_text(candidate.peak_bytes[0], usable)


def test_data_parallelism_that_does_not_fit_is_priced_and_never_wins() -> None:
    planning = make_plans(small(model="gpt2-xl"), OWN, a_run())
    misfit = next(c for c in planning.candidates if c.strategy == "dp")
    assert (misfit.fits_memory, misfit.status) == (False, "infeasible")
    assert misfit.predicted_seconds is not None and misfit.plan is not None
    assert misfit.bound is None and "does not fit" in misfit.message
    assert misfit.peak_bytes is not None and max(misfit.peak_bytes) > 14.5 * 2**30
    assert planning.best is not None and planning.best.strategy == "amp"


def test_an_indivisible_batch_has_a_reason() -> None:
    planning = make_plans(small(7), ["dp"], a_run())
    (candidate,) = planning.candidates
    assert planning.winner is None
    assert candidate.plan is None and candidate.fits_memory is None
    assert candidate.message == "no micro-batch size with a table divides 7 samples over 4 devices"


def test_nothing_fits() -> None:
    little = {name: {"memory_gib": 2} for name in ("T4", "V100-SXM2-16GB")}
    planning = make_plans(small(model="gpt2-xl", devices=little), OWN, a_run())
    assert planning.winner is None and planning.best is None
    assert all(c.message for c in planning.candidates)
    assert {c.status for c in planning.candidates if c.method == "auto"} == {"infeasible"}


Propose = Callable[[Workload, Run], list[Candidate]]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> Callable[..., None]:
    """Register strategies that each propose one given candidate."""
    base = make_plans(workload, ["dp"], a_run()).candidates[0]

    def register(**candidates: dict[str, object]) -> None:
        for name, changes in candidates.items():
            made = replace(base, strategy=name, **changes)  # type: ignore[arg-type]
            monkeypatch.setattr(
                f"fakes.workloads.{name}", lambda workload, run, made=made: [made], raising=False
            )
            monkeypatch.setattr(
                "hetplan.planner.candidates.simulated", lambda candidate, _: candidate
            )
            monkeypatch.setitem(
                STRATEGIES, name, Strategy(name, f"fakes.workloads:{name}", "given")
            )

    return register


def test_ranking(offer: Callable[..., None], workload: Workload) -> None:
    offer(
        slow={"predicted_seconds": 9.0},
        fast={"predicted_seconds": 3.0},
        misfit={"predicted_seconds": 1.0, "fits_memory": False},
        nothing={
            "predicted_seconds": None,
            "plan": None,
            "fits_memory": None,
            "message": "no idea",
        },
        quick_misfit={"predicted_seconds": 0.5, "fits_memory": False},
    )
    names = ["nothing", "misfit", "slow", "quick_misfit", "fast"]
    planning = make_plans(workload, names, a_run())
    order = [c.strategy for c in planning.candidates]
    assert order == ["fast", "slow", "quick_misfit", "misfit", "nothing"]
    assert planning.winner == 0
    only = make_plans(workload, ["misfit", "nothing"], a_run())
    assert only.winner is None
    assert [c.strategy for c in only.candidates] == ["misfit", "nothing"]


def test_money_limit(offer: Callable[..., None], workload: Workload) -> None:
    offer(cheap={"predicted_seconds": 1.0}, dear={"predicted_seconds": 2.0})
    money = [
        c.money_per_million_tokens(workload)
        for c in make_plans(workload, ["cheap", "dear"]).candidates
    ]
    price = workload.cluster.price_per_hour()
    assert price is not None and money[0] is not None and money[1] is not None
    assert money[0] == pytest.approx(price / 3600 * 1.0 / (8 * 1024) * 1e6)
    limited = make_plans(workload, ["dear", "cheap"], money_limit=1.5 * money[0])
    assert [c.strategy for c in limited.candidates] == ["cheap", "dear"]
    assert limited.winner == 0
    assert "above the limit" in limited.candidates[1].message
    none = make_plans(workload, ["dear", "cheap"], money_limit=0.5 * money[0])
    assert none.winner is None


def test_equal_times_are_ranked_by_money(offer: Callable[..., None], workload: Workload) -> None:
    base = make_plans(workload, ["dp"], a_run()).candidates[0]
    assert base.plan is not None
    document = base.plan.model_dump(mode="json")
    document["replicas"] = document["replicas"][2:]  # the two T4 alone
    for replica in document["replicas"]:
        replica["micro_batches"] = [{"count": 4, "samples": 1}]
    offer(
        all_devices={"predicted_seconds": 1.0},
        half={"predicted_seconds": 1.0, "plan": Plan(**document)},
    )
    planning = make_plans(workload, ["all_devices", "half"], a_run())
    assert [c.strategy for c in planning.candidates] == ["half", "all_devices"]


def test_unknown_price_is_no_price() -> None:
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    node = {"devices": 2, "device": "mine", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 10}
    workload = small(devices=own, nodes=[node])
    (candidate,) = make_plans(workload, ["dp"], a_run()).candidates
    assert candidate.money_per_million_tokens(workload) is None
    with pytest.raises(InputError, match="money limit, but device 'mine' has no price"):
        make_plans(workload, ["dp"], money_limit=1.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_money_limits(workload: Workload, limit: float) -> None:
    with pytest.raises(InputError, match="money limit"):
        make_plans(workload, ["dp"], money_limit=limit)


def test_strategies_by_name(workload: Workload) -> None:
    with pytest.raises(InputError, match=r"unknown strategy 'foo' \(expected one of amp, "):
        make_plans(workload, ["foo"])
    with pytest.raises(InputError, match="no strategy named"):
        make_plans(workload, [])
    assert len(make_plans(workload, ["dp", "dp"]).candidates) == 1


def test_strategies_to_come(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STRATEGIES, "hap", raising=False)
    with pytest.raises(
        UnsupportedError, match=r"strategy is not available yet \(got 'hap', expected some of"
    ):
        make_plans(workload, ["hap"])


def test_interrupted_methods_say_so(workload: Workload) -> None:
    run = a_run()
    run.cancel.set()
    planning = make_plans(workload, ["amp"], run)
    assert planning.winner is None
    assert {c.message for c in planning.candidates} == {"not begun: stopped from the keyboard"}


def test_what_answers_at_once_stands_before_anything_is_proven(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One candidate of every strategy comes before the first that may take its time, and none comes
    twice."""
    asked: list[tuple[str, tuple[str, ...] | None]] = []

    def propose(
        self: Strategy, *_: object, methods: tuple[str, ...] | None = None
    ) -> list[Candidate]:
        asked.append((self.name, methods))
        return []

    monkeypatch.setattr(Strategy, "propose", propose)
    run = a_run()
    run.cancel.set()  # nothing is recomputed
    make_plans(workload, ["all"], run)
    heads = [("amp", ("megatron",)), ("hap", ("dp-proportional",))]
    proofs = [(name, ("auto",)) for name in ("poplar", "ditto", "amp", "hap")]
    assert asked[:2] == heads
    assert [each for each in asked if each in proofs] == proofs
    for name, strategy in STRATEGIES.items():
        told = [method for other, methods in asked if other == name for method in methods or ()]
        assert sorted(told) == sorted(strategy.methods)


def test_progress_of_a_method_shows_under_its_name(workload: Workload) -> None:
    notes = []
    run = a_run()
    run.watch = lambda progress: notes.append(progress.note)
    make_plans(workload, ["amp"], run)
    assert {note.split()[0] for note in notes} == {"amp/auto", "amp/paper", "amp/megatron"}


def test_plan_of_a_decision_with_every_degree(workload: Workload) -> None:
    """Two stages of one data rank of two tensor ranks: groups, cuts and micro-batches arrive in the
    plan."""
    count = len(workload.profile.layers)
    decision = AmpDecision(
        pipeline=2,
        data=1,
        tensor=2,
        micro_batch=2,
        placement=[[[2, 3]], [[0, 1]]],
        stages=[(0, 3), (3, count)],
    )
    plan = to_plan(workload, pose(workload), decision, "by hand")
    (replica,) = plan.replicas
    assert [stage.devices for stage in replica.stages] == [[[2, 3]], [[0, 1]]]
    assert [stage.layers for stage in replica.stages] == [[(0, 3)], [(3, count)]]
    assert [stage.tensor_shares for stage in replica.stages] == [[1.0, 1.0]] * 2
    assert (replica.micro_batches[0].count, replica.micro_batches[0].samples) == (4, 2)
    assert decision_of(plan) == decision


@pytest.mark.parametrize("name", ["amp", "poplar", "ditto", "dp", "hap"])
def test_methods_that_the_planner_chooses_from_are_the_strategies_own(name: str) -> None:
    module = import_module(STRATEGIES[name].target.partition(":")[0])
    own = getattr(module, "METHODS", None) or (module.METHOD,)
    assert STRATEGIES[name].methods == tuple(own)
    assert set(STRATEGIES[name].exact) <= set(own)
    assert set(STRATEGIES[name].first) <= set(own) - set(STRATEGIES[name].exact)
