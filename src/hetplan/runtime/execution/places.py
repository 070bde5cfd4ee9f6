"""Where every rank stands in a plan, which rows of the global batch pass there, and what it holds.

Every rank computes this from plan and model alone, the same everywhere. Parameters go by unsplit
names, cut into pieces that sets of ranks own together: a piece is an interval of a parameter's
split dimension that no rank's cut divides further; ranks that hold it are its owners. Gradients are
joined piece by piece, whatever the replicas' cuts, widths and shares: pieces with the same owners
lie behind each other in one flat bucket.

Then what is held is joined with the other owners': data parallelism and ZeRO 0-3.

ZeRO 0  gradients are summed over the owners; everyone updates what it holds.
ZeRO 1  everyone updates its share of each bucket; the updated parameters are gathered.
ZeRO 2  gradients live only as shares: replicas of one stage sum them after every micro-batch.
ZeRO 3  parameters, too: replicas of one stage gather each layer before its passes and let go of it
behind them.
In replicas of one stage collectives go on beside the passes: a bucket's gradients are summed once
its lowest layer has made them, and ZeRO 3 gathers one layer ahead. In pipelines all of it happens
at the beginning and at the end of an iteration: no other stage waits for a collective in the middle
of its schedule.
Source: Rajbhandari et al. 2020 (ZeRO), Section 5; shares of any size are the plan's.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import require
from hetplan.plans.places import Place
from hetplan.plans.plan import Plan, Stage
from hetplan.plans.shares import split
from hetplan.profiling.simulator.pipeline import order
from hetplan.runtime.execution.chain import Chain, Cut, Parameter, Part
from hetplan.runtime.execution.loop import Box
from hetplan.runtime.execution.transport import Group
from hetplan.schema import Range
from hetplan.text import grouped


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
    """Pieces of the same owners (ranks) and dtype. sharing: the owners by groups, each of which
    holds all of ZeRO's shards. layers: those behind whose backward passes gradients are summed;
    none: behind all passes."""

    owners: tuple[int, ...]
    sharing: tuple[tuple[int, ...], ...]
    dtype: Any
    layers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def around(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The owners that hold all shards with one, and those that hold the same one."""
        own = next(group for group in self.sharing if rank in group)
        return own, tuple(group[own.index(rank)] for group in self.sharing)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """All that do something together."""
        return [self.owners, *self.sharing, *zip(*self.sharing, strict=True)]


def held_by(layout: Layout, chain: Chain, place: Place) -> Held:
    """What a rank holds; raises InputError where two of its layers cut a shared parameter
    differently."""
    part, held = layout.part(place), Held()
    for k in layout.layers(place):
        for name, cut in chain.cuts(k, part).items():
            require(
                held.setdefault(name, cut) == cut,
                "shared parameter is cut in two ways",
                where=name,
                got=cut,
                expected=f"{held[name]}",
            )
    return held


def sections(chain: Chain, bucket_bytes: int) -> dict[int, int]:
    """Layer -> the lowest layer of its section: layers behind each other, from the last one on, of
    at least so many bytes."""
    sizes, lowest, section = Counter[int](), dict[int, int](), list[int]()
    for p in chain.parameters.values():
        sizes[min(p.layers)] += prod(p.shape) * p.dtype.itemsize
    for k in reversed(range(len(chain.names))):
        section.append(k)
        if k == 0 or sum(sizes[i] for i in section) >= bucket_bytes:
            lowest |= dict.fromkeys(section, k)
            section = []
    return lowest


def bucket_plans(layout: Layout, chain: Chain, bucket_bytes: int) -> list[BucketPlan]:
    """All buckets in one order; in replicas of one stage by sections of layers, under ZeRO 3 by
    layers."""
    plan, lowest = layout.plan, sections(chain, bucket_bytes)
    holders: dict[str, list[tuple[Place, Cut]]] = defaultdict(list)
    for place in plan.places:
        for name, cut in held_by(layout, chain, place).items():
            holders[name].append((place, cut))
    buckets: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
    for name, parameter in chain.parameters.items():
        layers = parameter.layers if plan.zero == 3 else (lowest[min(parameter.layers)],)
        layers = layers if plan.in_step else ()
        for owners, piece in pieces_of(parameter, holders[name]):
            buckets[owners, parameter.dtype, layers].append(piece)
    ordered = sorted(buckets.items(), key=lambda item: (item[0][2], item[0][0], str(item[0][1])))
    return [
        BucketPlan(owners, sharing(plan, owners), dtype, layers, tuple(pieces))
        for (owners, dtype, layers), pieces in ordered
    ]


