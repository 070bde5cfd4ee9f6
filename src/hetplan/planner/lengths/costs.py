"""The costs of a plan for micro-batches of any lengths, from its costs at two sequence lengths.

A pass of a micro-batch takes c + a T + b Q seconds, where T is the sum of the tokens of its samples
and Q the sum of their squares. Three points of the replay's own costs give c, a and b of every
pass: the plan's rows at its sequence length L, twice as many, and rows of about as many tokens at
another length. So the replay of micro-batches of L tokens a sample is the plan's own. Messages, and
what is kept for the backward pass, grow with T alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.lengths.data import LengthsData, LengthsReplica
from hetplan.plans.plan import MicroBatches, Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.arrays import Floats
from hetplan.replays.peaks import limits, memory
from hetplan.replays.replay import StageReplayer
from hetplan.replays.simulator.pipeline import Replica as Pipeline, tasks_of
from hetplan.replays.simulator.tasks import Traffic, simulate


class Batch(NamedTuple):
    """A micro-batch as its cost sees it."""

    tokens: int  # T, with padding
    squares: int  # Q, with padding


EMPTY = Batch(0, 0)


@dataclass(frozen=True)
class Seconds:
    """c, a and b of passes, arrays of one shape."""

    fixed: Floats
    token: Floats
    squared: Floats

    def of(self, batches: Sequence[Batch]) -> Floats:
        """[..., M] seconds of M micro-batches; an empty one takes no time."""
        tokens = np.array([batch.tokens for batch in batches], float)
        squares = np.array([batch.squares for batch in batches], float)
        fixed = self.fixed[..., None] * (tokens > 0)
        return np.asarray(
            fixed + self.token[..., None] * tokens + self.squared[..., None] * squares
        )

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.fixed + other.fixed, self.token + other.token, self.squared + other.squared
        )

    def summed(self, axis: int) -> "Seconds":
        """The sum over an axis."""
        parts = (self.fixed, self.token, self.squared)
        return Seconds(*(np.asarray(part.sum(axis=axis)) for part in parts))


def fitted(points: Sequence[tuple[int, int, Floats]]) -> Seconds:
    """c, a and b through three points (rows, sequence length, seconds).

    The first two points have one sequence length, the third another one. None of the three is below
    0: where one would be, it is 0, and the others are as near to the points as that allows.
    """
    (rows, length, one), (more_rows, _, more), (other_rows, other_length, other) = points
    tokens, more_tokens, other_tokens = rows * length, more_rows * length, other_rows * other_length
    slope = np.maximum((more - one) / (more_tokens - tokens), 0.0)  # a + b L
    fixed = np.maximum(one - slope * tokens, 0.0)
    slope = np.where(fixed > 0, slope, more / more_tokens)
    other_slope = np.maximum(other - fixed, 0.0) / other_tokens
    squared = np.clip((other_slope - slope) / (other_length - length), 0.0, slope / length)
    return Seconds(fixed, np.asarray(slope - squared * length), np.asarray(squared))


@dataclass(frozen=True)
class ReplicaCosts:
    """The costs of one replica of S stages with C chunks."""

    pipeline: Pipeline  # of micro-batches of `tokens`, all alike
    tokens: int  # as the plan has them
    squares: int
    forward: Seconds  # [S, C]
    backward: Seconds
    weights: Seconds

    def with_batches(self, batches: Sequence[Batch]) -> Pipeline:
        """The replica with these micro-batches."""
        shares = [batch.tokens / self.tokens for batch in batches]

        def scaled(row: Sequence[Traffic]) -> list[Traffic]:
            """A message or all-reduce of each micro-batch; none for an empty one."""
            (whole,) = row
            return [
                whole._replace(seconds=whole.seconds * share) if share else Traffic()
                for share in shares
            ]

        pipeline, stages, chunks = self.pipeline, self.pipeline.stages, self.pipeline.chunks
        kept = np.broadcast_to(np.asarray(pipeline.saved_bytes, float), (stages, chunks, 1))
        held = np.broadcast_to(np.asarray(pipeline.held_bytes, float), (stages, chunks, 1))
        added = np.broadcast_to(np.asarray(pipeline.added, float), (stages, chunks, 1))
        return replace(
            pipeline,
            micro_batches=len(batches),
            kinds=None,
            forward=self.forward.of(batches),
            backward=self.backward.of(batches),
            weights=self.weights.of(batches),
            added=added * shares,
            saved_bytes=kept * shares,
            held_bytes=held * shares,
            hops=tuple(tuple(scaled(row) for row in side) for side in pipeline.hops),
            reduces=tuple(
                tuple(tuple(scaled(row) for row in stage) for stage in side)
                for side in pipeline.reduces
            ),
            inputs_reduces=tuple(
                tuple(scaled(row) for row in stage) for stage in pipeline.inputs_reduces
            ),
        )

    @cached_property
    def of_stages(self) -> Seconds:
        """[S] seconds of both passes of a stage, with the all-reduces of its tensor ranks."""
        both = (self.forward + self.backward).summed(axis=1)
        if not self.pipeline.reduces:
            return both
        reduced = np.zeros(self.pipeline.stages)
        for side in self.pipeline.reduces:
            reduced += [sum(chunk[0].seconds for chunk in stage) for stage in side]
        return replace(both, token=both.token + reduced / self.tokens)

    def rates(self, name: str, capacity: int, micro_batches: int) -> LengthsReplica:
        """The replica as the balance of lengths sees it. capacity: tokens of a micro-batch."""
        stages, chunks = self.of_stages, self.pipeline.chunks
        seconds = stages.of([Batch(self.tokens, self.squares)])[:, 0]
        slowest = int(seconds.argmax())
        # a micro-batch passes each chunk of the other stages before the slowest stage can end
        others = np.delete(np.arange(self.pipeline.stages), slowest)
        messages = [row[0] for side in self.pipeline.hops for row in side]
        per_token = sum(message.seconds for message in messages) / self.tokens
        return LengthsReplica(
            name=name,
            token_seconds=float(stages.token[slowest]),
            squared_token_seconds=float(stages.squared[slowest]),
            micro_batch_seconds=float(stages.fixed[slowest]),
            fill_token_seconds=float(stages.token[others].sum()) / chunks + per_token,
            fill_squared_token_seconds=float(stages.squared[others].sum()) / chunks,
            fill_micro_batch_seconds=float(stages.fixed[others].sum()) / chunks
            + sum(message.latency for message in messages),
            tokens=capacity,
            micro_batches=micro_batches,
        )


class PlanCosts:
    """The costs of a plan for micro-batches of any lengths.

    workload: that the plan was made for. other: the same at another sequence length. longest:
    tokens of the longest sample. Raises UnsupportedError for a plan with a program.
    """

    def __init__(self, plan: Plan, workload: Workload, other: Workload, longest: int) -> None:
        require(
            plan.program is None,
            "an SPMD program is made for samples of one length",
            where=plan.name,
            expected="a plan of stages",
            kind=UnsupportedError,
        )
        assert workload.sequence is not None and other.sequence is not None, "samples with tokens"
        self.plan, self.length, self.other_length = plan, workload.sequence, other.sequence
        self.replayer, self.other = StageReplayer(workload), StageReplayer(other)
        self.longest = longest
        # [R] samples of a micro-batch: the mean over those that have some
        self.rows = []
        for replica in plan.replicas:
            counts = sum(batch.count for batch in replica.micro_batches if batch.samples)
            self.rows.append(max(1, -(-replica.samples // max(counts, 1))))

    def with_rows(self, rows: Sequence[int]) -> Plan:
        """The plan with rows[r] samples in every micro-batch of replica r. Its global batch is not
        the plan's, so it serves for costs alone."""
        replicas = [
            replica.model_copy(
                update={"micro_batches": [MicroBatches(count=replica.steps, samples=each)]}
            )
            for replica, each in zip(self.plan.replicas, rows, strict=True)
        ]
        return self.plan.model_copy(update={"replicas": replicas})

    @cached_property
    def replicas(self) -> list[ReplicaCosts]:
        """[R] the costs of each replica."""
        twice = [2 * rows for rows in self.rows]
        as_many = [max(1, round(rows * self.length / self.other_length)) for rows in self.rows]
        plans = [self.with_rows(rows) for rows in (self.rows, twice, as_many)]
        replayers = (self.replayer, self.replayer, self.other)
        parts = [replayer.parts(plan)[0] for replayer, plan in zip(replayers, plans, strict=True)]
        costs = []
        for r, rows in enumerate(self.rows):
            points = (
                (rows, self.length, parts[0][r]),
                (twice[r], self.length, parts[1][r]),
                (as_many[r], self.other_length, parts[2][r]),
            )
            shape = (parts[0][r].stages, parts[0][r].chunks)
            passes = {
                name: fitted(
                    [(n, length, pass_seconds(one, name, shape)) for n, length, one in points]
                )
                for name in ("forward", "backward", "weights")
            }
            tokens = rows * self.length
            costs.append(ReplicaCosts(parts[0][r], tokens, tokens * self.length, **passes))
        return costs

    @cached_property
    def capacities(self) -> list[int]:
        """[R] tokens that a micro-batch of each replica may have, so that a plan of such
        micro-batches alone fits: the most rows of the planned length that do. 0 where none fit."""
        enough = max(2 * self.plan.workload.global_batch, -(-self.longest // self.length))
        fits: dict[int, list[bool]] = {}

        def fitting(rows: int) -> list[bool]:
            """[R] whether the devices of each replica hold micro-batches of `rows` samples."""
            if rows not in fits:
                fits[rows] = self.fitting(rows)
            return fits[rows]

        capacities = []
        for r in range(len(self.rows)):
            low, high = 0, enough + 1  # low rows fit, high rows are not tried
            while high - low > 1:
                middle = (low + high) // 2
                if fitting(middle)[r]:
                    low = middle
                else:
                    high = middle
            capacities.append(low * self.length)
        return capacities

    def fitting(self, rows: int) -> list[bool]:
        """[R] whether the devices of each replica hold micro-batches of `rows` samples."""
        plan = self.with_rows([rows] * len(self.rows))
        zero = self.replayer.zero(plan)
        pipelines, _ = self.replayer.parts(plan)
        kept = np.concatenate([pipeline.peak_bytes for pipeline in pipelines])
        held, most = memory(zero, kept), limits(plan, zero.costs)
        fit = []
        for replica in plan.replicas:
            devices = [device for stage in replica.stages for device in stage.all_devices]
            fit.append(all(held[device].allocated <= most[device] for device in devices))
        return fit

    def data(self, samples: Sequence[int], times: int = 1) -> LengthsData | None:
        """The balance of these samples over the replicas, with `times` as many micro-batches as
        planned; None where some replica has room for none."""
        if 0 in self.capacities:
            return None
        replicas = [
            costs.rates(f"replica {r}", capacity, times * replica.steps)
            for r, (costs, capacity, replica) in enumerate(
                zip(self.replicas, self.capacities, self.plan.replicas, strict=True)
            )
        ]
        return LengthsData(samples=list(samples), replicas=replicas)

    def micro_batches(self, replica: int, count: int) -> int | None:
        """The number of micro-batches with which the schedule runs `count` of them that have
        samples; the others are empty. None where it cannot run them."""
        planned, stages = self.plan.replicas[replica].steps, len(self.plan.replicas[replica].stages)
        schedule = self.plan.schedule
        if schedule == "explicit":
            return planned if count <= planned else None
        if schedule == "interleaved-1f1b":
            return max(1, math.ceil(count / stages)) * stages
        if schedule in ("gpipe", "1f1b"):
            return max(1, count)
        return max(planned, count)

    def seconds(self, batches: Sequence[Sequence[Batch]]) -> float | None:
        """Replayed seconds of an iteration with these micro-batches; None where the schedule
        cannot run this number of them.

        batches: [replica][micro-batch]. Replicas that synchronise after every micro-batch have
        equally many.
        """
        counts = [self.micro_batches(r, len(row)) for r, row in enumerate(batches)]
        if None in counts:
            return None
        sizes = [count for count in counts if count is not None]
        zero = self.replayer.zero(self.plan)
        if zero.rings:
            sizes = [max(sizes)] * len(sizes)
        pipelines = [
            costs.with_batches([*row, *[EMPTY] * (size - len(row))])
            for costs, row, size in zip(self.replicas, batches, sizes, strict=True)
        ]
        _, collectives = self.replayer.parts(self.plan)
        return simulate(tasks_of(pipelines, collectives)).seconds


def pass_seconds(pipeline: Pipeline, name: str, shape: tuple[int, int]) -> Floats:
    """[S, C] seconds of a pass of the only kind of micro-batch."""
    values = np.asarray(getattr(pipeline, name), float)
    return np.broadcast_to(values, (*shape, 1))[..., 0]
