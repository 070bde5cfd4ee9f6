"""The collectives of a distributed program between ranks: slices of any length, none included.

On gloo a reduce-scatter is an all-reduce of which a slice is kept (gloo's own is slower, and wants
equal slices).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hetplan.formulations.hap.spmd.exchange import Bounds, Exchange, Manner, Slices, piece
from hetplan.formulations.hap.spmd.operators.base import Array
from hetplan.runtime.execution.transport import Group, Transport

Told = Callable[[bool], None]


class Ranks(Exchange):
    """One rank among all. told: called with True as a collective begins, with False as it ends.
    group: of all ranks."""

    def __init__(self, told: Told | None = None, group: Group | None = None) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.here = [self.rank]
        self._told = told or (lambda begins: None)
        self.group = group or Transport.on_cpu().everyone

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._told(True)
        yield
        self._told(False)

    def total(self, slices: Slices) -> Slices:
        """An all-reduce."""
        with self._collective():
            return [array(self._sum(slices[0]))]

    def _sum(self, value: Array) -> Tensor:
        whole = torch.from_numpy(np.array(value, order="C"))  # a copy: it is summed in place
        self.group.total(whole)
        return whole

    def gather(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """An all-gather of slices padded to the longest, or a broadcast from each owner of one."""
        with self._collective():
            own = leading(slices[0], dimension)
            if manner == "padded":
                parts = self.group.gather(own, [last - first for first, last in bounds])
            else:
                parts = self._grouped(own, bounds)
            return [array(torch.cat(parts).movedim(0, dimension))]

    def _grouped(self, own: Tensor, bounds: Bounds) -> list[Tensor]:
        parts = []
        for owner, (first, last) in enumerate(bounds):
            part = own if owner == self.rank else own.new_empty((last - first, *own.shape[1:]))
            if last > first:
                self.group.broadcast(part, owner)
            parts.append(part)
        return parts

    def scatter(self, slices: Slices, dimension: int, bounds: Bounds, manner: Manner) -> Slices:
        """An all-reduce of which a slice is kept, or a reduction to each owner of one."""
        with self._collective():
            if manner == "padded":
                return [
                    np.ascontiguousarray(
                        piece(array(self._sum(slices[0])), dimension, bounds[self.rank])
                    )
                ]
            own = slices[0]
            for owner, pair in enumerate(bounds):
                part = torch.from_numpy(np.array(piece(slices[0], dimension, pair), order="C"))
                self.group.reduce(part, owner)
                if owner == self.rank:
                    own = array(part)
            return [own]

    def swap(
        self, slices: Slices, source: int, before: Bounds, target: int, after: Bounds
    ) -> Slices:
        """One message from every rank to every other one."""
        with self._collective():
            value, mine = slices[0], before[self.rank]
            if source == target:
                leaving = [piece(value, source, shared(mine, to, mine[0])) for to in after]
                lengths = [span(shared(of, after[self.rank], 0)) for of in before]
            else:
                leaving = [piece(value, target, to) for to in after]
                lengths = [last - first for first, last in before]
            shape = list(value.shape)
            shape[target] = after[self.rank][1] - after[self.rank][0]
            shapes = [(*shape[:source], n, *shape[source + 1 :]) for n in lengths]
            sizes = [int(np.prod(s)) for s in shapes]
            sent = torch.from_numpy(np.concatenate([part.reshape(-1) for part in leaving]))
            received = self.group.swap(sent, [part.size for part in leaving], sizes)
            parts = zip(received.split(sizes), shapes, strict=True)
            return [array(torch.cat([part.view(s) for part, s in parts], dim=source))]


def leading(value: Array, dimension: int) -> Tensor:
    """With this dimension in front, contiguous."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(value, dimension, 0)))


def array(value: Tensor) -> Array:
    """As numpy has it."""
    return np.asarray(value.contiguous())


def shared(one: tuple[int, int], two: tuple[int, int], origin: int) -> tuple[int, int]:
    """What two ranges share, counted from `origin`; empty where it is nothing."""
    first, last = max(one[0], two[0]), min(one[1], two[1])
    return (first - origin, last - origin) if first < last else (0, 0)


def span(pair: tuple[int, int]) -> int:
    """A range's length."""
    return pair[1] - pair[0]
