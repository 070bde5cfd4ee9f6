"""A loop that evaluates, saves, loads under another plan, and takes the trained state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fakes.losses import ROWS, Net, cross, plan_of, rows
from hetplan.errors import UnsupportedError
from hetplan.runtime import distribute
from hetplan.runtime.engine.transport import gather_objects

WORLDS = (2,)
OTHER = {"dp": "pp", "pp": "dp"}


def dropping(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """A loss with dropout."""
    return cross(F.dropout(x, 0.5, net.training), d)


def differing(net: Net, x: Tensor, d: dict[str, Tensor]) -> Tensor:
    """Another loss in training."""
    return cross(x, d, label_smoothing=0.1 if net.training else 0.0)


def made(act: Any = cross) -> Net:
    """A net with its first weights."""
    torch.manual_seed(3)
    return Net(act if act is not cross else lambda net, x, d: cross(x, d))


def alone() -> dict[str, Any]:
    """The same in one process."""
    net, drops = made(), made(dropping).eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    with torch.no_grad():
        evaluated = float(drops(**rows(7, 0, ROWS)))
    for step in range(4):
        loss = net(**rows(step, 0, ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        behind = float(net(**rows(7, 0, ROWS)))
    return {
        "evaluated": evaluated, "losses": losses, "evaluated behind": behind,
        "state": net.state_dict(),
    }  # fmt: skip


def trained(plan: str, folder: Path) -> dict[str, Any]:
    """Two steps under one plan and two under the other."""
    example = rows(9, 0, 1)
    drops: Any = distribute(made(dropping), plan_of(plan), example=example)
    told: dict[str, Any] = {"evaluated": drops.evaluate(lambda *part: rows(7, *part))}
    assert drops.evaluate(lambda *part: rows(7, *part)) == told["evaluated"]
    assert drops.train_step(lambda *part: rows(7, *part)) != told["evaluated"]
    told["losses"] = []
    for now in (plan, OTHER[plan]):
        model: Any = distribute(made(), plan_of(now), example=example)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
        if now != plan:
            model.load(folder / plan, optimizer)
        for _ in range(2):
            step = model.step
            told["losses"].append(model.train_step(lambda *part, step=step: rows(step, *part)))
            optimizer.step()
            optimizer.zero_grad()
        model.save(folder / plan, optimizer)
    told["evaluated behind"] = model.evaluate(lambda *part: rows(7, *part))
    told["step"], told["state"] = model.step, model.state_dict()
    told["state of rank 1"] = gather_objects(told["state"])[1]
    return told


def refusal(act: Any, **options: Any) -> str:
    """Why a model is not evaluated."""
    model: Any = distribute(made(act), plan_of("pp"), example=rows(9, 0, 1), **options)
    try:
        model.evaluate(lambda *part: rows(7, *part))
    except UnsupportedError as error:
        return str(error)
    return ""


def work(rank: int, world: int, folder: Path) -> None:
    """Both plans, and what is refused."""
    torch.set_default_dtype(torch.float64)
    told: dict[str, Any] = {plan: trained(plan, folder) for plan in OTHER}
    told["other"] = refusal(differing)
    told["stock"] = stock_refusal()
    if rank == 0:
        torch.save(told | {"alone": alone()}, folder / "told.pt")


def stock_refusal() -> str:
    """Why stock torch's engine does not evaluate."""
    from parity.cases import Case, Perceptron, R, S

    plan = Case("two", "perceptron", [R([S((0, 4))], [(2, 2)])] * 2).plan
    model: Any = distribute(Perceptron(), plan, backend="torch")
    try:
        model.evaluate()
    except UnsupportedError as error:
        return str(error)
    return ""
