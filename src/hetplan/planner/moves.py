"""Which weights and optimizer states must move where when one plan takes over from another.

Sets    d devices, l layers, two kinds of state: weights, and what the optimizer holds (moments,
fp32 weights).
Holds   a plan gives every device intervals within [0, 1) of each layer, by kind: its tensor rank's
        part; what ZeRO shards is that part divided once more among those that share it, in the
        order of their numbers.
Moves   a device of the new plan gets what it did not hold from a device that did and is still
        there: one of its own node if there is one, else of those the one that has sent least. What
        nobody holds comes from a checkpoint.
An SPMD plan's parameters are held as its program reads them. Gradients are computed anew; copies of
tied weights are left out. Shards are cut layer by layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetplan.formulations.hap.spmd.program import Node
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.runtime.spmd_replay import SpmdCosts

Interval = tuple[float, float]
Key = tuple[int, str]  # layer, kind
KINDS = ("weights", "states")
TINY = 1e-12  # of a layer: rounding of shares


@dataclass(frozen=True)
class Moves:
    """links: (from device, to device) -> bytes. lost: device -> bytes that no device left holds."""

    links: Mapping[tuple[int, int], float]
    lost: Mapping[int, float]

    @property
    def total(self) -> float:
        """Bytes over all links."""
        return sum(self.links.values())

    @property
    def from_checkpoint(self) -> float:
        """Bytes that come from a checkpoint."""
        return sum(self.lost.values())

    def between_nodes(self, workload: Workload) -> dict[tuple[int, int], float]:
        """(from node, to node) -> bytes; within a node under (n, n)."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for (a, b), size in self.links.items():
            devices = workload.cluster.devices
            found[devices[a].node, devices[b].node] += size
        return dict(sorted(found.items()))

    def seconds(self, workload: Workload) -> float:
        """At least so long: every card sends and receives all that passes it, every node's links
        its own."""
        nodes = workload.cluster.nodes
        sends: dict[int, float] = defaultdict(float)
        takes: dict[int, float] = defaultdict(float)
        longest = 0.0
        for (a, b), size in self.between_nodes(workload).items():
            if a == b:
                longest = max(longest, size / (nodes[a].intra_bandwidth * nodes[a].devices))
                continue
            sends[a] += size
            takes[b] += size
        for load in (sends, takes):
            for node, size in load.items():
                longest = max(longest, size / nodes[node].network_bandwidth)
        return longest


def moves(old: Plan, new: Plan, workload: Workload, gone: Iterable[int] = ()) -> Moves:
    """From `old` to `new`, both for the workload's cluster; gone: devices whose memory is lost."""
    missing = set(gone)
    had, needs = holdings(old, missing, workload), holdings(new, set(), workload)
    sizes = state_sizes(workload)
    sent: dict[int, float] = defaultdict(float)
    links: dict[tuple[int, int], float] = defaultdict(float)
    lost: dict[int, float] = defaultdict(float)
    for key, wanted in needs.items():
        for begin, end, holders, takers in pieces(had.get(key, {}), wanted):
            size = (end - begin) * sizes[key]
            for taker in takers - holders:
                source = nearest(holders, taker, workload, sent)
                if source is None:
                    lost[taker] += size
                else:
                    links[source, taker] += size
                    sent[source] += size
    return Moves(dict(sorted(links.items())), dict(sorted(lost.items())))


def nearest(
    holders: set[int], taker: int, workload: Workload, sent: Mapping[int, float]
) -> int | None:
    """Who sends: a device of the taker's node, else any; of those the one that has sent least."""
    devices = workload.cluster.devices
    node = devices[taker].node
    return min(holders, key=lambda d: (devices[d].node != node, sent.get(d, 0.0), d), default=None)


def state_sizes(workload: Workload) -> dict[Key, float]:
    """Bytes of each layer's weights and optimizer states."""
    beyond = workload.state_bytes_per_param_byte - 2  # without weights and gradients
    factor = {"weights": 1.0, "states": beyond}
    return {
        (l, kind): layer.param_bytes * factor[kind]
        for l, layer in enumerate(workload.profile.layers)
        for kind in KINDS
    }


