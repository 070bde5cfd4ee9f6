"""The worth of changes of the cluster: more devices, fewer, a faster network; each planned anew.

The best plan of the cluster as it is also runs on a larger or faster cluster, and on one that lacks
only devices that it leaves idle. It is replayed there, so that a change that only adds never costs.
The other way round, a plan that uses no added device also runs on the cluster as it is, so that
losing devices never gains.

More searching improves a plan even where nothing changes. So the cluster as it is is planned twice:
the second time begins with the plan of the first, with another seed, as every change does, and all
get the same time. By how much the first plan was slower than the best one for the cluster as it is
is the precision of the answer: a smaller difference may come from the search alone.
Where no changes are given, the marginal ones are asked: one more node of each kind, one less, each
kind of link twice as fast.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError, require
from hetplan.planner.candidate import Candidate, carrying
from hetplan.planner.explain import longer
from hetplan.planner.joint import Joint
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import OnCandidate, on_devices, shortest
from hetplan.planner.strategy import Strategy, make_strategies
from hetplan.planner.variants import places_of
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import GBIT, Cluster, Node, device
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Run
from hetplan.text import ranges_text

# Where robust seconds differ by a hundredth, they count in place of seconds (`joint.search`), so
# that no smaller difference is the search's.
LEAST_PRECISION = 0.01
FOUND_FOR = "the plan was found for another row: "


@dataclass(frozen=True)
class Change:
    """A named change of a cluster."""

    name: str
    cluster: Cluster
    # The changed cluster's first devices are these of the cluster as it is; added ones follow.
    numbers: tuple[int, ...]
    added_devices: int = 0  # below 0: so many are removed


@dataclass(frozen=True)
class ChangeResult:
    """The plan on a changed cluster."""

    change: Change
    workload: Workload
    best: Candidate | None  # None where nothing fits
    gain: float | None  # seconds per iteration saved; negative: lost
    bound: float | None = None  # seconds that no plan of stages replays below
    relative_gain: float | None = None  # as a share of the iteration before the change
    within_precision: bool = False  # whether the gain may come from the search alone
    same_plan: bool = False  # whether the best is the plan as it is, moved to the changed cluster
    reasons: tuple[str, ...] = ()  # where there is no plan: why, candidate by candidate

    def document(self) -> Mapping[str, Any]:
        """As JSON types."""
        return {
            "change": self.change.name,
            "devices": self.workload.cluster.counts(),
            "seconds_saved": self.gain,
            "within_precision": self.within_precision,
            "bound": self.bound,
            "best": None if self.best is None else self.best.document(self.workload),
        }


@dataclass(frozen=True)
class WhatIf:
    """The cluster as it is, and after each change, in the order asked."""

    base: ChangeResult
    variants: tuple[ChangeResult, ...]
    precision: float  # differences up to this share of an iteration may come from the search alone

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "base": self.base.document(),
            "precision": self.precision,
            "variants": [v.document() for v in self.variants],
        }


def every_device(cluster: Cluster) -> tuple[int, ...]:
    """The numbers of all devices."""
    return tuple(range(len(cluster.devices)))


def with_nodes(cluster: Cluster, name: str, nodes: Iterable[Node]) -> Cluster:
    """A cluster of these nodes, named after the change that makes it of `cluster`."""
    nodes = tuple(nodes)
    kinds = dict.fromkeys(node.device for node in nodes)
    specs = {k: cluster.specs.get(k) or device(k, where="--add") for k in kinds}
    return Cluster(f"{cluster.name}, {name}"[:200], nodes, specs)


def addition(text: str, cluster: Cluster) -> Change:
    """`2xA100-SXM4-80GB`: one more node of two; linked as the cluster's nodes of that device, else
    as its best. `2xA100-SXM4-80GB@node1`: two more devices in a node that has such."""
    alone, _, place = text.partition("@")
    count, kind = amount(alone, "--add")
    nodes, name = list(cluster.nodes), f"add {text}"
    if place:
        number = node_number(place, cluster, "--add")
        node = nodes.pop(number)
        require(
            node.device == kind,
            "a node has devices of one type",
            where="--add",
            got=text,
            expected=f"{count}x{node.device}@{place}",
        )
        others = [n for n in range(len(cluster.nodes)) if n != number]
        nodes.append(replace(node, devices=node.devices + count))
        return Change(
            name,
            with_nodes(cluster, name, nodes),
            tuple(cluster.devices_of([*others, number])),
            count,
        )
    best = Node(
        kind,
        count,
        max(n.intra_bandwidth for n in nodes),
        max(n.network_bandwidth for n in nodes),
        min(n.intra_latency for n in nodes),
        min(n.network_latency for n in nodes),
    )
    added = replace(next((n for n in nodes if n.device == kind), best), devices=count)
    return Change(name, with_nodes(cluster, name, (*nodes, added)), every_device(cluster), count)


def removal(text: str, cluster: Cluster) -> Change:
    """`node1`, or `4xT4`: so many devices less, from the last nodes that have them."""
    if text.startswith("node"):
        gone = list(cluster.devices_of([node_number(text, cluster, "--remove")]))
    else:
        count, kind = amount(text, "--remove")
        alike = [n for n, node in enumerate(cluster.nodes) if node.device == kind]
        gone = list(cluster.devices_of(alike))[-count:]
        require(
            len(gone) == count,
            "more than there are",
            where="--remove",
            got=text,
            expected=f"at most {len(gone)}",
        )
    left = [number for number in every_device(cluster) if number not in gone]
    require(left, "nothing is left", where="--remove", got=text)
    counts = Counter(cluster.devices[number].node for number in left)
    nodes = [replace(cluster.nodes[n], devices=counts[n]) for n in sorted(counts)]
    name = f"remove {text}"
    return Change(name, with_nodes(cluster, name, nodes), tuple(left), -len(gone))


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
    names = [f"node{n}" for n in range(len(cluster.nodes))]
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
    """The change to links of other bandwidths, in bytes/s, where they are given.

    only: the device type whose nodes change; None: all nodes do.
    """
    nodes = []
    for node in cluster.nodes:
        if only in (None, node.device):
            node = replace(
                node,
                network_bandwidth=network or node.network_bandwidth,
                intra_bandwidth=intra or node.intra_bandwidth,
            )
        nodes.append(node)
    return Change(name, with_nodes(cluster, name, nodes), every_device(cluster))


def faster_network(gbit: float, cluster: Cluster) -> Change:
    """Every node's network at so many Gbit/s."""
    require(
        1e-6 <= gbit <= 1e9,
        "not usable",
        where="--network-gbit-per-s",
        got=gbit,
        expected="Gbit/s between 1e-6 and 1e9",
    )
    had = [n for n, node in enumerate(cluster.nodes) if node.network_bandwidth > gbit * GBIT]
    less = f" (node {ranges_text(had)}: less than now)" if had else ""
    return relinked(cluster, f"network at {gbit:g} Gbit/s{less}", network=gbit * GBIT)


