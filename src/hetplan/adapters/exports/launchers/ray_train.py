"""Ray Train: a script with one worker per rank.

Ray numbers its workers itself: each worker takes a rank of a node like its own (`seats`).
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
LABELS = @LABELS@  # of the nodes of each device type
DEVICES = @DEVICES@  # of each worker


def work():
    """Take the rank that the plan has for a node like this one, and run it."""
    node = ray.get_runtime_context().get_node_id()
    labels = next(other["Labels"] for other in ray.nodes() if other["NodeID"] == node)
    kind = next(kind for kind, own in LABELS.items() if own.items() <= labels.items())
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    workers = [None] * distributed.get_world_size()
    address = ray.util.get_node_ip_address()
    distributed.all_gather_object(workers, (node, kind, address, port))
    taken = seats(load_plan(PLAN), [worker[:2] for worker in workers])
    rank, local, beside = taken[distributed.get_rank()]
    first = workers[[seat[0] for seat in taken].index(0)]
    place = {
        "RANK": rank, "WORLD_SIZE": len(workers), "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": beside, "MASTER_ADDR": first[2], "MASTER_PORT": first[3],
    }
    variables = {**VARIABLES, **{name: str(value) for name, value in place.items()}}
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
    """A script for Ray Train: one worker per rank, on a node with its device type."""
    require(
        not start.folder.startswith(".."),
        "the folder is not in the working directory, which Ray takes to the workers",
        got=start.folder,
    )
    kinds = [start.plan.devices[device].type for device in start.plan.ranks]
    values = {  # of the names between @ in RAY
        "PLAN": f"{start.folder}/plan.json",
        "OPTIONS": list(start.words),
        "VARIABLES": start.launcher.env,
        "LABELS": {kind: start.selectors(kind, "ray.io/accelerator-type") for kind in kinds},
        "DEVICES": kinds,
        "GPUS": start.gpus,
    }
    # Python takes its encoding from the first comment that names one: not from a plan's name
    lines = ["# -*- coding: utf-8 -*-", *heading(start.plan, "Ray Train", "Ray 2.51 and later")]
    program = re.sub("@([A-Z]+)@", lambda name: repr(values[name[1]]), RAY)
    return {"train.py": "\n".join([*lines, program])}


def seats(plan: Plan, workers: Sequence[tuple[str, str]]) -> list[tuple[int, int, int]]:
    """(rank, rank within the node, ranks of the node) of each worker.

    workers: (node, device type) of each. A node of the plan takes any of Ray's nodes with as many
    workers on the same type. Raises InputError where there is none.
    """
    type_of = dict(workers)
    on_node = grouped((node, worker) for worker, (node, _) in enumerate(workers))
    free: dict[tuple[str, int], list[list[int]]] = {}  # (type, workers) -> workers of each node
    for node, of_node in on_node.items():
        free.setdefault((type_of[node], len(of_node)), []).append(of_node)
    seat_of = dict[int, tuple[int, int, int]]()
    for devices in plan.nodes.values():
        kind, count = plan.devices[devices[0]].type, len(devices)
        require(
            free.get((kind, count)),
            "Ray placed the workers on other nodes than the plan's",
            got=", ".join(f"{len(own)} on {type_of[node]}" for node, own in on_node.items()),
            expected=f"a node with {count} on {kind}",
        )
        for local, worker in enumerate(free[kind, count].pop()):
            seat_of[worker] = plan.ranks[devices[local]], local, count
    return [seat_of[worker] for worker in range(len(workers))]