def holdings(
    plan: Plan, missing: set[int], workload: Workload
) -> dict[Key, dict[int, list[Interval]]]:
    """(layer, kind) -> device -> intervals; devices in `missing` hold nothing."""
    found: dict[Key, dict[int, list[Interval]]] = defaultdict(dict)
    owners = program_parts(plan, workload) if plan.schedule == "spmd" else tensor_parts(plan)
    for layer, parts in owners.items():
        for kind in KINDS:
            for device, interval in sharded(plan, parts, kind):
                if device not in missing:
                    found[layer, kind].setdefault(device, []).append(interval)
    return found


def tensor_parts(plan: Plan) -> dict[int, list[tuple[int, Interval]]]:
    """Layer -> (device, its tensor rank's part) of every replica and row group."""
    found: dict[int, list[tuple[int, Interval]]] = defaultdict(list)
    for replica in plan.replicas:
        for stage in replica.stages:
            whole, ends = sum(stage.tensor_shares), [0.0]
            for share in stage.tensor_shares:
                ends.append(ends[-1] + share / whole)
            for first, last in stage.layers:
                for layer in range(first, last):
                    for group in stage.devices:
                        found[layer] += [(d, (ends[r], ends[r + 1])) for r, d in enumerate(group)]
    return found


def program_parts(plan: Plan, workload: Workload) -> dict[int, list[tuple[int, Interval]]]:
    """Layer -> (device, part) under an SPMD plan: parameters lie behind each other in their layer,
    each as its program holds it. Slices along any dimension count as parts of the parameter, as
    tensor ranks' do."""
    costs = SpmdCosts.of(plan, workload)
    program, numbers = (
        costs.reading.theory.program,
        {layer.name: l for l, layer in enumerate(workload.profile.layers)},
    )
    of_layer: dict[int, list[Node]] = defaultdict(list)
    for node in program.parameters:
        of_layer[numbers[node.layer]].append(node)
    found: dict[int, list[tuple[int, Interval]]] = defaultdict(list)
    for layer, nodes in of_layer.items():
        whole, begin = sum(node.elements for node in nodes), 0.0
        for node in nodes:
            shard, share = (
                costs.shards[program.copies.get(node.name, node.name)],
                node.elements / whole,
            )
            for rank, device in enumerate(costs.devices):
                first, last, length = 0, 1, 1
                if shard.dimension is not None:
                    (first, last), length = shard.bounds[rank], shard.shape[shard.dimension]
                if last > first:
                    ends = begin + share * first / length, begin + share * last / length
                    found[layer].append((device, ends))
            begin += share
    return found


def sharded(
    plan: Plan, parts: list[tuple[int, Interval]], kind: str
) -> Iterator[tuple[int, Interval]]:
    """What each device keeps of a kind: its part, or its share of it where ZeRO divides that
    kind."""
    divides = plan.zero >= 1 if kind == "states" else plan.zero == 3
    if not divides:
        yield from parts
        return
    sharers: dict[Interval, list[int]] = defaultdict(list)
    for device, interval in parts:
        sharers[interval].append(device)
    for (begin, end), devices in sharers.items():
        weights = [
            1.0 if plan.zero_shares is None else plan.zero_shares[d] for d in sorted(devices)
        ]
        at = begin
        for device, weight in zip(sorted(devices), weights, strict=True):
            size = (end - begin) * weight / sum(weights)
            yield device, (at, at + size)
            at += size


def pieces(
    had: Mapping[int, list[Interval]], wanted: Mapping[int, list[Interval]]
) -> Iterator[tuple[float, float, set[int], set[int]]]:
    """(begin, end, who held it, who needs it) between any two ends of intervals."""
    every = [interval for held in (*had.values(), *wanted.values()) for interval in held]
    ends = sorted({end for interval in every for end in interval})
    for begin, end in pairwise(ends):
        if end - begin <= TINY:
            continue
        middle = (begin + end) / 2
        takers = covering(wanted, middle)
        if takers:
            yield begin, end, covering(had, middle), takers


def covering(held: Mapping[int, list[Interval]], at: float) -> set[int]:
    """The devices with an interval around `at`."""
    return {d for d, intervals in held.items() if any(begin < at < end for begin, end in intervals)}
