"""Why the winner takes as long as it does, and what else there was: read off its replay and the
ranking.

An iteration lasts as long as one chain of tasks that follow each other without waiting
(`path_to_end`). The seconds of this chain are divided by what its tasks are. Speeding up anything
that is not on it gains nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetplan.formulations.joint.pose import costs_of
from hetplan.planner.strategy import Candidate
from hetplan.profiling.simulator.tasks import COMPUTES, Kind, path_to_end
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import Replay
from hetplan.text import (
    Table,
    bytes_text,
    more_text,
    number_text,
    percent_text,
    seconds_text,
    share_text,
)

PARTS_SHOWN = 5  # of the chain
TIGHT = 0.9  # of a device's memory in use


@dataclass(frozen=True)
class Bottleneck:
    """What has least to spare: a stage, a network card, a device's memory."""

    text: str  # for people
    facts: Mapping[str, Any]  # as JSON types


@dataclass(frozen=True)
class Explanation:
    """What the winner's replay and the ranking say. The first four fields come from the replay:
    without one they are empty or None."""

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
        """As JSON types; candidates by name."""
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
        """For people: one line each."""
        winner, seconds = self.winner, self.winner.predicted_seconds or 0.0
        closed = seconds_text(winner.closed_form_seconds)
        against = f"{winner.optimism or 0.0:.3g} times that, {seconds_text(seconds)}"
        costs = [cost_text(c, winner, workload) for c in self.paper_candidates]
        rows = {
            "closed form": f"{closed}; replayed {against}" if winner.optimism else "",
            **({} if winner.replay is None else reasons(winner.replay, workload)),
            "chosen": self.why_chosen,
            "runner-up": self.runner_up and cost_text(self.runner_up, winner, workload),
            "papers' own": "; ".join(costs),
            "price of paradigms": ", ".join(
                f"{s} {more_text(price)}" for s, price in self.prices.items() if price > 0
            ),
        }
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
    best_of = {c.strategy: c for c in reversed(by_papers)}
    timed = [c for c in candidates if c.fits_memory and c.predicted_seconds]
    timed.sort(key=lambda c: -(c.predicted_seconds or 0.0))
    prices = {c.strategy: longer(c, timed[-1]) or 0.0 for c in timed}
    within = f"{number_text(percent)} % slower than {fastest.name}"
    took = seconds_text(fastest.predicted_seconds)
    slower = winner > 0 and percent is not None
    run = best.replay
    return Explanation(
        critical={} if run is None else critical_parts(run),
        busiest=None if run is None else busiest(run),
        fullest_link=None if run is None else fullest_link(run, workload),
        tightest=None if run is None else tightest(run, workload),
        winner=best,
        runner_up=next((c for c in others if not same_plan(c, best)), None),
        paper_candidates=tuple(c for c in by_papers if c is best_of[c.strategy]),
        prices=dict(reversed(prices.items())),
        why_chosen=f"the cheapest of what is at most {within} ({took})" if slower else "",
    )


def reasons(run: Replay, workload: Workload) -> dict[str, str]:
    """What the iteration's time goes to, and what has least to spare, for people."""
    shares = [(what, spent / run.seconds) for what, spent in critical_parts(run).items()]
    rest = sum(share for _, share in shares[PARTS_SHOWN:])
    shown = [*shares[:PARTS_SHOWN], *([("other", rest)] if rest > 0 else [])]
    link = fullest_link(run, workload)
    return {
        "time goes to": ", ".join(f"{what} {percent_text(share)}" for what, share in shown),
        "busiest": busiest(run).text,
        "fullest link": "" if link is None else link.text,
        "tightest memory": tightest(run, workload).text,
    }


def same_plan(one: Candidate, other: Candidate) -> bool:
    """Whether both propose the same, under different names."""
    if one.plan is None or other.plan is None:
        return False
    nameless = {"name": "", "origin": "", "prediction": None}
    return one.plan.model_copy(update=nameless) == other.plan.model_copy(update=nameless)


def longer(candidate: Candidate, best: Candidate) -> float | None:
    """How much longer an iteration takes than the best one's, as a ratio above 0."""
    if candidate.predicted_seconds is None or not best.predicted_seconds:
        return None
    return candidate.predicted_seconds / best.predicted_seconds - 1.0


