"""Each plan goes on from another one's checkpoint, of which `parity.curves` has written one
each."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from parity.curves import OPTIMIZERS, PLANS, STEPS, WORLDS, prepare, train

__all__ = ["WORLDS", "prepare", "work"]
NAMES = list(PLANS)


def source(name: str) -> str:
    """Whose checkpoint a plan reads."""
    return NAMES[(NAMES.index(name) + 1) % len(NAMES)]


def work(rank: int, world: int, folder: Path) -> None:
    """The second halves of the curves."""
    found = {
        (name, optimizer): train(
            plan, optimizer, STEPS - STEPS // 2, resume=folder / f"{source(name)}-{optimizer}"
        )
        for name, plan in PLANS.items()
        if plan.world_size == world
        for optimizer in OPTIMIZERS
    }
    if dist.get_rank() == 0:
        torch.save(found, folder / f"resumed-{world}.pt")
