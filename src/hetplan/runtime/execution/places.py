"""Where every rank stands in a plan, and which rows of the global batch pass there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetplan.profiling.simulator.schedules import order
from hetplan.runtime.execution.tensor import Part
from hetplan.runtime.plan import Place, Plan, Replica, split
from hetplan.schema import Range


@dataclass(frozen=True)
class Layout:
    """A plan by ranks; those of an SPMD program are tensor ranks of one stage."""

    plan: Plan

    @property
    def places(self) -> tuple[Place, ...]:
        """[ranks]."""
        return self.plan.places

    @cached_property
    def _ranks(self) -> list[list[list[list[int]]]]:
        ranks = self.plan.ranks
        return [
            [[[ranks[d] for d in group] for group in stage.devices] for stage in replica.stages]
            for replica in self.plan.replicas
        ]

    def ranks_of(self, replica: int, stage: int) -> list[list[int]]:
        """Ranks of a stage [row group][tensor rank]."""
        return self._ranks[replica][stage]

    def part(self, place: Place) -> Part:
        """A rank's part of its tensor group."""
        stage = self.plan.replicas[place.replica].stages[place.stage]
        return Part(place.tensor, tuple(stage.tensor_shares))

    def layers(self, place: Place) -> list[Range]:
        """Layers [first, last) of each chunk."""
        return self.plan.replicas[place.replica].stages[place.stage].layers

    @cached_property
    def micro_batches(self) -> tuple[tuple[Range, ...], ...]:
        """[replica][micro-batch] global rows [first, last)."""
        found, row = [], 0
        for replica in self.plan.replicas:
            rows: list[Range] = []
            for size in sizes(replica):
                rows.append((row, row + size))
                row += size
            found.append(tuple(rows))
        return tuple(found)

    def rows(self, replica: int, stage: int, batch: int) -> list[Range]:
        """[row group] global rows of a micro-batch."""
        first, last = self.micro_batches[replica][batch]
        shares = self.plan.replicas[replica].stages[stage].row_shares
        return [(first + a, first + b) for a, b in split(last - first, shares)]

    def actions(self, place: Place) -> list[tuple[bool, int, int]]:
        """(backward, chunk, micro-batch) in the order of the schedule."""
        replica = self.plan.replicas[place.replica]
        assert self.plan.schedule != "spmd", "programs have an order of their own"
        chunks = len(replica.stages[0].layers)
        found = order(self.plan.schedule, len(replica.stages), place.stage, replica.steps, chunks)
        return [(bool(b), int(c), int(m)) for b, c, m in zip(*found, strict=True)]

    @property
    def in_step(self) -> bool:
        """Whether all ranks take each pass together: replicas of one stage and one chunk."""
        return all(len(r.stages) == 1 and len(r.stages[0].layers) == 1 for r in self.plan.replicas)


def sizes(replica: Replica) -> Iterator[int]:
    """Samples of each micro-batch."""
    for batch in replica.micro_batches:
        yield from [batch.samples] * batch.count
