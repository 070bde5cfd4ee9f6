"""A number of seconds that no plan of an instance replays below.

evidence/speed/joint_bound.md proves it.

Sets   q device types, l layers, j ways to hold a run of layers: where (inside a home, inside
       another node, across nodes), type q, t tensor ranks, r row groups.
Data   F, B[j, l]  forward and backward seconds of a micro-batch of b samples; and of the last one
       p[j]        price of the stage's devices: prices of all devices add up to G samples
Decide whether some plan takes at most T seconds; the bound is the largest T known to be too short.
(1) Homes are the nodes that hold some layer alone. Every plan has one set of homes, and each of its
    replicas passes through all of them.
(2) Replicas take G samples together, so one that takes g has devices of price at most g.
(3) Every stage s of it says T >= E[s]: the first micro-batch's way in, the stage's own passes with
    the messages that they wait for, the way of one micro-batch through all later stages and back,
    the last gradient's way out, or what is joined behind it. No run of layers may take longer.
(4) Without chunks E[s] is the stage's own seconds and what one micro-batch takes through all
    stages. The latter is least on a shortest path over runs of layers that (3) leaves, with the
    devices that are left and the changes between nodes as its states. The longer that path, the
    less is left in (3) for a stage, until no path is left.
(5) With chunks a stage has several runs. The sum of (3) over stages with prices as weights is
    least on such a path.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.joint.data import MOST_CHUNKS, JointData
from hetplan.replays.arrays import Floats
from hetplan.replays.costs import Costs
from hetplan.replays.data import Node
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Model
from hetplan.solvers.run import Options, Run, Stopped

Ints = NDArray[np.int64]
# Forward passes before the first backward pass, for each later stage; without chunks. GPipe's last
# stage waits for all of them, so that none fills the waiting. "any": of all schedules.
WARM_UP = {"any": 2, "gpipe": 0, "1f1b": 1, "interleaved-1f1b": 2}
# Where a message of a stage comes from: its own node, another one of its type, one of another type,
# or anywhere (stages across nodes; the ends of the chain).
SAME, ALIKE, UNLIKE, OPEN = range(4)


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
    rounding: relative, taken off."""

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


class StageOption(NamedTuple):
    """One way to hold consecutive layers.

    where: HOME, OTHER (inside another node) or ACROSS (nodes). q: device type. t: tensor ranks.
    r: row groups. few, many: the least and the largest number of row groups that give the largest
    group as many samples of a micro-batch as r row groups do.
    """

    where: int
    q: int
    t: int
    r: int
    few: int
    many: int


HOME, OTHER, ACROSS = range(3)