def sharing(plan: Plan, owners: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Owners by groups of neighbouring replicas, as many as the plan says; one group where they
    would be unequal."""
    count = plan.further.shard_groups
    replica = {rank: plan.places[rank].replica for rank in owners}
    each = grouped((replica[rank] * count // len(plan.replicas), rank) for rank in owners)
    equal = len({len(group) for group in each.values()}) == 1 and len(each) == count
    return tuple(map(tuple, each.values())) if equal else (owners,)


def pieces_of(
    parameter: Parameter, holders: list[tuple[Place, Cut]]
) -> list[tuple[tuple[int, ...], Piece]]:
    """(owners, piece) for each piece of a parameter."""
    name, dim, shape = parameter.name, parameter.dim, parameter.shape or (1,)
    whole = prod(shape)
    row = whole // max(1, shape[dim])
    ranges = [(p, cut.ranges if cut.dim == dim else ((0, shape[dim]),)) for p, cut in holders]
    apart = any(cut.apart for _, cut in holders)
    ends = sorted({0, shape[dim], *(end for _, cuts in ranges for both in cuts for end in both)})
    pieces = []
    for first, last in pairwise(ends):
        owning = [p for p, cuts in ranges if any(a <= first and last <= b for a, b in cuts)]
        units: dict[tuple[int, ...], int] = {}
        for place in sorted(owning, key=lambda p: p.rank):
            units.setdefault((place.rank,) if apart else place.unit, place.rank)
        require(owning, "nobody holds a part of a parameter", where=name, got=f"[{first}, {last})")
        piece = Piece(name, dim, first, last, row, whole, frozenset(units.values()))
        pieces.append((tuple(sorted(p.rank for p in owning)), piece))
    return pieces


@dataclass(frozen=True)
class Share:
    """What this rank updates of a piece: `size` elements of the flat bucket from `begin` on, of the
    parameter from `first` on. parameter: what an optimizer updates, in their place."""

    piece: Piece
    begin: int
    first: int
    size: int
    parameter: nn.Parameter


Tensors = Mapping[str, Tensor | None]  # laid out like the local parameters, by their names


@dataclass
class Bucket:
    """A bucket plan on one of its owners. sharing: those that hold all shards with this rank;
    groups: what its owners, the sharing ones, and those of the same shard do together, where there
    are several; parameters: those that it has pieces of; parts [sharing]: of the flat bucket;
    shard: the values of mine, ZeRO 1-3; shares: one for each piece that this rank updates elements
    of."""

    plan: BucketPlan
    rank: int
    sharing: tuple[int, ...]
    groups: tuple[Group | None, Group | None, Group | None]
    parameters: Mapping[str, nn.Parameter]
    held: Held
    parts: list[Range]
    shard: Tensor | None = None
    shares: list[Share] = field(default_factory=list)
    coming: Callable[[], list[Tensor]] | None = None
    """What waits for everyone's shard."""
    here: bool = True
    """Whether the parameters have their values."""

    def rows(self, piece: Piece, tensor: Tensor) -> Tensor:
        """The piece's rows of a tensor that is laid out like the local parameter; a view."""
        if tensor.dim() == 0:
            return tensor.reshape(1)
        cut = self.held[piece.name]
        ranges = cut.ranges if cut.dim == piece.dim else ((0, tensor.shape[piece.dim]),)
        before = sum(min(b, piece.first) - a for a, b in ranges if a < piece.first)
        return tensor.movedim(piece.dim, 0).narrow(0, before, piece.last - piece.first)

    def flat(self, tensors: Tensors, *, counting: bool = False) -> Tensor:
        """The pieces of some tensors, zeros for None. counting: zeros also for what another owner
        contributes."""
        parts = []
        for piece in self.plan.pieces:
            tensor = tensors[piece.name]
            if tensor is None or (counting and self.rank not in piece.contributors):
                tensor = torch.zeros_like(self.parameters[piece.name])
            parts.append(self.rows(piece, tensor).reshape(-1))
        return torch.cat(parts)

    def spread(self, flat: Tensor, tensors: Tensors) -> None:
        """Write a flat bucket to some tensors."""
        sizes = [piece.size for piece in self.plan.pieces]
        for piece, values in zip(self.plan.pieces, flat.split(sizes), strict=True):
            tensor = tensors[piece.name]
            if tensor is not None:
                rows = self.rows(piece, tensor)
                rows.copy_(values.view_as(rows))

    @property
    def data(self) -> Tensors:
        """The parameters' values."""
        return {name: parameter.data for name, parameter in self.parameters.items()}

    @property
    def part(self) -> Range:
        """Mine of the flat bucket."""
        return self.parts[self.sharing.index(self.rank)]

    def begin(self, *, sharded: bool) -> None:
        """The first owner's values, everywhere, and what this rank updates of them."""
        flat = self.flat(self.data)
        if self.groups[0] is not None:
            self.groups[0].broadcast(flat, self.plan.owners[0])
            self.spread(flat, self.data)
        first, last = self.part
        if sharded:
            self.shard = flat[first:last].clone()
        begin = 0
        for piece in self.plan.pieces:
            parameter, element = self.parameters[piece.name], piece.first * piece.row
            a, b = max(begin, first), min(begin + piece.size, last)
            if self.shard is None:
                self.shares.append(Share(piece, begin, element, piece.size, parameter))
            elif a < b:
                values = nn.Parameter(self.shard[a - first : b - first], parameter.requires_grad)
                self.shares.append(Share(piece, a, element + a - begin, b - a, values))
            begin += piece.size

    def fetch(self) -> None:
        """Begin to gather everyone's shard."""
        assert self.shard is not None
        if self.groups[1] is not None and self.coming is None:
            self.coming = self.groups[1].gathering(
                self.shard, [last - first for first, last in self.parts]
            )

    def gather(self) -> None:
        """Everyone's shard, written to the parameters."""
        self.fetch()
        assert self.shard is not None
        flat = self.shard if self.coming is None else torch.cat(self.coming())
        self.coming = None
        self.spread(flat, self.data)

    def join_gradients(self) -> Callable[[], None]:
        """Begin to sum over the contributors. What is returned ends that: into the parameters'
        gradients (ZeRO 0), or my part of it into my shares'."""
        alone = all(len(piece.contributors) == 1 for piece in self.plan.pieces)
        owning, sharing, alike = self.groups
        if self.shard is None and (owning is None or alone):
            return lambda: None
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        flat = self.flat(gradients, counting=True)
        finish: Callable[[], None] = lambda: None  # noqa: E731 (where nobody else has any)
        if self.shard is None and owning is not None:
            finish = owning.totalling(flat)
        elif sharing is not None:
            finish = sharing.scattering(flat, self.sharing, self.parts)

        def end() -> None:
            finish()
            if alike is not None and self.shard is not None:
                alike.total(flat[slice(*self.part)])
            if self.shard is None:
                self.spread(flat, gradients)
            for share in self.shares if self.shard is not None else ():
                parameter = share.parameter
                if parameter.requires_grad:
                    added, held = flat[share.begin : share.begin + share.size], parameter.grad
                    parameter.grad = added.clone() if held is None else held.add_(added)

        return end

    def boxes(self, values: Mapping[int, Tensor] | None, *, scalars: bool) -> Iterator[Box]:
        """Of my shares (ZeRO 1 to 3), or of whole pieces; of flat tensors."""
        for share in self.shares:
            piece, parameter = share.piece, share.parameter
            tensor = parameter if values is None else values.get(id(parameter))
            if tensor is not None:
                if self.shard is None and not scalars:
                    tensor = self.rows(piece, tensor)
                yield Box(
                    piece.name, (share.first,), (share.size,), (piece.whole,), tensor.detach()
                )


def parameters_of(buckets: Sequence[Bucket]) -> list[nn.Parameter]:
    """Those that some buckets have pieces of; a parameter's pieces may lie in several."""
    return [parameter for bucket in buckets for parameter in bucket.parameters.values()]


class States:
    """All buckets of one rank. parameters: what it holds, by unsplit names; per_layer: ZeRO 3 layer
    by layer."""

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        groups: Mapping[tuple[int, ...], Group],
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        held: Held,
        *,
        zero: int,
        shares: Sequence[float],
        in_step: bool,
    ) -> None:
        self.zero, self.parameters = zero, parameters
        self.per_step, self.per_layer = in_step and zero == 2, in_step and zero == 3
        self.buckets = [
            Bucket(
                p,
                rank,
                sharing,
                (groups.get(p.owners), groups.get(sharing), groups.get(alike)),
                {piece.name: parameters[piece.name] for piece in p.pieces},
                held,
                split(sum(piece.size for piece in p.pieces), [shares[r] for r in sharing]),
            )
            for p in plans
            if rank in p.owners
            for sharing, alike in [p.around(rank)]
        ]
        for bucket in self.buckets:
            bucket.begin(sharded=zero > 0)
        self.begun: deque[Callable[[], None]] = deque()
        self._let_go(self.buckets)

    def begin(self, visits: Sequence[tuple[bool, int]] = ()) -> None:
        """Before an iteration: parameters that an optimizer changed elsewhere. visits: (backward,
        layer) of all its passes, in their order."""
        self.left = Counter(k for backward, k in visits if backward)
        self.following = iter([*(k for _, k in visits[1:]), None])
        if self.zero and not self.per_layer:
            self._gather(self.buckets)

    def of_layer(self, layer: int | None) -> list[Bucket]:
        """What is gathered and let go of with a layer: all of it under ZeRO 3 layer by layer."""
        return [b for b in self.buckets if self.per_layer and layer in b.plan.layers]

    def before_layer(self, layer: int) -> None:
        """Before a pass of a layer: its parameters; those of the next pass are on their way."""
        self._gather([b for b in self.of_layer(layer) if not b.here])
        self.next = next(self.following)
        for bucket in self.of_layer(self.next):
            if not bucket.here:
                bucket.fetch()

    def after_layer(self, layer: int, *, backward: bool) -> None:
        """Behind a pass of a layer."""
        self.left[layer] -= backward
        if backward and (self.per_step or self.per_layer or not self.left[layer]):
            self._join([b for b in self.buckets if layer in b.plan.layers])
        self._let_go([b for b in self.of_layer(layer) if self.next not in b.plan.layers])

    def end(self) -> None:
        """Behind all passes of an iteration."""
        self._join([b for b in self.buckets if not b.plan.layers])
        while self.begun:
            self.begun.popleft()()
        self._let_go(self.buckets)

    def _join(self, buckets: Sequence[Bucket]) -> None:
        """Two buckets are on their way at most: each is a copy of its gradients."""
        for parameter in parameters_of(buckets) if self.zero == 0 else ():
            if parameter.grad is None and parameter.requires_grad:  # where no row came by
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets:
            self.begun.append(bucket.join_gradients())
            if len(self.begun) > 2:
                self.begun.popleft()()
        if self.zero:  # only now: a parameter's pieces may lie in several buckets
            for parameter in parameters_of(buckets):
                parameter.grad = None

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        with torch.no_grad():
            if self.zero == 3:
                for parameter in parameters_of(buckets):
                    data = parameter.data
                    data.untyped_storage().resize_(data.numel() * data.element_size())
            for bucket in buckets:
                bucket.gather()
                bucket.here = True

    def _let_go(self, buckets: Sequence[Bucket]) -> None:
        """ZeRO 3: the parameters' memory, which the next gathering asks for again."""
        if self.zero == 3:
            for bucket in buckets:
                bucket.here = False
            for parameter in parameters_of(buckets):
                parameter.data.untyped_storage().resize_(0)
