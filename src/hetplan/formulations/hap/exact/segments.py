"""Several segments: bounds of cells of ratios in which one stage may mix work of several segments.

A cell is a product of simplices, one for each segment's ratios; x are its V = K^g vertices. For one mean over types
per stage, and one per segment in place of the largest ratio, a program's cost is affine in all ratios together, so
that sums over a graph of needs bound a cell as for one segment (`bounds`), V values each. Whole stages as arcs
(`staging`), work shared by segment, make that exact at a point; there is no listing of programs here, so that cells are
divided until sums close them. Means come from the matrix game of the best ratios of the incumbent in the cell.

Ratios are any of sum 1: those of one segment that are concave in speed need not hold an optimum where stages mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hetplan.formulations.hap.cells import coordinates, product
from hetplan.formulations.hap.cutting import EXACT, game, game_value
from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.exact.arrays import Arrays, priced_graph
from hetplan.formulations.hap.exact.bounds import (
    ARCS,
    FEWER,
    Evaluated,
    Failed,
    Incumbent,
    open_room,
)
from hetplan.formulations.hap.exact.duals import HEAVIEST, Blends, by_criteria
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.exact.opened import Explorer
from hetplan.formulations.hap.exact.staging import staged
from hetplan.formulations.hap.graph_kernels import shortest_paths
from hetplan.formulations.hap.problem import Floats, HapProblem, Stages, Step
from hetplan.formulations.hap.states import Graph

# Cutting planes for the best ratios of a program in a cell.
CUTS = 60
# Shares of a segment's work in what tells mixtures apart: any numbers between 0 and 1 that are no simple fractions of
# each other. Stages taken for one another would take each other's means, which bounds nothing wrongly.
APART = np.modf(np.sqrt(np.array([2.0, 3.0, 5.0, 7.0, 11.0, 13.0])))[0]


class Work(Protocol):
    """Of arcs or steps: which communicate [A]; fixed [A] and shared [A, g] work as in `Arrays`."""

    @property
    def comm(self) -> Flags: ...

    @property
    def fixed(self) -> Floats: ...

    @property
    def shared(self) -> Floats: ...


@dataclass(frozen=True)
class StepWork:
    """The same of a theory's steps."""

    comm: Flags
    fixed: Floats
    shared: Floats


def work_of(problem: HapProblem, steps: Sequence[Step]) -> StepWork:
    """Compute in seconds of the fastest type, communication in seconds."""
    comm = np.array([s.comm for s in steps], dtype=np.bool_)
    unit = np.where(comm, 1.0, problem.speeds[-1])
    segment = np.array([s.segment for s in steps], dtype=np.int64)
    shared = np.array([s.shared for s in steps]) / unit
    return StepWork(
        comm,
        np.array([s.fixed for s in steps]) / unit,
        shared[:, None] * (segment[:, None] == np.arange(problem.g)),
    )


def by_segment(problem: HapProblem, graph: Graph, *, ordered: bool) -> Arrays:
    """A graph's costs with shared work [A, g]."""
    shared = work_of(problem, graph.theory.steps).shared[graph.step]
    return replace(priced_graph(problem, graph, ordered=ordered), shared=shared)


def best_in_product(
    F: Floats, S: Floats, comm: Floats, x: Floats, slow: Floats
) -> tuple[Floats, Floats, Floats]:
    """(mu [V], blends [s, K], tops [g, K], rows of sum 1): the best ratios mu x of stages F [s], S [s, g] and largest
    ratios that cost comm [g] over the vertices x [V, g, K], and the means that show it, by cutting planes."""
    V, g, K = x.shape
    mu = best = np.full(V, 1.0 / V)
    least, cuts, slowest, largest = np.inf, [], [], []
    theta = np.ones(1)
    for _ in range(CUTS):
        point = np.tensordot(mu, x, 1)
        busy = (F[:, None] + S @ point) * slow
        types, top = busy.argmax(axis=1), point.argmax(axis=1)
        cost = float(busy.max(axis=1).sum() + comm @ point.max(axis=1))
        if cost < least:
            least, best = cost, mu
        slowest.append(types)
        largest.append(top)
        work = np.einsum("sg,vgs,s->v", S, x[:, :, types], slow[types])
        cuts.append(float(F @ slow[types]) + work + x[:, np.arange(g), top] @ comm)
        value, mu, theta = game(np.array(cuts))
        if least - value <= EXACT * least:
            break
    blends, tops = np.zeros((len(F), K)), np.zeros((g, K))
    for share, types, top in zip(theta, slowest, largest, strict=True):
        blends[np.arange(len(F)), types] += share
        tops[np.arange(g), top] += share
    return best, blends, tops


