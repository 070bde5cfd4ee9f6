"""Problem `hap` to proven optimality, jointly over programs and ratios: the code that proves an
instance.

Branch and bound over cells of ratios (module `means`) on the graph of all orders or, where that has
too many states, on the canonical one (module `graph`). Sums over the graph, with means over types
in place of the slowest one, bound a cell. Arcs that no program below the threshold takes in the
cell are left out. When these are few, whole stages become arcs (module `staging`), and the bound of
a cell that shrinks to a point tends to the least cost there. On a canonical graph one mean prices
all stages; where dividing cells no longer helps, the states that a cell leaves open become a graph
of all orders (module `opening`).

With memory, the problem without it comes first: its bound holds, and its optimum may fit; bytes
then have prices (module `byte_prices`). Where cells are too many (several segments, many device
types), or leave something open on a small graph, the mixed-integer programme (module `model`) takes
over from what was found. Source: hetplan, for HAP, Section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.hap import model
from hetplan.formulations.hap.byte_prices import Path, best_prices, first_prices
from hetplan.formulations.hap.common import (
    NONE_FITS,
    Posed,
    ended,
    first_program,
    fitting_program,
    pose,
    simple_bound,
)
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.graph import (
    Graph,
    build,
    lengths,
    path,
    potentials,
    work_of,
)
from hetplan.formulations.hap.means import Means, Prices, game_value, halves, holds, whole_cell
from hetplan.formulations.hap.opening import Opener
from hetplan.formulations.hap.problem import Floats, Stages
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.staging import staged
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion, SearchLimits, search
from hetplan.solvers.native import stop_reason
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

# Rounding in sums of thousands of terms, as a share of the optimum: deduction from bounds.
ROUNDING = 1e-10
WIDE = (
    "the theory is too wide for an exact order of its parallel branches; "
    "the bound ignores their order"
)


@dataclass(frozen=True)
class Parameters:
    """What the search trades; chosen on the packaged instances, chains, residual blocks and random
    theories."""

    # Nodes of the graph of all orders, and else of the canonical one.
    states: int = 3_000
    canonical_states: int = 300_000
    # Vertices of a cell, and free ratios (segments times types less one), beyond which cells are
    # too many where the graph of all orders is small: the programme is asked at once.
    vertices: int = 64
    free_ratios: int = 5
    # Arcs times vertices of a cell beyond which not even the first cell of a canonical graph is
    # bounded.
    bounded: int = 5_000_000
    # Cells without progress after which a bound that ignores orders is taken as it is.
    patience: int = 40
    # Where the programme can take over: share of the time for cells, and how many they may be on
    # graphs of so few arcs.
    share: float = 0.5
    cells: int = 400
    few_arcs: int = 2_000
    # With memory: share of the time for the problem without it.
    unlimited_share: float = 0.4
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


def solve(data: HapData, run: Run, parameters: Parameters = Parameters()) -> Outcome[HapDecision]:
    """Proven optimum, or with the time limit the best found so far and a proven bound."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):
        return posed
    theory, problem = posed.theory, posed.problem
    floor = simple_bound(theory)
    run.report(bound=floor)
    incumbent = Incumbent(run, gap=0.5 * run.options.gap, theory=theory)
    if problem.capacity is not None:
        incumbent.objective = problem.most_seconds * (1 + 1e-6) + 1e-300
    incumbent.price(first_program(theory))
    if problem.capacity is not None:
        part = run.part(time_limit=parameters.unlimited_share * run.remaining)
        unlimited = solve(data.model_copy(update={"memory": None}), part, parameters)
        floor = max(floor, unlimited.bound or 0.0)
        if unlimited.decision is not None:
            incumbent.price(unlimited.decision.program)
        if floor < incumbent.threshold:
            incumbent.price(fitting_program(theory, run)[0])
        run.report(bound=floor)
    if floor >= incumbent.threshold or incumbent.objective <= 0:
        return ended(
            posed, incumbent.decision, run=run, stop=Stop.OPTIMAL,
            bound=min(floor, incumbent.objective),
        )  # fmt: skip
    graph = None
    with suppress(Stopped):
        graph = build(theory, parameters.states, run)
        graph = graph or build(theory, parameters.canonical_states, run, canonical=True)
    return _searched(posed, incumbent, graph, floor, run, parameters)


