"""SPMD programs of the packaged networks on ranks: `python forked.py parity.programs FOLDER`.

Programs are drawn at random from each network's theory, so that all rules occur, under uneven ratios, some of them 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.first import greedy_program
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.spmd.execute import Outcome, random_values, reference
from hetplan.formulations.hap.spmd.links import ring
from hetplan.formulations.hap.spmd.models import networks as n
from hetplan.formulations.hap.spmd.operators.base import Array
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import Theory, theory_of
from hetplan.formulations.hap.theory import reduce_theory
from hetplan.runtime.execution.spmd.distributed import DistributedProgram
from hetplan.runtime.execution.spmd.model import ProgramModel
from hetplan.runtime.plan import Plan, parse_plan
from hetplan.runtime.spmd_decision import read_program, write_program

UNEVEN: dict[int, list[float]] = {2: [0.7, 0.3], 3: [0.5, 0.2, 0.3], 4: [0.15, 0.4, 0.25, 0.2]}
IDLE: dict[int, list[float]] = {2: [1.0, 0.0], 3: [0.6, 0.0, 0.4], 4: [0.0, 0.5, 0.0, 0.5]}


@dataclass(frozen=True)
class Case:
    """A program of a network. seed: of the prices that choose it. runs: of the program in an iteration."""

    network: str
    world: int
    seed: int
    ratios: Sequence[Sequence[float]]
    runs: int = 1
    dtype: str = "float64"

    @property
    def name(self) -> str:
        """Network, ranks and seed."""
        return f"{self.network}-{self.world}-{self.seed}-{len(self.ratios)}-{self.runs}-{self.dtype}"

    @property
    def program(self) -> SingleProgram:
        """Of one run."""
        return tiny(self.network, self.world, len(self.ratios))

    @cached_property
    def plan(self) -> Plan:
        """The program as a plan file has it."""
        theory = theory_at(self.network, self.world, len(self.ratios))
        decision = HapDecision(
            program=drawn_program(theory, self.seed), ratios=[list(row) for row in self.ratios]
        )
        return plan_of(theory, decision, self.runs)

    @cached_property
    def values(self) -> list[Mapping[str, Array]]:
        """[runs] data of each run, and the same parameters."""
        parameters = {p.name for p in self.program.parameters}
        first = random_values(self.program, 1)
        others = [random_values(self.program, 2 + run) for run in range(1, self.runs)]
        return [first, *({**other, **{name: first[name] for name in parameters}} for other in others)]

    @property
    def model(self) -> ProgramModel:
        """With the case's data and parameters."""

        def batch(step: int, first: int, last: int) -> Mapping[str, Array]:
            return self.values[first // (last - first)]

        return ProgramModel(self.program, batch, lambda name, shape: self.values[0][name])

    @property
    def expected(self) -> Outcome:
        """Of one device."""
        each = [reference(self.program, values) for values in self.values]
        gradients = {
            name: np.mean([one.gradients[name] for one in each], axis=0) for name in each[0].gradients
        }
        return Outcome(sum(one.loss for one in each) / self.runs, gradients)


# of two blocks and few entries, m ranks and b samples
NETWORKS: dict[str, Callable[[int, int], SingleProgram]] = {
    "vgg19": lambda b, m: n.vgg19(b, m, 7, 10, m),
    "vit": lambda b, m: n.vit(b, n.sizes(2, True, m), 2 * m, 12, 10),
    "bert": lambda b, m: n.bert(b, n.sizes(2, True, m), 2 * m, 6 * m),
    "bert-moe": lambda b, m: n.bert(b, n.sizes(2, True, m), 2 * m, 6 * m, m),
    "gpt2": lambda b, m: n.gpt2(b, n.sizes(2, True, m), 2 * m, 6 * m),
    "llama-blocks": lambda b, m: n.llama(b, n.sizes(2, True, m), 2 * m),
}


@cache
def tiny(network: str, world: int, segments: int) -> SingleProgram:
    """A network on small tensors, two samples a rank, its layers in runs of equal number."""
    made = NETWORKS[network](2 * world, world)
    layers = list(dict.fromkeys(node.layer for node in made.nodes))
    each = -(-len(layers) // segments)
    return made.with_segments({node.name: layers.index(node.layer) // each for node in made.nodes})


@cache
def theory_at(network: str, world: int, segments: int) -> Theory:
    """Of a tiny network."""
    return every_rule(tiny(network, world, segments), world)


def every_rule(program: SingleProgram, world: int) -> Theory:
    """A theory whose prices do not matter."""
    devices = [Device(name="any", flops_per_second=1.0)] * world
    return theory_of(program, devices, ring(world, 1e9), all_dimensions=True)


def drawn_program(theory: Theory, seed: int) -> list[int]:
    """The cheapest at random prices: other rules for every seed."""
    draw = random.Random(seed)
    prices = [draw.random() ** 3 for _ in theory.data.triples]
    return greedy_program(reduce_theory(compile_problem(theory.data)), lambda step: prices[step.index])


def plan_of(theory: Theory, decision: HapDecision, runs: int = 1) -> Plan:
    """A plan of that program, one device a node."""
    m, program = len(decision.ratios[0]), theory.program
    samples = program.nodes[0].shape[0]
    layers = list(dict.fromkeys(node.layer for node in program.computations))
    stage = {"layers": [[0, len(layers)]], "devices": [list(range(m))], "tensor_shares": [1.0] * m}
    document: dict[str, Any] = {
        "format": "hetplan-plan", "version": 1, "name": program.name, "schedule": "spmd",
        "workload": {
            "model": program.name, "cluster": "made up", "global_batch": samples * runs, "sequence": None,
            "precision": "fp32", "layers": layers,
        },
        "devices": [{"type": "A", "node": d} for d in range(m)],
        "replicas": [{"stages": [stage], "micro_batches": [{"count": runs, "samples": samples}]}],
        "program": write_program(theory, decision).model_dump(mode="json"),
    }  # fmt: skip
    return parse_plan(document, where=program.name)


CASES = [
    *(Case(network, 3, 0, [UNEVEN[3]]) for network in ("vit", "bert", "gpt2", "llama-blocks")),
    *(Case("bert-moe", world, 1, [UNEVEN[world]]) for world in (2, 4)),
    *(
        Case(network, world, 3, [IDLE[world]])
        for network, world in (("bert-moe", 3), ("gpt2", 4), ("vit", 2))
    ),
    *(Case("vgg19", world, world, [ratios[world]]) for world, ratios in ((2, UNEVEN), (3, IDLE))),
    *(Case("gpt2", world, 4, [UNEVEN[world]], runs=2) for world in (2, 4)),
    *(Case("bert-moe", 3, seed, [UNEVEN[3], IDLE[3], [0.1, 0.2, 0.7]]) for seed in (0, 2)),
    Case("llama-blocks", 2, 5, [UNEVEN[2]], dtype="float32"),
]
WORLDS = sorted({case.world for case in CASES})


def work(rank: int, world: int, folder: Path) -> None:
    """One step of each case of this size; every rank writes what it holds of the gradients."""
    found: dict[str, Any] = {}
    for case in CASES:
        if case.world == world:
            (folder / f"at-{world}-{rank}").write_text(case.name)
            torch.set_default_dtype(getattr(torch, case.dtype))
            distributed = DistributedProgram(case.model, case.plan)
            loss = distributed.train_step()
            parts = {s.name: (s.dimension, torch.from_numpy(g.copy())) for s, g in distributed.gradients()}
            found[case.name] = (loss, parts)
            dist.barrier()
    torch.save(found, folder / f"programs-{world}-{rank}.pt")


def kinds_used() -> set[str]:
    """Instructions that the cases' programs have."""
    return {i.do for case in CASES for i in case.plan.program.instructions} | {  # type: ignore[union-attr]
        "reduction"
        for case in CASES
        for i in read_program(case.plan, case.program).order
        if getattr(getattr(i, "way", None), "output", None) == -2 and i.way.shared  # type: ignore[union-attr]
    }
