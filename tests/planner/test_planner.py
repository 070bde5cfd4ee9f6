"""The planner: what each strategy proposes is a plan that holds, and the ranking never lets a
misfit win. What is ranked: the replay's seconds and memory, beside the closed forms; plans of
nearly equal price that only the replay tells apart; and what explains the winner."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fakes.amp_plans import decision_of
from fakes.workloads import one_thread, pipeline, small
from hetplan.errors import InputError
from hetplan.formulations import family
from hetplan.formulations.amp.paper import ranked_candidates
from hetplan.formulations.amp.pose import pose
from hetplan.planner import STRATEGIES
from hetplan.planner.amp import TRIALS, AmpProblem, DataParallel
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.criteria import Criteria
from hetplan.planner.explain import (
    critical_parts,
    effects,
    explain,
    name_of,
    unit_names,
    waits,
    why,
)
from hetplan.planner.joint import Joint, JointSettings
from hetplan.planner.planning import Planning
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import StrategySearch, replay_candidate
from hetplan.planner.strategy import NoPlan, Problem, Strategy, make_strategies
from hetplan.planner.variants import Part, Variant
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.frameworks import RESERVED_BYTES
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.profiles.profile import perturbed
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import replay
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Options, Run
from hetplan.text import seconds_text
from present import present


def test_every_candidate_is_a_plan_worth_its_objective(
    workload: Workload, planning: Planning
) -> None:
    """And stands in the ranking by its replay."""
    names = {"amp/auto", "amp/paper", "amp/paper-trials", "amp/megatron", "dp/enumeration"}
    assert {c.name for c in planning.candidates} == names
    data, layers = pose(workload), [layer.name for layer in workload.profile.layers]
    for c in planning.candidates:
        plan = present(c.plan)
        evaluation = evaluate(family("amp"), data, decision_of(plan))
        assert c.fits_memory and evaluation.violations == ()
        assert evaluation.objective == pytest.approx(c.closed_form_seconds, rel=1e-12)
        assert (plan.world_size, plan.origin, plan.workload.layers) == (4, c.name, layers)
        again, prediction = replay(plan, workload), present(plan.prediction)
        assert (c.predicted_seconds, c.peak_bytes) == (again.seconds, again.peak_bytes)
        assert c.closed_form_seconds != c.predicted_seconds
        assert c.optimism == again.seconds / present(c.closed_form_seconds)
        assert (prediction.strategy, prediction.method) == (c.strategy, c.label)
        assert prediction.predicted_seconds == c.predicted_seconds
        assert (prediction.objective, prediction.bound) == (c.objective, c.bound)


def test_the_trials_of_amp_are_its_ten_least_estimates_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest that fits, of as many as the budget allows; its rank is told. (The paper's own
    homogeneous setting.)"""
    workload = make_workload("gpt2-amp", example_cluster("g4dn-4"), 32)
    data = pose(workload)
    ranked = ranked_candidates(data).candidates
    problem = AmpProblem(workload, data)
    plans = [problem.to_plan(c.strategy.decision()) for c in ranked[:10]]
    seconds = [replay(plan, workload).seconds for plan in plans]
    assert len(ranked) > 3 and seconds.index(min(seconds)) > 0, "the estimate alone would do"

    def place_and_seconds() -> tuple[int, float]:
        (answer,) = propose(make_strategies(["amp"])[0], workload, one_thread(), [TRIALS])
        told = answer.message.removeprefix("AMP's estimate no. ").split(",")[0]
        return int(told), replay(present(answer.plan), workload).seconds

    assert place_and_seconds() == (seconds.index(min(seconds)) + 1, min(seconds))
    monkeypatch.setattr("hetplan.planner.amp.BUDGET", 1)
    assert place_and_seconds() == (1, seconds[0])


def test_plain_data_parallelism_by_hand(workload: Workload) -> None:
    (candidate,) = make_plans(workload, [DataParallel()], one_thread()).candidates
    replicas, peaks = present(candidate.plan).replicas, present(candidate.peak_bytes)
    assert [r.stages[0].devices for r in replicas] == [[[d]] for d in range(4)]
    parameters = sum(layer.held_param_bytes for layer in workload.profile.layers)
    sync = 2 * 3 / 4 * parameters / (10e9 / 8)
    tables = {size: present(workload.profile.table("T4", 1, size)) for size in (1, 2)}
    expected = {b: 8 / (4 * b) * sum(t.layer_seconds()) + sync for b, t in tables.items()}
    assert candidate.closed_form_seconds == pytest.approx(min(expected.values()), rel=1e-12)
    (size,) = {b.samples for r in replicas for b in r.micro_batches}
    assert size == min(expected, key=expected.__getitem__)
    copied = workload.profile.layers[-1].tied_param_bytes  # one device, one copy
    states = workload.state_bytes_per_param_byte * (parameters - copied)
    saved = size * sum(layer.saved_bytes for layer in workload.profile.layers)
    assert peaks == pytest.approx([states + saved] * 4, rel=1e-12)


