"""A rank of a rehearsed SPMD program: sleeps for its device, and joins narrow collectives of the
program's kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetplan.runtime.execution.spmd.ranks import Ranks
from hetplan.runtime.execution.transport import Transport
from hetplan.runtime.spmd_virtual import SpmdWatch


class RehearsedProgram:
    """Takes the place of `DistributedProgram`; nothing is trained, so that the loss is not a
    number."""

    def __init__(self, watch: SpmdWatch) -> None:
        self.watch, self.ranks, self.step = watch, Ranks(Transport.on_cpu().everyone), 0
        costs = watch.rehearsal.program
        self.place = costs.devices.index(watch.rehearsal.device(watch.rank))
        self.each, self.update = costs.each(), costs.updates()[self.place]

    def train_step(self) -> float:
        """One iteration in the devices' time."""
        watch, step = self.watch, self.step
        self.step += 1
        with watch.during("prepare", 0, step):
            watch.begin()
        meeting = 0
        for number, (run, stage) in enumerate(self.each):
            with watch.during("backward" if stage.backward else "forward", number, run):
                watch.passes(float(stage.compute[self.place]))
            if stage.seconds > 0:
                meeting += 1
                with watch.during("collective", number, run):
                    self._narrow(stage.collective)
                    watch.clock = watch.meet(meeting, watch.clock)
                    watch.passes(stage.seconds)
        with watch.during("synchronise", 0, step):
            watch.passes(self.update)
        return math.nan

    def _narrow(self, collective: str) -> None:
        """A few numbers by the same kind of collective; what arrives is checked."""
        ranks, m, kind = self.ranks, self.ranks.world, collective.partition("(")[0]
        bounds = tuple((j, j + 1) for j in range(m))
        mine, everyone = torch.tensor([float(ranks.rank)]), torch.arange(float(m))
        if kind.startswith("All-Reduce"):
            arrived, expected = ranks.total([everyone]), m * everyone
        elif kind.startswith("Reduce-Scatter"):
            arrived, expected = ranks.scatter([everyone], 0, bounds, "padded"), m * mine
        elif kind.startswith("Grouped"):
            arrived, expected = ranks.gather([mine], 0, bounds, "grouped"), everyone
        elif kind.startswith("All-Gather"):
            arrived, expected = ranks.gather([mine], 0, bounds, "padded"), everyone
        else:
            sent = mine.expand(1, m)
            arrived, expected = ranks.swap([sent], 0, bounds, 1, bounds), everyone[:, None]
        assert torch.equal(arrived[0], expected), f"{collective} gave {arrived[0]}"

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """One of nothing."""
        return kind([nn.Parameter(torch.zeros(0))], **options)
