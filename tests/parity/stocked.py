"""Plans that stock torch can say, on its engines and on ours: losses, weights, and a checkpoint of
one that the other goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hetplan.runtime import distribute
from hetplan.runtime.engine import checkpoint
from hetplan.runtime.engine.distributed import Distributed
from hetplan.runtime.stock import Stock
from parity.cases import MODELS, Case, R, S, even, zero

TWO = [R([S((0, 4))], [(2, 2)])] * 2
PIPE = [R(even([0, 2, 4]), [(4, 2)])]
ON_A_V = [R([S([(0, 1), (3, 4)]), S([(1, 2), (2, 3)])], [(4, 2)])]
CASES = [
    Case("data parallel", "untied", TWO),  # with dropout
    *(Case(f"ZeRO {level}", "perceptron", TWO, zero(level)) for level in (2, 3)),
    Case("ZeRO 3, fp32", "perceptron", TWO, zero(3), dtype="float32"),  # gloo has other sums there
    Case("ZeRO 3, shards of columns", "untied", TWO, zero(3)),
    Case("pipelines, ZeRO 3", "perceptron", PIPE * 2, zero(3)),
    Case("HSDP", "perceptron", TWO * 2, zero(3) | {"degrees": {"shard_groups": 2}}),
    Case("pipelines, HSDP", "perceptron", PIPE * 2, zero(3) | {"degrees": {"shard_groups": 2}}),
    Case("gpipe", "untied", PIPE, {"schedule": "gpipe"}),
    Case("1f1b", "untied", PIPE),
    Case(
        "interleaved", "perceptron", [R([S([(0, 1), (2, 3)]), S([(1, 2), (3, 4)])], [(4, 2)])],
        {"schedule": "interleaved-1f1b"},
    ),
    *(
        Case(f"{name}, {model}", model, ON_A_V, {"schedule": name})
        for name in ("zbv", "dualpipev")
        for model in ("perceptron", "untied")
    ),
    Case("pipelines, recomputed", "untied", PIPE * 2, {"recomputation": "full"}),
    Case("products recomputed", "untied", PIPE, {"recomputation": "operators"}),
]  # fmt: skip
WORLDS = (2, 4)
STEPS = 2


def work(rank: int, world: int, folder: Path) -> None:
    """By case and engine: losses of two steps, and of two more from the other one's checkpoint."""
    losses: dict[Any, list[float]] = {}
    for case in (case for case in CASES if case.world == world):
        torch.set_default_dtype(getattr(torch, case.dtype))
        for part in range(2):
            for engine, other in ((Distributed, Stock), (Stock, Distributed)):
                with torch.device("meta"):
                    module = MODELS[case.model]()
                backend = "torch" if engine is Stock else "hetplan"
                model: Any = distribute(module, case.plan, backend=backend)
                assert type(model) is engine
                optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
                if part:
                    checkpoint.load(model, optimizer, str(folder / case.name / other.__name__))
                told = losses.setdefault((case.name, engine.__name__), [])
                for _ in range(STEPS):
                    told.append(model.train_step())
                    optimizer.step()
                    optimizer.zero_grad()
                if not part:
                    checkpoint.save(model, optimizer, str(folder / case.name / engine.__name__))
    torch.save(losses, folder / f"losses-{world}-{rank}.pt")
