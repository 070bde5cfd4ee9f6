"""Why the winner takes as long as it does, and what else there was: read off its replay and the
ranking.

An iteration lasts as long as one chain of tasks that follow each other without waiting
(`path_to_end`). The seconds of this chain are divided by what its tasks are. Speeding up anything
that is not on it gains nothing.

A plan that was saved is explained from its replay alone (`why`). What a faster device or network
would bring is asked by replaying the plan with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hetplan.planner.candidate import Candidate
from hetplan.plans.plan import Plan
from hetplan.profiling.profiles.profile import perturbed
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.replays.pose import costs_of
from hetplan.replays.replay import replay
from hetplan.replays.simulator.tasks import COMPUTES, Kind, Timeline, path_to_end
from hetplan.replays.stages import units_of_like_stages
from hetplan.solvers.run import relative_gap
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

PARTS_SHOWN = 5  # of the chain
TIGHT = 0.9  # of a device's memory in use
SAME = 1e-6  # relative: seconds that differ by more come from other costs


@dataclass(frozen=True)
class Bottleneck:
    """The resource with the least to spare: a stage, a network card, a device's memory."""

    text: str  # for people
    facts: Mapping[str, Any]  # as JSON types


@dataclass(frozen=True)
class Explanation:
    """An explanation of the winner, by its replay and the ranking. The first four fields come from
    the replay: without one they are empty or None."""

    critical: Mapping[str, float]  # what is on the deciding chain -> seconds, largest first
    # Who computes longest: replica, stage, busy_share of the iteration; device of a program that
    # all devices run together, else None.
    busiest: Bottleneck | None
    # The link in use longest, a card or a device's port: link, held_share of the iteration.
    fullest_link: Bottleneck | None
    # The device with the largest share of its memory in use: device, bytes, limit_bytes,
    # components of the bytes.
    tightest: Bottleneck | None
    winner: Candidate
    runner_up: Candidate | None  # the next best candidate of another plan
    paper_candidates: tuple[Candidate, ...]  # the best of each paper's own procedure
    # By strategy, how much longer its best plan takes than the best of all, as a ratio from 0 on.
    prices: Mapping[str, float]
    why_chosen: str = ""  # where the winner is not the fastest plan

    def document(self) -> Mapping[str, Any]:
        """The explanation as JSON types; candidates stand by name."""
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
    """The explanation of the winner among ranked candidates. percent: by how much it may be slower
    than the fastest, where the cheapest was asked for."""
    best, fastest = candidates[winner], candidates[0]
    others = [c for c in candidates if c is not best and c.plan is not None and c.fits_memory]
    by_papers = [c for c in candidates if c.method.paper and c.plan is not None]
    best_of_paper = {c.strategy: c for c in reversed(by_papers)}
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
        paper_candidates=tuple(c for c in by_papers if c is best_of_paper[c.strategy]),
        prices=prices_of(candidates),
        why_chosen=why_chosen,
    )


def prices_of(candidates: Sequence[Candidate]) -> dict[str, float]:
    """By strategy, how much longer its fastest plan that fits takes than the fastest of all, as a
    ratio from 0 on; the fastest strategy first."""
    timed = [c for c in candidates if c.fits_memory and c.predicted_seconds]
    timed.sort(key=lambda c: c.predicted_seconds or 0.0)
    prices: dict[str, float] = {}
    for candidate in timed:
        prices.setdefault(candidate.strategy, longer(candidate, timed[0]) or 0.0)
    return prices


def reasons(plan: Plan, run: Replay, workload: Workload) -> dict[str, str]:
    """The parts that the iteration's time goes to, and the devices and links with the least to
    spare, for people."""
    shares = [(what, spent / run.seconds) for what, spent in critical_parts(plan, run).items()]
    rest = sum(share for _, share in shares[PARTS_SHOWN:])
    shown = [*shares[:PARTS_SHOWN], *([("other", rest)] if rest > 0 else [])]
    link, busy = fullest_link(run, workload), float(run.timeline.busy.mean()) / run.seconds
    first, between, last = np.mean([waits(run.timeline, u) for u in range(len(run.owners))], axis=0)
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


