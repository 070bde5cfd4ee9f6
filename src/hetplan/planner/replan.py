"""A new plan after a loss of nodes. Of the plans on the remaining nodes that are nearly as fast as
the fastest, the one that moves the fewest bytes of weights and optimizer states is chosen.

Sets    d devices; l layers; two kinds of state of a layer: its weights, and its optimizer states
        (moments and fp32 weights).
Data    A plan gives every device intervals within [0, 1) of each layer and kind of state: the part
        of its tensor rank. If ZeRO shards the kind, the devices with the same interval divide it
        among them, in the order of their numbers. Shards are cut layer by layer. In an SPMD plan
        the intervals are those of the parameters as the program reads them.
Rules   A device of the new plan gets each interval that it did not have from a device that had it
        and is not lost: from one in its own node if there is any, else from the one that has sent
        least so far. Intervals that no remaining device had come from a checkpoint. Gradients do
        not move, and copies of tied weights are left out.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from hetplan.errors import require
from hetplan.planner.candidate import Candidate, with_inputs
from hetplan.planner.ditto import Ditto, DittoSettings
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import OnCandidate, on_devices
from hetplan.planner.strategy import Strategy
from hetplan.planner.what_if import node_number
from hetplan.plans.plan import Plan
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.operators import ELEMENT_BYTES
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import check_same, replay
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.execution.protocol import DeviceIntervals, Interval
from hetplan.solvers.run import Run
from hetplan.text import grouped

WITHIN_PERCENT = 5.0  # by which the chosen plan may be slower than the fastest one
Key = tuple[int, str]  # layer, kind of state
KINDS = ("weights", "states")  # kinds of state
TINY = 1e-12  # length of an interval below which it is only an error of rounding


@dataclass(frozen=True)
class Moves:
    """The bytes that devices get when one plan takes the place of another."""

    links: Mapping[tuple[int, int], float]  # (from device, to device) -> bytes
    lost: Mapping[int, float]  # device -> bytes that it gets from a checkpoint

    @property
    def total(self) -> float:
        """Bytes that devices send to each other."""
        return sum(self.links.values())

    @property
    def from_checkpoint(self) -> float:
        """Bytes that come from a checkpoint."""
        return sum(self.lost.values())

    @property
    def all_bytes(self) -> float:
        """Bytes from other devices and from the checkpoint together."""
        return self.total + self.from_checkpoint

    def between_nodes(self, workload: Workload) -> dict[tuple[int, int], float]:
        """(from node, to node) -> bytes; (n, n) for bytes within node n."""
        devices = workload.cluster.devices
        sizes: dict[tuple[int, int], float] = defaultdict(float)
        for (sender, receiver), size in self.links.items():
            sizes[devices[sender].node, devices[receiver].node] += size
        return dict(sorted(sizes.items()))

    def least_seconds(self, workload: Workload) -> float:
        """Lower bound on the seconds of the moves: that of the busiest network card, in one
        direction, or of the busiest links within a node."""
        nodes = workload.cluster.nodes
        loads: dict[tuple[str, int], float] = defaultdict(float)  # (use, node) -> seconds
        for (sender, receiver), size in self.between_nodes(workload).items():
            if sender == receiver:
                node = nodes[sender]
                # at best all devices of the node send at the same time
                loads["inside", sender] += size / (node.intra_bandwidth * node.devices)
                continue
            loads["sends", sender] += size / nodes[sender].network_bandwidth
            loads["receives", receiver] += size / nodes[receiver].network_bandwidth
        return max(loads.values(), default=0.0)


@dataclass(frozen=True)
class Choice:
    """A candidate whose plan is for the whole cluster, with the lost devices idle, and the moves
    from the old plan to it."""

    candidate: Candidate
    moves: Moves

    def document(self, workload: Workload) -> Mapping[str, Any]:
        """The choice as JSON types."""
        return {
            **self.candidate.document(workload),
            "bytes_to_move": self.moves.total,
            "bytes_from_checkpoint": self.moves.from_checkpoint,
            "move_seconds": self.moves.least_seconds(workload),
            "links": [
                {"from_node": a, "to_node": b, "bytes": size}
                for (a, b), size in self.moves.between_nodes(workload).items()
            ],
        }


@dataclass(frozen=True)
class Replanning:
    """The answer of `replan`: the new plans after a loss of nodes, and the chosen one."""

    workload: Workload
    lost: tuple[int, ...]  # numbers of the lost nodes
    before: float  # seconds per iteration of the old plan on the whole cluster
    choices: tuple[Choice, ...]  # those that fit, fastest first
    # Index of the choice that moves least among those at most `within` percent slower than the
    # fastest; None where nothing fits.
    winner: int | None
    within: float  # percent

    @property
    def best(self) -> Choice | None:
        """The winning choice."""
        return None if self.winner is None else self.choices[self.winner]

    def document(self) -> dict[str, Any]:
        """The answer as JSON types."""
        return {
            "lost_nodes": list(self.lost),
            "seconds_before": self.before,
            "within_percent": self.within,
            "candidates": [choice.document(self.workload) for choice in self.choices],
            "winner": self.winner,
        }


def parse_lost(texts: Sequence[str], workload: Workload) -> tuple[int, ...]:
    """The numbers of the nodes in texts such as `["node1", "node3"]`. Raises InputError for other
    texts, and where they name no node or all nodes of the cluster."""
    lost = {node_number(text, workload.cluster, "--lost") for text in texts}
    require(
        0 < len(lost) < len(workload.cluster.nodes),
        "nothing is left" if lost else "no lost node named",
        where="--lost",
        got=", ".join(texts),
        expected="node1, say",
    )
    return tuple(sorted(lost))


def replan(
    plan: Plan,
    workload: Workload,
    lost: Sequence[int],
    run: Run | None = None,
    *,
    strategies: Sequence[Strategy] | None = None,
    within: float = WITHIN_PERCENT,
    on_candidate: OnCandidate | None = None,
) -> Replanning:
    """Plan again without the lost nodes, and count the bytes that move for each new plan.

    plan: the plan that runs now on the workload's cluster. lost: numbers of nodes. within: percent
    by which the chosen plan may be slower than the fastest. strategies: None: pipelines are made of
    the plan's templates, and all strategies are asked if the plan has no templates or none fits.
    Raises InputError unless plan and workload belong together.
    """
    check_same(plan, workload)
    cluster = workload.cluster
    left = tuple(n for n in range(len(cluster.nodes)) if n not in lost)
    rest = replace(workload, cluster=cluster.part(left))
    ready = plan.templates
    # The strategies of each attempt (None: all of them). A later attempt is made only if no plan of
    # the earlier ones fits.
    attempts = [strategies]
    if strategies is None and ready is not None:
        still_lost = max(ready.failures - len(lost), 0)  # each lost node counts as one failure
        attempts = [[Ditto(DittoSettings(failures=still_lost), ready)], None]
    for picked in attempts:
        planning = make_plans(rest, picked, run, on_candidate=on_candidate)
        if planning.best is not None:
            break
    numbers, gone = cluster.devices_of(left), set(cluster.devices_of(lost))
    inputs = Inputs.of(workload)
    choices = []
    for candidate in planning.candidates:
        if candidate.plan is None or not candidate.fits_memory:
            continue
        on_cluster = on_devices(candidate, workload, numbers)
        assert on_cluster.plan is not None  # `on_devices` keeps the plan
        places = in_place(plan, on_cluster.plan, workload, lost)
        rearranged = on_devices(on_cluster, workload, places)
        assert rearranged.plan is not None
        # the places are matched greedily, so that the rearranged plan may move more bytes
        both = [
            Choice(on_cluster, moves(plan, on_cluster.plan, workload, gone)),
            Choice(rearranged, moves(plan, rearranged.plan, workload, gone)),
        ]
        least = min(both, key=lambda choice: choice.moves.all_bytes)
        choices.append(replace(least, candidate=with_inputs(least.candidate, inputs)))
    return Replanning(
        workload=workload,
        lost=tuple(lost),
        before=replay(plan, workload).seconds,
        choices=tuple(choices),
        winner=least_moved(choices, within),
        within=within,
    )


def least_moved(choices: Sequence[Choice], within: float) -> int | None:
    """Index of the choice that moves the fewest bytes, among those at most `within` percent slower
    than the fastest; None without choices, or where a negative `within` admits none."""
    timed = []  # (seconds, bytes, index)
    for i, choice in enumerate(choices):
        seconds = choice.candidate.predicted_seconds
        if seconds is not None:
            timed.append((seconds, choice.moves.all_bytes, i))
    if not timed:
        return None
    fastest_seconds, *_ = min(timed)
    limit = fastest_seconds * (1 + within / 100)
    near = [(size, i) for seconds, size, i in timed if seconds <= limit]
    return min(near)[1] if near else None


def moves(old: Plan, new: Plan, workload: Workload, gone: Collection[int] = ()) -> Moves:
    """The moves from the plan `old` to `new`, both for the workload's cluster. gone: devices whose
    memory is lost."""
    had, needs = holdings(old, gone, workload), holdings(new, (), workload)
    sizes = state_sizes(workload)
    sent: dict[int, float] = defaultdict(float)  # device -> bytes
    links: dict[tuple[int, int], float] = defaultdict(float)
    lost: dict[int, float] = defaultdict(float)
    for key, wanted in needs.items():
        for begin, end, holders, takers in pieces(had.get(key, []), wanted):
            size = (end - begin) * sizes[key]
            for taker in takers - holders:
                source = nearest(holders, taker, workload, sent)
                if source is None:
                    lost[taker] += size
                else:
                    links[source, taker] += size
                    sent[source] += size
    return Moves(dict(sorted(links.items())), dict(sorted(lost.items())))


def in_place(old: Plan, new: Plan, workload: Workload, lost: Collection[int]) -> list[int]:
    """[device of `new`] the device that might take its place so that fewer bytes move: one of the
    same type in an equal node, which already has more of its state.

    Nodes are matched with equal nodes first, then the devices of matched nodes; the pair with the
    most common bytes comes first. lost: numbers of nodes, which take nobody's place.
    """
    nodes, devices = workload.cluster.nodes, workload.cluster.devices
    had, sizes = holdings(old, (), workload), state_sizes(workload)
    # (device of `new`, device of `old`) -> bytes that both have; the same for their nodes
    of_devices: dict[tuple[int, int], float] = defaultdict(float)
    of_nodes: dict[tuple[int, int], float] = defaultdict(float)
    for key, wanted in holdings(new, (), workload).items():
        for (taker, needed), (holder, present) in product(wanted, had.get(key, [])):
            overlap = min(needed[1], present[1]) - max(needed[0], present[0])
            common = max(0.0, overlap) * sizes[key]
            of_devices[taker, holder] += common
            of_nodes[devices[taker].node, devices[holder].node] += common
    places = list(range(len(devices)))
    left = [n for n in range(len(nodes)) if n not in lost]
    # each kind of node once, by the number of the first node that is equal
    for first_like_it in dict.fromkeys(nodes.index(nodes[n]) for n in left):
        equal_nodes = [n for n in left if nodes[n] == nodes[first_like_it]]
        for node, new_node in matched(equal_nodes, equal_nodes, of_nodes).items():
            of_node = list(workload.cluster.devices_of([node]))
            of_new_node = list(workload.cluster.devices_of([new_node]))
            for device, other in matched(of_node, of_new_node, of_devices).items():
                places[device] = other
    return places


def matched(
    items: Sequence[int], places: Sequence[int], gains: Mapping[tuple[int, int], float]
) -> dict[int, int]:
    """Item -> its place. Pairs (item, place) are taken in the order of their gain, the largest
    first; of pairs with equal gain, those of an item with itself come first."""
    chosen: dict[int, int] = {}
    for item, place in sorted(
        product(items, places),
        key=lambda pair: (-gains.get(pair, 0.0), pair[0] != pair[1], pair),
    ):
        if item not in chosen and place not in chosen.values():
            chosen[item] = place
    return chosen


def nearest(
    holders: set[int], taker: int, workload: Workload, sent: Mapping[int, float]
) -> int | None:
    """The device of `holders` that sends to `taker`: one of its node if there is any; of several
    the one that has sent least. None without holders."""
    devices = workload.cluster.devices
    node = devices[taker].node
    return min(holders, key=lambda d: (devices[d].node != node, sent.get(d, 0.0), d), default=None)


def state_sizes(workload: Workload) -> dict[Key, float]:
    """(layer, kind of state) -> bytes of the whole layer."""
    width = ELEMENT_BYTES[workload.precision]
    *_, optimizer = workload.framework.state_bytes(width)  # bytes per parameter
    sizes: dict[Key, float] = {}
    for l, layer in enumerate(workload.profile.layers):
        sizes[l, "weights"] = layer.param_bytes + layer.frozen_bytes
        sizes[l, "states"] = layer.param_bytes * optimizer / width
    return sizes


def holdings(
    plan: Plan, missing: Collection[int], workload: Workload
) -> dict[Key, DeviceIntervals]:
    """(layer, kind of state) -> the intervals that each device has, without the devices in
    `missing`."""
    owners = engine_of(plan).owners(plan, workload)
    return {
        (layer, kind): [(d, part) for d, part in sharded(plan, parts, kind) if d not in missing]
        for layer, parts in owners.items()
        for kind in KINDS
    }


def sharded(plan: Plan, parts: DeviceIntervals, kind: str) -> Iterator[tuple[int, Interval]]:
    """(device, interval that it has) for a kind of state of one layer. parts: the intervals of the
    tensor ranks. If ZeRO shards the kind, devices with the same interval each have a share of it.
    """
    first_level = 1 if kind == "states" else 3  # of ZeRO that shards the kind
    if plan.zero < first_level:
        yield from parts
        return
    # devices with the same tensor rank have the same two numbers, computed in the same way
    for (begin, end), devices in grouped((part, device) for device, part in parts).items():
        shares = {d: 1.0 if plan.zero_shares is None else plan.zero_shares[d] for d in devices}
        shard_begin = begin
        for device in sorted(devices):
            size = (end - begin) * shares[device] / sum(shares.values())
            yield device, (shard_begin, shard_begin + size)
            shard_begin += size


def pieces(
    had: DeviceIntervals, wanted: DeviceIntervals
) -> Iterator[tuple[float, float, set[int], set[int]]]:
    """(begin, end, devices that had it, devices that want it) of each interval between neighbouring
    ends of the given intervals. Intervals that no device wants are left out."""
    ends = {end for _, interval in (*had, *wanted) for end in interval}
    for begin, end in pairwise(sorted(ends)):
        middle = (begin + end) / 2
        takers = covering(wanted, middle)
        if takers and end - begin > TINY:
            yield begin, end, covering(had, middle), takers


def covering(intervals: DeviceIntervals, point: float) -> set[int]:
    """The devices with an interval around `point`."""
    return {device for device, (begin, end) in intervals if begin < point < end}
