"""Best-first branch and bound over cells of ratios; each cell by label setting on a graph of needs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetplan.formulations.hap.cells import coordinates, halves, whole_cell
from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.problem import Floats, HapProblem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.states import Graph
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run

# Labels in all and at one node; beyond them a cell is split instead.
ROOM, PER_NODE = 400_000, 200
# Passes over one cell, and the share of the missing bound that the last one must have won for another.
ROUNDS, LEAST_GAIN = 8, 0.2
# Programs that a relaxed search prices before it looks after the bound alone.
PRICED = 40
# Rounding in sums of thousands of terms, as a share of the optimum: dominance slack, deduction from bounds.
SLACK, ROUNDING = 1e-14, 1e-10


@dataclass
class Incumbent:
    """The best program and ratios so far; programs are priced once."""

    theory: Theory
    run: Run
    seconds: float = np.inf
    program: list[int] = field(default_factory=list)
    ratios: Floats | None = None
    priced: set[tuple[int, ...]] = field(default_factory=set)

    def offer(self, chosen: Sequence[int]) -> None:
        """Price the program that uses the triples `chosen` in that order."""
        program = self.theory.program(chosen)
        key = tuple(program)
        if key not in self.priced:
            problem = self.theory.problem
            found = best_ratios(problem, problem.stages(program), self.run)
            self.priced.add(key)
            if found.seconds < self.seconds:
                self.seconds, self.program, self.ratios = found.seconds, program, found.ratios
                self.run.report(incumbent=self.seconds)


@dataclass(frozen=True)
class Arrays:
    """A graph's arcs with their costs: compute in seconds of the fastest type, comm in seconds."""

    graph: Graph
    comm: kernels.Flags
    fixed: Floats
    shared: Floats
    slow: Floats
    start: int


def priced_graph(problem: HapProblem, graph: Graph) -> Arrays:
    """Costs per arc."""
    steps = [graph.theory.steps[s] for s in graph.step]
    comm = np.array([s.comm for s in steps], dtype=np.bool_)
    unit = np.where(comm, 1.0, problem.speeds[-1])
    return Arrays(
        graph,
        comm,
        np.array([s.fixed for s in steps]) / unit,
        np.array([s.shared for s in steps]) / unit,
        problem.speeds[-1] / problem.speeds,
        graph.start,
    )


@dataclass
class Ended:
    """bound: proven for all programs and ratios, None when nothing is; counts for the curious."""

    bound: float
    finished: bool
    cells: int
    labels: int


# (cell, reference point or None, threshold) -> (bound, point to split at, labels)
Evaluate = Callable[[Floats, Floats | None, float], tuple[float, Floats | None, int]]


def label_cell(problem: HapProblem, arrays: Arrays, incumbent: Incumbent) -> Evaluate:
    """The bound of a cell by label setting, repeated with the duals of the programs that it finds too cheap."""
    g = arrays.graph
    common = (g.first, g.head, arrays.comm, arrays.fixed, arrays.shared, g.component)
    weights = np.vstack([np.eye(problem.K), np.full((1, problem.K), 1.0 / problem.K)])

    def evaluate(cell: Floats, hint: Floats | None, threshold: float) -> tuple[float, Floats | None, int]:
        potential = kernels.potentials(*common, cell, arrays.slow, weights)
        point = cell.mean(axis=0) if hint is None else hint
        table = Blends(problem.K)
        best, total = -np.inf, 0
        for _ in range(ROUNDS):
            slack = SLACK * threshold if np.isfinite(threshold) else 0.0
            status, bound, size, parent, arc, last = kernels.labels(
                *common, arrays.start, cell, arrays.slow, point, table.mixtures, table.blends,
                potential, weights, threshold, slack, ROOM, PER_NODE,
            )  # fmt: skip
            total += int(size)
            if status != kernels.DONE:
                break
            gained, best = bound - best, max(best, float(bound))
            if not len(last):
                break
            path, label = [], int(last[0])
            while arc[label] >= 0:
                path.append(g.theory.steps[g.step[arc[label]]].index)
                label = int(parent[label])
            incumbent.offer(path)
            threshold = min(threshold, incumbent.seconds * (1 - 0.5 * incumbent.run.options.gap))
            if best >= threshold or gained < LEAST_GAIN * (threshold - best) or incumbent.run.should_stop:
                break
            stages = problem.stages(incumbent.theory.program(path))
            F, S = stages.F / problem.speeds[-1], stages.S[:, 0] / problem.speeds[-1]
            point, blends, _ = best_in_cell(F, S, float(stages.comm[0]), cell, arrays.slow)
            table.add(F, S, blends)
        return best, point, total

    return evaluate


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


