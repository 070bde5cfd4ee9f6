"""Linear models that several solver tests share."""

from __future__ import annotations

import numpy as np

from hetplan.solvers.model import Model
from hetplan.solvers.run import Run


def small() -> Model:
    """min 2x + 3y + 1, x + y >= 6.5, x <= 3, x and y integer: x = 3, y = 4, cost 19."""
    model = Model("small")
    x, y = model.integer("x", upper=3), model.integer("y", upper=10)
    model.minimize(2 * x + 3 * y + 1)
    model.row("cover", x + y >= 6.5)
    return model


def knapsack(items: int = 150, rows: int = 60, seed: int = 7, run: Run | None = None) -> Model:
    """A multi-dimensional knapsack (cost: value left out); the default size takes any solver
    minutes."""
    draw = np.random.default_rng(seed)
    model = Model("knapsack", run)
    x = model.binary("x", (items,))
    for _ in range(rows):
        weights = draw.integers(1, 1000, items).astype(float)
        model.row("capacity", weights @ x <= weights.sum() // 3)
    values = draw.integers(100, 1000, items).astype(float)
    model.minimize(values.sum() - values @ x)
    return model


def sparse_packing(items: int, rows: int, entries: int, seed: int = 0) -> Model:
    """Packing rows of `entries` random items each; 20000 x 10000 x 20 keeps HiGHS in its first
    LP."""
    draw = np.random.default_rng(seed)
    model = Model("packing")
    x = model.binary("x", (items,))
    for _ in range(rows):
        taken = x[draw.choice(items, entries, replace=False)]
        model.row("capacity", draw.integers(1, 100, entries) @ taken <= 50.0 * entries / 3)
    model.minimize(-draw.integers(10, 100, items) @ x)
    return model
