"""What a change of the cluster is worth: more devices, fewer, a faster network; each planned anew.

What runs on the cluster as it is runs on a larger or faster one, too, and where only idle devices
are gone: the old winner is replayed there, and a change that only adds never costs. What runs
without some nodes runs with them idle, so that losing them never gains. What is proven of one
cluster's problems is carried over to the others', as far as it holds there (`planner.known`).
Without changes given, the marginal ones are asked: one more node of each kind, one less, each kind
of link twice as fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetplan.errors import InputError, UnsupportedError
from hetplan.planner.candidate import Candidate, lifted, shortest
from hetplan.planner.known import Known, remembering
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import OnCandidate
from hetplan.planner.strategy import Strategy
from hetplan.planner.variant import Part, lifted_plan
from hetplan.profiling.catalogue import DeviceSpec, device
from hetplan.profiling.cluster import GBIT, Cluster, Node
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.replay import replay
from hetplan.solvers.run import Run


@dataclass(frozen=True)
class Change:
    """A named change of a cluster."""

    name: str
    kept: tuple[int, ...]  # numbers of the nodes that stay; they come first
    added: tuple[Node, ...] = ()  # behind those
    specs: Mapping[str, DeviceSpec] = field(default_factory=dict)  # of the devices added
    devices: int = 0  # so many more, or fewer below 0
    network: float | None = None  # bytes/s of the nodes' networks; None: as they are
    intra: float | None = None  # bytes/s of the links inside nodes
    only: str | None = None  # the device type whose nodes' links change; None: all

    @property
    def removes_only(self) -> bool:
        """Whether nothing but nodes that go changes."""
        return not self.added and self.network is None and self.intra is None

    def apply(self, cluster: Cluster) -> Cluster:
        """The changed cluster."""
        nodes = tuple(self.linked(n) for n in (*(cluster.nodes[k] for k in self.kept), *self.added))
        kinds = {node.device for node in nodes}
        specs = {k: spec for k, spec in {**cluster.specs, **self.specs}.items() if k in kinds}
        return Cluster(f"{cluster.name}, {self.name}"[:200], nodes, specs)

    def linked(self, node: Node) -> Node:
        """The node with its changed links."""
        if self.only not in (None, node.device):
            return node
        network = node.network_bandwidth if self.network is None else self.network
        intra = node.intra_bandwidth if self.intra is None else self.intra
        return replace(node, network_bandwidth=network, intra_bandwidth=intra)


@dataclass(frozen=True)
class Changed:
    """What comes of a change."""

    change: Change
    workload: Workload
    best: Candidate | None  # None where nothing fits
    gain: float | None  # seconds per iteration saved; negative: lost

    def document(self) -> Mapping[str, Any]:
        """As JSON types."""
        devices = self.change.devices
        known = self.gain is not None and devices
        return {
            "change": self.change.name,
            "devices": self.workload.cluster.counts(),
            "seconds_saved": self.gain,
            "seconds_saved_per_device": (self.gain or 0.0) / devices if known else None,
            "best": None if self.best is None else self.best.document(self.workload),
        }


@dataclass(frozen=True)
class WhatIf:
    """The cluster as it is, and after each change, in the order asked."""

    base: Changed
    variants: tuple[Changed, ...]
    decided: tuple[str, ...] = ()  # problems that were decided without solving, and why

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "base": self.base.document(),
            "variants": [v.document() for v in self.variants],
            "decided_without_solving": list(self.decided),
        }


def every_node(cluster: Cluster) -> tuple[int, ...]:
    """The numbers of all nodes."""
    return tuple(range(len(cluster.nodes)))


def addition(text: str, cluster: Cluster) -> Change:
    """`2xA100-SXM4-80GB`: one more node of two; linked as the cluster's nodes of that device, else
    as its best."""
    count, name = amount(text, "--add")
    best = Node(
        name,
        count,
        max(n.intra_bandwidth for n in cluster.nodes),
        max(n.network_bandwidth for n in cluster.nodes),
        min(n.intra_latency for n in cluster.nodes),
        min(n.network_latency for n in cluster.nodes),
    )
    like = next((node for node in cluster.nodes if node.device == name), best)
    spec = cluster.specs[name] if name in cluster.specs else device(name, where="--add")
    added = (replace(like, devices=count),)
    return Change(f"add {text}", every_node(cluster), added, {name: spec}, count)


def removal(text: str, cluster: Cluster) -> Change:
    """`node1`, or `4xT4`: so many devices less, from the last nodes that have them."""
    match, count = re.fullmatch(r"node ?(\d{1,9})", text), len(cluster.nodes)
    kept, added = list(every_node(cluster)), list[Node]()
    if match is not None:
        if int(match[1]) >= count:
            expected = f"node0 to node{count - 1}"
            raise InputError("no such node", where="--remove", got=text, expected=expected)
        kept.remove(int(match[1]))
        gone = cluster.nodes[int(match[1])].devices
    else:
        gone, name = amount(text, "--remove")
        have, left = cluster.counts().get(name, 0), gone
        if gone > have:
            expected = f"at most {have}"
            raise InputError("more than there are", where="--remove", got=text, expected=expected)
        for n in reversed(every_node(cluster)):
            node = cluster.nodes[n]
            if node.device == name and left:
                kept.remove(n)
                if node.devices > left:
                    added.append(replace(node, devices=node.devices - left))
                left = max(0, left - node.devices)
    if not kept and not added:
        raise InputError("nothing is left", where="--remove", got=text)
    return Change(f"remove {text}", tuple(kept), tuple(added), devices=-gone)


def amount(text: str, option: str) -> tuple[int, str]:
    """`2xT4` as (2, "T4"); raises InputError."""
    match = re.fullmatch(r"(\d{1,4})x(.+)", text.strip())
    if match is None or int(match[1]) < 1:
        expected = "COUNTxDEVICE, as 2xA100-SXM4-80GB"
        raise InputError("not usable", where=option, got=text, expected=expected)
    return int(match[1]), match[2]


def faster_network(gbit: float, cluster: Cluster) -> Change:
    """Every node's network at so many Gbit/s."""
    if not 1e-6 <= gbit <= 1e9:
        raise InputError("--network-gbit-per-s", got=gbit, expected="Gbit/s between 1e-6 and 1e9")
    return Change(f"network at {gbit:g} Gbit/s", every_node(cluster), network=gbit * GBIT)


