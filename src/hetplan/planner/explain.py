"""Why the winner takes as long as it does, and what else there was: read off its replay and the
ranking.

The chain that decides the iteration's length (`path_to_end`: tasks without waiting between them) is
divided by what its tasks are. Speeding up anything that is not on it gains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetplan.planner.candidate import Candidate
from hetplan.profiling.simulator.tasks import COMPUTES, Kind
from hetplan.profiling.simulator.timeline import path_to_end
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import Replay
from hetplan.text import Table, bytes_text, number_text, percent_text, seconds_text, share_text

if TYPE_CHECKING:
    from hetplan.planner.ranking import Planning

PARTS = 5  # of the chain that are shown
TIGHT = 0.9  # of a device's memory in use


@dataclass(frozen=True)
class Part:
    """What one thing contributes to the chain that decides the iteration's length."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """critical: parts of the deciding chain, largest first. busiest: (replica, stage, share of the
    iteration that it computes). card: (text, share of the iteration that it is held), None where
    nothing crosses the network. tightest: the device with the least memory left, in share of its
    limit. runner_up: the next best candidate of another plan. papers: the best that each paper's
    own procedure gave. chosen: why a slower one wins. device: the busiest, of a program that all
    devices run together.
    """

    seconds: float | None
    critical: tuple[Part, ...]
    busiest: tuple[int, int, float] | None
    card: tuple[str, float] | None
    tightest: tuple[int, float, float] | None
    winner: Candidate
    runner_up: Candidate | None
    papers: tuple[Candidate, ...]
    chosen: str = ""
    device: int | None = None

    def document(self) -> Mapping[str, Any]:
        """As JSON types; candidates by name."""
        ratio = None if self.runner_up is None else longer(self.runner_up, self.winner)
        return {
            "critical_path": [{"what": p.what, "seconds": p.seconds} for p in self.critical],
            "bottleneck": None
            if self.busiest is None
            else {
                **dict(zip(("replica", "stage", "busy_share"), self.busiest, strict=True)),
                "device": self.device,
            },
            "slowest_link": None
            if self.card is None
            else {"link": self.card[0], "held_share": self.card[1]},
            "tightest_memory": None
            if self.tightest is None
            else dict(zip(("device", "bytes", "limit_bytes"), self.tightest, strict=True)),
            "closed_form_ratio": self.winner.optimism,
            "runner_up": None if self.runner_up is None else self.runner_up.name,
            "runner_up_longer": ratio,
            "papers": {c.name: c.predicted_seconds for c in self.papers},
            "chosen": self.chosen or None,
        }


def explain(planning: Planning) -> Explanation:
    """The explanation of the winner; the planning must have one."""
    best = planning.best
    assert best is not None
    others = [
        c for c in planning.candidates if c is not best and c.plan is not None and c.fits_memory
    ]
    runner_up = next((c for c in others if not same_plan(c, best)), None)
    own = {
        c.strategy: c
        for c in reversed(planning.candidates)
        if c.method.startswith("paper") and c.plan
    }
    papers = tuple(c for c in planning.candidates if own.get(c.strategy) is c)
    found = best.replayed
    if found is None:
        return Explanation(
            best.predicted_seconds,
            (),
            None,
            None,
            None,
            best,
            runner_up,
            papers,
            why_chosen(planning),
        )
    timeline = found.timeline
    unit = int(np.argmax(timeline.busy))
    busiest = (*found.owners[unit], float(timeline.busy[unit]) / found.seconds)
    return Explanation(
        found.seconds,
        critical_parts(found),
        busiest,
        fullest_card(found, planning.workload),
        tightest(found),
        best,
        runner_up,
        papers,
        why_chosen(planning),
        found.devices[unit][0] if found.by_device else None,
    )


def why_chosen(planning: Planning) -> str:
    """Why a slower plan than the fastest wins; nothing where the fastest does."""
    if not planning.winner or planning.cheapest_within is None:
        return ""
    fastest = planning.candidates[0]
    within = f"{number_text(planning.cheapest_within)} % slower than {fastest.name}"
    return f"the cheapest of what is at most {within} ({seconds_text(fastest.predicted_seconds)})"


def same_plan(one: Candidate, other: Candidate) -> bool:
    """Whether both propose the same, under different names."""
    keys = (
        "schedule",
        "zero",
        "zero_shares",
        "recomputation",
        "replicas",
        "devices",
        "workload",
        "program",
    )
    return all(getattr(one.plan, key) == getattr(other.plan, key) for key in keys)


def longer(candidate: Candidate, best: Candidate) -> float | None:
    """How much longer an iteration takes than the best one's, as a ratio above 0."""
    if candidate.predicted_seconds is None or not best.predicted_seconds:
        return None
    return candidate.predicted_seconds / best.predicted_seconds - 1.0


