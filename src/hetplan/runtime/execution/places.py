"""Where every rank stands in a plan, which rows of the global batch pass there, and what it holds.

Every rank computes this from plan and model alone, the same everywhere. Parameters go by unsplit
names, cut into pieces that sets of ranks own together: a piece is an interval of a parameter's
split dimension that no rank's cut divides further; ranks that hold it are its owners. Gradients are
joined piece by piece, whatever the replicas' cuts, widths and shares: pieces with the same owners
lie behind each other in one flat bucket.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from hetplan.errors import InputError
from hetplan.formulations.joint.plan import Place, Plan, Stage, split
from hetplan.profiling.simulator.pipeline import order
from hetplan.runtime.execution.chain import Chain, Cut, Parameter, Part
from hetplan.schema import Range


@dataclass(frozen=True)
class Layout:
    """A plan by ranks; those of an SPMD program are tensor ranks of one stage."""

    plan: Plan

    def ranks_of(self, replica: int, stage: int) -> list[list[int]]:
        """Ranks of a stage [row group][tensor rank]."""
        devices = self.plan.replicas[replica].stages[stage].devices
        return [[self.plan.ranks[d] for d in group] for group in devices]

    def stage(self, place: Place) -> Stage:
        """A rank's stage."""
        return self.plan.replicas[place.replica].stages[place.stage]

    def part(self, place: Place) -> Part:
        """A rank's part of its tensor group."""
        return Part(place.tensor, tuple(self.stage(place).tensor_shares))

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

    def rows(self, replica: int, stage: int, batch: int) -> list[Range]:
        """[row group] global rows of a micro-batch."""
        first, last = self.micro_batches[replica][batch]
        shares = self.plan.replicas[replica].stages[stage].row_shares
        return [(first + a, first + b) for a, b in split(last - first, shares)]

    def own_rows(self, place: Place, batch: int) -> Range:
        """Global rows of a micro-batch that pass a place."""
        return self.rows(place.replica, place.stage, batch)[place.group]

    def actions(self, place: Place) -> list[tuple[bool, int, int]]:
        """(backward, chunk, micro-batch) in the order of the schedule."""
        replica = self.plan.replicas[place.replica]
        assert self.plan.schedule != "spmd", "programs have an order of their own"
        chunks = len(replica.stages[0].layers)
        passes = order(self.plan.schedule, len(replica.stages), place.stage, replica.steps, chunks)
        return [(bool(b), int(c), int(m)) for b, c, m in zip(*passes, strict=True)]


Held = dict[str, Cut]  # name -> what a rank holds of it


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of dimension `dim` of a parameter of `whole` elements, `row` of them each.
    contributors: one owner of each unit (see `Place.unit`), whose gradient counts."""

    name: str
    dim: int
    first: int
    last: int
    row: int
    whole: int
    contributors: frozenset[int]

    @property
    def size(self) -> int:
        """Elements."""
        return (self.last - self.first) * self.row


@dataclass(frozen=True)
class BucketPlan:
    """Pieces of the same owners (ranks), dtype and layers."""

    owners: tuple[int, ...]
    dtype: Any
    layers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(piece.size for piece in self.pieces)

    @property
    def alone(self) -> bool:
        """Whether no gradient is to be added to another one."""
        return all(len(piece.contributors) == 1 for piece in self.pieces)


def held_by(layout: Layout, chain: Chain, place: Place) -> Held:
    """What a rank holds; raises InputError where two of its layers cut a shared parameter
    differently."""
    part, held = layout.part(place), Held()
    for k in layout.layers(place):
        for name, cut in chain.cuts(k, part).items():
            if held.setdefault(name, cut) != cut:
                raise InputError(
                    "shared parameter is cut in two ways",
                    where=name,
                    got=cut,
                    expected=f"{held[name]}",
                )
    return held


def bucket_plans(layout: Layout, chain: Chain, *, by_layer: bool) -> list[BucketPlan]:
    """All buckets in one order; by_layer: parameters of different layers in different buckets (ZeRO
    3)."""
    holders: dict[str, list[tuple[Place, Cut]]] = defaultdict(list)
    for place in layout.plan.places:
        for name, cut in held_by(layout, chain, place).items():
            holders[name].append((place, cut))
    buckets: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
    for name, parameter in chain.parameters.items():
        layers = parameter.layers if by_layer else ()
        for owners, piece in pieces_of(parameter, holders[name]):
            buckets[owners, parameter.dtype, layers].append(piece)
    ordered = sorted(buckets.items(), key=lambda item: (item[0][2], item[0][0], str(item[0][1])))
    return [
        BucketPlan(owners, dtype, layers, tuple(pieces))
        for (owners, dtype, layers), pieces in ordered
    ]


def pieces_of(
    parameter: Parameter, holders: list[tuple[Place, Cut]]
) -> list[tuple[tuple[int, ...], Piece]]:
    """(owners, piece) for each piece of a parameter."""
    name, dim, shape = parameter.name, parameter.dim, parameter.shape or (1,)
    whole = prod(shape)
    row = whole // max(1, shape[dim])
    ranges = [(p, cut.ranges if cut.dim == dim else ((0, shape[dim]),)) for p, cut in holders]
    ends = sorted({0, shape[dim], *(end for _, cuts in ranges for both in cuts for end in both)})
    pieces = []
    for first, last in pairwise(ends):
        owning = [p for p, cuts in ranges if any(a <= first and last <= b for a, b in cuts)]
        units: dict[tuple[int, int, int], int] = {}
        for place in sorted(owning, key=lambda p: p.rank):
            units.setdefault(place.unit, place.rank)
        if not owning:
            raise InputError(
                "nobody holds a part of a parameter", where=name, got=f"[{first}, {last})"
            )
        piece = Piece(name, dim, first, last, row, whole, frozenset(units.values()))
        pieces.append((tuple(sorted(p.rank for p in owning)), piece))
    return pieces
