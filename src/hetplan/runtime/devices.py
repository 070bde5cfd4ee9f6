"""What the ranks of a job compute on: this machine's GPUs, counted without touching them, or its
CPU."""

from __future__ import annotations

import os
from dataclasses import replace

from hetplan.errors import InputError, UnsupportedError
from hetplan.runtime.job import Job


def on_devices(job: Job, local_ranks: int | None = None) -> Job:
    """The job with "auto" decided, and told whether ranks share GPUs. Raises InputError where there
    are none.

    local_ranks: on this machine, default all. Rehearsals compute on the CPU.
    """
    if job.device == "cpu":
        return job
    if job.virtual:
        if job.device == "cuda":
            raise UnsupportedError(
                "rehearsals compute on the CPU",
                got="--device cuda",
                expected="--device cpu or auto",
            )
        return replace(job, device="cpu")
    count = gpus()
    if job.device == "cuda" and count == 0:
        raise InputError(
            "no GPU that torch can use here", got="--device cuda", expected="--device cpu or auto"
        )
    shared = count if count < (local_ranks or job.plan.world_size) else 0
    return replace(job, device="cuda" if count else "cpu", shared_gpus=shared)


def gpus() -> int:
    """How many GPUs torch can use. Asked in a process of its own: one that has used CUDA cannot
    fork ranks that do."""
    try:
        import torch
    except ImportError:  # told where the job is to begin
        return 0
    if not torch.backends.cuda.is_built():
        return 0
    child = os.fork()
    if child == 0:
        count = 0
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        finally:
            os._exit(min(count, 255))
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
