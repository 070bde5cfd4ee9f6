"""What a cell of ratios costs at least: by labels on a graph of needs, or by sums where the graph
is too wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.hap.cutting import game_value
from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.exact.duals import Duals
from hetplan.formulations.hap.exact.labels import labels
from hetplan.formulations.hap.exact.opened import Explorer
from hetplan.formulations.hap.exact.staging import staged
from hetplan.formulations.hap.problem import Floats, HapProblem, Stages
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run

# Labels per node of the graph, and at one node; beyond them a cell is split instead.
ROOM, PER_NODE = 20, 60
# The best program at a point is looked for in so many cells, then in one of so many.
EACH, SOME = 50, 10
# Rounding in sums of thousands of terms, as a share of the optimum: slack of dominance.
SLACK = 1e-14
# States left open in a cell at most; how much less must be missing before anything is tried again.
OPEN_STATES, RETRY = 60_000, 0.7
# How fast they are looked through, several times each, on a slow machine.
STATES_PER_SECOND = 5_000
# Arcs are left out again when no more than this share is missing of what was missing before.
FEWER = 0.6
# In smaller graphs it is not worth its time.
ARCS = 300
# How fast labels are set, at least.
LABELS_PER_SECOND = 50_000


@dataclass
class Incumbent:
    """The best program and ratios so far; programs are priced once."""

    theory: Theory
    run: Run
    seconds: float = np.inf
    program: list[int] = field(default_factory=list)
    ratios: Floats | None = None
    stages: Stages | None = None
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
            stages = problem.stages(program)
            found = best_ratios(problem, stages, self.run)
            self.priced.add(key)
            if found.seconds < self.seconds:
                self.stages = stages
                self.seconds, self.program, self.ratios = found.seconds, program, found.ratios
                self.run.report(incumbent=self.seconds)
        return program


@dataclass(frozen=True)
class Evaluated:
    """bound: of all programs in the cell, up to the threshold asked for; where to split it (None:
    anywhere); labels set; arrays: a graph that suffices for every part of the cell, if there is
    one."""

    bound: float
    point: Floats | None
    labels: int
    arrays: Arrays | None = None


# (cell, reference point or None, threshold, what the cell that it is part of left) -> what it costs
# at least
Evaluate = Callable[[Floats, Floats | None, float, Arrays | None], Evaluated]


@dataclass
class Failed:
    """The smallest cell and the least missing share of the threshold at which something was too
    much."""

    size: float = np.inf
    missing: float = np.inf

    def unlike(self, cell: Floats, missing: float) -> bool:
        """Whether another try is worth its time."""
        return missing < RETRY * self.missing or _size(cell) < RETRY * self.size

    def note(self, cell: Floats, missing: float) -> None:
        """It was too much here."""
        self.size, self.missing = min(self.size, _size(cell)), min(self.missing, missing)


def _size(cell: Floats) -> float:
    """The widest range of a type's ratio."""
    return float(np.ptp(cell, axis=0).max())


