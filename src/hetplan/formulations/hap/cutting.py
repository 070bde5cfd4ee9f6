"""The best ratios of one program inside one cell, with the duals of its stages; compiled, by cutting planes.

At a point of the cell every stage is slowest on some type; fixing these types gives an affine minorant of the
program's cost, a cut with values P[c, i] at the vertices i. With cuts c the problem is a matrix game,

    min over mu in the simplex of max_c P[c] mu = max over theta in the simplex of min_i (theta P)_i,

whose theta blends the types of each stage: sum_c theta_c [type of the stage in cut c]. Bounding each stage by
its blend turns the program's cost into an affine function whose least value over the cell is (nearly) the optimum.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.problem import Floats

# Cuts at most, per type and at least.
PER_TYPE, CUTS = 25, 60
EXACT = 1e-10


@kernel
def _game(P: Floats, count: int, mu: Floats, theta: Floats) -> None:
    """Optimal strategies of the game P [:count, V] > 0: max sum y, y P[c] <= 1 by the simplex method with
    Bland's rule; mu = y / sum y, theta from the slacks' reduced costs."""
    V = P.shape[1]
    width = V + count + 1
    T = np.zeros((count + 1, width))
    basis = np.empty(count, np.int64)
    for c in range(count):
        for i in range(V):
            T[c, i] = P[c, i]
        T[c, V + c] = 1.0
        T[c, width - 1] = 1.0
        basis[c] = V + c
    for i in range(V):
        T[count, i] = -1.0
    for _ in range(200):
        entering = -1
        for j in range(width - 1):
            if T[count, j] < -1e-13:
                entering = j
                break
        if entering < 0:
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
    for i in range(V):
        mu[i] = 0.0
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
def best_in_cell(
    F: Floats, S: Floats, comm: float, x: Floats, slow: Floats, enough: float
) -> tuple[Floats, Floats, float]:
    """(ratios [K], blends [s, K] with rows of sum 1, lower bound) for stages (F, S) [s].

    comm: seconds per largest ratio. A lower bound of `enough` ends the work.

    x [V, K]: the vertices; slow [K]: seconds per unit of work on each type.
    """
    V, K = x.shape
    most = max(CUTS, PER_TYPE * K)
    P = np.empty((most, V))
    taken = np.empty((most, len(F)), np.int64)
    mu, theta, best_mu = np.empty(V), np.zeros(most), np.empty(V)
    for i in range(V):
        mu[i] = best_mu[i] = 1.0 / V
    point = np.empty(K)
    best, bound = np.inf, 0.0
    scaled = np.empty((most, V))
    count = 0
    while count < most:
        for d in range(K):
            point[d] = 0.0
            for i in range(V):
                point[d] += mu[i] * x[i, d]
        for i in range(V):
            P[count, i] = comm * x[i, K - 1]
        cost = comm * point[K - 1]
        for s in range(len(F)):
            top, slowest = -1.0, 0
            for d in range(K):
                busy = (F[s] + S[s] * point[d]) * slow[d]
                if busy > top:
                    top, slowest = busy, d
            taken[count, s] = slowest
            cost += top
            for i in range(V):
                P[count, i] += (F[s] + S[s] * x[i, slowest]) * slow[slowest]
        count += 1
        if cost < best:
            best = cost
            for i in range(V):
                best_mu[i] = mu[i]
        low, high = P[0, 0], P[0, 0]
        for c in range(count):
            for i in range(V):
                low, high = min(low, P[c, i]), max(high, P[c, i])
        if high <= low:
            theta[0] = 1.0
            bound = low
            break
        for c in range(count):
            for i in range(V):
                scaled[c, i] = (P[c, i] - low) / (high - low) + 1.0
        _game(scaled, count, mu, theta)
        value = np.inf
        for i in range(V):
            level = 0.0
            for c in range(count):
                level += theta[c] * P[c, i]
            value = min(value, level)
        bound = max(bound, value)
        if best - value <= EXACT * best or value >= enough:
            break
    blends = np.zeros((len(F), K))
    for c in range(count):
        for s in range(len(F)):
            blends[s, taken[c, s]] += theta[c]
    for d in range(K):
        point[d] = 0.0
        for i in range(V):
            point[d] += best_mu[i] * x[i, d]
    return point, blends, bound
