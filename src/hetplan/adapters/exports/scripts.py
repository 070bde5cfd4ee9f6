"""Shell scripts, called once per node, that start every rank of a plan on its device: of
Megatron-LM, and of hetplan's own runtime; and what starts them on all nodes: files for ssh, Slurm,
Kubernetes and Ray.

Megatron-LM gets flags for degrees, micro-batch, uneven stages, recomputation, sharded states, and
the model's own figures where it is known. Ranks are numbered tensor first, then context, data and
pipeline (Megatron's default order), and every process is started with its rank, so that any
placement can be kept. What stays the user's: data and learning rate. Uneven stages are
`--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` where only the ends
differ, else `--pipeline-model-parallel-layout` (E embedding, t block, L loss; stages separated by
|, chunk by chunk).

hetplan's runtime runs what the frameworks cannot express and reads the plan file itself: ranks are
the plan's own, the devices in use, node by node, so that torchrun's numbering is the plan's. Nodes
may start different numbers of processes.

Every launcher but Ray runs `node.sh` once per node, with the node's number in the plan (NODE) and
the address of rank 0's node (MASTER_ADDR); the script starts as many ranks as the plan has there.
Ray Train numbers its workers itself: there each worker takes a rank of a node like its own
(`seats`). Nodes with equally many ranks on the same device type are a group: one component of a
Slurm job, one replicated job of a JobSet. Within a group any node may stand for any other.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from textwrap import indent
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from hetplan.adapters.exports.grid import Grid, heading
from hetplan.adapters.exports.megatron_arguments import RECOMPUTATION, settings
from hetplan.errors import UnsupportedError, printable, require
from hetplan.interpreter import SAFE_PATH
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.profiling.models.transformer import Transformer
from hetplan.schema import PLAIN, StrictModel
from hetplan.text import comments, grouped

MEGATRON = (
    "Megatron-LM core 0.13 and later: megatron/training/arguments.py at 000c4ac, parallel_state.py"
)


def megatron(plan: Plan, shape: Transformer | None = None) -> str:
    """A script that starts a command with Megatron's flags once per rank; raises UnsupportedError
    for what stock Megatron-LM cannot express.

    Every process gets RANK, LOCAL_RANK (its device within the node), WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, which is what torchrun would give it.
    """
    grid = Grid(plan, "Megatron-LM", shape)
    grid.only("schedule", ("1f1b", "interleaved-1f1b"), "the order of passes")
    grid.only("recomputation", tuple(RECOMPUTATION), "which activations are kept")
    grid.check()
    ranked = grid.devices_by_rank
    places = grouped(
        (plan.devices[device].node, (local_number(plan, device), rank))
        for rank, device in enumerate(ranked)
    )
    lines = [
        "#!/usr/bin/env bash",
        *heading(plan, "Megatron-LM", MEGATRON),
        *comments(
            f"Behind the script come pretrain_gpt.py and the flags of "
            f"{'data' if shape else 'model, data'} and optimizer.",
            f"On every node n of {', '.join(map(str, sorted(places)))}: NODE=n "
            f"MASTER_ADDR=<address of node {plan.devices[ranked[0]].node}> bash <this file> ...",
        ),
        "set -euo pipefail",
        f'export WORLD_SIZE={len(ranked)} MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}"',
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        "FLAGS=(",
        *(f"  {shlex.join(words)}" for words in flags(grid)),
        ")",
        "# rank:device of every process of the node",
        'case "${NODE:?number of this node in the plan}" in',
        *(
            f'  {node}) PLACES="{" ".join(f"{rank}:{local}" for local, rank in sorted(pairs))}" ;;'
            for node, pairs in sorted(places.items())
        ),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
        'LOCAL_WORLD_SIZE=$(wc -w <<< "$PLACES"); export LOCAL_WORLD_SIZE',
        "PROCESSES=()",
        "for place in $PLACES; do",
        '  RANK="${place%%:*}" LOCAL_RANK="${place##*:}" python "$@" "${FLAGS[@]}" &',
        '  PROCESSES+=("$!")',
        "done",
        "CODE=0",
        'for process in "${PROCESSES[@]}"; do wait "$process" || CODE=$?; done',
        'exit "$CODE"',
    ]
    return "\n".join(lines) + "\n"


def flags(grid: Grid) -> list[list[str]]:
    """What decides the parallel run, and the model: each flag with its value."""
    return [
        [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        for name, value in settings(grid).items()
    ]


def local_number(plan: Plan, device: int) -> int:
    """The device's number within its node."""
    return sum(other.node == plan.devices[device].node for other in plan.devices[:device])


