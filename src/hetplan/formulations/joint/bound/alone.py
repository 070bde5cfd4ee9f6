"""A lower bound on every plan's seconds by computing alone, as a linear programme."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetplan.replays.arrays import Floats
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Model
from hetplan.solvers.run import Options, Run


def computing_alone(work: Floats, counts: Sequence[int], options: Options) -> float:
    """Seconds that so many devices of each type compute at least, every layer's samples on the
    types that suit it. work [types, layers]: device-seconds of all samples. options: for HiGHS.

    min T over shares x[q, l] of a layer's samples with sum_q x[q, l] = 1 and, on each type of n[q]
    devices, sum_l w[q, l] x[q, l] <= n[q] T. Any prices y[q] >= 0 of a type's devices with
    sum_q n[q] y[q] = 1 show that T >= sum_l min_q y[q] w[q, l]. HiGHS finds the best prices; what
    they show is computed here.
    """
    prices = best_prices(work, counts, options)
    return float((prices[:, None] * work).min(axis=0).sum())


def best_prices(work: Floats, counts: Sequence[int], options: Options) -> Floats:
    """[types] the prices of `computing_alone`; even ones where nothing takes time."""
    devices, layers = np.array(counts, dtype=float), work.shape[1]
    largest = float(work.max())
    if largest <= 0:
        return np.full(len(work), 1 / devices.sum())
    model = Model("computing-alone")
    price, paid = model.continuous("price", len(work)), model.continuous("paid", layers)
    model.minimize(-paid.sum())
    model.row("one", devices @ price == 1)
    shares = work / largest
    kept = np.where(shares >= SMALLEST, shares, 0.0)
    model.row("least", paid <= kept * price[:, None])
    answer = minimise("milp", model, Run(replace(options, time_limit=None)), lambda i, b: None)
    prices = np.ones(len(work)) if answer.x is None else np.maximum(answer.values(price), 0.0)
    return np.asarray(prices / float(prices @ devices))
