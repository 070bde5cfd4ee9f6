"""Why the winner takes as long as it does, and what else there was: read off its replay and the
ranking.

The chain that decides the iteration's length (`path_to_end`: tasks without waiting between them) is
divided by what its tasks are. Speeding up anything that is not on it gains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetplan.planner.candidate import Candidate
from hetplan.profiling.simulator.tasks import COMPUTES, Kind, path_to_end
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import Replay
from hetplan.text import Table, bytes_text, number_text, percent_text, seconds_text, share_text

PARTS = 5  # of the chain that are shown
TIGHT = 0.9  # of a device's memory in use


@dataclass(frozen=True)
class Explanation:
    """What the winner's replay and the ranking say; without a replay its first four are empty."""

    critical: Mapping[str, float]  # what is on the deciding chain -> seconds, largest first
    # Who computes longest: replica, stage, busy_share of the iteration; device of a program that
    # all devices run together, else None.
    busiest: Mapping[str, Any] | None
    card: Mapping[str, Any] | None  # the fullest network card: link, held_share of the iteration
    tightest: Mapping[str, Any] | None  # device with the least memory left: bytes, limit_bytes
    winner: Candidate
    runner_up: Candidate | None  # the next best candidate of another plan
    papers: tuple[Candidate, ...]  # the best that each paper's own procedure gave
    chosen: str = ""  # why a slower plan than the fastest wins

    def document(self) -> Mapping[str, Any]:
        """As JSON types; candidates by name."""
        return {
            "critical_path": [{"what": what, "seconds": s} for what, s in self.critical.items()],
            "bottleneck": self.busiest,
            "slowest_link": self.card,
            "tightest_memory": self.tightest,
            "closed_form_ratio": self.winner.optimism,
            "runner_up": self.runner_up and self.runner_up.name,
            "runner_up_longer": self.runner_up and longer(self.runner_up, self.winner),
            "papers": {c.name: c.predicted_seconds for c in self.papers},
            "chosen": self.chosen or None,
        }

    def table(self, workload: Workload) -> Table:
        """For people: one line each."""
        rows: list[tuple[str, str]] = []
        seconds = self.winner.predicted_seconds or 0.0
        if self.critical and seconds:
            shares = [(what, spent / seconds) for what, spent in self.critical.items()]
            rest = sum(share for _, share in shares[PARTS:])
            shown = [*shares[:PARTS], *([("other", rest)] if rest > 0 else [])]
            text = ", ".join(f"{what} {percent_text(share)}" for what, share in shown)
            rows.append(("decides the iteration", text))
        if self.winner.optimism is not None:
            closed = seconds_text(self.winner.closed_form_seconds)
            ratio = f"{self.winner.optimism:.3g} times that, {seconds_text(seconds)}"
            rows.append(("closed form", f"{closed}; replayed {ratio}"))
        rows += self.binding(workload)
        if self.chosen:
            rows.append(("chosen", self.chosen))
        if self.runner_up is not None:
            rows.append(("runner-up", cost_text(self.runner_up, self.winner, workload)))
        if self.papers:
            texts = [cost_text(c, self.winner, workload) for c in self.papers]
            rows.append(("papers' own", "; ".join(texts)))
        return Table(f"why {self.winner.name}", ("", ""), tuple(rows))

    def binding(self, workload: Workload) -> list[tuple[str, str]]:
        """Lines on stage, link and memory."""
        rows = []
        if (b := self.busiest) is not None:
            alone = f"stage {b['stage']} of replica {b['replica']}"
            of = alone if b["device"] is None else f"device {b['device']}"
            rows.append(("busiest", f"{of}: computes {percent_text(b['busy_share'])} of the time"))
        if (c := self.card) is not None:
            used = percent_text(c["held_share"])
            rows.append(("fullest link", f"{c['link']}: in use {used} of the time"))
        if (t := self.tightest) is not None:
            held, limit, kind = t["bytes"], t["limit_bytes"], workload.cluster.devices[t["device"]]
            verdict = "binds" if held > TIGHT * limit else f"{bytes_text(limit - held)} left"
            text = f"device {t['device']} ({kind.type}): {share_text(held, limit)}; {verdict}"
            rows.append(("tightest memory", text))
        return rows


def explain(
    candidates: Sequence[Candidate], winner: int, workload: Workload, percent: float | None = None
) -> Explanation:
    """The explanation of the winner among ranked candidates. percent: by how much it may be slower
    than the fastest, where the cheapest was asked for."""
    best, fastest = candidates[winner], candidates[0]
    others = [c for c in candidates if c is not best and c.plan is not None and c.fits_memory]
    papers: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.method.paper and candidate.plan:
            papers.setdefault(candidate.strategy, candidate)
    within = f"{number_text(percent)} % slower than {fastest.name}"
    took = seconds_text(fastest.predicted_seconds)
    slower = winner > 0 and percent is not None
    run = best.replayed
    return Explanation(
        critical={} if run is None else critical_parts(run),
        busiest=None if run is None else busiest(run),
        card=None if run is None else fullest_card(run, workload),
        tightest=None if run is None else tightest(run),
        winner=best,
        runner_up=next((c for c in others if not same_plan(c, best)), None),
        papers=tuple(papers.values()),
        chosen=f"the cheapest of what is at most {within} ({took})" if slower else "",
    )


def same_plan(one: Candidate, other: Candidate) -> bool:
    """Whether both propose the same, under different names."""
    if one.plan is None or other.plan is None:
        return False
    alike = {"name": "", "origin": "", "prediction": None}
    return one.plan.model_copy(update=alike) == other.plan.model_copy(update=alike)


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
    of = "" if len({r for r, _ in run.owners}) == 1 else f" of replica {replica}"
    return f"stage {stage}{of} {does}"


def busiest(run: Replay) -> dict[str, Any]:
    """The stage, or the device of a program, that computes longest."""
    unit = int(np.argmax(run.timeline.busy))
    return {
        **dict(zip(("replica", "stage"), run.owners[unit], strict=True)),
        "busy_share": float(run.timeline.busy[unit]) / run.seconds,
        "device": run.devices[unit][0] if run.by_device else None,
    }


def fullest_card(run: Replay, workload: Workload) -> dict[str, Any] | None:
    """The side of a node's network card that is held longest."""
    held = run.timeline.port_seconds
    if not len(held) or held.max() <= 0:
        return None
    node, receives = divmod(int(np.argmax(held)), 2)
    rate = workload.cluster.nodes[node].network_bandwidth * 8 / 1e9
    link = f"node {node} {'receives' if receives else 'sends'} at {rate:.4g} Gbit/s"
    return {"link": link, "held_share": float(held.max()) / run.seconds}


def tightest(run: Replay) -> dict[str, Any]:
    """Where the largest share of memory is in use."""
    sizes = list(zip(run.peak_bytes, run.limit_bytes, strict=True))
    device = max(range(len(sizes)), key=lambda d: sizes[d][0] / max(sizes[d][1], 1.0))
    return dict(zip(("device", "bytes", "limit_bytes"), (device, *sizes[device]), strict=True))


def cost_text(candidate: Candidate, best: Candidate, workload: Workload) -> str:
    """`amp/auto 347 ms (+11 %), $0.06 per million tokens`."""
    more = longer(candidate, best)
    text = f"{candidate.name} {seconds_text(candidate.predicted_seconds)}"
    if more is not None:
        text += f" ({100 * more:+.3g} %)"
    money = candidate.money_per_million_tokens(workload)
    if money is not None:
        text += f", ${number_text(money, 3)} per million tokens"
    return text if candidate.fits_memory else f"{text}, does not fit"