def _searched(
    posed: Posed,
    incumbent: Incumbent,
    graph: Graph | None,
    bound: float,
    run: Run,
    parameters: Parameters,
) -> Outcome[HapDecision]:
    """Cells, then the programme where it may do better."""
    problem = posed.problem
    small = graph is not None and graph.ordered
    closes = small and (problem.g > 1 or problem.capacity is not None)
    vertices = problem.K**problem.g
    too_many = small and (
        vertices > parameters.vertices or problem.g * (problem.K - 1) > parameters.free_ratios
    )
    proven, details = False, dict[str, object]()
    bounded = graph is not None and (small or len(graph.head) * vertices <= parameters.bounded)
    if graph is not None and bounded and not too_many:
        share = parameters.share if closes else 1.0
        part = run.part(time_limit=share * run.remaining, quiet=False)
        incumbent.run = part
        few = closes and len(graph.head) <= parameters.few_arcs
        limits = SearchLimits(
            patience=None if small and problem.capacity is None else parameters.patience,
            most_nodes=parameters.cells if few else None,
            rounding=ROUNDING,
        )
        prices = None if problem.capacity is None else first_prices(problem)
        first = Cell(whole_cell(problem), incumbent.ratios, prices=prices)
        divider = Divider(graph, incumbent, parameters)
        proof = search([(0.0, first)], divider.expand, incumbent, part, limits)
        proven, bound = proof.proven, max(bound, proof.bound or 0.0)
        details = {
            "states": graph.n, "arcs": len(graph.head), "cells": proof.expanded,
            "programs": len(incumbent.priced),
        }  # fmt: skip
    if not proven and not run.should_stop and (too_many or closes):
        return model.search(
            "milp", posed, run, known=incumbent.decision, floor=bound, details=details
        )
    stop, message = Stop.LIMIT, "" if small else WIDE
    if proven:
        stop, message = Stop.OPTIMAL, ""
        if incumbent.decision is None:
            stop, message = Stop.INFEASIBLE, NONE_FITS
    elif run.should_stop:
        stop, message = stop_reason(run), ""
    return ended(
        posed, incumbent.decision, run=run, stop=stop, message=message,
        bound=None if stop is Stop.INFEASIBLE else bound, details=details,
    )  # fmt: skip


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
        best = best_ratios(problem, stages, self.run)
        if not (best.fits and self.offer(best.seconds, program)):
            return False
        self.stages, self.ratios = stages, best.ratios
        return True


@dataclass(frozen=True)
class Cell:
    """A node of the search."""

    simplices: Floats  # [g, K, K]
    point: Floats | None = None  # [g, K] where good ratios are expected
    # A graph that suffices for every part of the cell below the threshold that it was made for;
    # None: the whole one.
    graph: Graph | None = None
    missing: float = np.inf  # share of the threshold that was missing in the cell before
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
            for one in met:
                self.incumbent.price(one.program)
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
            return Expansion(dropped_bound=min(bound, most), progress=self._sure and graph.ordered)
        missing = 1 - bound / threshold
        if not graph.ordered and missing > self.parameters.stalled * cell.missing:
            opened = self._opened(cell, means, threshold, missing)
            if opened is not None and not len(opened.head):
                return Expansion(dropped_bound=threshold, progress=self._sure)
            if opened is not None:
                graph = opened
                value, potential, step = sums(graph, means)
                bound = max(bound, min(value, threshold))
        if graph.ordered and np.isfinite(threshold):
            graph, bound = self._narrowed(cell, means, graph, (bound, potential, step), threshold)
            bound = min(bound, threshold)
        if bound >= threshold:
            return Expansion(dropped_bound=min(bound, most), progress=self._sure and graph.ordered)
        if np.ptp(cell.simplices, axis=1).max() < self.parameters.least_size:
            return Expansion(dropped_bound=bound)
        kept = None if graph is self.graph else graph
        child = replace(cell, point=means.point, graph=kept, missing=missing)
        children = [
            (bound, replace(child, simplices=half))
            for half in halves(cell.simplices, self.problem.counts.astype(float))
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
        step, run = means.prices(self._steps), self.incumbent.run
        opened = self._opener.open(step, threshold + means.room, self._limit, run)
        if opened is None:
            self._limit *= 2
            self._failed = min(size, self._failed[0]), min(missing, self._failed[1])
        return opened

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