class Relaxation:
    """The instance as the bound sees it: the least seconds by type, tensor degree and rows."""

    def __init__(self, data: JointData) -> None:
        self.data, self.costs = data, Costs(data)
        self.types = sorted({node.device for node in data.nodes})
        self.nodes = [[n for n in data.nodes if n.device == kind] for kind in self.types]
        self.counts = [sum(n.devices for n in nodes) for nodes in self.nodes]
        self.several = len(data.nodes) > 1
        self.cards = [sorted(n.network_bandwidth for n in nodes)[::-1] for nodes in self.nodes]
        self.fabrics = [
            max(fabric_rate(n) for i, n in enumerate(nodes) if n not in nodes[:i])
            for nodes in self.nodes
        ]
        cards = sorted(itertools.chain(*self.cards))[::-1]
        self.card = cards[1] if self.several else math.inf  # at most, of the slower of two nodes
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
            (where, q, t): self.join(where, q, t) for q, t in self.seconds for where in range(3)
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
        of, rows = self.costs.layer_seconds, range(1, self.data.global_batch + 1)
        return {
            (q, t): never_less(np.array([of(self.types[q], t, b)[:2] for b in rows]))
            for q, nodes in enumerate(self.nodes)
            for t in self.data.tensor_degrees
            if t <= max(n.devices for n in nodes)
        }

    def least_work(self, q: int) -> Floats:
        """[L] seconds of a device of the type for one sample, in micro-batches of any size."""
        sizes = np.arange(1, self.data.global_batch + 1)[:, None]
        each = [t * self.seconds[k, t].sum(axis=1) / sizes for k, t in self.seconds if k == q]
        least: Floats = np.min(each, axis=(0, 1))
        return least

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

    def waits(self, way: StageOption, samples: int, rows: int) -> list[float]:
        """[4] seconds per byte of a sample until a stage has a micro-batch, by where it comes from;
        inf where nothing can."""
        q, t, cards = way.q, way.t, self.cards[way.q]
        anywhere = self.message(q, t, rows)
        if way.where == ACROSS:
            return [math.inf, math.inf, math.inf, anywhere]
        inside = [t * n.intra_bandwidth for n in self.nodes[q] if n.devices > t * way.few]
        others = max((rates[0] for k, rates in enumerate(self.cards) if k != q), default=0.0)
        return [
            rows / max(inside) if inside else math.inf,
            samples / cards[1] if len(cards) > 1 else math.inf,
            samples / min(cards[0], others) if others else math.inf,
            anywhere,
        ]

    def join(self, where: int, q: int, t: int) -> float:
        """Seconds per byte of weights until holders have joined them, in one node or in several."""
        cards = self.cards[q]
        if where == HOME:
            card = cards[0] if self.several else 0.0
            return 1 / (t * self.fabrics[q] + card)
        return 1 / cards[min(where - 1, len(cards) - 1)] if self.several else math.inf

    def patterns(self, most: int) -> list[Homes]:
        """All numbers of homes among alike nodes; of too many, one pattern that says nothing."""
        alike = Counter((self.types.index(n.device), n.devices) for n in self.data.nodes)
        none = (0,) * len(self.types)
        if not self.several or math.prod(n + 1 for n in alike.values()) > most:
            return [Homes(none, tuple(self.counts), none, sum(self.counts))]
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


def computing_alone(work: Floats, counts: Sequence[int], options: Options) -> float:
    """Seconds that so many devices of each type compute at least, every layer's samples on the
    types that suit it. work [types, layers]: device-seconds of all samples. options: for HiGHS.

    min T over shares x[q, l] of a layer's samples with sum_q x[q, l] = 1 and, on each type of n[q]
    devices, sum_l w[q, l] x[q, l] <= n[q] T. Any prices y[q] >= 0 of a type's devices with
    sum_q n[q] y[q] = 1 show that T >= sum_l min_q y[q] w[q, l]. HiGHS finds the best prices; what
    they show is computed here.
    """
    devices, layers = np.array(counts, dtype=float), work.shape[1]
    largest = float(work.max())
    if largest <= 0:
        return 0.0
    model = Model("computing-alone")
    price, paid = model.continuous("price", len(work)), model.continuous("paid", layers)
    model.minimize(-paid.sum())
    model.row("one", devices @ price == 1)
    shares = work / largest
    kept = np.where(shares >= SMALLEST, shares, 0.0)
    model.row("least", paid <= kept * price[:, None])
    answer = minimise("milp", model, Run(replace(options, time_limit=None)), lambda i, b: None)
    prices = np.ones(len(work)) if answer.x is None else np.maximum(answer.values(price), 0.0)
    prices = prices / float(prices @ devices)
    return float((prices[:, None] * work).min(axis=0).sum())


def never_less(seconds: Floats) -> Floats:
    """A lower bound that grows along the first axis. Where seconds fall with the rows, the slowest
    row group may be one with fewer of them: the least of all rows."""
    onwards = np.minimum.accumulate(seconds[::-1], axis=0)[::-1]
    return (
        np.broadcast_to(seconds.min(axis=0), seconds.shape)
        if np.any(seconds > onwards * (1 + 1e-12))
        else onwards
    )


def fabric_rate(node: Node) -> float:
    """The most bytes/s that a ring in the node joins: each rank sends its bytes once at least."""
    rates = [node.intra_bandwidth]
    for curve in node.all_reduce.values():
        sizes = 2.0 ** np.arange(0, max(curve.log2_bytes) + 8, 0.125)
        rates += list(sizes[1:] / np.array([curve.at(float(size)) for size in sizes])[:-1])
    return float(max(rates))


