"""Multipliers that bound the stages of programs in a cell of ratios: means over device types, and
prices of bytes.

A mean does not exceed a maximum. With weights w over types for a stage, weights u_k in place of the
largest ratio of segment k, and with memory a price l_d >= 0 of every byte of a device of type d,

    seconds(Q, B) >= sum over Q of (comm + sum_d w_d (F + S . B_d) / v_d)
                     + sum_d l_d (bytes_d(Q, B) - W_d),     comm = fixed + shared sum_d u_kd B_kd

for a program Q and ratios B. A computation has F + S . B_d FLOP on a device of type d, of speed v_d
(`problem.CostOfRatios`). bytes_d are the bytes of Q on a device of type d, and W_d is its memory.
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

# Mixtures of work are equal when they agree to this number of digits.
DIGITS = 9


@dataclass(frozen=True)
class Multipliers:
    """One mean over types for all stages, means for the largest ratios, and prices of bytes."""

    type_weights: Floats  # [K] of sum 1, in place of a stage's slowest type
    top_weights: Floats  # [g, K] rows of sum 1, in place of each segment's largest ratio
    byte_prices: Floats  # [K] seconds per byte of one device of each type


class Means:
    """Good multipliers for one cell of ratios, and the costs of triples and stages by them.

    options: the options of the run, for HiGHS.
    """

    def __init__(self, problem: HapProblem, cell: Floats, options: Options) -> None:
        self.problem, self.options = problem, options
        self.x = vertices(cell)  # [V, g, K]
        # [K] seconds on each type per second on the fastest one
        self._slow = problem.speeds[-1] / problem.speeds
        V, _, K = self.x.shape
        self.mu = np.full(V, 1.0 / V)  # the reference point, barycentric
        # [g, K] at first, each segment's type of the largest ratio at that point alone
        self.top_weights = np.eye(K)[self.point.argmax(axis=1)]
        self.byte_prices = np.zeros(K)
        # [L, K] means for all stages, rows of sum 1: the type weights of the cell's multipliers
        # (once these are set), all types alike, each type alone
        self.weights = np.vstack([np.full((1, K), 1.0 / K), np.eye(K)])
        # [s, K] means for single stages of the best program
        self._stage_weights = np.zeros((0, K))
        # the mixture of work of a stage (see `_mixtures`) -> its row in `_stage_weights`
        self._stage_of_mixture: dict[bytes, int] = {}

    @property
    def point(self) -> Floats:
        """[g, K] the ratios of the reference point, where means are compared."""
        return np.asarray(np.tensordot(self.mu, self.x, 1))

    def set_from_program(self, cost: CostOfRatios) -> None:
        """Take the reference point and the means from a program's best ratios in the cell."""
        fastest = self.problem.speeds[-1]
        F, S = cost.F / fastest, cost.S / fastest
        fixed_byte_seconds = cost.fixed_bytes * self.byte_prices.sum()
        shared_byte_seconds = self.x @ self.byte_prices @ cost.shared_bytes  # [V]
        self.mu, self._stage_weights, top_weights = best_in_cell(
            F,
            S,
            cost.comm,
            fixed_byte_seconds + shared_byte_seconds,
            self.x,
            self._slow,
            self.mu,
            self.options,
        )
        communicates = cost.comm > 0  # the program has no collective in the other segments
        self.top_weights[communicates] = top_weights[communicates]
        self._stage_of_mixture = {row.tobytes(): s for s, row in enumerate(_mixtures(F, S))}

    def set_multipliers(self, multipliers: Multipliers) -> None:
        """Take the multipliers of the cell. The means of single stages stay."""
        simple_means = self.weights[-1 - self.problem.K :]  # all types alike, each type alone
        self.weights = np.vstack([multipliers.type_weights, simple_means])
        self.top_weights = multipliers.top_weights.copy()
        self.byte_prices = multipliers.byte_prices

    @property
    def memory_seconds(self) -> float:
        """Seconds that all memory costs at its prices, to be taken off every sum: sum_d l_d W_d."""
        if self.problem.capacity is None:
            return 0.0
        return float(self.byte_prices @ self.problem.capacity)

    def costs(self, work: Work, weights: Floats | None = None) -> Floats:
        """[A, L, V] seconds that work costs at the vertices by each mean of `weights` [L, K].

        Without `weights` the means are those of the cell.
        """
        if weights is None:
            weights = self.weights
        fixed, shared = self._seconds_per_unit(weights)
        V, g = self.x.shape[:2]
        shared_cost = work.shared_seconds @ shared.reshape(-1, g).T
        cost = work.fixed_seconds[:, None, None] * fixed[:, None]
        cost = cost + shared_cost.reshape(-1, len(fixed), V)
        return self._with_collectives_and_bytes(cost, work)

    def costs_per_stage(self, work: Work) -> Floats:
        """[A, 1, V] seconds that whole stages cost at the vertices, each by a mean of its own.

        A stage takes the mean with the largest value at the reference point. Among means of equal
        value, the mean of the best program's stage with the same mixture of work comes first, and
        then the mean with the least number.
        """
        L = len(self.weights)
        fixed, shared = self._seconds_per_unit(np.vstack([self.weights, self._stage_weights]))
        mixtures = _mixtures(work.fixed_seconds, work.shared_seconds)
        # the number of the mean for each row's mixture; 0, the first mean, where there is none
        mean_of_mixture = np.zeros(len(mixtures), dtype=np.int64)
        for row, mixture in enumerate(mixtures):
            stage = self._stage_of_mixture.get(mixture.tobytes())
            if stage is not None:
                mean_of_mixture[row] = L + stage
        shared_at_point = np.tensordot(shared, self.mu, (1, 0))  # [L + s, g]
        # the values at the point by the L means, and by the mean of the mixture
        by_mean = np.outer(work.fixed_seconds, fixed[:L])
        by_mean = by_mean + work.shared_seconds @ shared_at_point[:L].T
        by_mixture = fixed[mean_of_mixture] * work.fixed_seconds + np.einsum(
            "ag,ag->a", shared_at_point[mean_of_mixture], work.shared_seconds
        )
        largest = np.maximum(by_mean.max(axis=1), by_mixture) * (1 - CLOSE)
        first_largest = (by_mean >= largest[:, None]).argmax(axis=1)
        mean = np.where(by_mixture >= largest, mean_of_mixture, first_largest)
        cost = (work.fixed_seconds * fixed[mean])[:, None]
        cost = cost + np.einsum("ag,avg->av", work.shared_seconds, shared[mean])
        return self._with_collectives_and_bytes(cost[:, None], work)

    def at_point(self, graph: Graph) -> Floats:
        """[A] the costs of arcs at the reference point: the exact costs of whole stages and
        collectives, and the costs of other arcs by the first mean."""
        point, work = self.point, graph.work
        busy = (work.fixed_seconds[:, None] + work.shared_seconds @ point) * self._slow
        computing = busy.max(axis=1) if graph.arcs_are_stages else busy @ self.weights[0]
        communicating = work.fixed_seconds + work.shared_seconds @ point.max(axis=1)
        fixed_byte_seconds = work.fixed_bytes * self.byte_prices.sum()
        byte_seconds = fixed_byte_seconds + work.shared_bytes @ (point @ self.byte_prices)
        return np.asarray(np.where(work.comm, communicating, computing) + byte_seconds)

    def _seconds_per_unit(self, weights: Floats) -> tuple[Floats, Floats]:
        """(Seconds of a unit of fixed [M], and of shared [M, V, g] work) by the means [M, K]."""
        rows = weights * self._slow
        return rows.sum(axis=1), np.einsum("md,vgd->mvg", rows, self.x)

    def _with_collectives_and_bytes(self, cost: Floats, work: Work) -> Floats:
        """The costs of computing [A, M, V] with the rows of collectives replaced by their costs,
        and the costs of bytes added to all rows."""
        comm = work.comm
        largest_ratio = np.einsum("gd,vgd->gv", self.top_weights, self.x)
        collectives = work.fixed_seconds[comm, None] + work.shared_seconds[comm] @ largest_ratio
        cost[comm] = collectives[:, None]
        if self.byte_prices.any():
            fixed_byte_seconds = work.fixed_bytes[:, None] * self.byte_prices.sum()
            shared_byte_seconds = work.shared_bytes @ (self.x @ self.byte_prices).T
            cost += (fixed_byte_seconds + shared_byte_seconds)[:, None]
        return cost


def _mixtures(F: Floats, S: Floats) -> Floats:
    """[s, 1 + g] the mixture of each row of work: F and S scaled to sum 1 and rounded, so that
    equal mixtures have equal bytes."""
    rows = np.column_stack([F, S])
    total = rows.sum(axis=1, keepdims=True)
    shares = np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)
    return np.asarray(np.round(shares, DIGITS) + 0.0)  # 0.0 is added against negative zeros
