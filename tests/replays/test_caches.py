"""What is worked out once lives on the object that it is about, and goes with it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

from fakes.workloads import BARE, cluster, pipeline, small
from hetplan.answers import Answers
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan
from hetplan.plans.plan import Stage
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.workload import make_workload
from hetplan.replays.degrees import zero_costs
from hetplan.replays.facts import facts_of
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay
from present import present


def test_an_answer_is_worked_out_once() -> None:
    answers, asked = Answers(), list[str]()

    def answer() -> str:
        asked.append("again")
        return "yes"

    assert [answers.once("why", answer) for _ in range(3)] == ["yes"] * 3 and asked == ["again"]
    assert answers.once("how", lambda: None) is None and answers.once("how", answer) is None
    assert Answers().once("why", answer) == "yes" and len(asked) == 2


def test_a_changed_workload_has_costs_of_its_own() -> None:
    on = small()
    assert costs_of(on) is costs_of(on) is not costs_of(on, "full")
    slower = replace(on, memory_margin=0.5)
    assert costs_of(slower) is not costs_of(on) and slower.answers is not on.answers
    kept = [costs.data.types["T4"].memory_bytes for costs in (costs_of(on), costs_of(slower))]
    assert kept[1] < kept[0]
    assert on == replace(on) and "answers" not in repr(on)


def test_plans_without_a_text_decoder_have_facts_once() -> None:
    on = small()
    assert facts_of(on) is facts_of(on) is not facts_of(replace(on))


def test_nothing_keeps_the_costs_of_a_workload_that_is_gone() -> None:
    """Plain pipelines of gpt2, and a plan with context ranks of a small decoder."""
    on = small()
    replay(pipeline(on, 5, 9), on)
    nodes = [{"count": 1, "devices": 2, "device": "T4", "intra_node_gbit_per_s": 100,
              "network_gbit_per_s": 40}]  # fmt: skip
    model = load_model(text_model("tiny", "test", 64, llama(2, 64, 4, 128)))
    further = make_workload(model, cluster(nodes=nodes), 4, stack=BARE)
    stage: dict[str, Any] = {
        "layers": [(0, 4)], "devices": [[0], [1]], "row_shares": [1.0, 1.0],
    }  # fmt: skip
    replicas = [{"stages": [stage], "micro_batches": [{"count": 4, "samples": 1}]}]
    plan = new_plan(further, replicas, degrees=Degrees(context=2))
    replay(plan, further)
    same = present(zero_costs(plan, further)).costs
    assert present(zero_costs(plan, further)).costs is same
    gone = [weakref.ref(costs) for costs in (costs_of(on), same)]
    del on, further, same
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_stage_keeps_the_rows_that_its_largest_group_has() -> None:
    """Shares of 0.55 and 0.45 divide four rows into two and two, not into three and one."""
    costs = costs_of(small())
    shares: dict[str, Any] = {"layers": [(0, 2)], "devices": [[0], [1]], "tensor_shares": [1.0]}
    unequal = Stage.model_validate({**shares, "row_shares": [0.55, 0.45]}, strict=False)
    equal = Stage.model_validate({**shares, "row_shares": [0.5, 0.5]}, strict=False)
    kept = [costs.stage_seconds(stage, (4,)).saved_bytes for stage in (unequal, equal)]
    assert kept[0] == kept[1]
