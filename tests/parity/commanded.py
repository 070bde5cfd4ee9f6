"""Factories for the command line: the models of `fakes.hugging` with the same first weights every
time, under their names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fakes.hugging import FACTORIES, LOSSES

ENTERED = ExitStack()  # for the rest of the process


def widened() -> Any:
    """What asks for fp32 by `float` gets torch's default type."""
    kind = torch.get_default_dtype()
    return patch.object(torch.Tensor, "float", lambda x: x.to(kind))


class Scored(nn.Module):
    """A module whose loss is given apart, with it."""

    def __init__(self, module: Any, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.loss, self.batch = module, loss, module.batch

    def forward(self, users: Any, things: Any, targets: Any) -> Any:
        return self.loss(self.inner(users, things), targets)


def made(name: str, plan: object = None) -> Any:
    """One of them; `double_NAME` computes in fp64, data too."""
    if name.startswith("double_"):
        torch.set_default_dtype(torch.float64)
        ENTERED.enter_context(widened())
    name = name.removeprefix("double_")
    torch.manual_seed(3)
    module: Any = FACTORIES[name]()
    return Scored(module, LOSSES[name]) if name in LOSSES else module


def __getattr__(name: str) -> Any:
    if name.removeprefix("double_") in FACTORIES:
        return partial(made, name)
    raise AttributeError(name)
