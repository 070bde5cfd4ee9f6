"""The collectives of a distributed program between ranks: slices of any length, none included.

On gloo a reduce-scatter is an all-reduce of which a slice is kept (gloo's own is slower, and wants
equal slices).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.formulations.hap.spmd.axes import Bounds
from hetplan.runtime.execution.spmd.machine import Exchange, Manner, Slices, piece
from hetplan.runtime.execution.transport import Group


class Ranks(Exchange):
    """One rank among all."""

    def __init__(self, group: Group, notify: Callable[[bool], None] | None = None) -> None:
        """group: of all ranks. notify: called with True as a collective begins, with False as it
        ends."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.here = [self.rank]
        self.group, self._notify = group, notify or (lambda begins: None)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._notify(True)
        yield
        self._notify(False)

    def total(self, slices: Slices) -> Slices:
        """An all-reduce."""
        with self._collective():
            return [self._sum(slices[0])]

    def _sum(self, value: Tensor) -> Tensor:
        whole = copied(value)  # it is summed in place
        self.group.total(whole)
        return whole

    def gather(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """An all-gather of slices padded to the longest, or a broadcast from each owner of one."""
        with self._collective():
            own = slices[0].detach().movedim(dimension, 0).contiguous()
            if manner == "padded":
                parts = self.group.gather(own, [last - first for first, last in bounds])
            else:
                parts = self._grouped(own, bounds)
            return [torch.cat(parts).movedim(0, dimension).contiguous()]

    def _grouped(self, own: Tensor, bounds: Bounds) -> list[Tensor]:
        parts = []
        for owner, (first, last) in enumerate(bounds):
            part = (
                own.clone() if owner == self.rank else own.new_empty((last - first, *own.shape[1:]))
            )
            if last > first:
                self.group.broadcast(part, owner)
            parts.append(part)
        return parts

    def scatter(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """An all-reduce of which a slice is kept, or a reduction to each owner of one."""
        with self._collective():
            if manner == "padded":
                return [copied(piece(self._sum(slices[0]), dimension, bounds[self.rank]))]
            parts = [copied(piece(slices[0], dimension, pair)) for pair in bounds]
            for owner, part in enumerate(parts):
                self.group.reduce(part, owner)
            return [parts[self.rank]]

    def swap(
        self, slices: Slices, source: int, before: Bounds, target: int, after: Bounds
    ) -> Slices:
        """One message from every rank to every other one."""
        with self._collective():
            value, mine = slices[0].detach(), before[self.rank]
            if source == target:
                leaving = [piece(value, source, shared(mine, to, mine[0])) for to in after]
                ranges = [shared(of, after[self.rank], 0) for of in before]
            else:
                leaving, ranges = [piece(value, target, to) for to in after], list(before)
            shape = list(value.shape)
            shape[target] = after[self.rank][1] - after[self.rank][0]
            shapes = [(*shape[:source], b - a, *shape[source + 1 :]) for a, b in ranges]
            sizes = [math.prod(s) for s in shapes]
            sent = torch.cat([part.reshape(-1) for part in leaving])
            received = self.group.swap(sent, [part.numel() for part in leaving], sizes)
            parts = zip(received.split(sizes), shapes, strict=True)
            return [torch.cat([part.view(s) for part, s in parts], dim=source)]


def copied(value: Tensor) -> Tensor:
    """The values in memory of their own, row by row."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def shared(one: tuple[int, int], two: tuple[int, int], origin: int) -> tuple[int, int]:
    """What two ranges share, counted from `origin`; empty where it is nothing."""
    first, last = max(one[0], two[0]), min(one[1], two[1])
    return (first - origin, last - origin) if first < last else (0, 0)
