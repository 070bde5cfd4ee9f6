"""Explains why a plan takes as long as it does, from its replay, and how it compares with the other
candidates of the ranking.

An iteration lasts as long as its critical path: a chain of tasks that follow each other without
waiting (`path_to_end`). The explanation divides the seconds of this path by kind of task. Speeding
up a task that is not on the path gains nothing.

`explain` is for the winner of a ranking. `why` is for a saved plan, from its replay alone; it also
replays the plan with faster devices and links, to say how much these would help.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hetplan.planner.candidate import Candidate
from hetplan.planner.proofs import PLANS_OF_STAGES, claim
from hetplan.plans.ladder import Rung
from hetplan.plans.plan import Plan
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.profiles.profile import perturbed
from hetplan.profiling.rates.collectives import with_intra_bandwidth
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay
from hetplan.replays.simulator.tasks import COMPUTES, PASSES, Kind, Timeline, path_to_end
from hetplan.replays.stages import units_of_like_stages
from hetplan.solvers.run import OPTIMAL_GAP, relative_gap
from hetplan.text import (
    Table,
    bytes_text,
    grouped,
    more_text,
    number_text,
    percent_text,
    ranges_text,
    seconds_text,
    share_text,
)

PARTS_SHOWN = 5  # kinds of tasks of the critical path that are listed
TIGHT = 0.9  # share of a device's memory in use from which on memory is said to bind
# Relative difference of seconds from which on a plan was made with other costs than these. With the
# same costs a replay gives the same seconds but for rounding.
SAME = 1e-6


@dataclass(frozen=True)
class Bottleneck:
    """A resource that is used most: a stage, a network card, or a device's memory."""

    text: str  # the bottleneck in words, for people
    facts: Mapping[str, Any]  # as JSON types


@dataclass(frozen=True)
class Explanation:
    """The explanation of a winner. The first four fields come from its replay; without a replay
    they are empty or None."""

    critical: Mapping[str, float]  # kind of task on the critical path -> seconds, largest first
    # The stage that computes longest, or the device of an SPMD program. Facts: replica, stage,
    # busy_share of the iteration, device (None for a stage).
    busiest: Bottleneck | None
    # The link that is in use longest. Facts: link, held_share of the iteration.
    fullest_link: Bottleneck | None
    # The device with the largest share of its memory in use. Facts: device, bytes, limit_bytes,
    # components of the bytes.
    tightest: Bottleneck | None
    winner: Candidate
    runner_up: Candidate | None  # the next best candidate with another plan
    paper_candidates: tuple[Candidate, ...]  # the best of each paper's own procedure
    # Strategy -> how much longer its best plan takes than the best plan of all, as a ratio >= 0.
    prices: Mapping[str, float]
    why_chosen: str = ""  # the reason for the winner if it is not the fastest plan

    def document(self) -> Mapping[str, Any]:
        """The explanation as JSON types. Candidates are given by name."""
        return {
            "critical_path": [{"what": what, "seconds": s} for what, s in self.critical.items()],
            "bottleneck": self.busiest and self.busiest.facts,
            "slowest_link": self.fullest_link and self.fullest_link.facts,
            "tightest_memory": self.tightest and self.tightest.facts,
            "closed_form_ratio": self.winner.optimism,
            "runner_up": self.runner_up and self.runner_up.name,
            "runner_up_longer": self.runner_up and longer(self.runner_up, self.winner),
            "papers": {c.name: c.predicted_seconds for c in self.paper_candidates},
            "prices": self.prices,
            "chosen": self.why_chosen or None,
        }

    def table(self, workload: Workload) -> Table:
        """The explanation as a table for people, one line for each reason."""
        winner, rows = self.winner, dict[str, str]()
        if winner.optimism:
            objective = seconds_text(winner.closed_form_seconds)
            replayed = seconds_text(winner.predicted_seconds or 0.0)
            times = f"{winner.optimism:.3g} times that"
            rows["objective"] = f"{objective}; replayed {times}, {replayed}"
        if winner.plan is not None and winner.replay is not None:
            rows |= reasons(winner.plan, winner.replay, workload)
        rows["chosen"] = self.why_chosen
        if self.runner_up is not None:
            rows["runner-up"] = cost_text(self.runner_up, winner, workload)
        costs = [cost_text(candidate, winner, workload) for candidate in self.paper_candidates]
        rows["papers' own"] = "; ".join(costs)
        above = [f"{name} {more_text(price)}" for name, price in self.prices.items() if price > 0]
        rows["price of paradigms"] = ", ".join(above)
        lines = tuple((what, text) for what, text in rows.items() if text)
        return Table(f"why {winner.name}", ("", ""), lines)


