"""One configuration as the stated model sees it: sets and cost tables.

Sets   c cells (classes of interchangeable devices), p = (j, i, r) positions, n intervals [a, b) of
       layers that stage j can hold, S profiles (the slowest table of a set of types), λ levels
       (distinct bandwidths, ascending).
Tables compute[S][n] + reduce[λ][n] seconds of one micro-batch on a tensor group; link[λ][l] seconds
       to the next stage, by where a stage ends; sync[λ][n] seconds of the gradient all-reduce;
       bytes[n] per device.
Levels that cost nothing are left out.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from hetplan.formulations.amp.problem import (
    MEMORY_TOLERANCE,
    AmpProblem,
    Cells,
    Configuration,
    Floats,
    Ints,
    ring_factor,
)

# Half of what the evaluator lets pass: the other half is for the solvers' own tolerances.
HALF_TOLERANCE = MEMORY_TOLERANCE / 2


@dataclass(frozen=True)
class Intervals:
    """The ranges of layers that one stage can hold: [N] layers first to last - 1."""

    first: Ints
    last: Ints
    bytes: Floats  # per device, 1F1B

    def sums(self, values: Floats) -> Floats:
        """[N] sums of values[first] to values[last - 1], each summed from its own start (no
        cancellation)."""
        result = np.empty(len(self.first))
        for start in np.unique(self.first):
            here = self.first == start
            result[here] = np.cumsum(values[start:])[self.last[here] - start - 1]
        return result


@dataclass(frozen=True)
class Tables:
    """A problem, one configuration of it and its cells; all tables are in seconds."""

    problem: AmpProblem
    configuration: Configuration
    cells: Cells

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pp, dp, tp)."""
        chosen = self.configuration
        return chosen.pipeline, chosen.data, chosen.tensor

    @cached_property
    def stages(self) -> list[Intervals]:
        """The intervals of each stage: pp nonempty contiguous stages cover the layers."""
        chosen, problem, layers = self.configuration, self.problem, self.problem.layers
        pp, result = chosen.pipeline, []
        for j in range(pp):
            a, b = np.triu_indices(layers + 1, 1)
            kept = (a == 0) if j == 0 else (a >= j)
            kept &= (b == layers) if j == pp - 1 else (b <= layers - (pp - 1 - j))
            alive = min(chosen.gas, pp - j) * chosen.micro_batch
            weights = problem.state_factor * problem.params + alive * problem.saved
            stage = Intervals(a[kept], b[kept], np.zeros(0))
            result.append(Intervals(stage.first, stage.last, stage.sums(weights / chosen.tensor)))
        return result

    @property
    def seconds(self) -> Floats:
        """[types, L] tables of this configuration."""
        return self.problem.seconds[self.configuration.tensor, self.configuration.micro_batch]

    @cached_property
    def profiles(self) -> dict[tuple[int, ...], Floats]:
        """The paces that tensor groups can have: a set of types -> its slowest seconds, layer by
        layer [L], where that is slower than any part of the set."""
        kinds = range(len(self.problem.types))
        profiles: dict[tuple[int, ...], Floats] = {}
        for size in range(1, min(len(kinds), self.configuration.tensor) + 1):
            for types in combinations(kinds, size):
                pace = self.seconds[list(types)].max(axis=0)
                parts = [
                    self.seconds[list(part)].max(axis=0)
                    for part in combinations(types, size - 1)
                    if part
                ]
                if not any((part == pace).all() for part in parts):
                    profiles[types] = pace
        return profiles

    def compute(self, stage: int) -> Floats:
        """[profiles, N]: slowest tables summed over the intervals of a stage."""
        return np.stack([self.stages[stage].sums(pace) for pace in self.profiles.values()])

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
        tp, mbs = self.configuration.tensor, self.configuration.micro_batch
        size = self.stages[stage].sums(self.problem.tensor) * mbs
        return ring_factor(tp) * size / self.tensor_levels[:, None]

    def link(self, stage: int) -> Floats:
        """[link levels, ends]: one micro-batch over the link behind a stage but the last, by the
        layers before which it can end."""
        ends = np.unique(self.stages[stage].last)
        size = self.problem.activation[ends - 1] * self.configuration.micro_batch
        return size / self.link_levels[:, None]

    def sync(self, stage: int) -> Floats:
        """[sync levels, N]: gradient all-reduce of one data group."""
        _, dp, tp = self.shape
        size = self.stages[stage].sums(self.problem.params) / tp
        return ring_factor(dp) * size / self.sync_levels[:, None]

    def crossing(self, levels: Floats) -> Ints:
        """[K, K] index of the level between two devices of cells c and c' (-1: no such pair)."""
        between = self.cells.bandwidth
        index = np.searchsorted(levels, np.where(np.isfinite(between), between, 0.0))
        return np.where(np.isfinite(between), index, -1).astype(np.int64)

    @cached_property
    def capacity(self) -> Floats:
        """[types] bytes of a device, with the tolerance for rounding."""
        return self.problem.capacity * (1 + HALF_TOLERANCE)

    @cached_property
    def slowest_seconds(self) -> float:
        """T of no decision exceeds this: slowest tables and links everywhere."""
        chosen, problem, mbs = self.configuration, self.problem, self.configuration.micro_batch
        slow = self.bandwidths.min(initial=np.inf)
        reduce = ring_factor(chosen.tensor) * problem.tensor.sum() * mbs / slow
        sync = ring_factor(chosen.data) * problem.params.sum() / chosen.tensor / slow
        once = problem.activation.sum() * mbs / slow
        return float(chosen.gas * (self.seconds.max(axis=0).sum() + reduce) + once + sync)
