"""What a change of the cluster is worth: more devices, fewer, a faster network; each planned anew.

The best plan of the cluster as it is also runs on a larger or faster cluster, and on one that lacks
only devices that it leaves idle. It is replayed there, so that a change that only adds never costs.
The other way round, a plan for the cluster without some nodes also runs where these nodes are idle,
so that losing nodes never gains.
Where no changes are given, the marginal ones are asked: one more node of each kind, one less, each
kind of link twice as fast.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError, require
from hetplan.planner.ranking import Planning, make_plans
from hetplan.planner.search import OnCandidate, on_devices, shortest
from hetplan.planner.strategy import Candidate, Part, Strategy, make_strategies, places_of
from hetplan.profiling.cluster import GBIT, Cluster, Node, device
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Run
from hetplan.text import ranges_text


@dataclass(frozen=True)
class Change:
    """A named change of a cluster."""

    name: str
    cluster: Cluster  # the changed one; the nodes that keep all their devices come first
    kept: tuple[int, ...]  # the numbers of those nodes in the cluster as it is
    added_devices: int = 0  # below 0: so many are removed


@dataclass(frozen=True)
class ChangeResult:
    """What comes of a change."""

    change: Change
    workload: Workload
    best: Candidate | None  # None where nothing fits
    gain: float | None  # seconds per iteration saved; negative: lost
    same_plan: bool = False  # whether the best is the plan as it is, moved to the changed cluster
    reasons: tuple[str, ...] = ()  # where there is no plan: why, candidate by candidate

    @property
    def gain_per_device(self) -> float | None:
        """Seconds per iteration saved for each device added or removed."""
        if self.gain is None or not self.change.added_devices:
            return None
        return self.gain / abs(self.change.added_devices)

    def document(self) -> Mapping[str, Any]:
        """As JSON types."""
        return {
            "change": self.change.name,
            "devices": self.workload.cluster.counts(),
            "seconds_saved": self.gain,
            "seconds_saved_per_device": self.gain_per_device,
            "best": None if self.best is None else self.best.document(self.workload),
        }


@dataclass(frozen=True)
class WhatIf:
    """The cluster as it is, and after each change, in the order asked."""

    base: ChangeResult
    variants: tuple[ChangeResult, ...]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "base": self.base.document(),
            "variants": [v.document() for v in self.variants],
        }


def every_node(cluster: Cluster) -> tuple[int, ...]:
    """The numbers of all nodes."""
    return tuple(range(len(cluster.nodes)))


def with_nodes(cluster: Cluster, name: str, nodes: Iterable[Node]) -> Cluster:
    """A cluster of these nodes, named after the change that makes it of `cluster`."""
    nodes = tuple(nodes)
    kinds = dict.fromkeys(node.device for node in nodes)
    specs = {k: cluster.specs.get(k) or device(k, where="--add") for k in kinds}
    return Cluster(f"{cluster.name}, {name}"[:200], nodes, specs)


def addition(text: str, cluster: Cluster) -> Change:
    """`2xA100-SXM4-80GB`: one more node of two; linked as the cluster's nodes of that device, else
    as its best."""
    count, kind = amount(text, "--add")
    nodes = cluster.nodes
    best = Node(
        kind,
        count,
        max(n.intra_bandwidth for n in nodes),
        max(n.network_bandwidth for n in nodes),
        min(n.intra_latency for n in nodes),
        min(n.network_latency for n in nodes),
    )
    added = replace(next((n for n in nodes if n.device == kind), best), devices=count)
    name = f"add {text}"
    return Change(name, with_nodes(cluster, name, (*nodes, added)), every_node(cluster), count)


def removal(text: str, cluster: Cluster) -> Change:
    """`node1`, or `4xT4`: so many devices less, from the last nodes that have them."""
    if text.startswith("node"):
        gone = list(cluster.devices_of([node_number(text, cluster, "--remove")]))
    else:
        count, kind = amount(text, "--remove")
        alike = [n for n in every_node(cluster) if cluster.nodes[n].device == kind]
        gone = list(cluster.devices_of(alike))[-count:]
        require(
            len(gone) == count,
            "more than there are",
            where="--remove",
            got=text,
            expected=f"at most {len(gone)}",
        )
    left = Counter(d.node for number, d in enumerate(cluster.devices) if number not in gone)
    require(left, "nothing is left", where="--remove", got=text)
    kept = tuple(n for n in left if left[n] == cluster.nodes[n].devices)
    smaller = [replace(cluster.nodes[n], devices=left[n]) for n in left if n not in kept]
    name = f"remove {text}"
    nodes = (*(cluster.nodes[n] for n in kept), *smaller)
    return Change(name, with_nodes(cluster, name, nodes), kept, -len(gone))


def amount(text: str, option: str) -> tuple[int, str]:
    """`2xT4` as (2, "T4"); raises InputError."""
    match = re.fullmatch(r"(\d{1,4})x(.+)", text.strip())
    if match is None or int(match[1]) < 1:
        raise InputError(
            "not usable", where=option, got=text, expected="COUNTxDEVICE, as 2xA100-SXM4-80GB"
        )
    return int(match[1]), match[2]


def node_number(text: str, cluster: Cluster, option: str) -> int:
    """`node1` as 1; raises InputError for a node that there is not."""
    names = [f"node{n}" for n in every_node(cluster)]
    name = text.replace(" ", "")
    require(
        name in names, "no such node", where=option, got=text, expected=f"{names[0]} to {names[-1]}"
    )
    return names.index(name)


def relinked(
    cluster: Cluster,
    name: str,
    only: str | None = None,
    network: float | None = None,
    intra: float | None = None,
) -> Change:
    """Other links in bytes/s, where they are given. only: of this type's nodes; None: of all."""
    nodes = [
        replace(
            node,
            network_bandwidth=network or node.network_bandwidth,
            intra_bandwidth=intra or node.intra_bandwidth,
        )
        if only in (None, node.device)
        else node
        for node in cluster.nodes
    ]
    return Change(name, with_nodes(cluster, name, nodes), every_node(cluster))


