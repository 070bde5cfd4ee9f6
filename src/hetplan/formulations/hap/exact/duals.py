"""Which means over types bound the stages of programs in a cell of ratios: learnt from the duals of
good ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.hap.cells import coordinates
from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.exact.kernels import CLOSE, Flags
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints, Stages

# Blends of a program's mixtures that price whole stages.
HEAVIEST = 2
# Mixtures of work that differ by less are the same.
MIXTURE = 1e-10
# By what an arc that is a stage chooses among means: what it tells at the point, plus so much of
# its least value and of its mean over the vertices. The more of these, the better in large cells,
# the worse in small ones.
CRITERIA = (0.0, 0.0), (0.1, 0.0), (1 / 3, 0.0), (0.0, 1 / 3)


class Duals:
    """What the best ratios of programs in one cell tell about good means over types: a blend per
    mixture of work
    (of several programs' the newest half), a point to compare types at, and one mean for
    everything."""

    def __init__(
        self,
        problem: HapProblem,
        cell: Floats,
        slow: Floats,
        known: Stages | None,
        hint: Floats | None,
    ) -> None:
        self._problem, self._cell, self._slow = problem, cell, slow
        self.table = Blends(problem.K)
        self.point = cell.mean(axis=0) if hint is None else hint
        self._means = np.zeros((0, problem.K))
        if known is not None:
            self._learn(known)

    def learn(self, program: Sequence[int]) -> None:
        """From one program (triple numbers)."""
        self._learn(self._problem.stages(program))

    def _learn(self, stages: Stages) -> None:
        problem = self._problem
        F, S = stages.F / problem.speeds[-1], stages.S[:, 0] / problem.speeds[-1]
        self.point, blends, _ = best_in_cell(
            F, S, float(stages.comm[0]), self._cell, self._slow, np.inf
        )
        self.table.add(F, S, blends)
        heavy = F + S / problem.counts.sum()
        if heavy.any():
            mean = heavy @ blends / heavy.sum()
            most = blends[np.argsort(-heavy, kind="stable")[:HEAVIEST]]
            self._means = np.array(
                list(dict.fromkeys(tuple(np.round(row, 9)) for row in [*most, mean]))
            )

    @property
    def weights(self) -> Floats:
        """[L, K]: the blends of the heaviest mixtures of the program learnt last, heaviest first,
        their mean, each type alone, all alike."""
        K = self._problem.K
        rows = np.vstack([self._means, np.eye(K), np.full((1, K), 1.0 / K)])
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))

    def prices(self, arrays: Arrays) -> Floats:
        """[A, C, V]: affine minorants over the cell of the arcs of a graph of stages, by each of
        CRITERIA."""
        F, S, x, slow = arrays.fixed, arrays.shared[:, None], self._cell, self._slow
        weights, (known, which) = self.weights, self.table.of(F, arrays.shared)
        rows = np.vstack([weights, self.table.blends]) * slow
        fixed, shared = rows.sum(axis=1), (rows @ x.T)[..., None]
        found = by_criteria(F, S, fixed, shared, len(weights), known, which, self.inside)
        found[arrays.comm] = (F[:, None] + S * x[:, -1])[arrays.comm, None]
        return found

    @property
    def inside(self) -> Floats:
        """[K]: the point in barycentric coordinates."""
        here = np.maximum(coordinates(self._cell, self.point), 0.0)
        return np.asarray(here / here.sum())


def by_criteria(
    F: Floats,
    S: Floats,
    fixed: Floats,
    shared: Floats,
    means: int,
    known: Flags,
    which: Ints,
    mu: Floats,
) -> Floats:
    """[A, C, V]: for work F [A], S [A, g] by each of CRITERIA the price by the mean that tells
    most.

    fixed [M], shared [M, V, g]: seconds of a unit of work by means, of which the first `means` are
    for all, the others for single mixtures: where `known` [A], that of number which [A] among them.
    mu [V]: the reference point.
    """
    n, L = len(F), means
    which = np.where(known, L + which, 0)
    at, low, middle = np.tensordot(shared, mu, (1, 0)), shared.min(axis=1), shared.mean(axis=1)
    found = np.empty((n, len(CRITERIA), len(mu)))
    for c, (l, m) in enumerate(CRITERIA):
        alone, by_segment = (1 + l + m) * fixed, at + l * low + m * middle
        score = np.empty((1 + L, n))
        score[1:] = np.outer(alone[:L], F) + by_segment[:L] @ S.T
        score[0] = np.where(
            known, alone[which] * F + np.einsum("ag,ag->a", by_segment[which], S), -np.inf
        )
        best = (score >= score.max(axis=0) * (1 - CLOSE)).argmax(axis=0) - 1
        best = np.where(best < 0, which, best)
        found[:, c] = F[:, None] * fixed[best, None]
        for k in range(S.shape[1]):
            found[:, c] += S[:, k, None] * shared[best, :, k]
    return found


class Blends:
    """Which mean over types bounds a stage of a given mixture of work: learnt from duals, newest
    half."""

    def __init__(self, types: int) -> None:
        self._known: dict[float, Floats] = {}
        self._types = types

    def add(self, fixed: Floats, shared: Floats, blends: Floats) -> None:
        """The blends [s, K] of a program's stages of work fixed, shared [s]."""
        for F, S, row in zip(fixed, shared, blends, strict=True):
            mixture = round(float(F / (F + S)), 11)
            old = self._known.get(mixture)
            self._known[mixture] = row if old is None else 0.5 * (old + row)

    def of(self, fixed: Floats, shared: Floats) -> tuple[Flags, Ints]:
        """Whether the mixtures of work fixed, shared [A] are known, and their places among
        `mixtures`."""
        mixtures, total = self.mixtures, fixed + shared
        if not len(mixtures):
            return np.zeros(len(total), dtype=np.bool_), np.zeros(len(total), dtype=np.int64)
        mixture = np.divide(fixed, total, out=np.zeros_like(total), where=total > 0)
        at = np.minimum(np.searchsorted(mixtures, mixture - MIXTURE), len(mixtures) - 1)
        return (np.abs(mixtures[at] - mixture) <= MIXTURE) & (total > 0), at

    @property
    def mixtures(self) -> Floats:
        """[m], ascending."""
        return np.array(sorted(self._known), dtype=float)

    @property
    def blends(self) -> Floats:
        """[m, K], rows of sum 1."""
        rows = [self._known[key] for key in sorted(self._known)]
        return np.array(rows, dtype=float).reshape(-1, self._types)
