"""Bounds and divides the cells of ratios of the exact search.

In a cell the slowest type of every stage is replaced by a mean over types (module `means`). Costs
then add up along a path, and the shortest path is a lower bound. Arcs that lie on no program below
the threshold in the cell are left out. When few are left, whole stages become arcs (module
`whole_stages`), and the bound of a cell that shrinks to a point tends to the least cost there. On a
canonical graph all stages have one mean; where dividing cells no longer helps, the states that a
cell leaves open become a graph in all orders (module `open_states`). With memory, bytes have prices
(module `byte_prices`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.hap.byte_prices import best_multipliers
from hetplan.formulations.hap.cells import halves
from hetplan.formulations.hap.graph import Graph, work_of
from hetplan.formulations.hap.matrix_game import game_value
from hetplan.formulations.hap.means import Means, Multipliers
from hetplan.formulations.hap.open_states import Opener
from hetplan.formulations.hap.paths import path, potentials, shortest
from hetplan.formulations.hap.problem import CostOfRatios, Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.formulations.hap.whole_stages import graph_of_stages
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion


@dataclass(frozen=True)
class Parameters:
    """The limits of the search, chosen on packaged instances, chains, residual blocks and random
    theories."""

    # Most states of the graph of needs in all orders; above that, of the canonical one.
    most_states: int = 3_000
    most_canonical_states: int = 300_000
    # Most vertices of a cell, and most free ratios (segments times types less one). Beyond them
    # there would be too many cells, and on a graph in all orders the mixed-integer programme is
    # solved at once.
    most_vertices: int = 64
    most_free_ratios: int = 5
    # Most arcs times vertices of a cell on a canonical graph. Beyond them not even the first cell
    # is bounded.
    most_arc_vertices: int = 5_000_000
    # Cells without progress after which the search gives up; the bound and the gap are reported.
    patience: int = 40
    # Share of the time for cells, where the mixed-integer programme can find the proof afterwards.
    cells_share: float = 0.5
    # Whole stages become arcs unless more than this many are begun per arc.
    stages_per_arc: int = 4
    # In a cell whose gap is more than this share of its parent's, a canonical graph is opened to
    # all orders. Where that met too many states, it is tried again once the size or the gap of
    # cells has shrunk to this share.
    stalled: float = 0.7
    # Cells in which no ratio varies by more than this are not divided.
    least_size: float = 1e-9
    # Most states met when a cell is opened; doubled after every failure.
    most_opened: int = 5_000


DEFAULTS = Parameters()


def surely_ends(graph: Graph) -> bool:
    """Whether dividing cells on this graph surely ends with a proof.

    It does on a graph in all orders, without memory. Patience is not needed then.
    """
    return graph.in_execution_order and graph.theory.problem.capacity is None


@dataclass
class Incumbent(branch_and_bound.Incumbent[list[int]]):
    """The best program so far under its best ratios; every program is tried once."""

    theory: ReducedTheory | None = None  # always given; a default is needed behind other defaults
    cost: CostOfRatios | None = None  # the cost of the best program as a function of the ratios
    tried: set[tuple[int, ...]] = field(default_factory=set)  # programs, as triple numbers

    def try_program(self, chosen: Sequence[int]) -> bool:
        """Whether the program that uses the triples `chosen` in this order becomes the incumbent.

        Its best ratios are found unless it was tried before.
        """
        assert self.theory is not None
        program = self.theory.program(chosen)
        problem = self.theory.problem
        if tuple(program) in self.tried:
            return False
        self.tried.add(tuple(program))
        cost = problem.cost_of(program)
        best = best_ratios(problem, cost, self.run)
        if not best.fits:
            return False
        is_better = self.offer(best.seconds, program)
        if is_better:
            self.cost = cost
        return is_better


@dataclass(frozen=True)
class Cell:
    """A node of the search: a cell of ratios."""

    simplices: Floats  # [g, K, K] the vertices of each segment's simplex
    # The graph of the programs that may be best in this cell; it lacks programs that cost the
    # threshold or more when it was built. None: the graph of the whole search.
    graph: Graph | None = None
    parent_gap: float = np.inf  # share of the threshold that the parent's bound lacked
    multipliers: Multipliers | None = None  # multipliers of the parent; None without memory


class CellSearch:
    """The rules of the branch and bound: how a cell is bounded, narrowed and divided."""

    def __init__(
        self, graph: Graph, incumbent: Incumbent, parameters: Parameters = DEFAULTS
    ) -> None:
        self.graph, self.incumbent, self.parameters = graph, incumbent, parameters
        self.theory = graph.theory
        self.problem = self.theory.problem
        self._opener = Opener(self.theory)
        self._work = work_of(self.problem, self.theory.steps)
        # least size and least gap of a cell whose opening met too many states
        self._least_size_too_large = np.inf
        self._least_gap_too_large = np.inf
        self._most_opened = parameters.most_opened

    def expand(self, cell: Cell, threshold: float) -> Expansion[Cell]:
        """The two halves of a cell with its bound; no children where the cell is closed."""
        graph = cell.graph or self.graph
        # A graph of a cell may lack programs that cost the threshold or more, so that a bound from
        # it is valid up to the threshold only.
        largest_bound = np.inf if cell.graph is None else threshold
        means = Means(self.problem, cell.simplices, self.incumbent.run.options)
        bound_by_prices = -np.inf
        # `best_multipliers` has one mean for all stages. Whole stages have means of their own, and
        # keep the prices of the parent.
        if cell.multipliers is not None and not graph.arcs_are_stages:
            bound_by_prices, multipliers, programs = best_multipliers(
                graph, means, cell.multipliers, threshold, self.incumbent.run
            )
            cell = replace(cell, multipliers=multipliers)
            for totals in programs:
                self.incumbent.try_program(totals.program)
        elif cell.multipliers is not None:
            means.set_multipliers(cell.multipliers)
        if self.incumbent.cost is not None:
            means.set_from_program(self.incumbent.cost)
        threshold = min(threshold, self.incumbent.threshold)
        bound, potential, cost = bound_by_sums(graph, means)
        bound = max(bound, bound_by_prices)
        if bound < threshold and self._try_best_at_point(means, graph):
            threshold = min(threshold, self.incumbent.threshold)
            value, potential, cost = bound_by_sums(graph, means)
            bound = max(bound, value)
        if bound >= threshold:
            return Expansion(dropped_bound=min(bound, largest_bound), progress=surely_ends(graph))
        gap = 1 - bound / threshold  # 1 without an incumbent: the threshold is then infinite
        if not graph.in_execution_order and gap > self.parameters.stalled * cell.parent_gap:
            opened = self._open_orders(cell, means, threshold, gap)
            if opened is not None and not len(opened.head):  # no program is below the threshold
                return Expansion(dropped_bound=threshold, progress=surely_ends(opened))
            if opened is not None:
                graph = opened
                value, potential, cost = bound_by_sums(graph, means)
                # the graph lacks programs that cost the threshold or more
                bound = max(bound, min(value, threshold))
        if graph.in_execution_order and np.isfinite(threshold):
            graph, bound = self._narrow_and_stage(
                cell, means, graph, (bound, potential, cost), threshold
            )
            bound = min(bound, threshold)
        if bound >= threshold:
            return Expansion(dropped_bound=min(bound, largest_bound), progress=surely_ends(graph))
        if np.ptp(cell.simplices, axis=1).max() < self.parameters.least_size:
            return Expansion(dropped_bound=bound)
        child = replace(cell, graph=None if graph is self.graph else graph, parent_gap=gap)
        children = [
            (bound, replace(child, simplices=half))
            for half in halves(cell.simplices, self.problem.counts.astype(float))
        ]
        return Expansion(children, progress=surely_ends(graph))

    def _open_orders(self, cell: Cell, means: Means, threshold: float, gap: float) -> Graph | None:
        """The graph in all orders of the states that sums leave open in the cell.

        None where it is too large, and where it was too large in a cell that is not much larger.
        """
        if not np.isfinite(threshold):
            return None
        size = float(np.ptp(cell.simplices, axis=1).max())
        stalled = self.parameters.stalled
        has_shrunk = size < stalled * self._least_size_too_large
        has_closed = gap < stalled * self._least_gap_too_large
        if not (has_shrunk or has_closed):
            return None
        cost, run = means.costs(self._work), self.incumbent.run
        opened = self._opener.open(cost, threshold + means.memory_seconds, self._most_opened, run)
        if opened is None:
            self._most_opened *= 2
            self._least_size_too_large = min(size, self._least_size_too_large)
            self._least_gap_too_large = min(gap, self._least_gap_too_large)
        return opened

    def _narrow_and_stage(
        self,
        cell: Cell,
        means: Means,
        graph: Graph,
        by_sums: tuple[float, Floats, Floats],
        threshold: float,
    ) -> tuple[Graph, float]:
        """(The graph without arcs that lie on no program below the threshold, its bound).

        Its arcs are whole stages where those are few. by_sums: the bound, the potential and the
        costs of the graph as they are before.
        """
        bound, potential, cost = by_sums
        limit = threshold + means.memory_seconds
        # each of the L means proves a bound, and the largest one counts
        least = least_through_arcs(graph, cost, potential).max(axis=1)
        graph, nodes = graph.without_arcs(least >= limit)
        if not len(graph.head):
            return graph, threshold
        if graph.arcs_are_stages:
            return graph, bound
        potential = np.ascontiguousarray(potential[nodes])
        cost = means.costs(graph.work)
        most_begun = self.parameters.stages_per_arc * len(graph.head)
        whole = graph_of_stages(graph, cost, means.mu, potential, limit, cell.simplices, most_begun)
        if whole is None:
            return graph, bound
        if not len(whole.head):
            return whole, threshold
        bound = max(bound, bound_by_sums(whole, means)[0])
        if bound < threshold:
            self._try_best_at_point(means, whole)
        return whole, bound

    def _try_best_at_point(self, means: Means, graph: Graph) -> bool:
        """Whether the best program at the reference point becomes the incumbent.

        Where it does, the means are taken from it.
        """
        _, first_arc = shortest(graph, means.at_point(graph)[:, None])
        if first_arc[graph.start, 0] < 0:  # no path leads to the last node
            return False
        program = graph.program(path(graph, first_arc[:, 0]))
        is_better = self.incumbent.try_program(program)
        if is_better and self.incumbent.cost is not None:
            means.set_from_program(self.incumbent.cost)
        return is_better


def bound_by_sums(graph: Graph, means: Means) -> tuple[float, Floats, Floats]:
    """(A lower bound of all programs in the cell, potential [n, L, V], costs of arcs [A, L, V]).

    What all memory costs is taken off the bound, not off the potential and the costs.
    """
    cost = means.costs(graph.work)
    potential = potentials(graph, cost, means.mu)
    if graph.arcs_are_stages:  # one further bound beside those by the L means
        stage_cost = means.costs_per_stage(graph.work)
        length, _ = shortest(graph, stage_cost.reshape(len(stage_cost), -1))
        least = length.reshape(graph.n, *stage_cost.shape[1:])
        potential = np.concatenate([potential, least], axis=1)
        cost = np.concatenate([cost, stage_cost], axis=1)
    value = game_value(potential[graph.start], means.options)
    return value - means.memory_seconds, potential, cost


def least_through_arcs(graph: Graph, cost: Floats, potential: Floats) -> Floats:
    """[A, L] a lower bound over the cell of every path through an arc.

    It adds the least cost from the start to the arc's tail, the arc's cost [A, L, V] and the
    potential of its head. One mean serves for the whole path up to the head.
    """
    backward, arcs = graph.backward
    length, _ = shortest(backward, cost[arcs].reshape(len(cost), -1))
    from_start = length[::-1].reshape(potential.shape)
    return np.asarray((from_start[graph.tail] + cost + potential[graph.head]).min(axis=2))