def torchrun(
    plan: Plan, shape: Transformer | None = None, *, variables: Mapping[str, str] | None = None
) -> str:
    """hetplan's runtime under torchrun; every plan that it runs can be expressed. variables: of all
    ranks."""
    check_executed(plan)
    nodes = {
        node: [str(local_number(plan, device)) for device in devices]
        for node, devices in plan.nodes.items()
    }
    require(
        [device for devices in plan.nodes.values() for device in devices] == list(plan.ranks),
        "devices of a node that are not numbered in a row, as torchrun numbers ranks",
        where=plan.name,
        kind=UnsupportedError,
    )
    order = list(nodes)
    lines = [
        "#!/usr/bin/env bash",
        *heading(plan, "hetplan's runtime", "torchrun"),
        *comments(
            f"On every node n of {', '.join(map(str, order))}: "
            f"NODE=n MASTER_ADDR=<address of node {order[0]}> bash <this file> PLAN.json ..."
        ),
        "set -euo pipefail",
        *exports({SAFE_PATH: "1", **(variables or {})}),
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        'case "${NODE:?number of this node in the plan}" in',
        *(
            f'  {node}) NODE_RANK={i} PROCESSES={len(local)} DEVICES="{",".join(local)}" ;;'
            for i, (node, local) in enumerate(nodes.items())
        ),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
        'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$DEVICES}"',
        f'exec torchrun --nnodes {len(order)} --node-rank "$NODE_RANK" \\',
        '  --nproc-per-node "$PROCESSES" \\',
        '  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \\',
        '  -m hetplan run "$@"',
    ]
    return "\n".join(lines) + "\n"


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of a shell script that set variables of all ranks."""
    return [f"export {name}={shlex.quote(printable(value))}" for name, value in variables.items()]


# What stands in scripts unquoted, and what stands in a line of its own.
Word = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.:@/+-]*$", max_length=253)]
Value = Annotated[str, Field(pattern=PLAIN, max_length=1000)]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is to be started. launcher: one of `LAUNCHERS`; name: of the job, as Kubernetes takes
    it; root: the folder where ranks start, absolute; folder: of the files, seen from there; words:
    options of `hetplan run`."""

    plan: Plan
    launcher: Any
    name: str
    root: str
    folder: str
    words: Sequence[str] = ()
    gpus: bool = True

    @property
    def groups(self) -> dict[tuple[str, int], list[int]]:
        """(device type, ranks) -> the nodes with so many ranks on such devices."""
        devices = self.plan.devices
        return grouped(((devices[d[0]].type, len(d)), n) for n, d in self.plan.nodes.items())

    def selectors(self, kind: str, label: str) -> dict[str, str]:
        """What nodes of a device type are selected by. label: under which the type stands where the
        job file does not say, and the cluster has several."""
        usual = {label: kind} if len({device.type for device in self.plan.devices}) > 1 else {}
        return dict(self.launcher.types.get(kind, usual))

    def task(self, number: str, nodes: Sequence[int], folder: str, begin: str = "") -> list[str]:
        """The command of a scheduler's task. number: the variable that says which of `nodes` it is;
        folder: where it finds the files; begin: what the shell does first."""
        node = f"nodes=({' '.join(map(str, nodes))}); export NODE=${{nodes[{number}]}}"
        return [
            *("bash", "-c", f'{begin}{node}; exec bash "$@"', "node"),
            *(f"{folder}/node.sh", f"{folder}/plan.json", *self.words),
        ]


SUBMIT = """#!/usr/bin/env bash
{comments}
# Every host has this folder at the same place. A host that fails ends the others.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{commands}
for _ in $(jobs -p); do wait -n; done
"""


