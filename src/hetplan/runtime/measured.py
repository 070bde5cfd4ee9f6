"""What a run measured, beside what was predicted: a table, a JSON document, a trace for
Perfetto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from hetplan.runtime.job import Job, Loss, StepReport
from hetplan.text import Table, number_text, percent_text, seconds_text

MICRO = 1e6
LISTED = 64
WARM_UP = 1  # steps that are not counted: connections are made, memory is touched


@dataclass(frozen=True)
class Measured:
    """reports [ranks][steps]. Figures are medians over the steps behind the first.

    lost: nodes lost before these steps; earlier: step -> loss of what ran until then.
    """

    job: Job
    reports: Sequence[Sequence[StepReport]]
    lost: Sequence[Loss] = ()
    earlier: Mapping[int, float] = field(default_factory=dict)

    @property
    def counted(self) -> range:
        """Indices of the steps that count."""
        steps = len(self.reports[0])
        return range(min(WARM_UP, steps - 1), steps)

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, from when all ranks begin until the last one is done."""
        return median(
            max(rank[s].end for rank in self.reports) - max(rank[s].begin for rank in self.reports)
            for s in self.counted
        )

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        losses = {**self.earlier, **{report.step: report.loss for report in self.reports[0]}}
        return dict(sorted(losses.items()))

    def busy(self, rank: int) -> float:
        """Seconds of forward and backward passes."""
        return median(
            self.reports[rank][s].forward + self.reports[rank][s].backward for s in self.counted
        )

    def waits(self, rank: int) -> float:
        """Seconds of waiting for messages and for the others at the end."""
        return median(self.reports[rank][s].waits for s in self.counted)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time without a pass."""
        return 1.0 - sum(map(self.busy, range(len(self.reports)))) / (
            len(self.reports) * self.seconds
        )

    @property
    def predicted(self) -> float | None:
        """Seconds of an iteration, of the plan's devices or, of virtual ones, here; None without a
        prediction."""
        return None if self.job.rehearsal is None else self.job.rehearsal.seconds

    def predicted_busy(self, rank: int) -> float | None:
        """Seconds of passes of a rank's stage."""
        return None if self.job.rehearsal is None else self.job.rehearsal.busy(rank)

    def document(self) -> dict[str, Any]:
        """As JSON types; seconds."""
        predicted = self.predicted
        return {
            "plan": self.job.plan.name,
            "origin": self.job.plan.origin,
            "virtual": self.job.virtual,
            "device": self.job.device,
            "time_scale": None if self.job.rehearsal is None else self.job.rehearsal.scale,
            "predicted_seconds": predicted,
            "measured_seconds": self.seconds,
            "error": None if predicted is None else self.seconds / predicted - 1.0,
            "bubble": self.bubble,
            "steps": [
                {"step": step, "loss": loss if isfinite(loss) else None}
                for step, loss in self.losses.items()
            ],
            "lost_nodes": [loss.document() for loss in self.lost],
            "ranks": [
                {
                    "rank": p.rank,
                    "replica": p.replica,
                    "stage": p.stage,
                    "row_group": p.group,
                    "tensor_rank": p.tensor,
                    "predicted_busy_seconds": self.predicted_busy(p.rank),
                    "busy_seconds": self.busy(p.rank),
                    "waiting_seconds": self.waits(p.rank),
                    "peak_bytes": self.reports[p.rank][-1].peak_bytes,
                }
                for p in self.job.plan.places
            ],
        }

    def table(self) -> Table:
        """One line per rank."""
        plan = self.job.plan
        rows = [
            (
                str(p.rank),
                str(p.replica),
                str(p.stage),
                f"{p.group}.{p.tensor}",
                f"{plan.devices[p.device].type} on node {plan.devices[p.device].node}",
                seconds_text(self.predicted_busy(p.rank)),
                seconds_text(self.busy(p.rank)),
                seconds_text(self.waits(p.rank)),
            )
            for p in plan.places[:LISTED]
        ]
        header = (
            "rank",
            "replica",
            "stage",
            "part",
            "device",
            "passes, predicted",
            "measured",
            "waits",
        )
        return Table(
            self._title(), header, tuple(rows), tuple(self._notes()), right=(0, 1, 2, 5, 6, 7)
        )

    def _title(self) -> str:
        job, plan = self.job, self.job.plan
        where = (
            "virtual devices" if job.virtual else "GPUs" if job.device == "cuda" else "this machine"
        )
        if job.virtual and job.rehearsal is not None:
            where += f", 1 s here for {seconds_text(1 / job.rehearsal.scale)} there"
        return f"{plan.name}, {plan.origin or 'plan'}: {plan.world_size} ranks on {where}"

    def _notes(self) -> list[str]:
        notes = [
            f"measured: {seconds_text(self.seconds)} per iteration, "
            f"{percent_text(self.bubble)} of it without passes"
        ]
        if self.predicted is not None:
            where = "" if self.job.virtual else " on the plan's devices"
            error = (
                f", off by {percent_text(self.seconds / self.predicted - 1)}"
                if self.job.virtual
                else ""
            )
            notes.append(f"predicted: {seconds_text(self.predicted)} per iteration{where}{error}")
        if self.job.shared_gpus:
            gpus = "1 GPU" if self.job.shared_gpus == 1 else f"{self.job.shared_gpus} GPUs"
            notes.append(
                f"ranks share {gpus}: what they exchange goes through the host's memory (gloo)"
            )
        late = self.late()
        if late is not None:
            notes.append(late)
        slow = self.slowest()
        if slow is not None:
            notes.append(slow)
        notes += [
            f"lost node {loss.node} before step {loss.step}: {loss.error}" for loss in self.lost
        ]
        losses = list(self.losses.items())
        texts = (f"{number_text(loss)} at step {step}" for step, loss in (losses[0], losses[-1]))
        untrained = self.job.virtual and self.job.plan.schedule == "spmd"
        notes.append(
            "nothing is trained: programs are rehearsed"
            if untrained
            else f"loss {', '.join(texts)}"
        )
        if len(self.reports) > LISTED:
            notes.append(f"{len(self.reports) - LISTED} more ranks; --json lists all")
        return notes

    def late(self) -> str | None:
        """What to do where this machine is too slow or too busy for a rehearsal's real work and
        messages."""
        if not self.job.virtual or self.job.rehearsal is None or self.predicted is None:
            return None
        ratio = self.seconds / self.predicted
        if ratio < LATE:
            return None
        scale = number_text(1.2 * ratio * self.job.rehearsal.scale)
        return (
            "late: this machine did not keep up with the ranks' work and messages; "
            f"--time-scale {scale} may do"
        )

    def slowest(self) -> str | None:
        """A rank that takes far longer than predicted, compared with the others.

        In a rehearsal only where iterations are late, too: else it was this machine's load, in time
        that was free.
        """
        if self.job.virtual and self.predicted is not None and self.seconds < LATE * self.predicted:
            return None
        ratios = []
        for rank in range(len(self.reports)):
            predicted = self.predicted_busy(rank)
            if predicted:
                ratios.append((self.busy(rank) / predicted, rank))
        if len(ratios) < 2:
            return None
        usual = median(ratio for ratio, _ in ratios)
        worst, rank = max(ratios)
        if worst < SLOW * usual:
            return None
        place = self.job.plan.rank_text(rank)
        return f"slow: {place} took {worst:.3g} times its prediction, the others {usual:.3g}"

    def trace(self) -> dict[str, Any]:
        """The last step in the Trace Event Format; pid: the replica, tid: the rank."""
        begin = min(e[3] for rank in self.reports for e in rank[-1].events)
        events: list[dict[str, Any]] = []
        for rank, p in enumerate(self.job.plan.places):
            head = {"ph": "M", "pid": p.replica}
            shown = {"name": f"replica {p.replica}"}
            events.append({**head, "name": "process_name", "args": shown})
            label = f"rank {rank}: stage {p.stage}, part {p.group}.{p.tensor}"
            events.append({**head, "tid": rank, "name": "thread_name", "args": {"name": label}})
            for what, _, batch, start, end in self.reports[rank][-1].events:
                name = f"{what} {batch}" if what in ("forward", "backward", "receive") else what
                times = {"ts": (start - begin) * MICRO, "dur": (end - start) * MICRO}
                events.append(
                    {"name": name, "cat": what, "ph": "X", **times, "pid": p.replica, "tid": rank}
                )
        return {"traceEvents": events, "displayTimeUnit": "ms"}


SLOW, LATE = 1.5, 1.1
