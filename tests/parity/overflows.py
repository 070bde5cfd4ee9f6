"""Passes in fp16 whose gradients overflow on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetplan.runtime import distribute
from hetplan.runtime.engine import checkpoint
from hetplan.runtime.engine.loop import LossScale
from parity.cases import Case, Perceptron, R, S, even, zero

WORLDS = [2]
TWO = [R([S((0, 4))], [(1, 3)]), R([S((0, 4))], [(1, 2)])]
PLANS = {
    case.name: case.plan
    for case in (
        Case("data parallel", "perceptron", TWO),
        Case("ZeRO 2", "perceptron", TWO, zero(2)),
        Case("ZeRO 3", "perceptron", TWO, zero(3)),
        Case("pipeline", "perceptron", [R(even([0, 2, 4]), [(1, 3), (1, 2)])]),
    )
}
OVERFLOWS = (False, True, False, False, True, False)
BY_DATA = 1  # the other one is a single parameter's, whose gradient no other stage sees
START = LossScale(interval=2)


def rows(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Targets whose last row is far away in one step."""
    inputs, targets = Perceptron().batch(0, first, last)
    if step == BY_DATA and last == 5:
        targets[-1] = 1e8
    return inputs, targets


def work(rank: int, world: int, folder: Path) -> None:
    """By plan: (scale, whether this rank's weights moved, whether it has a gradient) of each step,
    and the scale of a checkpoint's."""
    torch.set_default_dtype(torch.float32)
    written: dict[str, Any] = {}
    for name, plan in PLANS.items():
        model: Any = distribute(Perceptron(), plan, precision="fp16")
        model.scale, optimizer = START, model.optimizer(torch.optim.AdamW, lr=1e-2)
        steps: list[Any] = []
        if rank == 1:
            held = list(model.states.parameters.values())[-1]
            held.register_hook(lambda g, at=steps: g / 0 if OVERFLOWS[len(at)] else g)
        for step in range(len(OVERFLOWS)):
            model.train_step(lambda first, last, step=step: rows(step, first, last))
            before = [p.detach().clone() for _, p in model.updated()]
            has = {p.grad is not None for _, p in model.updated()}
            optimizer.step()
            optimizer.zero_grad()
            after = [p.detach() for _, p in model.updated()]
            moved = not all(map(torch.equal, before, after))
            steps.append((model.scale.value, moved, has))
        checkpoint.save(model, optimizer, str(folder / name))
        kept, model.scale = model.scale, START
        checkpoint.load(model, optimizer, str(folder / name))
        written[name] = steps, kept == model.scale
    torch.save(written, folder / f"told-{rank}.pt")
