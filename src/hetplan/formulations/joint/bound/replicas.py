"""Whether a replica of a class may be as fast as T: (4) to (6) of the bound (driver.py)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from hetplan.formulations.joint.bound.path import (
    DURATIONS,
    OPEN,
    SOURCES,
    TOTAL,
    Ints,
    shortest,
)
from hetplan.formulations.joint.bound.tables import (
    ACROSS,
    HOME,
    OTHER,
    Homes,
    Passes,
    Relaxation,
    StageOption,
)
from hetplan.replays.arrays import Floats

# Forward passes before the first backward pass, for each later stage; without chunks. GPipe's last
# stage waits for all of them, so that none fills the waiting.
WARM_UP = {"interleaved-1f1b": 2, "1f1b": 1, "gpipe": 0}
# Passes in any order, backward passes whole or split; chunks in turn or on a V.
ANY_ORDER = "any order"

# Numbers of rows whose ratio is at most this share the seconds of the least of them.
ROWS_TOGETHER = 1.1


@dataclass(frozen=True)
class Parameters:
    """What the bound tries; every choice is valid."""

    # Numbers of devices by type that a path may count; of more, devices are charged by price. They
    # are counted only where a lump's numbers of samples differ by at most the factor `narrow`.
    states: int = 400
    narrow: float = 1.25
    # Costs of a replica's price, in times the seconds of its path.
    fees: tuple[float, ...] = (1.0, 0.3, 3.0, 10.0)
    # A path is asked for again while it grows by this share.
    least_growth: float = 0.003
    # With chunks: prices of a stage in seconds of a replica's average stage, and weights of its own
    # work, and of that of stages across nodes.
    stages: tuple[tuple[float, float, float], ...] = (
        (1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 3.0),
        (3.0, 0.0, 0.0), (1.0, 1.0, 3.0), (4.0, 4.0, 0.0),
    )  # fmt: skip
    # With chunks: pairs of the chunk that a stage's own passes are counted from (0: the first, 2:
    # from its first backward pass on) and the one that they are counted to (0: the first, 1: the
    # last, 2: what is joined behind them).
    turns: tuple[tuple[int, int], ...] = ((2, 0), (0, 2), (2, 1), (0, 0))
    # The widest intervals of a replica's samples, and of its micro-batches, as factors.
    width: float = 1.5
    lump: float = 1.2
    # Patterns of homes, at most; of more, none is told apart.
    patterns: int = 200
    # Attempts with prices; those in nodes without a home fall by the factor `discount`.
    prices: int = 5
    discount: float = 0.5
    # The share by which the first T is above the bound; it doubles with success. The bisection ends
    # at an interval of `least_rise`.
    rise: float = 0.03
    least_rise: float = 0.002
    # Sums that the paths of an attempt may compare; `more_effort` times as many once an attempt was
    # given up.
    effort: float = 1e8
    more_effort: float = 8.0
    # Nodes of HiGHS's tree for the whole programme over nodes.
    nodes: int = 200
    # Relative, taken off the bound.
    rounding: float = 1e-9


STANDARD = Parameters()


class Lump(NamedTuple):
    """Replicas whose micro-batches have `least` to `most` samples, and that take from `low` to
    `high` samples of an iteration."""

    least: int
    most: int
    low: int
    high: int

    @property
    def is_single(self) -> bool:
        """Whether all its replicas have the same micro-batches."""
        return self.least == self.most and self.low == self.high

    def halves(self) -> tuple["Lump", "Lump"]:
        """Two lumps that have all its replicas between them, by the wider of its intervals."""
        if self.high * self.least >= self.low * self.most and self.low < self.high:
            middle = (self.low + self.high) // 2
            return self._replace(high=middle), self._replace(low=middle + 1)
        middle = (self.least + self.most) // 2
        return self._replace(most=middle), self._replace(least=middle + 1)

    def fewest_samples(self, S: int) -> list[tuple[int, int]]:
        """(b, g) for every micro-batch size: the fewest samples with which the number of
        micro-batches is a multiple of S. Sizes without such a number are left out."""
        pairs = []
        for b in range(self.least, min(self.most, self.high) + 1):
            g = max(self.low, b)
            steps = -(-g // b)
            rounds = -(-steps // S) * S
            g = g if rounds == steps else b * (rounds - 1) + 1
            if g <= self.high:
                pairs.append((b, g))
        return pairs


class TooLong(Exception):
    """An attempt was given up because it would compare more sums than it may."""


@dataclass
class Effort:
    """Counts the sums that shortest paths compare, so that an attempt ends after the same number of
    them on every machine. limit: of one attempt. spent: in this attempt. fee, turn: the fee, and
    the turn and stage, that refuted the last class of replicas; they are tried first."""

    limit: float = math.inf
    spent: int = 0
    fee: float = 1.0
    turn: tuple[int, int] = (0, 0)

    def add(self, compared: int) -> None:
        """Count; raises TooLong above the limit."""
        self.spent += compared
        if self.spent > self.limit:
            raise TooLong


def ends(b: int, least: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(row groups, few, many) of a `StageOption`: of numbers of row groups that leave as many of b
    samples to the largest of them, the first and the last. Between them costs are at least linear
    in the price."""
    few = least
    while few <= most:
        rows = -(-b // few)
        many = min(most, (b - 1) // (rows - 1)) if rows > 1 else most
        yield from ((r, few, many) for r in sorted({few, many}))
        few = many + 1


def intervals(low: int, high: int, width: float) -> Iterator[tuple[int, int]]:
    """Intervals of whole numbers from `low` to `high`, each as wide as the factor allows."""
    while low <= high:
        last = min(max(low, int(low * width)), high)
        yield low, last
        low = last + 1


class Counts:
    """How many samples the passes of a replica have, at least, over all micro-batches b and numbers
    of samples g of `pairs`. last: samples of its last micro-batch, at least.

    With `cut` only micro-batches of b samples are counted: where the last one is smaller, its
    passes are left out.
    """

    def __init__(self, pairs: list[tuple[int, int]], *, cut: bool) -> None:
        self.b, g = np.array(pairs).T
        self.samples = g // self.b * self.b if cut else g
        self.all = float(self.samples.min())
        self.but_one = float((self.samples - self.b).min())
        self.last = 1
        if len(pairs) == 1:
            self.last = int(g[0] - (-(-g[0] // self.b[0]) - 1) * self.b[0])

    def behind(self, passes: float) -> float:
        """Samples behind so many passes of whole micro-batches."""
        return float(np.maximum(self.samples - passes * self.b, 0).min())


class Replicas:
    """A class of replicas, and the ways to hold a run of layers in them [J].

    prices [2, Q]: of a device in a home and in another node. pairs: (micro-batch, samples). whole:
    whether it is the only replica. cut: see `Counts`. chunks: whether stages have several; without
    them and with `cut` the way out is that of the last micro-batch that is counted. alike: how many
    equal replicas there are whose stages are single tensor groups (equal.py); 0: replicas and
    stages of any kind.
    """

    def __init__(
        self,
        of: Relaxation,
        homes: Homes,
        prices: Floats,
        pairs: list[tuple[int, int]],
        *,
        whole: bool,
        cut: bool,
        chunks: bool = False,
        effort: Effort | None = None,
        alike: int = 0,
    ) -> None:
        self.of, self.homes, self.prices, self.whole = of, homes, prices, whole
        self.counts, self.effort = Counts(pairs, cut=cut), effort or Effort()
        sizes = sorted({b for b, _ in pairs})
        types = range(len(of.types))
        # Another replica needs a device in each home; one alone has no layers in other nodes.
        self.home = np.array(homes.home) - (0 if whole else np.array(homes.nodes))
        self.other = np.array(homes.other)
        self.wholly = [max(n.devices for n in nodes) for nodes in of.nodes]
        if alike:
            ways = [StageOption(HOME, q, t, 1, 1, 1) for q, t in of.seconds if t <= self.home[q]]
        else:
            ways = list(self.all_ways(sizes[0]))
        self.ways = ways
        self.kinds = np.array([w.q if w.where != ACROSS else len(types) for w in ways], np.int64)
        self.sole = np.array([*(len(nodes) == 1 for nodes in of.nodes), False])
        cheapest = np.where(np.array((homes.home, homes.other)) > 0, prices, np.inf).min(axis=0)
        self.price = np.array([(*prices, cheapest)[w.where][w.q] * w.t * w.r for w in ways])
        self.table, self.waits = self.durations(pairs, cut=cut, chunks=chunks)
        alone = np.array([whole and w.where == HOME and w.few == 1 for w in ways], bool)
        # Of n ranks' ring 2 (n - 1) / n of the bytes leave a node.
        ranks = np.array(
            [w.few + (w.where == OTHER) if w.where != HOME else alike or 2 for w in ways]
        )
        rates = [of.joins[self.place_of_ring(w, alike), w.q, w.t] for w in ways]
        self.join = np.where(alone, 0.0, 2 - 2 / ranks) * rates
        self.full = np.array([0.0] * TOTAL + [self.counts.all] * 2)
        self.tail = 0.0 if whole else of.least_join * of.joined  # behind the last gradient

    def all_ways(self, b: int) -> Iterator[StageOption]:
        """Every way to hold a run of layers, for micro-batches of at least b samples."""
        of = self.of
        every = (
            (HOME, self.home, self.wholly),
            (OTHER, self.other * (not self.whole), self.wholly),
            (ACROSS, of.counts, of.counts),
        )
        for (where, counts, most), (q, t) in product(every, of.seconds):
            if where == ACROSS and len(of.nodes[q]) == 1:
                continue
            for row_groups in ends(b, 1 + (where == ACROSS), min(counts[q], most[q]) // t):
                yield StageOption(where, q, t, *row_groups)

    def place_of_ring(self, way: StageOption, alike: int) -> int:
        """Where the holders of a run's weights are that join them: where the run is held, or
        across nodes if so many equal replicas of the stage have more devices than a node."""
        return ACROSS if alike * way.t > self.wholly[way.q] else way.where

    def durations(
        self, pairs: list[tuple[int, int]], *, cut: bool, chunks: bool
    ) -> tuple[Floats, Floats]:
        """([6, J, L + 1] seconds of the layers before l, [3, 5, J] seconds of a message per byte)
        of the first micro-batch, the last one, and one sample on the average of all passes."""
        of, layers = self.of, len(self.of.data.layers)
        table = np.zeros((DURATIONS, len(self.ways), layers + 1))
        waits = np.zeros((3, SOURCES, len(self.ways)))
        first, largest = min(pairs)[0], max(pairs)[0]
        last = first if cut and not chunks else self.counts.last
        for j, w in enumerate(self.ways):
            # The fewest rows of the largest row group.
            rows = -(-first // w.r), -(-last // (w.r if cut and not chunks else w.many))
            for x, samples in enumerate((first, last)):
                table[2 * x : 2 * x + 2, j] = of.sums[w.q, w.t][rows[x] - 1]
                waits[x, :, j] = of.waits(w, samples, rows[x])
            passes: tuple[Passes, ...]
            if len(pairs) == 1 and not cut:
                # Behind any number of passes the average lies between that of all and of the last.
                whole = -(-pairs[0][1] // first) - 1
                most = ((whole, first, -(-first // w.many)), (1, last, rows[1]))
                passes = (most, most[1:])
            else:
                # All numbers of rows of the largest group, each with the most samples.
                lowest = -(-first // w.many) if cut else 1
                rows_of_all = intervals(lowest, -(-largest // w.many), ROWS_TOGETHER)
                passes = tuple(((1, min(n * w.many, largest), low),) for low, n in rows_of_all)
            table[TOTAL:, j] = of.averages(w.q, w.t, passes)
            waits[2, :, j] = of.average_waits(w, passes)
        return table, waits

    @cached_property
    def way(self) -> float:
        """Seconds of one micro-batch through all layers there and back, at least."""
        return float(self.prefix_seconds[0, -1] + self.prefix_seconds[3, -1])

    @cached_property
    def work(self) -> float:
        """Price and seconds of all passes, at least."""
        passes = np.tensordot(self.full, np.diff(self.table), axes=1)
        return float((self.price[:, None] * passes).min(axis=0).sum())

    @cached_property
    def prefix_seconds(self) -> Floats:
        """[4, L + 1] least seconds of the layers before l: of the first micro-batch and of the last
        one, forward and backward."""
        each = np.diff(self.table[:TOTAL]).min(axis=1).cumsum(axis=1)
        return np.concatenate([np.zeros((TOTAL, 1)), each], axis=1)

    def cases(self, seconds: float, C: int) -> list[tuple[int, float]]:
        """(changes between nodes, seconds) of plans with so many homes, where cards leave time.
        Weights that the last layer shares with the first one are in one home, to which the path
        returns, or they are joined through a card behind all else."""
        of, count = self.of, self.homes.total
        if count < 2:
            return [(0, seconds)]
        apart = C * count - 1, seconds - max(of.tied_ends / of.card - self.tail, 0.0)
        every = [(C * count, seconds), apart] if of.tied_ends else [apart]
        return [(H, limit) for H, limit in every if self.received(C, H) <= limit]

    def received(self, C: int, H: int) -> float:
        """Seconds for which the card of some home receives: in every round of chunks each sample
        enters each home, and its gradient comes back; once less where the path begins or ends."""
        cards = zip(self.of.cards, self.homes.nodes, strict=True)
        slow = sorted(rates[0] for rates, count in cards for _ in range(count))
        middle = slow[0 if C * len(slow) == H else 2 :]
        rate = min([slow[0] / (2 * C - 1), *(card / (2 * C) for card in middle)])
        return self.of.data.global_batch * self.of.least_sent / rate

    @cached_property
    def states(self) -> tuple[Ints, Ints]:
        """(numbers of devices [K, 2 Q], state with a run [K, J]) of a path without chunks. Devices
        by type: those in homes (0 where there are no others), and all."""
        most = np.ravel(np.stack([self.home * (self.other > 0), self.home + self.other], axis=1))
        used = np.zeros((len(self.ways), len(most)), np.int64)
        for j, (where, q, t, r, *_) in enumerate(self.ways):
            used[j, 2 * q : 2 * q + 2] = t * r * (where == HOME and self.other[q] > 0), t * r
        scale = np.cumprod([1, *(most[:0:-1] + 1)])[::-1]
        states = np.array(list(np.ndindex(*(most + 1))))
        fits = ((states[:, None] + used) <= most).all(axis=2)
        return states, np.where(fits, np.arange(len(states))[:, None] + used @ scale, -1)

    def chain_is_slower(
        self, schedule: str, seconds: float, P: float, tries: Parameters, *, exact: bool
    ) -> bool:
        """(4): whether no replica without chunks takes at most so many seconds on devices of price
        P at most. exact: whether devices are counted by type, too, where there are few."""
        exact = exact and self.is_small(tries)
        return all(
            self.no_path(schedule, H, limit, P, tries, exact=False)
            or (exact and self.no_path(schedule, H, limit, P, tries, exact=True))
            for H, limit in self.cases(seconds, 1)
        )

    def is_small(self, tries: Parameters) -> bool:
        """Whether a path may count devices by type."""
        sizes = (self.home * (self.other > 0) + 1) * (self.home + self.other + 1)
        return bool(math.prod(sizes.tolist()) <= tries.states)

    def no_path(
        self, schedule: str, H: int, limit: float, P: float, tries: Parameters, *, exact: bool
    ) -> bool:
        """(4), or (6), for such changes between nodes. exact: whether states are devices by type,
        otherwise they are numbers of stages."""
        J, any_order = len(self.ways), schedule == ANY_ORDER
        if exact:
            states, after = self.states
            behind, price = states[:, 1::2].sum(axis=1), self.worth(states)
        else:
            deepest = min(len(self.of.data.layers), int(sum(self.home) + sum(self.other)))
            behind, price = np.arange(deepest + 1), np.zeros(deepest + 1)
            after = np.minimum(behind + 1, deepest)[:, None] + np.zeros((1, J), np.int64)
        chosen = price <= P * (1 + 1e-9)
        ahead = WARM_UP.get(schedule, 0) * behind
        forward = [self.counts.behind(1 + passes) for passes in ahead.tolist()]
        caps = np.array([forward, [self.counts.but_one] * len(forward)]).T
        # GPipe's way through later stages is the last micro-batch's, others' the first one's.
        weights = np.zeros((1, DURATIONS, J))
        weights[0, [2 * (schedule == "gpipe"), 3]] = 1.0

        def least(path: float, fee: float, cost: float = 1.0) -> float:
            best = self.path(
                H, limit, path, weights * cost, caps, after, fee,
                ceiling=fee * P, ordered=not exact, any_order=any_order,
            )  # fmt: skip
            return float(best[chosen, H].min()) - fee * P

        if any_order:  # (6): a path of runs that are short enough, at the least price
            return least(0.0, 0.0 if exact else 1.0, 0.0) > 1e-9 * P
        path, value = 0.0, self.way
        while path < value * (1 - tries.least_growth) and value <= limit:
            path = value
            fees = sorted((*tries.fees, 0.0), key=lambda fee: fee != self.effort.fee)
            for fee in (0.0,) if exact else fees:
                value = max(value, least(path, fee * path / P))
                if value > limit:
                    self.effort.fee = fee
                    return True
        return value > limit or (not exact and least(path, 1.0, 0.0) > 1e-9 * P)

    def worth(self, states: Ints) -> Floats:
        """[K] the least price of so many devices."""
        home, every = states[:, ::2], states[:, 1::2]
        home = np.where(self.other > 0, home, every)
        others = np.where(self.home > 0, self.prices.min(axis=0), self.prices[1])
        return np.asarray(home @ self.prices[0] + (every - home) @ others)

    def path(
        self, H: int, limit: float, path: float, weights: Floats, caps: Floats, after: Ints,
        fee: float | Floats, join: float | Floats = 0.0, ceiling: float = math.inf,
        ordered: bool = False, any_order: bool = False,
    ) -> Floats:  # fmt: skip
        """[K, H + 1] of `shortest` from the first layer on. path: what one micro-batch takes.
        ceiling: of a path's cost above `limit`; dearer ones may be left out. any_order: (6), where
        only the way in and what is joined stand beside a stage's own passes."""
        way, (K, L) = self.prefix_seconds, (len(after), len(self.of.sent[0]))
        both = np.minimum(way[0], way[2]) + way[1]
        rest = both[-1] - both
        way_out, left = way[3] + self.tail, limit - path - self.tail
        if any_order:
            way_out, rest, left = np.zeros(L), np.zeros(L), limit
        before = np.full(L, -math.inf)
        if len(weights) == 1:
            before = self.least_costs(weights[0], caps.min(axis=0), fee / max(left, 1e-12 * limit))
            ceiling += limit * (1 + 1e-9)
            if before[-1] > ceiling:
                return np.full((K, H + 1), math.inf)
        before[-1] = ceiling
        slack = np.stack([limit - way[0], way_out, rest, np.full(L, left), before])
        joins = np.stack([self.join, join * self.price * self.join, fee * self.price])
        best = np.empty((L, len(self.of.types) + 1, SOURCES, K, H + 2))
        waits = self.waits
        if any_order and len(weights) > 1:  # no message is between two chunks at the turn of a V
            waits = np.where(np.isinf(waits), np.inf, 0.0)
        compared = shortest(
            self.kinds, self.sole, self.table, waits, joins, self.of.sent, weights,
            np.concatenate([caps, self.full[None, TOTAL:]]), slack, after, ordered, best,
        )  # fmt: skip
        self.effort.add(compared)
        return np.asarray(best[0, 0, OPEN, :, :-1])

    def least_costs(self, weights: Floats, cap: Floats, rate: float | Floats) -> Floats:
        """[L + 1] the least cost of the layers before l. weights [6, J]: of durations. cap [2]:
        samples that count in any state. rate: cost of a device's price and second, because the
        price of a run is at least its share of the seconds that are left."""
        charged = np.zeros_like(weights)
        charged[TOTAL:] = rate * self.price * cap[:, None]
        costs = ((weights + charged)[:, :, None] * np.diff(self.table)).sum(axis=0)
        return np.append(0.0, costs.min(axis=0).cumsum())

    def weights(self, P: float, S: int, C: int, first: int, final: int) -> Floats:
        """[S C + 1, 6, J] costs of runs of S stages of C chunks, by the number of runs behind.

        first: chunk that a stage's own passes are counted from, C: from its first backward pass.
        final: chunk that they are counted to."""
        counts, least = self.counts, float(self.price.min())
        v = np.arange(S * C)[::-1]
        c, s = v // S, v % S
        own = np.repeat(self.full[:, None], S * C, axis=1)
        others = np.zeros((DURATIONS, S * C))
        if first < C:
            own[TOTAL, c < first] = counts.behind(S)
            others[0] = np.where(c < first, P, (c == first) * (S - 1 - s) * least)
        else:
            begun = 2 * (S - s - 1) + (C - 1) * S + 1
            rounds, inside = np.divmod(begun, C * S)
            done = rounds * S + np.clip(inside - c * S, 0, S)
            own[TOTAL] = [counts.behind(passes) for passes in done.tolist()]
            others[0], others[1] = P, (c == C - 1) * s * least
        if final < C:
            own[TOTAL + 1, c < final] = counts.behind(S)
            others[3] = np.where(c < final, P, (c == final) * (S - 1 - s) * least)
        costs = own.T[:, :, None] * self.price + others.T[:, :, None]
        return np.concatenate([costs, costs[:1]])

    def chunks_are_slower(
        self,
        seconds: float,
        P: float,
        S: int,
        C: int,
        tries: Parameters,
        *,
        any_order: bool = False,
    ) -> bool:
        """(5), or (6): whether no replica of S stages of C chunks takes at most so many seconds."""
        runs = np.arange(S * C + 1)
        after = np.where(runs < S * C, runs + 1, -1)[:, None] + np.zeros_like(self.kinds)
        caps = np.zeros((len(runs), 2))
        ends = (0, C - 1, C)
        turns = [
            (self.weights(P, S, C, ends[first], ends[final]), float(final == 2))
            for first, final in (((0, 2),) if any_order else tries.turns)
        ]
        means = [sum(column) / len(turns) for column in zip(*turns, strict=True)]
        apart = self.kinds == len(self.of.types)

        def value(H: int, limit: float, turn: Sequence[Any], stage: Sequence[float]) -> float:
            (costs, join), fee = turn, self.work / P / C * stage[0]
            usage = stage[1] + stage[2] * apart
            costs = costs + self.full[:, None] * (usage * self.price)
            best = self.path(
                H, limit, -math.inf, costs, caps, after, fee - usage * limit / C, join + usage,
                any_order=any_order,
            )  # fmt: skip
            return float(best[-1, H] / P - fee * C + self.tail * (1 - join))

        numbers = list(product(range(len(turns) + 1), range(len(tries.stages))))

        def is_slower(H: int, limit: float) -> bool:
            for number in sorted(numbers, key=lambda number: number != self.effort.turn):
                turn, stage = (*turns, means)[number[0]], tries.stages[number[1]]
                if (apart.any() or not stage[2]) and value(H, limit, turn, stage) > limit:
                    self.effort.turn = number
                    return True
            return False

        # A V enters and leaves each home as often as a path without chunks.
        rounds = 1 if any_order else C
        return all(is_slower(H, limit) for H, limit in self.cases(seconds, rounds))