def test_data_parallelism_that_does_not_fit_is_priced_and_never_wins() -> None:
    planning = make_plans(small(model="gpt2-xl"), make_strategies(["amp", "dp"]), one_thread())
    misfit = next(c for c in planning.candidates if c.strategy == "dp")
    assert (misfit.fits_memory, misfit.status, misfit.bound) == (False, "infeasible", None)
    assert misfit.predicted_seconds is not None and "does not fit" in misfit.message
    assert max(present(misfit.peak_bytes)) > 14.5 * 2**30
    assert present(planning.best).strategy == "amp"


def test_an_indivisible_batch_has_a_reason() -> None:
    planning = make_plans(small(7), [DataParallel()], one_thread())
    (candidate,) = planning.candidates
    assert (planning.winner, candidate.plan, candidate.fits_memory) == (None, None, None)
    assert candidate.message == "no micro-batch size with a table divides 7 samples over 4 devices"


@dataclass
class Offer(Strategy):
    """A strategy that proposes one candidate, which is not replayed."""

    candidate: Candidate
    name = "offer"
    methods = (StrategyMethod("given", exact=True),)

    def pose(self, workload: Workload, run: Run) -> list[Offer]:
        """Itself, on the whole cluster."""
        return [self] if len(workload.cluster.devices) == 4 else []

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """Its candidate's."""
        return self.candidate.method

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The candidate."""
        return self.candidate


Ranked = Callable[..., tuple[list[str], Planning]]


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch, workload: Workload, planning: Planning) -> Ranked:
    """Plans with strategies that each propose one given candidate, ranked by given criteria: the
    order of their names, and the planning."""
    monkeypatch.setattr("hetplan.planner.search.replay_candidate", lambda candidate, _: candidate)
    base = next(c for c in planning.candidates if c.strategy == "dp")

    def rank(criteria: Criteria | None = None, **offers: dict[str, Any]) -> tuple[Any, Planning]:
        made = [Offer(replace(base, strategy=name, **changes)) for name, changes in offers.items()]
        planning = make_plans(workload, made, one_thread(), criteria=criteria)
        return [c.strategy for c in planning.candidates], planning

    return rank


def test_ranking(ranked: Ranked) -> None:
    misfits: dict[str, dict[str, Any]] = {
        "nothing": {"predicted_seconds": None, "plan": None, "fits_memory": None},
        "misfit": {"predicted_seconds": 1.0, "fits_memory": False},
        "quick_misfit": {"predicted_seconds": 0.5, "fits_memory": False},
    }
    fits = {"slow": {"predicted_seconds": 9.0}, "fast": {"predicted_seconds": 3.0}}
    names, planning = ranked(**misfits, **fits)
    assert names == ["fast", "slow", "quick_misfit", "misfit", "nothing"] and planning.winner == 0
    names, planning = ranked(**misfits)
    assert names == ["quick_misfit", "misfit", "nothing"] and planning.winner is None


def test_money_limit(ranked: Ranked, workload: Workload) -> None:
    offers = {"dear": {"predicted_seconds": 2.0}, "cheap": {"predicted_seconds": 1.0}}
    money = present(ranked(**offers)[1].candidates[0].money_per_million_tokens(workload))
    price = present(workload.cluster.price_per_hour())
    assert money == pytest.approx(price / 3600 * 1.0 / (8 * 1024) * 1e6)
    names, limited = ranked(Criteria(1.5 * money), **offers)
    assert (names[:2], limited.winner) == (["cheap", "dear"], 0)
    limits = ["above the limit" in c.message for c in limited.candidates[:2]]
    assert limits == [False, True]
    assert ranked(Criteria(0.5 * money), **offers)[1].winner is None


def test_equal_times_are_ranked_by_whole_nodes_then_by_money(
    ranked: Ranked, planning: Planning
) -> None:
    """Seconds are equal where nine digits are."""
    plan = present(next(c.plan for c in planning.candidates if c.strategy == "dp"))
    document = plan.model_dump(mode="json")
    document["replicas"] = document["replicas"][2:]  # the two T4 alone
    for replica in document["replicas"]:
        replica["micro_batches"] = [{"count": 4, "samples": 1}]
    half = {"predicted_seconds": 1.0, "plan": Plan(**document)}
    alone = deepcopy(document)
    del alone["replicas"][0]  # one T4, which is cheapest and only a part of its node
    alone["replicas"][0]["micro_batches"][0]["count"] = 8
    one = {"predicted_seconds": 1.0 - 1e-11, "plan": Plan(**alone)}
    names, _ = ranked(one=one, whole={"predicted_seconds": 1.0}, half=half)
    assert names == ["half", "whole", "one"]
    one["predicted_seconds"] = 1.0 - 1e-6
    assert ranked(whole={"predicted_seconds": 1.0}, one=one)[0] == ["one", "whole"]


def test_unknown_price_is_no_price() -> None:
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    node = {"devices": 2, "device": "mine", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 10}
    workload = small(devices=own, nodes=[node])
    planning = make_plans(workload, [DataParallel()], one_thread())
    assert planning.candidates[0].money_per_million_tokens(workload) is None
    assert planning.document()["pareto"] == []
    for criteria, what in ((Criteria(1.0), "money limit"), (Criteria(None, 5.0), "cheapest plan")):
        with pytest.raises(InputError, match=f"{what}, but device 'mine' has no price"):
            criteria.check(workload)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_criteria(workload: Workload, limit: float) -> None:
    """A plan may be slower by nothing at all."""
    for criteria in (Criteria(limit), Criteria(cheapest_within=limit or -1.0)):
        with pytest.raises(InputError, match=r"money limit|percent that a cheaper plan may be"):
            make_plans(workload, [DataParallel()], criteria=criteria)


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["foo"], {}, "unknown strategy 'foo' (expected one of joint, "),
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
        make_strategies(names, settings)
    assert message in str(caught.value)


def test_strategies_by_name() -> None:
    assert [s.name for s in make_strategies(["dp", "amp", "dp"])] == ["dp", "amp"]
    for names in (None, ["all"], ["dp", "all"]):
        assert [s.name for s in make_strategies(names)] == list(STRATEGIES)
    for strategy in make_strategies():
        assert len({method.name for method in strategy.methods}) == len(strategy.methods)
        assert any(method.exact for method in strategy.methods)
        assert not any(method.exact and method.quick for method in strategy.methods)


def test_an_interrupted_planning_tells_what_was_not_begun_in_its_order(workload: Workload) -> None:
    """What answers at once comes first, then what proves, and of that last what may take all its
    time; no method is asked twice."""
    run, seen = one_thread(), list[Candidate]()
    run.cancel.set()
    assert make_plans(workload, run=run, on_candidate=seen.append).winner is None
    for candidate in seen:  # hap has not even written its theory down
        assert candidate.message.startswith(("not begun: stopped", "no time to write its theory"))
    assert [c.name for c in seen[:2]] == ["amp/megatron", "hap/dp-proportional"]
    exact = dict.fromkeys(c.strategy for c in seen if c.method.exact)
    assert list(exact) == ["poplar", "ditto", "dp", "amp", "astra", "hap", "joint"]
    assert len({c.name for c in seen}) == len(seen)


def test_a_plan_that_fits_ends_a_planning_whose_time_is_over(workload: Workload) -> None:
    """What was not asked any more says so."""
    planning = make_plans(workload, run=Run(Options(threads=1, time_limit=1e-9)))
    assert {c.strategy for c in planning.candidates} == set(STRATEGIES)
    not_begun = [c for c in planning.candidates if c.message.startswith("not begun: the time")]
    assert present(planning.best).fits_memory and planning.bound is None
    assert len(planning.candidates) == len(STRATEGIES) and len(not_begun) >= 4


def test_joint_keeps_a_quarter_of_the_time(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the others take, on a clock that only they move."""
    clock, left, begun = [0.0], list[float](), dict[int, tuple[Run, float]]()

    class Slow(DataParallel):
        def pose(self, workload: Workload, run: Run) -> Any:
            clock[0] += run.seconds_left
            raise NoPlan("unknown", "it takes all the time that it may")

    def last(joint: Joint, workload: Workload, run: Run) -> Any:
        left.append(run.seconds_left)
        raise NoPlan("unknown", "")

    def elapsed(run: Run) -> float:
        return clock[0] - begun.setdefault(id(run), (run, clock[0]))[1]

    monkeypatch.setattr(Run, "elapsed", property(elapsed))
    monkeypatch.setattr(Joint, "pose", last)
    others = [type("Slow", (Slow,), {"name": f"slow-{i}"})() for i in range(20)]
    run = Run(Options(time_limit=110.0))
    assert not run.elapsed
    make_plans(workload, [*others, Joint(JointSettings(seconds=30.0))], run)
    # an eleventh is for the end, a third of what it has for plans that do not fit when replayed
    assert left[0] == pytest.approx((100 - clock[0]) / 1.5) and clock[0] <= 75


