"""Ten steps of one small model under different plans, and what a user's loop looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetplan.plans.plan import Plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import checkpoint
from parity.cases import MODELS, Case, R, S, even, zero
from parity.device import DEVICE

STEPS = 10
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}
PLANS: dict[str, Plan] = {
    case.name: case.plan
    for case in (
        Case("data parallel", "gpt", [R([S((0, 5))], [(1, 3), (1, 1)]) for _ in range(2)]),
        Case("one pipeline", "gpt", [R(even([0, 1, 2, 5]), [(8, 1)])], {"schedule": "gpipe"}),
        Case(
            "unequal replicas",
            "gpt",
            [R([S((0, 5), tensor=(1, 2))], [(1, 3)]), R([S((0, 5))], [(5, 1)])],
        ),
        Case(
            "ZeRO 1",
            "gpt",
            [R(even([0, 2, 5]), [(2, 2)]), R([S((0, 5))], [(1, 4)])],
            zero(1, 1, 2, 3),
        ),
        Case(
            "ZeRO 2",
            "gpt",
            [R([S((0, 5))], [(2, 2)]), R([S((0, 5))], [(2, 1)]), R([S((0, 5))], [(1, 2), (1, 0)])],
            zero(2),
        ),
        Case(
            "ZeRO 3",
            "gpt",
            [R([S((0, 5))], [(2, 2)]), R([S((0, 5), tensor=(1, 1))], [(2, 2)])],
            zero(3, 4, 1, 1),
        ),
        Case("ZeRO 3 on a pipeline", "gpt", [R(even([0, 4, 5]), [(4, 2)])], zero(3)),
    )
}
# All plans are trained by AdamW, which keeps two moments; some also by what keeps one.
BY_SGD = ("data parallel", "one pipeline", "ZeRO 3")
WORLDS = sorted({plan.world_size for plan in PLANS.values()})


def train(
    plan: Plan,
    optimizer: str,
    steps: int = STEPS,
    *,
    resume: Path | None = None,
    save: Path | None = None,
    **options_of_model: Any,
) -> list[float]:
    """The losses of some steps on one batch, in torch's default type."""
    with torch.device("meta"):
        module = MODELS["gpt"]()
    model = distribute(module, plan, device=DEVICE, seed=1, **options_of_model)
    kind, options = OPTIMIZERS[optimizer]
    updates = model.optimizer(kind, **options)
    if resume is not None:
        checkpoint.load(model, updates, str(resume))
    losses = []
    for _ in range(steps):
        losses.append(model.train_step(lambda first, last: module.batch(0, first, last)))
        updates.step()
        updates.zero_grad()
    if save is not None:
        checkpoint.save(model, updates, str(save))
    return losses


def work(rank: int, world: int, folder: Path) -> None:
    """Curves of all plans of this size; checkpoints halfway."""
    torch.set_default_dtype(torch.float64)
    curves = {}
    for name, optimizer in of_world(world):
        curves[name, optimizer] = train(PLANS[name], optimizer)
        train(PLANS[name], optimizer, STEPS // 2, save=folder / f"{name}-{optimizer}")
    if dist.get_rank() == 0:
        torch.save(curves, folder / f"curves-{world}.pt")


def resume(rank: int, world: int, folder: Path) -> None:
    """The second halves of the curves: each plan goes on from another one's checkpoint, of which
    `work` has written one each."""
    torch.set_default_dtype(torch.float64)
    halves = {}
    for name, optimizer in of_world(world):
        names = plans_by(optimizer)
        other = folder / f"{names[(names.index(name) + 1) % len(names)]}-{optimizer}"
        halves[name, optimizer] = train(PLANS[name], optimizer, STEPS - STEPS // 2, resume=other)
    if dist.get_rank() == 0:
        torch.save(halves, folder / f"resumed-{world}.pt")


def plans_by(optimizer: str) -> list[str]:
    """The plans that are trained by an optimizer."""
    return [name for name in PLANS if optimizer != "sgd" or name in BY_SGD]


def of_world(world: int) -> list[tuple[str, str]]:
    """Plans for so many ranks, with the optimizers that train them."""
    return [
        (name, optimizer)
        for optimizer in OPTIMIZERS
        for name in plans_by(optimizer)
        if PLANS[name].world_size == world
    ]


Curves = dict[tuple[str, str], list[float]]


def loaded(folder: Path, name: str) -> Curves:
    """(plan, optimizer) -> losses, as the ranks of all world sizes left them."""
    curves: Curves = {}
    for file in folder.glob(f"{name}-*.pt"):
        curves |= torch.load(file)
    assert {plan for plan, _ in curves} == set(PLANS)
    return curves


def check_equal(curves: Curves) -> None:
    """Any two plans give one curve for each optimizer; the model learns, so it is not flat."""
    for optimizer in OPTIMIZERS:
        first, *others = [curve for (_, used), curve in sorted(curves.items()) if used == optimizer]
        assert first[-1] < 0.97 * first[0]
        assert all(curve == pytest.approx(first, rel=1e-8) for curve in others)


def check_resumed(folder: Path, whole: Curves) -> None:
    """What went on from checkpoints under other plans has the second half of the same curve."""
    for key, losses in loaded(folder, "resumed").items():
        assert losses == pytest.approx(whole[key][STEPS // 2 :], rel=1e-8), key