def marginal(cluster: Cluster) -> list[Change]:
    """One more node of each kind, one less; networks twice as fast, of all nodes and of each
    kind's, where there are several; links inside the nodes of each kind twice as fast."""
    changes, links, every = list[Change](), list[Change](), every_node(cluster)
    for name in cluster.types:
        own = [n for n in every if cluster.nodes[n].device == name]
        nodes = [cluster.nodes[n] for n in own]
        changes.append(addition(f"{nodes[0].devices}x{name}", cluster))
        if len(every) > 1:
            changes.append(removal(f"node{own[-1]}", cluster))
        if len(cluster.types) > 1:
            network = 2 * max(node.network_bandwidth for node in nodes)
            text = f"network of {name} nodes at {network / GBIT:g} Gbit/s"
            links.append(Change(text, every, network=network, only=name))
        if any(node.devices > 1 for node in nodes):
            intra = 2 * max(node.intra_bandwidth for node in nodes)
            text = f"links inside {name} nodes at {intra / GBIT:g} Gbit/s"
            links.append(Change(text, every, intra=intra, only=name))
    if len(every) > 1:
        fastest = max(node.network_bandwidth for node in cluster.nodes) / GBIT
        changes.append(faster_network(2 * fastest, cluster))
    return [*changes, *links]


def what_if(
    workload: Workload,
    changes: Sequence[Change],
    run: Run | None = None,
    *,
    strategies: Sequence[Strategy] | None = None,
    on_candidate: OnCandidate | None = None,
) -> WhatIf:
    """Plan as it is and after each change. The workload's profile must be predicted where devices
    are added."""
    run, known = run or Run(), Known()
    as_is = Change("as it is", every_node(workload.cluster))
    planned: list[tuple[Change, Workload, Candidate | None]] = []
    with remembering(known):
        best = make_plans(workload, strategies, run, on_candidate=on_candidate).best
        known.decided.clear()  # of problems as they are: nothing was known before
        for change in changes:
            if run.cancelled:
                break
            changed = changed_workload(workload, change)
            own = make_plans(changed, strategies, run, on_candidate=on_candidate).best
            planned.append((change, changed, own))
    for change, _, own in planned:
        if own is not None and change.removes_only:  # it runs with what was removed idle, too
            idle = Part(f"idle: {change.name.removeprefix('remove ')}", change.kept)
            best = shortest(filter(None, (best, lifted(own, workload, idle))))
    variants = []
    for change, changed, own in planned:
        after = shortest(filter(None, (own, carried(best, workload, changed, change))))
        gain = None
        if best is not None and after is not None:
            gain = (best.predicted_seconds or 0.0) - (after.predicted_seconds or 0.0)
        variants.append(Changed(change, changed, after, gain))
    return WhatIf(Changed(as_is, workload, best, None), tuple(variants), tuple(known.decided))


def changed_workload(workload: Workload, change: Change) -> Workload:
    """The workload on the changed cluster: its own profile where that knows every device, else a
    predicted one."""
    cluster, profile = change.apply(workload.cluster), workload.profile
    lacking = [name for name in cluster.types if name not in profile.devices()]
    if not lacking:
        return replace(workload, cluster=cluster)
    if profile.provenance.kind != "predicted":
        raise InputError(
            f"the measured profile has no table for {lacking[0]!r}",
            where=profile.model,
            expected="one with it",
        )
    made = make_workload(workload.model, cluster, workload.global_batch)
    return replace(made, reserved_bytes=workload.reserved_bytes)


def carried(
    best: Candidate | None, workload: Workload, changed: Workload, change: Change
) -> Candidate | None:
    """The plan as it is on the changed cluster, where nothing that it uses is gone."""
    if best is None or best.plan is None:
        return None
    places = [-1] * len(workload.cluster.devices)
    for place, number in enumerate(workload.cluster.devices_of(change.kept)):
        places[number] = place  # the nodes that are kept come first
    if any(places[number] < 0 for number in best.plan.ranks):
        return None
    plan = lifted_plan(best.plan, changed, places)
    try:
        again = replay(plan, changed)
    except UnsupportedError:
        return None
    return replace(
        best,
        status="feasible",
        plan=plan,
        predicted_seconds=again.seconds,
        closed_form_seconds=None,
        objective=None,  # objective and bound are of the problem as it is
        bound=None,
        replayed=again,
        fits_memory=again.fits,
        peak_bytes=again.peak_bytes,
        message="the plan as it is",
    )
