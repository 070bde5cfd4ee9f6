"""Where every rank stands in a plan, and which rows of the global batch pass there.

Every rank computes this from the plan alone, the same everywhere.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hetplan.formulations.joint.plan import Place, Plan, Stage, split
from hetplan.profiling.simulator.pipeline import order
from hetplan.runtime.execution.chain import Part
from hetplan.schema import Range


@dataclass(frozen=True)
class Layout:
    """A plan by ranks; those of an SPMD program are tensor ranks of one stage."""

    plan: Plan

    def ranks_of(self, replica: int, stage: int) -> list[list[int]]:
        """Ranks of a stage [row group][tensor rank]."""
        devices = self.plan.replicas[replica].stages[stage].devices
        return [[self.plan.ranks[d] for d in group] for group in devices]

    def meeting(self, replica: int, stage: int) -> list[list[int]]:
        """Ranks of a stage that compute layers together: tensor ranks, context ranks."""
        rows = self.ranks_of(replica, stage)
        return [*rows, *map(list, zip(*rows, strict=True))] if self.context > 1 else rows

    def stage(self, place: Place) -> Stage:
        """A rank's stage."""
        return self.plan.replicas[place.replica].stages[place.stage]

    def part(self, place: Place) -> Part:
        """A rank's part of its tensor group and of its experts."""
        spread = self.expert_groups.get(place.rank, (place.rank,))
        return Part(
            place.tensor,
            tuple(self.stage(place).tensor_shares),
            (spread.index(place.rank), len(spread)),
        )

    @cached_property
    def expert_groups(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the ranks over which the experts of its layers are spread: neighbours in a stage,
        whose ranks go replica by replica. Empty: each rank has all of them."""
        made: dict[int, tuple[int, ...]] = {}
        ranks = self.plan.further.expert
        for j in range(len(self.plan.replicas[0].stages)) if ranks > 1 else ():
            grids = [self.ranks_of(i, j) for i in range(len(self.plan.replicas))]
            everyone = [rank for grid in grids for row in grid for rank in row]
            for k in range(0, len(everyone), ranks):
                group = tuple(sorted(everyone[k : k + ranks]))
                made |= dict.fromkeys(group, group)
        return made

    def again(self, place: Place, layer: int) -> str:
        """What of a layer is computed again: by blocks, of a virtual stage's first ones behind the
        embedding."""
        degrees = self.plan.further
        (first,) = (a for a, b in self.stage(place).layers if a <= layer < b)
        number = layer - max(first, 1)
        some = degrees.recompute_method == "block" and degrees.recompute_layers is not None
        left_out = some and not 0 <= number < (degrees.recompute_layers or 0)
        return "none" if left_out else self.plan.recomputation

    def layers(self, place: Place) -> list[int]:
        """A rank's layers, all chunks one behind the other."""
        return [k for first, last in self.stage(place).layers for k in range(first, last)]

    @cached_property
    def micro_batches(self) -> list[list[Range]]:
        """[replica][micro-batch] global rows [first, last)."""
        batches, row = [], 0
        for replica in self.plan.replicas:
            sizes = [batch.samples for batch in replica.micro_batches for _ in range(batch.count)]
            batches.append(list(pairwise(accumulate(sizes, initial=row))))
            row += replica.samples
        return batches

    @property
    def context(self) -> int:
        """Row groups that take the same rows, each a part of their tokens."""
        return self.plan.degrees.context if self.plan.degrees else 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor ranks divide the tokens between a split model's layers."""
        return self.plan.degrees is not None and self.plan.degrees.sequence_parallel

    def speaks(self, place: Place) -> bool:
        """Whether a rank tells the loss of those that compute the same rows."""
        return place.tensor == 0 and (self.context == 1 or place.group == 0)

    def rows(self, replica: int, stage: int, batch: int) -> list[Range]:
        """[row group] global rows of a micro-batch."""
        first, last = self.micro_batches[replica][batch]
        shares = self.plan.replicas[replica].stages[stage].row_shares
        return (
            [(first, last)] * self.context
            if self.context > 1
            else [(first + a, first + b) for a, b in split(last - first, shares)]
        )

    def own_rows(self, place: Place, batch: int) -> Range:
        """Global rows of a micro-batch that pass a place."""
        return self.rows(place.replica, place.stage, batch)[place.group]

    def asked_rows(self, replica: int, rows: Range) -> Range:
        """The rows for whose data a rank of a replica asks where it reads some: a whole
        micro-batch's where the stages divide rows differently. So all ranks that read a row ask for
        the same ones, and code that draws at random draws the same."""
        if not self.uneven_rows[replica]:
            return rows
        ends = self.micro_batches[replica]
        return next((a, b) for a, b in ends if a <= rows[0] and rows[1] <= b)

    @cached_property
    def uneven_rows(self) -> list[bool]:
        """[replica] Whether its stages divide the rows of a micro-batch differently."""
        return [
            any(
                self.rows(i, j, batch) != self.rows(i, 0, batch)
                for batch in range(replica.steps)
                for j in range(len(replica.stages))
            )
            for i, replica in enumerate(self.plan.replicas)
        ]

    def actions(self, place: Place) -> list[tuple[bool, int, int]]:
        """(backward, chunk, micro-batch) in the order of the schedule."""
        replica = self.plan.replicas[place.replica]
        assert self.plan.schedule != "spmd", "programs have an order of their own"
        passes = order(
            self.plan.schedule,
            len(replica.stages),
            place.stage,
            replica.steps,
            len(replica.stages[0].layers),
        )
        return [(bool(b), int(c), int(m)) for b, c, m in zip(*passes, strict=True)]
