"""Models of others, split: half of their steps under one plan, the rest under another one from the
first one's checkpoint, then their weights under their own names; and the same in one process.

Hugging Face's models compute norms and losses in fp32. Where fp64 is compared, `doubled` has them
do so in fp64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch  # noqa: F401 (makes its table of types before one is doubled)
import torch
from torch import nn

from fakes.hugging import FACTORIES, LOSSES, NAMES
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain, checkpoint
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.split import Split
from parity.device import default_type, doubled

STEPS, ROWS = 4, 7
PREPARED: dict[tuple[str, str], tuple[nn.Module, Split]] = {}
WORLDS = (4, 3)
TYPES = {"float64": 1e-10, "float32": 1e-5}
COMBINED = [*((name, "float64") for name in FACTORIES), ("gpt2", "float32"), ("t5", "float32")]


def made(name: str) -> nn.Module:
    """A model with its first weights."""
    torch.manual_seed(3)
    return FACTORIES[name]()


def plan_of(name: str, world: int) -> Plan:
    """Four ranks: two replicas of two stages, cut and fed differently. Three: ZeRO 2 over a replica
    with a stage of two row groups, interleaved in two chunks with one other."""
    names = NAMES[name]
    n = len(names)
    a, b, c = n // 4 or 1, n // 2, -(-3 * n // 4)
    one = {"row_shares": [1.0], "tensor_shares": [1.0]}
    if world == 4:
        replicas = [
            {
                "stages": [
                    {"layers": [[0, cut]], "devices": [[2 * r]], **one},
                    {"layers": [[cut, n]], "devices": [[2 * r + 1]], **one},
                ],
                "micro_batches": batches,
            }
            for r, (cut, batches) in enumerate(
                [
                    (b, [{"count": 2, "samples": 2}, {"count": 1, "samples": 1}]),
                    (c, [{"count": 1, "samples": 2}]),
                ]
            )
        ]
        options: dict[str, Any] = {"schedule": "1f1b", "recomputation": "full"}
    else:
        replicas = [
            {
                "stages": [
                    {
                        "layers": [[0, a], [b, c]],
                        "devices": [[0], [1]],
                        "row_shares": [2.0, 1.0],
                        "tensor_shares": [1.0],
                    },
                    {"layers": [[a, b], [c, n]], "devices": [[2]], **one},
                ],
                "micro_batches": [{"count": 1, "samples": 4}, {"count": 1, "samples": 3}],
            }
        ]
        options = {"schedule": "interleaved-1f1b", "zero": 1}
    workload = {
        "model": name, "cluster": "made up", "global_batch": ROWS, "sequence": None,
        "precision": "fp32", "layers": names,
    }  # fmt: skip
    devices = [{"type": "A", "node": 0} for _ in range(world)]
    document = {
        "format": "hetplan-plan", "version": 1, "name": name, "workload": workload,
        "devices": devices, "replicas": replicas, **options,
    }  # fmt: skip
    return parse_plan(document, where=name)


def prepare() -> None:
    """Splits all models before there are ranks: torch.export takes a second for each."""
    for name, dtype in COMBINED:
        with default_type(dtype), doubled():
            module: Any = made(name)
            example = module.batch(0, 0, 1)
            split = Split(module, NAMES[name], example, LOSSES.get(name), None, "cpu")
            PREPARED[name, dtype] = module, split


def work(rank: int, world: int, folder: Path) -> None:
    """Half of all models' steps."""
    losses: dict[Any, list[float]] = {}
    for name, dtype in COMBINED:
        module, split = PREPARED[name, dtype]
        kept = str(folder / f"{name}-{dtype}")
        with default_type(dtype):
            with patch.object(chain, "Split", lambda *_, split=split, **__: split):
                model = distribute(module, plan_of(name, world), loss=LOSSES.get(name), probe=False)
            optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
            if world == WORLDS[1]:
                checkpoint.load(model, optimizer, kept)
            losses[name, dtype] = []
            for _ in range(STEPS // 2):
                losses[name, dtype].append(model.train_step())
                optimizer.step()
                optimizer.zero_grad()
            checkpoint.save(model, optimizer, kept)
        if world == WORLDS[1] and hasattr(module, "save_pretrained"):
            gathered = model.gather()
            if rank == 0:
                gathered.save_pretrained(f"{kept}-saved", max_shard_size="20KB")
        elif world == WORLDS[1]:
            state = model.gather().state_dict()
            if rank == 0:
                torch.save(state, f"{kept}.pt")
    if rank == 0:
        torch.save(losses, folder / f"losses-{world}.pt")


def alone(name: str, dtype: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights of one process, by the model's own forward pass and loss."""
    with default_type(dtype), doubled():
        module: Any = made(name)
        if name == "mixtral":  # torch's grouped product knows no fp64
            module.set_experts_implementation("eager")
        called = Called(module, LOSSES.get(name))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            loss = called(*module.batch(step, 0, ROWS))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, module.state_dict()
