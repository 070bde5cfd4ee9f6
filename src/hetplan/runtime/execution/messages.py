"""What stages send each other: the rows that a sender has and a receiver needs, whatever the widths of both.

A micro-batch's rows lie on the row groups of a stage as its shares say; from one stage to the next every intersection
of two groups' rows is one message per receiving tensor rank. Activations are whole on all tensor ranks, so each one
receives from one of the sender's. Every message is tagged with its hop and comes in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.runtime.execution.places import Layout, Place
from hetplan.runtime.watch import Watch
from hetplan.schema import Range


@dataclass
class Mail:
    """One rank's messages. sent: those on their way, with their tensors; local: what a rank sends to itself."""

    layout: Layout
    place: Place
    device: Any
    watch: Watch
    sent: list[tuple[Any, Tensor]] = field(default_factory=list)
    local: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def send(self, x: Tensor, hop: int, batch: int, *, forward: bool) -> None:
        """My rows of what goes over a hop (virtual stages hop and hop + 1), to all who need them."""
        mine, tag = self._own_rows(batch), 2 * hop + forward
        self.watch.departs(hop, batch, forward=forward)
        for rank, (first, last) in self._receivers(hop, batch, forward):
            rows = x[first - mine[0] : last - mine[0]].contiguous()
            if rank == self.place.rank:
                self.local[tag, batch] = rows
                continue
            rows = rows.cpu()  # gloo sends from the host only
            self.sent.append((dist.isend(rows, rank, tag=tag), rows))

    def receive(self, shape: tuple[int, ...], dtype: Any, hop: int, batch: int, *, forward: bool) -> Tensor:
        """My rows [rows, *shape] of what comes over a hop."""
        mine, tag = self._own_rows(batch), 2 * hop + forward
        x = torch.empty(mine[1] - mine[0], *shape, dtype=dtype)
        for rank, (first, last) in self._senders(hop, batch, forward):
            if rank == self.place.rank:
                x = self.local.pop((tag, batch))
                break
            dist.recv(x[first - mine[0] : last - mine[0]], rank, tag=tag)
        self.watch.arrives(hop, batch, forward=forward)
        return x.to(self.device)

    def settle(self) -> None:
        """Wait until everything sent has been received."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _own_rows(self, batch: int) -> Range:
        return self.layout.rows(self.place.replica, self.place.stage, batch)[self.place.group]

    def _other(self, hop: int, *, after: bool) -> int:
        """The stage before or behind a hop."""
        stages = len(self.layout.plan.replicas[self.place.replica].stages)
        return (hop + after) % stages

    def _shared(self, stage: int, batch: int) -> Iterator[tuple[int, Range]]:
        """(row group of another stage, rows that it shares with mine)."""
        first, last = self._own_rows(batch)
        for group, (a, b) in enumerate(self.layout.rows(self.place.replica, stage, batch)):
            if max(a, first) < min(b, last):
                yield group, (max(a, first), min(b, last))

    def _receivers(self, hop: int, batch: int, forward: bool) -> Iterator[tuple[int, Range]]:
        stage = self._other(hop, after=forward)
        ranks = self.layout.ranks_of(self.place.replica, stage)
        width = len(self.layout.ranks_of(self.place.replica, self.place.stage)[0])
        for group, rows in self._shared(stage, batch):
            for t, rank in enumerate(ranks[group]):
                if t * width // len(ranks[group]) == self.place.tensor:
                    yield rank, rows

    def _senders(self, hop: int, batch: int, forward: bool) -> Iterator[tuple[int, Range]]:
        stage = self._other(hop, after=not forward)
        ranks = self.layout.ranks_of(self.place.replica, stage)
        width = len(self.layout.ranks_of(self.place.replica, self.place.stage)[0])
        for group, rows in self._shared(stage, batch):
            yield ranks[group][self.place.tensor * len(ranks[group]) // width], rows
