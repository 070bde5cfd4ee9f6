"""A user's model of which a part is frozen: trained under several plans, each going on from the one
before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.runtime import distribute
from hetplan.runtime.engine import checkpoint
from parity.cases import Case, Perceptron, R, S, even, zero
from parity.device import default_type

WORLDS = [2]
STEPS = 2  # under each plan
BATCH = 5
TWO = [R([S((0, 4))], [(1, 3)]), R([S((0, 4))], [(1, 2)])]
PLANS = [Case(f"ZeRO {level}", "perceptron", TWO, zero(level)).plan for level in (2, 0, 3, 1)]
PLANS += [
    Case(f"pipeline, ZeRO {z}", "perceptron", [R(even([0, 1, 4]), [(1, 5)])], zero(z)).plan
    for z in (0, 3)
]
FROZEN = ("0.weight", "1.1.bias")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
}


def frozen() -> Perceptron:
    """With first values, two of its parameters frozen."""
    made = Perceptron()
    for name, parameter in made.layers.named_parameters():
        parameter.data.copy_(made.initial(name, parameter))
        parameter.requires_grad_(name not in FROZEN)
    return made


def rows(first: int, last: int) -> tuple[Tensor, Tensor]:
    """The same in every step."""
    return Perceptron().batch(0, first, last)


def work(rank: int, world: int, folder: Path) -> None:
    """Losses of all plans one after the other; frozen parameters are what they were."""
    torch.set_default_dtype(torch.float64)
    curves: dict[str, list[float]] = {}
    first = dict(frozen().layers.named_parameters())
    for name, kind in OPTIMIZERS.items():
        losses = curves.setdefault(name, [])
        for plan in PLANS:
            model: Any = distribute(frozen(), plan)
            updates = model.optimizer(kind)
            if losses:
                checkpoint.load(model, updates, str(folder / name))
            for _ in range(STEPS):
                losses.append(model.train_step(rows))
                updates.step()
                updates.zero_grad()
            checkpoint.save(model, updates, str(folder / name))
            model.states.begin()
            for key in set(FROZEN) & model.states.parameters.keys():
                held = model.states.parameters[key]
                assert held.untyped_storage().size() == 0 or torch.equal(held, first[key]), key
    if dist.get_rank() == 0:
        torch.save(curves, folder / "frozen.pt")


def alone(name: str) -> list[float]:
    """The same in one process, by plain torch."""
    with default_type("float64"):
        module, losses = frozen(), []
        optimizer = OPTIMIZERS[name](module.parameters())
        inputs, targets = rows(0, BATCH)
        for _ in range(STEPS * len(PLANS)):
            loss = module(inputs, targets) / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses
