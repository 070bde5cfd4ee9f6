"""Programs that read each parameter in one way: made of programs that do not, and as good as those
to the devices."""

from __future__ import annotations

import random

import numpy as np

from hetplan.formulations import family
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.first import greedy_program
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.spmd.holding import holding_of
from hetplan.formulations.hap.spmd.links import measured_by_hap
from hetplan.formulations.hap.spmd.networks import model
from hetplan.formulations.hap.spmd.one_way import in_one_way, reads
from hetplan.formulations.hap.spmd.rules import Theory, theory_of
from hetplan.formulations.hap.spmd.whole import held
from hetplan.formulations.hap.theory import reduce_theory
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run

DEVICES = [Device(name="a", flops_per_second=2e12), *[Device(name="b", flops_per_second=1e12)] * 2]


def several(theory: Theory, decision: HapDecision) -> set[str]:
    """The parameters that the decision reads in several ways."""
    ways: dict[str, set[int]] = {}
    for i in decision.program:
        for owner, form in reads(theory, theory.instructions[i]):
            ways.setdefault(owner, set()).add(form)
    return {owner for owner, forms in ways.items() if len(forms) > 1}


def test_one_way_is_left_of_several() -> None:
    """A parameter read in several ways is held whole; afterwards each is read in one, and loss and
    gradients stay."""
    program = model("gpt2", 6, 3, tiny=True)
    holding = holding_of(program, [1e12] * 3, element_bytes=4)
    theory = theory_of(program, DEVICES, measured_by_hap(3), holding=holding)
    reduced = reduce_theory(compile_problem(theory.data))
    rewritten = clashes = 0
    for seed in range(12):
        draw = random.Random(seed)
        prices = [draw.random() ** 3 for _ in theory.data.triples]
        order = greedy_program(reduced, lambda step, prices=prices: prices[step.index])  # type: ignore[misc]
        before = HapDecision(program=order, ratios=[[0.5, 0.2, 0.3]])
        clashing = several(theory, before)
        clashes += len(clashing)
        parts = held(theory, before).parameters
        assert all((parts[owner] == np.ones(3)).all() for owner in clashing)
        choices = list(in_one_way(theory, before, Run()))
        assert bool(choices) <= bool(clashing)
        for decision in choices:
            assert several(theory, decision) == set()
            assert evaluate(family("hap"), theory.data, decision).objective is not None
            rewritten += 1
    assert rewritten >= 10 and clashes >= 20
