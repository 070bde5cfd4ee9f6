"""The measured times of a training run beside the predicted ones: as a table, as a JSON document,
and as a trace for Perfetto."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from hetplan.plans.places import Place
from hetplan.replays.trace import trace_document
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, NodeLoss, StepReport
from hetplan.text import Table, counted, number_text, percent_text, seconds_text

# A rehearsal whose iterations take this many times the predicted seconds is late: the machine did
# not keep up with it.
LATE = 1.1
# A rank is slow whose ratio of measured to predicted seconds is this many times the median ratio.
SLOW = 1.5


@dataclass(frozen=True)
class Measured:
    """The reports of a training run, and the figures that follow from them. A figure is a median
    over all steps but the first."""

    job: Job
    reports: Sequence[Sequence[StepReport]]
    """[ranks][steps]."""
    lost: Sequence[NodeLoss] = ()
    """The losses of nodes before these steps."""
    earlier: Mapping[int, float] = field(default_factory=dict)
    """Step -> training loss of the steps under the plans that ran before a node was lost. Steps
    under the last plan may be among them; `reports` has their losses in any case."""

    def counted_steps(self, rank: int) -> Sequence[StepReport]:
        """The reports of a rank without the first step's, in which connections are made and memory
        is touched for the first time; a single report stays."""
        return self.reports[rank][1:] or self.reports[rank]

    @property
    def seconds(self) -> float:
        """Seconds of an iteration: from when the last rank begins until the last rank is done."""
        ranks = range(len(self.reports))
        steps = zip(*(self.counted_steps(rank) for rank in ranks), strict=True)
        seconds = (max(r.end for r in step) - max(r.begin for r in step) for step in steps)
        return float(median(seconds))

    @property
    def losses(self) -> dict[int, float]:
        """Step -> training loss, for all steps of the run, in order."""
        last_plan = {report.step: report.loss for report in self.reports[0]}
        return dict(sorted({**self.earlier, **last_plan}.items()))

    def timed(self, rank: int) -> Sequence[StepReport]:
        """The reports of the steps whose passes are timed. On GPUs this is the last step alone: it
        waits for each pass to end."""
        return self.reports[rank][-1:] if self.job.device == "cuda" else self.counted_steps(rank)

    def busy(self, rank: int) -> float:
        """Seconds of a rank's forward and backward passes in an iteration."""
        return median(report.forward + report.backward for report in self.timed(rank))

    def waits(self, rank: int) -> float:
        """Seconds for which a rank waits in an iteration: for messages, and for the other ranks at
        the end."""
        return median(report.waits for report in self.timed(rank))

    @property
    def bubble(self) -> float:
        """The share of the iteration, averaged over the ranks, in which no pass runs."""
        ranks = len(self.reports)
        return 1.0 - sum(map(self.busy, range(ranks))) / (ranks * self.seconds)

    @property
    def predicted(self) -> float | None:
        """Predicted seconds of an iteration: on the plan's devices, or scaled to this machine in a
        rehearsal on virtual devices. None without a prediction."""
        return None if self.job.rehearsal is None else self.job.rehearsal.seconds

    def predicted_busy(self, rank: int) -> float | None:
        """Predicted seconds of a rank's passes in an iteration; None without a prediction."""
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
        """The measurements as a table with one line for each rank."""
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
        """The title of the table: the plan, and where it ran."""
        job, plan = self.job, self.job.plan
        where = "GPUs" if job.device == "cuda" else "CPUs"
        if job.virtual and job.rehearsal is not None:
            where = f"virtual devices, 1 s here for {seconds_text(1 / job.rehearsal.scale)} there"
        return (
            f"{plan.name}, {plan.origin or 'plan'}: {counted(plan.world_size, 'rank')} on {where}"
        )

    def _notes(self) -> list[str]:
        """The lines below the table."""
        job, predicted, losses = self.job, self.predicted, list(self.losses.items())
        notes = [
            f"measured: {seconds_text(self.seconds)} per iteration, "
            f"{percent_text(self.bubble)} of it without passes"
        ]
        if predicted is not None:
            off = percent_text(self.seconds / predicted - 1)
            suffix = f", off by {off}" if job.virtual else " on the plan's devices"
            notes.append(f"predicted: {seconds_text(predicted)} per iteration{suffix}")
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
        """The advice for a rehearsal whose work and messages this machine could not do in time;
        None where the rehearsal kept its times."""
        if not self.job.virtual or self.job.rehearsal is None:
            return None
        ratio = self.seconds / self.job.rehearsal.seconds
        if ratio < LATE:
            return None
        # a fifth more than this run needed: with less to spare the next one may be late, too
        scale = number_text(1.2 * ratio * self.job.rehearsal.scale)
        return (
            "late: this machine did not keep up with the ranks' work and messages; "
            f"--time-scale {scale} may do"
        )

    def slowest(self) -> str | None:
        """The note on the rank that takes far longer than predicted, compared with the other ranks;
        None where no rank does.

        A rehearsal has this note only where its iterations are late, too. Else the rank was delayed
        by other load on this machine, and made up for it in idle time.
        """
        if self.job.virtual and self.late() is None:
            return None
        ratios = []
        for rank in range(len(self.reports)):
            predicted = self.predicted_busy(rank)
            if predicted:
                ratios.append((self.busy(rank) / predicted, rank))
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
        """The trace of the last step for Perfetto, with one row for each rank."""
        begin = min(event.start for rank in self.reports for event in rank[-1].events)
        rows = [
            (p.replica, p.rank, f"rank {p.rank}: stage {p.stage}, part {p.group}.{p.tensor}")
            for p in self.job.plan.places
        ]
        of_a_micro_batch = ("forward", "backward", "weights", "receive")
        spans = []
        for replica, rank, _ in rows:
            for event in self.reports[rank][-1].events:
                kind = event.what
                label = f"{kind} {event.batch}" if kind in of_a_micro_batch else kind
                start, end = event.start - begin, event.end - begin
                spans.append((replica, rank, label, kind, start, end, event.chunk))
        return trace_document(rows, spans)
