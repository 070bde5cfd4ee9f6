"""What stages send each other: the rows that a sender has and a receiver needs, whatever the widths
of both.

A micro-batch's rows lie on the row groups of a stage as its shares say; from one stage to the next
every intersection of two groups' rows is one message per receiving tensor rank. Activations are
whole on all tensor ranks, so each one receives from one of the sender's. Every message is tagged
with its hop and comes in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hetplan.runtime.execution.places import Layout
from hetplan.runtime.execution.transport import Message, Stream, Transport
from hetplan.runtime.plan import Place
from hetplan.runtime.watch import Watch
from hetplan.schema import Range


@dataclass
class Mail:
    """One rank's messages. sent: those on their way, with their tensors; local: what a rank sends
    to itself."""

    layout: Layout
    place: Place
    transport: Transport
    watch: Watch
    sent: list[Message] = field(default_factory=list)
    local: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def send(self, x: Tensor, hop: int, batch: int, *, forward: bool) -> None:
        """My rows of what goes over a hop (virtual stages hop and hop + 1), to all who need
        them."""
        mine, tag = self._own_rows(batch), 2 * hop + forward
        self.sent = self.transport.pending(self.sent)
        self.watch.departs(hop, batch, forward=forward)
        for rank, (first, last) in receivers(self.layout, self.place, hop, batch, forward=forward):
            rows = x[first - mine[0] : last - mine[0]].contiguous()
            if rank == self.place.rank:
                self.local[tag, batch] = rows
                continue
            self.sent.append(self.transport.post(rows, rank, tag))

    def receive(
        self, shape: tuple[int, ...], dtype: Any, hop: int, batch: int, *, forward: bool
    ) -> Tensor:
        """My rows [rows, *shape] of what comes over a hop."""
        mine, tag = self._own_rows(batch), 2 * hop + forward
        x = self.transport.space((mine[1] - mine[0], *shape), dtype)
        for rank, (first, last) in self._senders(hop, batch, forward):
            if rank == self.place.rank:
                x = self.local.pop((tag, batch))
                break
            self.transport.fetch(x[first - mine[0] : last - mine[0]], rank, tag)
        self.watch.arrives(hop, batch, forward=forward)
        return x.to(self.transport.device)

    def settle(self) -> None:
        """Wait until everything sent has been received."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _own_rows(self, batch: int) -> Range:
        return own_rows(self.layout, self.place, batch)

    def _senders(self, hop: int, batch: int, forward: bool) -> Iterator[tuple[int, Range]]:
        stage = other_stage(self.layout, self.place, hop, after=not forward)
        ranks = self.layout.ranks_of(self.place.replica, stage)
        width = len(self.layout.ranks_of(self.place.replica, self.place.stage)[0])
        for group, rows in shared_rows(self.layout, self.place, stage, batch):
            yield ranks[group][self.place.tensor * len(ranks[group]) // width], rows


def own_rows(layout: Layout, place: Place, batch: int) -> Range:
    """Global rows of a micro-batch that pass a place."""
    return layout.rows(place.replica, place.stage, batch)[place.group]


def other_stage(layout: Layout, place: Place, hop: int, *, after: bool) -> int:
    """The stage before or behind a hop."""
    return (hop + after) % len(layout.plan.replicas[place.replica].stages)


def shared_rows(
    layout: Layout, place: Place, stage: int, batch: int
) -> Iterator[tuple[int, Range]]:
    """(row group of another stage, rows that it shares with a place's)."""
    first, last = own_rows(layout, place, batch)
    for group, (a, b) in enumerate(layout.rows(place.replica, stage, batch)):
        if max(a, first) < min(b, last):
            yield group, (max(a, first), min(b, last))


def receivers(
    layout: Layout, place: Place, hop: int, batch: int, *, forward: bool
) -> Iterator[tuple[int, Range]]:
    """(rank, rows) of all who need what a place sends over a hop."""
    stage = other_stage(layout, place, hop, after=forward)
    ranks = layout.ranks_of(place.replica, stage)
    width = len(layout.ranks_of(place.replica, place.stage)[0])
    for group, rows in shared_rows(layout, place, stage, batch):
        for t, rank in enumerate(ranks[group]):
            if t * width // len(ranks[group]) == place.tensor:
                yield rank, rows


def streams(layout: Layout) -> list[Stream]:
    """(tag, sender, receiver) of every message between two ranks, each once."""
    messages = set()
    for place in layout.places:
        replica = layout.plan.replicas[place.replica]
        sizes = {
            last - first: b for b, (first, last) in enumerate(layout.micro_batches[place.replica])
        }
        virtual, stages = len(replica.stages) * len(replica.stages[0].layers), len(replica.stages)
        for chunk_stage in range(place.stage, virtual, stages):
            hops = [(chunk_stage, True), (chunk_stage - 1, False)]
            for hop, forward in [(h, f) for h, f in hops if 0 <= h < virtual - 1]:
                for batch in sizes.values():
                    for rank, _ in receivers(layout, place, hop, batch, forward=forward):
                        if rank != place.rank:
                            messages.add((2 * hop + forward, place.rank, rank))
    return sorted(messages)
