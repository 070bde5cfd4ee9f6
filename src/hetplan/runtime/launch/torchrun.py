"""One rank of a plan, started by torchrun on every node: `torchrun --no-python --nproc-per-node N …
hetplan run PLAN`.

Ranks follow the order of the plan's devices in use; torchrun numbers its processes node by node, as
clusters number their devices. Rank 0 prints the measured times.
"""

import os
import signal
import sys
from typing import Any

from hetplan.errors import HetplanError, InputError, one_line
from hetplan.plans.making import check_world
from hetplan.runtime.job import Job, StepReport
from hetplan.runtime.launch.devices import on_devices, required_torch
from hetplan.runtime.launch.supervision import RankError
from hetplan.runtime.measured import Measured

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Whether torchrun, or whatever sets its variables, started this process."""
    return all(name in os.environ for name in VARIABLES)


def serve(job: Job) -> Measured | None:
    """Train as one rank of many; what rank 0 measured, None for the others.

    An error is one line with the rank's place, and ends the process: a peer's death aborts it where
    gloo's threads outlive the interpreter.
    """
    try:
        check_world(job.plan, int(os.environ["WORLD_SIZE"]))
        return serve_rank(on_devices(job, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    except HetplanError as error:
        place = "" if isinstance(error, RankError) else f"rank {os.environ['RANK']}: "
        print(one_line(f"hetplan: {place}{error}"), file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def serve_rank(job: Job) -> Measured | None:
    """Join the group and train. Raises InputError where the port is taken, RankError for an
    error of this rank's."""
    torch = required_torch("running plans")
    from torch import distributed as dist

    from hetplan.runtime.engine.worker import (
        check_job,
        error_text,
        is_lost,
        look_after,
        train,
        watch_of,
    )

    made = check_job(job)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
    try:
        dist.init_process_group("gloo")
    except dist.DistNetworkError as error:
        raise InputError(
            f"cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"{one_line(str(error))[:200]}"
        ) from None
    reports: list[StepReport] = []
    watch, place = watch_of(job, dist.get_rank()), job.plan.rank_text(dist.get_rank())
    asked: list[int] = []  # by SIGTERM, which torchrun hands on: all then end behind their step
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        look_after(watch, job.hang_seconds, job.plan)
        train(job, watch, reports.append, lambda: bool(asked), made)
        watch.begins("end", 0, 0)
    except HetplanError:
        raise
    except Exception as error:
        text = f"lost a peer: {error_text(error)}" if is_lost(error) else error_text(error)
        raise RankError(f"{place}: {text}") from error
    everyone: list[Any] | None = [None] * job.plan.world_size if dist.get_rank() == 0 else None
    dist.gather_object(reports, everyone)
    dist.destroy_process_group()
    return None if everyone is None else Measured(job, everyone)