def ssh(start: Start) -> dict[str, str]:
    """A script that starts `node.sh` on every host, and the hosts with their numbers of ranks."""
    nodes, hosts = start.plan.nodes, start.launcher.hosts
    require(
        len(hosts) > max(nodes),
        "too few hosts",
        where="launcher.hosts",
        got=len(hosts),
        expected=f"{max(nodes) + 1}, one per node of the cluster",
    )
    words = shlex.join([f"{start.folder}/node.sh", f"{start.folder}/plan.json", *start.words])
    here, first = shlex.quote(start.root), hosts[next(iter(nodes))].rpartition("@")[2]
    begin, end = f"cd {here} && NODE=", f" MASTER_ADDR={first} bash {words}"
    return {
        "submit.sh": SUBMIT.format(
            comments="\n".join(heading(start.plan, "ssh", "torchrun on every host")),
            commands="\n".join(
                f"ssh -o BatchMode=yes {hosts[node]} {shlex.quote(f'{begin}{node}{end}')} &"
                for node in nodes
            ),
        ),
        "hostfile": "".join(f"{hosts[n]} slots={len(ranks)}\n" for n, ranks in nodes.items()),
    }


BATCH = """#!/usr/bin/env bash
{comments}
{components}
set -euo pipefail
HOSTS="${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}"
MASTER_ADDR="$(scontrol show hostnames "$HOSTS" | sed -n 1p)"
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun {groups}--kill-on-bad-exit=1 {task}
"""


def directive(name: str, value: object) -> str:
    """An option for sbatch within a script; sbatch reads quotes as a shell does."""
    return f"#SBATCH --{name}={shlex.quote(printable(str(value)))}"


def slurm(start: Start) -> dict[str, str]:
    """A batch script, of a heterogeneous job where nodes differ: one task per node."""
    components = [
        {
            "job-name": start.name,
            "chdir": start.root,
            "nodes": len(nodes),
            "ntasks-per-node": 1,
            **({"gpus-per-node": ranks} if start.gpus else {}),
            **start.launcher.options,
            **start.selectors(kind, "constraint"),
        }
        for (kind, ranks), nodes in start.groups.items()
    ]
    nodes = [node for group in start.groups.values() for node in group]
    script = BATCH.format(
        comments="\n".join(heading(start.plan, "Slurm", "sbatch")),
        components="\n#SBATCH hetjob\n".join(
            "\n".join(directive(name, value) for name, value in options.items())
            for options in components
        ),
        groups=f"--het-group=0-{len(components) - 1} " if len(components) > 1 else "",
        task=shlex.join(start.task("SLURM_PROCID", nodes, start.folder)),
    )
    return {"job.sbatch": script}


FILES = """apiVersion: v1
kind: ConfigMap
metadata: {{name: {name}}}
data:
  plan.json: |
{plan}
  node.sh: |
{script}
"""
JOB_SET = """\
network: {{enableDNSHostnames: true, subdomain: {name}}}
failurePolicy: {{maxRestarts: 0}}
replicatedJobs:
{jobs}"""
JOB = """\
- name: nodes-{number}
  replicas: 1
  template:
    spec:
      parallelism: {nodes}
      completions: {nodes}
      completionMode: Indexed
      backoffLimit: 0
      template:
        spec:
          restartPolicy: Never
          nodeSelector: {selectors}
          containers:
          - name: node
            image: {image}
            command: {command}
            resources: {resources}
            volumeMounts:
            - {{name: files, mountPath: /hetplan}}
            - {{name: memory, mountPath: /dev/shm}}
          volumes:
          - {{name: files, configMap: {{name: {name}}}}}
          - {{name: memory, emptyDir: {{medium: Memory}}}}
"""
# Launcher -> what follows the files: a JobSet, or a TrainJob with a runtime of its own.
OBJECTS = {
    "jobset": """---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: {name}}}
spec:
{spec}""",
    "kubeflow": """---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {{name: {name}}}
spec:
  template:
    spec:
{runtime}---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{name: {name}}}
spec:
  runtimeRef: {{name: {name}, kind: TrainingRuntime}}
""",
}


