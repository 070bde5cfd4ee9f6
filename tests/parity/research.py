"""The modules of `fakes.research` that ranks train: a step under two unequal replicas and under a
pipeline, and the same in one process. What a module draws is that of one rank with the pipeline's
micro-batches.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fakes.research import LAYERS, MODULES, NOISY, RIGHT, made
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.tracing.split import Split
from parity.device import default_type

WORLDS = [1, 2]
ROWS = 5
TRAINED = [name for name, (_, verdict) in MODULES.items() if verdict in (RIGHT, NOISY)]
PREPARED: dict[str, tuple[Any, Split]] = {}


def plan_of(stages: list[list[int]], batches: list[list[int]]) -> Plan:
    """Replicas that have the same stages, one for each list of micro-batches' samples."""
    count = len(stages)
    replicas = [
        {
            "stages": [
                {
                    "layers": [layers],
                    "devices": [[r * count + k]],
                    "row_shares": [1.0],
                    "tensor_shares": [1.0],
                }
                for k, layers in enumerate(stages)
            ],
            "micro_batches": [{"count": 1, "samples": samples} for samples in of_replica],
        }
        for r, of_replica in enumerate(batches)
    ]
    workload = {
        "model": "research", "cluster": "made up", "global_batch": ROWS, "sequence": None,
        "precision": "fp32", "layers": list(LAYERS),
    }  # fmt: skip
    document = {
        "format": "hetplan-plan", "version": 1, "name": "research", "workload": workload,
        "devices": [{"type": "A", "node": 0}] * (count * len(batches)), "replicas": replicas,
    }  # fmt: skip
    return parse_plan(document, where="research")


PIPED = [[2, 2, 1]]
PLANS = {
    "one": plan_of([[0, 4]], PIPED),
    "replicas": plan_of([[0, 4]], [[2, 1], [2]]),
    "pipeline": plan_of([[0, 2], [2, 4]], PIPED),
}


def prepare() -> None:
    """Splits the modules before there are ranks."""
    with default_type("float64"):
        for name in TRAINED:
            module = made(name)
            data = example_of(module)
            PREPARED[name] = module, Split(module, LAYERS, data, None, None, "cpu")


def work(rank: int, world: int, folder: Path) -> None:
    """A step of all modules under the plans of this size: the loss, and the gradients that this
    rank answers for."""
    told: dict[tuple[str, str], Any] = {}
    for name in TRAINED:
        for plan_name, plan in PLANS.items():
            if plan.world_size != world:
                continue
            module, split = PREPARED[name]
            own = copy.copy(split)
            own.layers = copy.deepcopy(split.layers)
            with default_type("float64"):
                with patch.object(chain, "Split", lambda *_, own=own, **__: own):
                    model: Any = distribute(module, plan, probe=False)
                loss = model.train_step()
                gradients = {id(p): p.grad for _, p in model.updated()}
                told[name, plan_name] = (
                    loss,
                    [
                        (box.name, whole(model, box.name, box.values))
                        for box in model.boxes(gradients, deduplicated=True)
                    ],
                )
    torch.save(told, folder / f"told-{world}-{rank}.pt")


def whole(model: Any, name: str, values: Tensor) -> Tensor:
    """A gradient in the shape of its parameter. values: with the dimension first that tensor ranks
    would divide."""
    dim, shape = model.chain.parameters[name].dim, model.shapes[name]
    if not shape:
        return values.reshape(()).clone()
    moved = torch.empty(shape, device="meta").movedim(dim, 0).shape
    return values.reshape(moved).movedim(0, dim).clone()


@cache
def alone(name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, by the module's own passes."""
    with default_type("float64"):
        module: Any = made(name)
        loss = module(*module.batch(0, 0, ROWS))
        loss.backward()
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return float(loss.detach()), {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()
    }
