"""First incumbents: devices laid out in Megatron-like orders, each with the best cut for its
slowest pipeline.

An order lists the cells one after the other (classes permuted, the list rotated); positions are
filled from it with tensor ranks innermost or data ranks innermost. Most optimal placements on
clusters of whole nodes are of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, permutations

import numpy as np

from hetplan.formulations.amp.cells import Cells
from hetplan.formulations.amp.cuts import envelope_cut
from hetplan.formulations.amp.problem import AmpProblem, Configuration, Ints
from hetplan.formulations.amp.strategy import Strategy, place

MAX_PERMUTATIONS = 6
MAX_ROTATIONS = 4


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
    cell_of = np.empty(sum(len(members) for members in cells.members), dtype=np.int64)
    for cell, members in enumerate(cells.members):
        cell_of[list(members)] = cell
    seen: set[bytes] = set()
    for order in device_orders(cells):
        for array in (
            order.reshape(pp, dp, tp),
            order.reshape(dp, pp, tp).transpose(1, 0, 2),
            order.reshape(pp, tp, dp).transpose(0, 2, 1),
        ):
            key = np.ascontiguousarray(cell_of[array]).tobytes()
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


def first_strategy(
    problem: AmpProblem, cells: Cells, config: Configuration, stopped: Callable[[], bool]
) -> tuple[float, Strategy] | None:
    """The best of the orders for one configuration, with its seconds; None where none fits in
    memory."""
    best: tuple[float, Strategy] | None = None
    for array in placements(cells, config):
        if stopped():
            break
        found = try_placement(problem, config, array)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best