@kernel
def shortest(
    kinds: Ints,
    seconds: Floats,
    waits: Floats,
    joins: Floats,
    sent: Floats,
    weights: Floats,
    caps: Floats,
    slack: Floats,
    after: Ints,
    best: Floats,
) -> None:
    """(4) and (5) into best [L + 1, Q + 1, 4, K, H + 1]: layers from l on, behind a run inside a
    node of type q or (Q) across nodes, whose next message comes from there; state of the path,
    changes between nodes (H: or more). Four durations count: forward passes of a micro-batch and of
    the last one, backward passes of both.

    kinds [J]: q of a way, or Q. seconds [4, J, L + 1]: added up over layers. waits [2, 4, J]: of a
    message, per byte. joins [3, J]: seconds per byte of weights behind the last pass, cost per
    byte of weights, cost of a run. sent [2, L + 1]: bytes that pass a cut, and weights, added up.
    weights [K, 4, J]: costs of a run by the state behind it. caps [K + 1, 4]: how often its seconds
    count against slack[3], and in the last row, in all passes. slack [4, L + 1]: what is left
    behind the way to l; the way out from l; the way there and back behind l; what caps leave.
    after [K, J]: state with the run, -1: none."""
    last, types = best.shape[0] - 1, best.shape[1] - 1
    states, changes = best.shape[3] - 1, best.shape[4] - 1
    run, own, full = np.empty(4), np.empty(4), caps[states + 1]
    best[:] = np.inf
    best[last, :, OPEN, 0, 0] = 0.0
    reached = np.empty(best.shape[3:])
    for l in range(last - 1, -1, -1):
        for way in range(len(kinds) * (OPEN + 1)):
            j, into = divmod(way, OPEN + 1)
            across = kinds[j] == types
            if waits[0, into, j] == np.inf or (l == 0 and into != OPEN):
                continue
            step = int(across or into in (ALIKE, UNLIKE))
            reached[:] = np.inf
            for end in range(l + 1, last + 1):
                held = sent[1, end] - sent[1, l]
                left = slack[0, l] - max(slack[1, l], joins[0, j] * held)
                total = 0.0
                for x in range(4):
                    run[x] = seconds[x, j, end] - seconds[x, j, l]
                    total += full[x] * run[x]
                if total > left:
                    break
                for back in range(OPEN + 1):
                    if waits[0, back, j] == np.inf:
                        continue
                    total = 0.0
                    for x in range(4):
                        at, source = (l, into) if x < 2 else (end, back)
                        own[x] = run[x] + waits[x % 2, source, j] * sent[0, at]
                        total += full[x] * own[x]
                    if total > left:
                        continue
                    room = min(slack[3, l], left - own[1] - own[3] - slack[2, end])
                    for k in range(states + 1):
                        least = best[end, kinds[j], back, k, 0]
                        for h in range(1, changes + 1):
                            least = min(least, best[end, kinds[j], back, k, h])
                        if after[k, j] < 0 or least == np.inf:
                            continue
                        spent, cost = 0.0, joins[1, j] * held + joins[2, j]
                        for x in range(4):
                            spent += caps[k, x] * own[x]
                            cost += weights[k, x, j] * own[x]
                        if spent > room:
                            continue
                        for h in range(changes + 1):
                            value = best[end, kinds[j], back, k, h] + cost
                            more = min(h + step, changes)
                            reached[after[k, j], more] = min(reached[after[k, j], more], value)
            for before in range(types + 1):
                same, wide = before == kinds[j], across or before == types
                if l == 0 or (wide == (into == OPEN) and (wide or same == (into != UNLIKE))):
                    best[l, before, into] = np.minimum(best[l, before, into], reached)


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


