"""Runs that outlive their nodes: where a rank is lost, its node is, and the run goes on without it.

The run goes on from the last complete checkpoint, under a plan for the nodes that are left; whoever
starts it says how to get one. A rank that fails by an error of its own ends the run as ever: the
error would come again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hetplan.errors import InputError
from hetplan.runtime.job import Job, Loss, StepReport
from hetplan.runtime.launch import RankError, launch
from hetplan.runtime.measured import Measured

# (job of the plan that ran, numbers of all nodes lost so far) -> one of another plan, or None where
# nothing fits
Again = Callable[[Job, tuple[int, ...]], Job | None]


def launch_elastic(
    job: Job,
    again: Again,
    tell: Callable[[StepReport], None] | None = None,
    lost: Callable[[Loss], None] | None = None,
) -> Measured:
    """`launch`, and once more for every lost node; what the last plan measured, with the whole
    curve.

    tell: receives rank 0's steps; lost: what was lost. Raises InputError without a folder for
    checkpoints, RankError where no node or no plan is left.
    """
    if job.checkpoint is None:
        raise InputError("an elastic run needs a folder for checkpoints")
    end = job.steps + ((latest(job) or 0) if job.resume else 0)
    losses: list[Loss] = []
    curve: dict[int, float] = {}

    def hear(report: StepReport) -> None:
        curve[report.step] = report.loss
        if tell is not None:
            tell(report)

    while True:
        try:
            return Measured(job, launch(job, hear), tuple(losses), curve)
        except RankError as error:
            begun = time.monotonic()
            node = lost_node(job, error, [loss.node for loss in losses])
            if node is None:
                raise
            found = again(job, (*(loss.node for loss in losses), node))
            step = latest(job)
            if found is None or step == end:
                raise
            job = replace(found, steps=end - (step or 0), resume=step is not None)
            losses.append(
                Loss(str(error), node, step or 0, job.plan.name, time.monotonic() - begun)
            )
            if lost is not None:
                lost(losses[-1])


def lost_node(job: Job, error: RankError, before: Sequence[int]) -> int | None:
    """The node of a lost rank, if others of the plan's are left."""
    if error.device is None:
        return None
    node = job.plan.devices[error.device].node
    left = {device.node for device in job.plan.devices} - {node, *before}
    return node if left else None


def latest(job: Job) -> int | None:
    """The step of the last complete checkpoint, None before the first."""
    from hetplan.runtime.execution.checkpoint import complete

    assert job.checkpoint is not None
    found = complete(job.checkpoint)
    return int(found[-1].name.removeprefix("step-")) if found else None
