"""Data that users' code draws at random, under plans of several ranks: what a step's loss is, and
what is told where ranks read different data; as a target of `parity.forked`.

As a module of factories, too: `TEXT` is one that draws data and weights as it is imported and
called, and is written to a folder for runs by the command line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.errors import InputError
from hetplan.runtime import distribute
from hetplan.runtime.engine.data import drawing_data
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.spmd.distributed import DistributedProgram
from parity.cases import Case, Perceptron, R, S, even
from parity.device import default_type
from parity.programs import CASES as PROGRAMS

TEXT = '''
"""Nothing is seeded here."""

import os
import random

import numpy as np
import torch

from parity.cases import Perceptron
from parity.drawn import noise

SHAPE = (4, 9)
DRAWN = torch.rand(SHAPE) + torch.from_numpy(np.random.rand(*SHAPE)).float()
DRAWN += torch.tensor([[random.random() for _ in range(9)] for _ in range(4)])


def given(plan, change=lambda step, rows: rows):
    module = Perceptron()  # weights are drawn, too

    def batch(step, first, last):
        rows = change(step, DRAWN[first:last])
        return rows[:, :6], rows[:, 6:]

    module.batch = batch
    return module


def augmented(plan):
    return given(plan, lambda step, rows: rows + noise(rows.shape))


def entropy(plan):
    return given(plan, lambda step, rows: rows + os.urandom(1)[0])


def by_rank(plan):
    return given(plan, lambda step, rows: rows + int(os.environ["RANK"]) * (step == 1))


def rows(plan):
    return lambda step, first, last: (DRAWN[first:last, :6], DRAWN[first:last, 6:])
'''


def noise(shape: Any) -> Tensor:
    """Numbers from all three generators."""
    drawn = torch.rand(shape) + float(np.random.rand()) + random.random()  # noqa: NPY002
    return drawn.to(torch.get_default_dtype())


ONE = Case("one", "perceptron", [R([S((0, 4))], [(2, 2)])]).plan
PIPELINE = Case("pipeline", "perceptron", [R(even([0, 2, 4]), [(2, 2)])]).plan
CASES = {
    "pipeline": PIPELINE,
    "row groups of one stage": Case(
        "wide", "perceptron", [R([S((0, 2), rows=(2, 1)), S((2, 4))], [(1, 4), (1, 2)])]
    ).plan,
    "tensor ranks": Case("tensor", "perceptron", [R([S((0, 4), tensor=(1, 1))], [(2, 2)])]).plan,
    "unequal numbers of micro-batches": Case(
        "unequal", "perceptron", [R(even([0, 2, 4]), [(1, 2)]), R(even([0, 1, 4]), [(3, 1)])]
    ).plan,
    "apart": Case("apart", "perceptron", [R([S((0, 4))], [(1, 2)])] * 2).plan,
}
PROGRAM = next(case for case in PROGRAMS if (case.network, case.world) == ("gpt2", 2))
WORLDS = sorted({plan.world_size for plan in CASES.values()})


def noisy(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Rows with noise."""
    x, y = Perceptron().batch(step, first, last)
    return x + noise(x.shape), y + noise(y.shape)


def own(first: int, last: int) -> Any:
    """Labels that follow from the rank."""
    x, y = Perceptron().batch(0, first, last)
    return x, y + dist.get_rank()


def told_of(act: Callable[[], object]) -> str:
    """What an error says."""
    try:
        act()
    except InputError as error:
        return str(error)
    return ""


def work(rank: int, world: int, folder: Path) -> None:
    """All plans of this size: losses of two steps with noise, whether torch's generator is where it
    was, and what is told of data that follow from the rank."""
    torch.set_default_dtype(torch.float64)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    told: dict[str, Any] = {}
    for name, plan in CASES.items():
        if plan.world_size == world:
            module: Any = first_weights(Perceptron())
            model: Any = distribute(module, plan, seed=5)
            before = torch.random.get_rng_state()
            losses = [
                model.train_step(lambda first, last, step=step: noisy(step, first, last))
                for step in range(2)
            ]
            kept = torch.equal(before, torch.random.get_rng_state())
            told[name] = {"losses": losses, "kept": kept}
            told[name]["error"] = told_of(lambda model=model: model.train_step(own))  # type: ignore[misc]
    if world == PROGRAM.world:
        told["program"] = of_program(rank)
    torch.save(told, folder / f"told-{world}-{rank}.pt")


def of_program(rank: int) -> dict[str, Any]:
    """The same of an SPMD program's words."""
    model: Any = DistributedProgram(PROGRAM.model, PROGRAM.plan)
    words = model.batch

    def drawn(first: int, last: int) -> dict[str, Any]:
        data = words(0, first, last)
        return {name: np.random.permutation(x) for name, x in data.items()}  # noqa: NPY002

    def apart(first: int, last: int) -> dict[str, Any]:
        data = words(0, first, last)
        return {**data, "labels": np.roll(data["labels"], rank)}

    losses = [model.train_step(drawn) for _ in range(2)]
    return {"losses": losses, "error": told_of(lambda: model.train_step(apart))}


def first_weights(module: Any) -> Any:
    """The same everywhere."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(module.initial(name, parameter))
    return module


def alone(name: str) -> list[float]:
    """Losses of both steps of one process, micro-batch by micro-batch."""
    batches = [rows for replica in Layout(CASES[name]).micro_batches for rows in replica]
    losses = []
    with default_type("float64"):
        module: Any = first_weights(Perceptron())
        for step in range(2):
            total = 0.0
            for a, b in batches:
                with drawing_data(5, step, a):
                    x, y = noisy(step, a, b)
                total += float(module(x, y).detach())
            losses.append(total / batches[-1][1])
    return losses
