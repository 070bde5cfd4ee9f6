"""Whether a replica of a class may be as fast as T: (4) and (5) of the bound (driver.py)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from hetplan.formulations.joint.bound.path import OPEN, Ints, shortest
from hetplan.formulations.joint.bound.tables import (
    ACROSS,
    HOME,
    OTHER,
    Homes,
    Relaxation,
    StageOption,
)
from hetplan.replays.arrays import Floats

# Forward passes before the first backward pass, for each later stage; without chunks. GPipe's last
# stage waits for all of them, so that none fills the waiting. "any": of all schedules.
WARM_UP = {"any": 2, "gpipe": 0, "1f1b": 1, "interleaved-1f1b": 2}


@dataclass(frozen=True)
class Parameters:
    """What the bound tries; every choice is valid.

    states: numbers of devices by type that a path may count; of more, devices are charged by price.
    fees: for the price of a replica, in times the seconds of its path. stages: with chunks, prices
    of a stage in seconds of a replica's average stage, and weights of its own work, and of that of
    stages across nodes. turns: with chunks, pairs of the chunk that a stage's own passes are
    counted from (0: the first, 2: from its first backward pass on) and the one that they are
    counted to (0: the first, 1: the last, 2: what is joined behind them). width: of intervals of a
    replica's samples. patterns: of homes, at most; of more, none is told apart. rise: by which
    share the first attempt raises a bound; it doubles with success, and halves without down to
    `least_rise`. prices: attempts with them; those in other nodes fall by the factor `discount`.
    rounding: relative, taken off. nodes: of HiGHS's tree, for the whole programme over nodes."""

    states: int = 400
    fees: tuple[float, ...] = (1.0, 0.3, 3.0, 10.0)
    stages: tuple[tuple[float, float, float], ...] = (
        (1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 3.0),
        (3.0, 0.0, 0.0), (1.0, 1.0, 3.0), (4.0, 4.0, 0.0),
    )  # fmt: skip
    turns: tuple[tuple[int, int], ...] = ((2, 0), (0, 2), (2, 1), (0, 0))
    width: float = 1.5
    patterns: int = 200
    rise: float = 0.1
    least_rise: float = 0.002
    prices: int = 5
    discount: float = 0.5
    rounding: float = 1e-9
    nodes: int = 200


STANDARD = Parameters()


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


