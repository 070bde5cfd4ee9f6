"""First decisions: Megatron-like orders of the devices, each with a good cut; they cut off the models' search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetplan.formulations.amp.cuts import envelope_cut
from hetplan.formulations.amp.problem import AmpProblem, Configuration, Ints
from hetplan.formulations.amp.strategy import Strategy, place
from hetplan.solvers.run import Run


def first_strategy(
    problem: AmpProblem, orders: list[Ints], configuration: Configuration, run: Run
) -> tuple[float, Strategy] | None:
    """The best of the orders for one configuration, with its seconds; None where none fits the memory."""
    best: tuple[float, Strategy] | None = None
    for placement in placements(orders, configuration):
        if run.should_stop:
            break
        placed = place(problem, configuration, placement)
        cut = envelope_cut(placed)
        if cut is None or not placed.fits(cut):
            continue
        seconds = placed.seconds(cut)
        if best is None or seconds < best[0]:
            best = seconds, Strategy(configuration, placement, cut)
    return best


def device_orders(problem: AmpProblem, nodes: list[int]) -> list[Ints]:
    """Devices node by node, and type by type from slow to fast and from fast to slow; [D] each."""
    speed = np.array(
        [min(table[kind].sum() for table in problem.seconds.values()) for kind in problem.device_type]
    )
    node = np.array(nodes)
    return [np.lexsort(keys) for keys in ((speed, node), (node, speed), (node, -speed))]


def placements(orders: list[Ints], configuration: Configuration) -> Iterator[Ints]:
    """Each order folded with data ranks, then with stages changing faster; [pp, dp, tp], without repetitions."""
    pp, dp, tp = configuration.pipeline, configuration.data, configuration.tensor
    seen = set()
    for order in orders:
        for placement in (order.reshape(pp, dp, tp), order.reshape(dp, pp, tp).transpose(1, 0, 2)):
            key = placement.tobytes()
            if key not in seen:
                seen.add(key)
                yield np.ascontiguousarray(placement)
