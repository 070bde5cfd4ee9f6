"""A rank of a rehearsed SPMD program: sleeps for its device, and joins narrow collectives of the
program's kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from hetplan.runtime.execution.spmd.ranks import Ranks
from hetplan.runtime.spmd_virtual import SpmdWatch


class RehearsedProgram:
    """Takes the place of `DistributedProgram`; nothing is trained, so that the loss is not a
    number."""

    def __init__(self, watch: SpmdWatch) -> None:
        self.watch, self.ranks, self.step = watch, Ranks(), 0
        costs = watch.rehearsal.program
        self.place = costs.devices.index(watch.rehearsal.device(watch.rank))
        self.each, self.update = costs.each(), costs.updates()[self.place]

    def train_step(self) -> float:
        """One iteration in the devices' time."""
        watch, step = self.watch, self.step
        self.step += 1
        watch.begins("prepare", 0, step)
        watch.begin()
        watch.ends("prepare", 0, step)
        meeting = 0
        for number, (run, stage) in enumerate(self.each):
            what = "backward" if stage.backward else "forward"
            watch.begins(what, number, run)
            watch.passes(float(stage.compute[self.place]))
            watch.ends(what, number, run)
            if stage.seconds > 0:
                meeting += 1
                watch.begins("collective", number, run)
                self._narrow(stage.collective)
                watch.clock = watch.meet(meeting, watch.clock)
                watch.passes(stage.seconds)
                watch.ends("collective", number, run)
        watch.begins("synchronise", 0, step)
        watch.passes(self.update)
        watch.ends("synchronise", 0, step)
        return math.nan

    def _narrow(self, collective: str) -> None:
        """A few numbers by the same kind of collective; what arrives is checked."""
        m, rank, kind = self.ranks.world, self.ranks.rank, collective.partition("(")[0]
        bounds = [(j, j + 1) for j in range(m)]
        mine, everyone = np.full(1, float(rank)), np.arange(float(m))
        if kind.startswith("All-Reduce"):
            found, expected = self.ranks.total([everyone]), m * everyone
        elif kind.startswith("Reduce-Scatter"):
            found, expected = self.ranks.scatter([everyone], 0, bounds, "padded"), m * mine
        elif kind.startswith(("All-Gather", "Grouped")):
            manner = "grouped" if kind.startswith("Grouped") else "padded"
            found, expected = self.ranks.gather([mine], 0, bounds, manner), everyone  # type: ignore[arg-type]
        else:
            sent = np.full((1, m), float(rank))
            found = self.ranks.swap([sent], 0, bounds, 1, bounds)
            expected = everyone[:, None]
        assert np.array_equal(found[0], expected), f"{collective} gave {found[0]}"

    def optimizer(self, kind: Callable[..., Any], **options: Any) -> Any:
        """One of nothing."""
        return kind([nn.Parameter(torch.zeros(0))], **options)
