"""The seconds that changes of a cluster save: more devices, fewer devices, a faster network. Every
changed cluster is planned anew.

The best plan for the unchanged cluster also runs on a larger or faster cluster, and on one that
lacks only devices which the plan leaves idle. It is replayed there, so that additions never cost
seconds. Conversely, a plan for a changed cluster that uses no added device also runs on the
unchanged cluster, so that removals never save seconds.

A longer search improves plans even if nothing changes. Therefore the unchanged cluster is planned
twice, with equal budgets. The second planning is like those of the changes: it begins with the plan
of the first one, and has another seed. The precision of the answer is the ratio by which the first
plan was slower than the best plan for the unchanged cluster: a smaller difference may come from the
search alone.

`marginal` gives the changes that are tried if the user names none: one more node of each device
type, one node less, and each kind of link twice as fast.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError, require
from hetplan.planner.candidate import Candidate, StrategyMethod, with_inputs
from hetplan.planner.explain import longer
from hetplan.planner.joint import Joint
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import OnCandidate, on_devices, shortest, with_figures
from hetplan.planner.strategy import Strategy, make_strategies
from hetplan.planner.variants import places_of
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import GBIT, Cluster, Node, device
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.rates.collectives import with_intra_bandwidth
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import replay
from hetplan.solvers.run import Run
from hetplan.text import grouped, ranges_text

# Least precision of an answer with the strategy `joint`. Its search compares plans by their robust
# seconds where these differ from their seconds by more than a hundredth
# (`formulations.joint.annealing`), so that smaller differences of seconds may come from it.
LEAST_PRECISION = 0.01
FOUND_FOR = "the plan was found for another row: "
GIVEN = "the plan that was given"


@dataclass(frozen=True)
class Change:
    """A change of a cluster."""

    name: str
    cluster: Cluster  # after the change
    # [device of the changed cluster] its number in the unchanged one. Added devices come behind
    # these and have no entry.
    numbers: tuple[int, ...]
    added_devices: int = 0  # number of added devices; below 0: of removed ones


@dataclass(frozen=True)
class ChangeResult:
    """The best plan on a changed cluster, in comparison with the unchanged one."""

    change: Change
    workload: Workload  # on the changed cluster
    best: Candidate | None  # None where nothing fits
    gain: float | None  # seconds per iteration saved; negative: lost
    bound: float | None = None  # lower bound on the replayed seconds of every plan of stages
    relative_gain: float | None = None  # gain as a share of the seconds before the change
    within_precision: bool = False  # whether the gain is at most the precision of the answer
    same_plan: bool = False  # whether the best plan is that of the unchanged cluster
    reasons: tuple[str, ...] = ()  # why no plan fits, one for each candidate

    def document(self) -> Mapping[str, Any]:
        """The result as JSON types."""
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
    """The answer of `what_if`."""

    base: ChangeResult  # the result for the unchanged cluster
    variants: tuple[ChangeResult, ...]  # one for each change, in the order in which they were given
    precision: float  # differences up to this share of an iteration may come from the search alone
    # Why given plans are no candidates, as `name: reason`; one text for each such plan.
    left_out: tuple[str, ...] = ()
    # names of the changes whose planning the time limit ended before its budget was used up
    cut: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The answer as JSON types."""
        return {
            "base": self.base.document(),
            "precision": self.precision,
            "left_out": list(self.left_out),
            "cut": list(self.cut),
            "variants": [v.document() for v in self.variants],
        }


def every_device(cluster: Cluster) -> tuple[int, ...]:
    """The numbers of all devices of the cluster."""
    return tuple(range(len(cluster.devices)))


def with_nodes(cluster: Cluster, name: str, nodes: Iterable[Node]) -> Cluster:
    """The cluster changed to these nodes. name: name of the change, which is added to the cluster's
    name."""
    nodes = tuple(nodes)
    types = dict.fromkeys(node.device for node in nodes)
    specs = {kind: cluster.specs.get(kind) or device(kind, where="--add") for kind in types}
    # a plan file, which has the name, allows 200 characters (`schema.Name`)
    return Cluster(f"{cluster.name}, {name}"[:200], nodes, specs)