@dataclass
class LabelCell:
    """Bounds by sums over the graph and, in cells small enough, by labels.

    After a cell in which labels were too many, only those are tried again that are clearly smaller,
    or of which sums leave clearly less missing to the threshold.
    """

    problem: HapProblem
    arrays: Arrays
    incumbent: Incumbent
    _failed: Failed = field(default_factory=Failed)
    _cells: int = 0

    def __call__(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays | None = None
    ) -> Evaluated:
        """One cell, on the arrays handed down or else on its own.

        Arrays that lack arcs were made for programs below a threshold, which bounds from them
        cannot exceed.
        """
        found = self._evaluated(cell, hint, threshold, arrays or self.arrays)
        whole = found.arrays is self.arrays
        return found if whole else replace(found, bound=min(found.bound, threshold))

    def _evaluated(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays
    ) -> Evaluated:
        duals = Duals(self.problem, cell, arrays.slow, self.incumbent.stages, hint)
        found = sums(arrays, cell, duals)
        if found.bound >= threshold:
            return Evaluated(found.bound, duals.point, 0, arrays)
        stages = np.isfinite(self._failed.size)
        arrays, found = narrowed(arrays, cell, duals, found, threshold, stages=stages)
        bound, size, improved = found.bound, 0, False
        if bound >= threshold:
            return Evaluated(threshold, duals.point, 0, arrays)
        self._cells += 1
        if self._cells <= EACH or self._cells % SOME == 0:
            size, improved = best_at(duals, arrays, self.incumbent, found)
        if improved:  # potentials belong to the means that they were made with
            threshold = min(threshold, self.incumbent.threshold)
            found = sums(arrays, cell, duals)
            bound = max(bound, found.bound)
        if bound >= threshold:
            return Evaluated(bound, duals.point, size, arrays)
        missing = 1 - bound / threshold
        if self._failed.unlike(cell, missing) and not self.incumbent.run.should_stop:
            value, more = self._listed(cell, arrays, duals, found, threshold)
            if not np.isfinite(value):
                self._failed.note(cell, missing)
            bound, size = max(bound, value), size + more
        return Evaluated(bound, duals.point, size, arrays)

    def _listed(
        self, cell: Floats, arrays: Arrays, duals: Duals, known: Sums, threshold: float
    ) -> tuple[float, int]:
        """All programs that can be best somewhere in the cell, priced: (bound, labels); -inf if too
        many."""
        size, found = labels(
            arrays, cell, duals.point, known.potential, known.weights, threshold, slack=slack_of(threshold),
            room=room_for(arrays, self.incumbent.run), per_node=PER_NODE,
            mixtures=duals.table.mixtures, blends=duals.table.blends,
        )  # fmt: skip
        if found is None:
            return -np.inf, size
        if not len(found.last):
            return found.bound, size
        bounds, costs, points = found.price(cell, threshold)
        least = int(np.argmin(costs))
        self.incumbent.offer(found.path(int(found.last[least])))
        duals.point = points[least]
        return min(threshold, float(bounds.min())), size


def room_for(arrays: Arrays, run: Run) -> int:
    """Labels that may be set in one cell: so many per node, and no more than there is time for."""
    return int(min(20_000 + ROOM * arrays.graph.n, max(1_000, LABELS_PER_SECOND * run.remaining)))


def slack_of(threshold: float) -> float:
    """By how much a label may be dearer and still stand for another."""
    return SLACK * threshold if np.isfinite(threshold) else 0.0


@dataclass(frozen=True)
class Sums:
    """Bounds by sums over one cell: potential [n, L, V] from each state; weights [L, K]: what the
    stage under way counts as; bound: of all programs in the cell. Each potential is affine, so that
    the least of the largest of them is the value of a matrix game."""

    bound: float
    potential: Floats
    weights: Floats


def sums(arrays: Arrays, cell: Floats, duals: Duals) -> Sums:
    """One potential per mean over types for the first stage; where arcs are stages, one per
    criterion besides."""
    weights = duals.weights
    potential = kernels.potentials(
        *arrays.common, cell, arrays.slow, weights, duals.inside, arrays.ordered
    )
    if arrays.chains is not None:
        own = kernels.lengths(*arrays.common[:2], arrays.common[5], duals.prices(arrays))
        potential = np.concatenate([potential, own], axis=1)
        weights = np.concatenate([weights, np.repeat(weights[:1], own.shape[1], axis=0)])
    return Sums(game_value(potential[arrays.start]), potential, weights)


def narrowed(
    arrays: Arrays, cell: Floats, duals: Duals, found: Sums, threshold: float, *, stages: bool
) -> tuple[Arrays, Sums]:
    """What the cell leaves open, if asked for with whole stages as arcs where they are few enough,
    and its bounds."""
    left, found = fewer(arrays, cell, duals, found, threshold)
    if not len(left.graph.head):
        return left, replace(found, bound=threshold)
    if left is arrays or left.chains is not None or not stages:
        return left, found
    step = kernels.prices(*left.common[2:5], cell, left.slow, found.weights)
    extremes = np.array([[cell.min()], [cell.max()]])
    whole = staged(left, step, duals.inside, found.potential, threshold, extremes)
    if whole is None:
        return left, found
    if not len(whole.graph.head):
        return whole, replace(found, bound=threshold)
    again = sums(whole, cell, duals)
    return whole, replace(again, bound=max(found.bound, again.bound))