def critical_parts(run: Replay) -> dict[str, float]:
    """The deciding chain by what its tasks are, largest first; latencies go to their messages."""
    tasks = run.timeline.tasks
    spent: dict[str, float] = {}
    for i in path_to_end(run.timeline):
        label = label_of(run, Kind(int(tasks.kind[i])), int(tasks.unit[i]))
        spent[label] = spent.get(label, 0.0) + float(tasks.seconds[i] + tasks.delay[i])
    largest = sorted(spent.items(), key=lambda item: -item[1])
    return {what: seconds for what, seconds in largest if seconds > 0}


def label_of(run: Replay, kind: Kind, unit: int) -> str:
    """What a task is, for people."""
    if kind not in COMPUTES:
        if run.by_device:
            return "collectives of the program"
        transfer = kind == Kind.TRANSFER
        return "transfers between stages" if transfer else "gradients and weights joined"
    does = "updates weights" if kind == Kind.OPTIMIZER else "computes"
    if run.by_device:
        return f"device {run.devices[unit][0]} {does}"
    replica, stage = run.owners[unit]
    of = "" if len({r for r, _ in run.owners}) == 1 else f" of pipeline {replica}"
    return f"stage {stage}{of} {does}"


def busiest(run: Replay) -> Bottleneck:
    """The stage, or the device of a program, that computes longest."""
    unit = int(np.argmax(run.timeline.busy))
    (replica, stage), busy = run.owners[unit], float(run.timeline.busy[unit]) / run.seconds
    device = run.devices[unit][0] if run.by_device else None
    who = f"stage {stage} of pipeline {replica}" if device is None else f"device {device}"
    facts = {"replica": replica, "stage": stage, "busy_share": busy, "device": device}
    return Bottleneck(f"{who}: computes {percent_text(busy)} of the time", facts)


def fullest_link(run: Replay, workload: Workload) -> Bottleneck | None:
    """The side of a node's network card, of a device's port in its node, or of a switch's links to
    the others, that is held longest."""
    held, nodes = run.timeline.port_seconds, workload.cluster.nodes
    if not len(held) or held.max() <= 0:
        return None
    end, receives = divmod(int(np.argmax(held)), 2)
    who, bandwidth = f"node {end}", nodes[min(end, len(nodes) - 1)].network_bandwidth
    if end >= len(nodes) + len(workload.cluster.devices):
        switch = end - len(nodes) - len(workload.cluster.devices)
        who, bandwidth = f"switch {switch}", costs_of(workload).data.uplinks[switch]
    elif end >= len(nodes):
        device = end - len(nodes)
        who = f"device {device} within its node"
        bandwidth = nodes[workload.cluster.devices[device].node].intra_bandwidth
    rate = bandwidth * 8 / 1e9
    link = f"{who} {'receives' if receives else 'sends'} at {rate:.4g} Gbit/s"
    used = float(held.max()) / run.seconds
    text = f"{link}: in use {percent_text(used)} of the time"
    return Bottleneck(text, {"link": link, "held_share": used})


def tightest(run: Replay, workload: Workload) -> Bottleneck:
    """The device with the largest share of its memory in use, and what it holds."""
    sizes = list(zip(run.peak_bytes, run.limit_bytes, strict=True))
    device = max(range(len(sizes)), key=lambda d: sizes[d][0] / max(sizes[d][1], 1.0))
    held, limit = sizes[device]
    verdict = "binds" if held > TIGHT * limit else f"{bytes_text(limit - held)} left"
    of = f"device {device} ({workload.cluster.devices[device].type})"
    parts = run.held[device] if run.held else None  # of programs no components are known
    components = parts and asdict(parts)
    facts = {"device": device, "bytes": held, "limit_bytes": limit, "components": components}
    text = f"{of}: {share_text(held, limit)}; {verdict}"
    return Bottleneck(f"{text}: {parts.text}" if parts else text, facts)


def cost_text(candidate: Candidate, best: Candidate, workload: Workload) -> str:
    """`amp/auto 347 ms (+11 %), $0.06 per million tokens`."""
    more, money = longer(candidate, best), candidate.money_per_million_tokens(workload)
    text = f"{candidate.name} {seconds_text(candidate.predicted_seconds)}"
    if more is not None:
        text += f" ({more_text(more)})"
    if money is not None:
        text += f", ${number_text(money, 3)} per million tokens"
    return text if candidate.fits_memory else f"{text}, does not fit"
