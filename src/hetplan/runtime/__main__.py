"""`torchrun --nproc-per-node N … -m hetplan.runtime PLAN`: one rank of a plan, started by torchrun
on every node.

Ranks follow the order of the plan's devices in use; torchrun numbers its processes node by node, as
clusters number their devices. Rank 0 prints the measured times.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from hetplan.errors import HetplanError, InputError, one_line
from hetplan.formulations.joint.plan import check_world, load_plan
from hetplan.runtime.devices import on_devices, required_torch
from hetplan.runtime.job import Job, Measured, StepReport, check_options
from hetplan.runtime.launch import RankError
from hetplan.runtime.watch import Watch

OPTIONS: dict[str, dict[str, Any]] = {
    "--factory": {
        "metavar": "MODULE:FUNCTION",
        "help": "makes your model of the plan, its argument; default the reference of its name",
    },
    "--model": {
        "metavar": "NAME|FILE",
        "help": "built-in model or config.json; default the plan's",
    },
    "--steps": {"type": int, "default": Job.steps},
    "--optimizer": {"choices": ("sgd", "adamw"), "default": Job.optimizer},
    "--learning-rate": {"type": float, "default": Job.learning_rate},
    "--seed": {"type": int, "default": Job.seed},
    "--checkpoint": {"metavar": "FOLDER", "help": "on a file system that all nodes share"},
    "--every": {"type": int, "metavar": "STEPS"},
    "--resume": {"action": "store_true"},
    "--save": {"metavar": "FOLDER", "help": "write the trained model of a factory there"},
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": Job.device},
    "--hang-after": {
        "type": float,
        "default": Job.hang_seconds,
        "metavar": "SECONDS",
        "dest": "hang_seconds",
        "help": "a rank whose pass makes no progress counts as hung",
    },
}


def parsed(arguments: Sequence[str] | None) -> Job:
    """The job that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m hetplan.runtime", description="One rank of a plan, under torchrun."
    )
    parser.add_argument("plan", help="plan file")
    for name, how in OPTIONS.items():
        parser.add_argument(name, **how)
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
        place = "" if isinstance(error, RankError) else f"rank {rank}: "
        print(f"hetplan: {place}{error}", file=sys.stderr)
        return error.exit_code
    return 0


def check_environment(job: Job) -> None:
    """Raise InputError unless torchrun started as many processes as the plan needs."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(
                "not started by torchrun",
                got=f"no {name}",
                expected="torchrun -m hetplan.runtime PLAN",
            )
    check_world(job.plan, int(os.environ["WORLD_SIZE"]))


def serve(job: Job) -> None:
    """Join the group, train, tell. Raises InputError where the port is taken, RankError for an
    error of this rank's."""
    torch = required_torch("running plans")
    from torch import distributed as dist

    from hetplan.runtime.execution.worker import check_job, error_text, is_lost, look_after, train

    made = check_job(job)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
    try:
        dist.init_process_group("gloo")
    except dist.DistNetworkError as error:
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise InputError(f"cannot meet at {meeting}: {one_line(str(error))[:200]}") from None
    reports: list[StepReport] = []
    watch, place = Watch(), job.plan.rank_text(dist.get_rank())
    asked: list[int] = []  # by SIGTERM, which torchrun hands on: all then end behind their step
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        look_after(watch, job.hang_seconds, place)
        train(job, watch, reports.append, lambda: bool(asked), made)
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # a peer's death aborts the process where gloo's threads outlive the interpreter
        os._exit(code)