def faster_network(gbit: float, cluster: Cluster) -> Change:
    """Every node's network at so many Gbit/s."""
    require(
        1e-6 <= gbit <= 1e9,
        "not usable",
        where="--network-gbit-per-s",
        got=gbit,
        expected="Gbit/s between 1e-6 and 1e9",
    )
    had = [n for n in every_node(cluster) if cluster.nodes[n].network_bandwidth > gbit * GBIT]
    less = f" (node {ranges_text(had)}: less than now)" if had else ""
    return relinked(cluster, f"network at {gbit:g} Gbit/s{less}", network=gbit * GBIT)


def marginal(cluster: Cluster) -> Iterator[Change]:
    """One more node of each kind, one less; networks twice as fast, of all nodes and of each
    kind's, where there are several; links inside the nodes of each kind twice as fast."""
    every, several = every_node(cluster), len(cluster.nodes) > 1
    of_kind = {k: [n for n in every if cluster.nodes[n].device == k] for k in cluster.types}
    for kind, numbers in of_kind.items():
        yield addition(f"{cluster.nodes[numbers[0]].devices}x{kind}", cluster)
        if several:
            yield removal(f"node{numbers[-1]}", cluster)
    if several:
        yield faster_network(2 * max(n.network_bandwidth for n in cluster.nodes) / GBIT, cluster)
    for kind, numbers in of_kind.items():
        network = 2 * max(cluster.nodes[n].network_bandwidth for n in numbers)
        intra = 2 * max(cluster.nodes[n].intra_bandwidth for n in numbers)
        if len(of_kind) > 1:
            text = f"network of {kind} nodes at {network / GBIT:g} Gbit/s"
            yield relinked(cluster, text, kind, network=network)
        if any(cluster.nodes[n].devices > 1 for n in numbers):
            text = f"links inside {kind} nodes at {intra / GBIT:g} Gbit/s"
            yield relinked(cluster, text, kind, intra=intra)