def addition(text: str, cluster: Cluster) -> Change:
    """The change that a text of the option `--add` describes. Raises InputError.

    `2xA100-SXM4-80GB` is one more node of two such devices. Its links are those of the cluster's
    nodes with this device; if there are none, the best of all nodes. `2xA100-SXM4-80GB@node1` is
    two more devices in a node that has this device.
    """
    devices, _, place = text.partition("@")
    count, kind = amount(devices, "--add")
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
        # the larger node comes last, so that its added devices are the last of the cluster
        others = [n for n in range(len(cluster.nodes)) if n != number]
        nodes.append(replace(node, devices=node.devices + count))
        numbers = tuple(cluster.devices_of([*others, number]))
        return Change(name, with_nodes(cluster, name, nodes), numbers, count)
    best_links = Node(
        kind,
        count,
        max(n.intra_bandwidth for n in nodes),
        max(n.network_bandwidth for n in nodes),
        min(n.intra_latency for n in nodes),
        min(n.network_latency for n in nodes),
    )
    like_it = next((n for n in nodes if n.device == kind), best_links)
    added = replace(like_it, devices=count)
    return Change(name, with_nodes(cluster, name, (*nodes, added)), every_device(cluster), count)


def removal(text: str, cluster: Cluster) -> Change:
    """The change that a text of the option `--remove` describes: `node1` without this node; `4xT4`
    without four such devices, taken from the last nodes that have them. Raises InputError."""
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
    """(count, device type) of a text: (2, "T4") of `2xT4`. Raises InputError for other texts."""
    match = re.fullmatch(r"(\d{1,4})x(.+)", text.strip())
    if match is None or int(match[1]) < 1:
        raise InputError(
            "not usable", where=option, got=text, expected="COUNTxDEVICE, as 2xA100-SXM4-80GB"
        )
    return int(match[1]), match[2]


def node_number(text: str, cluster: Cluster, option: str) -> int:
    """The number in the name of a node: 1 of `node1`. Raises InputError for a name that no node of
    the cluster has. option: the option with the name, for the message."""
    names = [f"node{n}" for n in range(len(cluster.nodes))]
    name = text.replace(" ", "")  # people also write `node 1`
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
    """The change to other bandwidths of links.

    network, intra: bytes per second of the links between nodes and within nodes; None: unchanged.
    only: the device type whose nodes change; None: all nodes change.
    """
    nodes = []
    for node in cluster.nodes:
        if only in (None, node.device):
            node = with_intra_bandwidth(node, intra or node.intra_bandwidth)
            node = replace(
                node,
                network_bandwidth=network or node.network_bandwidth,
                # The most of one message was measured on the network that is replaced.
                flow=math.inf if network else node.flow,
            )
        nodes.append(node)
    return Change(name, with_nodes(cluster, name, nodes), every_device(cluster))


def faster_network(gbit: float, cluster: Cluster) -> Change:
    """The change to a network of `gbit` Gbit/s for every node. Raises InputError for a number out
    of range. The change's name says which nodes are faster already."""
    # the numbers that a cluster file may have (`schema.Rate`)
    require(
        1e-6 <= gbit <= 1e9,
        "not usable",
        where="--network-gbit-per-s",
        got=gbit,
        expected="Gbit/s between 1e-6 and 1e9",
    )
    faster = [n for n, node in enumerate(cluster.nodes) if node.network_bandwidth > gbit * GBIT]
    less = f" (node {ranges_text(faster)}: less than now)" if faster else ""
    return relinked(cluster, f"network at {gbit:g} Gbit/s{less}", network=gbit * GBIT)


