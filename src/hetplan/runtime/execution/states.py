"""What is held is joined with the other owners': data parallelism and ZeRO 0-3.

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

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hetplan.formulations.joint.plan import split
from hetplan.runtime.execution.buckets import Bucket, BucketPlan, Held
from hetplan.runtime.execution.transport import Group


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
