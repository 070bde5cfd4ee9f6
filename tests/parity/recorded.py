"""What ranks exchange in a step: every collective and message, in order, with its bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hetplan.runtime import distribute
from parity.cases import Case, Perceptron, R, S, even, zero

TWO = [R([S((0, 4))], [(2, 2)])] * 2
CASES = [
    Case("data parallel", "perceptron", TWO),
    Case("data parallel, by layers", "perceptron", TWO),
    Case("ZeRO 2, unequal", "perceptron", TWO, zero(2, 2, 1)),
    *(Case(f"ZeRO {level}", "perceptron", TWO, zero(level)) for level in (1, 2, 3)),
    Case("pipeline", "perceptron", [R(even([0, 2, 4]), [(2, 2), (1, 1)])]),
]
BY_LAYERS = ("data parallel, by layers", "ZeRO 2, unequal")
WORLDS = (2,)
PASS = ("pass", 0)  # of a layer
RECORDED = ("all_reduce", "all_gather", "broadcast", "reduce", "isend", "irecv")


def work(rank: int, world: int, folder: Path) -> None:
    """By case: (name, bytes) of the second step, layers' passes among them."""
    torch.set_default_dtype(torch.float64)
    told: dict[str, list[tuple[str, int]]] = {}
    for case in CASES:
        sections: Any = {"bucket_bytes": 1} if case.name in BY_LAYERS else {}
        model: Any = distribute(Perceptron(), case.plan, **sections)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
        seen: list[tuple[str, int]] = []

        def recording(name: str, seen: list[tuple[str, int]] = seen) -> Callable[..., Any]:
            act = getattr(dist, name)

            def recorded(*arguments: Any, **options: Any) -> Any:
                one = arguments[1] if name == "all_gather" else arguments[0]
                seen.append((name, one.numel() * one.element_size()))
                return act(*arguments, **options)

            return recorded

        model.train_step()
        optimizer.step()
        optimizer.zero_grad()
        with ExitStack() as stack:
            model.watch.passed = partial(seen.append, PASS)
            for name in RECORDED:
                stack.enter_context(patch.object(dist, name, recording(name)))
            model.train_step()
        told[case.name] = seen
    torch.save(told, folder / f"told-{rank}.pt")
