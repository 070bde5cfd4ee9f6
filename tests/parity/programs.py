"""SPMD programs of the packaged networks on ranks, a target of `parity.forked`.

Programs are drawn at random from each network's theory, so that all rules occur, under uneven
ratios, some of them 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakes.programs import IDLE, NETWORKS, UNEVEN, drawn_program, every_rule, plan_of
from fakes.simulated import Outcome, Values, random_values, reference
from fakes.workloads import cluster, shape
from hetplan.errors import UnsupportedError
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.pose import pose
from hetplan.formulations.hap.pricing import Theory
from hetplan.planner.hap import SpmdProblem
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.zoo import text_model
from hetplan.profiling.workload import make_workload
from hetplan.programs.program import SingleProgram
from hetplan.programs.proofs import read_program
from hetplan.runtime.spmd.distributed import DistributedProgram
from hetplan.runtime.spmd.models import ProgramModel
from parity import program_curves
from parity.device import DEVICE, exact
from present import present


@dataclass(frozen=True)
class Case:
    """A program of a network. seed: of the prices that choose it. runs: of the program in an
    iteration."""

    network: str
    world: int
    seed: int
    ratios: Sequence[Sequence[float]]
    runs: int = 1
    dtype: str = "float64"

    @property
    def name(self) -> str:
        """Network, ranks and seed."""
        return (
            f"{self.network}-{self.world}-{self.seed}-{len(self.ratios)}-{self.runs}-{self.dtype}"
        )

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
    def values(self) -> list[Values]:
        """[runs] data of each run, and the same parameters."""
        parameters = {p.name for p in self.program.parameters}
        first = random_values(self.program, 1)
        others = [random_values(self.program, 2 + run) for run in range(1, self.runs)]
        return [
            first,
            *({**other, **{name: first[name] for name in parameters}} for other in others),
        ]

    @property
    def model(self) -> ProgramModel:
        """With the case's data and parameters."""

        def batch(step: int, first: int, last: int) -> Values:
            return self.values[first // (last - first)]

        return ProgramModel(self.program, batch, lambda name, shape: self.values[0][name].numpy())

    @property
    def expected(self) -> Outcome:
        """Of one device."""
        each = [reference(self.program, values) for values in self.values]
        gradients = {
            name: torch.stack([one.gradients[name] for one in each]).mean(0)
            for name in each[0].gradients
        }
        return Outcome(sum(one.loss for one in each) / self.runs, gradients)


@cache
def of_machines(nodes: tuple[int, ...]) -> SpmdProblem:
    """A small model on nodes of so many devices, posed on all devices and on machines."""
    kinds = [{"devices": n, "device": kind} for n, kind in zip(nodes, ("V100-SXM2-16GB", "T4"))]  # noqa: B905
    links = {"intra_node_gbit_per_s": 100, "network_gbit_per_s": 10}
    on = cluster(nodes=[node | links for node in kinds])
    model = load_model(text_model("small", "made up", 6, shape()), precision="fp32")
    workload = make_workload(model, on, 2 * sum(nodes))
    return SpmdProblem(pose(workload, 1), pose(workload, 1, machines=True), 30.0, 0.0)


@dataclass(frozen=True)
class MachineCase(Case):
    """A plan of machines as virtual devices, which have the ratios. nodes: devices of each."""

    nodes: tuple[int, ...] = ()

    @property
    def program(self) -> SingleProgram:
        """The whole batch's."""
        return of_machines(self.nodes).posed.theory.program

    @cached_property
    def plan(self) -> Plan:
        """As the planner writes it for every device."""
        problem = of_machines(self.nodes)
        program = drawn_program(problem.searched.theory, self.seed)
        decision = HapDecision(program=program, ratios=[list(row) for row in self.ratios])
        return problem.to_plan(problem.in_whole_units(problem.on_every_device(decision)))


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
    MachineCase("llama on machines", 3, 0, [[0.4, 0.6]], nodes=(2, 1)),
    MachineCase("llama on machines", 4, 1, [[0.5, 0.5]], nodes=(3, 1)),
]
WORLDS = sorted({case.world for case in CASES})
STAGED = tuple(case.name for case in CASES if case.network in ("bert-moe", "vgg19"))


def step_of(case: Case, **options: Any) -> tuple[float, dict[str, Any]]:
    """Loss and parts of gradients of one step."""
    model = DistributedProgram(case.model, case.plan, device=DEVICE, **options)
    refusal = pytest.raises(UnsupportedError, match=r"inside torch\.autocast")
    with refusal, torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        model.train_step()
    loss = model.train_step()
    gradients = {name: present(p.grad).cpu().clone() for name, p in model.updated()}
    return loss, {n: (model.shards[n].dimension, g) for n, g in gradients.items()}


def quick(rank: int, world: int, folder: Path, staging: Sequence[str] = ()) -> None:
    """One step of each case of this size, and another one that stages everything of those that
    are named; every rank writes what it holds of the gradients."""
    exact()
    found: dict[str, Any] = {}
    for case in CASES:
        if case.world == world:
            (folder / f"at-{world}-{rank}").write_text(case.name)
            torch.set_default_dtype(getattr(torch, case.dtype))
            found[case.name] = step_of(case)
            if case.name in staging:
                found[f"staged: {case.name}"] = step_of(case, staging="always")
            dist.barrier()
    torch.save(found, folder / f"programs-{world}-{rank}.pt")


def work(rank: int, world: int, folder: Path) -> None:
    """The same with staging where it can differ, then loss curves."""
    quick(rank, world, folder, STAGED)
    if world in program_curves.WORLDS:
        program_curves.work(rank, world, folder)


def kinds_used() -> set[str]:
    """Instructions that the cases' programs have."""
    return {i.do for case in CASES for i in case.plan.program.instructions} | {  # type: ignore[union-attr]
        "reduction"
        for case in CASES
        for i in read_program(case.plan, case.program).order
        if getattr(getattr(i, "way", None), "output", None) == -2 and i.way.shared  # type: ignore[union-attr]
    }
