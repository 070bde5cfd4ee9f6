"""Exchanges of two devices, down to a placement that none improves: for clusters in which devices
are unlike.

Where nodes are alike, orders of whole nodes (`orders`) hold near-optimal placements; where
most devices have links of their own there are no such orders. Degrees and micro-batch stay; each
placement gets the cut of `envelope_cut`. Pairs come in random order from a fixed seed, each
improvement is taken at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

from hetplan.formulations.amp.cells import Cells
from hetplan.formulations.amp.cuts import envelope_cut
from hetplan.formulations.amp.problem import AmpProblem
from hetplan.formulations.amp.strategy import Strategy, place

# Share of what is left of the time limit, and seconds without one.
SHARE = 0.3
SECONDS = 10.0


def worthwhile(cells: Cells) -> bool:
    """Whether most devices are of a kind of their own."""
    return 2 * cells.count > int(cells.size.sum())


def allowance(remaining: float) -> float:
    """Seconds for `improved` when that many are left (infinite: no limit)."""
    return min(SECONDS, SHARE * remaining)


def improved(
    problem: AmpProblem, cells: Cells, strategy: Strategy, seconds: float, stop: Callable[[], bool]
) -> tuple[float, Strategy]:
    """(T, strategy) that no exchange of two unlike devices improves, or where `stop` ended it;
    never worse."""
    cell_of = np.empty(problem.devices, dtype=np.int64)
    for cell, members in enumerate(cells.members):
        cell_of[list(members)] = cell
    pairs = list(combinations(range(problem.devices), 2))
    order = np.random.default_rng(0).permutation(len(pairs)).tolist()
    best, tried, at = (seconds, strategy), 0, 0
    while tried < len(pairs) and not stop():
        a, b = pairs[order[at]]
        at, tried = (at + 1) % len(pairs), tried + 1
        placement = best[1].placement.ravel().copy()
        if cell_of[placement[a]] == cell_of[placement[b]]:
            continue
        placement[[a, b]] = placement[[b, a]]
        placed = place(problem, strategy.configuration, placement.reshape(strategy.placement.shape))
        cut = envelope_cut(placed)
        if cut is None or not placed.fits(cut) or (price := placed.seconds(cut)) >= best[0]:
            continue
        best, tried = (price, Strategy(strategy.configuration, placed.placement, cut)), 0
    return best
