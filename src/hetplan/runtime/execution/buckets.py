"""Buckets: what each rank holds of the parameters, and which ranks join which gradients.

Every rank computes this from plan and model alone, the same everywhere. Parameters go by unsplit
names, cut into pieces that sets of ranks own together: a piece is an interval of a parameter's
split dimension that no rank's cut divides further; ranks that hold it are its owners. Gradients are
joined piece by piece, whatever the replicas' cuts, widths and shares: pieces with the same owners
lie behind each other in one flat bucket.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import require
from hetplan.formulations.joint.plan import Place, Plan
from hetplan.runtime.execution.chain import Chain, Cut, Parameter
from hetplan.runtime.execution.layout import Layout
from hetplan.runtime.execution.loop import Box
from hetplan.runtime.execution.transport import Group
from hetplan.schema import Range
from hetplan.text import grouped

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
