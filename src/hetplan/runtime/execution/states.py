"""Parameters, gradients and shards of one rank, joined with those of the other owners: data
parallelism and ZeRO 0-3.

ZeRO 0  gradients are summed over the owners; everyone updates what it holds.
ZeRO 1  everyone updates its share of each bucket; the updated parameters are gathered.
ZeRO 2  gradients live only as shares: replicas of one stage sum them after every micro-batch.
ZeRO 3  parameters, too: replicas of one stage gather each layer before its passes and let go of it
behind them.
In pipelines ZeRO 2 and 3 do at the beginning and at the end of an iteration what they otherwise do
at each pass: no other stage waits for a collective in the middle of its schedule.
Source: Rajbhandari et al. 2020 (ZeRO), Section 5; shares of any size are the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hetplan.runtime.execution.chain import Cut
from hetplan.runtime.execution.places import BucketPlan, Held, Piece
from hetplan.runtime.execution.transport import Group
from hetplan.runtime.plan import split
from hetplan.schema import Range


@dataclass(frozen=True)
class Fragment:
    """Elements [first, last) of a parameter, its split dimension moved to the front and flattened.

    values: a view of what is here; of any shape whose elements are in this order.
    """

    name: str
    dim: int
    first: int
    last: int
    values: Tensor


@dataclass(frozen=True)
class Share:
    """Elements [first, last) of a piece, which begins at `begin` of its flat bucket, and the
    parameter that an optimizer updates in their place."""

    piece: Piece
    first: int
    last: int
    begin: int
    parameter: nn.Parameter


@dataclass
class Bucket:
    """A bucket plan on one of its owners. parts [owners]: of the flat bucket; shard: the values of
    mine, ZeRO 1-3; shares: one for each piece that mine touches."""

    plan: BucketPlan
    rank: int
    group: Group | None
    parameters: Mapping[str, nn.Parameter]
    held: Held
    parts: list[Range]
    shard: Tensor | None = None
    shares: list[Share] = field(default_factory=list)

    @property
    def mine(self) -> Range:
        """My part."""
        return self.parts[self.plan.owners.index(self.rank)]

    def rows(self, piece: Piece, tensor: Tensor) -> Tensor:
        """The piece's rows of a tensor that is laid out like the local parameter; a view."""
        offset = 0
        for first, last in self.local(piece):
            if first <= piece.first and piece.last <= last:
                rows = tensor.reshape(1) if tensor.dim() == 0 else tensor.movedim(piece.dim, 0)
                return rows[offset + piece.first - first : offset + piece.last - first]
            offset += last - first
        raise AssertionError(f"{piece.name} [{piece.first}, {piece.last}) is not held here")

    def local(self, piece: Piece) -> Sequence[Range]:
        """Ranges of the piece's dimension that are held here."""
        cut: Cut = self.held[piece.name]
        if cut.dim == piece.dim:
            return cut.ranges
        return ((0, (*self.parameters[piece.name].shape, 1)[piece.dim]),)  # held whole

    def flat_values(self) -> Tensor:
        """The parameters' values."""
        return torch.cat(
            [self.rows(p, self.parameters[p.name].data).reshape(-1) for p in self.plan.pieces]
        )

    def flat_gradients(self) -> Tensor:
        """The gradients that count here, zeros for others."""
        parts = []
        for piece in self.plan.pieces:
            parameter = self.parameters[piece.name]
            if parameter.grad is None or self.rank not in piece.contributors:
                parts.append(
                    torch.zeros(piece.size, dtype=parameter.dtype, device=parameter.device)
                )
            else:
                parts.append(self.rows(piece, parameter.grad).reshape(-1))
        return torch.cat(parts)

    def spread(self, flat: Tensor, *, gradients: bool) -> None:
        """Write a flat bucket to the parameters or to their gradients."""
        first = 0
        for piece in self.plan.pieces:
            parameter, begin = self.parameters[piece.name], first
            first += piece.size
            if gradients and not parameter.requires_grad:
                continue
            if gradients and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            rows = self.rows(piece, parameter.grad if gradients else parameter.data)
            rows.copy_(flat[begin:first].view_as(rows))

    def first_values(self) -> None:
        """The first owner's values, everywhere."""
        if self.group is not None:
            flat = self.flat_values()
            self.group.broadcast(flat, self.plan.owners[0])
            self.spread(flat, gradients=False)

    def cut_shares(self) -> None:
        """Make my shard and the parameters that an optimizer updates in its place."""
        first, last = self.mine
        self.shard = self.flat_values()[first:last].clone()
        begin = 0
        for piece in self.plan.pieces:
            a, b = max(first, begin), min(last, begin + piece.size)
            if a < b:
                trained = self.parameters[piece.name].requires_grad
                values = nn.Parameter(self.shard[a - first : b - first], requires_grad=trained)
                self.shares.append(Share(piece, a - begin, b - begin, begin, values))
            begin += piece.size

    def gather(self) -> None:
        """Everyone's shard, written to the parameters."""
        assert self.shard is not None
        flat = self.shard
        if self.group is not None:
            flat = torch.cat(self.group.gather(flat, [last - first for first, last in self.parts]))
        self.spread(flat, gradients=False)

    def join_gradients(self) -> None:
        """Sum over the contributors: into the parameters' gradients (ZeRO 0), or my part of it into
        my shares'."""
        if self.shard is None and (self.group is None or self.plan.units == 1):
            return
        flat = self.flat_gradients()
        if self.group is not None:
            self.group.total(flat)
        if self.shard is None:
            self.spread(flat, gradients=True)
            return
        for share in self.shares:
            parameter = share.parameter
            if parameter.requires_grad:
                added = flat[share.begin + share.first : share.begin + share.last]
                held = parameter.grad
                parameter.grad = added.clone() if held is None else held.add_(added)

    def fragments(
        self, values: Mapping[int, Tensor] | None, *, scalars: bool
    ) -> Iterator[Fragment]:
        """Of my shares (ZeRO 1 to 3), or of whole pieces."""
        shares = self.shares
        if self.shard is None:
            pieces = self.plan.pieces
            shares = [Share(p, 0, p.size, 0, self.parameters[p.name]) for p in pieces]
        for share in shares:
            piece, parameter = share.piece, share.parameter
            tensor = parameter.data if values is None else values.get(id(parameter))
            if tensor is None:
                continue
            if self.shard is None and not scalars:
                tensor = self.rows(piece, tensor)
            begin = piece.first * piece.row
            yield Fragment(piece.name, piece.dim, begin + share.first, begin + share.last, tensor)


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
        self.zero, self.parameters, self.held = zero, parameters, held
        self.per_step, self.per_layer = in_step and zero == 2, in_step and zero == 3
        self.buckets = [
            Bucket(
                p,
                rank,
                groups.get(p.owners),
                parameters,
                held,
                split(p.size, [shares[r] for r in p.owners]),
            )
            for p in plans
            if rank in p.owners
        ]
        for bucket in self.buckets:
            bucket.first_values()
            if zero:
                bucket.cut_shares()
        self.stale = False
        self._let_go()

    def updated(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(unsplit name, parameter) that this rank's optimizer updates; a name may come in several
        pieces."""
        if self.zero == 0:
            yield from self.parameters.items()
            return
        for bucket in self.buckets:
            for share in bucket.shares:
                yield share.piece.name, share.parameter

    def begin(self) -> None:
        """Before an iteration: parameters that an optimizer changed elsewhere."""
        if (self.zero in (1, 2) and self.stale) or (self.zero == 3 and not self.per_layer):
            self._gather(self.buckets)
        self.stale = False

    def before_layer(self, layer: int) -> None:
        """Before a pass of a layer."""
        if self.per_layer:
            self._gather([b for b in self.buckets if layer in b.plan.layers])

    def after_layer(self, layer: int, *, backward: bool) -> None:
        """Behind a pass of a layer."""
        if self.per_layer:
            mine = [b for b in self.buckets if layer in b.plan.layers]
            if backward:
                self._join(mine)
            self._let_go(mine)

    def after_step(self) -> None:
        """Behind the backward pass of a micro-batch."""
        if self.per_step:
            self._join(self.buckets)

    def end(self) -> None:
        """Behind all passes of an iteration."""
        if not (self.per_step or self.per_layer):
            self._join(self.buckets)
        if self.zero == 0:
            # where no row came by, and nobody else has it
            for parameter in self.parameters.values():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        self._let_go()

    def fragments(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        mine: bool = False,
        scalars: bool = False,
    ) -> Iterator[Fragment]:
        """What this rank holds. values: by id of an updated parameter (gradients, say); default its
        own.

        mine: only what this rank answers for, so that all ranks' fragments are every element once.
        scalars: the values are single ones, which go with whole fragments.
        """
        for bucket in self.buckets:
            if self.zero or not mine or bucket.rank == bucket.plan.owners[0]:
                yield from bucket.fragments(values, scalars=scalars)

    def _join(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.join_gradients()
        if self.zero:  # only now: a parameter's pieces may lie in several buckets
            for name in {piece.name for bucket in buckets for piece in bucket.plan.pieces}:
                self.parameters[name].grad = None

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        with torch.no_grad():
            if self.zero == 3:
                for name in {piece.name for bucket in buckets for piece in bucket.plan.pieces}:
                    data = self.parameters[name].data
                    data.untyped_storage().resize_(data.numel() * data.element_size())
            for bucket in buckets:
                bucket.gather()

    def _let_go(self, buckets: Sequence[Bucket] | None = None) -> None:
        """ZeRO 3: the parameters' memory, which the next gathering asks for again."""
        if self.zero == 3:
            chosen = self.buckets if buckets is None else buckets
            for name in {piece.name for bucket in chosen for piece in bucket.plan.pieces}:
                self.parameters[name].data.untyped_storage().resize_(0)
