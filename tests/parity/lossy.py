"""Steps of a net with each of many losses on two ranks, under replicas that differ or two stages in
turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fakes.losses import RIGHT, ROWS, Net, plan_of, rows
from hetplan.runtime import distribute

WORLDS = (2,)
PLAN_OF = {name: ("dp", "pp")[k % 2] for k, name in enumerate(RIGHT)}
STEPS = 2
# (losses, weights behind them)
Told = tuple[list[float], dict[str, torch.Tensor]]


def made(name: str) -> Net:
    """A net with its first weights."""
    torch.manual_seed(3)
    return Net(RIGHT[name])


def alone(name: str) -> Told:
    """The same in one process."""
    torch.set_default_dtype(torch.float64)
    net = made(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = net(**rows(step, 0, ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    torch.set_default_dtype(torch.float32)
    return losses, dict(net.named_parameters())


def work(rank: int, world: int, folder: Path) -> None:
    """All losses; rank 0 leaves the losses and the trained weights."""
    torch.set_default_dtype(torch.float64)
    told: dict[str, Told] = {}
    for name, plan in PLAN_OF.items():
        model: Any = distribute(made(name), plan_of(plan), example=rows(9, 0, 1))
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        losses = []
        for step in range(STEPS):
            losses.append(model.train_step(lambda *part, step=step: rows(step, *part)))
            optimizer.step()
            optimizer.zero_grad()
        told[name] = losses, dict(model.gather().named_parameters())
    if rank == 0:
        torch.save(told, folder / "told.pt")
