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
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError, UnsupportedError
from hetplan.planner.candidate import Candidate
from hetplan.planner.candidates import Tell
from hetplan.planner.known import Known, remembering
from hetplan.planner.parts import lifted, lifted_plan
from hetplan.planner.ranking import make_plans
from hetplan.planner.settings import Settings
from hetplan.profiling.catalogue import DeviceSpec, device
from hetplan.profiling.cluster import GBIT, Cluster, Node
from hetplan.profiling.models import Model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.replay import replay
from hetplan.solvers.run import Run

_AMOUNT = re.compile(r"(\d{1,4})x(.+)")


@dataclass(frozen=True)
class Change:
    """A named change: the nodes that are kept, by number, and those added behind them.

    network, intra: bandwidth (bytes per second, None: as it is) of the nodes' networks and of the
    links inside them, of all nodes or `only` of some device type's.
    """

    name: str
    kept: tuple[int, ...]
    added: tuple[Node, ...] = ()
    specs: Mapping[str, DeviceSpec] | None = None
    network: float | None = None
    devices: int = 0
    intra: float | None = None
    only: str | None = None

    def apply(self, cluster: Cluster) -> Cluster:
        """The changed cluster."""
        nodes = [
            self.linked(node) for node in (*(cluster.nodes[n] for n in self.kept), *self.added)
        ]
        kinds = {node.device for node in nodes}
        specs = {k: s for k, s in {**cluster.specs, **(self.specs or {})}.items() if k in kinds}
        return Cluster(f"{cluster.name}, {self.name}"[:200], tuple(nodes), specs)

    def linked(self, node: Node) -> Node:
        """The node with its changed links."""
        if self.only not in (None, node.device):
            return node
        network = node.network_bandwidth if self.network is None else self.network
        intra = node.intra_bandwidth if self.intra is None else self.intra
        return replace(node, network_bandwidth=network, intra_bandwidth=intra)


@dataclass(frozen=True)
class Variant:
    """The best plan after a change, None where nothing fits; gain: seconds per iteration saved,
    negative: lost."""

    change: Change
    workload: Workload
    best: Candidate | None
    gain: float | None

    def document(self) -> Mapping[str, Any]:
        """As JSON types."""
        devices = self.change.devices
        return {
            "change": self.change.name,
            "devices": self.workload.cluster.counts(),
            "seconds_saved": self.gain,
            "seconds_saved_per_device": self.gain / devices
            if self.gain is not None and devices
            else None,
            "best": None if self.best is None else self.best.document(self.workload),
        }


@dataclass(frozen=True)
class WhatIf:
    """base: as it is. variants: in the order asked. decided: problems that were decided without
    solving, and why."""

    base: Variant
    variants: tuple[Variant, ...]
    decided: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "base": self.base.document(),
            "variants": [v.document() for v in self.variants],
            "decided_without_solving": list(self.decided),
        }


def addition(text: str, cluster: Cluster) -> Change:
    """`2xA100-SXM4-80GB`: one more node of two; linked as the cluster's nodes of that device, else
    as its best."""
    count, name = amount(text, "--add")
    like = next((node for node in cluster.nodes if node.device == name), None)
    if like is None:
        like = Node(
            name,
            count,
            max(n.intra_bandwidth for n in cluster.nodes),
            max(n.network_bandwidth for n in cluster.nodes),
            min(n.intra_latency for n in cluster.nodes),
            min(n.network_latency for n in cluster.nodes),
        )
    spec = cluster.specs[name] if name in cluster.specs else device(name, where="--add")
    node = replace(like, device=name, devices=count)
    every = tuple(range(len(cluster.nodes)))
    return Change(f"add {text}", every, (node,), {name: spec}, devices=count)


def removal(text: str, cluster: Cluster) -> Change:
    """`node1`, or `4xT4`: so many devices less, from the last nodes that have them."""
    match = re.fullmatch(r"node ?(\d{1,9})", text)
    count = len(cluster.nodes)
    if match is not None:
        number = int(match[1])
        if number >= count:
            raise InputError(
                "no such node", where="--remove", got=text, expected=f"node0 to node{count - 1}"
            )
        kept, added = [n for n in range(count) if n != number], list[Node]()
        gone = cluster.nodes[number].devices
    else:
        gone, name = amount(text, "--remove")
        kept, added = fewer(cluster, gone, name)
    if not kept and not added:
        raise InputError("nothing is left", where="--remove", got=text)
    return Change(f"remove {text}", tuple(kept), tuple(added), devices=-gone)


def fewer(cluster: Cluster, count: int, name: str) -> tuple[list[int], list[Node]]:
    """Nodes kept whole, and the rest of the one that loses a part."""
    kept, added, left = list(range(len(cluster.nodes))), list[Node](), count
    for n in reversed(range(len(cluster.nodes))):
        node = cluster.nodes[n]
        if node.device != name or left == 0:
            continue
        kept.remove(n)
        if node.devices > left:
            added.append(replace(node, devices=node.devices - left))
        left = max(0, left - node.devices)
    if left:
        have = cluster.counts().get(name, 0)
        raise InputError(
            "more than there are",
            where="--remove",
            got=f"{count}x{name}",
            expected=f"at most {have}",
        )
    return kept, added


def amount(text: str, option: str) -> tuple[int, str]:
    """`2xT4` as (2, "T4"); raises InputError."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise InputError(
            "not usable", where=option, got=text, expected="COUNTxDEVICE, as 2xA100-SXM4-80GB"
        )
    return int(match[1]), match[2]


def faster_network(gbit: float, cluster: Cluster) -> Change:
    """Every node's network at so many Gbit/s."""
    if not 1e-6 <= gbit <= 1e9:
        raise InputError("--network-gbit-per-s", got=gbit, expected="Gbit/s between 1e-6 and 1e9")
    return Change(
        f"network at {gbit:g} Gbit/s", tuple(range(len(cluster.nodes))), network=gbit * GBIT
    )