class Means:
    """What the best ratios of a program in one cell tell about good means; see `duals.Duals`."""

    def __init__(self, problem: HapProblem, cell: Floats, known: Stages | None, hint: Floats | None) -> None:
        self._problem, self.x = problem, product(cell)
        self._slow = problem.speeds[-1] / problem.speeds
        self._table, K, V = Blends(problem.K), problem.K, len(self.x)
        self._heavy = np.zeros((0, K))
        self.inside = np.full(V, 1.0 / V)
        if hint is not None:
            rows = [coordinates(*pair) for pair in zip(cell, hint, strict=True)]
            self.inside = np.maximum(_outer(rows), 0.0)
            self.inside /= self.inside.sum()
        self.tops = np.eye(K)[self.point.argmax(axis=1)]
        if known is not None:
            self.learn(known)

    @property
    def point(self) -> Floats:
        """[g, K]: where means are compared."""
        return np.asarray(np.tensordot(self.inside, self.x, 1))

    def learn(self, stages: Stages) -> None:
        """From a program's stages."""
        unit = self._problem.speeds[-1]
        F, S = stages.F / unit, stages.S / unit
        self.inside, blends, tops = best_in_product(F, S, stages.comm, self.x, self._slow)
        paid = stages.comm > 0
        self.tops[paid] = tops[paid]
        self._table.add(*_apart(F, S), blends)
        heavy = F + S.sum(axis=1) / self._problem.counts.sum()
        if heavy.any():
            most = blends[np.argsort(-heavy, kind="stable")[:HEAVIEST]]
            rows = [*most, heavy @ blends / heavy.sum()]
            self._heavy = np.array(list(dict.fromkeys(tuple(np.round(row, 9)) for row in rows)))

    def prices(self, arrays: Work) -> Floats:
        """[A, L, V]: seconds of arcs at the vertices by means over types for all arcs."""
        fixed, shared = self._units(self._weights)
        V, g = self.x.shape[:2]
        work = (arrays.shared @ shared.reshape(-1, g).T).reshape(len(arrays.fixed), -1, V)
        step = arrays.fixed[:, None, None] * fixed[:, None] + work
        step[arrays.comm] = self._paid(arrays)[:, None]
        return step

    def own(self, arrays: Arrays) -> Floats:
        """[A, C, V]: the same where arcs are stages, by a mean for each."""
        weights, (known, which) = self._weights, self._table.of(*_apart(arrays.fixed, arrays.shared))
        fixed, shared = self._units(np.vstack([weights, self._table.blends]))
        step = by_criteria(
            arrays.fixed, arrays.shared, fixed, shared, len(weights), known, which, self.inside
        )
        step[arrays.comm] = self._paid(arrays)[:, None]
        return step

    def at_point(self, arrays: Arrays) -> Floats:
        """[A]: what arcs cost at the point; where they are no stages, by the first mean."""
        point = self.point
        busy = (arrays.fixed[:, None] + arrays.shared @ point) * self._slow
        cost = busy.max(axis=1) if arrays.chains is not None else busy @ self._weights[0]
        paid = arrays.fixed + arrays.shared @ point.max(axis=1)
        return np.asarray(np.where(arrays.comm, paid, cost))

    @property
    def _weights(self) -> Floats:
        K = self._problem.K
        rows = np.vstack([self._heavy, np.eye(K), np.full((1, K), 1.0 / K)])
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))

    def _units(self, weights: Floats) -> tuple[Floats, Floats]:
        """Seconds of a unit of fixed [M] and shared [M, V, g] work by means [M, K]."""
        rows = weights * self._slow
        return rows.sum(axis=1), np.einsum("md,vgd->mvg", rows, self.x)

    def _paid(self, arrays: Work) -> Floats:
        """[c, V]: seconds of the communication arcs."""
        top = np.einsum("gd,vgd->gv", self.tops, self.x)
        return np.asarray(arrays.fixed[arrays.comm, None] + arrays.shared[arrays.comm] @ top)


def _apart(F: Floats, S: Floats) -> tuple[Floats, Floats]:
    """Work of several segments as two numbers that tell mixtures apart."""
    part = S @ np.resize(APART, S.shape[1])
    return F + part, S.sum(axis=1) - part


def _outer(rows: Sequence[Floats]) -> Floats:
    """[V]: products of one entry of each row, as the vertices of a product are numbered."""
    found = np.ones(1)
    for row in rows:
        found = np.outer(found, row).ravel()
    return found


