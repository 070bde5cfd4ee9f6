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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hetplan.formulations.joint.plan import split
from hetplan.runtime.execution.loop import Box
from hetplan.runtime.execution.places import BucketPlan, Held, Piece
from hetplan.runtime.execution.transport import Group
from hetplan.schema import Range


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
    """A bucket plan on one of its owners. parameters: those that it has pieces of; parts [owners]:
    of the flat bucket; shard: the values of mine, ZeRO 1-3; shares: one for each piece that this
    rank updates elements of."""

    plan: BucketPlan
    rank: int
    group: Group | None
    parameters: Mapping[str, nn.Parameter]
    held: Held
    parts: list[Range]
    shard: Tensor | None = None
    shares: list[Share] = field(default_factory=list)

    def rows(self, piece: Piece, tensor: Tensor) -> Tensor:
        """The piece's rows of a tensor that is laid out like the local parameter; a view."""
        if tensor.dim() == 0:
            return tensor.reshape(1)
        cut = self.held[piece.name]
        whole = ((0, tensor.shape[piece.dim]),)
        ranges = cut.ranges if cut.dim == piece.dim else whole
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

    def begin(self, *, sharded: bool) -> None:
        """The first owner's values, everywhere, and what this rank updates of them."""
        flat = self.flat(self.data)
        if self.group is not None:
            self.group.broadcast(flat, self.plan.owners[0])
            self.spread(flat, self.data)
        first, last = self.parts[self.plan.owners.index(self.rank)]
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

    def gather(self) -> None:
        """Everyone's shard, written to the parameters."""
        assert self.shard is not None
        flat = self.shard
        if self.group is not None:
            flat = torch.cat(self.group.gather(flat, [last - first for first, last in self.parts]))
        self.spread(flat, self.data)

    def join_gradients(self) -> None:
        """Sum over the contributors: into the parameters' gradients (ZeRO 0), or my part of it into
        my shares'."""
        if self.shard is None and (self.group is None or self.plan.alone):
            return
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        flat = self.flat(gradients, counting=True)
        if self.group is not None:
            self.group.total(flat)
        if self.shard is None:
            self.spread(flat, gradients)
            return
        for share in self.shares:
            parameter = share.parameter
            if parameter.requires_grad:
                added, held = flat[share.begin : share.begin + share.size], parameter.grad
                parameter.grad = added.clone() if held is None else held.add_(added)

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
                groups.get(p.owners),
                {piece.name: parameters[piece.name] for piece in p.pieces},
                held,
                split(p.size, [shares[r] for r in p.owners]),
            )
            for p in plans
            if rank in p.owners
        ]
        for bucket in self.buckets:
            bucket.begin(sharded=zero > 0)
        self._let_go(self.buckets)

    def begin(self) -> None:
        """Before an iteration: parameters that an optimizer changed elsewhere."""
        if self.zero and not self.per_layer:
            self._gather(self.buckets)

    def of_layer(self, layer: int) -> list[Bucket]:
        """What is gathered and let go of with a layer: all of it under ZeRO 3 layer by layer."""
        return [b for b in self.buckets if self.per_layer and layer in b.plan.layers]

    def before_layer(self, layer: int) -> None:
        """Before a pass of a layer."""
        self._gather(self.of_layer(layer))

    def after_layer(self, layer: int, *, backward: bool) -> None:
        """Behind a pass of a layer."""
        buckets = self.of_layer(layer)
        if backward:
            self._join(buckets)
        self._let_go(buckets)

    def after_step(self) -> None:
        """Behind the backward pass of a micro-batch."""
        if self.per_step:
            self._join(self.buckets)

    def end(self) -> None:
        """Behind all passes of an iteration."""
        if self.zero == 0:  # where no row came by
            for parameter in self.parameters.values():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        if not (self.per_step or self.per_layer):
            self._join(self.buckets)
        self._let_go(self.buckets)

    def _join(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.join_gradients()
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

    def _let_go(self, buckets: Sequence[Bucket]) -> None:
        """ZeRO 3: the parameters' memory, which the next gathering asks for again."""
        if self.zero == 3:
            for parameter in parameters_of(buckets):
                parameter.data.untyped_storage().resize_(0)