def explain(
    candidates: Sequence[Candidate], winner: int, workload: Workload, percent: float | None = None
) -> Explanation:
    """The explanation of a winner. candidates: in the order of the ranking. winner: index of the
    winner. percent: percent by which it may be slower than the fastest plan; None if the fastest
    wins."""
    best, fastest = candidates[winner], candidates[0]
    others = [c for c in candidates if c is not best and c.plan is not None and c.fits_memory]
    by_papers = [c for c in candidates if c.method.paper and c.plan is not None]
    best_of_paper: dict[str, Candidate] = {}  # strategy -> its first, which is its best
    for candidate in by_papers:
        best_of_paper.setdefault(candidate.strategy, candidate)
    why_chosen = ""
    if winner > 0 and percent is not None:
        took = seconds_text(fastest.predicted_seconds)
        within = f"{number_text(percent)} % slower than {fastest.name} ({took})"
        why_chosen = f"the cheapest of the plans at most {within}"
    run, plan = best.replay, best.plan
    return Explanation(
        critical=critical_parts(plan, run) if plan is not None and run is not None else {},
        busiest=busiest(plan, run) if plan is not None and run is not None else None,
        fullest_link=None if run is None else fullest_link(run, workload),
        tightest=None if run is None else tightest(run, workload),
        winner=best,
        runner_up=next((c for c in others if not same_plan(c, best)), None),
        paper_candidates=tuple(best_of_paper.values()),
        prices=prices_of(candidates),
        why_chosen=why_chosen,
    )