def fewer(
    arrays: Arrays, cell: Floats, duals: Duals, found: Sums, threshold: float
) -> tuple[Arrays, Sums]:
    """The graph and its potentials without the arcs that no program below the threshold takes in
    the cell.

    Tried again only where clearly less is missing to the threshold than when it was done last.
    """
    missing = 1 - found.bound / threshold
    tried = not missing < FEWER * arrays.missing or len(arrays.graph.head) < ARCS
    if tried or arrays.start > 0 or not np.isfinite(threshold):
        return arrays, found
    step = kernels.prices(*arrays.common[2:5], cell, arrays.slow, duals.weights)
    if arrays.chains is not None:
        step = np.concatenate([step, duals.prices(arrays)], axis=1)
    least = kernels.through(arrays.reverse, arrays.graph.head, step, found.potential)
    left, nodes = arrays.without(least.max(axis=1) >= threshold, missing)
    return left, replace(found, potential=np.ascontiguousarray(found.potential[nodes]))


def best_at(duals: Duals, arrays: Arrays, incumbent: Incumbent, known: Sums) -> tuple[int, bool]:
    """Offer the best program (among the orders that the graph has) at the duals' point, a cell of
    one vertex, and learn from it if it is better than all before: (labels, whether it is). known:
    of the cell that the point is in; its potentials being affine there, they hold at the point."""
    point, threshold = duals.point, incumbent.threshold
    size, found = labels(
        arrays, point[None, :], point, _at(known.potential, duals.inside), known.weights, threshold,
        slack=slack_of(threshold), room=room_for(arrays, incumbent.run), per_node=PER_NODE,
    )  # fmt: skip
    before = incumbent.seconds
    if found is not None and len(found.last):
        program = incumbent.offer(found.path(int(found.last[0])))
        if incumbent.seconds < before:
            duals.learn(program)
    return size, incumbent.seconds < before


def _at(potential: Floats, mu: Floats) -> Floats:
    """[n, L, 1]: affine functions told by their values [n, L, V] at vertices, at barycentric mu
    [V]."""
    used = mu > 0
    return np.ascontiguousarray((potential[:, :, used] @ mu[used])[:, :, None])


@dataclass
class WideCell:
    """Bounds by sums on the canonical graph, whose labels give programs; and by labels as soon as
    the states that the sums leave open in a cell are few enough for a graph of all orders."""

    problem: HapProblem
    arrays: Arrays
    incumbent: Incumbent
    explorer: Explorer
    _exact: LabelCell = field(init=False)
    _failed: Failed = field(default_factory=Failed)

    def __post_init__(self) -> None:
        self._exact = LabelCell(self.problem, self.arrays, self.incumbent)

    def __call__(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays | None = None
    ) -> Evaluated:
        """One cell."""
        if arrays is not None:
            return self._exact(cell, hint, threshold, arrays)
        duals = Duals(self.problem, cell, self.arrays.slow, self.incumbent.stages, hint)
        found = sums(self.arrays, cell, duals)
        bound = found.bound
        if bound >= threshold:
            return Evaluated(bound, duals.point, 0)
        size, _ = best_at(duals, self.arrays, self.incumbent, found)
        threshold = min(threshold, self.incumbent.threshold)
        if bound >= threshold:
            return Evaluated(bound, duals.point, size)
        missing = 1 - bound / threshold
        if self._failed.unlike(cell, missing) and not self.incumbent.run.should_stop:
            room = open_room(self.incumbent.run)
            opened = self.explorer.open(cell, duals.weights, threshold, room, self.incumbent.run)
            if opened is not None and opened.graph.n > 1:
                inside = self._exact(cell, hint, threshold, opened)
                return Evaluated(
                    max(bound, inside.bound), inside.point, size + inside.labels, opened
                )
            if opened is None:
                self._failed.note(cell, missing)
            else:
                bound = threshold
        return Evaluated(bound, duals.point, size)


def open_room(run: Run) -> int:
    """States left open that can be looked through in the time left."""
    return int(min(OPEN_STATES, max(1_000, STATES_PER_SECOND * run.remaining)))