def marginal(cluster: Cluster) -> Iterator[Change]:
    """The changes that are tried if the user names none.

    They are, for each device type, one more node and one node less; the network of all nodes twice
    as fast; for each of several types, the network of its nodes twice as fast; and for each type
    with more than one device in a node, the links within its nodes twice as fast.
    """
    several = len(cluster.nodes) > 1
    nodes_of = grouped((node.device, n) for n, node in enumerate(cluster.nodes))
    for kind in cluster.types:
        numbers = nodes_of[kind]
        yield addition(f"{cluster.nodes[numbers[0]].devices}x{kind}", cluster)
        if several:
            yield removal(f"node{numbers[-1]}", cluster)
    if several:
        fastest = max(node.network_bandwidth for node in cluster.nodes)
        yield faster_network(2 * fastest / GBIT, cluster)
    for kind in cluster.types:
        nodes = [cluster.nodes[n] for n in nodes_of[kind]]
        network = 2 * max(node.network_bandwidth for node in nodes)
        intra = 2 * max(node.intra_bandwidth for node in nodes)
        if len(cluster.types) > 1:
            text = f"network of {kind} nodes at {network / GBIT:g} Gbit/s"
            yield relinked(cluster, text, kind, network=network)
        if any(node.devices > 1 for node in nodes):
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
    """Plan the unchanged cluster; then, beginning with that plan, the unchanged cluster again and
    each changed one. All plannings have equal shares of the run's budget; where it has none, of its
    time.

    strategies: None: all. Without `joint`, whose local search is what more time improves, the
    unchanged cluster is planned only once. known: plans of the workload. The first planning begins
    with them, and whatever the strategies are, each is a candidate for every cluster on which it
    runs. The workload's profile must be predicted if device types are added.
    """
    run = run or Run()
    strategies = strategies or make_strategies()
    with_joint = any(isinstance(strategy, Joint) for strategy in strategies)
    as_is = Change("as it is", workload.cluster, every_device(workload.cluster))
    asked = [as_is, *changes] if with_joint else list(changes)
    seconds = run.remaining / (len(asked) + 1)  # of each planning
    cut: dict[str, None] = {}  # the names of changes, in the order of their plannings

    def planned(name: str, changed: Workload, plans: Sequence[Plan], seed: int) -> Planning:
        """The planning of a workload, with `plans` to begin with, in one share of the budget. name:
        name of the change."""
        # The budget left in units of `seconds`, so that the share is `seconds`. It is 1.0 where
        # less than that is left, or where there is no budget.
        units_left = 1.0
        if seconds < math.inf:
            units_left = max(run.remaining / seconds, 1.0)
        share = run.share(units_left)
        share.options = replace(share.options, seed=seed)
        beginning = [strategy.beginning_with(plans) for strategy in strategies]
        planning = make_plans(changed, beginning, share, on_candidate=on_candidate)
        if share.cut:
            cut[name] = None
        return planning

    given, left_out = given_candidates(known, workload)
    first = planned(as_is.name, workload, known, run.options.seed)
    first_best = shortest(filter(None, (first.best, *given)))
    results: list[tuple[Change, Workload, Planning]] = []
    for change in asked:
        if run.cancelled:
            break
        changed = changed_workload(workload, change.cluster)
        start = plan_as_it_is(first_best, workload, changed, change)
        starts = [start.plan] if start is not None and start.plan is not None else []
        other_seed = run.options.seed ^ 1  # `^` keeps it at 0 or more
        results.append((change, changed, planned(change.name, changed, starts, other_seed)))
    back = (on_cluster_as_it_is(planning.best, workload, change) for change, _, planning in results)
    best = shortest(filter(None, (first_best, *back)))
    if best is not None:
        best = with_inputs(best, Inputs.of(workload))
    base = ChangeResult(as_is, workload, best, None, first.bound)
    precision = 0.0
    if with_joint:
        improved = None
        if first_best is not None and best is not None:
            improved = longer(first_best, best)
        precision = max(improved or 0.0, LEAST_PRECISION)
    variants = (
        compared(base, change, changed, planning, precision, given)
        for change, changed, planning in results
        if change is not as_is
    )
    return WhatIf(base, tuple(variants), precision, tuple(left_out), tuple(cut))