def test_progress_of_a_method_shows_under_its_name(workload: Workload) -> None:
    notes, run = set[str](), one_thread()
    run.watch = lambda progress: notes.add(progress.note.split()[0])
    make_plans(workload, make_strategies(["amp"]), run)
    assert notes == {"amp/auto", "amp/paper", "amp/paper-trials", "amp/megatron"}


def test_a_variant_names_itself_and_its_plans(workload: Workload) -> None:
    (candidate,) = propose(DataParallel(), workload, one_thread())
    plain = present(candidate.plan)
    variant = Variant("full", "bf16", Part("T4", (1,)))
    plan = variant.marked(plain)
    assert Variant().marked(plain) == plain and plan.recomputation == "full"
    assert replace(candidate, variant=variant).name == "dp/enumeration+full+bf16@T4"
    assert replay(plan, workload).seconds > replay(plain, workload).seconds


# What the replay tells apart, and what explains the winner


@pytest.fixture(scope="module")
def floor(workload: Workload) -> Candidate:
    """Data parallelism, not replayed."""
    return propose(DataParallel(), workload, Run())[0]


def test_a_plan_that_only_the_closed_form_lets_fit_never_wins(
    workload: Workload, floor: Candidate
) -> None:
    """On devices with a byte less than the replay needs, by a strategy that thinks that half is
    enough; what was tried on the device, though, is more than a prediction."""
    held = max(present(replay_candidate(floor, workload).peak_bytes))
    gib = (held - 1 + workload.reserved_bytes) / 2**30
    little = small(devices={name: {"memory_gib": gib} for name in workload.cluster.types})
    judged = replay_candidate(replace(floor, peak_bytes=(held / 2,) * 4), little)
    assert judged.fits_memory is False
    assert "does not fit when replayed: device " in judged.message
    assert re.search(r" holds .*, largest: \w+ \S+ [MG]iB of \S+ [MG]iB$", judged.message)
    assert replay_candidate(replace(floor, peak_bytes=(2 * held,) * 4), little).fits_memory is True


