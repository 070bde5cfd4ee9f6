"""First incumbents: devices laid out in Megatron-like orders, each with the best cut for its slowest pipeline.

An order lists the cells one after the other (classes permuted, the list rotated); positions are filled from it with
tensor ranks innermost or data ranks innermost. Most optimal placements on clusters of whole nodes are of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np

from hetplan.formulations.amp.exact.cells import Cells
from hetplan.formulations.amp.exact.cut import cut_chain
from hetplan.formulations.amp.exact.cut_kernels import memory_windows
from hetplan.formulations.amp.exact.layout import Layout
from hetplan.formulations.amp.problem import AmpProblem, Configuration, Floats, Ints

MAX_PERMUTATIONS = 6
MAX_ROTATIONS = 4


@dataclass(frozen=True)
class Placed:
    """A placement over cells with its cut. cells [pp, dp, tp]; ends [pp]; seconds: the true T."""

    seconds: float
    cells: Ints
    ends: Ints


def cell_orders(cells: Cells) -> Iterator[Ints]:
    """Sequences of all devices by cell: classes permuted, rotated by whole cells."""
    kinds = [np.flatnonzero(cells.kind == k) for k in range(int(cells.kind[-1]) + 1)]
    for chosen in islice(permutations(kinds), MAX_PERMUTATIONS):
        order = np.concatenate(chosen)
        for turn in range(0, len(order), max(1, -(-len(order) // MAX_ROTATIONS))):
            turned = np.roll(order, -turn)
            yield np.repeat(turned, cells.size[turned])


def placements(cells: Cells, config: Configuration) -> Iterator[Ints]:
    """Cell arrays [pp, dp, tp] of the orders, in three nestings, without repetitions."""
    pp, dp, tp = config.pipeline, config.data, config.tensor
    seen: set[bytes] = set()
    for order in cell_orders(cells):
        for array in (
            order.reshape(pp, dp, tp),
            order.reshape(dp, pp, tp).transpose(1, 0, 2),
            order.reshape(pp, tp, dp).transpose(0, 2, 1),
        ):
            key = np.ascontiguousarray(array).tobytes()
            if key not in seen:
                seen.add(key)
                yield np.ascontiguousarray(array)


def try_placement(problem: AmpProblem, layout: Layout, array: Ints, limit: float) -> Placed | None:
    """The placement with the best cut for the slowest group of each stage; None if not below `limit` seconds."""
    config, between = layout.config, layout.cells.bandwidth
    pp, dp, tp = array.shape
    upper = np.triu_indices(tp, 1)
    slowest = (
        between[array[..., upper[0]], array[..., upper[1]]].min(axis=2)
        if tp > 1
        else np.full((pp, dp), np.inf)
    )
    kinds: dict[tuple[tuple[int, ...], float], int] = {}
    prefix: list[Floats] = []
    number = np.empty((pp, dp), dtype=np.int64)
    seconds = problem.seconds[tp, config.micro_batch]
    ring = 2 * (tp - 1) / tp * config.micro_batch * problem.tensor
    for j, i in np.ndindex(pp, dp):
        types = tuple(sorted(set(layout.cells.type[array[j, i]].tolist())))
        key = (types, float(slowest[j, i]))
        if key not in kinds:
            kinds[key] = len(prefix)
            worst = seconds[list(types)].max(axis=0) + (ring / key[1] if tp > 1 else 0.0)
            prefix.append(np.r_[0.0, np.cumsum(worst)])
        number[j, i] = kinds[key]
    table = np.array(prefix)
    room = np.array([problem.capacity[list(types)].min() for types, _ in kinds])
    links = between[array[:-1], array[1:]].min(axis=2) if pp > 1 else np.full((0, dp), np.inf)
    pairs = np.triu_indices(dp, 1)
    ring_speed = (
        between[array[:, pairs[0], :], array[:, pairs[1], :]].min(axis=(1, 2))
        if dp > 1
        else np.full(pp, np.inf)
    )
    worst_kind = number[np.arange(pp), table[number, -1].argmax(axis=1)]
    link_seconds = np.zeros((pp, len(layout.link)))
    link_seconds[:-1] = layout.link[None, :] / links.min(axis=1)[:, None]
    first = memory_windows(
        pp,
        config.gas,
        config.micro_batch,
        tp,
        layout.params,
        layout.saved,
        layout.state_factor,
        room[number].min(axis=1),
    )
    cut = cut_chain(
        config.gas,
        table[worst_kind],
        link_seconds,
        sync=layout.sync / ring_speed,
        params=layout.params,
        first=first,
    )
    if cut is None:
        return None
    ends = np.array(cut.ends)
    starts = np.r_[0, ends[:-1]]
    stage = table[number, ends[:, None]] - table[number, starts[:, None]]
    rows = (config.gas - 1) * stage.max(axis=0) + stage.sum(axis=0)
    rows += (layout.link[ends[:-1], None] / links).sum(axis=0)
    total = float(
        rows.max() + ((layout.params[ends] - layout.params[starts]) * layout.sync / ring_speed).max()
    )
    return Placed(total, array, ends) if total < limit else None