@dataclass
class SegmentsCell:
    """Bounds by sums, over the graph of all orders or of what sums on the canonical one leave open."""

    problem: HapProblem
    arrays: Arrays
    incumbent: Incumbent
    explorer: Explorer
    _steps: Work = field(init=False)
    _failed: Failed = field(default_factory=Failed)

    def __post_init__(self) -> None:
        self._steps = work_of(self.problem, self.arrays.graph.theory.steps)

    def __call__(
        self, cell: Floats, hint: Floats | None, threshold: float, arrays: Arrays | None = None
    ) -> Evaluated:
        """One cell [g, K, K]; the point [g, K]. A graph handed down bounds no more than the threshold."""
        most = np.inf if arrays is None else threshold
        arrays = self.arrays if arrays is None else arrays
        means = Means(self.problem, cell, self.incumbent.stages, hint)
        bound, potential, step = sums(arrays, means)
        if bound >= threshold:
            return self._told(min(bound, most), means, arrays)
        if self._offer(means, arrays):
            threshold = min(threshold, self.incumbent.threshold)
            value, potential, step = sums(arrays, means)
            bound = max(bound, value)
        if bound >= threshold or not np.isfinite(threshold):
            return self._told(min(bound, most), means, arrays)
        missing = 1 - bound / threshold
        if not arrays.ordered:
            opened = self._opened(cell, means, threshold, missing)
            if opened is None:
                return self._told(bound, means, arrays)
            arrays = opened
            if not len(arrays.graph.head):
                return self._told(threshold, means, arrays)
            value, potential, step = sums(arrays, means)
            bound = max(bound, value)
        arrays, bound = self._narrowed(cell, means, arrays, (bound, potential, step), threshold)
        return self._told(min(bound, threshold), means, arrays)

    def _told(self, bound: float, means: Means, arrays: Arrays) -> Evaluated:
        return Evaluated(bound, means.point, 0, arrays if arrays.ordered else None)

    def _opened(self, cell: Floats, means: Means, threshold: float, missing: float) -> Arrays | None:
        """All orders of what sums leave open, if that is not too much."""
        if not self._failed.unlike(cell, missing) or self.incumbent.run.should_stop:
            return None
        cost = means.prices(self._steps)
        found = self.explorer.left_open(cost, threshold, open_room(self.incumbent.run), self.incumbent.run)
        if found is None:
            self._failed.note(cell, missing)
            return None
        return by_segment(self.problem, found, ordered=True)

    def _narrowed(
        self,
        cell: Floats,
        means: Means,
        arrays: Arrays,
        known: tuple[float, Floats, Floats],
        threshold: float,
    ) -> tuple[Arrays, float]:
        """(Without the arcs of no program below the threshold, and by stages where these are few; the bound)."""
        bound, potential, step = known
        missing = 1 - bound / threshold
        if not missing < FEWER * arrays.missing or arrays.start > 0 or len(arrays.graph.head) < ARCS // 10:
            return arrays, bound
        least = kernels.through(arrays.reverse, arrays.graph.head, step, potential)
        arrays, nodes = arrays.without(least.max(axis=1) >= threshold, missing)
        if not len(arrays.graph.head):
            return arrays, threshold
        if arrays.chains is not None:
            return arrays, bound
        corners = np.stack([cell.min(axis=(1, 2)), cell.max(axis=(1, 2))], axis=1)
        extremes = np.array(
            [[corners[k, c >> k & 1] for k in range(len(cell))] for c in range(2 ** len(cell))]
        )
        step, potential = means.prices(arrays), np.ascontiguousarray(potential[nodes])
        whole = staged(arrays, step, means.inside, potential, threshold, extremes)
        if whole is None:
            return arrays, bound
        if not len(whole.graph.head):
            return whole, threshold
        bound = max(bound, sums(whole, means)[0])
        if bound < threshold:
            self._offer(means, whole)
        return whole, bound

    def _offer(self, means: Means, arrays: Arrays) -> bool:
        """Price the best program at the point; whether it is better than all before, from which means learn."""
        g = arrays.graph
        _, arc = shortest_paths(g.first, g.head, g.component, means.at_point(arrays)[:, None])
        node, taken = arrays.start, []
        while node < g.n - 1:
            taken.append(int(arc[node, 0]))
            node = int(g.head[taken[-1]])
        before = self.incumbent.seconds
        self.incumbent.offer(arrays.program(reversed(taken)))
        better = self.incumbent.seconds < before
        if better and self.incumbent.stages is not None:
            means.learn(self.incumbent.stages)
        return better


def sums(arrays: Arrays, means: Means) -> tuple[float, Floats, Floats]:
    """(Bound of all programs in the cell, potential [n, L, V], prices [A, L, V])."""
    step = means.prices(arrays)
    first, head, component = arrays.graph.first, arrays.graph.head, arrays.graph.component
    potential = kernels.potentials_of(first, head, arrays.comm, component, step, means.inside, arrays.ordered)
    if arrays.chains is not None:
        own = means.own(arrays)
        potential = np.concatenate([potential, kernels.lengths(first, head, component, own)], axis=1)
        step = np.concatenate([step, own], axis=1)
    return game_value(potential[arrays.start]), potential, step