def marginal(cluster: Cluster) -> Iterator[Change]:
    """One more node of each kind, one less; networks twice as fast, of all nodes and of each
    kind's, where there are several; links inside the nodes of each kind twice as fast."""
    every, several = range(len(cluster.nodes)), len(cluster.nodes) > 1
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
    known: Sequence[Plan] = (),
    on_candidate: OnCandidate | None = None,
) -> WhatIf:
    """Plan as it is, then, beginning with that plan, again as it is and after each change; all in
    equal shares of the run's time. known: plans of the workload to begin with. The workload's
    profile must be predicted where devices are added."""
    run, strategies = run or Run(), strategies or make_strategies()
    searches = any(isinstance(strategy, Joint) for strategy in strategies)
    as_is = Change("as it is", workload.cluster, every_device(workload.cluster))
    asked = [*([as_is] if searches else []), *changes]
    seconds = run.remaining / (len(asked) + 1)

    def planned(changed: Workload, plans: Sequence[Plan], seed: int) -> Planning:
        share = run.share(max(run.remaining / seconds, 1.0) if seconds < math.inf else 1.0)
        share.options = replace(share.options, seed=seed)
        begun = [strategy.beginning_with(plans) for strategy in strategies]
        return make_plans(changed, begun, share, on_candidate=on_candidate)

    first = planned(workload, known, run.options.seed)
    results: list[tuple[Change, Workload, Planning]] = []
    for change in asked:
        if run.cancelled:
            break
        changed = changed_workload(workload, change.cluster)
        start = plan_as_it_is(first.best, workload, changed, change)
        starts = [start.plan] if start is not None and start.plan is not None else []
        results.append((change, changed, planned(changed, starts, run.options.seed ^ 1)))
    again = (on_cluster_as_it_is(p.best, workload, change) for change, _, p in results)
    best = shortest(filter(None, (first.best, *again)))
    if best is not None:
        best = carrying(best, Inputs.of(workload))
    base = ChangeResult(as_is, workload, best, None, first.bound)
    improved = longer(first.best, best) if first.best is not None and best is not None else None
    precision = max(improved or 0.0, LEAST_PRECISION) if searches else 0.0
    variants = (
        compared(base, change, changed, planning, precision)
        for change, changed, planning in results
        if change is not as_is
    )
    return WhatIf(base, tuple(variants), precision)


def compared(
    base: ChangeResult, change: Change, changed: Workload, planning: Planning, precision: float
) -> ChangeResult:
    """The result of a change, beside the cluster as it is."""
    before = plan_as_it_is(base.best, base.workload, changed, change)
    after = shortest(filter(None, (planning.best, before)))
    if after is not None and after is before:
        after = before = carrying(after, Inputs.of(changed))
    why = (f"{c.name}: {c.message}" for c in planning.candidates if c.message)
    result = ChangeResult(change, changed, after, None, planning.bound)
    if after is None or base.best is None:
        return replace(result, reasons=tuple(why) if after is None else ())
    seconds = base.best.predicted_seconds or 0.0
    gain = seconds - (after.predicted_seconds or 0.0)
    # what the same plan gains owes nothing to the search
    sure = before is not None and (before.predicted_seconds or 0.0) < seconds
    return replace(
        result,
        gain=gain,
        relative_gain=gain / seconds,
        within_precision=abs(gain) <= precision * seconds and not sure and precision > 0,
        same_plan=after is before,
    )


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
    places = places_of(change.numbers, len(workload.cluster.devices))
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


def on_cluster_as_it_is(
    best: Candidate | None, workload: Workload, change: Change
) -> Candidate | None:
    """A change's best plan, replayed on the cluster as it is; None where it uses added devices, and
    where its seconds on other links are not known."""
    if best is None or best.plan is None or max(best.plan.ranks) >= len(change.numbers):
        return None
    if best.replay is None and change.added_devices >= 0:
        return None
    numbers = [*change.numbers, *[-1] * change.added_devices]
    return replace(on_devices(best, workload, numbers), message=f"{FOUND_FOR}{change.name}")
