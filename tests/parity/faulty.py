"""Models that misbehave on one rank, to test the supervisor (`parity.faulty:killed` …), and layers that are none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.runtime.plan import Plan
from hetplan.runtime.references.build import stand_in

RANK, PASS = 1, 3


class Faulty(nn.Module):
    """A layer that does what it should, until rank 1 comes to its third pass."""

    def __init__(self, layer: nn.Module, fault: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.fault, self.passes = layer, fault, 0

    def forward(self, *arguments: Tensor) -> Tensor:
        """The layer's."""
        if not arguments[0].is_meta and dist.get_rank() == RANK:
            self.passes += 1
            if self.passes == PASS:
                note_moment()
                self.fault()
        result: Tensor = self.layer(*arguments)
        return result


def note_moment() -> None:
    """Write down when the fault begins, where the environment says."""
    if "FAULT" in os.environ:
        Path(os.environ["FAULT"]).write_text(str(time.monotonic()))


def with_fault(plan: Plan, fault: Callable[[], None]) -> nn.Module:
    """The stand-in of a plan with a fault in every layer."""
    with torch.device("meta"):
        module = stand_in(plan.workload.layers)
    for name, layer in list(module.layers.items()):
        module.layers[name] = Faulty(layer, fault)
    return module


def unharmed(plan: Plan) -> nn.Module:
    """No fault; what it notes is that the ranks are at work."""
    return with_fault(plan, lambda: None)


def killed(plan: Plan) -> nn.Module:
    """As by the kernel."""
    return with_fault(plan, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped(plan: Plan) -> nn.Module:
    """No sign of life any more."""
    return with_fault(plan, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def stuck(plan: Plan) -> nn.Module:
    """Alive, without progress."""
    return with_fault(plan, lambda: time.sleep(3600))


def hungry(plan: Plan) -> nn.Module:
    """More memory than there is."""
    return with_fault(plan, lambda: print(torch.empty(1 << 60).sum()))


def unlucky(plan: Plan) -> nn.Module:
    """Killed where the environment says: `KILL_AT=rank:pass`; once only, where `KILLED` names a file to note it in."""
    with torch.device("meta"):
        module = stand_in(plan.workload.layers)
    rank, number = map(int, os.environ["KILL_AT"].split(":"))
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1
        once = os.environ.get("KILLED")
        if dist.get_rank() == rank and passes == number and not (once and os.path.exists(once)):
            if once:
                Path(once).touch()
            note_moment()
            os.kill(os.getpid(), signal.SIGKILL)

    for layer in module.layers.values():
        layer.register_forward_pre_hook(lambda _, given: None if given[0].is_meta else count())
    return module


def wrong(plan: Plan) -> nn.Module:
    """A bug in a user's layer."""

    def fault() -> None:
        raise KeyError("no such key")

    return with_fault(plan, fault)


def short(plan: Plan) -> nn.Module:
    """A layer less than the plan has."""
    return stand_in(plan.workload.layers[:-1])


def slow(plan: Plan) -> nn.Module:
    """A rank whose passes of the first layer take a second longer."""
    with torch.device("meta"):
        module = stand_in(plan.workload.layers)
    first = next(iter(module.layers.values()))
    wait = {RANK: 1.0}
    first.register_forward_pre_hook(
        lambda _, given: None if given[0].is_meta else time.sleep(wait.get(dist.get_rank(), 0.0))
    )
    return module


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same twice."""
        return x, x


class Picky(nn.Module):
    """Looks at values, which the meta device does not have."""

    def forward(self, x: Tensor) -> Tensor:
        """Something times a number from the values."""
        return x * float(x.sum())
