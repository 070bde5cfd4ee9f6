"""The best ratios of one program inside one cell, with the duals of its stages; compiled, by
cutting planes.

At a point of the cell every stage is slowest on some type; fixing these types gives an affine
minorant of the program's cost, a cut with values P[c, i] at the vertices i. With cuts c the problem
is a matrix game,

    min over mu in the simplex of max_c P[c] mu = max over theta in the simplex of min_i (theta
    P)_i,

whose theta blends the types of each stage: sum_c theta_c [type of the stage in cut c]. Bounding
each stage by its blend turns the program's cost into an affine function whose least value over the
cell is (nearly) the optimum.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats, Ints

# Cuts at most, per type and at least.
PER_TYPE, CUTS = 25, 60
EXACT = 1e-10


@kernel
def _game(
    P: Floats,
    count: int,
    low: float,
    scale: float,
    T: Floats,
    basis: Ints,
    mu: Floats,
    theta: Floats,
) -> None:
    """Optimal strategies of the game (P [:count, V] - low) / scale + 1 > 0: max sum y, y P[c] <= 1
    by the simplex method with Bland's rule; mu = y / sum y, theta from the slacks' reduced costs.
    T, basis: room for the table."""
    V = P.shape[1]
    width = V + count + 1
    for c in range(count + 1):
        for j in range(width):
            T[c, j] = 0.0
    for c in range(count):
        for i in range(V):
            T[c, i] = (P[c, i] - low) / scale + 1.0
        T[c, V + c] = 1.0
        T[c, width - 1] = 1.0
        basis[c] = V + c
    for i in range(V):
        T[count, i] = -1.0
        mu[i] = 0.0
    for _ in range(200):
        entering = 0
        while entering < width - 1 and T[count, entering] >= -1e-13:
            entering += 1
        if entering == width - 1:
            break
        row, least = -1, np.inf
        for c in range(count):
            if T[c, entering] > 1e-13:
                ratio = T[c, width - 1] / T[c, entering]
                if ratio < least - 1e-15:
                    row, least = c, ratio
        if row < 0:
            break
        pivot = T[row, entering]
        for j in range(width):
            T[row, j] /= pivot
        for c in range(count + 1):
            factor = T[c, entering]
            if c != row and factor != 0.0:
                for j in range(width):
                    T[c, j] -= factor * T[row, j]
        basis[row] = entering
    first, second = 0.0, 0.0
    for c in range(count):
        if basis[c] < V:
            mu[basis[c]] = max(0.0, T[c, width - 1])
            first += mu[basis[c]]
        theta[c] = max(0.0, T[count, V + c])
        second += theta[c]
    for i in range(V):
        mu[i] /= first
    for c in range(count):
        theta[c] /= second


@kernel
def _cut(
    F: Floats, S: Floats, comm: float, x: Floats, slow: Floats, enough: float,
    P: Floats, taken: Ints, T: Floats, basis: Ints, mu: Floats, best: Floats, theta: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Cut until the gap is closed: (cuts made, lower bound); fills the rest, of which `best` [V] is
    the best mu."""
    V, K = x.shape
    least, bound, low, high = np.inf, 0.0, np.inf, -np.inf
    count = 0
    while count < len(P):
        top = 0.0
        for i in range(V):
            top += mu[i] * x[i, K - 1]
            P[count, i] = comm * x[i, K - 1]
        cost = comm * top
        for s in range(len(F)):
            most, slowest = -1.0, 0
            for d in range(K):
                share = 0.0
                for i in range(V):
                    share += mu[i] * x[i, d]
                busy = (F[s] + S[s] * share) * slow[d]
                if busy > most:
                    most, slowest = busy, d
            taken[count, s] = slowest
            cost += most
            for i in range(V):
                P[count, i] += (F[s] + S[s] * x[i, slowest]) * slow[slowest]
        for i in range(V):
            low, high = min(low, P[count, i]), max(high, P[count, i])
        count += 1
        if cost < least:
            least = cost
            for i in range(V):
                best[i] = mu[i]
        if high <= low:
            theta[0] = 1.0
            return count, low
        _game(P, count, low, high - low, T, basis, mu, theta)
        value = np.inf
        for i in range(V):
            level = 0.0
            for c in range(count):
                level += theta[c] * P[c, i]
            value = min(value, level)
        bound = max(bound, value)
        if least - value <= EXACT * least or value >= enough:
            break
    return count, bound


def best_in_cell(
    F: Floats, S: Floats, comm: float, x: Floats, slow: Floats, enough: float
) -> tuple[Floats, Floats, float]:
    """(ratios [K], blends [s, K] with rows of sum 1, lower bound) for stages (F, S) [s].

    comm: seconds per largest ratio. A lower bound of `enough` ends the work.

    x [V, K]: the vertices; slow [K]: seconds per unit of work on each type.
    """
    V, K = x.shape
    most = max(CUTS, PER_TYPE * K)
    P, taken = np.empty((most, V)), np.empty((most, len(F)), np.int64)
    T, basis = np.empty((most + 1, V + most + 1)), np.empty(most, np.int64)
    mu, best, theta = np.full(V, 1.0 / V), np.full(V, 1.0 / V), np.zeros(most)
    count, bound = _cut(F, S, comm, x, slow, enough, P, taken, T, basis, mu, best, theta)
    blends = np.zeros((len(F), K))
    stages = np.arange(len(F))
    for c in np.flatnonzero(theta[:count]):
        blends[stages, taken[c]] += theta[c]
    return best @ x, blends, bound


def game(P: Floats) -> tuple[float, Floats, Floats]:
    """(Value, mu [V], theta [C]) of the game min over mu in the simplex of max_c P[c] mu [C, V];
    the value is what theta guarantees."""
    (count, V), low, high = P.shape, float(P.min()), float(P.max())
    if not (np.isfinite(high) and high > low):
        return low, np.full(V, 1.0 / V), np.eye(count)[0]
    mu, theta = np.empty(V), np.empty(count)
    T, basis = np.empty((count + 1, V + count + 1)), np.empty(count, np.int64)
    _game(np.ascontiguousarray(P), count, low, high - low, T, basis, mu, theta)
    return float((theta @ P).min()), mu, theta


def game_value(P: Floats) -> float:
    """A lower bound of min over mu in the simplex of max_c P[c] mu [C, V], and mostly that; rows
    may be infinite."""
    return max(float(P.min(axis=1).max()), game(P)[0])
