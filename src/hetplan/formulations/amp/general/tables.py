"""One configuration as the general models see it: sets and cost tables.

Sets   c cells (classes of interchangeable devices), p = (j, i, r) positions, n intervals [a, b) of
       layers that stage j can hold, S profiles (the slowest table of a set of types), λ levels
       (distinct bandwidths, ascending).
Tables compute[S][n] + reduce[λ][n] seconds of one micro-batch on a tensor group; link[λ][l] seconds
       to the next stage when a stage ends before layer l; sync[λ][n] seconds of the gradient
       all-reduce; room[n] bytes per device.
A level stands for "the lowest bandwidth involved is at most this one"; only levels that cost
something are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from hetplan.formulations.amp.cells import Cells
from hetplan.formulations.amp.problem import (
    MEMORY_TOLERANCE,
    AmpProblem,
    Configuration,
    Floats,
    Ints,
)
from hetplan.formulations.amp.strategy import Strategy, ring_factor

# Half of what the evaluator lets pass: the other half is for the solvers' own tolerances.
HALF_TOLERANCE = MEMORY_TOLERANCE / 2


@dataclass(frozen=True)
class Intervals:
    """The ranges of layers that one stage can hold: [N] layers first to last - 1, bytes per
    device."""

    first: Ints
    last: Ints
    bytes: Floats

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class Profile:
    """The pace of a tensor group. seconds [L]: of the slowest of `types`; covers: all types that it
    is enough for."""

    types: frozenset[int]
    covers: frozenset[int]
    seconds: Floats


@dataclass(frozen=True)
class Tables:
    """A problem, one configuration of it and its cells; all tables are in seconds."""

    problem: AmpProblem
    configuration: Configuration
    cells: Cells

    @property
    def terms(self) -> int:
        """About how many terms a model of this configuration has; computed without listing the
        intervals."""
        pp, dp, tp = self.shape
        tensor, link, sync = len(self.tensor_levels), len(self.link_levels), len(self.sync_levels)
        products = self.intervals * (dp * (len(self.profiles) + tensor + link) + sync)
        cells = self.cells.count
        return products + cells * (pp * dp * tp + self.talking * min(cells, len(self.bandwidths)))

    @property
    def intervals(self) -> int:
        """How many intervals the stages have together."""
        pp = self.configuration.pipeline
        free = self.problem.layers - pp + 1
        return 1 if pp == 1 else 2 * free + (pp - 2) * free * (free + 1) // 2

    @property
    def talking(self) -> int:
        """How many pairs of positions talk: in a tensor group, on a lane of a link, in a data
        group."""
        pp, dp, tp = self.shape
        inside = (len(self.tensor_levels) > 0) * pp * dp * tp * (tp - 1) // 2
        across = (len(self.link_levels) > 0) * (pp - 1) * dp * tp
        return inside + across + (len(self.sync_levels) > 0) * pp * tp * dp * (dp - 1) // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pp, dp, tp)."""
        chosen = self.configuration
        return chosen.pipeline, chosen.data, chosen.tensor

    @cached_property
    def stages(self) -> list[Intervals]:
        """The intervals of each stage: pp nonempty contiguous stages cover the layers."""
        pp, layers = self.configuration.pipeline, self.problem.layers
        found = []
        for j in range(pp):
            starts = [0] if j == 0 else range(j, layers - (pp - j) + 1)
            pairs = [
                (a, b)
                for a in starts
                for b in ([layers] if j == pp - 1 else range(a + 1, layers - (pp - 1 - j) + 1))
            ]
            first, last = np.array(pairs, dtype=np.int64).T
            found.append(Intervals(first, last, self._bytes(j, first, last)))
        return found

    def _bytes(self, stage: int, first: Ints, last: Ints) -> Floats:
        """What a device of `stage` holds under 1F1B."""
        chosen, problem = self.configuration, self.problem
        alive = min(chosen.gas, chosen.pipeline - stage) * chosen.micro_batch
        weights = (problem.state_factor * problem.params + alive * problem.saved) / chosen.tensor
        return interval_sums(weights, first, last)

    @cached_property
    def boundaries(self) -> list[Ints]:
        """For each stage but the last: the layers before which it can end."""
        return [np.unique(n.last) for n in self.stages[:-1]]

    @property
    def has_links(self) -> bool:
        """Whether what stages send each other costs anything."""
        return len(self.link_levels) > 0

    @property
    def seconds(self) -> Floats:
        """[types, L] tables of this configuration."""
        return self.problem.seconds[self.configuration.tensor, self.configuration.micro_batch]

    @cached_property
    def profiles(self) -> list[Profile]:
        """The paces of the tensor groups that can occur: no set of types that a part of it makes
        just as slow."""
        kinds = range(len(self.problem.types))
        found: list[Profile] = []
        for size in range(1, min(len(kinds), self.configuration.tensor) + 1):
            for chosen in combinations(kinds, size):
                slowest = self.seconds[list(chosen)].max(axis=0)
                parts = (
                    self.seconds[list(part)].max(axis=0)
                    for part in combinations(chosen, size - 1)
                    if part
                )
                if not any((part == slowest).all() for part in parts):
                    covers = frozenset(k for k in kinds if (self.seconds[k] <= slowest).all())
                    found.append(Profile(frozenset(chosen), covers, slowest))
        return found

    def compute(self, stage: int) -> Floats:
        """[profiles, N]: slowest tables summed over the intervals of a stage."""
        n = self.stages[stage]
        return np.stack(
            [interval_sums(profile.seconds, n.first, n.last) for profile in self.profiles]
        )

    def least_compute(self, stage: int) -> Floats:
        """[N]: the least that any group needs for the intervals of a stage."""
        n = self.stages[stage]
        return interval_sums(self.seconds.min(axis=0), n.first, n.last)

    @cached_property
    def bandwidths(self) -> Floats:
        """[levels] distinct bandwidths between two devices, ascending; empty for a single
        device."""
        between = self.cells.bandwidth
        return np.unique(between[np.isfinite(between)])

    @cached_property
    def tensor_levels(self) -> Floats:
        """Levels that matter inside tensor groups: none without tensor parallelism or its
        traffic."""
        return self.bandwidths if self.shape[2] > 1 and self.problem.tensor.any() else np.zeros(0)

    @cached_property
    def link_levels(self) -> Floats:
        """Levels that matter between stages."""
        matters = self.shape[0] > 1 and self.problem.activation[:-1].any()
        return self.bandwidths if matters else np.zeros(0)

    @cached_property
    def sync_levels(self) -> Floats:
        """Levels that matter inside data groups."""
        return self.bandwidths if self.shape[1] > 1 and self.problem.params.any() else np.zeros(0)

    def reduce(self, stage: int) -> Floats:
        """[tensor levels, N]: tensor all-reduces of one micro-batch."""
        n, tp = self.stages[stage], self.configuration.tensor
        size = interval_sums(self.problem.tensor, n.first, n.last) * self.configuration.micro_batch
        return ring_factor(tp) * size / self.tensor_levels[:, None]

    def link(self, boundaries: Ints) -> Floats:
        """[link levels, len(boundaries)]: one micro-batch over the link behind layer l - 1, per
        boundary l."""
        size = self.problem.activation[boundaries - 1] * self.configuration.micro_batch
        return size / self.link_levels[:, None]

    def sync(self, stage: int) -> Floats:
        """[sync levels, N]: gradient all-reduce of one data group."""
        n, (_, dp, tp) = self.stages[stage], self.shape
        size = interval_sums(self.problem.params, n.first, n.last) / tp
        return ring_factor(dp) * size / self.sync_levels[:, None]

    def crossing(self, levels: Floats) -> Ints:
        """[K, K] index of the level between two devices of cells c and c' (-1: no such pair)."""
        between = self.cells.bandwidth
        found = np.searchsorted(levels, np.where(np.isfinite(between), between, 0.0))
        return np.where(np.isfinite(between), found, -1).astype(np.int64)

    @cached_property
    def equal_before(self) -> list[tuple[int, int]]:
        """(cell, the cell before it that is interchangeable with it), for all but the first of each
        class."""
        kinds = self.cells.kind.tolist()
        return [
            (c, max(b for b in range(c) if kinds[b] == kinds[c]))
            for c in range(len(kinds))
            if kinds[c] in kinds[:c]
        ]

    @cached_property
    def capacity(self) -> Floats:
        """[types] bytes of a device, with the tolerance for rounding."""
        return self.problem.capacity * (1 + HALF_TOLERANCE)

    @cached_property
    def slowest_seconds(self) -> float:
        """T of no decision exceeds this: slowest tables and links everywhere."""
        chosen = self.configuration
        total = self.seconds.max(axis=0).sum()
        if len(self.tensor_levels):
            total += (
                ring_factor(chosen.tensor)
                * self.problem.tensor.sum()
                * chosen.micro_batch
                / self.tensor_levels[0]
            )
        total *= chosen.gas
        if len(self.link_levels):
            total += self.problem.activation.sum() * chosen.micro_batch / self.link_levels[0]
        if len(self.sync_levels):
            total += (
                ring_factor(chosen.data)
                * self.problem.params.sum()
                / chosen.tensor
                / self.sync_levels[0]
            )
        return float(total)

    def strategy(self, cell_of: Ints, cut: Ints) -> Strategy:
        """A strategy from the cell of each position [pp, dp, tp] and the cut [pp + 1]; devices in
        cell order."""
        free = [list(members) for members in self.cells.members]
        devices = [free[c].pop(0) for c in cell_of.ravel()]
        placement = np.array(devices, dtype=np.int64).reshape(cell_of.shape)
        return Strategy(self.configuration, placement, cut)


def interval_sums(values: Floats, first: Ints, last: Ints) -> Floats:
    """[N] sums of values[first] to values[last - 1], each summed from its own start (no
    cancellation)."""
    sums = np.empty(len(first))
    for start in np.unique(first):
        here = first == start
        sums[here] = np.cumsum(values[start:])[last[here] - start - 1]
    return sums
