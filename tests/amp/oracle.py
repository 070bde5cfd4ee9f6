"""Brute force for problem `amp`: all degrees, micro-batches, bijections and cuts, by formulas of
its own.

It shares nothing with the package but the data classes. The only pruning is by symmetry: permuting
the data ranks, or the tensor ranks of all stages and data ranks alike, permutes the pipelines T_i,
the ranks that a link minimises over and the data groups of S, and changes nothing else. So stage 0,
seen as a matrix over
(data rank, tensor rank), may be taken with its least device at (0, 0) and its first row and first
column ascending: every orbit of the two symmetries has such a member.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

from hetplan.formulations.amp.data import AmpData, AmpDecision

# Bytes may exceed a capacity by this relative amount: rounding.
SLACK = 1e-9


@dataclass(frozen=True)
class Optimum:
    """The least T and a decision that attains it."""

    objective: float
    decision: AmpDecision


def degrees(data: AmpData) -> Iterator[tuple[int, int, int, int, int]]:
    """(pp, dp, tp, mbs, gas) that the batch, the layers and the tables allow."""
    count = len(data.devices)
    used = {device.type for device in data.devices}
    tables = {(entry.tensor, entry.micro_batch, entry.type) for entry in data.layer_seconds}
    sizes = sorted({entry.micro_batch for entry in data.layer_seconds})
    for pp in range(1, min(count, len(data.layers)) + 1):
        for dp in range(1, count + 1):
            for tp in range(1, count + 1):
                for mbs in sizes:
                    if pp * dp * tp != count or data.global_batch % (dp * mbs):
                        continue
                    if all((tp, mbs, name) in tables for name in used):
                        yield pp, dp, tp, mbs, data.global_batch // (dp * mbs)


def bijections(count: int, dp: int, tp: int) -> Iterator[tuple[int, ...]]:
    """Devices by position (j dp + i) tp + r, one per orbit of the symmetries named above at
    least."""
    for order in permutations(range(count)):
        stage = order[: dp * tp]
        row, column = stage[:tp], stage[::tp]
        if stage[0] == min(stage) and list(row) == sorted(row) and list(column) == sorted(column):
            yield order


def solve(data: AmpData) -> Optimum | None:
    """The optimum by enumeration; None when no decision is feasible."""
    best: tuple[float, AmpDecision] | None = None
    for chosen in degrees(data):
        found = Enumeration(data, chosen).best(best[0] if best else float("inf"))
        best = found or best
    return None if best is None else Optimum(*best)


class Enumeration:
    """All placements and cuts of one choice of degrees and micro-batch."""

    def __init__(self, data: AmpData, degrees: tuple[int, int, int, int, int]) -> None:
        self.data = data
        self.pp, self.dp, self.tp, self.mbs, self.gas = degrees
        self.types = [device.type for device in data.devices]
        self.tables = {
            entry.type: entry.seconds
            for entry in data.layer_seconds
            if (entry.tensor, entry.micro_batch) == (self.tp, self.mbs)
        }
        layers = len(data.layers)
        self.cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), self.pp - 1)]

    def best(self, below: float) -> tuple[float, AmpDecision] | None:
        """The cheapest feasible decision, if it costs less than `below`."""
        found = None
        for order in bijections(len(self.types), self.dp, self.tp):
            groups = [
                [order[(j * self.dp + i) * self.tp :][: self.tp] for i in range(self.dp)]
                for j in range(self.pp)
            ]
            for cut in self.cuts:
                if self.fits(groups, cut) and (cost := self.cost(groups, cut)) < below:
                    below, found = cost, self.decision(groups, cut)
        return None if found is None else (below, found)

    def fits(self, groups: list[list[tuple[int, ...]]], cut: tuple[int, ...]) -> bool:
        """The memory constraint, device by device."""
        memory = self.data.memory
        if memory is None:
            return True
        for j, stage in enumerate(groups):
            held = 0.0
            for l in range(cut[j], cut[j + 1]):
                held += (
                    memory.state_bytes_per_param_byte * self.data.layers[l].param_bytes / self.tp
                )
                if memory.layer_frozen_bytes is not None:
                    held += memory.layer_frozen_bytes[l] / self.tp
                held += (
                    min(self.gas, self.pp - j)
                    * self.mbs
                    * memory.layer_bytes_per_sample[l]
                    / self.tp
                )
            for group in stage:
                for device in group:
                    if held > memory.device_bytes[self.types[device]] * (1 + SLACK):
                        return False
        return True

    def cost(self, groups: list[list[tuple[int, ...]]], cut: tuple[int, ...]) -> float:
        """T, written out once more."""
        slowest = 0.0
        for i in range(self.dp):
            stages = [self.stage(groups[j][i], cut[j], cut[j + 1]) for j in range(self.pp)]
            total = sum(stages) + (self.gas - 1) * max(stages)
            for j in range(1, self.pp):
                activation = self.data.layers[cut[j] - 1].activation_bytes
                total += max(
                    activation * self.mbs / self.data.bandwidth[a][b]
                    for a, b in zip(groups[j - 1][i], groups[j][i], strict=True)
                )
            slowest = max(slowest, total)
        sync = 0.0
        for j, stage in enumerate(groups):
            share = (
                sum(self.data.layers[l].param_bytes for l in range(cut[j], cut[j + 1])) / self.tp
            )
            for ranks in zip(*stage, strict=True):
                sync = max(sync, self.ring(ranks, share))
        return slowest + sync

    def stage(self, group: tuple[int, ...], first: int, last: int) -> float:
        """t of one tensor group: tables and all-reduces layer by layer."""
        total = 0.0
        for l in range(first, last):
            total += max(self.tables[self.types[device]][l] for device in group)
            total += self.ring(group, self.data.layers[l].tensor_bytes * self.mbs)
        return total

    def ring(self, group: tuple[int, ...], size: float) -> float:
        """2 (n-1)/n size over the lowest bandwidth in the group; nothing for one device."""
        n = len(group)
        times = (size / self.data.bandwidth[a][b] for a, b in combinations(group, 2))
        return 2 * (n - 1) / n * max(times, default=0.0)

    def decision(self, groups: list[list[tuple[int, ...]]], cut: tuple[int, ...]) -> AmpDecision:
        """As the file format writes it."""
        return AmpDecision(
            pipeline=self.pp,
            data=self.dp,
            tensor=self.tp,
            micro_batch=self.mbs,
            placement=[[list(group) for group in stage] for stage in groups],
            stages=list(pairwise(cut)),
        )
