"""A plan after a loss: the best on what is left, preferring what moves less among plans nearly as
fast; and which weights and optimizer states then move where.

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

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from hetplan.errors import require
from hetplan.planner.candidate import Candidate, carrying
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

WITHIN_PERCENT = 5.0  # by which a plan may be slower than the fastest one
Key = tuple[int, str]  # layer, kind
KINDS = ("weights", "states")
TINY = 1e-12  # of a layer: rounding of shares


@dataclass(frozen=True)
class Moves:
    """The bytes that move from one plan to another."""

    links: Mapping[tuple[int, int], float]  # (from device, to device) -> bytes
    lost: Mapping[int, float]  # device -> bytes that no device left holds

    @property
    def total(self) -> float:
        """Bytes over all links."""
        return sum(self.links.values())

    @property
    def from_checkpoint(self) -> float:
        """Bytes that come from a checkpoint."""
        return sum(self.lost.values())

    @property
    def all_bytes(self) -> float:
        """Bytes from the network and from the checkpoint together."""
        return self.total + self.from_checkpoint

    def between_nodes(self, workload: Workload) -> dict[tuple[int, int], float]:
        """(from node, to node) -> bytes; within a node under (n, n)."""
        devices = workload.cluster.devices
        sizes: dict[tuple[int, int], float] = defaultdict(float)
        for (a, b), size in self.links.items():
            sizes[devices[a].node, devices[b].node] += size
        return dict(sorted(sizes.items()))

    def least_seconds(self, workload: Workload) -> float:
        """Seconds that the exchange takes at least: every card sends and receives all that passes
        it, and a node's links carry what stays within."""
        loads: dict[tuple[str, int], float] = defaultdict(float)  # seconds
        for (a, b), size in self.between_nodes(workload).items():
            source, taker = workload.cluster.nodes[a], workload.cluster.nodes[b]
            if a == b:
                loads["inside", a] += size / (source.intra_bandwidth * source.devices)
                continue
            loads["sends", a] += size / source.network_bandwidth
            loads["receives", b] += size / taker.network_bandwidth
        return max(loads.values(), default=0.0)


@dataclass(frozen=True)
class Choice:
    """A candidate for the whole cluster, idle on what is lost, and what moves for it."""

    candidate: Candidate
    moves: Moves

    def document(self, workload: Workload) -> Mapping[str, Any]:
        """As JSON types."""
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
    """The new plan after a loss of nodes, beside the old one."""

    workload: Workload
    lost: tuple[int, ...]  # numbers of nodes
    before: float  # seconds per iteration of the old plan on the whole cluster
    choices: tuple[Choice, ...]  # that fit, fastest first
    # Index of the one that moves least among those within `within` percent of the fastest; None
    # where nothing fits.
    winner: int | None
    within: float

    @property
    def best(self) -> Choice | None:
        """The one chosen."""
        return None if self.winner is None else self.choices[self.winner]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "lost_nodes": list(self.lost),
            "seconds_before": self.before,
            "within_percent": self.within,
            "candidates": [choice.document(self.workload) for choice in self.choices],
            "winner": self.winner,
        }


def parse_lost(texts: Sequence[str], workload: Workload) -> tuple[int, ...]:
    """`["node1", "node3"]` as node numbers; raises InputError for others, none or all of the
    cluster."""
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
    """Plan again without the lost nodes (numbers), and count what moves. plan: what runs now on
    workload's cluster; where it carries templates and no strategies are named, pipelines are made
    of these, and all strategies are asked only where none fits.

    Raises InputError unless plan and workload belong together.
    """
    check_same(plan, workload)
    cluster = workload.cluster
    left = tuple(n for n in range(len(cluster.nodes)) if n not in lost)
    rest = replace(workload, cluster=cluster.part(left))
    attempts, ready = [strategies], plan.templates
    if strategies is None and ready is not None:
        attempts = [
            [Ditto(DittoSettings(failures=max(ready.failures - len(lost), 0)), ready)],
            None,
        ]
    for picked in attempts:
        planning = make_plans(rest, picked, run, on_candidate=on_candidate)
        if planning.best is not None:
            break
    numbers, gone = cluster.devices_of(left), set(cluster.devices_of(lost))
    inputs = Inputs.of(workload)
    choices = []
    for candidate in planning.candidates:
        if candidate.plan is not None and candidate.fits_memory:
            whole = on_devices(candidate, workload, numbers)
            assert whole.plan is not None
            both = [whole, on_devices(whole, workload, in_place(plan, whole.plan, workload, lost))]
            made = [Choice(c, moves(plan, c.plan, workload, gone)) for c in both if c.plan]
            least = min(made, key=lambda choice: choice.moves.all_bytes)
            choices.append(replace(least, candidate=carrying(least.candidate, inputs)))
    return Replanning(
        workload,
        tuple(lost),
        replay(plan, workload).seconds,
        tuple(choices),
        least_moved(choices, within),
        within,
    )


