"""The evaluator by hand: stages, waiting for communication, every constraint; and a program in
full, whose stages add up to its objective."""

from __future__ import annotations

import pytest

from evidence.speed.hap_theories import chain
from hap.hap_cases import instance, programs
from hetplan.errors import InputError
from hetplan.formulations.hap.data import Communication, Device, HapData, HapDecision
from hetplan.formulations.hap.evaluate import evaluate, instructions, listing, show, walked
from hetplan.formulations.hap.family import FAMILY
from hetplan.schema import parse
from hetplan.solvers.registry import load, solve
from hetplan.solvers.run import Options, Run

TRIPLES: list[dict[str, object]] = [
    {"kind": "compute", "instruction": "load", "pre": [], "post": ["x|All-Gather(0)"],
     "fixed_flops": 0.0, "shared_flops": 0.0},
    {"kind": "compute", "instruction": "matmul", "pre": ["x|All-Gather(0)"],
     "post": ["y|All-Reduce"],
     "segment": 0, "fixed_flops": 2.0, "shared_flops": 8.0},
    {"kind": "comm", "instruction": "all-reduce", "pre": ["y|All-Reduce"],
     "post": ["y|Identity"],
     "segment": 1, "fixed_seconds": 0.5, "shared_seconds": 2.0},
    {"kind": "compute", "instruction": "loss", "pre": ["y|Identity"], "post": ["l|All-Reduce"],
     "segment": 1, "fixed_flops": 0.0, "shared_flops": 4.0},
]  # fmt: skip
THEORY: dict[str, object] = {
    "devices": [{"name": "fast", "flops_per_second": 4.0},
                {"name": "slow", "flops_per_second": 1.0}],
    "segments": 2,
    "triples": TRIPLES,
    "goal": "l|All-Reduce",
}  # fmt: skip
DATA = parse(HapData, THEORY, where="test")


def test_the_cost_by_hand() -> None:
    """First stage max((2 + 6) / 4, (2 + 2) / 1) = 4; all-reduce 0.5 + 2 * 0.6; then max(2.4 / 4,
    1.6) = 1.6."""
    found = evaluate(DATA, HapDecision(program=[0, 1, 2, 3], ratios=[[0.75, 0.25], [0.6, 0.4]]))
    assert found.objective == pytest.approx(4 + 1.7 + 1.6)
    assert found.parts["communication"] == pytest.approx(1.7)


PROGRAM, RATIOS = [0, 1, 2, 3], [[1.0, 0.0], [0.5, 0.5]]
# Decisions that break the constraint of that number alone, and changes of THEORY.
ALONE: list[tuple[int, list[int], list[list[float]], dict[str, object], list[str]]] = [
    (
        1,
        [0, 2, 1, 3],
        RATIOS,
        {},
        ["program[1] (all-reduce) needs 'y|All-Reduce', which nothing before it gives"],
    ),
    (
        1,
        [1, 0, 3, 2],
        RATIOS,
        {},
        [
            "program[0] (matmul) needs 'x|All-Gather(0)', which nothing before it gives",
            "program[2] (loss) needs 'y|Identity', which nothing before it gives",
        ],
    ),
    (2, [0, 1, 2], RATIOS, {}, ["the program does not establish the goal 'l|All-Reduce'"]),
    (2, [], RATIOS, {}, ["the program does not establish the goal 'l|All-Reduce'"]),
    (
        3,
        [0, 1, 1, 2, 1, 3],
        RATIOS,
        {},
        [
            "program[2] repeats triple 1 of program[1]",
            "program[4] repeats triple 1 of program[1]",
        ],
    ),
    (
        4,
        PROGRAM,
        RATIOS,
        {
            "triples": [triple | {"fixed_bytes": 1.0} for triple in TRIPLES],
            "memory": {"device_bytes": [3.9, 3.0]},
        },
        [
            "device 0 (fast) holds 4 bytes, it has 3.9",
            "device 1 (slow) holds 4 bytes, it has 3",
        ],
    ),
    (5, PROGRAM, RATIOS[:1], {}, ["ratios has 1 rows, expected one per segment (2)"]),
    (
        5,
        PROGRAM,
        [[1.0], [0.5, 0.25, 0.25]],
        {},
        [
            "ratios[0] has 1 entries, expected one per device (2)",
            "ratios[1] has 3 entries, expected one per device (2)",
        ],
    ),
    (
        5,
        PROGRAM,
        [[0.9, 0.0], [0.5, 0.75]],
        {},
        ["ratios[0] sums to 0.9, expected 1", "ratios[1] sums to 1.25, expected 1"],
    ),
    (
        6,
        [0, 1, 2, 3, 9, 4],
        RATIOS,
        {},
        ["program[4] is 9, expected less than 4", "program[5] is 4, expected less than 4"],
    ),
    (
        7,
        [0, 1, 2, 3],
        RATIOS,
        {"program": [0, 1, 2, 3, 4], "triples": [*TRIPLES, TRIPLES[0]]},
        ["the program is not the one that the instance asks the ratios for"],
    ),
]


@pytest.mark.parametrize(("number", "program", "ratios", "changes", "expected"), ALONE)
def test_a_constraint_broken_alone_is_reported_alone_at_all_places(
    number: int,
    program: list[int],
    ratios: list[list[float]],
    changes: dict[str, object],
    expected: list[str],
) -> None:
    theory = parse(HapData, {**THEORY, **changes}, where="test")
    found = evaluate(theory, HapDecision(program=program, ratios=ratios))
    assert (found.objective, found.violations) == (None, tuple(expected))


