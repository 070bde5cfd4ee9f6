"""The instance as the bound sees it: least seconds and bytes by type, tensor degree and rows."""

import copy
import itertools
import math
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from hetplan.formulations.joint.data import JointData
from hetplan.replays.arrays import Floats
from hetplan.replays.costs import Costs
from hetplan.replays.data import Node

# (number of passes, samples, rows of the largest row group) of passes of different sizes.
Passes = tuple[tuple[int, int, int], ...]


class NodeClass(NamedTuple):
    """Nodes of one device type with equally many devices, which the bound does not tell apart.

    q: device type. devices: of one node. nodes: how many. card, fabric: bytes per second that the
    card of one of them receives, and that a ring inside one of them joins, at most.
    """

    q: int
    devices: int
    nodes: int
    card: float
    fabric: float


class Homes(NamedTuple):
    """Nodes that hold some layer alone. nodes: how many, by type; every replica has a device on
    each. home, other: devices on them and on other nodes, by type. replicas: at most. chosen: how
    many of each class of nodes; empty where nothing is said of homes."""

    nodes: tuple[int, ...]
    home: tuple[int, ...]
    other: tuple[int, ...]
    replicas: int
    chosen: tuple[int, ...] = ()

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
        # bytes joined for the copy of the first layer's weights that each later layer has
        copies = grown * np.array([layer.tied_param_bytes for layer in data.layers[1:]])
        copies = np.minimum(copies, joined[0])
        self.tied = float(copies[copies > 0].min(initial=math.inf)) if copies.any() else 0.0
        self.tied_ends = float(copies[-1]) if len(copies) else 0.0  # of the last layer's copy
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

    def without_links(self) -> "Relaxation":
        """The same instance where messages and joins take no time."""
        freed = copy.copy(self)
        freed.sent = np.zeros_like(self.sent)
        freed.least_sent = freed.joined = freed.tied = freed.tied_ends = 0.0
        return freed

    def least_work(self, q: int, most: int | None = None) -> Floats:
        """[L] seconds of a device of the type for one sample, in micro-batches of so many samples
        at most; None: of any number."""
        sizes = np.arange(1, (most or self.data.global_batch) + 1)[:, None]
        each = [
            t * self.seconds[k, t][: len(sizes)].sum(axis=1) / sizes
            for k, t in self.seconds
            if k == q
        ]
        least: Floats = np.min(each, axis=(0, 1))
        return least

    @cached_property
    def least_works(self) -> Floats:
        """[Q, L] the same by type."""
        return np.array([self.least_work(q) for q in range(len(self.types))])

    def least_forward_work(self, q: int) -> Floats:
        """[L] `least_work` of its forward pass alone."""
        sizes = np.arange(1, self.data.global_batch + 1)[:, None]
        each = [t * self.seconds[k, t][:, 0] / sizes for k, t in self.seconds if k == q]
        least: Floats = np.min(each, axis=(0, 1))
        return least

    @lru_cache(10_000)  # noqa: B019 - the instance lives as long as the bound
    def averages(self, q: int, t: int, choices: tuple[Passes, ...]) -> Floats:
        """[2, L + 1] seconds of a sample in the layers before l, forward and backward, on the
        average of such passes: of several choices the least for each layer."""
        each = []
        for passes in choices:
            seconds = [count * self.seconds[q, t][rows - 1] for count, _, rows in passes]
            samples_of_all = sum(count * samples for count, samples, _ in passes)
            each.append(np.sum(seconds, axis=0) / samples_of_all)
        least = np.min(each, axis=0)
        return np.concatenate([np.zeros((2, 1)), least.cumsum(axis=1)], axis=1)

    def average_waits(self, way: StageOption, choices: tuple[Passes, ...]) -> Floats:
        """[5] seconds per byte of a sample until a stage has one, on the average of such passes."""
        each = []
        for passes in choices:
            waits = [
                np.multiply(count, self.waits(way, samples, rows)) if count else np.zeros(5)
                for count, samples, rows in passes
            ]
            samples_of_all = sum(count * samples for count, samples, _ in passes)
            each.append(np.sum(waits, axis=0) / samples_of_all)
        return np.asarray(np.min(each, axis=0))

    def message(self, q: int, t: int, rows: int) -> float:
        """Seconds per byte of a sample until a tensor group has its rows of a micro-batch, at
        least. They never fall with the rows."""
        seconds = []
        for node in self.nodes[q]:
            inside = t * node.intra_bandwidth if node.devices > t else 0.0
            card = node.network_bandwidth if self.several else 0.0
            if inside:
                seconds.append(rows / inside)
            if card:  # from inside / card rows on, some of them may come through it meanwhile
                seconds.append(max(rows, inside / card) / (inside + card))
        return min(seconds, default=0.0)

    def waits(self, way: StageOption, samples: int, rows: int) -> list[float]:
        """[5] seconds per byte of a sample until a stage has a micro-batch, by where it comes from;
        inf where nothing can."""
        q, t, cards = way.q, way.t, self.cards[way.q]
        anywhere = self.message(q, t, rows)
        # Between a stage across nodes and the only node of another type all samples pass its card.
        single = [rates[0] for k, rates in enumerate(self.cards) if len(rates) == 1 and k != q]
        if way.where == ACROSS:
            sole = max(anywhere, samples / max(single)) if single else math.inf
            return [math.inf, math.inf, math.inf, sole, anywhere]
        inside = [t * n.intra_bandwidth for n in self.nodes[q] if n.devices > t * way.few]
        others = max((rates[0] for k, rates in enumerate(self.cards) if k != q), default=0.0)
        return [
            rows / max(inside) if inside else math.inf,
            samples / cards[1] if len(cards) > 1 else math.inf,
            samples / min(cards[0], others) if others else math.inf,
            max(anywhere, samples / cards[0]) if len(cards) == 1 else math.inf,
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
        none = (0,) * len(self.types)
        choices = math.prod(alike.nodes + 1 for alike in self.node_classes)
        if not self.several or choices > most:
            return [Homes(none, tuple(self.counts), none, sum(self.counts))]
        made = []
        for chosen in product(*(range(alike.nodes + 1) for alike in self.node_classes)):
            nodes, home, replicas = list(none), list(none), sum(self.counts)
            for alike, count in zip(self.node_classes, chosen, strict=True):
                nodes[alike.q] += count
                home[alike.q] += alike.devices * count
                replicas = min(replicas, alike.devices) if count else replicas
            other = [n - h for n, h in zip(self.counts, home, strict=True)]
            made.append(Homes(tuple(nodes), tuple(home), tuple(other), replicas, chosen))
        return made

    @cached_property
    def node_classes(self) -> list[NodeClass]:
        """Nodes that are alike but for their card and links, of which the fastest count."""
        classes = []
        for q, nodes in enumerate(self.nodes):
            for devices in sorted({node.devices for node in nodes}):
                alike = [node for node in nodes if node.devices == devices]
                card = max(node.network_bandwidth for node in alike)
                fabric = max(fabric_rate(node) for node in alike)
                classes.append(NodeClass(q, devices, len(alike), card, fabric))
        return classes


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