def why(plan: Plan, run: Replay, workload: Workload, bound: float | None) -> dict[str, str]:
    """Why a plan takes that long, for people, without the ranking that it comes from.

    bound: seconds that no plan of stages replays below; None where it is not known.
    """
    said, gap = plan.prediction, relative_gap(run.seconds, bound)
    seconds, formula = (said.predicted_seconds, said.closed_form_seconds) if said else (None, None)
    other = seconds is not None and abs(seconds - run.seconds) > SAME * run.seconds
    helps = sorted(effects(plan, run, workload).items(), key=lambda pair: pair[1])
    waiting = percent_text(1 - float(run.timeline.busy.max()) / run.seconds)
    lines: dict[str, str] = {}
    if other:
        lines["plan file"] = (
            f"says {seconds_text(seconds)}: planned with other costs than these (a profile, links, "
            "or another cluster)"
        )
    if formula:
        lines["objective"] = f"{seconds_text(formula)}, which leaves out what the replay counts"
    lines |= reasons(plan, run, workload)
    lines["would help"] = ", ".join(f"{what}: {more_text(change)}" for what, change in helps)
    if gap is None:
        lines["left open"] = (
            "how much faster another plan could be; this file has no bound of all plans"
        )
    else:
        lines["left open"] = (
            f"no plan of stages is faster than {seconds_text(bound)}, {percent_text(gap)} below "
            f"this one; the waits of the busiest stage are {waiting}; whether any plan is faster "
            "than this one is not proven"
        )
    return {what: text for what, text in lines.items() if text}


def effects(plan: Plan, run: Replay, workload: Workload) -> dict[str, float]:
    """By what ratio the plan's iteration changes when a device type in use computes a tenth faster,
    and when links are twice as fast; replayed. Links that were measured stay as they are."""
    cluster, layers = workload.cluster, np.ones(len(workload.profile.layers))
    changed = {
        f"{kind} 10 % faster": replace(
            workload, profile=perturbed(workload.profile, {kind: layers / 1.1})
        )
        for kind in dict.fromkeys(plan.devices[device].type for device in plan.ranks)
    }
    if workload.links is None:
        network = [replace(n, network_bandwidth=2 * n.network_bandwidth) for n in cluster.nodes]
        inside = [replace(n, intra_bandwidth=2 * n.intra_bandwidth) for n in cluster.nodes]
        changed |= {
            f"{links} twice as fast": replace(
                workload, cluster=replace(cluster, nodes=tuple(nodes))
            )
            for links, nodes in (("network", network), ("links inside nodes", inside))
        }
    return {what: replay(plan, one).seconds / run.seconds - 1.0 for what, one in changed.items()}


def waits(timeline: Timeline, unit: int) -> tuple[float, float, float]:
    """Seconds in which a unit waits for its first pass, between passes, and after its last one."""
    tasks = timeline.tasks
    passes = (tasks.unit == unit) & np.isin(tasks.kind, (Kind.FORWARD, Kind.BACKWARD))
    first, last = float(timeline.start[passes].min()), float(timeline.end[passes].max())
    between = max(last - first - float(tasks.seconds[passes].sum()), 0.0)
    return first, between, max(float(timeline.idle[unit]) - first - between, 0.0)


def same_plan(one: Candidate, other: Candidate) -> bool:
    """Whether both propose the same, under different names."""
    if one.plan is None or other.plan is None:
        return False
    nameless = {"name": "", "origin": "", "prediction": None}
    return one.plan.model_copy(update=nameless) == other.plan.model_copy(update=nameless)


def longer(candidate: Candidate, best: Candidate) -> float | None:
    """The excess of an iteration over the best one's, as a ratio above 0."""
    if candidate.predicted_seconds is None or not best.predicted_seconds:
        return None
    return candidate.predicted_seconds / best.predicted_seconds - 1.0


def critical_parts(plan: Plan, run: Replay) -> dict[str, float]:
    """The deciding chain by what its tasks are, largest first; latencies go to their messages."""
    tasks = run.timeline.tasks
    names = unit_names(plan, run)
    spent: dict[str, float] = {}
    for i in path_to_end(run.timeline):
        label = label_of(run, Kind(int(tasks.kind[i])), names[int(tasks.unit[i])])
        spent[label] = spent.get(label, 0.0) + float(tasks.seconds[i] + tasks.delay[i])
    largest = sorted(spent.items(), key=lambda item: -item[1])
    return {what: seconds for what, seconds in largest if seconds > 0}


def label_of(run: Replay, kind: Kind, unit: str) -> str:
    """A kind of task in words, for people."""
    if run.by_device and kind not in COMPUTES:
        return "collectives of the program"
    others = {
        Kind.OPTIMIZER: f"{unit} updates weights",
        Kind.TRANSFER: "transfers between stages",
        Kind.COLLECTIVE: "gradients and weights synchronised",
    }
    return others.get(kind, f"{unit} computes")


