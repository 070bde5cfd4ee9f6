"""Lower bounds of a configuration from its single pipelines ("rows").

t is the time of a stage and e that of a transfer to the next stage, both for one of gas
micro-batches. zones.py defines zones and burdens.

For a cap θ on the stage time and a cap s on the synchronisation time let R(θ, s; k) be the cheapest
Σ t + Σ e of one pipeline that absorbs at least k of a burden. Let k be an even share of the burden.
Every decision whose slowest stage takes θa to θb and whose synchronisation takes sa to sb costs at
least sa + (gas − 1)·θa + R(θb, sb; k). Intervals of θ and of s are bisected where the bound is
least. evidence/speed/amp_search.md has the proofs.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.amp.cuts import middle_of
from hetplan.formulations.amp.layout import TensorGroups
from hetplan.formulations.amp.problem import (
    MEMORY_TOLERANCE,
    AmpProblem,
    Configuration,
    Floats,
    Ints,
)

# The tables have levels up to an even share of a burden and this much more. A pipeline that has to
# absorb more than the last level is treated as if it had to absorb only that (a relaxation).
SPARE = 1
# Rounding of prefix sums must not exclude stages that the caps allow. The sum of 4096 layers, the
# most of an instance, is exact to 5e-13.
SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Bisection:
    """The limits of sharpening the bound of a configuration. Further bisections take more time than
    they save."""

    most_intervals: int = 40  # bisections of the interval of the slowest stage's time
    interval_width: float = 1e-5  # width, as a share of the bound, that is not bisected any more
    halvings: int = 4  # halvings of the interval of the synchronisation time
    box_width: float = 1e-4  # width, as a share of the bound, that is not halved any more


@dataclass(frozen=True)
class SyncBox:
    """The decisions of a configuration whose synchronisation time lies in an interval."""

    low: float  # seconds, the least synchronisation time
    high: float  # seconds, the largest synchronisation time
    rows: float  # seconds that the pipelines cost at least, without synchronisation

    @property
    def bound(self) -> float:
        """Seconds that every decision of the box costs at least."""
        return self.low + self.rows


class Chain(NamedTuple):
    """The data of `complete`, for one pair of caps; L layers, Z zones."""

    window: Ints  # [pp, Z, L + 1] furthest end of stage j on zone z that starts at layer a
    # [Z, L + 1] least end from which on the data groups of a stage that starts at layer a must lie
    # in one cell; L + 1: no end is so far
    local: Ints
    dp: int  # number of pipelines
    prefix: Floats  # [Z, L + 1] `Zones.prefix`
    link: Floats  # [L + 1] bytes that are sent where a stage begins at layer l
    room: Ints  # [Z] `Zones.room`
    stay: Floats  # [Z] `Zones.stay`
    leave: Floats  # [Z, Z] `Zones.leave`
    base: Ints  # [Z + 1] `Zones.base`


@kernel
def complete(chain: Chain, weight: Ints, ahead: Floats, start: Floats, enter: Floats) -> None:
    """Compute the least cost of the last stages of a pipeline, for one burden, by a backward
    recursion over the stages.

    ahead[j, state, a, k] receives the least seconds of stages j, j + 1, … and of the links into
    them. The row state (`Zones.base`) is the zone of stage j - 1 and the number of groups for which
    its cell still has room; stage j begins at layer a; these stages absorb at least k. +inf where
    there are no such stages. start[k] receives the least seconds of a whole pipeline that absorbs
    at least k. A stage whose data groups must lie in one cell takes the room of dp groups there.

    weight: [Z] weight that a group of each zone absorbs. ahead: [pp + 1, S, L + 1, A]; on entry
    +inf, and behind the last stage 0 at layer L and level 0. start: [A], on entry +inf. enter:
    scratch [Z, most room + 1, A], the cost of stage j and later ones where stage j is on zone z and
    its cell has room for u groups before it.
    """
    pp, zones, width = chain.window.shape
    prefix, room, base = chain.prefix, chain.room, chain.base
    levels = len(start)
    for j in range(pp - 1, -1, -1):
        # the first stage begins at layer 0; any other leaves a layer to each stage from j on
        starts_end = 1 if j == 0 else width - (pp - j)
        for a in range(j, starts_end):
            enter[:] = np.inf
            for z in range(zones):
                limited = room[z] > 0
                for b in range(a + 1, chain.window[j, z, a] + 1):
                    t = prefix[z, b] - prefix[z, a]
                    groups_used = chain.dp if b >= chain.local[z, a] else 1  # of the cell's room
                    for u in range(1, max(1, room[z]) + 1):
                        if limited and groups_used > u:
                            continue
                        state = base[z]  # behind the stage; a zone without a limit has this one
                        if limited:
                            state += u - groups_used
                        for k in range(levels):
                            value = t + ahead[j + 1, state, b, max(0, k - weight[z])]
                            enter[z, u, k] = min(enter[z, u, k], value)
            for k in range(levels):
                if j == 0:
                    for z in range(zones):
                        start[k] = min(start[k], enter[z, max(1, room[z]), k])
                    continue
                for z in range(zones):
                    to_other_cell = np.inf
                    for y in range(zones):
                        if chain.leave[z, y] > 0:
                            link_seconds = chain.link[a] / chain.leave[z, y]
                            cost = link_seconds + enter[y, max(1, room[y]), k]
                            to_other_cell = min(to_other_cell, cost)
                    # stay is 0 in a cell of one device, and 0 / 0 is no number
                    link_inside = chain.link[a] / chain.stay[z] if chain.link[a] > 0 else 0.0
                    for u in range(max(1, room[z])):
                        entered = 1 if room[z] == 0 else u  # at u = 0 the cell is full: +inf
                        to_same_cell = link_inside + enter[z, entered, k]
                        ahead[j, base[z] + u, a, k] = min(to_other_cell, to_same_cell)


@dataclass(frozen=True)
class RowModel:
    """The data of the row bounds of one configuration with H burdens; `row_model` makes it."""

    groups: TensorGroups
    weight: Ints  # [H, Z] weight that a group of each zone absorbs
    cell_weight: Ints  # [H, K] weight of one device of the cell
    need: Ints  # [H] weight that all pipelines together absorb at least
    stage_values: Floats  # candidate times of the slowest stage, ascending, seconds
    sync_values: Floats  # candidate synchronisation times, ascending, seconds
    # (stage cap, synchronisation cap) -> `start` of the tables
    starts: dict[tuple[float, float], Floats] = field(default_factory=dict)

    @cached_property
    def share(self) -> Ints:
        """[H] weight that some pipeline absorbs at least."""
        return -(-self.need // self.groups.config.data)

    @cached_property
    def levels(self) -> int:
        """A, the number of levels of a burden in the tables: 0, 1, … up to the most that a pipeline
        can absorb or has to absorb."""
        most = self.groups.config.pipeline * self.weight.max(axis=1, initial=0)
        last_level = np.where(self.need > 0, np.minimum(most, self.share + SPARE), 0)
        return 1 + int(last_level.max())

    @cached_property
    def memory_window(self) -> Ints:
        """[pp, Z, L + 1] furthest end of stage j on zone z that starts at layer a and fits in
        memory (1F1B)."""
        groups, config = self.groups, self.groups.config
        capacity = groups.zones.capacity * config.tensor * (1 + MEMORY_TOLERANCE)  # [Z] of a group
        window = []
        for stages_left in range(config.pipeline, 0, -1):
            samples_alive = min(config.gas, stages_left) * config.micro_batch
            bytes_before = groups.states + samples_alive * groups.saved
            window.append([furthest(bytes_before, room) for room in capacity])
        return np.array(window)

    def tables(self, stage_cap: float, sync_cap: float) -> tuple[Floats, Floats]:
        """(ahead [H, pp + 1, S, L + 1, A], start [H, A]) of `complete` for every burden, in
        seconds.

        stage_cap: θ, seconds. sync_cap: s, seconds.
        """
        groups, zones = self.groups, self.groups.zones
        pp = groups.config.pipeline
        dp = groups.config.data
        width = len(groups.params)
        window = self.memory_window.copy()
        local = np.full(zones.prefix.shape, width)
        for z in range(len(zones.prefix)):
            ends = furthest(zones.prefix[z], stage_cap * SLACK)
            if dp > 1:  # otherwise nothing is synchronised, and `groups.sync` is 0
                # parameter bytes that data groups across cells, and in one cell, can synchronise
                across = sync_cap * SLACK / groups.sync * zones.sync_out[z]
                within = sync_cap * SLACK / groups.sync * zones.sync_in[z]
                local[z] = furthest(groups.params, across) + 1
                ends = np.minimum(ends, furthest(groups.params, max(across, within)))
            window[:, z] = np.minimum(window[:, z], ends)
        chain = Chain(
            window=window,
            local=local,
            dp=dp,
            prefix=zones.prefix,
            link=groups.link,
            room=zones.room,
            stay=zones.stay,
            leave=zones.leave,
            base=zones.base,
        )
        ahead = np.full((len(self.need), pp + 1, int(zones.base[-1]), width, self.levels), np.inf)
        ahead[:, pp, :, -1, 0] = 0.0
        start = np.full((len(self.need), self.levels), np.inf)
        enter = np.empty((len(zones.prefix), 1 + int(zones.room.max(initial=1)), self.levels))
        for h in range(len(self.need)):
            complete(chain, self.weight[h], ahead[h], start[h], enter)
        return ahead, start

    def start(self, stage_cap: float, sync_cap: float) -> Floats:
        """`start` of the tables, in a cache: a box is bounded and later searched under the same
        caps."""
        caps = stage_cap, sync_cap
        if caps not in self.starts:
            _, self.starts[caps] = self.tables(stage_cap, sync_cap)
        return self.starts[caps]

    def shared(self, start: Floats) -> float:
        """Seconds that the most expensive pipeline costs at least, since some pipeline absorbs an
        even share of each burden. start: [H, A] seconds, see `complete`."""
        level = np.minimum(self.share, self.levels - 1)  # [H]
        return float(start[np.arange(len(level)), level].max())


def row_model(groups: TensorGroups, *, straddle: bool = False) -> RowModel:
    """The row bound's data for one configuration. straddle: whether only decisions count in which
    at least one group straddles cells."""
    config, prefix = groups.config, groups.zones.prefix
    weight, cell_weight, need = groups.zones.weight, groups.cell_weight, groups.burdens
    if straddle:  # a further burden of 1, which any straddling group absorbs
        weight = np.vstack([weight, groups.zones.straddles])
        # no label search runs with this burden, so devices need no weight in it
        cell_weight = np.vstack([cell_weight, 0 * cell_weight[:1]])
        need = np.append(need, 1)
    first, end = np.triu_indices(prefix.shape[1], 1)  # first layer and end of every interval
    stage_seconds = prefix[:, end] - prefix[:, first]
    if config.gas > 1:
        stage_values = distinct(stage_seconds.ravel())
    else:  # the slowest stage costs nothing beside its own pass
        stage_values = np.array([stage_seconds.max()])
    stage_bytes = groups.params[end] - groups.params[first]
    bandwidths = np.unique(groups.cells.bandwidth[np.isfinite(groups.cells.bandwidth)])
    if config.data > 1 and bandwidths.size:
        sync_seconds = np.outer(stage_bytes * groups.sync, 1.0 / bandwidths)
        sync_values = distinct(sync_seconds.ravel())
    else:
        sync_values = np.zeros(1)
    return RowModel(
        groups=groups,
        weight=np.ascontiguousarray(weight),
        cell_weight=cell_weight,
        need=need,
        stage_values=stage_values,
        sync_values=sync_values,
    )


def quick_seconds(problem: AmpProblem, config: Configuration) -> float:
    """A weak lower bound of a configuration, in seconds, that is quick to compute.

    Each layer runs on its fastest device type. The slowest stage takes at least as long as the
    longest layer and as the average stage.
    """
    layer = problem.seconds[config.tensor, config.micro_batch].min(axis=0)
    slowest = max(float(layer.max()), float(layer.sum()) / config.pipeline)
    seconds = (config.gas - 1) * slowest + float(layer.sum())
    return seconds * (1 - 1e-12)  # rounding, as in SLACK, must not lift it above the optimum


def root_bound(model: RowModel, check: Callable[[], None]) -> float:
    """Seconds that every decision of the configuration costs at least; +inf where it has none.

    The bound is bisected less closely than in the search, because it only ranks configurations and
    closes the worst of them. check: raises where it is time to stop.
    """
    low, high = float(model.sync_values[0]), float(model.sync_values[-1])
    return low + bound_stages(model, high, np.inf, check, Bisection(interval_width=1e-3)).bound


def furthest(prefix: Floats, cap: float) -> Ints:
    """[L + 1] for each a the last b with prefix[b] - prefix[a] <= cap, up to rounding of prefix."""
    return np.searchsorted(prefix, prefix * (1 + 1e-15) + cap, side="right") - 1


def distinct(values: Floats, relative: float = 1e-12) -> Floats:
    """The distinct values, ascending. Of a run of values that each differ from the next only by
    rounding, the largest stays: as a cap it allows all of them."""
    ordered = np.unique(values)
    # 1e-300 joins 0 with values too small to have a relative difference
    differs_from_next = ordered[1:] > ordered[:-1] * (1 + relative) + 1e-300
    return ordered[np.r_[differs_from_next, True]]


@dataclass(frozen=True)
class StageIntervals:
    """The result of `bound_stages`."""

    bound: float  # seconds that the pipelines cost at least, without synchronisation
    # The intervals of the slowest stage's time that can beat the limit, ascending: numbers of the
    # first and the last candidate in `RowModel.stage_values`.
    intervals: tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """An interval of the slowest stage's time. Pieces are ordered by bound, then by number."""

    bound: float  # seconds that the pipelines cost at least, without synchronisation
    number: int  # number of the piece, in the order in which pieces are made
    first: int  # number of the first candidate time
    last: int  # number of the last candidate time
    start: Floats  # [H, A] seconds, Σ t + Σ e under the cap of the last candidate time