def kubernetes(start: Start) -> dict[str, str]:
    """Kubernetes' objects: the files, and one replicated job per group with one pod per node."""
    begin = f"export MASTER_ADDR={start.name}-nodes-0-0-0.{start.name}; "
    jobs = [
        JOB.format(
            number=number,
            name=start.name,
            nodes=len(nodes),
            selectors=json.dumps(start.selectors(kind, "nvidia.com/gpu.product")),
            image=json.dumps(start.launcher.image),
            command=json.dumps(start.task("JOB_COMPLETION_INDEX", nodes, "/hetplan", begin)),
            resources=json.dumps({"limits": {"nvidia.com/gpu": ranks}} if start.gpus else {}),
        )
        for number, ((kind, ranks), nodes) in enumerate(start.groups.items())
    ]
    spec = JOB_SET.format(name=start.name, jobs="".join(jobs))
    files = FILES.format(
        name=start.name,
        plan=indent(json.dumps(start.plan.model_dump(mode="json"), indent=1), " " * 4),
        script=indent(torchrun(start.plan, variables=start.launcher.env), " " * 4),
    )
    return {
        "job.yaml": files
        + OBJECTS[start.launcher.kind].format(
            name=start.name, spec=indent(spec, " " * 2), runtime=indent(spec, " " * 6)
        )
    }


RAY = '''import os
import socket
import subprocess
import sys

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed

from hetplan.plans.plan import load_plan
from hetplan.adapters.exports.scripts import seats

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
    values = {
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
    """(rank, rank within the node, ranks of the node) of each worker. workers: (node, device type)
    of each. Raises InputError where they do not lie on nodes as the plan's ranks do."""
    there = grouped((node, worker) for worker, (node, _) in enumerate(workers))
    free = grouped(((dict(workers)[node], len(own)), own) for node, own in there.items())
    taken = dict[int, tuple[int, int, int]]()
    for devices in plan.nodes.values():
        kind, count = plan.devices[devices[0]].type, len(devices)
        require(
            free.get((kind, count)),
            "Ray placed the workers on other nodes than the plan's",
            got=", ".join(f"{len(own)} on {dict(workers)[node]}" for node, own in there.items()),
            expected=f"a node with {count} on {kind}",
        )
        for local, worker in enumerate(free[kind, count].pop()):
            taken[worker] = plan.ranks[devices[local]], local, count
    return [taken[worker] for worker in range(len(workers))]


# Keys of a job file's launcher. types: device type -> what its nodes are selected by (options of
# sbatch, labels of Kubernetes' or Ray's nodes); hosts: one per node of the cluster, in its order;
# options: of sbatch, for every component; env: variables of all ranks.
ENV: dict[str, Any] = {
    "env": (dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], Value], {})
}
TYPES: dict[str, Any] = {
    "types": (dict[Annotated[str, Field(max_length=200)], dict[Word, Value]], {})
}
POD = ("kubectl", "kubectl create -f {}/job.yaml", kubernetes, {"image": (Word, ...), **TYPES})
# Launcher -> the program that submits, its command ({}: folder), who writes the files, its keys.
LAUNCHERS: dict[str, tuple[str, str, Callable[[Start], dict[str, str]], dict[str, Any]]] = {
    "local": ("hetplan", "hetplan run {}/plan.json", lambda start: {}, {}),
    "ssh": ("ssh", "bash {}/submit.sh", ssh, {"hosts": (list[Word], ...)}),
    "slurm": (
        "sbatch",
        "sbatch {}/job.sbatch",
        slurm,
        {"options": (dict[Word, Value], {}), **TYPES},
    ),
    "kubeflow": POD,
    "jobset": POD,
    "ray": ("ray", "ray job submit --working-dir . -- python -P {}/train.py", ray, TYPES),
}
# All sections that a job file may have for its launcher.
KINDS: Any = reduce(
    or_,
    (
        create_model(kind, __base__=StrictModel, **{"kind": (Literal[kind], ...), **ENV, **own})
        for kind, (_, _, _, own) in LAUNCHERS.items()
    ),
)
