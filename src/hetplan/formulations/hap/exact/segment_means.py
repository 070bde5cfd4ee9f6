"""Good means over types where several segments have ratios of their own: what the best ratios of a
program in one cell tell, by the matrix game of its cutting planes, and the prices of arcs and steps
that they make. See `segments`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from hetplan.formulations.hap.cells import coordinates, product
from hetplan.formulations.hap.cutting import EXACT, game
from hetplan.formulations.hap.exact.arrays import Arrays, priced_graph
from hetplan.formulations.hap.exact.duals import HEAVIEST, Blends, by_criteria
from hetplan.formulations.hap.exact.kernels import Flags
from hetplan.formulations.hap.problem import Floats, HapProblem, Stages, Step
from hetplan.formulations.hap.states import Graph

# Cutting planes for the best ratios of a program in a cell.
CUTS = 60
# Shares of a segment's work in what tells mixtures apart: any numbers between 0 and 1 that are no
# simple fractions of each other. Stages taken for one another would take each other's means, which
# bounds nothing wrongly.
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
    """(mu [V], blends [s, K], tops [g, K], rows of sum 1): the best ratios mu x of stages F [s], S
    [s, g] and largest ratios that cost comm [g] over the vertices x [V, g, K], and the means that
    show it, by cutting planes."""
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

    def __init__(
        self, problem: HapProblem, cell: Floats, known: Stages | None, hint: Floats | None
    ) -> None:
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
        weights, (known, which) = (
            self._weights,
            self._table.of(*_apart(arrays.fixed, arrays.shared)),
        )
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
