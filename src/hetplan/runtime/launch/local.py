"""Runs on local ranks: this process forks the ranks, watches them and ends them with itself.

An elastic run survives the loss of nodes. When a rank is lost, its node counts as lost, and the run
goes on from the last complete checkpoint, under another plan on the remaining nodes. The caller
passes the function that makes this plan. A rank that fails by an error of its own ends the run,
because the error would come again.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetplan.errors import require
from hetplan.runtime.job import Job, NodeLoss, StepReport
from hetplan.runtime.launch.devices import on_devices, required_torch
from hetplan.runtime.launch.supervision import RankError, Supervisor
from hetplan.runtime.measured import Measured


def launch(job: Job, tell: Callable[[StepReport], None] | None = None) -> list[list[StepReport]]:
    """Run the job on local ranks and return [ranks][steps] their reports.

    tell: receives each report of rank 0 as soon as it is there.

    Raises InputError before any rank starts where plan and model do not fit, RankError when a rank
    is lost or fails.
    """
    torch = required_torch("running plans")
    from hetplan.runtime.engine.worker import check_job

    # Threads that torch's operators start here would be missing in the forked ranks.
    torch.set_num_threads(1)
    # While torch traces a model, it checks whether there is a GPU. By default it initializes CUDA
    # for this check, and a process that has initialized CUDA cannot fork ranks that use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    job = on_devices(job)
    shared = check_job(job)  # objects that the forked ranks then need not make again
    require(
        not (job.device == "cuda" and torch.cuda.is_initialized()),
        "CUDA was used before the ranks are forked",
        where=job.factory or "this process",
        expected="a model on the CPU or the meta device; the ranks bring it to their GPUs",
    )
    with tempfile.TemporaryDirectory(prefix="hetplan-run-") as folder:
        supervisor = Supervisor(job, tell, shared)
        with supervisor.signals():
            try:
                supervisor.start(str(Path(folder) / "store"))
                supervisor.watch()
            finally:
                supervisor.end()
    return [rank.steps for rank in supervisor.ranks]


# Makes the job to go on with: (job of the plan that ran, numbers of all nodes lost so far) -> job
# of a plan for the remaining nodes, or None where no plan fits them.
Again = Callable[[Job, tuple[int, ...]], Job | None]


def launch_elastic(
    job: Job,
    again: Again,
    tell: Callable[[StepReport], None],
    lost: Callable[[NodeLoss], None] | None = None,
) -> Measured:
    """Run the job, and after each loss of a node the remaining steps under another plan.

    Returns what the last plan measured, with the losses of nodes and the training loss of all
    steps.

    job: has a folder for checkpoints. again: makes the job to go on with. tell: receives each
    report of rank 0. lost: receives each loss of a node.

    Raises RankError where no node or no plan is left.
    """
    first_step = 0
    if job.resume:
        first_step = latest(job) or 0
    last_step = first_step + job.steps
    losses: list[NodeLoss] = []
    curve: dict[int, float] = {}  # step -> training loss

    def record(report: StepReport) -> None:
        curve[report.step] = report.loss
        tell(report)

    while True:
        try:
            return Measured(job, launch(job, record), tuple(losses), curve)
        except RankError as error:
            if error.device is None:
                raise
            failed_at = time.monotonic()
            devices = job.plan.devices
            lost_node = devices[error.device].node
            lost_nodes = (*(loss.node for loss in losses), lost_node)
            if {device.node for device in devices} <= set(lost_nodes):  # no node is left
                raise
            following = again(job, lost_nodes)
            checkpoint = latest(job)
            # at the last step nothing is left to run: the node was lost after it
            if following is None or checkpoint == last_step:
                raise
            step = checkpoint or 0  # without a checkpoint the run begins anew
            job = replace(following, steps=last_step - step, resume=checkpoint is not None)
            loss = NodeLoss(
                error=str(error),
                node=lost_node,
                step=step,
                plan=job.plan.name,
                seconds=time.monotonic() - failed_at,
            )
            losses.append(loss)
            if lost is not None:
                lost(loss)


def latest(job: Job) -> int | None:
    """The step of the last complete checkpoint, None before the first."""
    from hetplan.runtime.engine.checkpoint import complete_checkpoints

    assert job.checkpoint is not None
    checkpoints = complete_checkpoints(job.checkpoint)
    return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else None