def additive_cell(problem: HapProblem, arrays: Arrays, incumbent: Incumbent) -> Evaluate:
    """The bound of a cell where one mean over types prices the whole program, so that order does not matter; the
    graph may then be the canonical one. Its labels give programs, not bounds."""
    g = arrays.graph
    common = (g.first, g.head, arrays.comm, arrays.fixed, arrays.shared, g.component)
    weights = [*np.eye(problem.K), np.full(problem.K, 1.0 / problem.K)]
    inner = label_cell(problem, arrays, incumbent)

    def evaluate(cell: Floats, hint: Floats | None, threshold: float) -> tuple[float, Floats | None, int]:
        point = cell.mean(axis=0) if hint is None else hint
        labels = 0
        if len(incumbent.priced) < PRICED:
            _, _, labels = inner(cell, hint, threshold)
        if incumbent.ratios is not None:
            stages = problem.stages(incumbent.program)
            F, S = stages.F / problem.speeds[-1], stages.S[:, 0] / problem.speeds[-1]
            point, blends, _ = best_in_cell(F, S, float(stages.comm[0]), cell, arrays.slow)
            mean = (blends * (F + S / problem.counts.sum())[:, None]).sum(axis=0)
            weights[problem.K + 1 :] = [mean / mean.sum()]
        value = kernels.potentials(*common, cell, arrays.slow, np.array(weights))[arrays.start]
        return float(value.min(axis=1).max()), point, labels

    return evaluate


def search(
    problem: HapProblem, evaluate: Evaluate, incumbent: Incumbent, run: Run, *, patience: int | None = None
) -> Ended:
    """Explore cells until the gap asked for is proven or the run should stop.

    patience: give up after so many cells in which the bound rose by less than a hundredth of the gap.
    """
    gap = 0.5 * run.options.gap
    order = itertools.count()
    open_cells: list[tuple[float, int, Floats, Floats | None]] = [
        (0.0, next(order), whole_cell(problem), incumbent_point(incumbent))
    ]
    closed, cells, labels = np.inf, 0, 0
    last_rise, risen = 0, 0.0
    while open_cells:
        bound, _, here, hint = heapq.heappop(open_cells)
        threshold = incumbent.seconds * (1 - gap)
        if bound >= threshold:
            closed = min(closed, bound)
            break
        if bound > risen + 0.01 * (incumbent.seconds - risen):
            last_rise, risen = cells, bound
        if run.should_stop or (patience is not None and cells - last_rise > patience):
            heapq.heappush(open_cells, (bound, next(order), here, hint))
            break
        cells += 1
        inside = hint is not None and coordinates(here, hint).min() > -1e-9
        value, hint, size = evaluate(here, hint if inside else None, threshold)
        labels += size
        bound = max(bound, value)
        if bound >= incumbent.seconds * (1 - gap):
            closed = min(closed, bound)
            continue
        for half in halves(here, problem.counts.astype(float), hint):
            heapq.heappush(open_cells, (bound, next(order), half, hint))
        run.report(bound=min(closed, open_cells[0][0]) * (1 - ROUNDING))
    left = min((entry[0] for entry in open_cells), default=np.inf)
    finished = left >= incumbent.seconds * (1 - gap)
    lowest = min(closed, left, incumbent.seconds)
    return Ended(lowest * (1 - ROUNDING), finished, cells, labels)


def incumbent_point(incumbent: Incumbent) -> Floats | None:
    """The incumbent's ratios [K], if there are any."""
    return None if incumbent.ratios is None else incumbent.ratios[0]
