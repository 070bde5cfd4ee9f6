"""What the parts of a plan cost on the devices of `ReplayData`: passes, transfers, rings, updates;
seconds and bytes.

Every node has a network card, or each of its devices (rails), and every device a port to the others
of its node (NVLink, PCIe), each with a sending and a receiving side. What crosses nodes goes
through the cards, which all ranks of a node share where there are no rails; what stays within a
node goes through the devices' ports. Each side is held for the seconds that it needs for what
passes it. A bridge that PCIe devices of a node share is not
modelled. A stage with tensor ranks sends each activation once over the network (scatter-gather,
Narayanan et al. 2021 (SC), Section 4.1), in parts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Recomputation, Stage
from hetplan.plans.shares import split
from hetplan.profiling.models.operators import CONTENTION
from hetplan.profiling.rates.collectives import CollectiveCurve
from hetplan.profiling.rates.times import together
from hetplan.replays.data import ReplayData
from hetplan.replays.simulator.tasks import Traffic
from hetplan.schema import Range

if TYPE_CHECKING:
    from hetplan.profiling.rates.efficiency import LearnedLinks

Floats = NDArray[np.float64]

# The forward pass's all-reduces in the backward pass: their scattered halves are kept by operator.
REPEATED_REDUCES = {"full": 2.0, "operators": 1.5}

# Adam in mixed precision reads gradient, fp32 weight and two moments and writes weight, fp32 weight
# and moments: 2 + 12 and 2 + 12 bytes; in fp32 16 and 12. Per parameter.
UPDATE_BYTES = 28
MOST_KEPT = 20_000  # of answers to one kind of question; then memory begins anew


class Costs:
    """Costs on the devices of one instance under one mode of recomputation; repeated questions are
    answered from memory. links: learned efficiency of messages and collectives; None: they reach
    the links' bandwidths.

    Ports are numbered: 2 n and 2 n + 1, the card of node n sends and receives; 2 (N + d) and
    2 (N + d) + 1, device d sends to and receives from its node; 2 (N + D + w) and the next one,
    switch w sends to and receives from the others; 2 (N + D + W + d) and the next one, the card of
    device d where its node has rails; N nodes, D devices, W switches.

    context: so many row groups of a stage take every sample together, each with its part of the
    tokens, of which bytes and seconds are then; 1: they share the samples.
    expert_sums [L + 1]: of `param_sums`, what belongs to experts that are spread over ranks.
    degrees: further ones that these costs are of.
    """

    context = 1
    degrees: Degrees | None = None

    def __init__(
        self,
        data: ReplayData,
        recomputation: Recomputation = "none",
        links: "LearnedLinks | None" = None,
    ) -> None:
        self.data, self.mode, self.links = data, recomputation, links
        # the type of each device, and its node
        self.kind = [kind for kind, _ in data.devices]
        self.node = [node for _, node in data.devices]
        self.layer_seconds = cache(self._layer_seconds)
        self._summed = cache(self._sums)
        self._table = cache(self._points)
        self._ring = lru_cache(MOST_KEPT)(self._ring_of_a_byte)
        self._tensor_bytes = summed(layer.tensor_bytes for layer in data.layers)
        self.param_sums = summed(layer.param_bytes for layer in data.layers)
        self.expert_sums = [0.0] * len(self.param_sums)
        self.tied = [l for l, layer in enumerate(data.layers) if layer.tied_param_bytes]
        self._kept = [layer.kept[recomputation] for layer in data.layers]

    def link(self, here: int, there: int) -> tuple[float, float]:
        """(bytes/s, seconds per message) between two devices."""
        nodes, a, b = self.data.nodes, self.node[here], self.node[there]
        return (
            (nodes[a].intra_bandwidth, nodes[a].intra_latency)
            if a == b
            else (
                min(
                    nodes[a].network_bandwidth,
                    nodes[b].network_bandwidth,
                    *(rate for _, rate in self.beyond(a, b)),
                ),
                max(nodes[a].network_latency, nodes[b].network_latency),
            )
        )

    def card(self, device: int) -> tuple[int, float]:
        """(number as a pair of ports, bytes/s) of the network card that a device sends through."""
        nodes, n = self.data.nodes, self.node[device]
        if not nodes[n].rails:
            return n, nodes[n].network_bandwidth
        before = len(nodes) + len(self.node) + len(self.data.uplinks)
        return before + device, nodes[n].network_bandwidth / nodes[n].devices

    def beyond(self, a: int, b: int) -> list[tuple[int, float]]:
        """(port, bytes/s) of the switches' links that a message between two nodes passes."""
        first = len(self.data.nodes) + len(self.node)
        ends = [self.data.nodes[n].switch for n in (a, b)]
        switches = enumerate(ends if ends[0] != ends[1] else ())
        return [
            (2 * (first + w) + side, self.data.uplinks[w]) for side, w in switches if w is not None
        ]

    def sides(self, here: int, there: int) -> tuple[tuple[int, float], ...]:
        """(port, bytes/s) that a message between two devices passes."""
        nodes, m, n = self.data.nodes, self.node[here], self.node[there]
        count, rate = len(nodes), nodes[m].intra_bandwidth
        if m == n:
            return (2 * (count + here), rate), (2 * (count + there) + 1, rate)
        (sends, least), (takes, most) = self.card(here), self.card(there)
        return (2 * sends, least), (2 * takes + 1, most), *self.beyond(m, n)

    def gradient_bytes(self, param_bytes: float) -> float:
        """What replicas exchange of the gradients of so many bytes of weights."""
        return param_bytes / self.data.element_bytes * self.data.gradient_bytes

    def _layer_seconds(self, kind: str, tensor: int, rows: int) -> Floats:
        """[4, L] forward and backward seconds of `rows` samples on one device of a tensor group of
        that type, and what the host takes of them.

        Straight lines between the profile's micro-batches; below the first its time, beyond the
        last the last piece's slope.
        Recomputation is part of the backward pass. Without a table of the degree, an even part of
        one device's.
        """
        if rows == 0:
            return np.zeros((4, len(self.data.layers)))
        sizes, seconds = self._table(kind, tensor)
        after = int(np.searchsorted(sizes, rows))
        if after == len(sizes):
            beyond = (rows - sizes[-1]) * slope(sizes, seconds[:, :2])
            return np.asarray(seconds[-1] + np.concatenate([beyond, np.zeros_like(beyond)]))
        if sizes[after] == rows or after == 0:
            return np.asarray(seconds[after])
        share = (rows - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return np.asarray(seconds[after - 1] + share * (seconds[after] - seconds[after - 1]))

    def _points(self, kind: str, tensor: int) -> tuple[Floats, Floats]:
        """(micro-batches [B], seconds [B, 4, L] as in `layer_seconds`)."""
        of_kind = [table for table in self.data.tables if table.type == kind]
        degree = tensor if any(table.tensor == tensor for table in of_kind) else 1
        tables = sorted(
            (table for table in of_kind if table.tensor == degree), key=lambda t: t.micro_batch
        )
        require(
            tables,
            f"no times of {kind} at tensor degree 1",
            where=f"tables of {self.data.model}",
        )
        rows = np.array(
            [
                (
                    t.forward_seconds,
                    t.backward_seconds,
                    t.forward_host_seconds,
                    t.backward_host_seconds,
                )
                for t in tables
            ]
        )
        if self.mode != "none":
            again = np.array([table.repeated[self.mode] for table in tables])
            rows[:, 1] += again * rows[:, 0]
            rows[:, 3] += again * rows[:, 2]
        return np.array([table.micro_batch for table in tables], float), rows / (tensor / degree)

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch on a stage: its slowest device's, without
        what tensor ranks do together."""
        forward, backward, _, _ = self._slowest(stage, layers, samples)
        return forward, backward

    def _slowest(self, stage: Stage, layers: Range, samples: int) -> list[float]:
        """Seconds as in `layer_seconds` of the row group that takes longest."""
        (first, last), even = layers, len(set(stage.tensor_shares)) == 1
        if len(stage.devices) == 1 and even:
            kinds = {self.kind[rank] for rank in stage.devices[0]}
            if len(kinds) == 1:
                of_kind = self._summed(kinds.pop(), len(stage.devices[0]), samples)
                return [column[last] - column[first] for column in of_kind]
        slowest = [0.0] * 4
        for group, rows in zip(stage.devices, self.rows(stage, samples), strict=True):
            of_group = [0.0] * 4
            for rank, share in zip(group, stage.tensor_shares, strict=True):
                sums = self._summed(self.kind[rank], len(group) if even else 1, rows)
                scale = 1.0 if even else share / sum(stage.tensor_shares)
                of_group = [
                    max(most, scale * (column[last] - column[first]))
                    for most, column in zip(of_group, sums, strict=True)
                ]
            slowest = max(slowest, of_group, key=lambda seconds: seconds[0] + seconds[1])
        return slowest

    def _sums(self, kind: str, tensor: int, rows: int) -> list[list[float]]:
        """`layer_seconds`, added up from the first layer on: [4][L + 1]."""
        return [summed(row) for row in self.layer_seconds(kind, tensor, rows).tolist()]

    def rows(self, stage: Stage, samples: int) -> list[int]:
        """Samples of a micro-batch on each row group of a stage."""
        return (
            [samples]
            if len(stage.devices) == 1
            else [end - begin for begin, end in split(samples * self.context, stage.row_shares)]
        )

    def reduces(self, stage: Stage, layers: Range, samples: int) -> tuple[Traffic, Traffic]:
        """What the all-reduces of the stage's tensor groups add to the forward and the backward
        pass of a micro-batch; a full recomputation repeats the forward pass's, and one by operator
        its gathers. They keep the device busy, not the host."""
        size = self._tensor_bytes[layers[1]] - self._tensor_bytes[layers[0]]
        if len(stage.tensor_shares) == 1 or size == 0:
            return Traffic(), Traffic()
        ring = self.ring(stage.devices, [size * rows for rows in self.rows(stage, samples)])
        spent = self._slowest(stage, layers, samples)
        made = []
        for seconds, host, times in zip(
            spent[:2], spent[2:], (1, REPEATED_REDUCES.get(self.mode, 1.0)), strict=True
        ):
            device = math.sqrt(max(seconds * seconds - host * host, 0.0))
            reduce = ring.seconds / 2 * times
            device += reduce - self.data.hidden_reduces * (1 - CONTENTION) * min(device, reduce)
            whole = float(together(np.array(device), np.array(host)))
            made.append(ring._replace(seconds=max(whole - seconds, 0.0)))
        return made[0], made[1]

    def transfer(self, here: Stage, there: Stage, layer: int, samples: int) -> Traffic:
        """One micro-batch's activation after `layer` (or its gradient), in the order of rows."""
        size = self.data.layers[layer].activation_bytes
        sends, takes = (split(samples * self.context, s.row_shares) for s in (here, there))
        pairs = []
        for g, (a, b) in zip(here.devices, sends, strict=True):
            for h, (c, d) in zip(there.devices, takes, strict=True):
                rows, width = min(b, d) - max(a, c), max(len(g), len(h))
                if rows > 0:
                    each = rows * size / width
                    pairs += [
                        (g[r * len(g) // width], h[r * len(h) // width], each) for r in range(width)
                    ]
        return self.messages(pairs)

    def _reached(self, operation: str, ranks: Sequence[int], size: float) -> float:
        """The share of its links' bandwidth that a message or collective reaches; latency is part
        of a learned one."""
        if self.links is None or size == 0:
            return 1.0
        inside = len({self.node[rank] for rank in ranks}) == 1
        return self.links.share(operation, "node" if inside else "between", len(ranks), size)

    def messages(self, pairs: Iterable[tuple[int, int, float]], *, ring: bool = False) -> Traffic:
        """Messages (from, to, bytes) at once: the slowest pair or the fullest port, whichever takes
        longer.

        ring: they are a collective's round, whose efficiency is not theirs.
        """
        learned = self.links is not None
        loads: dict[int, float] = {}  # seconds of each port
        seconds = latency = 0.0
        for a, b, size in pairs:
            if a == b:
                continue
            speed, delay = self.link(a, b)
            reached = size if ring or not learned else size / self._reached("send", (a, b), size)
            seconds = max(seconds, reached / speed)
            latency = max(latency, 0.0 if learned else delay)
            for port, rate in self.sides(a, b):
                loads[port] = loads.get(port, 0.0) + reached / rate
        seconds = max([seconds, *loads.values()])
        if seconds == 0:
            return Traffic(0.0, latency)
        ports = tuple((port, min(load / seconds, 1.0)) for port, load in sorted(loads.items()))
        return Traffic(seconds, latency, ports)

    def ring(self, groups: Sequence[Sequence[int]], sizes: float | Sequence[float]) -> Traffic:
        """Ring all-reduces side by side, one per group, of so many bytes each: 2 (n - 1) rounds of
        size / n, and twice the latencies of all hops of the ring but the longest.

        Devices stand in the ring in their own order, so that a ring enters and leaves each node
        once. Several ranks of a node that each have a ring, and one ring that NCCL divides over all
        cards of the node, both send a node's bytes through its cards once. Within a node whose
        fabric was measured, its curve says the seconds.
        """
        rounds = 2 * (max(len(group) for group in groups) - 1)
        if rounds == 0:
            return Traffic()
        each = sizes if isinstance(sizes, Sequence) else [sizes] * len(groups)
        largest = max(each)
        parts = [size / largest if largest else 1.0 for size in each]
        once, curve = self._ring(tuple(map(tuple, groups)), tuple(parts))
        reached = min(
            self._reached("all-reduce", group, size)
            for group, size in zip(groups, each, strict=True)
            if len(group) > 1
        )
        moving = rounds * largest * once.seconds / reached
        seconds = curve.at(largest) if curve is not None and largest > 0 else moving + once.latency
        busy = min(moving / seconds, 1.0) if seconds > 0 else 0.0
        return Traffic(seconds, 0.0, tuple((port, busy * share) for port, share in once.ports))

    def _ring_of_a_byte(
        self, groups: tuple[tuple[int, ...], ...], parts: tuple[float, ...]
    ) -> tuple[Traffic, CollectiveCurve | None]:
        """One round of one byte in the largest ring, and the measured curve."""
        pairs, latency = [], 0.0
        for group, part in zip(groups, parts, strict=True):
            order = sorted(group)
            hops = list(pairwise([*order, order[0]]))
            ways = [self.crossing(order, a, b) for a, b in hops]
            pairs += [(a, b, part / len(group) / len(way)) for way in ways for a, b in way]
            if len(group) > 1 and self.links is None:
                delays = [self.link(a, b)[1] for a, b in hops]
                latency = max(latency, 2 * (sum(delays) - max(delays)))
        return self.messages(pairs, ring=True)._replace(latency=latency), self._measured(groups)

    def crossing(self, ring: Sequence[int], a: int, b: int) -> list[tuple[int, int]]:
        """The devices of a ring that pass on at once what a hop does: between nodes with rails as
        many as both have in the ring."""
        ends = [[d for d in ring if self.node[d] == self.node[end]] for end in (a, b)]
        railed = any(self.data.nodes[self.node[end]].rails for end in (a, b))
        across = railed and self.node[a] != self.node[b]
        return list(zip(*ends, strict=False)) if across else [(a, b)]

    def _measured(self, groups: Sequence[Sequence[int]]) -> CollectiveCurve | None:
        """The measured curve of all-reduces of the largest group, where each is in one node and
        all nodes are alike."""
        nodes = self.data.nodes
        places = [{self.node[device] for device in group} for group in groups]
        first = nodes[min(places[0])]
        alike = all(
            nodes[node].device == first.device
            and nodes[node].intra_bandwidth == first.intra_bandwidth
            for place in places
            for node in place
        )
        inside = alike and max(map(len, places)) == 1 and not self.links
        return first.all_reduce.get(max(map(len, groups))) if inside else None

    def update_seconds(self, device: int, param_bytes: float) -> float:
        """The optimizer's step on `param_bytes` of weights: memory-bound."""
        moved = param_bytes / self.data.element_bytes * UPDATE_BYTES
        return self.data.types[self.kind[device]].update.seconds(moved)

    @cached_property
    def inputs(self) -> tuple[float, ...]:
        """[L] bytes per sample of each layer's input (of the first: nothing that needs keeping)."""
        return (0.0, *(layer.activation_bytes for layer in self.data.layers[:-1]))

    def saved_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that each device of a stage keeps from forward to backward."""
        names = ("saved_bytes", "replicated_saved_bytes", "gathered_bytes")
        return self._divided(sum, names, layers, tensor)

    def working_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that one layer needs beside while it is computed again."""
        names = ("working_bytes", "replicated_working_bytes", "gathered_working_bytes")
        return self._divided(max, names, layers, tensor)

    def _divided(
        self,
        of: Callable[[Iterable[float]], float],
        names: tuple[str, str, str],
        layers: Range,
        tensor: int,
    ) -> float:
        """The sum, or the most, of what layers have on each tensor rank. names: fields of `Kept`:
        all of it, the part that no rank divides, what sequence parallel ranks gather."""
        kept = self._kept[layers[0] : layers[1]]
        whole, replicated, gathered = ([getattr(k, name) for k in kept] for name in names)
        return (
            of(whole) / tensor + of(gathered) * (1 - 1 / tensor)
            if self.data.framework.sequence_parallel and tensor > 1
            else of(r + (w - r) / tensor for w, r in zip(whole, replicated, strict=True))
        )


def summed(values: Iterable[float]) -> list[float]:
    """Added up from the first on, beginning with 0."""
    return list(accumulate(values, initial=0.0))


def slope(sizes: Floats, seconds: Floats) -> Floats:
    """[2, L] seconds per further sample beyond the last of `sizes` [B], `seconds` [B, 2, L]; the
    last one's speed where times do not grow."""
    speed: Floats = seconds[-1] / sizes[-1]
    if len(sizes) == 1:
        return speed
    rise = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.asarray(np.where(rise > 0, rise, speed))
