"""One rank of a plan, started by torchrun on every node:

    torchrun --no-python --nproc-per-node N … hetplan run PLAN

Ranks follow the order of the plan's devices in use. torchrun numbers its processes node by node, as
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
from hetplan.runtime.launch.interfaces import interface_towards
from hetplan.runtime.launch.supervision import RankError
from hetplan.runtime.measured import Measured

# gloo's variable with the name of the network interface at which it listens
INTERFACE = "GLOO_SOCKET_IFNAME"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Whether the environment has torchrun's variables, so that this process is a rank."""
    return all(name in os.environ for name in VARIABLES)


def serve(job: Job) -> Measured | None:
    """Train as one rank of many. Returns the measurements of all ranks on rank 0, None on the
    other ranks.

    An error is printed as one line with the rank's place, and ends this process at once: if the
    interpreter ended first, gloo's threads would abort the process when a peer dies.
    """
    # Where rank 0 has ended with an error of all ranks, its store is gone, and torch would print a
    # page of C++ frames for each rank that still asks it. torch reads this when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        check_world(job.plan, int(os.environ["WORLD_SIZE"]))
        return serve_rank(on_devices(job, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    except HetplanError as error:
        place = "" if isinstance(error, RankError) else f"rank {os.environ['RANK']}: "
        print(one_line(f"hetplan: {place}{error}"), file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def choose_interface() -> None:
    """Choose the network interface on which gloo listens, for ranks on several machines: the one
    that the other machines reach. A choice of the user stands."""
    several_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if several_machines and INTERFACE not in os.environ:
        interface = interface_towards(os.environ["MASTER_ADDR"])
        if interface is not None:
            os.environ[INTERFACE] = interface


def serve_rank(job: Job) -> Measured | None:
    """Join the process group and train; returns as `serve` does. Raises InputError where the
    ranks cannot meet at the address, RankError for an error of this rank."""
    torch = required_torch("running plans")
    from torch import distributed as dist

    from hetplan.runtime.engine.failures import LostPeer, error_text, is_lost
    from hetplan.runtime.engine.worker import check_job, look_after, train, watch_of

    shared = check_job(job)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # the ranks of a node share its cores
    torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
    choose_interface()
    try:
        dist.init_process_group("gloo")  # `Transport` adds groups of NCCL where GPUs have it
    except dist.DistNetworkError as error:
        raise InputError(
            f"cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: "
            f"{one_line(str(error))[:200]}"
        ) from None
    except RuntimeError as error:  # gloo: the ranks have met, and cannot connect to each other
        raise InputError(
            f"the ranks cannot connect to each other: {one_line(str(error))[:200]}",
            got=f"{INTERFACE}={os.environ.get(INTERFACE, '')}",
            expected="the interface by which the machines reach each other",
        ) from None
    reports: list[StepReport] = []
    watch = watch_of(job, dist.get_rank())
    place = job.plan.rank_text(dist.get_rank())
    # torchrun hands SIGTERM on to its ranks. All ranks then end after their step.
    received_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received_signals.append(number))
    try:
        look_after(watch, job.hang_seconds, job.plan)
        train(job, watch, reports.append, lambda: bool(received_signals), shared)
        watch.begins("end", 0, 0)
    except LostPeer as error:
        raise RankError(str(error)) from error
    except HetplanError:
        raise
    except Exception as error:
        text = f"lost a peer: {error_text(error)}" if is_lost(error) else error_text(error)
        raise RankError(f"{place}: {text}") from error
    reports_of_ranks: list[Any] | None = None
    if dist.get_rank() == 0:
        reports_of_ranks = [None] * job.plan.world_size
    dist.gather_object(reports, reports_of_ranks)
    dist.destroy_process_group()
    return None if reports_of_ranks is None else Measured(job, reports_of_ranks)