class Micro:
    """Micro-batches of b samples in replicas that take g samples: ways to hold a run [J]. prices
    [2, Q]: of a device in a home and in another node."""

    def __init__(self, of: Relaxation, homes: Homes, prices: Floats, b: int, g: int) -> None:
        self.of, self.homes, self.prices, self.g = of, homes, prices, g
        self.M = -(-g // b)
        sizes = b, g - (self.M - 1) * b
        whole, types = g == of.data.global_batch, range(len(of.types))
        # Another replica needs a device in each home; one alone has no layers in other nodes.
        self.home = np.array(homes.home) - (0 if whole else np.array(homes.nodes))
        self.other = np.array(homes.other)
        wholly = [max(n.devices for n in nodes) for nodes in of.nodes]
        every = (
            (HOME, self.home, wholly),
            (OTHER, self.other * (not whole), wholly),
            (ACROSS, of.counts, of.counts),
        )
        ways = self.ways = [
            StageOption(where, q, t, *row_groups)
            for (where, counts, most), (q, t) in product(every, of.seconds)
            if where != ACROSS or len(of.nodes[q]) > 1
            for row_groups in ends(b, 1 + (where == ACROSS), min(counts[q], most[q]) // t)
        ]
        self.kinds = np.array([w.q if w.where != ACROSS else len(types) for w in ways], np.int64)
        cheapest = np.where(np.array((homes.home, homes.other)) > 0, prices, np.inf).min(axis=0)
        self.price = np.array([(*prices, cheapest)[w.where][w.q] * w.t * w.r for w in ways])
        rows = [[-(-sizes[0] // w.r) for w in ways], [-(-sizes[1] // w.many) for w in ways]]
        table = np.array(
            [[of.sums[w.q, w.t][n - 1] for w, n in zip(ways, each, strict=True)] for each in rows]
        )
        self.table: Floats = table.transpose(2, 0, 1, 3).reshape(4, len(ways), -1)
        self.waits = np.array(
            [
                np.transpose([of.waits(w, n, k) for w, k in zip(ways, each, strict=True)])
                for n, each in zip(sizes, rows, strict=True)
            ]
        )
        alone = np.array([whole and w.where == HOME and w.few == 1 for w in ways], bool)
        # Of n ranks' ring 2 (n - 1) / n of the bytes leave a node.
        ranks = np.array([w.few + (w.where == OTHER) if w.where != HOME else 2 for w in ways])
        self.join = np.where(alone, 0.0, 2 - 2 / ranks) * [of.joins[w[:3]] for w in ways]
        self.full = np.array([self.M - 1.0, 1.0, self.M - 1.0, 1.0])
        self.tail = 0.0 if whole else of.least_join * of.joined  # behind the last gradient

    @cached_property
    def work(self) -> float:
        """Price and seconds of all passes of the replica, alone."""
        passes = np.tensordot(self.full, np.diff(self.table), axes=1)
        return float((self.price[:, None] * passes).min(axis=0).sum())

    @cached_property
    def prefix_seconds(self) -> Floats:
        """[4, L + 1] least seconds of one micro-batch through the layers before l."""
        each = np.diff(self.table).min(axis=1).cumsum(axis=1)
        return np.concatenate([np.zeros((4, 1)), each], axis=1)

    def cases(self, seconds: float, C: int) -> list[tuple[int, float]]:
        """(changes between nodes, seconds) of plans with so many homes, where cards leave time.
        Tied weights are in one home, to which the path returns, or they are joined through a card
        behind all else."""
        of, count = self.of, self.homes.total
        if count < 2:
            return [(0, seconds)]
        apart = C * count - 1, seconds - max(of.tied / of.card - self.tail, 0.0)
        every = [(C * count, seconds), apart] if of.tied else [apart]
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

    def chain_is_slower(self, seconds: float, P: float, tries: Parameters) -> bool:
        """Whether no replica without chunks takes at most so many seconds on devices of price P at
        most."""
        every, fewer = list(WARM_UP), replace(tries, states=1)  # the cheapest first
        return any(
            all(
                self.no_path(kind, H, limit, P, how)
                for kind in kinds
                for H, limit in self.cases(seconds, 1)
            )
            for kinds, how in ((every[:1], fewer), (every[:1], tries), (every[1:], tries))
        )

    def no_path(self, schedule: str, H: int, limit: float, P: float, tries: Parameters) -> bool:
        """(4) for such changes between nodes."""
        deepest = min(len(self.of.data.layers), int(sum(self.home) + sum(self.other)))
        J, M = len(self.ways), self.M
        sizes = (self.home * (self.other > 0) + 1) * (self.home + self.other + 1)
        exact = math.prod(sizes.tolist()) <= tries.states
        if exact:
            states, after = self.states
            behind, price = states[:, 1::2].sum(axis=1), self.worth(states)
        else:
            behind, price = np.arange(deepest + 1), np.zeros(deepest + 1)
            after = np.where(behind < deepest, behind + 1, -1)[:, None] + np.zeros((1, J), np.int64)
        ahead = np.minimum(WARM_UP[schedule] * behind, M - 1)
        # GPipe's way through later stages is the last micro-batch's, others' the first one's.
        late = float(schedule in ("any", "gpipe"))
        first = np.where(ahead < M - 1, M - 1 - ahead, float(M > 1)) - 1 + late
        caps = np.array(
            [first, ((ahead < M - 1) | (M == 1)) - late, 0 * first + M - 1, 0 * first]
        ).T
        weights = np.zeros((len(caps), 4, J)) + np.array([1 - late, late, 0.0, 1.0])[:, None]
        chosen = price <= P * (1 + 1e-9)

        def least(path: float, fee: float, cost: float = 1.0) -> float:
            best = self.path(H, limit, path, weights * cost, caps, after, fee)
            return float(best[chosen, H].min()) - fee * P

        if not exact and least(0.0, 1.0, 0.0) > 1e-9 * P:
            return True
        path, value = -1.0, 0.0
        while path < value * (1 - 1e-6) and value <= limit:
            path = value
            value = least(path, 0.0)
            for fee in () if exact else tries.fees:
                value = max(value, least(path, fee * path / P))
        return value > limit

    def worth(self, states: Ints) -> Floats:
        """[K] the least price of so many devices."""
        home, every = states[:, ::2], states[:, 1::2]
        home = np.where(self.other > 0, home, every)
        others = np.where(self.home > 0, self.prices.min(axis=0), self.prices[1])
        return np.asarray(home @ self.prices[0] + (every - home) @ others)

    def path(
        self, H: int, limit: float, path: float, weights: Floats, caps: Floats, after: Ints,
        fee: float | Floats, join: float | Floats = 0.0,
    ) -> Floats:  # fmt: skip
        """[K, H + 1] of `shortest` from the first layer on. path: what one micro-batch takes."""
        way, (K, L) = self.prefix_seconds, (len(after), len(self.of.sent[0]))
        rest = (way[1] + way[2])[-1] - way[1] - way[2]
        slack = np.stack(
            [limit - way[0], way[3] + self.tail, rest, np.full(L, limit - path - self.tail)]
        )
        joins = np.stack([self.join, join * self.price * self.join, fee * self.price])
        best = np.empty((L, len(self.of.types) + 1, OPEN + 1, K, H + 1))
        shortest(
            self.kinds, self.table, self.waits, joins, self.of.sent, weights,
            np.concatenate([caps, self.full[None]]), slack, after, best,
        )  # fmt: skip
        return np.asarray(best[0, 0, OPEN])

    def weights(self, P: float, S: int, C: int, first: int, final: int) -> Floats:
        """[S C + 1, 4, J] costs of runs of S stages of C chunks, by the number of runs behind.

        first: chunk that a stage's own passes are counted from, C: from its first backward pass.
        final: chunk that they are counted to."""
        M, least = self.M, float(self.price.min())
        v = np.arange(S * C)[::-1]
        c, s = v // S, v % S
        own = np.repeat(self.full[:, None], S * C, axis=1)
        others = np.zeros((4, S * C))
        if first < C:
            own[:2, c < first] = [[max(M - 1 - S, 0)], [M > S]]
            others[0] = np.where(c < first, P, (c == first) * (S - 1 - s) * least)
        else:
            begun = np.minimum(2 * (S - s - 1) + (C - 1) * S + 1, C * M)
            rounds, inside = np.divmod(begun, C * S)
            done = rounds * S + np.clip(inside - c * S, 0, S)
            own[0], own[1] = np.maximum(M - 1 - done, 0), done < M
            others[0], others[2] = P, (c == C - 1) * s * least
        if final < C:
            own[2:, c < final] = [[M - S], [0]]
            others[3] = np.where(c < final, P, (c == final) * (S - 1 - s) * least)
        costs = own.T[:, :, None] * self.price + others.T[:, :, None]
        return np.concatenate([costs, costs[:1]])

    def chunks_are_slower(
        self, seconds: float, P: float, S: int, C: int, tries: Parameters
    ) -> bool:
        """(5): whether no replica of S stages of C chunks takes at most so many seconds."""
        runs = np.arange(S * C + 1)
        after = np.where(runs < S * C, runs + 1, -1)[:, None] + np.zeros_like(self.kinds)
        caps = np.zeros((len(runs), 4))
        ends = (0, C - 1, C)
        turns = [
            (self.weights(P, S, C, ends[first], ends[final]), float(final == 2))
            for first, final in tries.turns
        ]
        means = [sum(column) / len(turns) for column in zip(*turns, strict=True)]
        apart = self.kinds == len(self.of.types)

        def value(H: int, limit: float, turn: Sequence[Any], stage: Sequence[float]) -> float:
            (costs, join), fee = turn, self.work / P / C * stage[0]
            usage = stage[1] + stage[2] * apart
            costs = costs + self.full[:, None] * (usage * self.price)
            best = self.path(
                H, limit, -math.inf, costs, caps, after, fee - usage * limit / C, join + usage
            )
            return float(best[-1, H] / P - fee * C + self.tail * (1 - join))

        return all(
            any(
                value(H, limit, turn, stage) > limit
                for turn in (*turns, means)
                for stage in tries.stages
                if apart.any() or not stage[2]
            )
            for H, limit in self.cases(seconds, C)
        )