def marginal(cluster: Cluster) -> list[Change]:
    """One more node of each kind, one less; networks twice as fast, of all nodes and of each
    kind's; links inside the nodes of each kind twice as fast."""
    found = []
    for name in cluster.types:
        size = next(node.devices for node in cluster.nodes if node.device == name)
        found.append(addition(f"{size}x{name}", cluster))
        if len(cluster.nodes) > 1:
            last = max(n for n, node in enumerate(cluster.nodes) if node.device == name)
            found.append(removal(f"node{last}", cluster))
    fastest = max(node.network_bandwidth for node in cluster.nodes) / GBIT
    if len(cluster.nodes) > 1:
        found.append(faster_network(2 * fastest, cluster))
    return [*found, *faster_links(cluster)]


def faster_links(cluster: Cluster) -> list[Change]:
    """Each device type's networks, where there are several types, and links within nodes at twice
    their bandwidth."""
    found, every = [], tuple(range(len(cluster.nodes)))
    for name in cluster.types:
        own = [node for node in cluster.nodes if node.device == name]
        if len(cluster.types) > 1:
            network = 2 * max(node.network_bandwidth for node in own)
            text = f"network of {name} nodes at {network / GBIT:g} Gbit/s"
            found.append(Change(text, every, network=network, only=name))
        if any(node.devices > 1 for node in own):
            intra = 2 * max(node.intra_bandwidth for node in own)
            text = f"links inside {name} nodes at {intra / GBIT:g} Gbit/s"
            found.append(Change(text, every, intra=intra, only=name))
    return found


def what_if(
    workload: Workload,
    changes: Sequence[Change],
    run: Run | None = None,
    *,
    strategies: Sequence[str] | None = None,
    settings: Settings | None = None,
    found_one: Tell | None = None,
) -> WhatIf:
    """Plan as it is and after each change. The workload's profile must be predicted where devices
    are added."""
    run, known = run or Run(), Known()
    as_is = Change("as it is", tuple(range(len(workload.cluster.nodes))))
    with remembering(known):
        planning = make_plans(workload, strategies, run, settings=settings, found_one=found_one)
        known.decided.clear()  # of problems as they are: nothing was known before
        found: list[tuple[Change, Workload, Candidate | None]] = []
        for change in changes:
            if run.cancelled:
                break
            changed = changed_workload(workload, change)
            planned = make_plans(changed, strategies, run, settings=settings, found_one=found_one)
            found.append((change, changed, planned.best))
    best = planning.best
    for change, _, own in found:
        best = better(best, returned(own, workload, change))
    variants = []
    for change, changed, own in found:
        after = better(own, carried(best, workload, changed, change))
        variants.append(Variant(change, changed, after, gain_of(best, after)))
    return WhatIf(Variant(as_is, workload, best, None), tuple(variants), tuple(known.decided))


def changed_workload(workload: Workload, change: Change) -> Workload:
    """The workload on the changed cluster: its own profile where that knows every device, else a
    predicted one."""
    cluster = change.apply(workload.cluster)
    known = set(workload.profile.devices())
    if set(cluster.types) <= known:
        return replace(workload, cluster=cluster)
    if workload.profile.provenance.kind != "predicted":
        lacking = next(name for name in cluster.types if name not in known)
        raise InputError(
            f"the measured profile has no table for {lacking!r}",
            where=workload.profile.model,
            expected="one with it",
        )
    model: Model = workload.model
    return replace(
        make_workload(model, cluster, workload.global_batch), reserved_bytes=workload.reserved_bytes
    )


def returned(own: Candidate | None, workload: Workload, change: Change) -> Candidate | None:
    """The plan found after a removal on the cluster as it is, what was removed idle; None after
    other changes."""
    only_less = not change.added and change.network is None and change.intra is None
    if own is None or not only_less:
        return None
    return lifted(own, workload, change.kept, f"idle: {change.name.removeprefix('remove ')}")


def carried(
    best: Candidate | None, workload: Workload, changed: Workload, change: Change
) -> Candidate | None:
    """The plan as it is on the changed cluster, where nothing that it uses is gone."""
    if best is None or best.plan is None:
        return None
    places = [-1] * len(workload.cluster.devices)
    nodes = list(range(len(change.kept)))  # those that are kept come first
    kept, there = workload.cluster.devices_of(change.kept), changed.cluster.devices_of(nodes)
    for number, place in zip(kept, there, strict=True):
        places[number] = place
    if any(places[number] < 0 for number in best.plan.ranks):
        return None
    plan = lifted_plan(best.plan, changed, places)
    try:
        found = replay(plan, changed)
    except UnsupportedError:
        return None
    return replace(
        best,
        status="feasible",
        plan=plan,
        predicted_seconds=found.seconds,
        closed_form_seconds=None,
        objective=None,  # objective and bound are of the problem as it is
        bound=None,
        replayed=found,
        fits_memory=found.fits,
        peak_bytes=found.peak_bytes,
        message="the plan as it is",
    )


def better(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    """The faster of both."""
    known = [c for c in (one, other) if c is not None and c.predicted_seconds is not None]
    return min(known, key=lambda c: c.predicted_seconds or 0.0, default=None)


def gain_of(before: Candidate | None, after: Candidate | None) -> float | None:
    """Seconds per iteration saved."""
    if (
        before is None
        or after is None
        or before.predicted_seconds is None
        or after.predicted_seconds is None
    ):
        return None
    return before.predicted_seconds - after.predicted_seconds
