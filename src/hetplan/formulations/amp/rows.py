"""Lower bounds of a configuration from its single pipelines ("rows").

For a cap s on the synchronisation and θ on the stage time let R(θ, s; k) be the cheapest Σ t + Σ e
of one pipeline that absorbs at least k of a burden (zones.py). Every decision with slowest stage
in (θa, θb] and synchronisation in [sa, sb] costs at least sa + (gas − 1)·θa + R(θb, sb; k), where k
is an even share of the burden. Intervals of θ and of s are bisected where the bound is least.
evidence/speed/amp_search.md has the proofs.
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

# How much beyond an even share of a burden the tables tell apart; a pipeline that has to absorb
# more is treated as if that were all (a relaxation).
SPARE = 1
# Rounding of prefix sums must not exclude what is allowed.
SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Bisection:
    """How far the bound of a configuration is sharpened: more takes more time than it saves."""

    # Bisections of the slowest stage's time, and relative width where they may end.
    most_intervals: int = 40
    interval_width: float = 1e-5
    # How often the synchronisation's time is halved, and relative width where that may end.
    halvings: int = 4
    box_width: float = 1e-4


@dataclass(frozen=True)
class SyncBox:
    """Decisions with synchronisation from `low` to `high` seconds, whose pipelines cost at least
    `rows` seconds."""

    low: float
    high: float
    rows: float

    @property
    def bound(self) -> float:
        """Every decision of the box costs at least this."""
        return self.low + self.rows


class Chain(NamedTuple):
    """What the cheapest completion of a pipeline depends on; Z zones, arrays as in `Zones`."""

    window: Ints  # [pp, Z, L + 1] furthest end of stage j on zone z that starts at layer a
    local: Ints  # [Z, L + 1] from this end on a stage's data groups must lie in one cell
    dp: int
    prefix: Floats
    link: Floats  # [L + 1] bytes
    room: Ints
    stay: Floats
    leave: Floats
    base: Ints


@kernel
def complete(chain: Chain, weight: Ints, ahead: Floats, start: Floats, enter: Floats) -> None:
    """Backward recursion over stages, for one burden.

    weight [Z]: what a group of each zone absorbs. Fills ahead [pp + 1, S, L + 1, A] (on entry +inf,
    and what the last stage leaves), start [A]: seconds of stages j.. and of the link into stage j,
    given the row state (zone and room left in the cell) of stage j - 1, the layers done, and how
    much is at least still to be absorbed; +inf where impossible. start: the whole pipeline.
    A stage whose data groups must lie in one cell takes the room of dp groups there.
    Scratch: enter [Z, most room + 1, A], stage j on zone z entered with u groups' room.
    """
    pp, zones, width = chain.window.shape
    prefix, room, base = chain.prefix, chain.room, chain.base
    levels = len(start)
    for j in range(pp - 1, -1, -1):
        for a in range(j, 1 if j == 0 else width - (pp - j)):
            enter[:] = np.inf
            for z in range(zones):
                for b in range(a + 1, chain.window[j, z, a] + 1):
                    t = prefix[z, b] - prefix[z, a]
                    use = chain.dp if b >= chain.local[z, a] else 1
                    for u in range(1, max(1, room[z]) + 1):
                        if room[z] > 0 and use > u:
                            continue
                        left = base[z] + (u - use if room[z] > 0 else 0)
                        for k in range(levels):
                            value = t + ahead[j + 1, left, b, max(0, k - weight[z])]
                            enter[z, u, k] = min(enter[z, u, k], value)
            for k in range(levels):
                if j == 0:
                    for z in range(zones):
                        start[k] = min(start[k], enter[z, max(1, room[z]), k])
                    continue
                for z in range(zones):
                    out = np.inf
                    for y in range(zones):
                        if chain.leave[z, y] > 0:
                            cost = chain.link[a] / chain.leave[z, y]
                            out = min(out, cost + enter[y, max(1, room[y]), k])
                    inside = chain.link[a] / chain.stay[z] if chain.link[a] > 0 else 0.0
                    for u in range(max(1, room[z])):
                        entered = 1 if room[z] == 0 else u  # at u = 0 the cell is full: +inf
                        ahead[j, base[z] + u, a, k] = min(out, inside + enter[z, entered, k])


@dataclass(frozen=True)
class RowModel:
    """The row bound of one configuration; H burdens."""

    groups: TensorGroups
    weight: Ints  # [H, Z] what a group of each zone absorbs
    cell_weight: Ints  # [H, K] weight of one device
    need: Ints  # [H] what all pipelines together absorb at least
    stage_values: Floats  # candidate times of the slowest stage, ascending
    sync_values: Floats  # candidate synchronisation times, ascending
    starts: dict[tuple[float, float], Floats] = field(default_factory=dict)  # by caps

    @cached_property
    def share(self) -> Ints:
        """[H] some pipeline absorbs at least this much."""
        return -(-self.need // self.groups.config.data)

    @cached_property
    def levels(self) -> int:
        """A: what the tables tell apart of a burden."""
        most = self.groups.config.pipeline * self.weight.max(axis=1, initial=0)
        return 1 + int(np.where(self.need > 0, np.minimum(most, self.share + SPARE), 0).max())

    @cached_property
    def memory_window(self) -> Ints:
        """[pp, Z, L + 1] furthest end of a stage that fits the zone's memory (1F1B)."""
        groups, config = self.groups, self.groups.config
        room = groups.zones.capacity * config.tensor * (1 + MEMORY_TOLERANCE)
        alive = [min(config.gas, left) for left in range(config.pipeline, 0, -1)]
        held = [
            groups.state_factor * groups.params + n * config.micro_batch * groups.saved
            for n in alive
        ]
        return np.array([[furthest(stage, bytes_) for bytes_ in room] for stage in held])

    def tables(self, stage_cap: float, sync_cap: float) -> tuple[Floats, Floats]:
        """(ahead [H, pp + 1, S, L + 1, A], start [H, A]) of `complete` under the caps, seconds."""
        groups, zones = self.groups, self.groups.zones
        pp, dp, width = groups.config.pipeline, groups.config.data, len(groups.params)
        window, local = self.memory_window.copy(), np.full(zones.prefix.shape, width)
        for z in range(len(zones.prefix)):
            ends = furthest(zones.prefix[z], stage_cap * SLACK)
            if dp > 1:
                across, within = (
                    sync_cap * SLACK / groups.sync * np.array([zones.sync_out[z], zones.sync_in[z]])
                )
                local[z] = furthest(groups.params, across) + 1
                ends = np.minimum(ends, furthest(groups.params, max(across, within)))
            window[:, z] = np.minimum(window[:, z], ends)
        chain = Chain(
            window,
            local,
            dp,
            zones.prefix,
            groups.link,
            zones.room,
            zones.stay,
            zones.leave,
            zones.base,
        )
        ahead = np.full((len(self.need), pp + 1, int(zones.base[-1]), width, self.levels), np.inf)
        ahead[:, pp, :, -1, 0] = 0.0
        start = np.full((len(self.need), self.levels), np.inf)
        enter = np.empty((len(zones.prefix), 1 + int(zones.room.max(initial=1)), self.levels))
        for h in range(len(self.need)):
            complete(chain, self.weight[h], ahead[h], start[h], enter)
        return ahead, start

    def start(self, stage_cap: float, sync_cap: float) -> Floats:
        """`start` of the tables, kept: a box is bounded and later searched under the same caps."""
        caps = stage_cap, sync_cap
        if caps not in self.starts:
            self.starts[caps] = self.tables(*caps)[1]
        return self.starts[caps]

    def shared(self, start: Floats) -> float:
        """Least t such that pipelines of cost t each can absorb every burden; start [H, A]."""
        at = np.minimum(self.share, self.levels - 1)
        return float(start[np.arange(len(at)), at].max())


