"""Small single-device programs of the packaged networks, programs drawn from their theories, and
plans of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from evidence.speed import hap_theories as made
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.first_programs import greedy_program
from hetplan.formulations.hap.pricing import Theory, theory_of
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.theory import reduce_theory
from hetplan.plans.plan import Plan, parse_plan
from hetplan.programs import networks as n
from hetplan.programs.links import ring
from hetplan.programs.program import SingleProgram, Writer
from hetplan.programs.proofs import write_program

UNEVEN: dict[int, list[float]] = {2: [0.7, 0.3], 3: [0.5, 0.2, 0.3], 4: [0.15, 0.4, 0.25, 0.2]}
IDLE: dict[int, list[float]] = {2: [1.0, 0.0], 3: [0.6, 0.0, 0.4], 4: [0.0, 0.5, 0.0, 0.5]}


# of two blocks and few entries, m ranks and b samples
NETWORKS: dict[str, Callable[[int, int], SingleProgram]] = {
    "vgg19": lambda b, m: n.vgg19(b, m, 7, 12, m),
    "vit": lambda b, m: n.vit(b, made.sizes(2, True, m), 2 * m, 12, 12),
    "bert": lambda b, m: n.bert(b, made.sizes(2, True, m), 2 * m, 6 * m),
    "bert-moe": lambda b, m: n.bert(b, made.sizes(2, True, m), 2 * m, 6 * m, m),
    "gpt2": lambda b, m: made.gpt2(b, made.sizes(2, True, m), 2 * m, 6 * m),
    "llama-blocks": lambda b, m: made.llama(b, made.sizes(2, True, m), 2 * m),
}


def every_rule(program: SingleProgram, world: int) -> Theory:
    """A theory whose prices do not matter."""
    devices = [Device(name="any", flops_per_second=1.0)] * world
    return theory_of(program, devices, ring(world, 1e9), all_dimensions=True)


def drawn_program(theory: Theory, seed: int) -> list[int]:
    """The cheapest at random prices: other rules for every seed."""
    draw = random.Random(seed)
    prices = [draw.random() ** 3 for _ in theory.data.triples]
    return greedy_program(
        reduce_theory(compile_problem(theory.data)), lambda step: prices[step.index]
    )


def plan_of(theory: Theory, decision: HapDecision, runs: int = 1) -> Plan:
    """A plan of that program, one device a node."""
    m, program = len(decision.ratios[0]), theory.program
    samples = program.samples
    layers = list(dict.fromkeys(node.layer for node in program.computations))
    stage = {"layers": [[0, len(layers)]], "devices": [list(range(m))], "tensor_shares": [1.0] * m}
    document: dict[str, Any] = {
        "format": "hetplan-plan", "version": 1, "name": program.name, "schedule": "spmd",
        "workload": {
            "model": program.name, "cluster": "made up", "global_batch": samples * runs,
            "sequence": None, "precision": "fp32", "layers": layers,
        },
        "devices": [{"type": "A", "node": d} for d in range(m)],
        "replicas": [{"stages": [stage], "micro_batches": [{"count": runs, "samples": samples}]}],
        "program": write_program(theory.decided(decision)).model_dump(mode="json"),
    }  # fmt: skip
    return parse_plan(document, where=program.name)


def two_layers(batch: int, inner: int = 600, outer: int = 300) -> SingleProgram:
    """A matrix product of data with a parameter, a second, and a loss."""
    w = Writer("two")
    x, labels = w.placeholder("x", (batch, inner)), w.placeholder("labels", (batch,), below=outer)
    y = w.linear("first", x, "bi,oi->bo", (outer, inner))
    y = w.linear("second", y, "bi,oi->bo", (outer, outer))
    w.apply("cross-entropy", "loss", y, labels, count=batch)
    return w.finish()
