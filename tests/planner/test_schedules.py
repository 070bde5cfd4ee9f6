"""The schedule as a part of the plan: the choice among schedules, and the best order of passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.workloads import one_thread
from hetplan.cli.plan import named_schedules, proven_text, schedule_text
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.joint.schedule.choose import choose, with_chunks
from hetplan.formulations.joint.space import Space
from hetplan.planner.criteria import Criteria
from hetplan.planner.joint import SCHEDULES, Joint, JointSettings, seconds_under_1f1b
from hetplan.planner.order import order
from hetplan.planner.pictures.scene import PlanningDocument, bound_of
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.plans.making import new_plan
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import (
    PASS_SCHEDULES,
    MicroBatches,
    PassSchedule,
    Plan,
    Prediction,
    Replica,
    Stage,
    load_plan,
)
from hetplan.profiling.workload import Workload
from hetplan.replays.pose import pose
from hetplan.replays.replay import replay
from hetplan.solvers.run import Run
from present import present


class Chooser(Joint):
    """`joint` without the method that searches whole backward passes, which takes seconds."""

    methods = (SCHEDULES,)

    def __init__(self, starts: Sequence[Plan], schedules: Sequence[PassSchedule] = ()) -> None:
        settings = JointSettings(seconds=0.3)
        super().__init__(settings, starts, schedules=schedules or PASS_SCHEDULES)

    def beginning_with(self, plans: Iterable[Plan]) -> Joint:
        return Chooser([*self.starts, *plans], self.schedules)

    def within_schedules(self, schedules: Sequence[PassSchedule]) -> Joint:
        return Chooser(self.starts, schedules)


@pytest.fixture(scope="module")
def chain(workload: Workload) -> Plan:
    """Four stages of one device each, under 1F1B."""
    ends = [0, 4, 8, 11, len(workload.profile.layers)]
    stages = [
        Stage(layers=[(ends[device], ends[device + 1])], devices=[[device]]) for device in range(4)
    ]
    batches = [MicroBatches(count=4, samples=2)]
    return new_plan(workload, [Replica(stages=stages, micro_batches=batches)])


def planned(workload: Workload, chain: Plan, *schedules: PassSchedule) -> Planning:
    """The planning by data parallelism and the choice of a schedule, under these or all."""
    strategies = [*make_strategies(["dp"]), Chooser([chain])]
    return make_plans(workload, strategies, one_thread(), criteria=Criteria(schedules=schedules))


@pytest.fixture(scope="module")
def planning(workload: Workload, chain: Plan) -> Planning:
    """The planning under all schedules."""
    return planned(workload, chain)


def chosen(workload: Workload, chain: Plan, *schedules: PassSchedule) -> Plan:
    """The plan that is chosen under these schedules, beginning with the chain."""
    space = Space(pose(workload, ("none",)), with_chunks(schedules))
    found = choose(space, Run(budget=0.2), [chain], schedules)
    return Plan.model_validate(dict(present(found).plan))


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "v-min", "explicit", "gpipe"])
def test_the_choice_has_a_schedule_that_is_allowed(
    workload: Workload, chain: Plan, schedule: PassSchedule
) -> None:
    plan = chosen(workload, chain, schedule)
    assert plan.schedule == schedule or plan.in_step
    assert replay(plan, workload).fits


def test_split_passes_are_faster_than_the_same_stages_under_1f1b(
    workload: Workload, chain: Plan
) -> None:
    under = {name: chosen(workload, chain, name) for name in ("zb-h2", "explicit")}
    assert {plan.splits_backward for plan in under.values()} == {True}
    before = replay(chain, workload).seconds
    assert all(replay(plan, workload).seconds < 0.97 * before for plan in under.values())


def test_the_winner_has_a_schedule_that_was_asked_for(workload: Workload, chain: Plan) -> None:
    planning = planned(workload, chain, "zb-h1")
    plan = present(present(planning.best).plan)
    assert plan.in_step or plan.schedule == "zb-h1"
    criteria = Criteria(schedules=("zb-h1", "zbv"))
    made = replace(present(planning.best), plan=chain)
    told, may_win = criteria.judged(made, workload)
    assert not may_win
    assert told.message == "1f1b is not among the schedules asked for (zb-h1, zbv)"
    with pytest.raises(InputError, match=r"unknown schedule .got .zb., expected some of gpipe"):
        Criteria(schedules=("zb",)).check(workload)  # type: ignore[arg-type]


def test_bounds_are_of_the_schedules_that_plans_may_have(
    workload: Workload, planning: Planning
) -> None:
    chosen = next(c for c in planning.candidates if c.method == SCHEDULES)
    least = present(chosen.bound)
    assert planning.bound == planning.bound_whole == least
    assert all(least <= present(c.predicted_seconds) for c in planning.candidates)
    whole = replace(chosen, method=Joint.methods[0], bound=1.05 * least)
    both = replace(planning, candidates=(chosen, whole), winner=0)
    assert (both.bound, both.bound_whole) == (least, 1.05 * least)
    assert ", none with whole backward passes than" in proven_text(chosen, both)
    # without the bound of all orders, the claim is one of whole backward passes
    lost = replace(planning, candidates=(whole,), winner=0)
    assert (lost.bound, lost.bound_whole) == (None, 1.05 * least)
    assert "no plan of stages with whole backward passes is faster" in proven_text(whole, lost)
    assert "no plan of stages is" in proven_text(chosen, planning)
    # where only whole passes are asked for, theirs is the bound
    asked = replace(both, criteria=Criteria(schedules=("1f1b", "gpipe")))
    assert asked.bound == 1.05 * least
    assert "with whole backward passes is faster" in proven_text(whole, asked)


def test_a_picture_says_of_which_plans_its_bound_is(chain: Plan) -> None:
    def stated(strategy: str, method: str) -> tuple[float | None, str]:
        prediction = Prediction(strategy=strategy, method=method, bound=0.5)
        return bound_of(chain.model_copy(update={"prediction": prediction}), None)

    every, whole = "plan of stages", "plan of stages with whole backward passes"
    assert stated("joint", "schedules") == stated("joint", "schedules+bf16") == (0.5, every)
    assert stated("joint", "auto") == (0.5, whole)
    assert stated("amp", "auto") == (None, every)

    def document(bound: float | None, **more: Any) -> PlanningDocument:
        return PlanningDocument(winner=None, candidates=[], bound=bound, **more)

    assert bound_of(chain, document(0.5, bound_whole=0.6)) == (0.5, every)
    assert bound_of(chain, document(0.5)) == (0.5, whole)  # an older document
    assert bound_of(chain, document(None, bound_whole=0.6)) == (0.6, whole)


def test_joint_searches_no_schedule_twice(workload: Workload, chain: Plan) -> None:
    [problem] = Chooser([chain], WHOLE_SCHEDULES).pose(workload, Run())
    assert problem.solve(SCHEDULES, Run()) is None
    [problem] = Chooser([chain], ("gpipe",)).pose(workload, Run())
    found = present(problem.solve(SCHEDULES, Run()))
    assert present(found.plan).schedule == "gpipe" or present(found.plan).in_step
    assert found.bound is None


def test_the_answer_says_what_1f1b_would_take(
    workload: Workload, chain: Plan, planning: Planning
) -> None:
    made = next(c for c in planning.candidates if c.method == SCHEDULES)
    seconds = seconds_under_1f1b(Space(pose(workload, ("none",))), chain)
    assert seconds == pytest.approx(replay(chain, workload).seconds)
    plan = chosen(workload, chain, "zb-h2")
    described = replace(made, plan=plan, details={"seconds_under_1f1b": seconds})
    text = schedule_text(described, planning)
    assert text.startswith("zb-h2, with split backward passes; under 1f1b the same devices take")
    assert "the best plan without, dp/enumeration, takes" in text
    assert schedule_text(replace(made, plan=chain), planning) == ""


def test_schedules_are_named() -> None:
    assert named_schedules(None) == ()
    assert named_schedules("interleaved, zbv,zbv") == ("interleaved-1f1b", "zbv")
    for text in ("1f1b,zb", "spmd", ","):
        with pytest.raises(InputError, match=r"--schedules.*expected some of gpipe, 1f1b"):
            named_schedules(text)


@pytest.mark.parametrize("split", [True, False])
def test_the_best_order_is_written_into_the_plan(
    workload: Workload, chain: Plan, tmp_path: Path, split: bool
) -> None:
    one_by_one = [f"{kind}{batch}" for batch in range(4) for kind in "FB"]
    slow = chain.model_copy(update={"schedule": "explicit", "passes": [[one_by_one] * 4]})
    found = order(slow, workload, one_thread(), split=split)
    assert found.is_faster and found.bound <= found.seconds < found.seconds_before
    found.plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert (read.schedule, read.splits_backward) == ("explicit", split)
    assert read.replicas == chain.replicas
    assert replay(read, workload).seconds == pytest.approx(found.seconds, rel=1e-12)


def test_a_plan_whose_order_is_the_best_stays_as_it_is(workload: Workload, chain: Plan) -> None:
    once = order(chain, workload, one_thread())
    again = order(once.plan, workload, one_thread())
    assert not again.is_faster
    assert again.plan == once.plan


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev", "interleaved-1f1b"])
@pytest.mark.parametrize("split", [True, False])
def test_every_schedule_can_be_ordered(
    workload: Workload, schedule: PassSchedule, split: bool
) -> None:
    """With whole passes, too, where the schedule splits them."""
    L = len(workload.profile.layers)
    layers: dict[str, list[list[tuple[int, int]]]] = {
        "zb-h1": [[(0, 7)], [(7, L)]],
        "interleaved-1f1b": [[(0, 4), (7, 10)], [(4, 7), (10, L)]],
    }
    on_a_v = [[(0, 4), (10, L)], [(4, 7), (7, 10)]]
    stages = [
        Stage(layers=runs, devices=[[2 * s]]) for s, runs in enumerate(layers.get(schedule, on_a_v))
    ]
    replica = Replica(stages=stages, micro_batches=[MicroBatches(count=4, samples=2)])
    plan = new_plan(workload, [replica], schedule=schedule)
    found = order(plan, workload, one_thread(), split=split)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert found.seconds <= found.seconds_before == replay(plan, workload).seconds
    assert found.is_faster == (found.plan.schedule == "explicit")


def test_a_single_stage_has_nothing_to_order(workload: Workload) -> None:
    stage = Stage(layers=[(0, len(workload.profile.layers))], devices=[[0]])
    replica = Replica(stages=[stage], micro_batches=[MicroBatches(count=4, samples=2)])
    plan = new_plan(workload, [replica])
    assert order(plan, workload, one_thread()).plan is plan


def test_what_has_no_passes_to_split_is_refused(workload: Workload, chain: Plan) -> None:
    again = chain.model_copy(update={"recomputation": "full"})
    with pytest.raises(UnsupportedError, match="got 'recomputation full', expected none or s"):
        order(again, workload, one_thread())
