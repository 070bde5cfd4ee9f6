"""A rank's parameters, gradients and optimizer states under data parallelism and ZeRO 0 to 3.

ZeRO 0  Gradients are summed over the owners, and every owner updates all of its parameters.
ZeRO 1  Every owner updates its shard of each bucket; the updated parameters are gathered.
ZeRO 2  Gradients, too, are kept as shards: replicas of one stage sum them after every micro-batch.
ZeRO 3  Parameters, too, are kept as shards: replicas of one stage gather each layer before its
        passes and release it after them.

In replicas of one stage collectives run beside the passes: a bucket's gradients are summed once its
lowest layer has computed them, and ZeRO 3 gathers one layer ahead. In pipelines all collectives run
at the beginning and at the end of an iteration, so that no other stage waits for one in the middle
of its schedule.

Source: Rajbhandari et al. 2020 (ZeRO), Section 5. The shards' sizes are the plan's, and may differ.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from hetplan.plans.shares import split
from hetplan.runtime.engine.buckets import Bucket, BucketPlan, LocalCuts
from hetplan.runtime.engine.transport import Group
from hetplan.schema import Range

PENDING_SUMS = 2  # buckets whose sums may be under way: each is a copy of its gradients


class States:
    """The buckets of one rank. Its methods begin and end their collectives around the passes."""

    zero: int
    """ZeRO level."""
    parameters: Mapping[str, nn.Parameter]
    """Name in the unsplit model -> this rank's part of the parameter."""
    per_micro_batch: bool
    """Whether gradients are summed after every micro-batch (ZeRO 2)."""
    per_layer: bool
    """Whether each layer is gathered before its passes and released after them (ZeRO 3)."""
    buckets: list[Bucket]

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        groups: Mapping[tuple[int, ...], Group],
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        cuts: LocalCuts,
        *,
        zero: int,
        shares: Sequence[float],
        in_step: bool,
    ) -> None:
        """plans: the plans of all buckets. groups: ranks -> their collectives. cuts: the rank's
        parts of parameters. shares: [rank] the rank's share of ZeRO's shards. in_step: whether all
        ranks take each pass together, as replicas of one stage do."""
        self.zero = zero
        self.parameters = parameters
        self.per_micro_batch = in_step and zero == 2
        self.per_layer = in_step and zero == 3
        self.buckets = []
        for plan in plans:
            if rank not in plan.owners:
                continue
            shard_group = plan.shard_group(rank)
            size = sum(piece.size for piece in plan.pieces)
            bucket = Bucket(
                plan=plan,
                rank=rank,
                shard_group=shard_group,
                owner_collectives=groups.get(plan.owners),
                shard_collectives=groups.get(shard_group),
                copy_collectives=groups.get(plan.shard_copies(rank)),
                parameters={piece.name: parameters[piece.name] for piece in plan.pieces},
                cuts=cuts,
                ranges=split(size, [shares[other] for other in shard_group]),
            )
            self.buckets.append(bucket)
        for bucket in self.buckets:
            # shards of frozen parameters save memory only where no rank holds them whole
            bucket.begin(sharded=zero == 3 or (zero > 0 and bucket.plan.trained))
        # For each sum under way, a function that waits for its end.
        self._pending: deque[Callable[[], None]] = deque()
        self._release(self.buckets)

    @cached_property
    def collective_layers(self) -> frozenset[int]:
        """The layers after whose backward passes the gradients of a bucket are summed."""
        return frozenset(layer for bucket in self.buckets for layer in bucket.plan.layers)

    def spans(self, first: int, last: int) -> list[Range]:
        """The layers [first, last) in spans: consecutive layers between whose passes no collective
        begins. In a backward pass the gradients of a bucket may be summed behind a span's first
        layer. Under ZeRO 3 each layer is a span, since it is gathered before its passes and
        released after them."""
        starts = [first]
        for layer in range(first + 1, last):
            if self.per_layer or layer in self.collective_layers:
                starts.append(layer)
        return list(pairwise([*starts, last]))

    def begin(self, visits: Sequence[tuple[bool, int]] = ()) -> None:
        """Begin an iteration: gather the parameters, which an optimizer has changed elsewhere.

        visits: (completes, first layer) of every pass of a span, in the order of the passes.
        `completes` says whether the pass completes the gradients of a micro-batch. Empty: no pass
        follows.
        """
        self._backward_left = Counter(layer for completes, layer in visits if completes)
        # the layer of the pass behind each pass, and None behind the last one
        following: list[int | None] = [layer for _, layer in visits[1:]]
        self._following = iter([*following, None])
        if self.zero and not self.per_layer:
            self._gather([bucket for bucket in self.buckets if bucket.shard is not None])

    def before_span(self, layer: int) -> None:
        """Gather a span's parameters before a pass, and begin to gather the next pass's. layer: the
        span's first layer, as in the next method."""
        self._gather([bucket for bucket in self._of_layer(layer) if not bucket.gathered])
        self._next_layer = next(self._following)
        for bucket in self._of_layer(self._next_layer):
            if not bucket.gathered:
                bucket.begin_gather()

    def after_span(self, layer: int, *, completes: bool) -> None:
        """After a pass of a span, sum the gradients that are complete, and release the span's
        parameters. completes: whether the pass completes the gradients of a micro-batch."""
        if completes:
            self._backward_left[layer] -= 1
            every_micro_batch = self.per_micro_batch or self.per_layer
            if every_micro_batch or self._backward_left[layer] == 0:
                # Only under ZeRO 3 a bucket may have several layers, with a shared parameter. The
                # sum after each of these layers is then added to the shard's gradient.
                self._sum([bucket for bucket in self.buckets if layer in bucket.plan.layers])
        self._release([
            bucket for bucket in self._of_layer(layer)
            if self._next_layer not in bucket.plan.layers
        ])  # fmt: skip

    def end(self) -> None:
        """End an iteration: wait for all sums of gradients, and release the parameters."""
        self._sum([bucket for bucket in self.buckets if not bucket.plan.layers])
        while self._pending:
            self._pending.popleft()()
        self._release(self.buckets)

    def end_forward(self) -> None:
        """End forward passes without backward passes: release the parameters."""
        self._release(self.buckets)

    def _of_layer(self, layer: int | None) -> list[Bucket]:
        """The buckets that are gathered and released with a layer. Empty where buckets are not
        gathered layer by layer (`per_layer`)."""
        if not self.per_layer:
            return []
        return [bucket for bucket in self.buckets if layer in bucket.plan.layers]

    def _sum(self, buckets: Sequence[Bucket]) -> None:
        """Begin to sum the gradients of some buckets."""
        if self.zero == 0:
            for parameter in parameters_of(buckets):
                # a rank without rows has no gradient
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets:
            self._pending.append(bucket.sum_gradients())
            if len(self._pending) > PENDING_SUMS:
                self._pending.popleft()()
        if self.zero:  # after all buckets: a parameter's pieces may be in several of them
            for parameter in parameters_of(buckets):
                parameter.grad = None

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        """Gather the parameters of some buckets."""
        if not buckets:
            return
        with torch.no_grad():
            if self.zero == 3:
                for parameter in parameters_of(buckets):
                    data = parameter.data
                    data.untyped_storage().resize_(data.numel() * data.element_size())
            for bucket in buckets:
                bucket.gather()
                bucket.gathered = True

    def _release(self, buckets: Sequence[Bucket]) -> None:
        """Under ZeRO 3, free the parameters' memory, which the next gathering allocates again."""
        if self.zero != 3:
            return
        for bucket in buckets:
            bucket.gathered = False
        for parameter in parameters_of(buckets):
            parameter.data.untyped_storage().resize_(0)


def parameters_of(buckets: Sequence[Bucket]) -> list[nn.Parameter]:
    """The parameters of some buckets. One whose pieces lie in several buckets occurs several
    times."""
    return [parameter for bucket in buckets for parameter in bucket.parameters.values()]
