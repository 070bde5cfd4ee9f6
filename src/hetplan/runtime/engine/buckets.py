"""Buckets: flat tensors of pieces of parameters. The ranks that have the pieces sum the gradients
of a bucket together.

A parameter is cut along its split dimension wherever some rank's part begins or ends. Each interval
is a piece, and the ranks that have it are its owners. Pieces with the same owners are joined to
buckets. So gradients are summed correctly where replicas divide a parameter differently.

Every rank computes the plans of all buckets from plan and model alone, and all ranks get the same
result. Parameters have their names in the unsplit model.
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
from hetplan.plans.places import Place
from hetplan.plans.plan import Plan
from hetplan.runtime.engine.chain import Chain, Cut, Parameter
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.loop import Box
from hetplan.runtime.engine.transport import Group
from hetplan.schema import Range

LocalCuts = dict[str, Cut]
"""Name of a parameter -> the part of it that a rank has."""
Tensors = Mapping[str, Tensor | None]
"""Name of a parameter -> a tensor that is laid out like the local parameter."""


@dataclass(frozen=True)
class Piece:
    """An interval of a parameter along its split dimension, which no rank's part divides
    further."""

    name: str
    dim: int
    """The parameter's split dimension."""
    first: int
    """First row of the piece, along that dimension."""
    last: int
    """The row after the piece's last row."""
    row: int
    """Number of elements in a row."""
    whole: int
    """Number of elements in the parameter."""
    contributors: frozenset[int]
    """Ranks whose gradients are summed: one owner of each unit (`Place.unit`), whose ranks have
    the same gradient."""

    @property
    def size(self) -> int:
        """Number of elements in the piece."""
        return (self.last - self.first) * self.row


@dataclass(frozen=True)
class BucketPlan:
    """Pieces with the same owners and dtype, which are summed together; all of them are trained, or
    none."""

    owners: tuple[int, ...]
    """Ranks that have the pieces."""
    shard_groups: tuple[tuple[int, ...], ...]
    """The owners in groups, each of which has all of ZeRO's shards."""
    dtype: Any
    layers: tuple[int, ...]
    """The layers after whose backward passes the gradients are summed; empty: the gradients are
    summed after all passes."""
    pieces: tuple[Piece, ...]
    trained: bool
    """Whether the pieces have gradients. Those of frozen parameters are never summed, and are
    shards under ZeRO 3 alone."""

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The owners that have all shards together with a rank."""
        return next(group for group in self.shard_groups if rank in group)

    def shard_copies(self, rank: int) -> tuple[int, ...]:
        """The owners that have the same shard as a rank, one of each shard group."""
        shard = self.shard_group(rank).index(rank)
        return tuple(group[shard] for group in self.shard_groups)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """All groups of ranks with collectives: the owners, the shard groups, and the ranks with
        equal shards."""
        return [self.owners, *self.shard_groups, *zip(*self.shard_groups, strict=True)]


def local_cuts(layout: Layout, chain: Chain, place: Place) -> LocalCuts:
    """The parts of parameters that a rank has. Raises InputError where two of its layers cut a
    shared parameter differently."""
    part = layout.part(place)
    cuts: LocalCuts = {}
    for layer in layout.layers(place):
        for name, cut in chain.cuts(layer, part).items():
            earlier = cuts.setdefault(name, cut)
            require(
                earlier == cut,
                "shared parameter is cut in two ways",
                where=name,
                got=cut,
                expected=f"{earlier}",
            )
    return cuts


def section_starts(chain: Chain, bucket_bytes: int) -> dict[int, int]:
    """Layer -> the lowest layer of its section. A section is consecutive layers whose parameters
    have at least `bucket_bytes` bytes together. Sections are formed from the last layer on; the
    first layer's section may have fewer bytes."""
    sizes = Counter[int]()
    for parameter in chain.parameters.values():
        # a shared parameter has its whole gradient after the backward pass of its lowest layer
        sizes[min(parameter.layers)] += prod(parameter.shape) * parameter.dtype.itemsize
    starts: dict[int, int] = {}
    section: list[int] = []
    for layer in reversed(range(len(chain.names))):
        section.append(layer)
        if layer == 0 or sum(sizes[k] for k in section) >= bucket_bytes:
            starts |= dict.fromkeys(section, layer)
            section = []
    return starts


def bucket_plans(layout: Layout, chain: Chain, bucket_bytes: int) -> list[BucketPlan]:
    """All buckets of a plan, in the order that all ranks keep.

    Pieces with the same owners and type, all trained or all frozen, are one bucket for each section
    of layers, where replicas have one stage; under ZeRO 3 one for each layer. In pipelines they are
    one for all layers.
    """
    plan, starts = layout.plan, section_starts(chain, bucket_bytes)
    cuts_of: dict[str, list[tuple[Place, Cut]]] = defaultdict(list)
    for place in plan.places:
        for name, cut in local_cuts(layout, chain, place).items():
            cuts_of[name].append((place, cut))
    buckets: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
    for name, parameter in chain.parameters.items():
        layers: tuple[int, ...] = ()
        if plan.in_step and plan.zero == 3:
            layers = parameter.layers
        elif plan.in_step:
            layers = (starts[min(parameter.layers)],)
        for owners, piece in pieces_of(parameter, cuts_of[name]):
            buckets[layers, owners, parameter.dtype, parameter.trained].append(piece)

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        layers, owners, dtype, trained = key
        return layers, owners, str(dtype), not trained  # torch's types have no order

    plans = []
    for key in sorted(buckets, key=order):
        layers, owners, dtype, trained = key
        groups = shard_groups(plan, owners)
        plans.append(BucketPlan(owners, groups, dtype, layers, tuple(buckets[key]), trained))
    return plans


