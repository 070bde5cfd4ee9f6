"""`torchrun --nproc-per-node N … -m hetplan.runtime PLAN`: one rank of a plan, started by torchrun
on every node.

Ranks follow the order of the plan's devices in use; torchrun numbers its processes node by node, as
clusters number their devices. Rank 0 prints the measured times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from hetplan.errors import HetplanError, InputError, one_line
from hetplan.runtime.devices import on_devices, required_torch
from hetplan.runtime.job import Job, Measured, StepReport, check_options
from hetplan.runtime.launch import RankError
from hetplan.runtime.plan import check_world, load_plan
from hetplan.runtime.watch import Watch


def parsed(arguments: Sequence[str] | None) -> Job:
    """The job that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m hetplan.runtime", description="One rank of a plan, under torchrun."
    )
    parser.add_argument("plan", help="plan file")
    parser.add_argument(
        "--factory", metavar="MODULE:FUNCTION",
        help="makes your model of the plan, its argument; default the reference of its name",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="NAME|FILE", help="built-in model or config.json; default the plan's"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="on a file system that all nodes share"
    )
    parser.add_argument("--every", type=int, metavar="STEPS")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--hang-after", type=float, default=10.0, metavar="SECONDS", dest="hang_seconds",
        help="a rank whose pass makes no progress counts as hung",
    )  # fmt: skip
    options = vars(parser.parse_args(arguments))
    check_options(
        options["steps"], options["learning_rate"], options["hang_seconds"],
        options["checkpoint"], options["every"], resume=options["resume"],
    )  # fmt: skip
    return Job(plan=load_plan(options.pop("plan")), **options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 or 2 with one line on standard error."""
    rank = os.environ.get("RANK", "?")
    try:
        job = parsed(arguments)
        check_environment(job)
        serve(on_devices(job, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    except HetplanError as error:
        named = str(error).startswith("rank ")  # with its place in the plan
        print(f"hetplan: {error}" if named else f"hetplan: rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def check_environment(job: Job) -> None:
    """Raise InputError unless torchrun started as many processes as the plan needs."""
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise InputError(
            "not started by torchrun",
            got=f"no {missing[0]}",
            expected="torchrun -m hetplan.runtime PLAN",
        )
    check_world(job.plan, int(os.environ["WORLD_SIZE"]))


def serve(job: Job) -> None:
    """Join the group, train, tell. Raises InputError where the port is taken, RankError for an
    error of this rank's."""
    torch = required_torch("running plans")
    from torch import distributed as dist

    from hetplan.runtime.execution.worker import check_job, error_text, is_lost, look_after, train

    check_job(job)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
    try:
        dist.init_process_group("gloo")
    except dist.DistNetworkError as error:
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise InputError(f"cannot meet at {meeting}: {one_line(str(error))[:200]}") from None
    reports: list[StepReport] = []
    watch, place = Watch(), job.plan.rank_text(dist.get_rank())
    try:
        with asked_to_stop() as stopping, look_after(watch, job.hang_seconds, place):
            train(job, watch, reports.append, stopping)
    except HetplanError:
        raise
    except Exception as error:
        text = f"lost a peer: {error_text(error)}" if is_lost(error) else error_text(error)
        raise RankError(f"{place}: {text}") from error
    everyone: list[Any] | None = [None] * job.plan.world_size if dist.get_rank() == 0 else None
    dist.gather_object(reports, everyone)
    if everyone is not None:
        table = Measured(job, everyone).table()
        rows = ("  ".join(row) for row in (table.header, *table.rows))
        print("\n".join((table.title, *rows, *table.notes)))
    dist.destroy_process_group()


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come, which torchrun hands on: all ranks then end behind their step."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
