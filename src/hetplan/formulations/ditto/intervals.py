"""Intervals of θ, the time of the slowest stage, and what their templates cost at least.

Legend  L layers, K kinds of devices, R options (kind, group size), as in `problem`
        θ       seconds of the slowest stage k*
        phase   0 behind k*, 1 from k* on to the front: layers are covered from the last to the
                first, and a part of a template that covers [a, L) is in phase 1 if it holds k*

Lemma 1. T = N_b θ + sum of t over stages in front of k* + sum of (2 t - θ) over stages behind it.
Stages in front occur in T1 only, those behind in T1 and T3. k* occurs once in T1, once in T3 and
N_b - S + k* - 1 times in T2, that is N_b less the number of stages behind it.

A stage of layers [a, b) is an arc: it leads from a part that covers [b, L) to one that covers
[a, L). By Lemma 1 it owes t in front of k*, N_b t if it is k*, 2 t - θ behind. For θ in [low, high]
a stage behind pays 2 t - credit, and k* itself base + rate t: `Charge` says why that is never too
much (Lemma 2).

Lemma 3, prices. For any λ >= 0 per device of each kind, T is at least the least (cost + λ · devices
used) over templates without limits of devices, less λ · what there is: a template uses no more than
there is, and dropping the limits only enlarges the set. Without limits a template is a path over
layers and phases.

Lemma 4. A part of a template can be left out where its cost, λ · its devices and the cheapest front
with prices, less λ · all devices, reach the incumbent: with prices, a front costs at most λ · (the
devices that are left) more than without.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import highspy
import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.ditto.problem import TIE, DittoProblem, Floats, Ints
from hetplan.solvers import highs
from hetplan.solvers.run import Options, Run


@dataclass(frozen=True)
class Charge:
    """The seconds that stages are charged in an interval [low, high].

    Truly a stage behind k* owes 2 t - θ, at most A = S_max - 1 of them, and k* owes N_b θ, θ = t.
    With credit `low` each of them pays θ - low too much, A (θ - low) at most, which k* pays less:
    (N_b - A) t + A low. The sum is at most T, and it is T where low = high.
    """

    credit: float  # a stage behind k* pays 2 t - credit
    base: float
    rate: float  # k* pays base + rate t


@dataclass(frozen=True)
class Arcs:
    """The stages that an interval allows, sorted by their end b, then by their first layer a."""

    first: Ints  # a
    end: Ints  # b
    option: Ints
    seconds: Floats  # t
    before: Ints  # phase of the part [b, L)
    after: Ints  # phase of the part [a, L)
    behind: Ints  # most stages that memory allows behind it
    of_end: Ints  # [L + 2] the arcs that end at b are of_end[b] .. of_end[b + 1] - 1

    def costs(self, charge: Charge) -> Floats:
        """[arcs] what the stages pay."""
        behind = 2 * self.seconds - charge.credit
        peak = charge.base + charge.rate * self.seconds
        return np.where(self.before == 1, self.seconds, np.where(self.after == 0, behind, peak))


class Space:
    """Tables and candidates that all intervals of one problem share."""

    # Tables over vectors of devices are only made up to this size.
    MOST_VECTORS = 200_000

    def __init__(self, problem: DittoProblem) -> None:
        self.problem = p = problem
        # Whether the number of stages is limited by micro-batches, and whether it matters at all.
        self.limited = min(p.layers, int(p.devices.sum())) > p.micro_batches
        self.counted = self.limited or p.has_memory
        # More devices than layers times the largest group are of no use.
        self.devices = np.minimum(p.devices, p.layers * int(p.option_devices.max(initial=0)))

    @cached_property
    def candidates(self) -> Floats:
        """All stage times, ascending and distinct: θ is one of them."""
        return np.unique(self.problem.time[np.isfinite(self.problem.time)])

    @cached_property
    def most_seconds(self) -> float:
        """More than T of any template."""
        p = self.problem
        return (p.micro_batches + 2 * p.layers) * float(p.time[:, 0, -1].max())

    @cached_property
    def most_behind(self) -> Ints:
        """[R, L + 1, L + 1] how many stages memory allows behind a stage [a, b), -1 for none."""
        p = self.problem
        ends = np.arange(p.layers + 1)
        behind = np.full(p.time.shape, -1, dtype=np.int64)
        for stages in range(1, p.most_stages + 1):
            behind += p.last_in_memory(stages)[:, :, None] >= ends
            if not p.has_memory:
                return behind + p.most_stages - 1
        return behind

    def charge(self, low: float) -> Charge:
        """The charge of stages in an interval that begins at `low`."""
        behind = self.problem.most_stages - 1
        return Charge(low, behind * low, float(self.problem.micro_batches - behind))

    def arcs(self, low: float, high: float) -> Arcs:
        """The stages of templates with θ in [low, high].

        Behind k* a stage may tie with it, so its window reaches a tie further than in front.
        """
        seconds = self._by_end
        behind = seconds.ravel() <= high * (1 + TIE)
        ahead = seconds.ravel() <= high
        masks = (behind, ahead & (seconds.ravel() >= low), ahead)
        groups = [np.flatnonzero(mask) for mask in masks]
        lengths = [len(numbers) for numbers in groups]
        numbers = np.concatenate(groups)
        order = np.argsort(numbers, kind="stable")
        end, first, option = np.unravel_index(numbers[order], seconds.shape)
        return Arcs(
            first,
            end,
            option,
            self.problem.time[option, first, end],
            np.repeat([0, 0, 1], lengths)[order],
            np.repeat([0, 1, 1], lengths)[order],
            self.most_behind[option, first, end],
            np.searchsorted(end, np.arange(self.problem.layers + 2)),
        )

    @cached_property
    def _by_end(self) -> Floats:
        """[L + 1, L + 1, R] seconds of stages by end, first layer and option; +inf where memory
        does not allow them."""
        allowed = np.where(self.most_behind >= 0, self.problem.time, np.inf)
        return np.ascontiguousarray(allowed.transpose(2, 1, 0))

    def reach(self, high: float) -> Ints | None:
        """[n_1 + 1, ..., n_K + 1] the last layer that stages from the first layer on can reach.

        They take at most so many devices of each kind, last at most `high` and a tie, and need as
        little memory as they can, so that the result is never too small. None where the table
        would be too large.
        """
        p, shape = self.problem, self.devices + 1
        if np.prod(shape.astype(float)) > self.MOST_VECTORS:
            return None
        allowed = (self.most_behind >= 0) & (p.time <= high * (1 + TIE))
        ends = np.arange(p.layers + 1)
        # the last row: no stage, only fewer devices
        last = np.concatenate([ends + allowed.sum(axis=2), ends[None]])
        reach = np.zeros(int(shape.prod()), dtype=np.int64)
        for vectors, fewer, option in self._levels:
            np.maximum.at(reach, vectors, last[option, reach[fewer]])
        return reach.reshape(shape)

    @cached_property
    def _levels(self) -> list[tuple[Ints, Ints, Ints]]:
        """Vectors of devices by their sum, each with the vector that it has behind an option."""
        p, shape = self.problem, self.devices + 1
        coords = np.indices(shape.tolist()).reshape(len(shape), -1)
        strides = np.array([int(shape[k + 1 :].prod()) for k in range(len(shape))])
        kinds = np.append(p.option_kind, np.arange(len(shape)))
        sizes = np.append(p.option_devices, np.ones(len(shape), dtype=np.int64))
        options = np.append(np.arange(p.options), np.full(len(shape), p.options))
        number, vectors = np.nonzero(coords[kinds] >= sizes[:, None])
        level = coords.sum(axis=0)[vectors]
        order = np.argsort(level, kind="stable")
        parts = np.searchsorted(level[order], np.arange(1, level.max(initial=0) + 2))
        return [
            (
                vectors[i],
                vectors[i] - sizes[number[i]] * strides[kinds[number[i]]],
                options[number[i]],
            )
            for i in np.split(order, parts)[1:-1]
        ]

    def least_theta(self) -> int | None:
        """The number of a candidate that no template's θ is below; None: there is no template.

        Reach grows with θ, so it is found by bisection.
        """
        first = bisect_left(self.candidates, True, key=self._reaches)
        return first if first < len(self.candidates) else None

    def _reaches(self, high: float) -> bool:
        """Whether stages of `high` may reach the last layer (memory and counts may forbid it)."""
        reach = self.reach(high)
        return reach is None or int(reach.flat[-1]) == self.problem.layers


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
            value = front[fewer, after[i], first[i]] + (cost[i] + prices[kind[i]] * size[i])
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
    """The effort with which the best prices are sought."""

    most: int = 40  # paths per interval and way of charging
    near: float = 1e-4  # the bound may stay so far below the best, as a share of the threshold


@dataclass(frozen=True)
class Priced:
    """The best prices found for an interval."""

    arcs: Arcs
    costs: Floats  # [arcs] what the stages pay, without devices
    prices: Floats  # [K] seconds per device
    front: Floats  # [M, 2, L + 1] as in `cheapest_fronts`, with devices
    bound: float  # infinite where no template has its slowest stage in the interval


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
    lines = _Lines(len(used), run.options)
    best, chosen, current = -np.inf, np.zeros(len(used)), np.zeros(len(used))
    for _ in range(planes.most):
        run.check()
        bound = bounded(current)
        if bound > best:
            best, chosen = bound, current
        if bound >= threshold or np.isinf(bound):
            break
        slope = used - space.devices
        highest = lines.add((bound - float(slope @ current)) / unit, slope)
        if highest is None or highest[0] * unit - best < planes.near * unit:
            break
        current = highest[1] * unit
    return Priced(arcs, costs, chosen, front, bounded(chosen))


class _Lines:
    """The highest point below lines over prices from 0 to 1, as a linear programme."""

    def __init__(self, prices: int, options: Options) -> None:
        self.highs = highs.instance(options)
        for _ in range(prices):
            self.highs.addVar(0.0, 1.0)
        self.highs.addVar(-highspy.kHighsInf, 2.0)
        self.highs.changeColCost(prices, -1.0)
        self.columns = np.arange(prices + 1, dtype=np.int32)

    def add(self, constant: float, slope: Ints) -> tuple[float, Floats] | None:
        """Height and prices of the highest point with one more line; None where it is not found."""
        entries = np.append(-slope, 1.0)
        self.highs.addRow(-highspy.kHighsInf, constant, len(entries), self.columns, entries)
        self.highs.run()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = np.array(self.highs.getSolution().col_value)
        return float(values[-1]), np.maximum(values[:-1], 0.0)
