"""A program in full: instructions, properties, costs and stages add up to the evaluator's
objective."""

from __future__ import annotations

import pytest

from hap.hap_cases import instance, programs
from hetplan.formulations import family
from hetplan.formulations.hap.data import Communication, Device, HapData, HapDecision
from hetplan.formulations.hap.describe import (
    COMMUNICATING,
    COMPUTING,
    WAITING,
    drawing,
    listing,
    rows_of,
    show,
    stages_of,
)
from hetplan.formulations.hap.theories import chain
from hetplan.solvers.registry import evaluate, solve


@pytest.fixture(scope="module")
def solved() -> tuple[HapData, HapDecision]:
    """A chain of two layers on two types, with its optimum."""
    data = chain(2, 2)
    decision = solve(family("hap"), data, "auto").decision
    assert isinstance(decision, HapDecision)
    return data, decision


@pytest.mark.parametrize("seed", range(12))
def test_stages_add_up_to_the_objective(seed: int) -> None:
    data = instance(seed)
    for program in list(programs(seed).values())[:5]:
        ratios = [[1 / len(data.devices)] * len(data.devices)] * data.segments
        decision = HapDecision(program=list(program), ratios=ratios)
        stages, rows = stages_of(data, decision), rows_of(data, decision)
        objective = evaluate(family("hap"), data, decision).objective
        assert sum(stage.seconds for stage in stages) == pytest.approx(objective, rel=1e-12)
        assert [row.triple for row in rows] == list(program)
        assert rows[-1].stage == len(stages) - 1
        assert sum(row.seconds for row in rows if row.kind == "comm") == pytest.approx(
            sum(stage.comm_seconds for stage in stages)
        )


def test_listing_is_like_figure_11(solved: tuple[HapData, HapDecision]) -> None:
    data, decision = solved
    table = listing(data, decision)
    assert table.header == ("#", "stage", "instruction", "tensor", "before", "after", "takes")
    assert len(table.rows) == len(decision.program)
    known: set[str] = set()
    for row in table.rows:
        before, after = row[4], row[5]
        assert before == "-" or set(before.split(", ")) <= known
        known |= set(after.split(", "))
        assert all(name.startswith(f"{row[3]}|") for name in after.split(", "))
    assert data.goal in known


def test_drawing_is_to_scale(solved: tuple[HapData, HapDecision]) -> None:
    data, decision = solved
    width = 400
    table = drawing(data, decision, width)
    *devices, marks = [row[2] for row in table.rows]
    stages = stages_of(data, decision)
    total = sum(stage.seconds for stage in stages)
    waiting = sum(stage.comm_seconds for stage in stages) / total
    for line in devices:
        assert len(line) == width
        assert line.count(COMMUNICATING) / width == pytest.approx(waiting, abs=len(stages) / width)
    slowest = [line.count(COMPUTING) + line.count(WAITING) for line in devices]
    assert len(set(slowest)) == 1, "all wait for the slowest"
    assert marks.count("|") + 2 * marks.count("+") >= len(stages)


def test_a_program_for_nothing_can_be_shown() -> None:
    data = HapData(
        devices=[Device(name="d", flops_per_second=1.0)],
        triples=[
            Communication(
                kind="comm",
                instruction="c",
                pre=[],
                post=["loss"],
                fixed_seconds=0.0,
                shared_seconds=0.0,
            )
        ],
        goal="loss",
    )
    tables, document = show(data, HapDecision(program=[0], ratios=[[1.0]]))
    assert document["seconds"] == 0.0 and len(tables) == 3
    assert tables[2].rows[0][3:6] == ("loss", "-", "loss")