def row_model(groups: TensorGroups, *, straddle: bool = False) -> RowModel:
    """The row bound's data; `straddle`: of decisions in which at least one group straddles
    cells."""
    config, prefix = groups.config, groups.zones.prefix
    weight, cell_weight, need = groups.zones.weight, groups.cell_weight, groups.burdens
    if straddle:  # one more burden, which no device has
        weight = np.vstack([weight, groups.zones.straddles])
        cell_weight = np.vstack([cell_weight, 0 * cell_weight[:1]])
        need = np.append(need, 1)
    pairs = np.triu_indices(prefix.shape[1], 1)
    sums = (prefix[:, None, :] - prefix[:, :, None])[:, *pairs]
    volumes = (groups.params[None, :] - groups.params[:, None])[pairs]
    speeds = np.unique(groups.cells.bandwidth[np.isfinite(groups.cells.bandwidth)])
    synchronised = config.data > 1 and speeds.size
    return RowModel(
        groups=groups,
        weight=np.ascontiguousarray(weight),
        cell_weight=cell_weight,
        need=need,
        stage_values=distinct(sums.ravel()) if config.gas > 1 else np.array([sums.max()]),
        sync_values=distinct(np.outer(volumes * groups.sync, 1.0 / speeds).ravel())
        if synchronised
        else np.zeros(1),
    )


