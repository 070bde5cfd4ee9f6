"""Messages and collectives between the devices of `ReplayData`: their seconds, and the ports that
they occupy.

Every node has a network card which all its devices share; in a node with rails every device has a
card of its own. Every device also has a connection to the other devices of its node (NVLink, PCIe).
Bytes between nodes pass the cards, and the uplinks of their switches; bytes within a node pass the
devices' connections. A card, a connection and an uplink each have two ports, one that sends and one
that receives. A port is occupied for the seconds that it needs for the bytes that pass it. Where a
node states the most that one message reaches, a message alone does not fill the card. A bridge that
PCIe devices of a node share is not modelled.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from hetplan.profiling.rates.collectives import CollectiveCurve
from hetplan.profiling.rates.efficiency import LearnedLinks
from hetplan.replays.data import ReplayData
from hetplan.replays.simulator.tasks import Traffic

MOST_KEPT = 20_000  # entries of each cache; a full cache drops the entry unused for longest


def sending(pair: int) -> int:
    """The port that sends, of a pair of ports."""
    return 2 * pair


def receiving(pair: int) -> int:
    """The port that receives, of a pair of ports."""
    return 2 * pair + 1


class Links:
    """Links between the devices of one instance; the rings of groups are cached.

    Ports come in pairs (`sending`, `receiving`). With N nodes, D devices and W switches, the pairs
    are numbered:

        n                the card of node n
        N + d            the connection of device d to its node
        N + D + w        the uplink of switch w to all other switches
        N + D + W + d    the card of device d, where its node has rails
    """

    def __init__(self, data: ReplayData, links: LearnedLinks | None = None) -> None:
        """links: learned efficiency of messages and collectives; None: they reach the links'
        bandwidths."""
        self.data, self.links = data, links
        self.node = [node for _, node in data.devices]  # [D] the node of each device
        self._ring = lru_cache(MOST_KEPT)(self._ring_of_a_byte)

    def link(self, here: int, there: int) -> tuple[float, float]:
        """(bytes/s, seconds per message) of a message from device `here` to device `there`."""
        nodes, m, n = self.data.nodes, self.node[here], self.node[there]
        if m == n:
            return nodes[m].intra_bandwidth, nodes[m].intra_latency
        bandwidths = [nodes[m].network_bandwidth, nodes[n].network_bandwidth]
        bandwidths += [bandwidth for _, bandwidth in self.beyond(m, n)]
        flows = (nodes[m].flow_bandwidth, nodes[n].flow_bandwidth)
        bandwidths += [flow for flow in flows if flow is not None]
        latency = max(nodes[m].network_latency, nodes[n].network_latency)
        return min(bandwidths), latency

    def card(self, device: int) -> tuple[int, float]:
        """(pair of ports, bytes/s) of the network card through which a device sends."""
        nodes, n = self.data.nodes, self.node[device]
        if not nodes[n].rails:
            return n, nodes[n].network_bandwidth
        first_rail = len(nodes) + len(self.node) + len(self.data.uplinks)
        return first_rail + device, nodes[n].network_bandwidth / nodes[n].devices

    def beyond(self, a: int, b: int) -> list[tuple[int, float]]:
        """(port, bytes/s) of each uplink that a message from node a to node b passes."""
        source, target = self.data.nodes[a].switch, self.data.nodes[b].switch
        if source == target:
            return []
        first_switch = len(self.data.nodes) + len(self.node)
        uplinks = []
        if source is not None:
            uplinks.append((sending(first_switch + source), self.data.uplinks[source]))
        if target is not None:
            uplinks.append((receiving(first_switch + target), self.data.uplinks[target]))
        return uplinks

    def sides(self, here: int, there: int) -> tuple[tuple[int, float], ...]:
        """(port, bytes/s) of each port that a message from device `here` to `there` passes."""
        nodes, m, n = self.data.nodes, self.node[here], self.node[there]
        if m == n:
            first_device = len(nodes)
            bandwidth = nodes[m].intra_bandwidth
            return (
                (sending(first_device + here), bandwidth),
                (receiving(first_device + there), bandwidth),
            )
        source_card, source_bandwidth = self.card(here)
        target_card, target_bandwidth = self.card(there)
        return (
            (sending(source_card), source_bandwidth),
            (receiving(target_card), target_bandwidth),
            *self.beyond(m, n),
        )

    def _reached(self, operation: str, ranks: Sequence[int], size: float) -> float:
        """The share of its links' bandwidth that a message or collective reaches: 1 without learned
        links. The latency is part of a learned share."""
        if self.links is None or size == 0:
            return 1.0
        inside = len({self.node[rank] for rank in ranks}) == 1
        return self.links.share(operation, "node" if inside else "between", len(ranks), size)

    def messages(self, pairs: Iterable[tuple[int, int, float]], *, ring: bool = False) -> Traffic:
        """Messages (from, to, bytes) that are sent at the same time.

        Their seconds are those of the slowest message or of the port with the most bytes for its
        bandwidth, whichever takes longer.

        ring: whether they are a round of a ring, to which the learned share of single messages does
        not apply.
        """
        learned = self.links is not None
        loads: dict[int, float] = {}  # port -> seconds
        seconds = latency = 0.0
        for a, b, size in pairs:
            if a == b:
                continue
            bandwidth, delay = self.link(a, b)
            # the bytes that would take as long at the full bandwidth
            full_rate_size = size
            if learned and not ring:
                full_rate_size = size / self._reached("send", (a, b), size)
            seconds = max(seconds, full_rate_size / bandwidth)
            if not learned:
                latency = max(latency, delay)
            for port, rate in self.sides(a, b):
                loads[port] = loads.get(port, 0.0) + full_rate_size / rate
        seconds = max([seconds, *loads.values()])
        if seconds == 0:
            return Traffic(0.0, latency)
        # no load exceeds `seconds`; rounding may
        ports = tuple((port, min(load / seconds, 1.0)) for port, load in sorted(loads.items()))
        return Traffic(seconds, latency, ports)

    def ring(self, groups: Sequence[Sequence[int]], sizes: float | Sequence[float]) -> Traffic:
        """Ring all-reduces at the same time, one per group. A ring of n ranks takes 2 (n - 1)
        rounds of size / n bytes, and twice the latencies of all its hops but the longest.

        The devices of a ring are in the order of their numbers, so that the ring enters and leaves
        each node once. One ring for each of several ranks of a node, and one ring that NCCL divides
        over all cards of the node, both send a node's bytes through its cards once. Within a node
        whose fabric was measured, the measured curve gives the seconds.

        Groups of one device take no time. sizes: bytes on each rank, of all groups or group by
        group.
        """
        rounds = 2 * (max(len(group) for group in groups) - 1)
        if rounds == 0:
            return Traffic()
        group_sizes = sizes if isinstance(sizes, Sequence) else [sizes] * len(groups)
        largest = max(group_sizes)
        # Without bytes the parts have no effect, since the seconds are multiplied by `largest`.
        parts = [size / largest if largest else 1.0 for size in group_sizes]
        one_round, curve = self._ring(tuple(map(tuple, groups)), tuple(parts))
        reached = min(
            self._reached("all-reduce", group, size)
            for group, size in zip(groups, group_sizes, strict=True)
            if len(group) > 1
        )
        moving = rounds * largest * one_round.seconds / reached
        seconds = moving + one_round.latency
        if curve is not None and largest > 0:
            seconds = curve.at(largest)
        # A measured collective may take fewer seconds than the links' bandwidths say. It then holds
        # its ports for all of them.
        busy = min(moving / seconds, 1.0) if seconds > 0 else 0.0
        ports = tuple((port, busy * share) for port, share in one_round.ports)
        return Traffic(seconds, 0.0, ports)

    def _ring_of_a_byte(
        self, groups: tuple[tuple[int, ...], ...], parts: tuple[float, ...]
    ) -> tuple[Traffic, CollectiveCurve | None]:
        """(one round of the rings, measured curve of `_measured`), when a rank of the group with
        the most bytes has one byte.

        The latency counts all rounds. parts: each group's bytes over the most bytes.
        """
        pairs, latency = [], 0.0
        for group, part in zip(groups, parts, strict=True):
            order = sorted(group)
            hops = list(pairwise([*order, order[0]]))
            for a, b in hops:
                senders = self.crossing(order, a, b)
                size = part / len(group) / len(senders)
                pairs += [(source, target, size) for source, target in senders]
            if len(group) > 1 and self.links is None:
                # A part of the tensor goes along all hops but one, once to be summed and once as a
                # sum. The hop left out is taken to be the longest.
                delays = [self.link(a, b)[1] for a, b in hops]
                latency = max(latency, 2 * (sum(delays) - max(delays)))
        return self.messages(pairs, ring=True)._replace(latency=latency), self._measured(groups)

    def crossing(self, ring: Sequence[int], a: int, b: int) -> list[tuple[int, int]]:
        """(sender, receiver) of the messages that share the bytes of a hop from device a to b.

        Between nodes with rails, every device that both nodes have in the ring sends a part through
        its own card. Any other hop is one message.
        """
        ends = [[d for d in ring if self.node[d] == self.node[end]] for end in (a, b)]
        railed = any(self.data.nodes[self.node[end]].rails for end in (a, b))
        across = railed and self.node[a] != self.node[b]
        # as many messages as the node with fewer devices in the ring has devices
        return list(zip(*ends, strict=False)) if across else [(a, b)]

    def _measured(self, groups: Sequence[Sequence[int]]) -> CollectiveCurve | None:
        """The measured curve of all-reduces of the largest group; None unless every group is within
        one node and all these nodes are alike. Learned links leave it out, too."""
        nodes = self.data.nodes
        nodes_of_groups = [{self.node[device] for device in group} for group in groups]
        first = nodes[min(nodes_of_groups[0])]
        alike = all(
            nodes[n].device == first.device and nodes[n].intra_bandwidth == first.intra_bandwidth
            for of_group in nodes_of_groups
            for n in of_group
        )
        inside = alike and max(map(len, nodes_of_groups)) == 1 and self.links is None
        return first.all_reduce.get(max(map(len, groups))) if inside else None
