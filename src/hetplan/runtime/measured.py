"""What a training run measured, beside what was predicted: a table, a JSON document, and a trace
for Perfetto."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from hetplan.plans.places import Place
from hetplan.replays.trace import trace_document
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, Loss, StepReport
from hetplan.text import Table, counted, number_text, percent_text, seconds_text

LATE = 1.1  # of the predicted seconds: a rehearsal that this machine did not keep up with
SLOW = 1.5  # of what the others take, compared with their predictions: a rank that is named


@dataclass(frozen=True)
class Measured:
    """reports [ranks][steps]. Figures are medians over the steps behind the first.

    lost: nodes lost before these steps; earlier: step -> loss of what ran until then.
    """

    job: Job
    reports: Sequence[Sequence[StepReport]]
    lost: Sequence[Loss] = ()
    earlier: Mapping[int, float] = field(default_factory=dict)

    def counted(self, rank: int) -> Sequence[StepReport]:
        """The steps that count: in the first one connections are made and memory is touched."""
        return self.reports[rank][1:] or self.reports[rank]

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, from when all ranks begin until the last one is done."""
        steps = zip(*map(self.counted, range(len(self.reports))), strict=True)
        ends = (max(r.end for r in step) - max(r.begin for r in step) for step in steps)
        return float(median(ends))

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        own = {report.step: report.loss for report in self.reports[0]}
        return dict(sorted({**self.earlier, **own}.items()))

    def timed(self, rank: int) -> Sequence[StepReport]:
        """The steps whose passes are timed: on GPUs the last one, which waits for each of them."""
        return self.reports[rank][-1:] if self.job.device == "cuda" else self.counted(rank)

    def busy(self, rank: int) -> float:
        """Seconds of forward and backward passes."""
        return median(report.forward + report.backward for report in self.timed(rank))

    def waits(self, rank: int) -> float:
        """Seconds of waiting for messages and for the others at the end."""
        return median(report.waits for report in self.timed(rank))

    @property
    def bubble(self) -> float:
        """Share of the ranks' time without a pass."""
        ranks = len(self.reports)
        return 1.0 - sum(map(self.busy, range(ranks))) / (ranks * self.seconds)

    @property
    def predicted(self) -> float | None:
        """Seconds of an iteration, of the plan's devices or, of virtual ones, here; None without a
        prediction."""
        return None if self.job.rehearsal is None else self.job.rehearsal.seconds

    def predicted_busy(self, rank: int) -> float | None:
        """Seconds of passes of a rank's stage."""
        return None if self.job.rehearsal is None else self.job.rehearsal.busy(rank)

    def document(self) -> dict[str, Any]:
        """The measurements and predictions as JSON types; times in seconds."""
        predicted, rehearsal = self.predicted, self.job.rehearsal
        steps = [
            {"step": step, "loss": loss if isfinite(loss) else None}
            for step, loss in self.losses.items()
        ]
        return {
            "plan": self.job.plan.name,
            "origin": self.job.plan.origin,
            "virtual": self.job.virtual,
            "device": self.job.device,
            "backend": self.job.backend,
            "time_scale": None if rehearsal is None else rehearsal.scale,
            "predicted_seconds": predicted,
            "measured_seconds": self.seconds,
            "error": None if predicted is None else self.seconds / predicted - 1.0,
            "bubble": self.bubble,
            "steps": steps,
            "lost_nodes": [asdict(loss) for loss in self.lost],
            "ranks": [self.document_of_rank(place) for place in self.job.plan.places],
        }

    def document_of_rank(self, place: Place) -> dict[str, Any]:
        """The measurements of one rank as JSON types."""
        return {
            "rank": place.rank,
            "replica": place.replica,
            "stage": place.stage,
            "row_group": place.group,
            "tensor_rank": place.tensor,
            "predicted_busy_seconds": self.predicted_busy(place.rank),
            "busy_seconds": self.busy(place.rank),
            "waiting_seconds": self.waits(place.rank),
            "peak_bytes": self.reports[place.rank][-1].peak_bytes,
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
            for p in plan.places
        ]
        header = ("rank", "replica", "stage", "part", "device", "passes, predicted", "measured",
                  "waits")  # fmt: skip
        return Table(
            self._title(), header, tuple(rows), tuple(self._notes()), right=(0, 1, 2, 5, 6, 7)
        )

    def _title(self) -> str:
        job, plan = self.job, self.job.plan
        where = "GPUs" if job.device == "cuda" else "this machine"
        if job.virtual and job.rehearsal is not None:
            where = f"virtual devices, 1 s here for {seconds_text(1 / job.rehearsal.scale)} there"
        return (
            f"{plan.name}, {plan.origin or 'plan'}: {counted(plan.world_size, 'rank')} on {where}"
        )

    def _notes(self) -> list[str]:
        job, predicted, losses = self.job, self.predicted, list(self.losses.items())
        notes = [
            f"measured: {seconds_text(self.seconds)} per iteration, "
            f"{percent_text(self.bubble)} of it without passes"
        ]
        if predicted is not None:
            off = percent_text(self.seconds / predicted - 1)
            more = f", off by {off}" if job.virtual else " on the plan's devices"
            notes.append(f"predicted: {seconds_text(predicted)} per iteration{more}")
        if job.shared_gpus:
            notes.append(
                f"ranks share {counted(job.shared_gpus, 'GPU')}: what they exchange goes through "
                "the host's memory (gloo)"
            )
        notes += [note for note in (self.late(), self.slowest()) if note is not None]
        notes += [
            f"lost node {loss.node} before step {loss.step}: {loss.error}" for loss in self.lost
        ]
        if job.virtual and not engine_of(job.plan, job.backend).trains_rehearsals:
            notes.append("nothing is trained: programs are rehearsed")
        else:
            (first, before), (last, after) = losses[0], losses[-1]
            notes.append(
                f"loss {number_text(before)} at step {first}, {number_text(after)} at step {last}"
            )
        return notes

    def late(self) -> str | None:
        """What to do where this machine is too slow or too busy for a rehearsal's real work and
        messages."""
        if not self.job.virtual or self.job.rehearsal is None:
            return None
        ratio = self.seconds / self.job.rehearsal.seconds
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
        if self.job.virtual and self.late() is None:
            return None
        ratios = [
            (self.busy(rank) / predicted, rank)
            for rank in range(len(self.reports))
            if (predicted := self.predicted_busy(rank))
        ]
        if not ratios:
            return None
        usual = median(ratio for ratio, _ in ratios)
        worst, rank = max(ratios)
        if worst < SLOW * usual:
            return None
        return (
            f"slow: {self.job.plan.rank_text(rank)} took {worst:.3g} times its prediction, "
            f"the others {usual:.3g}"
        )

    def trace(self) -> dict[str, Any]:
        """The last step as a trace; a row is a rank."""
        begin = min(event.start for rank in self.reports for event in rank[-1].events)
        rows = [
            (p.replica, p.rank, f"rank {p.rank}: stage {p.stage}, part {p.group}.{p.tensor}")
            for p in self.job.plan.places
        ]
        numbered = ("forward", "backward", "receive")
        spans = [
            (
                replica, rank, f"{e.what} {e.batch}" if e.what in numbered else e.what, e.what,
                e.start - begin, e.end - begin,
            )
            for replica, rank, _ in rows
            for e in self.reports[rank][-1].events
        ]  # fmt: skip
        return trace_document(rows, spans)