def test_what_cannot_be_replayed_keeps_its_closed_form() -> None:
    """Four million micro-batches would take minutes and gigabytes."""
    many = small(4_000_000)
    (huge,) = propose(DataParallel(), many, Run())
    judged = replay_candidate(huge, many)
    assert (judged.closed_form_seconds, judged.replay) == (None, None)
    assert judged.predicted_seconds == huge.closed_form_seconds != huge.predicted_seconds
    assert "not replayed" in judged.message and "too many micro-batches" in judged.message


def test_the_deciding_chain_is_the_whole_iteration(planning: Planning, workload: Workload) -> None:
    explained, run = present(planning.explanation), present(planning.candidates[0].replay)
    assert sum(explained.critical.values()) == pytest.approx(run.seconds, rel=1e-9)
    busiest, tightest = present(explained.busiest).facts, present(explained.tightest).facts
    assert busiest["busy_share"] == pytest.approx(max(run.timeline.busy) / run.seconds)
    unit = run.owners.index((busiest["replica"], busiest["stage"]))
    assert run.timeline.busy[unit] == max(run.timeline.busy)
    shares = [p / q for p, q in zip(run.peak_bytes, run.limit_bytes, strict=True)]
    assert tightest["bytes"] / tightest["limit_bytes"] == max(shares) == shares[tightest["device"]]
    parts = dict(tightest["components"])
    assert parts.pop("reserved") == RESERVED_BYTES
    assert sum(parts.values()) == pytest.approx(tightest["bytes"])
    assert explained.runner_up in planning.candidates[1:]
    assert [c.name for c in explained.paper_candidates] == ["amp/paper"]
    lines = {"time goes to", "objective", "busiest", "tightest memory", "papers' own"}
    assert lines <= {row[0] for row in explained.table(workload).rows}