def what_if(
    workload: Workload,
    changes: Sequence[Change],
    run: Run | None = None,
    *,
    strategies: Sequence[Strategy] | None = None,
    on_candidate: OnCandidate | None = None,
) -> WhatIf:
    """Plan as it is and after each change, in equal shares of the run's time. The workload's
    profile must be predicted where devices are added."""
    run, strategies = run or Run(), strategies or make_strategies()
    as_is = Change("as it is", workload.cluster, every_node(workload.cluster))
    planned: list[tuple[Change, Workload, Planning]] = []
    first = run.share(len(changes) + 1)
    best = make_plans(workload, strategies, first, on_candidate=on_candidate).best
    for left, change in zip(range(len(changes), 0, -1), changes, strict=True):
        if run.cancelled:
            break
        changed = changed_workload(workload, change.cluster)
        before = plan_as_it_is(best, workload, changed, change)
        moved = [before.plan] if before and before.plan else []
        begun = [strategy.beginning_with(moved) for strategy in strategies]
        planning = make_plans(changed, begun, run.share(left), on_candidate=on_candidate)
        planned.append((change, changed, planning))
    for change, _, planning in planned:
        # Where nothing but whole nodes goes, the plan runs with these idle, too.
        whole = change.added_devices < 0 and len(change.kept) == len(change.cluster.nodes)
        if planning.best is not None and whole:
            part = Part(f"idle: {change.name.removeprefix('remove ')}", change.kept)
            idle = replace(planning.best, variant=replace(planning.best.variant, part=part))
            numbers = workload.cluster.devices_of(change.kept)
            best = shortest(filter(None, (best, on_devices(idle, workload, numbers))))
    variants = []
    for change, changed, planning in planned:
        before = plan_as_it_is(best, workload, changed, change)
        after = shortest(filter(None, (planning.best, before)))
        gain = None
        if best is not None and after is not None:
            gain = (best.predicted_seconds or 0.0) - (after.predicted_seconds or 0.0)
        same = after is not None and after is before
        reasons = (f"{c.name}: {c.message}" for c in planning.candidates if c.message)
        why = tuple(reasons) if after is None else ()
        variants.append(ChangeResult(change, changed, after, gain, same, why))
    return WhatIf(ChangeResult(as_is, workload, best, None), tuple(variants))


def changed_workload(workload: Workload, cluster: Cluster) -> Workload:
    """The workload on a changed cluster: its own profile where that knows every device, else a
    predicted one."""
    profile = workload.profile
    lacking = [name for name in cluster.types if name not in profile.devices()]
    if not lacking:
        return replace(workload, cluster=cluster)
    require(
        profile.provenance.kind == "predicted",
        f"the measured profile has no table for {lacking[0]!r}",
        where=profile.model,
        expected="one with it",
    )
    made = make_workload(
        workload.model,
        cluster,
        workload.global_batch,
        framework=workload.framework,
        stack=workload.stack,
    )
    return replace(
        made, reserved_bytes=workload.reserved_bytes, memory_margin=workload.memory_margin
    )


def plan_as_it_is(
    best: Candidate | None, workload: Workload, changed: Workload, change: Change
) -> Candidate | None:
    """The best plan as it is, replayed on the changed cluster; None where a device that it uses is
    gone."""
    if best is None or best.plan is None or best.replay is None:
        return None
    cluster = workload.cluster  # in the changed one the nodes that are kept come first
    places = places_of(cluster.devices_of(change.kept), len(cluster.devices))
    if any(places[number] < 0 for number in best.plan.ranks):
        return None
    return replace(
        on_devices(best, changed, places),
        status="feasible",
        closed_form_seconds=None,
        objective=None,  # objective and bound are of the problem as it is
        bound=None,
        message="the plan as it is",
    )