def prices_of(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Strategy -> how much longer its fastest plan that fits takes than the fastest plan of all, as
    a ratio >= 0; the fastest strategy first."""
    timed = [c for c in candidates if c.fits_memory and c.predicted_seconds]
    timed.sort(key=lambda c: c.predicted_seconds or 0.0)
    prices: dict[str, float] = {}
    for candidate in timed:
        prices.setdefault(candidate.strategy, longer(candidate, timed[0]) or 0.0)
    return prices


def reasons(plan: Plan, run: Replay, workload: Workload) -> dict[str, str]:
    """Heading -> text for people: the kinds of tasks that the iteration's time goes to, and the
    devices and links that are used most."""
    shares = [(what, spent / run.seconds) for what, spent in critical_parts(plan, run).items()]
    shown = shares[:PARTS_SHOWN]
    rest = sum(share for _, share in shares[PARTS_SHOWN:])
    if rest > 0:
        shown.append(("other", rest))
    link = fullest_link(run, workload)
    busy = float(run.timeline.busy.mean()) / run.seconds
    waits_of_units = [waits(run.timeline, unit) for unit in range(len(run.owners))]
    first, between, last = np.mean(waits_of_units, axis=0)
    return {
        "time goes to": ", ".join(f"{what} {percent_text(share)}" for what, share in shown),
        "busiest": busiest(plan, run).text,
        "all stages": f"on average they compute {percent_text(busy)} of the time; they wait "
        f"{percent_text(first / run.seconds)} for their first pass, "
        f"{percent_text(between / run.seconds)} between passes, and "
        f"{percent_text(last / run.seconds)} after their last pass, until gradients are "
        "synchronised and all are done",
        "fullest link": "" if link is None else link.text,
        "tightest memory": tightest(run, workload).text,
    }


def made_with_these_costs(plan: Plan, run: Replay, workload: Workload) -> bool:
    """Whether a saved plan is known to be made for this workload, so that the bound in its file
    holds here.

    run: the plan's replay on the workload. The seconds in the plan file must be those of the
    replay. They may be equal by chance, for example where only links differ that the plan does not
    use, so that the inputs that the plan carries must be those of the workload, too.
    """
    predicted = None if plan.prediction is None else plan.prediction.predicted_seconds
    if predicted is not None and abs(predicted - run.seconds) > SAME * run.seconds:
        return False
    here = Inputs.of(workload)
    return here is not None and plan.inputs is not None and here.same_costs(plan.inputs)


def why(
    plan: Plan,
    run: Replay,
    workload: Workload,
    bound: float | None,
    ladder: Sequence[Rung] = (),
    *,
    foreign_bound: float | None = None,
    bounded: str = PLANS_OF_STAGES,
) -> dict[str, str]:
    """Heading -> text for people: why a saved plan takes as long as it does. run: its replay.

    bound: lower bound on the replayed seconds of all plans that `bounded` names; None where it is
    not known. ladder: such bounds of classes of plans. foreign_bound: such a bound for other costs,
    with which the plan was made; None: there is none.
    """
    lines: dict[str, str] = {}
    if plan.prediction is not None:
        predicted = plan.prediction.predicted_seconds
        by_objective = plan.prediction.closed_form_seconds
        if predicted is not None and abs(predicted - run.seconds) > SAME * run.seconds:
            lines["plan file"] = (
                f"says {seconds_text(predicted)}: planned with other costs than these (a profile, "
                "links, or another cluster)"
            )
        if by_objective:
            text = f"{seconds_text(by_objective)}, which leaves out what the replay counts"
            lines["objective"] = text
    lines |= reasons(plan, run, workload)
    most_helpful_first = sorted(effects(plan, run, workload).items(), key=lambda pair: pair[1])
    helps = [f"{change}: {more_text(effect)}" for change, effect in most_helpful_first]
    lines["would help"] = ", ".join(helps)
    waiting = percent_text(1 - float(run.timeline.busy.max()) / run.seconds)
    if bound is None:
        no_bound = "this file has no bound of all plans"
        if foreign_bound is not None:
            no_bound = (
                f"the bound in this file, {seconds_text(foreign_bound)}, is of the costs that the "
                "plan was made with"
            )
        lines["left open"] = f"how much faster another plan could be; {no_bound}"
    else:
        proven = claim(plan, run.seconds, bound, ladder, plans=bounded, further=False)
        lines["left open"] = f"{proven}; the waits of the busiest stage are {waiting}"
        if (relative_gap(run.seconds, bound) or 0.0) > OPTIMAL_GAP:
            lines["left open"] += "; whether any plan is faster than this one is not proven"
    return {what: text for what, text in lines.items() if text}


def effects(plan: Plan, run: Replay, workload: Workload) -> dict[str, float]:
    """Change -> relative change of the plan's seconds, by replay. The changes: a device type in use
    computes a tenth faster; links are twice as fast, unless they were measured. run: the replay of
    the plan as it is."""
    cluster = workload.cluster
    tenth_faster = np.full(len(workload.profile.layers), 1 / 1.1)  # [L] factor of seconds
    changed: dict[str, Workload] = {}
    for name in dict.fromkeys(plan.devices[device].type for device in plan.ranks):
        faster = perturbed(workload.profile, {name: tenth_faster})
        changed[f"{name} 10 % faster"] = replace(workload, profile=faster)
    if workload.links is None:
        network = [
            replace(n, network_bandwidth=2 * n.network_bandwidth, flow=2 * n.flow)
            for n in cluster.nodes
        ]
        inside = [with_intra_bandwidth(n, 2 * n.intra_bandwidth) for n in cluster.nodes]
        for links, nodes in {"network": network, "links inside nodes": inside}.items():
            faster_links = replace(cluster, nodes=tuple(nodes))
            changed[f"{links} twice as fast"] = replace(workload, cluster=faster_links)
    return {
        change: replay(plan, with_change).seconds / run.seconds - 1.0
        for change, with_change in changed.items()
    }


def waits(timeline: Timeline, unit: int) -> tuple[float, float, float]:
    """Seconds in which a unit (a stage, or a device of an SPMD program) waits for its first pass,
    between passes, and after its last pass."""
    tasks = timeline.tasks
    passes = (tasks.unit == unit) & np.isin(tasks.kind, PASSES)
    first, last = float(timeline.start[passes].min()), float(timeline.end[passes].max())
    # rounding may make a wait of 0 seconds negative
    between = max(last - first - float(tasks.seconds[passes].sum()), 0.0)
    after_last = max(float(timeline.idle[unit]) - first - between, 0.0)
    return first, between, after_last


def same_plan(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates propose plans that differ in their names, origins and predictions at
    most."""
    if one.plan is None or other.plan is None:
        return False
    nameless = {"name": "", "origin": "", "prediction": None}
    return one.plan.model_copy(update=nameless) == other.plan.model_copy(update=nameless)


def longer(candidate: Candidate, best: Candidate) -> float | None:
    """The candidate's seconds of an iteration over the best one's, less 1; None where either is not
    known."""
    if candidate.predicted_seconds is None or not best.predicted_seconds:
        return None
    return candidate.predicted_seconds / best.predicted_seconds - 1.0


def critical_parts(plan: Plan, run: Replay) -> dict[str, float]:
    """Kind of task on the critical path, for people -> its seconds, largest first. The latency of a
    message counts as its seconds."""
    tasks = run.timeline.tasks
    names = unit_names(plan, run)
    spent: dict[str, float] = {}
    for i in path_to_end(run.timeline):
        label = label_of(run, Kind(int(tasks.kind[i])), names[int(tasks.unit[i])])
        spent[label] = spent.get(label, 0.0) + float(tasks.seconds[i] + tasks.delay[i])
    largest = sorted(spent.items(), key=lambda item: -item[1])
    return {what: seconds for what, seconds in largest if seconds > 0}


def label_of(run: Replay, kind: Kind, unit: str) -> str:
    """A task of a unit in words, for people. unit: its name."""
    if run.by_device and kind not in COMPUTES:
        return "collectives of the program"
    others = {
        Kind.OPTIMIZER: f"{unit} updates weights",
        Kind.TRANSFER: "transfers between stages",
        Kind.COLLECTIVE: "gradients and weights synchronised",
    }
    return others.get(kind, f"{unit} computes")


def folded(plan: Plan, run: Replay) -> list[list[int]]:
    """The units of the replay in groups that do the same: one stage of all like pipelines, or the
    devices of one type that compute equally long in an SPMD program."""
    if not run.by_device:
        return units_of_like_stages(plan, run)
    busy = run.timeline.busy
    types = [device.type for device in plan.devices]
    # exactly equal seconds: like devices add up the same numbers in the same order
    pairs = (
        ((types[devices[0]], float(busy[unit])), unit) for unit, devices in enumerate(run.devices)
    )
    return list(grouped(pairs).values())


def name_of(plan: Plan, run: Replay, units: Sequence[int]) -> str:
    """The name of units that do the same: `stage 3` for all pipelines, `stage 3 of pipelines 0,2`
    for some. For an SPMD program the first device, `device 0`."""
    first = units[0]
    if run.by_device:
        return f"device {run.devices[first][0]}"
    name = f"stage {run.owners[first][1]}"
    if len(units) == len(plan.replicas):
        return name
    pipelines = ranges_text(run.owners[unit][0] for unit in units)
    return f"{name} of pipeline{'s' if len(units) > 1 else ''} {pipelines}"


def unit_names(plan: Plan, run: Replay) -> dict[int, str]:
    """Unit -> its name. Units that do the same have the same name."""
    return {unit: name_of(plan, run, units) for units in folded(plan, run) for unit in units}


def busiest(plan: Plan, run: Replay) -> Bottleneck:
    """The stage, or the device of an SPMD program, that computes longest, with its waits."""
    unit = int(np.argmax(run.timeline.busy))
    replica, stage = run.owners[unit]
    device = run.devices[unit][0] if run.by_device else None
    busy = float(run.timeline.busy[unit])
    share = busy / run.seconds
    facts = {"replica": replica, "stage": stage, "busy_share": share, "device": device}
    first, between, last = map(seconds_text, waits(run.timeline, unit))
    text = (
        f"{unit_names(plan, run)[unit]} computes {seconds_text(busy)}, {percent_text(share)} of "
        f"the time; it waits {first} for its first pass, {between} between passes and {last} "
        "after its last one"
    )
    return Bottleneck(text, facts)


def fullest_link(run: Replay, workload: Workload) -> Bottleneck | None:
    """The direction of a link that is in use longest; None if no link is used.

    The replay numbers link ends: first the network cards of nodes, then the ports of devices within
    their nodes, then the links of switches to other switches, then the cards of single devices.
    Each end has two ports: 2 * end sends, and 2 * end + 1 receives.
    """
    used_seconds = run.timeline.port_seconds
    if not len(used_seconds) or used_seconds.max() <= 0:
        return None
    end, receives = divmod(int(np.argmax(used_seconds)), 2)
    owner, bandwidth = end_of_link(end, workload)
    link = f"{owner} {'receives' if receives else 'sends'} at {bandwidth * 8 / 1e9:.4g} Gbit/s"
    share = float(used_seconds.max()) / run.seconds
    return Bottleneck(
        f"{link}: in use {percent_text(share)} of the time", {"link": link, "held_share": share}
    )


def end_of_link(end: int, workload: Workload) -> tuple[str, float]:
    """(owner of a link end, its bytes per second). end: its number, as in `fullest_link`."""
    cluster, costs = workload.cluster, costs_of(workload)
    nodes, devices, uplinks = cluster.nodes, cluster.devices, costs.data.uplinks
    if end < len(nodes):
        return f"node {end}", nodes[end].network_bandwidth
    device = end - len(nodes)
    if device < len(devices):
        return f"device {device} within its node", nodes[devices[device].node].intra_bandwidth
    switch = device - len(devices)
    if switch < len(uplinks):
        return f"switch {switch}", uplinks[switch]
    device = switch - len(uplinks)
    _, bandwidth = costs.card(device)
    return f"the card of device {device}", bandwidth


def tightest(run: Replay, workload: Workload) -> Bottleneck:
    """The device with the largest share of its memory in use, with the components of its bytes."""
    sizes = list(zip(run.peak_bytes, run.limit_bytes, strict=True))
    # a limit may be 0, where the margin and the reserved bytes leave nothing
    device = max(range(len(sizes)), key=lambda d: sizes[d][0] / max(sizes[d][1], 1.0))
    held, limit = sizes[device]
    verdict = "binds" if held > TIGHT * limit else f"{bytes_text(limit - held)} left"
    parts = run.held[device] if run.held else None  # SPMD programs have no known components
    facts = {
        "device": device,
        "bytes": held,
        "limit_bytes": limit,
        "components": parts and asdict(parts),
    }
    kind = workload.cluster.devices[device].type
    text = f"device {device} ({kind}): {share_text(held, limit)}; {verdict}"
    return Bottleneck(f"{text}: {parts.text}" if parts else text, facts)


def cost_text(candidate: Candidate, best: Candidate, workload: Workload) -> str:
    """A candidate's time and money, in comparison with the best: `amp/auto 347 ms (+11 %), $0.06
    per million tokens`."""
    text = f"{candidate.name} {seconds_text(candidate.predicted_seconds)}"
    more = longer(candidate, best)
    if more is not None:
        text += f" ({more_text(more)})"
    money = candidate.money_per_million_tokens(workload)
    if money is not None:
        text += f", ${number_text(money, 3)} per million tokens"
    return text if candidate.fits_memory else f"{text}, does not fit"
