"""What a cell of ratios costs at least: by labels on a graph of needs, or by sums where the graph is too wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.hap.cells import coordinates
from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.exact.arrays import Arrays
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
# Blends of a program's mixtures that price whole stages.
HEAVIEST = 2
# Rounding in sums of thousands of terms, as a share of the optimum: slack of dominance.
SLACK = 1e-14
# States left open in a cell at most; how much less must be missing before anything is tried again.
OPEN_STATES, RETRY = 60_000, 0.7
# How fast they are looked through, several times each, on a slow machine.
STATES_PER_SECOND = 5_000
# Arcs are left out again when no more than this share is missing of what was missing before.
FEWER = 0.6
# Mixtures of work that differ by less are the same.
MIXTURE = 1e-10
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
    """bound: of all programs in the cell, up to the threshold asked for; where to split it (None: anywhere);
    labels set; arrays: a graph that suffices for every part of the cell, if there is one."""

    bound: float
    point: Floats | None
    labels: int
    arrays: Arrays | None = None


# (cell, reference point or None, threshold, what the cell that it is part of left) -> what it costs at least
Evaluate = Callable[[Floats, Floats | None, float, Arrays | None], Evaluated]


@dataclass
class Failed:
    """The smallest cell and the least missing share of the threshold at which something was too much."""

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

    After a cell in which labels were too many, only those are tried again that are clearly smaller, or of which
    sums leave clearly less missing to the threshold.
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

        Arrays that lack arcs were made for programs below a threshold, which bounds from them cannot exceed.
        """
        found = self._evaluated(cell, hint, threshold, arrays or self.arrays)
        whole = found.arrays is self.arrays
        return found if whole else replace(found, bound=min(found.bound, threshold))

    def _evaluated(self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays) -> Evaluated:
        duals = Duals(self.problem, cell, arrays.slow, self.incumbent, hint)
        bound, potential = sums(arrays, cell, duals)
        if bound >= threshold:
            return Evaluated(bound, duals.point, 0, arrays)
        weights, size, improved = duals.weights, 0, False
        left, potential = fewer(arrays, cell, duals, potential, threshold, 1 - bound / threshold)
        if not len(left.graph.head):
            return Evaluated(threshold, duals.point, 0, left)
        if left is not arrays:
            arrays = left
            if arrays.chains is None:
                stages = staged(arrays, cell, weights, duals.inside, potential, threshold)
                if stages is not None:
                    arrays = stages
                    value, potential = sums(arrays, cell, duals)
                    bound, weights = max(bound, value), duals.weights
                    if bound >= threshold or not len(arrays.graph.head):
                        return Evaluated(threshold, duals.point, 0, arrays)
        self._cells += 1
        if self._cells <= EACH or self._cells % SOME == 0:
            size, improved = best_at(duals, arrays, self.incumbent, potential, weights)
        if improved:  # potentials belong to the means that they were made with
            threshold = min(threshold, self.incumbent.threshold)
            value, potential = sums(arrays, cell, duals)
            bound, weights = max(bound, value), duals.weights
        if bound >= threshold:
            return Evaluated(bound, duals.point, size, arrays)
        missing = 1 - bound / threshold
        if self._failed.unlike(cell, missing) and not self.incumbent.run.should_stop:
            value, more = self._listed(cell, arrays, duals, potential, weights, threshold)
            if not np.isfinite(value):
                self._failed.note(cell, missing)
            bound, size = max(bound, value), size + more
        return Evaluated(bound, duals.point, size, arrays)

    def _listed(
        self, cell: Floats, arrays: Arrays, duals: Duals, potential: Floats, weights: Floats, threshold: float
    ) -> tuple[float, int]:
        """All programs that can be best somewhere in the cell, priced: (bound, labels); -inf if too many."""
        weights = np.vstack([weights, weights[: potential.shape[1] - len(weights)]])
        size, found = labels(
            arrays, cell, duals.point, potential, weights, threshold, slack=slack_of(threshold),
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


def sums(arrays: Arrays, cell: Floats, duals: Duals) -> tuple[float, Floats]:
    """(Least cost over the cell when one mean over types prices all stages, the best of several means; the same
    from each state [n, L, V])."""
    potential = kernels.potentials(
        *arrays.common, cell, arrays.slow, duals.weights, duals.inside, arrays.ordered
    )
    if arrays.chains is not None:
        own = kernels.lengths(*arrays.common[:2], arrays.common[5], duals.prices(arrays))
        potential = np.concatenate([potential, own], axis=1)
    return float(potential[arrays.start].min(axis=1).max()), potential


def fewer(
    arrays: Arrays, cell: Floats, duals: Duals, potential: Floats, threshold: float, missing: float
) -> tuple[Arrays, Floats]:
    """The graph and its potentials without the arcs that no program below the threshold takes in the cell.

    Tried again only where clearly less is `missing` to the threshold than when it was done last.
    """
    tried = not missing < FEWER * arrays.missing or len(arrays.graph.head) < ARCS
    if tried or arrays.start > 0 or not np.isfinite(threshold):
        return arrays, potential
    step = kernels.prices(*arrays.common[2:5], cell, arrays.slow, duals.weights)
    if arrays.chains is not None:
        step = np.concatenate([step, duals.prices(arrays)], axis=1)
    least = kernels.through(arrays.reverse, arrays.graph.head, step, potential)
    left, nodes = arrays.without(least.max(axis=1) >= threshold, missing)
    return left, np.ascontiguousarray(potential[nodes])


def best_at(
    duals: Duals, arrays: Arrays, incumbent: Incumbent, potential: Floats, weights: Floats
) -> tuple[int, bool]:
    """Offer the best program (among the orders that the graph has) at the duals' point, a cell of one vertex, and
    learn from it if it is better than all before: (labels, whether it is). potential [n, L, V] with weights: of
    the cell that the point is in; being affine there, it holds at the point."""
    point, threshold = duals.point, incumbent.threshold
    weights = np.vstack([weights, weights[: potential.shape[1] - len(weights)]])
    size, found = labels(
        arrays, point[None, :], point, _at(potential, duals.inside), weights, threshold, slack=slack_of(threshold),
        room=room_for(arrays, incumbent.run), per_node=PER_NODE,
    )  # fmt: skip
    before = incumbent.seconds
    if found is not None and len(found.last):
        program = incumbent.offer(found.path(int(found.last[0])))
        if incumbent.seconds < before:
            duals.learn(program)
    return size, incumbent.seconds < before


def _at(potential: Floats, mu: Floats) -> Floats:
    """[n, L, 1]: affine functions told by their values [n, L, V] at vertices, at barycentric mu [V]."""
    used = mu > 0
    return np.ascontiguousarray((potential[:, :, used] @ mu[used])[:, :, None])


class Duals:
    """What the best ratios of programs in one cell tell about good means over types: a blend per mixture of work
    (of several programs' the newest half), a point to compare types at, and one mean for everything."""

    def __init__(
        self, problem: HapProblem, cell: Floats, slow: Floats, incumbent: Incumbent, hint: Floats | None
    ) -> None:
        self._problem, self._cell, self._slow = problem, cell, slow
        self.table = Blends(problem.K)
        self.point = cell.mean(axis=0) if hint is None else hint
        self._means = np.zeros((0, problem.K))
        if incumbent.ratios is not None and incumbent.stages is not None:
            self._learn(incumbent.stages)

    def learn(self, program: Sequence[int]) -> None:
        """From one program (triple numbers)."""
        self._learn(self._problem.stages(program))

    def _learn(self, stages: Stages) -> None:
        problem = self._problem
        F, S = stages.F / problem.speeds[-1], stages.S[:, 0] / problem.speeds[-1]
        self.point, blends, _ = best_in_cell(F, S, float(stages.comm[0]), self._cell, self._slow, np.inf)
        self.table.add(F, S, blends)
        heavy = F + S / problem.counts.sum()
        if heavy.any():
            mean = heavy @ blends / heavy.sum()
            most = blends[np.argsort(-heavy, kind="stable")[:HEAVIEST]]
            self._means = np.array(list(dict.fromkeys(tuple(np.round(row, 9)) for row in [*most, mean])))

    @property
    def weights(self) -> Floats:
        """[L, K]: the blends of the heaviest mixtures of the program learnt last, heaviest first, their mean, each
        type alone, all alike."""
        K = self._problem.K
        rows = np.vstack([self._means, np.eye(K), np.full((1, K), 1.0 / K)])
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))

    def prices(self, arrays: Arrays) -> Floats:
        """[A, 1, V]: affine minorants of the arcs of a graph of stages over the cell."""
        F, S, x, slow = arrays.fixed, arrays.shared, self._cell, self._slow
        rows = np.eye(len(slow))[((F[:, None] + S[:, None] * self.point) * slow).argmax(axis=1)]
        mixtures, total = self.table.mixtures, F + S
        if len(mixtures):
            mixture = np.divide(F, total, out=np.zeros_like(F), where=total > 0)
            at = np.minimum(np.searchsorted(mixtures, mixture - MIXTURE), len(mixtures) - 1)
            known = (np.abs(mixtures[at] - mixture) <= MIXTURE) & (total > 0)
            rows[known] = self.table.blends[at[known]]
        rows *= slow
        seconds = F[:, None] * rows.sum(axis=1)[:, None] + S[:, None] * (rows @ x.T)
        comm = F[:, None] + S[:, None] * x[:, -1]
        return np.ascontiguousarray(np.where(arrays.comm[:, None], comm, seconds)[:, None])

    @property
    def inside(self) -> Floats:
        """[K]: the point in barycentric coordinates."""
        here = np.maximum(coordinates(self._cell, self.point), 0.0)
        return np.asarray(here / here.sum())


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
        duals = Duals(self.problem, cell, self.arrays.slow, self.incumbent, hint)
        bound, potential = sums(self.arrays, cell, duals)
        if bound >= threshold:
            return Evaluated(bound, duals.point, 0)
        size, _ = best_at(duals, self.arrays, self.incumbent, potential, duals.weights)
        threshold = min(threshold, self.incumbent.threshold)
        if bound >= threshold:
            return Evaluated(bound, duals.point, size)
        missing = 1 - bound / threshold
        if self._failed.unlike(cell, missing) and not self.incumbent.run.should_stop:
            opened = self.explorer.open(cell, duals.weights, threshold, self._room(), self.incumbent.run)
            if opened is not None and opened.graph.n > 1:
                found = self._exact(cell, hint, threshold, opened)
                return Evaluated(max(bound, found.bound), found.point, size + found.labels, opened)
            if opened is None:
                self._failed.note(cell, missing)
            else:
                bound = threshold
        return Evaluated(bound, duals.point, size)

    def _room(self) -> int:
        """States that can be looked through in the time left."""
        return int(min(OPEN_STATES, max(1_000, STATES_PER_SECOND * self.incumbent.run.remaining)))
