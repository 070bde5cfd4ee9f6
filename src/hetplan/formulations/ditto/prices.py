"""Lagrangian bound of an interval of θ: devices are priced, what remains is a path over layers.

For any prices λ >= 0 per device of each kind, T is at least the least (cost + λ · devices used)
over templates without limits of devices, less λ · what there is (Lemma 3 of docs/method-ditto.md).
The path's costs from the front also bound what is still to be paid for a part of a template.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.ditto.intervals import Arcs, Charge, Space
from hetplan.formulations.ditto.problem import Floats, Ints, Stages
from hetplan.solvers.run import Run


@kernel
def cheapest_fronts(
    first: Ints, end: Ints, before: Ints, after: Ints, kind: Ints, size: Ints, cost: Floats,
    prices: Floats, front: Floats, arc: Ints, used: Ints,
) -> None:  # fmt: skip
    """Fill front, arc [M, 2, L + 1]: the least cost of covering [0, b), and the last arc of it.

    In phase 1 the part behind b holds k*, in phase 0 the front must. With M = 1 the stages are not
    counted, else row m holds fronts of at most m stages. Arcs are sorted by their end. used [K]:
    the devices of the front of all layers, in phase 0.
    """
    rows, phases, ends = front.shape
    for m in range(rows):
        fewer = max(m - 1, 0)
        for phase in range(phases):
            for b in range(ends):
                front[m, phase, b] = np.inf if m == 0 else front[fewer, phase, b]
                arc[m, phase, b] = -1 if m == 0 else arc[fewer, phase, b]
        front[m, 1, 0] = 0.0
        if m == 0 and rows > 1:
            continue
        for i in range(len(cost)):
            paid = cost[i] + prices[kind[i]] * size[i]
            value = front[fewer, after[i], first[i]] + paid
            if value < front[m, before[i], end[i]]:
                front[m, before[i], end[i]] = value
                arc[m, before[i], end[i]] = i
    for k in range(len(used)):
        used[k] = 0
    m, i = rows - 1, arc[rows - 1, 0, ends - 1]
    while i >= 0:
        used[kind[i]] += size[i]
        m = max(m - 1, 0)
        i = arc[m, after[i], first[i]]


@dataclass(frozen=True)
class CuttingPlanes:
    """How hard the best prices are sought."""

    most: int = 40  # paths per interval and way of charging
    near: float = 1e-4  # the bound may stay so far below the best, as a share of the threshold


@dataclass(frozen=True)
class Priced:
    """The best prices found for an interval and one way of charging it."""

    arcs: Arcs
    costs: Floats  # [arcs] what the stages pay, without devices
    prices: Floats  # [K] seconds per device
    front: Floats  # [M, 2, L + 1] as in `cheapest_fronts`, with devices
    bound: float  # infinite where no template has its slowest stage in the interval
    # Stages of paths that were met and keep to the devices.
    met: list[Stages]


def best_prices(
    space: Space, arcs: Arcs, charge: Charge, threshold: float, planes: CuttingPlanes, run: Run
) -> Priced:
    """The best prices, by cutting planes (Kelley 1960); those that reach `threshold` suffice.

    For given prices the cheapest path is a line: paths keep to it for all prices, so that the bound
    is the least of all lines. The prices tried next are those at which the least of the lines met
    so far is highest. Raises `Stopped` where the run should stop.
    """
    p = space.problem
    rows = p.micro_batches + 1 if space.limited else 1
    costs = arcs.costs(charge)
    front = np.empty((rows, 2, p.layers + 1))
    arc, used = np.empty(front.shape, dtype=np.int64), np.empty(len(p.kinds), dtype=np.int64)
    network = arcs.first, arcs.end, arcs.before, arcs.after
    options = p.option_kind[arcs.option], p.option_devices[arcs.option]

    def bounded(prices: Floats) -> float:
        cheapest_fronts(*network, *options, costs, prices, front, arc, used)
        return float(front[-1, 0, -1] - prices @ space.devices)

    unit = min(threshold, space.most_seconds) or 1.0
    lines, met = _Lines(len(used)), list[Stages]()
    best, chosen, current = -np.inf, np.zeros(len(used)), np.zeros(len(used))
    for _ in range(planes.most):
        run.check()
        bound = bounded(current)
        if bound > best:
            best, chosen = bound, current
        if bound >= threshold or np.isinf(bound):
            break
        slope = used - space.devices
        if (slope <= 0).all():
            met.append(_stages(arcs, arc))
        highest = lines.add((bound - float(slope @ current)) / unit, slope)
        if highest is None or highest[0] * unit - best < planes.near * unit:
            break
        current = highest[1] * unit
    return Priced(arcs, costs, chosen, front, bounded(chosen), met)


def _stages(arcs: Arcs, arc: Ints) -> Stages:
    """The path that `cheapest_fronts` found, first stage first."""
    stages: Stages = []
    row, i = len(arc) - 1, int(arc[-1, 0, -1])
    while i >= 0:
        stages.append((int(arcs.first[i]), int(arcs.end[i]), int(arcs.option[i])))
        row = max(row - 1, 0)
        i = int(arc[row, arcs.after[i], arcs.first[i]])
    return stages[::-1]


class _Lines:
    """The highest point below lines over prices from 0 to 1, as a linear programme."""

    def __init__(self, prices: int) -> None:
        self.highs = highspy.Highs()
        self.highs.silent()
        self.highs.setOptionValue("presolve", "off")
        for _ in range(prices):
            self.highs.addVar(0.0, 1.0)
        self.highs.addVar(-highspy.kHighsInf, 2.0)
        self.highs.changeColCost(prices, -1.0)
        self.columns = np.arange(prices + 1, dtype=np.int32)

    def add(self, constant: float, slope: Ints) -> tuple[float, Floats] | None:
        """Height and prices of the highest point with one more line; None where it is not found."""
        entries = np.append(-slope, 1.0)
        infinite = highspy.kHighsInf
        self.highs.addRow(-infinite, constant, len(entries), self.columns, entries)
        self.highs.run()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = np.array(self.highs.getSolution().col_value)
        return float(values[-1]), np.maximum(values[:-1], 0.0)
