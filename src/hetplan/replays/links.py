"""Messages and collectives between the devices of `ReplayData`: seconds, and the ports they hold.

Every node has a network card, or each of its devices (rails), and every device a port to the others
of its node (NVLink, PCIe), each with a sending and a receiving side. What crosses nodes goes
through the cards, which all ranks of a node share where there are no rails; what stays within a
node goes through the devices' ports. Each side is held for the seconds that it needs for what
passes it. A bridge that PCIe devices of a node share is not modelled.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from hetplan.profiling.rates.collectives import CollectiveCurve
from hetplan.profiling.rates.efficiency import LearnedLinks
from hetplan.replays.data import ReplayData
from hetplan.replays.simulator.tasks import Traffic

MOST_KEPT = 20_000  # of answers to one kind of question; then memory begins anew


class Links:
    """Links between the devices of one instance; repeated questions are answered from memory.

    links: learned efficiency of messages and collectives; None: they reach the links' bandwidths.
    node [D]: the node of each device.

    Ports are numbered: 2 n and 2 n + 1, the card of node n sends and receives; 2 (N + d) and
    2 (N + d) + 1, device d sends to and receives from its node; 2 (N + D + w) and the next one,
    switch w sends to and receives from the others; 2 (N + D + W + d) and the next one, the card of
    device d where its node has rails; N nodes, D devices, W switches.
    """

    def __init__(self, data: ReplayData, links: LearnedLinks | None = None) -> None:
        self.data, self.links = data, links
        self.node = [node for _, node in data.devices]
        self._ring = lru_cache(MOST_KEPT)(self._ring_of_a_byte)

    def link(self, here: int, there: int) -> tuple[float, float]:
        """(bytes/s, seconds per message) between two devices."""
        nodes, a, b = self.data.nodes, self.node[here], self.node[there]
        if a == b:
            return nodes[a].intra_bandwidth, nodes[a].intra_latency
        cards = nodes[a].network_bandwidth, nodes[b].network_bandwidth
        switches = [rate for _, rate in self.beyond(a, b)]
        latency = max(nodes[a].network_latency, nodes[b].network_latency)
        return min(*cards, *switches), latency

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
