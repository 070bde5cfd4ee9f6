"""Programs in time: both passes together are what theories charge, and reading a plan's program
gives it back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fakes.programs import IDLE, NETWORKS, UNEVEN, drawn_program, every_rule, plan_of
from hetplan.errors import InputError
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.evaluate import evaluate
from hetplan.formulations.hap.pricing import theory_of
from hetplan.plans.plan import Plan
from hetplan.programs.links import Links
from hetplan.programs.proofs import proof_of, read_program, write_program
from hetplan.programs.timed import Prices, Stage, Timed

M = 3
LINKS = Links(M, 1e9, 2e9, 3e9, 4e9, 5e9, latency=1e-3)


def total(stages: list[Stage]) -> float:
    """Every stage waits for the slowest."""
    return sum(float(stage.compute.max()) + stage.seconds for stage in stages)


@pytest.mark.parametrize("network", ["vit", "bert-moe", "gpt2"])
def test_both_passes_take_what_theories_charge(network: str) -> None:
    """Equal devices and even ratios of whole units: no stage has more than one slowest device."""
    # of which every axis is a multiple
    two, links = 2, Links(2, 1e9, 2e9, 3e9, 4e9, 5e9, latency=1e-3)
    program = NETWORKS[network](2 * two, two)
    theory = theory_of(
        program, [Device(name="A", flops_per_second=2e9)] * two, links, all_dimensions=True
    )
    prices, apart = Prices(np.full(two, 2e9), {}, links, 4), 0
    for seed in range(4):
        decision = HapDecision(program=drawn_program(theory, seed), ratios=[[1 / two] * two])
        timed = Timed(theory.decided(decision), prices)
        charged = evaluate(theory.data, decision).objective
        stages = timed.run(last=True)
        # what the theory leaves out: slices of a parameter's gradient that is held whole
        gathered = [s for s in stages if s.collective.startswith("All-Gather gradient")]
        apart += len(gathered)
        assert total(stages) - sum(s.seconds for s in gathered) == pytest.approx(charged, rel=1e-9)
        joined = [s for s in stages if s.collective.startswith("All-Reduce gradient")]
        between = total(timed.run(last=False))
        assert between + sum(s.seconds for s in joined) == pytest.approx(charged, rel=1e-9)
    assert apart or network != "gpt2", "its embedding is tied"


@pytest.mark.parametrize("network", list(NETWORKS))
def test_plans_give_their_programs_back(network: str) -> None:
    program = NETWORKS[network](2 * M, M)
    theory = every_rule(program, M)
    for seed in range(3):
        decision = HapDecision(program=drawn_program(theory, seed), ratios=[UNEVEN[M]])
        plan = plan_of(theory, decision)
        assert read_program(plan, program).order == [
            theory.instructions[i] for i in decision.program
        ]
        assert plan.program is not None
        assert proof_of(plan.program, theory.rules, "here") == decision.program


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of a BERT with experts."""
    theory = every_rule(NETWORKS["bert-moe"](2 * M, M), M)
    return plan_of(theory, HapDecision(program=drawn_program(theory, 2), ratios=[UNEVEN[M]]))


def changed(plan: Plan, instructions: list[Any]) -> Plan:
    """With other instructions."""
    assert plan.program is not None
    return plan.model_copy(
        update={"program": plan.program.model_copy(update={"instructions": instructions})}
    )


def test_programs_that_prove_nothing_are_one_line(plan: Plan) -> None:
    assert plan.program is not None
    good, program = plan.program.instructions, NETWORKS["bert-moe"](2 * M, M)
    sync = next(i for i, step in enumerate(good) if step.do == "All-Reduce gradient")
    run = next(i for i, step in enumerate(good) if step.do == "Run" and len(step.before) > 1)
    other = good[run].model_copy(update={"before": ["All-Gather(7)", *good[run].before[1:]]})
    cases = {
        "which nothing before it gives": good[::-1],
        "needs ": [step for i, step in enumerate(good) if i != sync],
        "does not establish the goal": good[:1],
        r"repeats instructions\[0\]": [good[0], *good],
        rf"no rule allows program.instructions\[{run}\] .got 'Run": [
            *good[:run],
            other,
            *good[run + 1 :],
        ],
        "unknown tensor": [good[0].model_copy(update={"tensor": "nowhere"}), *good[1:]],
    }
    for text, instructions in cases.items():
        with pytest.raises(
            InputError, match=f"^bert-moe: program does not match the model: .*{text}"
        ) as caught:
            read_program(changed(plan, list(instructions)), program)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="unknown tensor"):
        read_program(plan, NETWORKS["vgg19"](2 * M, M))
    halves = program.with_segments(
        {node.name: int(node.layer != "embedding") for node in program.nodes}
    )
    with pytest.raises(
        InputError, match=r"ratios are not for this model .got '1 segments', expected 2"
    ):
        read_program(plan, halves)


def test_moves_between_segments_name_the_segment_that_they_go_to() -> None:
    program = NETWORKS["vit"](2 * M, M)
    split = program.with_segments(
        {node.name: int(node.layer != "embedding") for node in program.nodes}
    )
    theory = every_rule(split, M)
    decision = HapDecision(program=drawn_program(theory, 1), ratios=[UNEVEN[M], IDLE[M]])
    written = write_program(theory.decided(decision)).instructions
    moves = [step for step in written if step.do == "Repartition"]
    assert moves and {step.segment for step in moves} == {1}
    read = read_program(plan_of(theory, decision), split)
    assert read.order == [theory.instructions[i] for i in decision.program]
    assert read.ratios == decision.ratios
