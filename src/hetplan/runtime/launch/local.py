"""Local ranks: forked, watched over, never left behind, and started again without a lost node.

An elastic run outlives its nodes: where a rank is lost, its node is, and the run goes on from the
last complete checkpoint, under a plan for the nodes that are left; whoever starts it says how to
get one. A rank that fails by an error of its own ends the run as ever: the error would come again.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetplan.errors import require
from hetplan.runtime.job import Job, Loss, StepReport
from hetplan.runtime.launch.devices import on_devices, required_torch
from hetplan.runtime.launch.supervision import RankError, Supervisor
from hetplan.runtime.measured import Measured


def launch(job: Job, tell: Callable[[StepReport], None] | None = None) -> list[list[StepReport]]:
    """Run the job with local ranks; the reports of each rank. tell: receives rank 0's as they come.

    Raises InputError before anything starts where plan and model do not fit, RankError when a rank
    did not end well.
    """
    torch = required_torch("running plans")
    from hetplan.runtime.engine.worker import check_job

    torch.set_num_threads(1)
    # torch asks whether there is a GPU while it traces a model; unless told to ask NVML it uses
    # CUDA for that, and a process that has used CUDA cannot fork ranks that do
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    job = on_devices(job)
    made = check_job(job)
    require(
        not (job.device == "cuda" and torch.cuda.is_initialized()),
        "CUDA was used before the ranks are forked",
        where=job.factory or "this process",
        expected="a model on the CPU or the meta device; the ranks bring it to their GPUs",
    )
    with tempfile.TemporaryDirectory(prefix="hetplan-run-") as folder:
        supervisor = Supervisor(job, tell, made)
        with supervisor.signals():
            try:
                supervisor.start(str(Path(folder) / "store"))
                supervisor.watch()
            finally:
                supervisor.end()
    return [rank.steps for rank in supervisor.ranks]


# (job of the plan that ran, numbers of all nodes lost so far) -> one of another plan, or None where
# nothing fits
Again = Callable[[Job, tuple[int, ...]], Job | None]


def launch_elastic(
    job: Job,
    again: Again,
    tell: Callable[[StepReport], None],
    lost: Callable[[Loss], None] | None = None,
) -> Measured:
    """`launch`, and once more for every lost node; what the last plan measured, with the whole
    curve.

    The job has a folder for checkpoints. tell: receives rank 0's steps; lost: what was lost. Raises
    RankError where no node or no plan is left.
    """
    end = job.steps + ((latest(job) or 0) if job.resume else 0)
    losses: list[Loss] = []
    curve: dict[int, float] = {}

    def hear(report: StepReport) -> None:
        curve[report.step] = report.loss
        tell(report)

    while True:
        try:
            return Measured(job, launch(job, hear), tuple(losses), curve)
        except RankError as error:
            if error.device is None:
                raise
            begun, devices = time.monotonic(), job.plan.devices
            gone = (*(loss.node for loss in losses), devices[error.device].node)
            if {device.node for device in devices} <= set(gone):
                raise
            following = again(job, gone)
            step = latest(job)
            if following is None or step == end:
                raise
            job = replace(following, steps=end - (step or 0), resume=step is not None)
            losses.append(
                Loss(str(error), gone[-1], step or 0, job.plan.name, time.monotonic() - begun)
            )
            if lost is not None:
                lost(losses[-1])


def latest(job: Job) -> int | None:
    """The step of the last complete checkpoint, None before the first."""
    from hetplan.runtime.engine.checkpoint import complete_checkpoints

    assert job.checkpoint is not None
    checkpoints = complete_checkpoints(job.checkpoint)
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else None
