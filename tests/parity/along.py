"""Operators along a dimension that tensor or context ranks divide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute

WORLDS = (2,)
ROWS, TOKENS, WIDTH = 4, 6, 8
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(-1),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "std": lambda x: x / (1 + x.std(-1, keepdim=True)),
    "mean over tokens": lambda x: x + x.mean(1, keepdim=True),
    "cumsum over tokens": lambda x: x.cumsum(-2),
}


class Net(nn.Module):
    """A block whose hidden values tensor ranks divide, and whose tokens context ranks divide."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.emb, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList([nn.ModuleDict({"up": self.line(), "down": self.line()})])
        self.tensor_plan = {"h.*.up": "colwise", "h.*.down": "rowwise"}
        self.act = act

    @staticmethod
    def line() -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.h:
            x = x + block["down"](self.act(block["up"](x)))
        return (self.out(x) - y).square().mean()


def plan_of(kind: str) -> Plan:
    """Two tensor ranks, or two context ranks."""
    context = kind == "context"
    stage = {
        "layers": [[0, 3]],
        "devices": [[0], [1]] if context else [[0, 1]],
        "row_shares": [0.5, 0.5] if context else [1.0],
        "tensor_shares": [1.0] if context else [0.5, 0.5],
    }
    workload = {
        "model": "tiny", "cluster": "c", "global_batch": ROWS, "sequence": TOKENS,
        "precision": "fp32", "layers": ["emb", "h.0", "out"],
    }  # fmt: skip
    replica = {"stages": [stage], "micro_batches": [{"count": 2, "samples": 2}]}
    document: dict[str, Any] = {
        "format": "hetplan-plan", "version": 1, "name": kind, "origin": "by hand",
        "workload": workload, "devices": [{"type": "T4", "node": 0}] * 2, "schedule": "1f1b",
        "zero": 0, "recomputation": "none", "replicas": [replica],
    }  # fmt: skip
    if context:
        document["degrees"] = {"context": 2}
    return parse_plan(document, where=kind)


def data() -> dict[str, Tensor]:
    """All rows."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y}


def made(name: str) -> Net:
    torch.manual_seed(0)
    net = Net(ACTS[name])
    net.double()
    return net


def work(rank: int, world: int, folder: Path) -> None:
    """(kind, act) -> the loss, and the weights after a step."""
    told = {}
    for kind in ("tensor", "context"):
        for name in ACTS:
            example = {key: value[:1] for key, value in data().items()}
            model: Any = distribute(made(name), plan_of(kind), example=example, probe=False)
            optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
            loss = model.train_step(
                lambda first, last: {key: value[first:last] for key, value in data().items()}
            )
            optimizer.step()
            told[kind, name] = loss, model.state_dict()
    if rank == 0:
        torch.save(told, folder / "told.pt")