def given_candidates(
    plans: Sequence[Plan], workload: Workload
) -> tuple[list[Candidate], list[str]]:
    """(the given plans as candidates for the workload, replayed there; why others are left out, as
    `name: reason`). A plan is left out if it is not of the workload, cannot be replayed, or does
    not fit in memory."""
    candidates, left_out = [], []
    for plan in plans:
        try:
            replayed = replay(plan, workload)
        except InputError as error:
            left_out.append(f"{plan.name}: {error}")
            continue
        if not replayed.fits:
            left_out.append(f"{plan.name}: does not fit in memory")
            continue
        strategy, method = "by hand", "plan"
        if plan.prediction is not None:
            strategy, method = plan.prediction.strategy, plan.prediction.method
        candidates.append(
            Candidate(
                strategy=strategy,
                method=StrategyMethod(method),
                status="feasible",
                fits_memory=True,
                peak_bytes=replayed.peak_bytes,
                predicted_seconds=replayed.seconds,
                plan=plan,
                message=GIVEN,
                replay=replayed,
            )
        )
    return candidates, left_out


def compared(
    base: ChangeResult,
    change: Change,
    changed: Workload,
    planning: Planning,
    precision: float,
    given: Sequence[Candidate] = (),
) -> ChangeResult:
    """The result of a change, in comparison with the unchanged cluster. base: the result of the
    unchanged cluster. planning: the planning for the changed cluster. given: candidates for the
    unchanged cluster that the user gave."""
    before = plan_as_it_is(base.best, base.workload, changed, change)
    # Where the change removes a device that the best plan uses, a given plan that does not use the
    # device still runs.
    others = [plan_as_it_is(candidate, base.workload, changed, change) for candidate in given]
    after = shortest(filter(None, (planning.best, before, *others)))
    same_plan = after is before
    if after is not None and after is not planning.best:
        after = with_inputs(after, Inputs.of(changed))
    result = ChangeResult(change, changed, after, None, planning.bound)
    if after is None:
        reasons = [f"{c.name}: {c.message}" for c in planning.candidates if c.message]
        return replace(result, reasons=tuple(reasons))
    if base.best is None:
        return result
    seconds = base.best.predicted_seconds or 0.0
    gain = seconds - (after.predicted_seconds or 0.0)
    small = abs(gain) <= precision * seconds
    # a precision of 0 means that it is not known: without `joint`
    return replace(
        result,
        gain=gain,
        relative_gain=gain / seconds,
        within_precision=small and precision > 0,
        same_plan=same_plan,
    )


def changed_workload(workload: Workload, cluster: Cluster) -> Workload:
    """The workload on a changed cluster: with its profile if this has tables of every device type,
    else with a predicted profile. Raises InputError where a measured profile lacks a type."""
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
    """The best candidate for the unchanged cluster, replayed on the changed one; None where there
    is no plan, or where the change removes a device that the plan uses."""
    if best is None or best.plan is None or best.replay is None:
        return None
    places = places_of(change.numbers, len(workload.cluster.devices))
    if any(places[number] < 0 for number in best.plan.ranks):
        return None
    return moved(best, changed, places, "the plan as it is")


def moved(best: Candidate, workload: Workload, numbers: Sequence[int], message: str) -> Candidate:
    """The candidate for another cluster, replayed on the workload's, without objective and bound,
    which are of the other cluster. numbers: see `variants.renumbered`. message: message of the new
    candidate."""
    there = on_devices(best, workload, numbers)
    assert there.plan is not None  # `on_devices` keeps the plan
    none: dict[str, None] = {"closed_form_seconds": None, "objective": None}
    return replace(
        there,
        status="feasible",
        closed_form_seconds=None,
        objective=None,
        bound=None,
        message=message,
        plan=with_figures(there.plan, none),
    )


def on_cluster_as_it_is(
    best: Candidate | None, workload: Workload, change: Change
) -> Candidate | None:
    """The best candidate for a changed cluster, replayed on the unchanged one; None where there is
    no plan, and where the plan uses added devices.

    A candidate without a replay keeps its seconds if the change was a removal, which changes no
    link. After any other change it gives None, since its seconds on the unchanged links are not
    known.
    """
    if best is None or best.plan is None or max(best.plan.ranks) >= len(change.numbers):
        return None
    if best.replay is None and change.added_devices >= 0:
        return None
    numbers = [*change.numbers, *[-1] * change.added_devices]  # no -1 after a removal
    return moved(best, workload, numbers, f"{FOUND_FOR}{change.name}")
