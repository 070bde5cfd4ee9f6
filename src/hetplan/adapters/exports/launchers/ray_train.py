"""Export for Ray Train: a script that starts one worker per rank of the plan.

Ray decides on which node each worker runs and how the workers are numbered. `seats` then gives each
worker a rank of the plan: one whose node has the same device type and the same number of ranks.
"""

import re
from collections.abc import Sequence

from hetplan.adapters.exports.grid import heading
from hetplan.adapters.exports.launchers.start import Start
from hetplan.errors import require
from hetplan.plans.plan import Plan
from hetplan.text import grouped

RAY = '''import os
import socket
import subprocess
import sys

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed

from hetplan.plans.plan import load_plan
from hetplan.adapters.exports.launchers.ray_train import seats

PLAN = @PLAN@
OPTIONS = @OPTIONS@
VARIABLES = @VARIABLES@
LABELS = @LABELS@  # device type -> labels of its nodes
DEVICES = @DEVICES@  # device type of each worker


def work():
    """Take a rank of the plan on a node of this device type, and run it."""
    node_id = ray.get_runtime_context().get_node_id()
    labels = next(node["Labels"] for node in ray.nodes() if node["NodeID"] == node_id)
    kind = next(kind for kind, wanted in LABELS.items() if wanted.items() <= labels.items())
    with socket.socket() as free_port:
        free_port.bind(("", 0))
        port = free_port.getsockname()[1]
    workers = [None] * distributed.get_world_size()
    address = ray.util.get_node_ip_address()
    distributed.all_gather_object(workers, (node_id, kind, address, port))
    worker_seats = seats(load_plan(PLAN), [(node, kind) for node, kind, _, _ in workers])
    rank, local_rank, node_ranks = worker_seats[distributed.get_rank()]
    worker_of_rank = {seat[0]: worker for worker, seat in zip(workers, worker_seats)}
    _, _, master_address, master_port = worker_of_rank[0]
    torchrun = {
        "RANK": rank, "WORLD_SIZE": len(workers), "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": node_ranks, "MASTER_ADDR": master_address, "MASTER_PORT": master_port,
    }
    variables = {**VARIABLES, **{name: str(value) for name, value in torchrun.items()}}
    # Ray puts the working folder first on Python's path, before Python's own modules
    folders = (os.environ | variables).get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in folders if os.path.realpath(folder) != os.getcwd()]
    variables["PYTHONPATH"] = os.pathsep.join(others)
    command = [sys.executable, "-P", "-m", "hetplan", "run", PLAN, *OPTIONS]
    subprocess.run(command, env=os.environ | variables, check=True)


TorchTrainer(
    work,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(
        num_workers=len(DEVICES),
        use_gpu=@GPUS@,
        label_selector=[LABELS[kind] for kind in DEVICES],
    ),
).fit()
'''


def ray(start: Start) -> dict[str, str]:
    """File name -> text of a script for Ray Train.

    The script starts one worker per rank, on a node with the rank's device type. Raises InputError
    where Ray would not copy the folder of the files to the workers.
    """
    require(
        not start.folder.startswith(".."),
        "the folder is not in the working directory, which Ray takes to the workers",
        got=start.folder,
    )
    kinds = [start.plan.devices[device].type for device in start.plan.ranks]
    values = {  # NAME -> the value that replaces `@NAME@` in RAY
        "PLAN": f"{start.folder}/plan.json",
        "OPTIONS": list(start.run_options),
        "VARIABLES": start.launcher.env,
        "LABELS": {kind: start.selectors(kind, "ray.io/accelerator-type") for kind in kinds},
        "DEVICES": kinds,
        "GPUS": start.gpus,
    }
    # Python reads a source's encoding from its first two lines. A line of its own states it, since
    # the heading holds the plan's name, which could name another encoding.
    lines = ["# -*- coding: utf-8 -*-", *heading(start.plan, "Ray Train", "Ray 2.51 and later")]
    program = re.sub("@([A-Z]+)@", lambda name: repr(values[name[1]]), RAY)
    return {"train.py": "\n".join([*lines, program])}


def seats(plan: Plan, workers: Sequence[tuple[str, str]]) -> list[tuple[int, int, int]]:
    """The seat of each worker in the plan: (rank, rank within the node, ranks of the node).

    workers: (node, device type) of each worker. Each node of the plan is matched with one of Ray's
    nodes that has equally many workers and the same device type. Raises InputError where Ray has no
    such node left.
    """
    type_of_node = dict(workers)
    workers_of_node = grouped((node, worker) for worker, (node, _) in enumerate(workers))
    # (device type, number of workers) -> the workers of each of Ray's nodes that is not matched yet
    free: dict[tuple[str, int], list[list[int]]] = {}
    for node, members in workers_of_node.items():
        free.setdefault((type_of_node[node], len(members)), []).append(members)
    placement = [
        f"{len(members)} on {type_of_node[node]}" for node, members in workers_of_node.items()
    ]
    seat_of = dict[int, tuple[int, int, int]]()
    for devices in plan.nodes.values():
        kind, count = plan.devices[devices[0]].type, len(devices)
        require(
            free.get((kind, count)),
            "Ray placed the workers on other nodes than the plan's",
            got=", ".join(placement),
            expected=f"a node with {count} on {kind}",
        )
        members = free[kind, count].pop()
        for local_rank, (worker, device) in enumerate(zip(members, devices, strict=True)):
            seat_of[worker] = plan.ranks[device], local_rank, count
    return [seat_of[worker] for worker in range(len(workers))]