def quick_seconds(problem: AmpProblem, config: Configuration) -> float:
    """A weak bound of a configuration in no time, from the fastest tables: the slowest stage takes
    at least as long as the largest layer and the average."""
    layer = problem.seconds[config.tensor, config.micro_batch].min(axis=0)
    slowest = max(float(layer.max()), float(layer.sum()) / config.pipeline)
    return ((config.gas - 1) * slowest + float(layer.sum())) * (1 - 1e-12)


def root_bound(model: RowModel, check: Callable[[], None]) -> float:
    """What every decision of the configuration costs at least, seconds; +inf where it has none."""
    low, most = float(model.sync_values[0]), float(model.sync_values[-1])
    return low + bound_stages(model, most, np.inf, check, Bisection(interval_width=1e-3)).bound


def furthest(prefix: Floats, cap: float) -> Ints:
    """[L + 1] the last b with prefix[b] - prefix[a] <= cap for each a, up to rounding of prefix."""
    return np.searchsorted(prefix, prefix * (1 + 1e-15) + cap, side="right") - 1


def distinct(values: Floats, relative: float = 1e-12) -> Floats:
    """The values ascending, those within rounding of a smaller one dropped in favour of the largest
    of them."""
    ordered = np.unique(values)
    keep = np.r_[ordered[1:] > ordered[:-1] * (1 + relative) + 1e-300, True]
    return ordered[keep]


@dataclass(frozen=True)
class StageIntervals:
    """Bound over all slowest-stage times, and the intervals of them that can beat the limit."""

    bound: float  # seconds, without synchronisation
    intervals: tuple[tuple[int, int], ...]  # first and last candidate stage time, ascending


def bound_stages(
    model: RowModel,
    sync_cap: float,
    limit: float,
    check: Callable[[], None],
    bisection: Bisection = Bisection(),
) -> StageIntervals:
    """Least cost of the pipelines (without synchronisation) when synchronisation is at most
    `sync_cap`.

    limit: costs of at least this are not of interest. check: raises where it is time to stop.
    """
    weight = model.groups.config.gas - 1
    values, numbers = model.stage_values, count()

    def piece(first: int, last: int, start: Floats) -> tuple[float, int, int, int, Floats]:
        return model.shared(start + weight * values[first]), next(numbers), first, last, start

    last = len(values) - 1
    heap = [piece(0, last, model.start(float(values[last]), sync_cap))]
    for _ in range(bisection.most_intervals):
        if not heap or heap[0][0] >= limit:
            break
        check()
        least, _, first, last, start = heap[0]
        span = weight * (values[last] - values[first])
        if first == last or span <= bisection.interval_width * least:
            break
        heapq.heappop(heap)
        middle = middle_of(values, first, last)
        lower = model.start(float(values[middle]), sync_cap)
        for part in ((first, middle, lower), (middle + 1, last, start)):
            # A pipeline that absorbs less than its share may end here although not all of them can.
            if part[2][:, 0].max() + weight * values[part[0]] < limit:
                heapq.heappush(heap, piece(*part))
    if not heap:
        return StageIntervals(limit, ())
    total = np.minimum.reduce([start + weight * values[first] for *_, first, _, start in heap])
    intervals = tuple(sorted((first, last) for *_, first, last, _ in heap))
    return StageIntervals(min(limit, model.shared(total)), intervals)


def halves(
    model: RowModel,
    box: SyncBox,
    limit: float,
    check: Callable[[], None],
    bisection: Bisection = Bisection(),
) -> list[SyncBox]:
    """The box in two, without what is no cheaper than `limit`; in one where it is narrow.

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
    return [
        SyncBox(box.low, high, rows),
        SyncBox(float(values[middle + 1]), float(values[last]), box.rows),
    ]