def least_moved(choices: Sequence[Choice], within: float) -> int | None:
    """Index of the choice that moves least (network and checkpoint alike) of those nearly as fast
    as the fastest."""
    seconds = [c.candidate.predicted_seconds for c in choices]
    limit = min((s for s in seconds if s is not None), default=0.0) * (1 + within / 100)
    near = [
        (choices[i].moves.all_bytes, i)
        for i, s in enumerate(seconds)
        if s is not None and s <= limit
    ]
    return min(near)[1] if near else None


def moves(old: Plan, new: Plan, workload: Workload, gone: Collection[int] = ()) -> Moves:
    """From `old` to `new`, both for the workload's cluster; gone: devices whose memory is lost."""
    had, needs = holdings(old, gone, workload), holdings(new, (), workload)
    sizes = state_sizes(workload)
    sent: dict[int, float] = defaultdict(float)
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
    """Where the devices of `new` might be instead: of each a device like it, on a node like its
    own, such that more of what it needs is there already. Nodes choose first, then the devices of
    each; whoever has most to gain goes before the others. lost: nodes."""
    nodes, devices = workload.cluster.nodes, workload.cluster.devices
    had, sizes = holdings(old, (), workload), state_sizes(workload)
    there: dict[tuple[int, int], float] = defaultdict(float)  # device of new, place -> bytes
    on_nodes: dict[tuple[int, int], float] = defaultdict(float)
    for key, wanted in holdings(new, (), workload).items():
        for (taker, (a, b)), (holder, (c, d)) in product(wanted, had.get(key, [])):
            common = max(0.0, min(b, d) - max(a, c)) * sizes[key]
            there[taker, holder] += common
            on_nodes[devices[taker].node, devices[holder].node] += common
    places = list(range(len(devices)))
    left = [n for n in range(len(nodes)) if n not in lost]
    for first in {nodes.index(nodes[n]): n for n in left}:
        alike = [n for n in left if nodes[n] == nodes[first]]
        for node, place in matched(alike, alike, on_nodes).items():
            own, others = (list(workload.cluster.devices_of([n])) for n in (node, place))
            for device, other in matched(own, others, there).items():
                places[device] = other
    return places


def matched(
    items: Sequence[int], places: Sequence[int], gains: Mapping[tuple[int, int], float]
) -> dict[int, int]:
    """A place for each item, the pairs of largest gain first; of equal gains, its own."""
    chosen: dict[int, int] = {}
    for item, place in sorted(
        product(items, places), key=lambda p: (-gains.get(p, 0.0), p[0] != p[1], p)
    ):
        if item not in chosen and place not in chosen.values():
            chosen[item] = place
    return chosen


def nearest(
    holders: set[int], taker: int, workload: Workload, sent: Mapping[int, float]
) -> int | None:
    """Who sends: a device of the taker's node, else any; of those the one that has sent least."""
    devices = workload.cluster.devices
    node = devices[taker].node
    return min(holders, key=lambda d: (devices[d].node != node, sent.get(d, 0.0), d), default=None)


def state_sizes(workload: Workload) -> dict[Key, float]:
    """Bytes of each layer's weights and optimizer states."""
    width = ELEMENT_BYTES[workload.precision]
    *_, optimizer = workload.framework.state_bytes(width)
    return {
        (l, kind): layer.param_bytes * factor
        for l, layer in enumerate(workload.profile.layers)
        for kind, factor in zip(KINDS, (1.0, optimizer / width), strict=True)
    }


def holdings(
    plan: Plan, missing: Collection[int], workload: Workload
) -> dict[Key, DeviceIntervals]:
    """(layer, kind) -> the intervals that each device keeps, without the devices in `missing`."""
    owners = engine_of(plan).owners(plan, workload)
    return {
        (layer, kind): [(d, part) for d, part in sharded(plan, parts, kind) if d not in missing]
        for layer, parts in owners.items()
        for kind in KINDS
    }


def sharded(plan: Plan, parts: DeviceIntervals, kind: str) -> Iterator[tuple[int, Interval]]:
    """(device, interval that it keeps) for a kind of bytes. Where ZeRO divides that kind, devices
    with copies of an interval each keep a share of it."""
    if plan.zero < (1 if kind == "states" else 3):
        yield from parts
        return
    for (begin, end), devices in grouped((part, device) for device, part in parts).items():
        weights = {d: 1.0 if plan.zero_shares is None else plan.zero_shares[d] for d in devices}
        at = begin
        for device in sorted(devices):
            size = (end - begin) * weights[device] / sum(weights.values())
            yield device, (at, at + size)
            at += size


def pieces(
    had: DeviceIntervals, wanted: DeviceIntervals
) -> Iterator[tuple[float, float, set[int], set[int]]]:
    """(begin, end, devices that had it, devices that want it) of each interval between two
    neighbouring ends of intervals."""
    ends = {end for _, interval in (*had, *wanted) for end in interval}
    for begin, end in pairwise(sorted(ends)):
        takers = covering(wanted, (begin + end) / 2)
        if takers and end - begin > TINY:
            yield begin, end, covering(had, (begin + end) / 2), takers


def covering(intervals: DeviceIntervals, at: float) -> set[int]:
    """The devices with an interval around `at`."""
    return {device for device, (begin, end) in intervals if begin < at < end}
