"""Order, Pareto set and choice under a money limit (Astra, Section 3.6, eq. 29-33)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.search.efficiency import Floats
from hetplan.formulations.astra.search.table import Ints

Money = Floats
# Money is seconds x GPUs x price: amounts closer than this differ by the order of multiplication
# alone.
ROUNDING = 1e-12


def tied(values: Floats) -> Ints:
    """[n] the rank of each value, ascending; values that differ by rounding alone have one.

    The last digits of a sum depend on the machine, and where its arrays lie on the memory: what is
    sorted by these ranks comes in one order everywhere, ties by place.
    """
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    with np.errstate(invalid="ignore"):  # inf - inf
        steps = np.diff(ascending) > ROUNDING * np.abs(ascending[:-1])
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])[: len(values)]
    return ranks


def ranking(throughput: Floats, money: Money) -> Ints:
    """Indices by throughput, largest first, then by money, least first (eq. 33); ties keep their
    order (`tied`).

    throughput, money: [n] finite; money NaN where no price is known (then the order is by
    throughput alone).
    """
    return np.lexsort((tied(np.nan_to_num(money)), tied(-throughput)))


def pareto(throughput: Floats, money: Money) -> Ints:
    """Indices of the pool that nothing beats in both, sorted as `ranking`.

    The paper's eq. 30 asks for strictly better in both; of equals in one the better in the other is
    kept here, and of equals in both the first, so that the set is a curve without doubles.
    """
    order = ranking(throughput, money)
    cheapest = np.minimum.accumulate(np.nan_to_num(money)[order])
    before = np.concatenate([[np.inf], cheapest[:-1]])[: len(order)]
    return np.asarray(order[np.nan_to_num(money)[order] < before * (1 - ROUNDING)], dtype=np.int64)


def best_under(limit: float | None, throughput: Floats, money: Money) -> int | None:
    """The fastest whose money is within `limit` (None: no limit); None when nothing is. NaN money
    never is."""
    allowed: NDArray[np.bool_] = (
        np.ones(len(throughput), bool) if limit is None else money <= limit * (1 + ROUNDING)
    )
    if not allowed.any():
        return None
    order = ranking(throughput, money)
    return int(order[allowed[order]][0])
