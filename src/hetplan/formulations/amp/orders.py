"""First incumbents: devices in Megatron-like orders, and exchanges of devices.

An order lists the cells one after the other (classes permuted, the list rotated); positions are
filled from it with tensor ranks innermost or data ranks innermost. Most optimal placements on
clusters of whole nodes are of this kind. Where most devices have links of their own there are no
such orders: there, exchanges of two devices lead down to a placement that none improves. Degrees
and micro-batch stay. Each placement gets the best cut for its slowest pipeline (`envelope_cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice, permutations

import numpy as np

from hetplan.formulations.amp.cuts import envelope_cut
from hetplan.formulations.amp.problem import AmpProblem, Cells, Configuration, Ints
from hetplan.formulations.amp.strategy import Strategy, place
from hetplan.solvers.branch_and_bound import Incumbent
from hetplan.solvers.run import Run

MAX_PERMUTATIONS = 6
MAX_ROTATIONS = 4
# Orders tried on every configuration before anything is bounded.
FIRST_ORDERS = 3
# Exchanges take this share of what is left of the time limit, and so many seconds without one.
SHARE = 0.3
SECONDS = 10.0


def device_orders(cells: Cells) -> Iterator[Ints]:
    """Sequences [D] of all devices, cell by cell: classes permuted, rotated by whole cells."""
    kinds = [np.flatnonzero(cells.kind == k) for k in range(int(cells.kind[-1]) + 1)]
    for chosen in islice(permutations(kinds), MAX_PERMUTATIONS):
        order = np.concatenate(chosen)
        for turn in range(0, len(order), max(1, -(-len(order) // MAX_ROTATIONS))):
            turned = np.roll(order, -turn)
            yield np.array(
                [device for cell in turned for device in cells.members[cell]], dtype=np.int64
            )


def placements(cells: Cells, config: Configuration) -> Iterator[Ints]:
    """Device arrays [pp, dp, tp] of the orders, in three nestings, those alike in their cells only
    once."""
    pp, dp, tp = config.pipeline, config.data, config.tensor
    seen: set[bytes] = set()
    for order in device_orders(cells):
        for array in (
            order.reshape(pp, dp, tp),
            order.reshape(dp, pp, tp).transpose(1, 0, 2),
            order.reshape(pp, tp, dp).transpose(0, 2, 1),
        ):
            key = np.ascontiguousarray(cells.cell_of[array]).tobytes()
            if key not in seen:
                seen.add(key)
                yield np.ascontiguousarray(array)


def try_placement(
    problem: AmpProblem, config: Configuration, array: Ints
) -> tuple[float, Strategy] | None:
    """The placement with a good cut and its T in seconds; None where no cut fits in memory."""
    placed = place(problem, config, array)
    cut = envelope_cut(placed)
    if cut is None or not placed.fits(cut):
        return None
    return placed.seconds(cut), Strategy(config, array, cut)


def find_first(problem: AmpProblem, cells: Cells, incumbent: Incumbent[Strategy], run: Run) -> None:
    """First incumbents: a few orders of every configuration, and exchanges in the best where most
    devices are of a kind of their own."""
    for config in problem.configurations():
        try_orders(problem, cells, config, incumbent, run, FIRST_ORDERS)
    best = incumbent.decision
    if best is not None and 2 * cells.count > problem.devices:
        part = run.part(time_limit=min(SECONDS, SHARE * run.remaining))
        seconds = incumbent.objective
        incumbent.offer(*improved(problem, cells, best, seconds, lambda: part.should_stop))


def try_orders(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    incumbent: Incumbent[Strategy],
    run: Run,
    most: int | None = None,
) -> None:
    """Incumbents from the orders of one configuration, the first `most` of them."""
    for array in islice(placements(cells, config), most):
        if run.cancelled or (run.should_stop and incumbent.decision is not None):
            return  # out of time, but never without a first decision
        found = try_placement(problem, config, array)
        if found is not None:
            incumbent.offer(*found)


def improved(
    problem: AmpProblem, cells: Cells, strategy: Strategy, seconds: float, stop: Callable[[], bool]
) -> tuple[float, Strategy]:
    """(T, strategy) that no exchange of two unlike devices improves, or where `stop` ended it;
    never worse.

    Pairs come in random order from a fixed seed, each improvement is taken at once.
    """
    cell_of = cells.cell_of
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
        swapped = placement.reshape(strategy.placement.shape)
        found = try_placement(problem, strategy.configuration, swapped)
        if found is not None and found[0] < best[0]:
            best, tried = found, 0
    return best
