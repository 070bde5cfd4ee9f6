"""Orders of passes in a plan file: what is accepted, and each fault with its place."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.plans.passes import Pass, parsed, virtual_stages
from hetplan.plans.plan import Plan, parse_plan

Texts = list[list[str]]
FLAT: Texts = [["F0", "F1", "B0", "W0", "B1", "W1"], ["F0", "D0", "F1", "B1", "W1"]]
FOLDED: Texts = [
    ["F0", "F1", "F0.1", "D0.1", "F1.1", "B1.1", "D0", "W1.1", "D1"],
    ["F0", "F0.1", "F1", "F1.1", "D0.1", "D0", "D1.1", "D1"],
]


def document(passes: Texts | None, *, chunks: int = 1, **more: Any) -> dict[str, Any]:
    """A plan of two stages with four layers and two micro-batches. chunks: 2 for a V."""
    layers = [[[0, 2]], [[2, 4]]] if chunks == 1 else [[[0, 1], [3, 4]], [[1, 2], [2, 3]]]
    stages = [{"layers": ranges, "devices": [[j]]} for j, ranges in enumerate(layers)]
    return {
        "format": "hetplan-plan",
        "version": 1,
        "name": "orders",
        "workload": {
            "model": "m", "cluster": "c", "global_batch": 2, "precision": "fp16",
            "layers": list("abcd"),
        },
        "devices": [{"type": "A", "node": 0}, {"type": "A", "node": 0}],
        "schedule": "explicit",
        "replicas": [{"stages": stages, "micro_batches": [{"count": 2, "samples": 1}]}],
        **({} if passes is None else {"passes": [passes]}),
        **more,
    }  # fmt: skip


def plan_of(passes: Texts | None, **more: Any) -> Plan:
    return parse_plan(document(passes, **more), where="p")


def replaced(texts: Texts, stage: int, order: str) -> Texts:
    """The passes with those of one stage replaced, written with spaces between them."""
    return [order.split() if j == stage else of_stage for j, of_stage in enumerate(texts)]


def test_orders_are_read_and_written() -> None:
    flat, folded = plan_of(FLAT), plan_of(FOLDED, chunks=2)
    assert flat.splits_backward and folded.splits_backward
    assert not flat.replicas[0].folded and folded.replicas[0].folded
    assert folded.model_dump(mode="json")["passes"] == [FOLDED]
    orders = folded.explicit_orders(0)
    assert orders is not None
    assert orders[0][5] == Pass("B", 1, 1)
    assert [one.text(2).removesuffix(".0") for one in orders[0]] == FOLDED[0]


def test_a_stage_without_w_passes_has_whole_backward_passes() -> None:
    assert [one.kind for one in parsed(["F0", "B0"])] == ["F", "D"]
    assert not plan_of([["F0", "B0", "F1", "B1"], ["F0", "D0", "F1", "D1"]]).splits_backward


def test_stages_may_take_micro_batches_in_different_orders() -> None:
    plan_of([["F0", "F1", "D1", "D0"], ["F1", "F0", "D0", "D1"]])


def test_a_v_turns_at_the_ends() -> None:
    there_and_back = [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert virtual_stages(3, 2, folded=True) == there_and_back
    assert virtual_stages(2, 2, folded=False) == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0 B0 W0 F1 B1", "passes[0][1] lacks W1"),
        ("F0 D0 D1", "passes[0][1] lacks F1"),
        ("F0 D0 F1 B1 W1 W1", "passes[0][1][5] is W1, as passes[0][1][4] is"),
        ("F0 F1 D0 D1 D0", "passes[0][1][4] is D0, as passes[0][1][2] is"),
        ("F0 D0 F1 D1 W1", "passes[0][1][4] is W1, which is part of D1, passes[0][1][3]"),
        ("F0 D0 D1 F1", "passes[0][1][2] is D1, expected behind F1, passes[0][1][3]"),
        ("F0 D0 F1 W1 B1", "passes[0][1][3] is W1, expected behind B1, passes[0][1][4]"),
        (
            "F0 D0 F1 D1 F2",
            "passes[0][1][4] is F2, expected a micro-batch of 0..1 and a chunk of 0..0",
        ),
        ("F0 D0 F1 X1", "should match pattern"),
    ],
)
def test_a_fault_is_told_with_its_place(order: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        plan_of(replaced(FLAT, 1, order))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("texts", "chunks", "told"),
    [
        (
            [["F0", "D0", "F1", "D1"], ["F0", "F1", "D0", "D1"]],
            1,
            "stage 0 at D0 for D0 of stage 1, stage 1 at F1 for F1 of stage 0",
        ),
        (replaced(FOLDED, 1, "F0.1 F0 F1 F1.1 D0.1 D0 D1.1 D1"), 2, "stage 1 at F0.1 for F0 of"),
        (replaced(FOLDED, 1, "F0 F0.1 F1 F1.1 D0 D0.1 D1.1 D1"), 2, "stage 1 at D0 for D0.1 of"),
    ],
)
def test_an_order_that_cannot_go_on_is_refused_with_its_circle(
    texts: Texts, chunks: int, told: str
) -> None:
    with pytest.raises(InputError) as raised:
        plan_of(texts, chunks=chunks)
    message = str(raised.value).replace(".0 ", " ")
    assert "passes[0] wait for each other in a circle: " in message
    assert told in message and "\n" not in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"passes": [FLAT, FLAT]}, "passes has 2 entries, expected one per replica (1)"),
        ({"passes": [FLAT[:1]]}, "passes[0] has 1 entries, expected one per stage (2)"),
        ({"schedule": "1f1b"}, "passes are given under 1f1b"),
        ({"passes": None}, "passes are missing under explicit"),
        ({"recomputation": "full"}, "recomputation is full, expected none or selective under"),
        ({"passes": None, "schedule": "zbv"}, "layers has 1 ranges, expected 2 under zbv"),
    ],
)
def test_passes_go_with_the_plan(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_plan(document(FLAT) | more, where="p")
    assert message in str(raised.value)


def test_a_folded_schedule_wants_the_layers_of_a_v() -> None:
    made = document(None, chunks=2, schedule="zbv")
    assert parse_plan(made, where="p").replicas[0].folded
    made["replicas"][0]["stages"][1]["layers"] = [[1, 2], [3, 4]]
    made["replicas"][0]["stages"][0]["layers"] = [[0, 1], [2, 3]]
    with pytest.raises(InputError, match=r"stages\[1\]\.layers\[1\] begins at layer 3, expected 2"):
        parse_plan(made, where="p")
