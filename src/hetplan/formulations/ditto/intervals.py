"""Intervals of θ, the time of the slowest stage, and lower bounds on the templates in each.

Legend  L layers, K kinds of devices, R options (kind, group size), as in `problem`
        k*, θ   the slowest stage of a template and its seconds; N_b micro-batches
        t       seconds of a stage; T the objective T1 + T2 + T3 (`evaluate`)
        part    a template is built from the last layer to the first; its part [a, L) has the stages
                of the layers from a on; its front has the stages of the layers [0, a)
        phase   1 if a part has k*, 0 if its front has it

Lemma 1. T = N_b θ + sum of t over stages in front of k* + sum of (2 t - θ) over stages behind it.
T1 counts every stage once. T3 counts k* and the stages behind it once. T2 counts k*
N_b - S + k* - 1 times, so that T counts k* N_b times less once for each stage behind it.

A stage of layers [a, b) is an arc from a part [b, L) to a part [a, L). By Lemma 1 it costs t in
front of k*, N_b t if it is k*, and 2 t - θ behind k*. In an interval [low, high] of θ a stage
behind k* is charged 2 t - credit, and k* is charged base + rate t.

Lemma 2. A template is never charged more than T (`Charge`).

Lemma 3. For any prices λ >= 0 of a device of each kind, T is at least the least charge + λ · (the
devices used) over all templates without limits on devices, less λ · (the devices of the instance).
For a template uses no more devices than there are, and dropping the limits only enlarges the set.
Without limits a template is a path over layers and phases.

Lemma 4. A part of a template can be left out where its charge + λ · (its devices) + the least
charge with prices of a front, less λ · (all devices), reaches the incumbent. For with prices a
front costs at most λ · (the devices that are left) more than without.
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

# Seconds that an arc of a cutting plane counts towards the budget of a run.
PLANE_SECONDS = 2e-7


@dataclass(frozen=True)
class Charge:
    """The seconds that stages are charged in an interval [low, high] (Lemma 2).

    A stage behind k* costs 2 t - θ. With credit = low it is charged θ - low too much. At most
    A = S_max - 1 stages are behind k*, so that together they are charged at most A (θ - low) too
    much. k* costs N_b θ with θ = t, and is charged A (t - low) less: (N_b - A) t + A low. The sum
    of all charges is at most T, and it is T where low = θ.
    """

    credit: float  # seconds; a stage behind k* is charged 2 t - credit
    base: float  # seconds
    rate: float  # k* is charged base + rate t


@dataclass(frozen=True)
class Arcs:
    """The stages that an interval allows, sorted by their end b, then by their first layer a."""

    first: Ints  # [arcs] a
    end: Ints  # [arcs] b
    option: Ints  # [arcs] number of the option
    seconds: Floats  # [arcs] t
    before: Ints  # [arcs] phase of the part [b, L), to which the stage is added
    after: Ints  # [arcs] phase of the part [a, L), which has the stage
    behind: Ints  # [arcs] the most stages behind it with which it fits in memory
    of_end: Ints  # [L + 2] the arcs that end at b are of_end[b] .. of_end[b + 1] - 1

    def costs(self, charge: Charge) -> Floats:
        """[arcs] seconds that the stages are charged."""
        in_front = self.seconds
        behind = 2 * self.seconds - charge.credit
        peak = charge.base + charge.rate * self.seconds
        return np.where(self.before == 1, in_front, np.where(self.after == 0, behind, peak))


class Space:
    """Tables and candidates that all intervals of one problem share."""

    # Tables over vectors of devices are only made up to this size. Without
    # them the search only takes longer.
    MOST_VECTORS = 200_000

    def __init__(self, problem: DittoProblem) -> None:
        self.problem = p = problem
        # whether N_b is a limit on the number of stages beside layers and devices
        self.limited = min(p.layers, int(p.devices.sum())) > p.micro_batches
        # whether the number of stages of a part matters for its front
        self.counted = self.limited or p.has_memory
        # [K] devices; more than layers times the largest group are of no use
        self.devices = np.minimum(p.devices, p.layers * int(p.option_devices.max(initial=0)))

    @cached_property
    def candidates(self) -> Floats:
        """All stage times, ascending and distinct: θ is one of them."""
        return np.unique(self.problem.time[np.isfinite(self.problem.time)])

    @cached_property
    def most_seconds(self) -> float:
        """More than T of any template: no stage is slower than all layers on the slowest option."""
        p = self.problem
        return (p.micro_batches + 2 * p.layers) * float(p.time[:, 0, -1].max())

    @cached_property
    def most_behind(self) -> Ints:
        """[R, L + 1, L + 1] the most stages behind a stage [a, b) under an option with which it
        fits in memory; -1 where it does not fit even as the last stage."""
        p = self.problem
        ends = np.arange(p.layers + 1)
        behind = np.full(p.time.shape, -1, dtype=np.int64)
        for alive in range(1, p.most_stages + 1):  # micro-batches that the stage keeps in memory
            behind += p.last_in_memory(alive)[:, :, None] >= ends
            if not p.has_memory:  # every number fits that one fits
                return behind + p.most_stages - 1
        return behind

    def charge(self, low: float) -> Charge:
        """The charge of stages in an interval that begins at `low`."""
        behind = self.problem.most_stages - 1
        return Charge(low, behind * low, float(self.problem.micro_batches - behind))

    def arcs(self, low: float, high: float) -> Arcs:
        """The stages of templates with θ in [low, high].

        A stage behind k* may be slower than k* by `TIE`.
        """
        seconds = self._by_end.ravel()
        is_behind = seconds <= high * (1 + TIE)
        is_in_front = seconds <= high
        is_peak = is_in_front & (seconds >= low)
        behind, peak, in_front = map(np.flatnonzero, (is_behind, is_peak, is_in_front))
        lengths = [len(behind), len(peak), len(in_front)]
        places = np.concatenate([behind, peak, in_front])
        order = np.argsort(places, kind="stable")
        end, first, option = np.unravel_index(places[order], self._by_end.shape)
        return Arcs(
            first=first,
            end=end,
            option=option,
            seconds=self.problem.time[option, first, end],
            before=np.repeat([0, 0, 1], lengths)[order],
            after=np.repeat([0, 1, 1], lengths)[order],
            behind=self.most_behind[option, first, end],
            of_end=np.searchsorted(end, np.arange(self.problem.layers + 2)),
        )

    @cached_property
    def _by_end(self) -> Floats:
        """[L + 1, L + 1, R] seconds of stages by end, first layer and option; +inf where they do
        not fit in memory."""
        allowed = np.where(self.most_behind >= 0, self.problem.time, np.inf)
        return np.ascontiguousarray(allowed.transpose(2, 1, 0))

    def reach(self, high: float) -> Ints | None:
        """[n_1 + 1, ..., n_K + 1] for each vector of devices, the layers from the first on that
        stages on at most these devices can cover.

        No stage is slower than `high` by more than `TIE`. Every stage counts as the last one, with
        the least activations, so that no result is too small. None where the table would be too
        large.
        """
        p, shape = self.problem, self.devices + 1
        if np.prod(shape.astype(float)) > self.MOST_VECTORS:
            return None
        allowed = (self.most_behind >= 0) & (p.time <= high * (1 + TIE))
        begins = np.arange(p.layers + 1)
        # [R + 1, L + 1] the furthest end of a stage by option and first layer; in the last row
        # there is no stage. Time and memory grow with the end, so that the allowed ends follow the
        # first layer without a gap: there are as many as the longest allowed stage has layers.
        furthest = np.concatenate([begins + allowed.sum(axis=2), begins[None]])
        reach = np.zeros(int(shape.prod()), dtype=np.int64)
        for vectors, fewer, option in self._levels:
            np.maximum.at(reach, vectors, furthest[option, reach[fewer]])
        return reach.reshape(shape)

    @cached_property
    def _levels(self) -> list[tuple[Ints, Ints, Ints]]:
        """(vectors, fewer, option) for each sum of devices from 1 on, ascending.

        Entry i says that vector fewer[i] of devices and a stage under option[i] use the devices of
        vectors[i]. Option R is no stage: one device of a kind stays unused. A vector of devices is
        its place in the table of `reach`.
        """
        p, shape = self.problem, self.devices + 1
        K = len(shape)
        coords = np.indices(shape.tolist()).reshape(K, -1)  # [K, vectors] devices of each vector
        strides = np.array([int(shape[k + 1 :].prod()) for k in range(K)])
        # the R options, then one unused device of each kind
        options = np.append(np.arange(p.options), np.full(K, p.options))
        kinds = np.append(p.option_kind, np.arange(K))
        sizes = np.append(p.option_devices, np.ones(K, dtype=np.int64))
        choice, vectors = np.nonzero(coords[kinds] >= sizes[:, None])
        fewer = vectors - sizes[choice] * strides[kinds[choice]]
        level = coords.sum(axis=0)[vectors]
        order = np.argsort(level, kind="stable")
        begins = np.searchsorted(level[order], np.arange(1, level.max(initial=0) + 2))
        # the first part, of no devices, and the last one, beyond all levels, are empty
        return [
            (vectors[entries], fewer[entries], options[choice[entries]])
            for entries in np.split(order, begins)[1:-1]
        ]

    def least_theta(self) -> int | None:
        """The number of a candidate that is a lower bound on θ of every template; None where there
        is no template.

        `reach` grows with θ, so that bisection finds the candidate.
        """
        first = bisect_left(self.candidates, True, key=self._reaches)
        return first if first < len(self.candidates) else None

    def _reaches(self, high: float) -> bool:
        """Whether `reach` covers all layers at θ = `high`, or has no table.

        Memory and the number of micro-batches may still forbid a template.
        """
        reach = self.reach(high)
        return reach is None or int(reach.flat[-1]) == self.problem.layers


@kernel
def cheapest_fronts(
    first: Ints, end: Ints, before: Ints, after: Ints, kind: Ints, size: Ints, cost: Floats,
    prices: Floats, front: Floats, arc: Ints, used: Ints,
) -> None:  # fmt: skip
    """Fill front [M, 2, L + 1], arc [M, 2, L + 1] and used [K].

    front[m, phase, b]: the least cost with prices of stages that cover the layers [0, b). In phase
    1 the part [b, L) has k*, in phase 0 the front must have it. With M = 1 stages are not counted;
    else row m has fronts of at most m stages. arc: the last stage of each front, -1 where there is
    none. used: the devices of the cheapest template, the front of all layers in phase 0. first,
    end, before, after: see `Arcs`, sorted by `end`. kind, size, cost: [arcs] of each stage.
    prices: [K] seconds per device.
    """
    rows, phases, ends = front.shape
    for m in range(rows):
        fewer = max(m - 1, 0)
        for phase in range(phases):
            for b in range(ends):
                front[m, phase, b] = np.inf if m == 0 else front[fewer, phase, b]
                arc[m, phase, b] = -1 if m == 0 else arc[fewer, phase, b]
        front[m, 1, 0] = 0.0
        if m == 0 and rows > 1:  # the fronts of no stages
            continue
        # With M = 1 the fronts are those of this row itself: they end earlier, and arcs are sorted
        # by their ends, so that these fronts are final.
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
    """The effort of `best_prices` for one interval."""

    most: int = 40  # paths at most
    near: float = 1e-4  # the bound may stay this far below the best, as a share of the threshold


@dataclass(frozen=True)
class Priced:
    """An interval with prices of devices, and the bound that they prove."""

    arcs: Arcs
    costs: Floats  # [arcs] seconds that the stages are charged, without the price of devices
    prices: Floats  # [K] λ, seconds per device
    front: Floats  # [M, 2, L + 1] the cheapest fronts, with the price of devices
    bound: float  # seconds; infinite where no template has its slowest stage in the interval


def best_prices(
    space: Space, arcs: Arcs, charge: Charge, threshold: float, planes: CuttingPlanes, run: Run
) -> Priced:
    """The best prices, by cutting planes (Kelley 1960), or prices whose bound reaches `threshold`.

    The bound of one path is an affine function of the prices, called its line. The bound of the
    interval is the least of the lines of all paths. The prices tried next are those at which the
    least of the lines met so far is highest. Raises `Stopped` where the run should stop.
    """
    p = space.problem
    rows = p.micro_batches + 1 if space.limited else 1
    costs = arcs.costs(charge)
    front = np.empty((rows, 2, p.layers + 1))
    arc, used = np.empty(front.shape, dtype=np.int64), np.empty(len(p.kinds), dtype=np.int64)
    network = arcs.first, arcs.end, arcs.before, arcs.after
    options = p.option_kind[arcs.option], p.option_devices[arcs.option]

    def bounded(prices: Floats) -> float:
        """The interval's bound at these prices (Lemma 3). Fills front, arc and used."""
        cheapest_fronts(*network, *options, costs, prices, front, arc, used)
        return float(front[-1, 0, -1] - prices @ space.devices)

    unit = min(threshold, space.most_seconds) or 1.0  # any unit where layers take no time
    lines = _Lines(len(used), run.options)
    best = -np.inf
    chosen = np.zeros(len(used))
    current = np.zeros(len(used))
    for _ in range(planes.most):
        run.check(PLANE_SECONDS * len(arcs.option))
        bound = bounded(current)
        if bound > best:
            best, chosen = bound, current
        if bound >= threshold or np.isinf(bound):
            break
        slope = used - space.devices  # of the cheapest path's line
        constant = bound - float(slope @ current)
        highest = lines.add(constant / unit, slope)
        if highest is None:
            break
        height, prices = highest
        if height * unit - best < planes.near * unit:
            break
        current = prices * unit
    # once more, so that `front` is that of the chosen prices
    return Priced(arcs, costs, chosen, front, bounded(chosen))


class _Lines:
    """The highest point below all lines over prices from 0 to 1, as a linear programme.

    Any prices prove a bound, so that they may have a limit. Heights are limited to 2: a bound above
    1 unit reaches the threshold, or is above T of any template.
    """

    def __init__(self, prices: int, options: Options) -> None:
        self.highs = highs.instance(options)
        for _ in range(prices):
            self.highs.addVar(0.0, 1.0)
        self.highs.addVar(-highspy.kHighsInf, 2.0)
        self.highs.changeColCost(prices, -1.0)
        self.columns = np.arange(prices + 1, dtype=np.int32)

    def add(self, constant: float, slope: Ints) -> tuple[float, Floats] | None:
        """(height, prices) of the highest point with one more line; None where HiGHS has none."""
        entries = np.append(-slope, 1.0)
        self.highs.addRow(-highspy.kHighsInf, constant, len(entries), self.columns, entries)
        self.highs.run()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = np.array(self.highs.getSolution().col_value)
        return float(values[-1]), np.maximum(values[:-1], 0.0)