def test_every_constraint_has_a_case_that_breaks_it_alone() -> None:
    assert {number for number, *_ in ALONE} == set(range(1, 8))


def test_constraints_broken_together_are_all_reported() -> None:
    theory = parse(HapData, {**THEORY, "program": PROGRAM}, where="test")
    found = evaluate(theory, HapDecision(program=[1, 1, 7], ratios=[[0.5, 0.25, 0.5]]))
    needs = "needs 'x|All-Gather(0)', which nothing before it gives"
    assert found.objective is None
    assert found.violations == (
        f"program[0] (matmul) {needs}",
        f"program[1] (matmul) {needs}",
        "the program does not establish the goal 'l|All-Reduce'",
        "program[1] repeats triple 1 of program[0]",
        "program[2] is 7, expected less than 4",
        "the program is not the one that the instance asks the ratios for",
        "ratios has 1 rows, expected one per segment (2)",
        "ratios[0] has 3 entries, expected one per device (2)",
        "ratios[0] sums to 1.25, expected 1",
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"segments": 1}, "triples[2].segment is 1, expected less than segments (1)"),
        ({"segments": 1_000_000}, "segments: not usable (got 1000000, expected at most 1024)"),
        ({"program": [0, 7]}, "program[1] is 7, expected less than the number of triples (4)"),
        ({"devices": []}, "devices"),
        ({"devices": [{"name": "a", "flops_per_second": 0.0}]}, "devices[0].flops_per_second"),
        ({"triples": [{"kind": "wait"}]}, "triples[0]"),
        (
            {"triples": [TRIPLES[0] | {"shared_bytes": 1.0}]},
            "triples[0].shared_bytes is 1.0, expected none without memory.device_bytes",
        ),
        (
            {"memory": {"device_bytes": [1.0]}},
            "memory.device_bytes has 1 entries, expected one per device (2)",
        ),
    ],
)
def test_unusable_data_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError) as error:
        parse(HapData, {**THEORY, **change}, where="test")
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    "method",
    ["auto", "cp-sat", "cp-sat-linear", "milp", "pyomo", "paper", "dp-even", "dp-proportional"],
)
def test_programs_that_cannot_be_are_infeasible_and_say_why(method: str) -> None:
    run = Run(Options(threads=1))
    for changes, message in (
        ({"program": [1, 2, 3]}, "program"),
        ({"program": [0, 1, 2]}, "program"),
        ({"program": [0, 0, 1, 2, 3]}, "program"),
        ({"triples": TRIPLES[1:]}, "cannot be derived"),
        ({"goal": "z|Identity"}, "no triple establishes the goal"),
    ):
        result = solve(FAMILY, parse(HapData, {**THEORY, **changes}, where="test"), method, run)
        assert result.status == "infeasible" and message in result.message
    data = parse(HapData, {**THEORY, "program": [0, 1, 2, 3]}, where="test")
    decision = solve(FAMILY, data, method, run).decision
    assert isinstance(decision, HapDecision) and decision.program == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_stages_add_up_to_the_objective(seed: int) -> None:
    data = instance(seed)
    for program in list(programs(seed).values())[:5]:
        ratios = [[1 / len(data.devices)] * len(data.devices)] * data.segments
        decision = HapDecision(program=list(program), ratios=ratios)
        stages, rows = walked(data, decision)[0], instructions(data, decision)
        objective = evaluate(data, decision).objective
        assert sum(stage.total_seconds for stage in stages) == pytest.approx(objective, rel=1e-12)
        assert [row["triple"] for row in rows] == list(program)
        assert rows[-1]["stage"] == len(stages) - 1
        assert sum(row["seconds"] for row in rows if row["kind"] == "comm") == pytest.approx(
            sum(stage.comm_seconds for stage in stages)
        )


def test_a_decision_reads_for_people() -> None:
    """Ratios, stages, and a listing like Figure 11's."""
    data = chain(2, 2)
    decision = solve(FAMILY, data, "auto").decision
    assert isinstance(decision, HapDecision) and FAMILY.describe is not None
    ratios, stages = load(FAMILY.describe)(data, decision)
    assert len(ratios.rows) == 2
    assert sum(int(row[3]) for row in stages.rows) + len(stages.rows) - 1 == len(decision.program)
    table = listing(instructions(data, decision))
    assert table.header == ("#", "stage", "instruction", "tensor", "before", "after", "takes")
    assert len(table.rows) == len(decision.program)
    known: set[str] = set()
    for row in table.rows:
        before, after = row[4], row[5]
        assert before == "-" or set(before.split(", ")) <= known
        known |= set(after.split(", "))
        assert all(name.startswith(f"{row[3]}|") for name in after.split(", "))
    assert data.goal in known


def test_a_triple_that_gives_nothing_can_be_shown() -> None:
    effectless = DATA.triples[0].model_copy(update={"pre": (), "post": ()})
    data = DATA.model_copy(update={"triples": (effectless,)})
    ratios = [[1.0] + [0.0] * (len(data.devices) - 1)]
    decision = HapDecision(program=[0], ratios=ratios)
    assert instructions(data, decision)[0]["tensor"] == "-"


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