def shard_groups(plan: Plan, owners: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The owners of a bucket in groups, each of which has all of ZeRO's shards.

    The plan's degrees say the number of groups, and a group's replicas are neighbours. All owners
    are one group where the groups would be unequal.
    """
    count = plan.further.shard_groups
    replicas = len(plan.replicas)
    members: dict[int, list[int]] = defaultdict(list)  # number of the group -> ranks
    for rank in owners:
        group_number = plan.places[rank].replica * count // replicas
        members[group_number].append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(sizes) != 1 or len(members) != count:
        return (owners,)
    return tuple(tuple(ranks) for ranks in members.values())


def pieces_of(
    parameter: Parameter, cuts: list[tuple[Place, Cut]]
) -> list[tuple[tuple[int, ...], Piece]]:
    """(owners, piece) for each piece of a parameter. cuts: the part of each rank that has one.
    Raises InputError where no rank has a piece."""
    name, dim, shape = parameter.name, parameter.dim, parameter.shape or (1,)
    whole = prod(shape)
    row = whole // max(1, shape[dim])  # max: a parameter without rows
    # With experts of their own samples, all ranks of a tensor group have gradients to sum.
    partial_gradients = any(cut.partial_gradients for _, cut in cuts)

    boundaries = {0, shape[dim]}
    ranges_of: list[tuple[Place, tuple[Range, ...]]] = []
    for place, cut in sorted(cuts, key=lambda item: item[0].rank):
        ranges = cut.ranges if cut.dim == dim else ((0, shape[dim]),)
        ranges_of.append((place, ranges))
        for begin, end in ranges:
            boundaries |= {begin, end}

    pieces = []
    for first, last in pairwise(sorted(boundaries)):
        owners: list[int] = []
        contributors: dict[tuple[int, ...], int] = {}  # unit -> its lowest rank
        for place, ranges in ranges_of:
            if any(begin <= first and last <= end for begin, end in ranges):
                owners.append(place.rank)
                unit = (place.rank,) if partial_gradients else place.unit
                contributors.setdefault(unit, place.rank)
        require(owners, "nobody holds a part of a parameter", where=name, got=f"[{first}, {last})")
        piece = Piece(name, dim, first, last, row, whole, frozenset(contributors.values()))
        pieces.append((tuple(owners), piece))
    return pieces


@dataclass(frozen=True)
class Share:
    """The elements of a piece that this rank updates."""

    piece: Piece
    begin: int
    """Index of the first element in the flat bucket."""
    first: int
    """Index of the first element in the flattened parameter."""
    size: int
    """Number of elements."""
    parameter: nn.Parameter
    """The parameter that an optimizer updates: the local parameter, or a view of the shard."""


def nothing() -> None:
    """Finish a sum that needs no collective."""


@dataclass
class Bucket:
    """A bucket on this rank, which is one of its owners."""

    plan: BucketPlan
    rank: int
    shard_group: tuple[int, ...]
    """The owners that have all shards together with this rank."""
    owner_collectives: Group | None
    """Collectives of all owners; None where there is one owner."""
    shard_collectives: Group | None
    """Collectives of the shard group; None where it is one rank."""
    copy_collectives: Group | None
    """Collectives of the owners with the same shard; None where it is one rank."""
    parameters: Mapping[str, nn.Parameter]
    """The local parameters that the bucket has pieces of."""
    cuts: LocalCuts
    ranges: list[Range]
    """[rank of the shard group] its shard [first, last) of the flat bucket."""
    shard: Tensor | None = None
    """Values of this rank's shard, ZeRO 1 to 3."""
    shares: list[Share] = field(default_factory=list)
    """One for each piece of which this rank updates elements."""
    pending: Callable[[], list[Tensor]] | None = None
    """Waits for the shards of a gathering that has begun."""
    gathered: bool = True
    """Whether the parameters have their values."""

    def rows(self, piece: Piece, tensor: Tensor) -> Tensor:
        """A view of a piece's rows in a tensor that is laid out like the local parameter."""
        if tensor.dim() == 0:
            return tensor.reshape(1)
        cut = self.cuts[piece.name]
        ranges = cut.ranges if cut.dim == piece.dim else ((0, tensor.shape[piece.dim]),)
        rows_before = sum(
            min(end, piece.first) - begin for begin, end in ranges if begin < piece.first
        )
        rows_first = tensor.movedim(piece.dim, 0)
        return rows_first.narrow(0, rows_before, piece.last - piece.first)

    def flatten(self, tensors: Tensors, *, contributed: bool = False) -> Tensor:
        """The pieces of some tensors as one flat tensor, with zeros where there is none.

        contributed: zeros also for pieces to which another owner of this rank's unit contributes.
        """
        parts = []
        for piece in self.plan.pieces:
            tensor = tensors[piece.name]
            left_out = contributed and self.rank not in piece.contributors
            if tensor is None or left_out:
                tensor = torch.zeros_like(self.parameters[piece.name])
            parts.append(self.rows(piece, tensor).reshape(-1))
        return torch.cat(parts)

    def unflatten(self, flat: Tensor, tensors: Tensors) -> None:
        """Write a flat tensor's pieces to some tensors."""
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
    def shard_range(self) -> Range:
        """This rank's shard [first, last) of the flat bucket."""
        return self.ranges[self.shard_group.index(self.rank)]

    def begin(self, *, sharded: bool) -> None:
        """Give all owners the first owner's values, and set this rank's shard and shares. sharded:
        whether the rank updates its shard (ZeRO 1 to 3) or the whole bucket (ZeRO 0)."""
        flat = self.flatten(self.data)
        if self.owner_collectives is not None:
            self.owner_collectives.broadcast(flat, self.plan.owners[0])
            self.unflatten(flat, self.data)
        if sharded:
            self.shard = flat[slice(*self.shard_range)].clone()
        begin = 0
        for piece in self.plan.pieces:
            share = self._share_of(piece, begin)
            if share is not None:
                self.shares.append(share)
            begin += piece.size

    def _share_of(self, piece: Piece, begin: int) -> Share | None:
        """This rank's share of a piece that begins at an element of the flat bucket; None where its
        shard has none of it."""
        parameter = self.parameters[piece.name]
        element = piece.first * piece.row
        if self.shard is None:
            return Share(piece, begin, element, piece.size, parameter)
        shard_first, shard_last = self.shard_range
        first = max(begin, shard_first)
        last = min(begin + piece.size, shard_last)
        if first >= last:
            return None
        values = self.shard[first - shard_first : last - shard_first]
        updated = nn.Parameter(values, parameter.requires_grad)
        return Share(piece, first, element + first - begin, last - first, updated)

    def begin_gather(self) -> None:
        """Begin to gather all shards, unless that has begun."""
        assert self.shard is not None
        if self.shard_collectives is not None and self.pending is None:
            sizes = [last - first for first, last in self.ranges]
            self.pending = self.shard_collectives.gathering(self.shard, sizes)

    def gather(self) -> None:
        """Gather all shards and write them to the parameters."""
        assert self.shard is not None
        self.begin_gather()
        flat = self.shard
        if self.pending is not None:
            flat = torch.cat(self.pending())
            self.pending = None
        self.unflatten(flat, self.data)

    def sum_gradients(self) -> Callable[[], None]:
        """Begin to sum the gradients over the contributors.

        Returns a function that waits for the sum and writes it: under ZeRO 0 to the gradients of
        the parameters, else this rank's shard of it to the gradients of its shares.
        """
        if not self.plan.trained:
            return nothing
        # a single contributor has the whole gradient, and so have the other owners, who are of its
        # unit
        summed_already = all(len(piece.contributors) == 1 for piece in self.plan.pieces)
        if self.shard is None and (self.owner_collectives is None or summed_already):
            return nothing
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        flat = self.flatten(gradients, contributed=True)
        finish: Callable[[], None] = nothing
        if self.shard is None and self.owner_collectives is not None:
            finish = self.owner_collectives.totalling(flat)
        elif self.shard_collectives is not None:
            finish = self.shard_collectives.scattering(flat, self.shard_group, self.ranges)

        def end() -> None:
            finish()
            if self.shard is None:
                self.unflatten(flat, gradients)
                return
            if self.copy_collectives is not None:
                self.copy_collectives.total(flat[slice(*self.shard_range)])
            for share in self.shares:
                self._add_gradient(share, flat)

        return end

    def _add_gradient(self, share: Share, flat: Tensor) -> None:
        """Add a share's elements of a flat gradient to the share's gradient."""
        parameter = share.parameter
        if not parameter.requires_grad:
            return
        added = flat[share.begin : share.begin + share.size]
        if parameter.grad is None:
            parameter.grad = added.clone()
        else:
            parameter.grad.add_(added)

    def boxes(self, values: Mapping[int, Tensor] | None, *, scalars: bool) -> Iterator[Box]:
        """The elements that this rank updates, as boxes of flat tensors.

        values: id of an updated parameter -> a tensor of its elements; None: the parameters
        themselves. scalars: the tensors are single numbers, of which no rows are taken.
        """
        for share in self.shares:
            piece, parameter = share.piece, share.parameter
            tensor = parameter if values is None else values.get(id(parameter))
            if tensor is None:
                continue
            if self.shard is None and not scalars:
                tensor = self.rows(piece, tensor)
            yield Box(piece.name, (share.first,), (share.size,), (piece.whole,), tensor.detach())