def bound_stages(
    model: RowModel,
    sync_cap: float,
    limit: float,
    check: Callable[[], None],
    bisection: Bisection = Bisection(),
) -> StageIntervals:
    """A lower bound on the cost of the pipelines where synchronisation takes at most `sync_cap`
    seconds, and the intervals of the slowest stage's time that can beat `limit`.

    The interval of the least bound is bisected, again and again. It alone decides the bound, so
    that bisection ends where this interval is too narrow.
    limit: seconds; decisions whose pipelines cost as much are not of interest. check: raises where
    it is time to stop.
    """
    waits = model.groups.config.gas - 1  # how often the slowest stage counts beside the sum
    values, numbers = model.stage_values, count()

    def piece(first: int, last: int, start: Floats) -> Piece:
        bound = model.shared(start + waits * values[first])
        return Piece(bound, next(numbers), first, last, start)

    last = len(values) - 1
    heap = [piece(0, last, model.start(float(values[last]), sync_cap))]
    for _ in range(bisection.most_intervals):
        if not heap or heap[0].bound >= limit:
            break
        check()
        least = heap[0]
        first, last = least.first, least.last
        span = waits * (values[last] - values[first])
        if first == last or span <= bisection.interval_width * least.bound:
            break
        heapq.heappop(heap)
        middle = middle_of(values, first, last)
        lower = piece(first, middle, model.start(float(values[middle]), sync_cap))
        upper = piece(middle + 1, last, least.start)  # it ends at the same cap
        for half in (lower, upper):
            # Some pipeline may absorb less than its share and have its slowest stage here, even
            # where not all pipelines can. So the cost at level 0 decides whether the half stays.
            if half.start[:, 0].max() + waits * values[half.first] < limit:
                heapq.heappush(heap, half)
    if not heap:
        return StageIntervals(limit, ())
    costs = [part.start + waits * values[part.first] for part in heap]
    # pipelines may have their slowest stages in different intervals, so the least counts by level
    bound = model.shared(np.minimum.reduce(costs))
    intervals = tuple(sorted((part.first, part.last) for part in heap))
    return StageIntervals(min(limit, bound), intervals)


def halves(
    model: RowModel,
    box: SyncBox,
    limit: float,
    check: Callable[[], None],
    bisection: Bisection = Bisection(),
) -> list[SyncBox]:
    """The two halves of a box; a narrow box stays whole. Synchronisation times with which no
    decision costs less than `limit` seconds are cut off.

    check: raises where it is time to stop.
    """
    values = model.sync_values
    first = int(np.searchsorted(values, box.low))
    end = np.searchsorted(values, min(box.high, limit - box.rows), side="right")
    last = max(first, int(end) - 1)
    if values[last] - values[first] <= bisection.box_width * box.bound:
        return [replace(box, high=float(values[last]))]
    middle = middle_of(values, first, last)
    high = float(values[middle])
    rows = bound_stages(model, high, limit - box.low, check, bisection).bound
    lower = SyncBox(box.low, high, rows)
    # `rows` holds for the upper half, too, since its cap is no higher than that of the box
    upper = SyncBox(float(values[middle + 1]), float(values[last]), box.rows)
    return [lower, upper]
