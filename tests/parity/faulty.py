"""Models that misbehave on one rank, to test the supervisor (`parity.faulty:killed` …), and layers
that are none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.plans.plan import Plan
from hetplan.runtime.references import stand_in
from parity.cases import Case, R, S, even

RANK, PASS = 1, 3
PLACE = "rank 1 (replica 0, stage 1, row group 0, tensor rank 0; device 1, A on node 0)"
# Two stages beside one on two tensor ranks.
PLAN = Case(
    "faults", "two", [R(even([0, 1, 2]), [(2, 2)]), R([S((0, 2), tensor=(1, 1))], [(1, 2)])]
).plan


class Faulty(nn.Module):
    """A layer that does what it should, until a rank comes to a certain pass."""

    def __init__(
        self, layer: nn.Module, fault: Callable[[], object], number: int, rank: int
    ) -> None:
        super().__init__()
        self.layer, self.fault, self.number, self.rank, self.passes = layer, fault, number, rank, 0

    def forward(self, *arguments: Tensor) -> Tensor:
        """The layer's."""
        if not arguments[0].is_meta and dist.get_rank() == self.rank:
            self.passes += 1
            if self.passes == self.number:
                if "FAULT" in os.environ:  # a file that tells that the fault begins
                    Path(os.environ["FAULT"]).touch()
                self.fault()
        result: Tensor = self.layer(*arguments)
        return result


def with_fault(
    plan: Plan, fault: Callable[[], object], number: int = PASS, rank: int = RANK
) -> nn.Module:
    """The stand-in of a plan with a fault in every layer."""
    with torch.device("meta"):
        module = stand_in(plan.workload.layers)
    for name, layer in list(module.layers.items()):
        module.layers[name] = Faulty(layer, fault, number, rank)
    return module


STOP = partial(signal.raise_signal, signal.SIGSTOP)
SLEEP = partial(time.sleep, 3600)
# No fault; what it notes is that the ranks are at work.
unharmed = partial(with_fault, fault=bool)
# As by the kernel.
killed = partial(with_fault, fault=partial(signal.raise_signal, signal.SIGKILL))
# No sign of life any more; or from the first pass on.
stopped = partial(with_fault, fault=STOP)
frozen = partial(with_fault, fault=STOP, number=1)
# Alive, without progress; or from the first pass on, when there is no other to compare it with.
stuck = partial(with_fault, fault=SLEEP)
asleep = partial(with_fault, fault=SLEEP, number=1)
# The same on the first rank, which torchrun may have started.
alone = partial(with_fault, fault=SLEEP, number=1, rank=0)
# More memory than there is.
hungry = partial(with_fault, fault=partial(torch.empty, 1 << 60))
hungry_on_gpu = partial(with_fault, fault=partial(torch.empty, 1 << 50, device="cuda"))


def laborious(plan: Plan) -> nn.Module:
    """A first pass that computes for three seconds: no fault."""

    def compute() -> None:
        until = time.process_time() + 3.0
        while time.process_time() < until:
            pass

    return with_fault(plan, compute, 1)


def unlucky(plan: Plan) -> nn.Module:
    """Killed where the environment says: `KILL_AT=rank:pass`; once only, where `KILLED` names a
    file to note it in."""
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
            os.kill(os.getpid(), signal.SIGKILL)

    for layer in module.layers.values():
        layer.register_forward_pre_hook(lambda _, inputs: None if inputs[0].is_meta else count())
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
        lambda _, inputs: None if inputs[0].is_meta else time.sleep(wait.get(dist.get_rank(), 0.0))
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
