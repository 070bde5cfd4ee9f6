"""What is proven of plans is told in words, and no claim is stronger than its bound."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hetplan.cli.plan import planning_tables, proven_text
from hetplan.planner.candidate import Candidate
from hetplan.planner.criteria import Criteria
from hetplan.planner.explain import why
from hetplan.planner.joint import SCHEDULES
from hetplan.planner.pictures.html import page
from hetplan.planner.pictures.scene import read, scene
from hetplan.planner.pictures.terminal import tables
from hetplan.planner.planning import Planning
from hetplan.planner.proofs import claim, joined_ladders, ladder_table
from hetplan.planner.ranking import without_saved_bound
from hetplan.planner.search import on_devices, replay_candidate
from hetplan.plans.alike import has_equal_replicas
from hetplan.plans.degrees import Degrees
from hetplan.plans.ladder import Rung
from hetplan.plans.plan import Plan
from hetplan.profiling.profiles.profile import perturbed
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from present import present

SHAPE = {"replicas": 2, "micro_batch": 1}


def ladder_for(seconds: float) -> tuple[Rung, ...]:
    """A whole ladder below a plan with equal replicas of so many seconds."""
    return (
        Rung(rung="alone", bound=0.3 * seconds, best=seconds),
        Rung(rung="micro-batches", bound=0.4 * seconds, best=seconds, **SHAPE),
        Rung(rung="passes", bound=0.5 * seconds, best=seconds, **SHAPE),
        Rung(rung="links", bound=0.9 * seconds, best=seconds, **SHAPE),
        Rung(rung="equal", bound=0.8 * seconds, best=seconds),
        Rung(rung="all", bound=0.6 * seconds, best=seconds),
    )


def of_joint(planning: Planning) -> Candidate:
    """A candidate with equal replicas, as if the strategy `joint` had found it."""
    candidate = next(
        c
        for c in planning.candidates
        if c.plan is not None and c.fits_memory and has_equal_replicas(c.plan)
    )
    seconds = present(candidate.predicted_seconds)
    ladder = ladder_for(seconds)
    found = replace(
        candidate, strategy="joint", closed_form_seconds=None, objective=seconds,
        bound=ladder[-1].bound, ladder=ladder,
    )  # fmt: skip
    return replay_candidate(found, planning.workload)


@pytest.fixture(scope="module")
def proven(planning: Planning) -> Planning:
    """The candidate of `joint` with its ladder is the winner."""
    return replace(planning, candidates=(of_joint(planning), *planning.candidates), winner=0)


def unequal(plan: Plan) -> Plan:
    """The plan outside the class: with further degrees, that change nothing."""
    return plan.model_copy(update={"degrees": Degrees()})


CLASS = "plans with equal replicas and whole backward passes"


@pytest.mark.parametrize(
    ("belongs", "seconds", "bound", "equal", "further", "words"),
    [
        (
            True, 1.0, 0.6, 0.8, False,
            f"of {CLASS} none is faster than 800 ms when replayed (gap 20 %); "
            "no plan of stages is faster than 600 ms when replayed (gap 40 %)",
        ),
        (
            True, 1.0, 0.6, 1.0, False,
            f"of {CLASS} none is faster when replayed; "
            "no plan of stages is faster than 600 ms when replayed (gap 40 %)",
        ),
        # A plan outside the class is never said to be optimal in it, nor is its gap to the class.
        (
            False, 1.0, 0.6, 0.8, False,
            "no plan of stages is faster than 600 ms when replayed (gap 40 %); "
            f"of {CLASS} none is faster than 800 ms, and the best that is known takes 2 s "
            "(gap 60 %)",
        ),
        # The bound of the class adds nothing.
        (
            True, 1.0, 0.6, 0.6, False,
            "no plan of stages is faster than 600 ms when replayed (gap 40 %)",
        ),
        (
            True, 1.0, 0.6, None, False,
            "no plan of stages is faster than 600 ms when replayed (gap 40 %)",
        ),
        (True, 1.0, 1.0, 1.0, False, "no plan of stages is faster when replayed: it is optimal"),
        (
            True, 1.0, 0.6, 0.8, True,
            f"of {CLASS} and no context or expert ranks none is faster than "
            "800 ms when replayed (gap 20 %); no plan of stages, with context and expert ranks "
            "or without, is faster than 600 ms when replayed (gap 40 %)",
        ),
    ],
)  # fmt: skip
def test_the_claim_is_the_strongest_that_is_true(
    proven: Planning, belongs: bool, seconds: float, bound: float, equal: float | None,
    further: bool, words: str,
) -> None:  # fmt: skip
    plan = present(proven.candidates[0].plan)
    said = claim(
        plan if belongs else unequal(plan),
        seconds,
        bound,
        [] if equal is None else [Rung(rung="equal", bound=equal, best=2.0)],
        plans="plan of stages",
        further=further,
    )
    assert said == words


def test_a_bound_of_any_order_stands_beside_that_of_whole_passes(proven: Planning) -> None:
    plan, class_bound = present(proven.candidates[0].plan), Rung(rung="equal", bound=0.8)
    every = (
        "no plan of stages is faster than 500 ms when replayed (gap 50 %), "
        "none with whole backward passes than 700 ms"
    )
    said = claim(
        plan, 1.0, 0.5, [class_bound], plans="plan of stages", bound_whole=0.7, further=False
    )
    assert said == f"of {CLASS} none is faster than 800 ms when replayed (gap 20 %); {every}"
    weak = class_bound.model_copy(update={"bound": 0.7})
    said = claim(plan, 1.0, 0.5, [weak], plans="plan of stages", bound_whole=0.7, further=False)
    assert said == every


def test_the_last_rung_is_of_any_order(proven: Planning) -> None:
    """The schedules' candidate brings a bound of all orders of passes, and perhaps a faster
    plan."""
    best = proven.candidates[0]
    seconds = present(best.predicted_seconds)
    split = replace(best, method=SCHEDULES, ladder=(), bound=0.25 * seconds)
    split = replace(split, plan=present(split.plan).model_copy(update={"schedule": "zb-h1"}))
    faster = replace(split, predicted_seconds=0.5 * seconds)
    both = replace(proven, candidates=(*proven.candidates, faster))
    rungs = {rung.rung: rung for rung in both.ladder}
    assert list(rungs)[-1] == "any-order"
    assert rungs["any-order"].bound == both.bound == 0.25 * seconds
    assert rungs["all"].bound == both.bound_whole == 0.6 * seconds
    assert rungs["any-order"].best == rungs["alone"].best == present(faster.predicted_seconds)
    assert rungs["all"].best == seconds


def test_claims_and_table_name_the_levels_of_zero(proven: Planning) -> None:
    """Where only some levels are asked for, the bounds are of plans with these."""
    asked = replace(proven, criteria=Criteria(zero_levels=(0, 1)))
    said = proven_text(proven.candidates[0], asked)
    assert said.startswith(f"of {CLASS} and ZeRO 0 or 1 none is faster than ")
    every = "no plan of stages with ZeRO 0 or 1 and with whole backward passes is faster than "
    assert f"; {every}" in said
    shown = "\n".join(map(str, planning_tables(asked, everything=True)))
    assert "what is proven: no plan with ZeRO 0 or 1 of a class is faster" in shown


def test_the_command_line_tells_the_ladder(proven: Planning) -> None:
    best = proven.candidates[0]
    seconds = present(best.predicted_seconds)
    said = proven_text(best, proven)
    assert said.startswith(f"of {CLASS} none is faster than ")
    assert "(gap 20 %)" in said and "(gap 40 %)" in said
    shown = "\n".join(map(str, planning_tables(proven, everything=True)))
    assert "what is proven" in shown and "the same, with fill and drain" in shown
    assert "what is proven" not in "\n".join(map(str, planning_tables(proven, everything=False)))
    rungs = proven.document()["ladder"]
    assert [rung["gap"] for rung in rungs] == pytest.approx([0.7, 0.6, 0.5, 0.1, 0.2, 0.4])
    assert rungs[-1]["bound"] == proven.bound_whole == 0.6 * seconds


def test_show_and_the_page_tell_it_too(proven: Planning, workload: Workload) -> None:
    best = proven.candidates[0]
    plan, run = present(best.plan), present(best.replay)
    assert (
        "equal replicas" in why(plan, run, workload, proven.bound_whole, proven.ladder)["left open"]
    )
    _, document = read(json.loads(json.dumps(proven.document())), "x.json")
    of_file = Plan.model_validate_json(plan.model_dump_json())
    assert present(of_file.prediction).ladder == list(best.ladder)
    for drawn in (scene(plan, run, workload, document), scene(of_file, run, workload)):
        assert not drawn.other_costs
        assert [rung.model_dump() for rung in drawn.ladder] == [
            rung.model_dump() for rung in proven.ladder
        ]
        assert "what is proven" in "\n".join(map(str, tables(drawn)))
        text = page(drawn)
        assert (
            "What is proven" in text
            and "no plan with equal replicas, with whole backward passes, is faster than" in text
        )
        assert drawn.document()["ladder"][-1]["gap"] == pytest.approx(0.4)


def test_other_costs_have_no_ladder(proven: Planning, workload: Workload) -> None:
    plan = present(proven.candidates[0].plan)
    factors = np.full(len(workload.profile.layers), 1 / 1.1)
    elsewhere = replace(workload, profile=perturbed(workload.profile, {"T4": factors}))
    assert scene(plan, replay(plan, workload), workload).ladder
    assert scene(plan, replay(plan, elsewhere), elsewhere).ladder == ()


def test_a_file_without_a_ladder_is_read(proven: Planning) -> None:
    document = json.loads(present(proven.candidates[0].plan).model_dump_json())
    del document["prediction"]["ladder"]
    assert present(Plan.model_validate(document).prediction).ladder is None
    document["prediction"]["ladder"] = [{"rung": "every", "bound": 1.0}]
    with pytest.raises(ValueError, match="rung"):
        Plan.model_validate(document)


def test_bounds_are_left_behind_on_another_cluster(proven: Planning, workload: Workload) -> None:
    moved = on_devices(proven.candidates[0], workload, range(len(workload.cluster.devices)))
    assert moved.ladder == () and present(present(moved.plan).prediction).ladder is None


def test_a_file_of_chosen_levels_states_no_bounds(proven: Planning) -> None:
    """Its readers would take them for bounds of plans with every level of ZeRO."""
    kept = present(without_saved_bound(proven.candidates[0]).plan)
    prediction = present(kept.prediction)
    assert (prediction.bound, prediction.ladder) == (None, None)


def test_ladders_of_several_precisions_have_the_least_bounds() -> None:
    one, other = ladder_for(1.0), ladder_for(0.5)
    joined = joined_ladders([one, other])
    assert [rung.rung for rung in joined] == ["alone", "equal", "all"]
    assert [rung.bound for rung in joined] == pytest.approx([0.15, 0.4, 0.3])
    assert {rung.best for rung in joined} == {0.5}
    assert [rung.rung for rung in joined_ladders([one, one[-1:]])] == ["all"]
    assert joined_ladders([one]) == one


def test_a_ladder_is_of_all_precisions_or_not_told(proven: Planning) -> None:
    assert proven.ladder
    assert replace(proven, precisions=("fp16", "bf16")).ladder == ()


def test_plans_with_further_degrees_lower_the_rungs_of_all_plans(proven: Planning) -> None:
    """They may be faster than the bounds of plans without; a class without them keeps its own."""
    seconds = present(proven.candidates[0].predicted_seconds)
    alone = replace(proven.candidates[-1], computing_alone=0.1 * seconds)
    further = replace(proven, candidates=(*proven.candidates, alone))
    bounds = {rung.rung: rung.bound / seconds for rung in further.ladder}
    assert bounds["alone"] == bounds["all"] == pytest.approx(0.1)
    assert bounds["equal"] == pytest.approx(0.8)
    assert "no context or expert ranks" in proven_text(further.candidates[0], further)


def test_the_table_says_which_plans_a_rung_is_of() -> None:
    text = str(ladder_table(ladder_for(1.0)))
    for words in ("2 equal replicas, micro-batches of 1", "all plans of stages", "70 %", "20 %"):
        assert words in text
    single = Rung(rung="micro-batches", bound=1.0, replicas=1, micro_batch=4)
    assert "1 pipeline, micro-batches of 4" in str(ladder_table([single]))
