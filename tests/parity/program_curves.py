"""Losses of a small GPT-2 trained by SPMD programs, in the process groups of `parity.programs`.

Two ranks train it and leave a checkpoint half way; three go on from there by another program, in
two runs a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from evidence.speed.hap_theories import gpt2 as written
from fakes.programs import IDLE, UNEVEN, drawn_program, every_rule, plan_of
from hetplan.formulations.hap.data import HapDecision
from hetplan.plans.plan import Plan
from hetplan.profiling.models.transformer import transformer
from hetplan.programs.program import SingleProgram
from hetplan.runtime.engine.checkpoint import load, save
from hetplan.runtime.spmd.distributed import DistributedProgram
from parity.device import DEVICE

WORLDS = [2, 3]
STEPS, BATCH = 6, 12
SHAPE = transformer(1, 12, 3, 9, vocabulary=0)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
}


def plan_on(world: int) -> Plan:
    """Other ratios, another program, another number of runs for each."""
    runs = 1 if world == 2 else 2
    theory = every_rule(written(BATCH // runs, SHAPE, 6, 15), world)
    ratios = UNEVEN[2] if world == 2 else IDLE[3]
    return plan_of(theory, HapDecision(program=drawn_program(theory, world), ratios=[ratios]), runs)


def gpt2(plan: Plan) -> SingleProgram:
    """One block, for the plan's runs; also as `--factory` wants it."""
    return written(plan.replicas[0].micro_batches[0].samples, SHAPE, 6, 15)


def whole_batch(plan: Plan) -> SingleProgram:
    """One run of all samples, which plans with several runs cannot take."""
    return written(BATCH, SHAPE, 6, 15)


def work(rank: int, world: int, folder: Path) -> None:
    """All optimizers on this number of ranks."""
    torch.set_default_dtype(torch.float64)
    plan = plan_on(world)
    found = {}
    for name, (kind, options) in OPTIMIZERS.items():
        model = DistributedProgram(gpt2(plan), plan, device=DEVICE)
        optimizer = model.optimizer(kind, **options)
        target = str(folder / name)
        if world == 3:
            load(model, optimizer, target)
        losses = []
        while model.step < STEPS:
            losses.append(model.train_step())
            optimizer.step()
            optimizer.zero_grad()
            if world == 2 and model.step == STEPS // 2:
                save(model, optimizer, target)
        found[name] = losses
    if rank == 0:
        torch.save(found, folder / f"curves-{world}.pt")
