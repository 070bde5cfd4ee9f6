"""A number of seconds that no plan of an instance replays below. docs/method-joint.md proves it.

Sets   q device types, j ways to hold a stage: (q, t tensor ranks, r row groups), l layers.
Data   F, B[j, l]  forward and backward seconds of a micro-batch of b samples; and of the last one
       p[j]        price of the stage's devices: prices of all devices add up to G samples
(1) Replicas take G samples together, so one that takes g has devices of price P <= g.
(2) Every stage s of it says T >= E[s]: the first micro-batch's way in, the stage's own passes with
    the messages that they wait for, the way of one micro-batch through all later stages and back,
    the last gradient's way out, and what is joined behind it.
(3) Sum of (2) with prices as weights: P T >= V, a sum over stages in which a stage's seconds stand
    (M - 1) times with its own price and once with the whole replica's.
(4) V is least on a shortest path over layers and the number of stages behind.
The bound is the least V / P over g, b, schedules, numbers of stages, and homes: the nodes that hold
some layer alone. A replica passes through all homes, and its messages cross between them; layers
without a home are joined through network cards.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.joint.costs import Costs
from hetplan.formulations.joint.data import JointData, Node
from hetplan.solvers.run import Run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Range = tuple[float, float]
# Forward passes before the first backward pass, for each later stage; without chunks. GPipe's last
# stage waits for all of them, so that none fills the waiting. "any": of all schedules.
WARM_UP = {"gpipe": 0, "1f1b": 1, "interleaved-1f1b": 2, "any": 2}


@dataclass(frozen=True)
class Parameters:
    """What the bound tries; every choice is valid. outs: weights of the last gradient's way out,
    against what is joined behind a stage's own passes. stages: prices of a stage, in seconds of a
    replica's average stage. width: of intervals of replicas' prices, at first. steps: factors by
    which a price is changed. discount: of devices on nodes without a home, at first. patterns: of
    homes, at most; of more, none is told apart. rise: above the second pattern's bound, how far
    one is bounded at once. rounding: relative, taken off."""

    outs: tuple[float, ...] = (0.0, 0.5, 1.0)
    stages: tuple[float, ...] = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
    width: float = 1.2
    steps: tuple[float, ...] = (0.8, 1.25, 0.93, 1.07)
    discount: float = 0.5
    patterns: int = 200
    rise: float = 1.15
    rounding: float = 1e-9


class Homes(NamedTuple):
    """Nodes that hold some layer alone. nodes: how many, by type; every replica has a device on
    each. home, other: devices on them and on other nodes, by type. replicas: at most."""

    nodes: tuple[int, ...]
    home: tuple[int, ...]
    other: tuple[int, ...]
    replicas: int

    @property
    def total(self) -> int:
        """Of all types."""
        return sum(self.nodes)


class Relaxation:
    """The instance as the bound sees it: the least seconds by type, tensor degree and rows."""

    def __init__(self, data: JointData) -> None:
        self.data, self.costs = data, Costs(data)
        self.types = sorted({node.device for node in data.nodes})
        self.nodes = [[n for n in data.nodes if n.device == kind] for kind in self.types]
        self.counts = [sum(n.devices for n in nodes) for nodes in self.nodes]
        self.several = len(data.nodes) > 1
        cards = sorted((n.network_bandwidth for n in data.nodes), reverse=True)
        self.card = cards[1] if self.several else math.inf  # at most, of the slower of two nodes
        self.inside = min(n.intra_bandwidth for n in data.nodes)
        sizes = np.array([layer.activation_bytes for layer in data.layers[:-1]])
        self.least_sent = float(sizes.min(initial=math.inf))
        grown = data.gradient_bytes / data.element_bytes
        self.grown = grown = min(
            grown, (grown + 1) / 2
        )  # ZeRO: half of the gradients, half of the weights
        joined = grown * np.array([layer.param_bytes for layer in data.layers])
        self.sent = np.array([[0.0, *sizes, 0.0], [0.0, *joined.cumsum()]])
        self.joined = float(joined[0])
        tied = sum(layer.tied_param_bytes for layer in data.layers[1:])
        self.tied = grown * min(tied, data.layers[0].param_bytes)
        self.joins = {
            (q, t, side): self.join(q, t, home=side == 0)
            for q, t in self.seconds
            for side in (0, 1)
        }
        self.least_join = min(self.joins.values())

    @cached_property
    def sums(self) -> dict[tuple[int, int], Floats]:
        """[G, 2, L + 1] `seconds`, added up over layers."""
        return {
            key: np.concatenate([np.zeros((*x.shape[:2], 1)), x.cumsum(axis=2)], axis=2)
            for key, x in self.seconds.items()
        }

    @cached_property
    def seconds(self) -> dict[tuple[int, int], Floats]:
        """[G, 2, L] forward and backward, of so many rows, by (type, tensor degree)."""
        best = {}
        for q, nodes in enumerate(self.nodes):
            for t in self.data.tensor_degrees:
                if t <= max(n.devices for n in nodes):
                    rows = range(1, self.data.global_batch + 1)
                    each = [self.costs.layer_seconds(self.types[q], t, b)[:2] for b in rows]
                    best[q, t] = never_less(np.array(each))
        return best

    def least_work(self, q: int) -> float:
        """Seconds of a device of the type for one sample, in micro-batches of any size."""
        sizes = np.arange(1, self.data.global_batch + 1)[:, None]
        each = [t * self.seconds[k, t].sum(axis=1) / sizes for k, t in self.seconds if k == q]
        return float(np.min(each, axis=(0, 1)).sum())

    def message(self, q: int, t: int, rows: int) -> float:
        """Seconds per byte of a sample until a tensor group has its rows of a micro-batch."""
        best = math.inf
        for node in self.nodes[q]:
            inside = t * node.intra_bandwidth if node.devices > t else 0.0
            card = node.network_bandwidth if self.several else 0.0
            mixed = inside < rows * card  # some of the rows may come through the card meanwhile
            rate = inside + card * mixed
            best = min(best, rows / rate if rate else 0.0)
        return best

    def join(self, q: int, t: int, *, home: bool) -> float:
        """Seconds per byte of weights until holders in one node have joined them, or in several."""
        card = max(n.network_bandwidth for n in self.nodes[q]) if self.several else 0.0
        if home:
            return min(1 / (t * fabric_rate(node) + card) for node in self.nodes[q])
        return 1 / card if card else math.inf

    def patterns(self, most: int) -> list[Homes]:
        """All numbers of homes among alike nodes; of too many: all devices as in one home."""
        alike = Counter((self.types.index(n.device), n.devices) for n in self.data.nodes)
        none = (0,) * len(self.types)
        if not self.several or math.prod(n + 1 for n in alike.values()) > most:
            return [Homes((1, *none[1:]), tuple(self.counts), none, sum(self.counts))]
        made = []
        for chosen in product(*(range(n + 1) for n in alike.values())):
            nodes, home, replicas = list(none), list(none), sum(self.counts)
            for (q, devices), count in zip(alike, chosen, strict=True):
                nodes[q] += count
                home[q] += devices * count
                replicas = min(replicas, devices) if count else replicas
            other = [n - h for n, h in zip(self.counts, home, strict=True)]
            made.append(Homes(tuple(nodes), tuple(home), tuple(other), replicas))
        return made


def never_less(seconds: Floats) -> Floats:
    """A lower bound that grows along the first axis. Where seconds fall with the rows, the slowest
    row group may be one with fewer of them: the least of all rows."""
    onwards = np.minimum.accumulate(seconds[::-1], axis=0)[::-1]
    if np.any(seconds > onwards * (1 + 1e-12)):
        return np.broadcast_to(seconds.min(axis=0), seconds.shape)
    return onwards


def fabric_rate(node: Node) -> float:
    """The most bytes/s that a ring in the node joins: each rank sends its bytes once at least."""
    rates = [node.intra_bandwidth]
    for curve in node.all_reduce.values():
        sizes = 2.0 ** np.arange(0, max(curve.log2_bytes) + 8, 0.125)
        taken = np.array([curve.at(float(size)) for size in sizes])
        rates += list(sizes[1:] / taken[:-1])
    return float(max(rates))


@kernel
def shortest(
    price: Floats,
    seconds: Floats,
    waits: Floats,
    own: Floats,
    others: Floats,
    joins: Floats,
    sent: Floats,
    stage: float,
    chosen: Ints,
    best: Floats,
) -> None:
    """(4) into best [runs + 1, L + 1]: row n, layers from l on in n runs. price [J]; seconds
    [4, J, L + 1]: forward passes of a micro-batch and of the last one, backward passes of both,
    added up over layers; waits [4, J]: the same of a message, per byte. own, others [runs, 4]: how
    often they count with the stage's own price, and with which other price. joins [J]: price and
    seconds per byte of weights. sent [2, L + 1]: bytes that pass a cut, and weights, added up.
    chosen [runs]: the only way to hold a run, -1: any."""
    last = len(best[0]) - 1
    best[:] = np.inf
    best[0, last] = 0.0
    for n in range(1, len(best)):
        for j in range(len(price)):
            if chosen[n - 1] >= 0 and chosen[n - 1] != j:
                continue
            weight = own[n - 1] * price[j] + others[n - 1]
            into = weight[0] * waits[0, j] + weight[1] * waits[1, j]
            back = weight[2] * waits[2, j] + weight[3] * waits[3, j]
            least = np.inf
            for l in range(last, -1, -1):
                spent = joins[j] * sent[1, l]
                for k in range(4):
                    spent += weight[k] * seconds[k, j, l]
                here = least - spent + into * sent[0, l] + stage * price[j]
                best[n, l] = min(best[n, l], here)
                least = min(least, best[n - 1, l] + spent + back * sent[0, l])


def ends(b: int, most: int) -> list[int]:
    """Of numbers of row groups that leave as many of b samples to the largest of them: the first
    and the last. Between them costs are linear in the price."""
    rows = [-(-b // r) for r in range(1, most + 1)]
    inner = [r for r in range(2, most) if rows[r - 2] == rows[r - 1] == rows[r]]
    return sorted(set(range(1, most + 1)) - set(inner))


class Micro:
    """Micro-batches of b samples in replicas that take g samples: ways to hold a stage [J]."""

    def __init__(self, of: Relaxation, homes: Homes, both: tuple[Floats, Floats], b: int, g: int):
        self.of, self.homes, self.b, self.g = of, homes, b, g
        self.M = -(-g // b)
        self.last = g - (self.M - 1) * b
        ways = [
            (side, q, t, r)
            for side, counts in enumerate((homes.home, homes.other))
            for q, t in of.seconds
            for r in ends(b, of.counts[q] // t * (counts[q] > 0))  # rows on both kinds of nodes
        ]
        self.price = np.array([both[side][q] * t * r for side, q, t, r in ways])
        self.least = min(p for side in both for p in side if p > 0)
        rows = [[-(-n // r) for _, _, _, r in ways] for n in (b, self.last)]
        first, rest = (
            np.array([of.sums[q, t][n - 1] for (_, q, t, _), n in zip(ways, row, strict=True)])
            for row in rows
        )
        most = (self.free(b), self.free(self.last))
        wait, rest_wait = (
            [min(of.message(q, t, n), free) for (_, q, t, _), n in zip(ways, row, strict=True)]
            for row, free in zip(rows, most, strict=True)
        )
        self.table = np.stack([first[:, 0], rest[:, 0], first[:, 1], rest[:, 1]])
        self.waits = np.array([wait, rest_wait, wait, rest_wait])
        whole = g == of.data.global_batch  # a single row group of a single replica joins nothing
        self.join = np.array(
            [
                0.0 if whole and r == 1 and side == 0 else of.joins[q, t, side]
                for side, q, t, r in ways
            ]
        )

    def free(self, samples: int) -> float:
        """Seconds per byte that a message of so many samples may take beside those that `crossing`
        counts for it."""
        crosses = self.homes.total > 1 and 1 / self.of.card > samples / self.of.inside
        return samples / self.of.inside if crosses else math.inf

    @cached_property
    def work(self) -> float:
        """Price and seconds of all passes of the replica, alone."""
        passes = np.tensordot([self.M - 1, 1, self.M - 1, 1], np.diff(self.table), axes=1)
        return float((self.price[:, None] * passes).min(axis=0).sum())

    def weights(self, P: float, out: float, S: int, C: int, schedule: str) -> tuple[Floats, Floats]:
        """(own, others) of `shortest`. schedule: without chunks "any" serves both, for 1 to S
        stages; of chunks "late" tells what follows the first backward pass."""
        v = np.arange(S * C)[::-1]  # runs are counted from the last one
        zero, M = 0.0 * v, self.M
        if C == 1:
            behind = S - 1 - v
            ahead = np.minimum(WARM_UP[schedule] * behind, M - 1)
            full = np.where(ahead < M - 1, M - 1 - ahead, float(M > 1))
            small = np.where((ahead < M - 1) | (M == 1), 1.0, 0.0)
            # Way in and roundtrip take the first micro-batch, the way out takes the last one.
            some, before = behind * self.least, (v * self.least) * (schedule != "any")
            if schedule in ("1f1b", "interleaved-1f1b"):
                own = full - 1, small, zero + M - 1, zero + 1 - out
                return np.array(own).T, np.array((zero + P, zero, before, out * (P - before))).T
            own = full, small - 1, zero + M - 1, zero + 1 - out
            return np.array(own).T, np.array((some, P - some, before, out * (P - before))).T
        c, s = v // S, v % S
        behind = out * np.where(c == 0, S - 1 - s, 0) * self.least
        if schedule != "late":
            ahead = np.where(c == 0, S - 1 - s, 0) * self.least
            own = zero + M - 1, zero + 1, zero + M - 1, zero + 1
            return np.array(own).T, np.array((ahead, zero, zero, behind)).T
        rounds, inside = np.divmod(np.minimum(2 * (S - s - 1) + (C - 1) * S + 1, C * M), C * S)
        done = rounds * S + np.clip(inside - c * S, 0, S)
        own = np.maximum(M - 1 - done, 0), (done < M) * 1.0, zero + M - 1, zero + 1
        early = np.where(c == C - 1, s, 0) * self.least
        return np.array(own).T, np.array((zero + P, zero, early, behind)).T

    def seconds(self, P: Range, S: int, C: int, out: float, stage: float, schedule: str) -> Floats:
        """[S C] least seconds of an iteration with so many runs of layers, for devices of price
        P. Without chunks: of replicas of 1 to S stages."""
        of, (low, high), w = self.of, P, np.arange(S * C)
        best = np.empty((S * C + 1, len(of.sent[0])))
        own, others = self.weights(low, out, S, C, schedule)
        joins = (1 - out) * self.price * self.join
        shortest(
            self.price, self.table, self.waits, own, others, joins, of.sent, stage, 0 * w - 1, best
        )
        total = best[1:, 0] + self.crossing(w, low, out, C)
        seconds = np.where(total > 0, total / high, total / low) - C * stage
        held = of.joined if self.g < of.data.global_batch else 0.0
        behind = np.maximum(held, np.where(w > 0, of.tied, 0.0))
        return np.asarray(seconds + out * of.least_join * behind)

    def crossing(self, w: Ints, P: float, out: float, C: int) -> Floats:
        """[runs] price and seconds of messages between homes; w: stages behind the first."""
        of, count = self.of, self.homes.total
        if count < 2:
            return np.zeros(len(w))
        e, el = (
            n * of.least_sent * max(1 / of.card - n / of.inside, 0.0) for n in (self.b, self.last)
        )
        ahead = np.minimum(2 * w, self.M) if C == 1 else self.M + 0 * w
        own = np.maximum(self.M - 1 - ahead, 0) * e + (self.M - 1) * e + el
        others = max(P - self.least, 0.0) * (1 + out) * el if C == 1 else 0.0
        each = self.least * own + others
        tied = np.minimum(each, out * P * of.tied / of.card) if of.tied else 0.0
        return np.asarray((C * count - 1) * each + tied)

    def best(self, P: Range, S: int, C: int, tries: Parameters, schedules: Sequence[str]) -> Floats:
        """[S C] `seconds` by the best of what is tried."""
        unit = self.work / P[0] / C
        values = [
            self.seconds(P, S, C, out, unit * stage, schedule)
            for out in tries.outs
            for stage in tries.stages
            for schedule in schedules
        ]
        return np.asarray(np.max(values, axis=0))


class Part(NamedTuple):
    """Replicas of price P: micro-batches of b samples, g in all (0: any number that is worth P), S
    stages of C chunks (0: any number). tried: how much was tried."""

    b: int
    P: Range
    g: int = 0
    S: int = 0
    C: int = 0
    tried: int = 0


class Pricing:
    """Bounds on plans with such homes at given prices by type, in any unit; best first over parts
    of their replicas, one of which must be in every plan: g samples are worth no less than P."""

    def __init__(
        self, of: Relaxation, homes: Homes, prices: Floats, discount: float, tries: Parameters
    ) -> None:
        unit = of.data.global_batch / float(prices @ homes.home + discount * prices @ homes.other)
        self.of, self.homes, self.tries = of, homes, tries
        self.prices = (
            prices * unit * (np.array(homes.home) > 0),
            prices * unit * discount * (np.array(homes.other) > 0),
        )
        sums = replica_prices(homes, self.prices)
        self.sums = sums[sums <= of.data.global_batch * (1 + 1e-9)]
        self.most = sum(homes.home) + sum(homes.other)
        self.layers, self.batch = len(of.data.layers), of.data.global_batch
        self.micro = cache(lambda b, g: Micro(of, homes, self.prices, b, g))

    def samples(self, part: Part, S: int = 1) -> set[int]:
        """Numbers of samples that can be the least for the bound, in whole rounds of S
        micro-batches: the least, those whose last micro-batch is least, all."""
        b, (low, _), *_ = part
        least = max(math.ceil(low * (1 - 1e-9)), 1)
        made = set()
        for g in {least, self.batch} if self.homes.replicas > 1 else {self.batch}:
            M = -(-g // b)
            for steps in {-(-M // S) * S, -(-(M + 1) // S) * S}:
                made.add(max(g, b, b * (steps - 1) + 1))
        return {g for g in made if b <= g <= self.batch and -(-g // b) % S == 0}

    def expand(self, part: Part) -> Iterator[tuple[float, Part]]:
        """(seconds, part) of what the part consists of."""
        b, P, g, S, C, tried = part
        few = replace(self.tries, outs=(1.0,), stages=(0.0,))
        if tried == 2 or (not g and P[1] > self.tries.width * P[0]):
            inside = self.sums[(self.sums >= P[0]) & (self.sums <= P[1])]
            for half in np.array_split(inside, 2):
                yield 0.0, Part(b, (float(half[0]), float(half[-1])), 0, S, C)
            return
        if not g:
            if S:
                for g in self.samples(part, S if C > 1 else 1):
                    yield self.micro(b, g).work / P[1], Part(b, P, g, S, C, 1)
                return
            for g in self.samples(part):
                yield self.micro(b, g).work / P[1], Part(b, P, g)
            for S in range(max(self.homes.total, 2), min(self.most, self.layers // 2) + 1):
                for g, C in product(self.samples(part, S), range(2, min(4, self.layers // S) + 1)):
                    yield self.micro(b, g).work / P[1], Part(b, P, g, S, C)
            return
        x, tries = self.micro(b, g), self.tries if tried else few
        if not S:
            runs = x.best(P, min(self.layers, self.most), 1, tries, ["any"])
            if not tried:
                yield (
                    float(runs[max(self.homes.total - 1, 0) :].min(initial=math.inf)),
                    part._replace(tried=1),
                )
                return
            for S, seconds in enumerate(runs, 1):
                if self.homes.total <= S:
                    yield float(seconds), Part(b, P, g, S, 1, 1)
            return
        if C == 1:
            schedules = list(WARM_UP)[: 2 if x.M % S else 3]
            seconds = min(x.best(P, S, 1, tries, [one])[-1] for one in schedules)
        else:
            seconds = x.best(P, S, C, tries, ["early", "late"])[-1]
        yield float(seconds), part._replace(tried=tried + 1)

    def bound(self, enough: float, stop: Callable[[], bool]) -> float:
        """The least seconds, or `enough` where they are no less; what is known when it stops."""
        number = itertools.count()
        every = (float(self.sums[0]), float(self.sums[-1]))
        heap = [(0.0, next(number), Part(b, every)) for b in range(1, self.batch + 1)]
        while heap:
            value, _, part = heapq.heappop(heap)
            if value >= enough or stop() or (part.tried == 2 and part.P[0] == part.P[1]):
                return min(value, enough)
            for seconds, child in self.expand(part):
                heapq.heappush(heap, (max(value, seconds), next(number), child))
        return enough


def replica_prices(homes: Homes, both: tuple[Floats, Floats]) -> Floats:
    """What the devices of a replica can be worth, ascending."""
    needed = homes.nodes if homes.total > 1 else (0,) * len(homes.nodes)
    counts = (*homes.home, *homes.other)
    sums = np.zeros(1)
    least = (*needed, *(0 for _ in needed))
    for price, few, most in zip((*both[0], *both[1]), least, counts, strict=True):
        if most:
            sums = np.unique(np.round(sums[:, None] + price * np.arange(few, most + 1), 9))
    return np.asarray(sums[sums > 0])


@dataclass
class Pattern:
    """Plans with such homes: the best bound so far, at which prices (by type, and the discount on
    other nodes), and how many changes of them were tried since it rose."""

    homes: Homes
    prices: Floats
    seconds: float = 0.0
    tried: int = -1


def lower_bound(
    data: JointData, run: Run, enough: float = math.inf, parameters: Parameters = Parameters()
) -> float:
    """Seconds that no plan replays below, at most `enough`. It rises until the run should stop."""
    of = Relaxation(data)
    worth = 1 / np.array([of.least_work(q) for q in range(len(of.types))])
    flat = data.global_batch / float(worth @ of.counts)
    number = itertools.count()
    heap = [
        (flat, next(number), Pattern(homes, np.array([*worth, parameters.discount]), flat))
        for homes in of.patterns(parameters.patterns)
    ]
    known = flat
    while heap:
        known, _, pattern = heapq.heappop(heap)
        run.report(bound=min(known, enough) * (1 - parameters.rounding))
        changes = len(pattern.prices) * len(parameters.steps)
        if known >= enough or pattern.tried >= changes or run.should_stop:
            break
        prices = pattern.prices.copy()
        if pattern.tried >= 0:
            coordinate, step = divmod(pattern.tried, len(parameters.steps))
            prices[coordinate] *= parameters.steps[step]
        prices[-1] = min(prices[-1], 1.0)
        pattern.tried += 1
        if pattern.tried == 0 or np.any(prices != pattern.prices):
            pricing = Pricing(of, pattern.homes, prices[:-1], float(prices[-1]), parameters)
            limit = parameters.rise * (heap[0][0] if heap else math.inf)
            seconds = pricing.bound(min(enough, limit), lambda: run.should_stop)
            if seconds > pattern.seconds:
                pattern.seconds, pattern.prices, pattern.tried = seconds, prices, 0
        heapq.heappush(heap, (max(known, pattern.seconds), next(number), pattern))
    return min(known, enough) * (1 - parameters.rounding)
