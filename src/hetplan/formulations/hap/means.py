"""What bounds the stages of programs in a cell of ratios: means over device types, and prices of
bytes, together called multipliers.

A mean does not exceed a maximum. With weights w over types for a stage, weights u_k in place of the
largest ratio of segment k, and with memory a price l_d >= 0 of every byte of a device of type d,

    seconds(Q, B) >= sum over Q of (comm + sum_d w_d (F + S . B_d) / v_d)
                     + sum_d l_d (held_d(Q, B) - W_d),      comm = fixed + shared sum_d u_kd B_kd.

The right side is affine in all ratios together and adds up over triples. Good weights are the duals
of the ratio problem of a good program, restricted to the cell (module `cell_ratios`). Module
`byte_prices` finds the prices.
"""

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.cell_ratios import best_in_cell
from hetplan.formulations.hap.cells import vertices
from hetplan.formulations.hap.graph import Graph, Work
from hetplan.formulations.hap.paths import CLOSE
from hetplan.formulations.hap.problem import CostOfRatios, Floats, HapProblem
from hetplan.solvers.run import Options

# Mixtures of work are the same when they agree to so many digits.
DIGITS = 9


@dataclass(frozen=True)
class Multipliers:
    """type_weights [K] over types, top_weights [g, K] in place of the largest ratio: rows of sum 1.
    byte_prices [K]: seconds per byte of one device of each type."""

    type_weights: Floats
    top_weights: Floats
    byte_prices: Floats


class Means:
    """Good multipliers for one cell, and what they make triples and stages cost. options: those of
    the run, for HiGHS."""

    def __init__(self, problem: HapProblem, cell: Floats, options: Options) -> None:
        self.problem, self.options = problem, options
        self.x = vertices(cell)  # [V, g, K]
        self._slow = problem.speeds[-1] / problem.speeds
        V, _, K = self.x.shape
        self.mu = np.full(V, 1.0 / V)  # the reference point, barycentric
        self.top_weights = np.eye(K)[self.point.argmax(axis=1)]
        self.byte_prices = np.zeros(K)
        # [L, K], rows of sum 1; each is a mean for all stages: weights found for the cell, all
        # types alike, each type alone.
        self.weights = np.vstack([np.full((1, K), 1.0 / K), np.eye(K)])
        self._stage_of_mixture: dict[bytes, int] = {}
        self._stage_weights = np.zeros((0, K))

    @property
    def point(self) -> Floats:
        """[g, K]: the reference point, where means are compared."""
        return np.asarray(np.tensordot(self.mu, self.x, 1))

    def set_from_program(self, cost: CostOfRatios) -> None:
        """Take the point and the means from a program's best ratios in the cell."""
        unit = self.problem.speeds[-1]
        F, S = cost.F / unit, cost.S / unit
        held = (
            cost.fixed_bytes * self.byte_prices.sum()
            + self.x @ self.byte_prices @ cost.shared_bytes
        )
        self.mu, self._stage_weights, top_weights = best_in_cell(
            F, S, cost.comm, held, self.x, self._slow, self.mu, self.options
        )
        paid = cost.comm > 0
        self.top_weights[paid] = top_weights[paid]
        self._stage_of_mixture = {row.tobytes(): s for s, row in enumerate(_mixtures(F, S))}

    def set_multipliers(self, multipliers: Multipliers) -> None:
        """Take multipliers found for the cell; the means of single stages stay."""
        self.weights = np.vstack([multipliers.type_weights, self.weights[-1 - self.problem.K :]])
        self.top_weights, self.byte_prices = multipliers.top_weights.copy(), multipliers.byte_prices

    @property
    def memory_seconds(self) -> float:
        """Seconds that all memory costs at its prices, to be taken off every sum: sum_d l_d W_d."""
        capacity = self.problem.capacity
        return 0.0 if capacity is None else float(self.byte_prices @ capacity)

    def costs(self, work: Work, weights: Floats | None = None) -> Floats:
        """[A, L, V]: seconds that work costs at the vertices by each of the weights [L, K],
        or of `weights`."""
        fixed, shared = self._units(self.weights if weights is None else weights)
        V, g = self.x.shape[:2]
        by_vertex = (work.shared_seconds @ shared.reshape(-1, g).T).reshape(-1, len(fixed), V)
        cost = work.fixed_seconds[:, None, None] * fixed[:, None] + by_vertex
        return self._completed(cost, work)

    def costs_per_stage(self, work: Work) -> Floats:
        """[A, 1, V]: the same where each row is a whole stage with a mean of its own: the one with
        the largest value at the point, and of equal ones that of its mixture of work."""
        L = len(self.weights)
        fixed, shared = self._units(np.vstack([self.weights, self._stage_weights]))
        rows = _mixtures(work.fixed_seconds, work.shared_seconds)
        which = L + np.array(
            [self._stage_of_mixture.get(row.tobytes(), -L) for row in rows], dtype=np.int64
        )
        point = np.tensordot(shared, self.mu, (1, 0))
        score = np.outer(work.fixed_seconds, fixed[:L]) + work.shared_seconds @ point[:L].T
        mine = fixed[which] * work.fixed_seconds + np.einsum(
            "ag,ag->a", point[which], work.shared_seconds
        )
        most = np.maximum(score.max(axis=1), mine) * (1 - CLOSE)
        best = np.where(mine >= most, which, (score >= most[:, None]).argmax(axis=1))
        cost = (work.fixed_seconds * fixed[best])[:, None]
        cost = cost + np.einsum("ag,avg->av", work.shared_seconds, shared[best])
        return self._completed(cost[:, None], work)

    def at_point(self, graph: Graph) -> Floats:
        """[A]: what arcs cost at the point: whole stages exactly, other arcs by the first mean."""
        point, work = self.point, graph.work
        busy = (work.fixed_seconds[:, None] + work.shared_seconds @ point) * self._slow
        cost = busy.max(axis=1) if graph.arcs_are_stages else busy @ self.weights[0]
        paid = work.fixed_seconds + work.shared_seconds @ point.max(axis=1)
        held = work.fixed_bytes * self.byte_prices.sum() + work.shared_bytes @ (
            point @ self.byte_prices
        )
        return np.asarray(np.where(work.comm, paid, cost) + held)

    def _units(self, weights: Floats) -> tuple[Floats, Floats]:
        """Seconds of a unit of fixed [M] and of shared [M, V, g] work by means [M, K]."""
        rows = weights * self._slow
        return rows.sum(axis=1), np.einsum("md,vgd->mvg", rows, self.x)

    def _completed(self, cost: Floats, work: Work) -> Floats:
        """Costs of computing [A, M, V] with those of collectives put in, and of bytes added."""
        top = np.einsum("gd,vgd->gv", self.top_weights, self.x)
        cost[work.comm] = (
            work.fixed_seconds[work.comm, None] + work.shared_seconds[work.comm] @ top
        )[:, None]
        if self.byte_prices.any():
            held = work.fixed_bytes[:, None] * self.byte_prices.sum()
            cost += (held + work.shared_bytes @ (self.x @ self.byte_prices).T)[:, None]
        return cost


def _mixtures(F: Floats, S: Floats) -> Floats:
    """[s, 1 + g]: rows of work scaled to sum 1 and rounded, to be compared."""
    rows = np.column_stack([F, S])
    total = rows.sum(axis=1, keepdims=True)
    return np.asarray(
        np.round(np.divide(rows, total, out=np.zeros_like(rows), where=total > 0), DIGITS) + 0.0
    )  # no negative zeros
