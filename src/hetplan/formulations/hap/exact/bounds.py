"""What a cell of ratios costs at least: by labels on a graph of needs, or by sums where the graph is too wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact import kernels, labelling
from hetplan.formulations.hap.exact.opened import Explorer
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run

# Labels per node of the graph, and at one node; beyond them a cell is split instead.
ROOM, PER_NODE = 30, 200
# The same where all programs of a cell are listed and priced.
CLOSING_ROOM, CLOSING_PER_NODE = 20, 60
# Passes over one cell, and the share of the missing bound that the last one must have won for another.
ROUNDS, LEAST_GAIN = 8, 0.2
# Programs that a relaxed search prices before it looks after the bound alone.
PRICED = 40
# Rounding in sums of thousands of terms, as a share of the optimum: slack of dominance.
SLACK = 1e-14
# States that are left open in a cell at most, and how much less must be missing before they are counted again.
OPEN_STATES, RETRY = 60_000, 0.7


@dataclass
class Incumbent:
    """The best program and ratios so far; programs are priced once."""

    theory: Theory
    run: Run
    seconds: float = np.inf
    program: list[int] = field(default_factory=list)
    ratios: Floats | None = None
    priced: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def threshold(self) -> float:
        """The bound that proves the incumbent."""
        return self.seconds * (1 - 0.5 * self.run.options.gap)

    def offer(self, chosen: Sequence[int]) -> list[int]:
        """The program that uses the triples `chosen` in that order, once priced."""
        program = self.theory.program(chosen)
        key = tuple(program)
        if key not in self.priced:
            problem = self.theory.problem
            found = best_ratios(problem, problem.stages(program), self.run)
            self.priced.add(key)
            if found.seconds < self.seconds:
                self.seconds, self.program, self.ratios = found.seconds, program, found.ratios
                self.run.report(incumbent=self.seconds)
        return program



@dataclass(frozen=True)
class Evaluated:
    """bound: of all programs in the cell, up to the threshold asked for; where to split it (None: anywhere);
    labels set; arrays: a graph that suffices for every part of the cell, if there is one."""

    bound: float
    point: Floats | None
    labels: int
    arrays: Arrays | None = None


# (cell, reference point or None, threshold, what the cell that it is part of left) -> what it costs at least
Evaluate = Callable[[Floats, Floats | None, float, Arrays | None], Evaluated]


@dataclass
class LabelCell:
    """Bounds by label setting on the arrays handed down, else on its own."""

    problem: HapProblem
    arrays: Arrays
    incumbent: Incumbent
    closing: bool = True

    def __call__(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays | None = None
    ) -> Evaluated:
        """The programs that can be best somewhere in the cell are listed and priced; where they are too many,
        labels are merged for a bound, repeatedly, with the duals of the programs that it finds too cheap."""
        arrays = arrays or self.arrays
        duals = Duals(self.problem, cell, arrays.slow, self.incumbent, hint)
        weights = duals.weights()
        potential = kernels.potentials(*arrays.common, cell, arrays.slow, weights)
        best, total = -np.inf, 0
        for closing in [True] * self.closing + [False] * ROUNDS:
            n = arrays.graph.n
            slack = SLACK * threshold if np.isfinite(threshold) else 0.0
            status, bound, size, parent, arc, last, sums = labelling.labels(
                *arrays.common, arrays.start, cell, arrays.slow, duals.point, duals.table.mixtures,
                duals.table.blends, potential, weights, threshold, slack, closing,
                20_000 + n * (CLOSING_ROOM if closing else ROOM), CLOSING_PER_NODE if closing else PER_NODE,
            )  # fmt: skip
            total += int(size)
            if status != labelling.DONE:
                if closing:
                    continue
                break
            found = int(last[0]) if len(last) else -1
            if closing and len(last):
                bounds, costs, points = labelling.price(
                    last, parent, arc, sums, *arrays.common[2:5], cell, arrays.slow, threshold
                )
                least = int(np.argmin(costs))
                found, duals.point = int(last[least]), points[least]
                bound = min(threshold, float(bounds.min()))
            gained, best = bound - best, max(best, float(bound))
            if found < 0:
                break
            program = self.incumbent.offer(arrays.path(parent, arc, found))
            threshold = min(threshold, self.incumbent.threshold)
            little = gained < LEAST_GAIN * (threshold - best)
            if closing or best >= threshold or little or self.incumbent.run.should_stop:
                break
            duals.learn(program)
        return Evaluated(best, duals.point, total, arrays)


class Duals:
    """What the best ratios of programs in one cell tell about good means over types: a blend per mixture of work
    (of several programs' the newest half), a point to compare types at, and one mean for everything."""

    def __init__(
        self, problem: HapProblem, cell: Floats, slow: Floats, incumbent: Incumbent, hint: Floats | None
    ) -> None:
        self._problem, self._cell, self._slow = problem, cell, slow
        self.table = Blends(problem.K)
        self.point = cell.mean(axis=0) if hint is None else hint
        self._mean: Floats | None = None
        if incumbent.ratios is not None:
            self.learn(incumbent.program)

    def learn(self, program: Sequence[int]) -> None:
        """From one program (triple numbers)."""
        problem = self._problem
        stages = problem.stages(program)
        F, S = stages.F / problem.speeds[-1], stages.S[:, 0] / problem.speeds[-1]
        self.point, blends, _ = best_in_cell(F, S, float(stages.comm[0]), self._cell, self._slow, np.inf)
        self.table.add(F, S, blends)
        mean = (blends * (F + S / problem.counts.sum())[:, None]).sum(axis=0)
        if mean.sum() > 0:
            self._mean = mean / mean.sum()

    def weights(self) -> Floats:
        """[L, K]: each type alone, all alike, and the mean learnt last."""
        K = self._problem.K
        rows = [*np.eye(K), np.full(K, 1.0 / K)]
        return np.array(rows if self._mean is None else [*rows, self._mean])


class Blends:
    """Which mean over types bounds a stage of a given mixture of work: learnt from duals, newest half."""

    def __init__(self, types: int) -> None:
        self._known: dict[float, Floats] = {}
        self._types = types

    def add(self, fixed: Floats, shared: Floats, blends: Floats) -> None:
        """The blends [s, K] of a program's stages of work fixed, shared [s]."""
        for F, S, row in zip(fixed, shared, blends, strict=True):
            mixture = round(float(F / (F + S)), 11)
            old = self._known.get(mixture)
            self._known[mixture] = row if old is None else 0.5 * (old + row)

    @property
    def mixtures(self) -> Floats:
        """[m], ascending."""
        return np.array(sorted(self._known), dtype=float)

    @property
    def blends(self) -> Floats:
        """[m, K], rows of sum 1."""
        rows = [self._known[key] for key in sorted(self._known)]
        return np.array(rows, dtype=float).reshape(-1, self._types)


@dataclass
class WideCell:
    """Bounds by sums on the canonical graph, whose labels give programs; and by labels as soon as the states that
    the sums leave open in a cell are few enough for a graph of all orders."""

    problem: HapProblem
    arrays: Arrays
    incumbent: Incumbent
    explorer: Explorer
    _missing: float = field(default=np.inf)

    def __call__(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays | None = None
    ) -> Evaluated:
        """One cell."""
        exact = LabelCell(self.problem, self.arrays, self.incumbent)
        if arrays is not None:
            return exact(cell, hint, threshold, arrays)
        labels = 0
        if len(self.incumbent.priced) < PRICED:
            relaxed = LabelCell(self.problem, self.arrays, self.incumbent, closing=False)
            labels = relaxed(cell, hint, threshold).labels
            threshold = min(threshold, self.incumbent.threshold)
        duals = Duals(self.problem, cell, self.arrays.slow, self.incumbent, hint)
        weights = duals.weights()
        value = kernels.potentials(*self.arrays.common, cell, self.arrays.slow, weights)[self.arrays.start]
        bound = float(value.min(axis=1).max())
        missing = 1 - bound / threshold
        if missing > 0 and missing < RETRY * self._missing:
            opened = self.explorer.open(cell, weights, threshold, OPEN_STATES)
            if opened is None:
                self._missing = missing
            elif opened.graph.n == 1:
                bound = threshold
            else:
                found = exact(cell, hint, threshold, opened)
                bound = max(bound, found.bound)
                return Evaluated(bound, found.point, labels + found.labels, opened)
        return Evaluated(bound, duals.point, labels)
