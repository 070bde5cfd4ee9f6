"""The rehearsal of an SPMD program's schedule on virtual devices."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetplan.runtime.engine.transport import Transport, host_group
from hetplan.runtime.launch.rehearsal import Virtual


class RehearsedProgram:
    """A rank of a rehearsal, in the place of a `DistributedProgram`. It trains nothing, so that its
    loss is NaN."""

    def __init__(self, watch: Virtual) -> None:
        self.watch, self.step = watch, 0
        self.everyone = Transport.over("cpu").everyone

    def train_step(self) -> float:
        """Sleep through one iteration, and return NaN. A real all-reduce of one number stands for
        every collective."""
        step = self.step
        self.step += 1
        # in the order of the stages, the pass of a stage before its collective
        moments = sorted(
            self.watch.spans, key=lambda moment: (moment[1], moment[0] == "collective")
        )
        with self.watch.during("prepare", 0, step):
            dist.barrier(group=host_group())
        for what, stage, run in moments:
            with self.watch.during(what, stage, run):
                if what == "collective":
                    self.everyone.total(torch.ones(1))
        with self.watch.during("synchronise", 0, step):
            dist.barrier(group=host_group())
        return math.nan

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """An optimizer without parameters."""
        return kind([nn.Parameter(torch.zeros(0))], **options)