@dataclass
class Pattern:
    """Plans with such homes. prices [2, Q] of a device by type, in homes and in other nodes: for a
    replica alone, and for one of several. seconds: that no plan is below. rise: of the next
    attempt. hard: micro-batch and numbers of samples that the last one failed with."""

    of: Relaxation
    homes: Homes
    tries: Parameters
    run: Run
    prices: dict[bool, Floats]
    seconds: float
    rise: float
    hard: tuple[int, int, int] = (0, 0, 0)
    micros: dict[tuple[int, int], Micro] = field(default_factory=dict)

    def micro(self, b: int, g: int) -> Micro:
        """Kept until prices change."""
        self.run.check()
        if (b, g) not in self.micros:
            self.micros[b, g] = Micro(
                self.of, self.homes, self.prices[g == self.of.data.global_batch], b, g
            )
        return self.micros[b, g]

    def raise_to(self, seconds: float) -> bool:
        """Whether no plan takes at most so many seconds. Prices in other nodes fall until then."""
        G, counts = self.of.data.global_batch, np.array((self.homes.home, self.homes.other))
        possible = counts[0].any() or max(map(len, self.of.nodes)) > 1
        alone = [(b, G, G) for b in range(1, G + 1) if possible]
        several = [(b, b, G - 1) for b in range(1, G) if self.homes.replicas > 1]
        begun = dict(self.prices)
        for parts in (alone, several):
            for _ in range(self.tries.prices if counts.any(axis=1).all() else 1):
                # The part that failed last is asked first.
                hard = next(
                    (
                        part
                        for part in sorted(parts, key=lambda part: part != self.hard)
                        if self.fails(seconds, *part)
                    ),
                    None,
                )
                if not hard:
                    break
                self.hard, self.micros = hard, {}
                prices = self.prices[parts is alone] * [[1.0], [self.tries.discount]]
                self.prices[parts is alone] = prices * (G / (prices * counts).sum())
            else:
                self.prices = begun
                return False
        return True

    def fails(self, seconds: float, b: int, low: int, high: int) -> bool:
        """Whether some replica that takes so many samples, b at a time, may be as fast on devices
        of that price."""
        if all(self.is_slower(seconds, b, low, high, S) for S in self.depths):
            return False
        middle = (low + high) // 2
        return low == high or any(
            self.fails(seconds, b, *half) for half in ((low, middle), (middle + 1, high))
        )

    @cached_property
    def depths(self) -> list[int]:
        """Numbers of stages with chunks; 1: any number without."""
        most = min(sum(self.of.counts), len(self.of.data.layers) // 2)
        return [1, *range(max(self.homes.total, 2), most + 1)]

    def is_slower(self, seconds: float, b: int, low: int, high: int, S: int) -> bool:
        """The same of replicas of S stages with chunks, or without. Seconds grow with the number of
        micro-batches, and with the last one: the least of both matter, in whole rounds."""
        rounds = -(-low // (b * S)) * S
        chunks = range(2, min(MOST_CHUNKS, len(self.of.data.layers) // S) + 1)
        for M in (rounds, rounds + S):
            g = max(low, b * (M - 1) + 1)
            if g > high or self.micro(b, g).work >= high * seconds:
                continue
            x, tries = self.micro(b, g), self.tries
            wide = low < high and high > tries.width * low
            if wide or (S == 1 and not x.chain_is_slower(seconds, high, tries)):
                return False
            if S > 1 and not all(x.chunks_are_slower(seconds, high, S, C, tries) for C in chunks):
                return False
        return True


def lower_bound(
    of: Relaxation, run: Run, enough: float = math.inf, parameters: Parameters = Parameters()
) -> float:
    """Seconds that no plan replays below, at most `enough`. It rises until the run should stop."""
    data, tries = of.data, parameters
    work = np.array([of.least_work(q) for q in range(len(of.types))])
    worth = 1 / np.array([row.sum() for row in work])
    prices = np.stack([worth * data.global_batch / float(worth @ of.counts)] * 2)
    alone = computing_alone(data.global_batch * work, of.counts, run.options)
    patterns = [
        Pattern(of, homes, tries, run, dict.fromkeys((True, False), prices), alone, tries.rise)
        for homes in of.patterns(tries.patterns)
    ]
    least = patterns[0]
    try:
        while least.seconds < enough and least.rise >= tries.least_rise:
            run.report(bound=least.seconds * (1 - tries.rounding))
            goal = min(least.seconds * (1 + least.rise), enough)
            if least.raise_to(goal):
                least.seconds, least.rise = goal, 2 * least.rise
            else:
                least.rise /= 2
            least = min(patterns, key=lambda pattern: pattern.seconds)
    except Stopped:
        pass
    return min(least.seconds, enough) * (1 - tries.rounding)
