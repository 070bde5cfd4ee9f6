"""The place of every rank in a plan, and the rows of the global batch that pass through it.

Every rank computes this from the plan alone, and all ranks get the same result.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hetplan.plans.passes import Order, Orders, virtual_stages
from hetplan.plans.places import Place
from hetplan.plans.plan import Plan, Stage
from hetplan.plans.shares import split
from hetplan.replays.simulator.pipeline import OrderKey, orders_of
from hetplan.runtime.engine.chain import Part
from hetplan.schema import Range


@dataclass(frozen=True)
class Layout:
    """A plan by its ranks. The ranks of an SPMD program are tensor ranks of one stage."""

    plan: Plan

    def ranks_of(self, replica: int, stage: int) -> list[list[int]]:
        """[row group][tensor rank] ranks of a stage."""
        devices = self.plan.replicas[replica].stages[stage].devices
        return [[self.plan.ranks[device] for device in group] for group in devices]

    def computing_groups(self, replica: int, stage: int) -> list[list[int]]:
        """Groups of ranks that compute a stage's layers together: its tensor groups and, where a
        sample's tokens are divided, its context groups."""
        tensor_groups = self.ranks_of(replica, stage)
        if self.context == 1:
            return tensor_groups
        context_groups = [list(ranks) for ranks in zip(*tensor_groups, strict=True)]
        return [*tensor_groups, *context_groups]

    def stage(self, place: Place) -> Stage:
        """The stage of a rank."""
        return self.plan.replicas[place.replica].stages[place.stage]

    def part(self, place: Place) -> Part:
        """The part of split layers that a rank has: of its tensor group's and of its experts."""
        ranks = self.expert_groups.get(place.rank, (place.rank,))
        return Part(
            index=place.tensor,
            shares=tuple(self.stage(place).tensor_shares),
            expert=(ranks.index(place.rank), len(ranks)),
        )

    @cached_property
    def expert_groups(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the ranks over which the experts of its layers are spread. They are neighbours in
        a stage, whose ranks are numbered replica by replica. Empty where each rank has all
        experts."""
        size = self.plan.further.expert
        if size == 1:
            return {}
        groups: dict[int, tuple[int, ...]] = {}
        replicas = range(len(self.plan.replicas))
        for stage in range(len(self.plan.replicas[0].stages)):
            ranks: list[int] = []
            for replica in replicas:
                for tensor_group in self.ranks_of(replica, stage):
                    ranks += tensor_group
            for begin in range(0, len(ranks), size):
                group = tuple(sorted(ranks[begin : begin + size]))
                groups |= dict.fromkeys(group, group)
        return groups

    def recomputation_of(self, place: Place, layer: int) -> str:
        """The recomputation of a layer in a rank's backward pass, as in `Plan.recomputation`.

        With the method `block`, only the first blocks of a virtual stage are computed again; the
        embedding is not counted.
        """
        degrees = self.plan.further
        if degrees.recompute_method != "block" or degrees.recompute_layers is None:
            return self.plan.recomputation
        (first,) = (begin for begin, end in self.stage(place).layers if begin <= layer < end)
        number = layer - max(first, 1)
        recomputed = 0 <= number < degrees.recompute_layers
        return self.plan.recomputation if recomputed else "none"

    def layers(self, place: Place) -> list[int]:
        """The layers of a rank, chunk by chunk."""
        return [layer for first, last in self.stage(place).layers for layer in range(first, last)]

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
        """The context degree: number of row groups that take the same rows, each a part of their
        tokens."""
        return self.plan.degrees.context if self.plan.degrees else 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor ranks divide the tokens between a split model's layers."""
        return self.plan.degrees is not None and self.plan.degrees.sequence_parallel

    def reports_loss(self, place: Place) -> bool:
        """Whether a rank reports the loss for all ranks that compute the same rows."""
        return place.tensor == 0 and (self.context == 1 or place.group == 0)

    def rows(self, replica: int, stage: int, batch: int) -> list[Range]:
        """[row group] global rows [first, last) of a micro-batch."""
        known = self._known_rows.get((replica, stage, batch))
        if known is None:
            known = self._rows(replica, stage, batch)
            self._known_rows[replica, stage, batch] = known
        return known

    @cached_property
    def _known_rows(self) -> dict[tuple[int, int, int], list[Range]]:
        """(replica, stage, micro-batch) -> answers of `rows`, which every pass asks for."""
        return {}

    def _rows(self, replica: int, stage: int, batch: int) -> list[Range]:
        """The answer of `rows`, computed from the stage's shares."""
        first, last = self.micro_batches[replica][batch]
        if self.context > 1:
            return [(first, last)] * self.context
        shares = self.plan.replicas[replica].stages[stage].row_shares
        return [(first + begin, first + end) for begin, end in split(last - first, shares)]

    def local_rows(self, place: Place, batch: int) -> Range:
        """Global rows [first, last) of a micro-batch that pass through a rank."""
        return self.rows(place.replica, place.stage, batch)[place.group]

    def requested_rows(self, replica: int, rows: Range) -> Range:
        """The rows for which a rank of a replica requests data where it reads `rows`.

        They are the whole micro-batch's where the stages divide rows differently. So all ranks that
        read a row request the same rows, and code that draws at random draws the same.
        """
        if not self.uneven_rows[replica]:
            return rows
        first, last = rows
        return next(
            (begin, end)
            for begin, end in self.micro_batches[replica]
            if begin <= first and last <= end
        )

    @cached_property
    def uneven_rows(self) -> list[bool]:
        """[replica] whether its stages divide the rows of a micro-batch differently."""
        return [self._divides_unevenly(replica) for replica in range(len(self.plan.replicas))]

    def _divides_unevenly(self, replica: int) -> bool:
        """Whether some stage divides the rows of a micro-batch differently from the first stage."""
        stages = range(len(self.plan.replicas[replica].stages))
        for batch in range(self.plan.replicas[replica].steps):
            of_first_stage = self.rows(replica, 0, batch)
            if any(self.rows(replica, stage, batch) != of_first_stage for stage in stages):
                return True
        return False

    def actions(self, place: Place) -> Order:
        """A rank's passes, in the order of the schedule."""
        return self.orders(place.replica)[place.stage]

    def orders(self, replica: int) -> Orders:
        """[stage] the passes of a replica, in the order of the schedule."""
        plan, of_replica = self.plan, self.plan.replicas[replica]
        key = OrderKey(
            plan.pass_schedule,
            len(of_replica.stages),
            of_replica.steps,
            len(of_replica.stages[0].layers),
            plan.explicit_orders(replica),
        )
        return orders_of(key)

    def virtual_stages(self, replica: int) -> list[tuple[int, int]]:
        """(stage, chunk) of each virtual stage of a replica, along the model."""
        of_replica = self.plan.replicas[replica]
        stages, chunks = len(of_replica.stages), len(of_replica.stages[0].layers)
        return virtual_stages(stages, chunks, folded=of_replica.folded)
