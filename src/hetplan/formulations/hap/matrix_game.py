"""The value of a matrix game, by a linear programme through HiGHS."""

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.hap.problem import Floats
from hetplan.solvers.highs import instance, loaded
from hetplan.solvers.model import SMALLEST, LinearArrays
from hetplan.solvers.run import Options


def game(P: Floats, options: Options) -> tuple[float, Floats, Floats]:
    """(value, mu [V], theta [C]) of the game: min over mu in the simplex of max_c P[c] . mu.

    P: [C, V] payoffs: one player mixes its C rows by theta, the other one its V columns by mu. The
    value is the least payoff that theta guarantees, a lower bound of the game's value in any case.
    HiGHS maximises it, and mu are the duals. Where HiGHS finds no theta, because of the native
    options perhaps, all rows have equal shares. Where all payoffs are equal or some are +inf, the
    value is the least payoff, mu has equal shares and theta is the first row. No payoff is -inf.
    """
    C, V = P.shape
    low, high = float(P.min()), float(P.max())
    if not (np.isfinite(high) and high > low):
        return low, np.full(V, 1.0 / V), np.eye(C)[0]
    shares = (P.T - low) / (high - low)
    shares = np.where(shares < SMALLEST, 0.0, shares)  # HiGHS warns of smaller ones
    # The programme's columns are theta [C] and the value. It has a row for each column v of P,
    # sum_c theta_c shares[v, c] >= value, and the last row sum_c theta_c = 1.
    rows = np.vstack([np.column_stack([shares, -np.ones(V)]), np.ones(C + 1)])
    rows[V, C] = 0.0
    cost = np.zeros(C + 1)
    cost[C] = -1.0  # the value is maximised
    row_lower = np.zeros(V + 1)
    row_lower[V] = 1.0
    programme = LinearArrays(
        cost=cost,
        constant=0.0,
        lower=np.zeros(C + 1),  # for the value too, since no share is negative
        upper=np.full(C + 1, np.inf),
        integer=np.zeros(C + 1, dtype=np.bool_),
        starts=np.arange(0, rows.size + 1, C + 1),
        columns=np.tile(np.arange(C + 1), V + 1),
        values=rows.ravel(),
        row_lower=row_lower,
        row_upper=np.append(np.full(V, np.inf), 1.0),
    )
    highs = loaded(programme, instance(options))
    highs.run()
    theta = _shares(highs.getSolution().col_value[:C], C)
    mu = _shares(highs.getSolution().row_dual[:V], V)
    return float((theta @ P).min()), mu, theta


def _shares(values: Sequence[float], count: int) -> Floats:
    """The values as shares of their sum, values that are negative by rounding taken as 0.

    The shares are equal where no value is positive.
    """
    positive = np.maximum(values, 0.0)
    if positive.sum() <= 0:
        return np.full(count, 1.0 / count)
    return np.asarray(positive / positive.sum())


def game_value(P: Floats, options: Options) -> float:
    """A lower bound of the game's value, mostly the value itself; payoffs may be +inf."""
    best_single_row = float(P.min(axis=1).max())  # `game` gives less where a payoff is +inf
    mixture_value, _, _ = game(P, options)
    return max(best_single_row, mixture_value)