def test_the_same_plan_under_another_name_is_no_runner_up(
    planning: Planning, workload: Workload
) -> None:
    best = planning.candidates[0]
    twin = replace(best, method=StrategyMethod("twin"))
    slow = replace(best, strategy="slow", plan=planning.candidates[-1].plan)
    assert explain([best, twin, slow], 0, workload).runner_up is slow


def test_a_winner_without_a_replay_is_still_ranked(workload: Workload, planning: Planning) -> None:
    explained = explain([replace(planning.candidates[0], replay=None)], 0, workload)
    assert (explained.critical, explained.fullest_link) == ({}, None)
    document = explained.document()
    assert (document["bottleneck"], document["runner_up"]) == (None, None)
    assert explained.table(workload).rows


class Hopeless(Strategy, Problem):
    """Reports a bound of 100 s, and notes whether it is then to stop."""

    name = "hopeless"
    methods = (StrategyMethod("auto", exact=True),)

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def pose(self, workload: Workload, run: Run) -> list[Problem]:
        return [self]

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        run.report(bound=100.0)
        self.asked.append(run.should_stop)
        return Candidate(strategy=self.name, method=method, status="feasible", bound=100.0)


def test_paradigms_that_cannot_win_end_early_and_say_so() -> None:
    """An exact method whose bound is far above the best replay; where money counts it goes on."""
    workload, strategy = small(), Hopeless()
    best = present(make_plans(workload, [DataParallel()], one_thread()).best)
    for slack in (1.25, math.inf):
        search = StrategySearch(strategy, workload, one_thread(), known=(best,), cannot_win=slack)
        (candidate,) = search.exact_candidates(one_thread())
        assert ("cannot win" in candidate.message) is strategy.asked[-1]
    assert strategy.asked == [True, False]
    money = make_plans(
        workload, [DataParallel(), strategy], one_thread(), criteria=Criteria(cheapest_within=5.0)
    )
    assert strategy.asked[2:] and not any(strategy.asked[2:]) and money.best is not None


def test_a_saved_plan_is_explained(planning: Planning, workload: Workload) -> None:
    """What it computes and where it waits is all of its time; what would help is asked of replays;
    the plan file says what is proven, and whether other costs made it."""
    plan, run = present(planning.candidates[0].plan), present(planning.candidates[0].replay)
    for unit, busy in enumerate(run.timeline.busy):
        parts = waits(run.timeline, unit)
        assert min(parts) >= 0 and sum(parts) + busy == pytest.approx(run.seconds)
        own = [event for event in run.timeline.events() if event["unit"] == unit]
        assert parts[0] == min(e["start"] for e in own if e["kind"] == "forward")
    helps = effects(plan, run, workload)
    slow = perturbed(workload.profile, {"T4": np.full(len(workload.profile.layers), 1 / 1.1)})
    faster = replay(plan, replace(workload, profile=slow)).seconds / run.seconds - 1
    assert helps["T4 10 % faster"] == pytest.approx(faster) and -1 < min(helps.values()) <= 0
    text = why(plan, run, workload, 0.75 * run.seconds)
    assert "plan file" not in text and "25 % below this one" in text["left open"]
    assert [what for what in text if what != "fullest link"] == [
        "objective",
        "time goes to",
        "busiest",
        "all stages",
        "tightest memory",
        "would help",
        "left open",
    ]
    elsewhere = replace(workload, profile=slow)
    other = why(plan, replay(plan, elsewhere), elsewhere, None)
    assert other["plan file"].startswith(f"says {seconds_text(run.seconds)}: planned with other")
    assert "no bound of all plans" in other["left open"]


def test_like_pipelines_share_a_name(workload: Workload) -> None:
    """Of two on V100 and T4 each, the second stage is one thing, whichever pipeline decides."""
    stages = [
        [{"layers": [[0, 9]], "devices": [[a]]}, {"layers": [[9, 14]], "devices": [[b]]}]
        for a, b in ((0, 2), (1, 3))
    ]
    batches = [{"count": 4, "samples": 1}]
    plan = new_plan(workload, [{"stages": own, "micro_batches": batches} for own in stages])
    run = replay(plan, workload)
    assert unit_names(plan, run) == {0: "stage 0", 1: "stage 1", 2: "stage 0", 3: "stage 1"}
    assert not any("pipeline" in part for part in critical_parts(plan, run))
    replicas = [plan.replicas[0], pipeline(workload).replicas[0]]
    unlike = plan.model_copy(update={"replicas": replicas})
    assert name_of(unlike, run, [2]) == "stage 0 of pipeline 1"