def folded(plan: Plan, run: Replay) -> list[list[int]]:
    """Units that do the same: a stage of like pipelines, or the devices of a program that compute
    equally long."""
    if not run.by_device:
        return units_of_like_stages(plan, run)
    busy, types = run.timeline.busy, [device.type for device in plan.devices]
    pairs = (
        ((types[devices[0]], float(busy[unit])), unit) for unit, devices in enumerate(run.devices)
    )
    return list(grouped(pairs).values())


def name_of(plan: Plan, run: Replay, units: Sequence[int]) -> str:
    """`stage 3` of all pipelines; `stage 3 of pipelines 0,2` of some; of a program the first
    device, `device 0`."""
    if run.by_device:
        return f"device {run.devices[units[0]][0]}"
    pipelines = ranges_text(run.owners[unit][0] for unit in units)
    several = "s" if len(units) > 1 else ""
    of = "" if len(units) == len(plan.replicas) else f" of pipeline{several} {pipelines}"
    return f"stage {run.owners[units[0]][1]}{of}"


def unit_names(plan: Plan, run: Replay) -> dict[int, str]:
    """The name of every unit; units that do the same share it."""
    return {u: name_of(plan, run, units) for units in folded(plan, run) for u in units}


def busiest(plan: Plan, run: Replay) -> Bottleneck:
    """The stage, or the device of a program, that computes longest, and when it waits."""
    unit = int(np.argmax(run.timeline.busy))
    (replica, stage), busy = run.owners[unit], float(run.timeline.busy[unit])
    device, share = run.devices[unit][0] if run.by_device else None, busy / run.seconds
    facts = {"replica": replica, "stage": stage, "busy_share": share, "device": device}
    first, between, last = map(seconds_text, waits(run.timeline, unit))
    text = (
        f"{unit_names(plan, run)[unit]} computes {seconds_text(busy)}, {percent_text(share)} of "
        f"the time; it waits {first} for its first pass, {between} between passes and {last} "
        "after its last one"
    )
    return Bottleneck(text, facts)


def fullest_link(run: Replay, workload: Workload) -> Bottleneck | None:
    """The side of a node's network card, of a device's port in its node, or of a switch's links to
    the others, that is held longest."""
    held, nodes = run.timeline.port_seconds, workload.cluster.nodes
    if not len(held) or held.max() <= 0:
        return None
    end, receives = divmod(int(np.argmax(held)), 2)
    who, bandwidth = f"node {end}", nodes[min(end, len(nodes) - 1)].network_bandwidth
    costs = costs_of(workload)
    switch = end - len(nodes) - len(workload.cluster.devices)
    if switch >= len(costs.data.uplinks):
        device = switch - len(costs.data.uplinks)
        who, bandwidth = f"the card of device {device}", costs.card(device)[1]
    elif switch >= 0:
        who, bandwidth = f"switch {switch}", costs.data.uplinks[switch]
    elif end >= len(nodes):
        device = end - len(nodes)
        who = f"device {device} within its node"
        bandwidth = nodes[workload.cluster.devices[device].node].intra_bandwidth
    link = f"{who} {'receives' if receives else 'sends'} at {bandwidth * 8 / 1e9:.4g} Gbit/s"
    used = float(held.max()) / run.seconds
    return Bottleneck(
        f"{link}: in use {percent_text(used)} of the time", {"link": link, "held_share": used}
    )


def tightest(run: Replay, workload: Workload) -> Bottleneck:
    """The device with the largest share of its memory in use, and what it holds."""
    sizes = list(zip(run.peak_bytes, run.limit_bytes, strict=True))
    device = max(range(len(sizes)), key=lambda d: sizes[d][0] / max(sizes[d][1], 1.0))
    held, limit = sizes[device]
    verdict = "binds" if held > TIGHT * limit else f"{bytes_text(limit - held)} left"
    parts = run.held[device] if run.held else None  # of programs no components are known
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
    """`amp/auto 347 ms (+11 %), $0.06 per million tokens`."""
    more, money = longer(candidate, best), candidate.money_per_million_tokens(workload)
    longer_by = "" if more is None else f" ({more_text(more)})"
    known = {
        f"{candidate.name} {seconds_text(candidate.predicted_seconds)}{longer_by}": True,
        f"${number_text(money, 3)} per million tokens": money is not None,
        "does not fit": not candidate.fits_memory,
    }
    return ", ".join(text for text, holds in known.items() if holds)
