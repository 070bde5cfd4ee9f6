"""Branch and bound over cells of ratios: a lower bound of all programs in a cell, and what the cell
leaves open.

Sums over the graph, with means over types in place of the slowest one, bound a cell. Arcs that no
program below the threshold takes in the cell are left out. When these are few, whole stages become
arcs (module `staging`), and the bound of a cell that shrinks to a point tends to the least cost
there. On a canonical graph one mean prices all stages; where dividing cells no longer helps, the
states that a cell leaves open become a graph of all orders (module `opening`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.hap.exact.byte_prices import Path, best_prices
from hetplan.formulations.hap.exact.cells import halves, holds
from hetplan.formulations.hap.exact.means import Means, Prices, game_value
from hetplan.formulations.hap.exact.opening import Opener
from hetplan.formulations.hap.exact.staging import staged
from hetplan.formulations.hap.graph import Graph, lengths, path, potentials, work_of
from hetplan.formulations.hap.problem import Floats, Stages
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion


@dataclass(frozen=True)
class Parameters:
    """What the search trades; chosen on the packaged instances, chains and residual blocks."""

    # Arcs are left out again when no more than this share is missing to the threshold of what was
    # missing before.
    fewer: float = 0.6
    # Stages begun, per arc, beyond which arcs stay single steps.
    stages_per_arc: int = 4
    # All orders are opened where more than this share is left missing by dividing the cell before,
    # and tried again in cells of this share of the size, or of what was missing, that was too much.
    stalled: float = 0.7
    # Cells in which no ratio varies by more are not divided.
    least_size: float = 1e-9
    # States met at most when a cell is opened for the first time; twice as many after each time
    # that it was too much.
    open_states: int = 5_000


@dataclass
class Incumbent(branch_and_bound.Incumbent[list[int]]):
    """The best program, under its best ratios; programs are priced once."""

    theory: Theory | None = None
    ratios: Floats | None = None  # [g, K]
    stages: Stages | None = None
    priced: set[tuple[int, ...]] = field(default_factory=set)

    def price(self, chosen: Sequence[int]) -> bool:
        """Whether the program that uses the triples `chosen` in that order is the best so far."""
        assert self.theory is not None
        program, problem = self.theory.program(chosen), self.theory.problem
        if tuple(program) in self.priced:
            return False
        self.priced.add(tuple(program))
        stages = problem.stages(program)
        found = best_ratios(problem, stages, self.run)
        if not (found.fits and self.offer(found.seconds, program)):
            return False
        self.stages, self.ratios = stages, found.ratios
        return True


@dataclass(frozen=True)
class Cell:
    """A node of the search."""

    simplices: Floats  # [g, K, K]
    point: Floats | None = None  # [g, K] where good ratios are expected
    # A graph that suffices for every part of the cell below the threshold that it was made for;
    # None: the whole one.
    graph: Graph | None = None
    # Shares of the threshold that were missing: in the cell before, and where arcs were last left
    # out.
    missing: float = np.inf
    missing_then: float = np.inf
    # With memory: prices of the cell before, and the paths that they came from.
    prices: Prices | None = None
    paths: tuple[Path, ...] = ()


class Divider:
    """Bounds and divides cells."""

    def __init__(
        self, graph: Graph, incumbent: Incumbent, parameters: Parameters = Parameters()
    ) -> None:
        self.graph, self.incumbent, self.parameters = graph, incumbent, parameters
        self.theory = graph.theory
        self.problem = self.theory.problem
        self._opener = Opener(self.theory)
        self._steps = work_of(self.problem, self.theory.steps)
        # Without memory, dividing a graph of all orders surely ends.
        self._sure = self.problem.capacity is None
        # size and missing share at which opening was too much
        self._failed = np.inf, np.inf
        self._limit = parameters.open_states

    def expand(self, cell: Cell, threshold: float) -> Expansion[Cell]:
        """Two halves of a cell with its bound, none where it is closed."""
        graph = cell.graph or self.graph
        # arcs were left out for programs below a threshold, so that bounds say no more than that
        most = np.inf if cell.graph is None else threshold
        inside = cell.point is not None and holds(cell.simplices, cell.point)
        means = Means(self.problem, cell.simplices, cell.point if inside else None)
        floor, paths = -np.inf, cell.paths
        if cell.prices is not None and not graph.staged:
            floor, prices, binding, met = best_prices(
                graph, means, cell.prices, paths, threshold, self.incumbent.run
            )
            cell = replace(cell, prices=prices, paths=tuple(binding))
            for found in met:
                self.incumbent.price(found.program)
        elif cell.prices is not None:
            means.adopt(cell.prices)
        if self.incumbent.stages is not None:
            means.learn(self.incumbent.stages)
        threshold = min(threshold, self.incumbent.threshold)
        bound, potential, step = sums(graph, means)
        bound = max(bound, floor)
        if bound < threshold and self._offer(means, graph):
            threshold = min(threshold, self.incumbent.threshold)
            value, potential, step = sums(graph, means)
            bound = max(bound, value)
        if bound >= threshold:
            return Expansion(dropped=min(bound, most), progress=self._sure and graph.ordered)
        missing = 1 - bound / threshold
        if not graph.ordered and missing > self.parameters.stalled * cell.missing:
            opened = self._opened(cell, means, threshold, missing)
            if opened is not None and not len(opened.head):
                return Expansion(dropped=threshold, progress=self._sure)
            if opened is not None:
                graph = opened
                value, potential, step = sums(graph, means)
                bound = max(bound, min(value, threshold))
        cell = replace(cell, missing=missing)
        if graph.ordered and np.isfinite(threshold):
            missing = 1 - bound / threshold
            if missing < self.parameters.fewer * cell.missing_then:
                graph, bound = self._narrowed(
                    cell, means, graph, (bound, potential, step), threshold
                )
                cell = replace(cell, missing_then=missing)
            bound = min(bound, threshold)
        if bound >= threshold:
            return Expansion(dropped=min(bound, most), progress=self._sure and graph.ordered)
        if np.ptp(cell.simplices, axis=1).max() < self.parameters.least_size:
            return Expansion(dropped=bound)
        kept = None if graph is self.graph else graph
        halved = halves(cell.simplices, self.problem.counts.astype(float), means.point)
        children = [
            (bound, replace(cell, simplices=half, point=means.point, graph=kept)) for half in halved
        ]
        return Expansion(children, progress=self._sure and graph.ordered)

    def _opened(self, cell: Cell, means: Means, threshold: float, missing: float) -> Graph | None:
        """All orders of what sums leave open in the cell, if that is not too much."""
        size = float(np.ptp(cell.simplices, axis=1).max())
        again = self.parameters.stalled
        if not np.isfinite(threshold) or not (
            size < again * self._failed[0] or missing < again * self._failed[1]
        ):
            return None
        run = self.incumbent.run
        step = means.prices(self._steps)
        found = self._opener.open(step, threshold + means.room, self._limit, run)
        if found is None:
            self._limit *= 2
            self._failed = min(size, self._failed[0]), min(missing, self._failed[1])
        return found

    def _narrowed(
        self,
        cell: Cell,
        means: Means,
        graph: Graph,
        known: tuple[float, Floats, Floats],
        threshold: float,
    ) -> tuple[Graph, float]:
        """(The graph without the arcs of no program below the threshold, of whole stages where
        these are few; the bound)."""
        bound, potential, step = known
        limit = threshold + means.room
        graph, nodes = graph.without(through(graph, step, potential).max(axis=1) >= limit)
        if not len(graph.head):
            return graph, threshold
        if graph.staged:
            return graph, bound
        potential = np.ascontiguousarray(potential[nodes])
        step = means.prices(graph.work)
        most = self.parameters.stages_per_arc * len(graph.head)
        whole = staged(graph, step, means.inside, potential, limit, cell.simplices, most)
        if whole is None:
            return graph, bound
        if not len(whole.head):
            return whole, threshold
        bound = max(bound, sums(whole, means)[0])
        if bound < threshold:
            self._offer(means, whole)
        return whole, bound

    def _offer(self, means: Means, graph: Graph) -> bool:
        """Price the best program at the point; whether it is the best so far, from which means
        learn."""
        _, arc = lengths(graph, means.at_point(graph)[:, None])
        if arc[graph.start, 0] < 0:
            return False
        better = self.incumbent.price(graph.program(path(graph, arc[:, 0])))
        if better and self.incumbent.stages is not None:
            means.learn(self.incumbent.stages)
        return better


def sums(graph: Graph, means: Means) -> tuple[float, Floats, Floats]:
    """(Bound of all programs in the cell, potential [n, L, V], prices [A, L, V]); potential and
    prices are without the room of memory."""
    step = means.prices(graph.work)
    potential = potentials(graph, step, means.inside)
    if graph.staged:
        own = means.own(graph.work)
        least = lengths(graph, own.reshape(len(own), -1))[0].reshape(graph.n, *own.shape[1:])
        potential = np.concatenate([potential, least], axis=1)
        step = np.concatenate([step, own], axis=1)
    return game_value(potential[graph.start]) - means.room, potential, step


def through(graph: Graph, step: Floats, potential: Floats) -> Floats:
    """[A, L]: a lower bound over the cell of every path with an arc: what leads to its tail, itself
    (step [A, L, V]) and the potential of its head, all with one mean before the head."""
    backward, arcs = graph.backward
    before = lengths(backward, step[arcs].reshape(len(step), -1))[0][::-1]
    before = before.reshape(potential.shape)
    return np.asarray((before[graph.tail] + step + potential[graph.head]).min(axis=2))