def critical_parts(found: Replay) -> tuple[Part, ...]:
    """The deciding chain by what its tasks are, largest first; latencies go to their messages."""
    timeline = found.timeline
    tasks = timeline.tasks
    spent: dict[str, float] = {}
    for i in path_to_end(timeline):
        label = label_of(found, Kind(int(tasks.kind[i])), int(tasks.unit[i]))
        spent[label] = spent.get(label, 0.0) + float(tasks.seconds[i] + tasks.delay[i])
    parts = sorted(spent.items(), key=lambda item: -item[1])
    return tuple(Part(what, seconds) for what, seconds in parts if seconds > 0)


def label_of(found: Replay, kind: Kind, unit: int) -> str:
    """What a task is, for people."""
    if found.by_device:
        if kind not in COMPUTES:
            return "collectives of the program"
        does = "updates weights" if kind == Kind.OPTIMIZER else "computes"
        return f"device {found.devices[unit][0]} {does}"
    replica, stage = found.owners[unit]
    of = "" if len({r for r, _ in found.owners}) == 1 else f" of replica {replica}"
    if kind in COMPUTES:
        what = "updates weights" if kind == Kind.OPTIMIZER else "computes"
        return f"stage {stage}{of} {what}"
    return "transfers between stages" if kind == Kind.TRANSFER else "gradients and weights joined"


def fullest_card(found: Replay, workload: Workload) -> tuple[str, float] | None:
    """The side of a node's network card that is held longest."""
    held = found.timeline.port_seconds
    if not len(held) or held.max() <= 0:
        return None
    port = int(np.argmax(held))
    node = workload.cluster.nodes[port // 2]
    does = "receives" if port % 2 else "sends"
    rate = f"{node.network_bandwidth * 8 / 1e9:.4g} Gbit/s"
    return f"node {port // 2} {does} at {rate}", float(held[port]) / found.seconds


def tightest(found: Replay) -> tuple[int, float, float]:
    """(device, bytes held, limit) where the largest share is in use."""
    share = [
        held / max(limit, 1.0)
        for held, limit in zip(found.peak_bytes, found.limit_bytes, strict=True)
    ]
    device = share.index(max(share))
    return device, found.peak_bytes[device], found.limit_bytes[device]


def explanation_table(explained: Explanation, workload: Workload) -> Table:
    """For people: one line each."""
    rows = [
        *critical_rows(explained),
        *binding_rows(explained, workload),
        *ranking_rows(explained, workload),
    ]
    return Table(f"why {explained.winner.name}", ("", ""), tuple(rows))


def critical_rows(explained: Explanation) -> list[tuple[str, str]]:
    """What decides the length of an iteration, and what the closed form leaves out."""
    rows = []
    if explained.critical and explained.seconds:
        parts = [
            f"{p.what} {percent_text(p.seconds / explained.seconds)}"
            for p in explained.critical[:PARTS]
        ]
        rest = sum(p.seconds for p in explained.critical[PARTS:])
        if rest > 0:
            parts.append(f"other {percent_text(rest / explained.seconds)}")
        rows.append(("decides the iteration", ", ".join(parts)))
    ratio = explained.winner.optimism
    if ratio is not None:
        closed = seconds_text(explained.winner.closed_form_seconds)
        text = f"{closed}; replayed {ratio:.3g} times that, {seconds_text(explained.seconds)}"
        rows.append(("closed form", text))
    return rows


def binding_rows(explained: Explanation, workload: Workload) -> list[tuple[str, str]]:
    """Stage, link and memory."""
    rows = []
    if explained.busiest is not None:
        replica, stage, share = explained.busiest
        of = (
            f"stage {stage} of replica {replica}"
            if explained.device is None
            else f"device {explained.device}"
        )
        rows.append(("busiest", f"{of}: computes {percent_text(share)} of the time"))
    if explained.card is not None:
        text, share = explained.card
        rows.append(("fullest link", f"{text}: in use {percent_text(share)} of the time"))
    if explained.tightest is not None:
        device, held, limit = explained.tightest
        kind = workload.cluster.devices[device].type
        verdict = "; binds" if held > TIGHT * limit else f"; {bytes_text(limit - held)} left"
        rows.append(
            ("tightest memory", f"device {device} ({kind}): {share_text(held, limit)}{verdict}")
        )
    return rows


def ranking_rows(explained: Explanation, workload: Workload) -> list[tuple[str, str]]:
    """Why it was chosen, the runner-up, and the papers' own procedures."""
    rows = [("chosen", explained.chosen)] if explained.chosen else []
    if explained.runner_up is not None:
        rows.append(("runner-up", cost_text(explained.runner_up, explained.winner, workload)))
    if explained.papers:
        texts: Sequence[str] = [cost_text(c, explained.winner, workload) for c in explained.papers]
        rows.append(("papers' own", "; ".join(texts)))
    return rows


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
