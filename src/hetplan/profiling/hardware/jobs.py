"""The nodes of the job that this process runs in, from what its scheduler put into the environment.

Slurm names the nodes of a job and, more or less exactly, the GPUs of each. The components of a
heterogeneous job have variables of their own (`SLURM_JOB_NODELIST_HET_GROUP_0`). PBS names a file
with one line per process, Torque also one with a line per GPU. LSF counts cores, which say nothing
of GPUs.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetplan.errors import InputError, require
from hetplan.files import read_foreign_text
from hetplan.profiling.hardware.hostfiles import read_hostfile
from hetplan.profiling.hardware.hosts import Host, check_number_of_devices, check_number_of_hosts
from hetplan.profiling.hardware.node_lists import node_names

Environment = Mapping[str, str]

# The suffixes of the variables of a heterogeneous job; PACK was Slurm's word up to 19.05.
HET_SUFFIXES = ("_HET_GROUP_", "_PACK_GROUP_")
MOST_COMPONENTS = 128
# `4`, `a100:4`, `gpu:a100:4`, `gres/gpu:4`, `gres/gpu=4`, `gres/gpu:a100=4`
GPUS = re.compile(r"(?:(?:gres[/:])?gpu[:=])?(?:(?P<type>[A-Za-z][\w.-]*)[:=])?(?P<count>\d{1,6})")
TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")
GPU_OF_HOST = re.compile(r"(?P<host>.+)-gpu\d+")


def job_hosts(environment: Environment) -> list[Host] | None:
    """The nodes of the job of this process; None outside of jobs. Raises InputError for variables
    that contradict each other or cannot be read."""
    hosts = slurm_job(environment)
    if hosts is None:
        hosts = pbs_job(environment)
    if hosts is None:
        hosts = lsf_job(environment)
    return hosts


def slurm_job(environment: Environment) -> list[Host] | None:
    """The nodes of a Slurm job, of all components of a heterogeneous one; None outside of jobs."""
    hosts: list[Host] = []
    for component in range(MOST_COMPONENTS):
        suffixes = [f"{suffix}{component}" for suffix in HET_SUFFIXES]
        present = [each for each in suffixes if environment.get(f"SLURM_JOB_NODELIST{each}")]
        if not present:
            break
        nodes = slurm_nodes(environment, present[0])
        hosts += with_gpus(nodes, environment, present[0], component)
    if hosts:
        names = [host.name for host in hosts]
        twice = [name for name in names if names.count(name) > 1]
        require(not twice, "node stands in two components", where="Slurm's job", got=twice[:1])
        return hosts
    if not environment.get("SLURM_JOB_NODELIST"):
        return None
    return with_gpus(slurm_nodes(environment, ""), environment, "", None)


def slurm_nodes(environment: Environment, suffix: str) -> list[str]:
    """The names of a job's or a component's nodes, held against their stated number."""
    variable = f"SLURM_JOB_NODELIST{suffix}"
    names = node_names(environment[variable], where=variable)
    stated = environment.get(f"SLURM_JOB_NUM_NODES{suffix}", "")
    if stated.isdecimal():
        require(
            int(stated[:9]) == len(names),
            "names another number of nodes than SLURM_JOB_NUM_NODES",
            where=variable,
            got=len(names),
            expected=stated[:9],
        )
    return names


def with_gpus(
    names: Sequence[str], environment: Environment, suffix: str = "", component: int | None = None
) -> list[Host]:
    """Nodes with the GPUs that Slurm's variables tell of them.

    SLURM_GPUS_PER_NODE counts first, then the GPUs of this node (SLURM_GPUS_ON_NODE), of all nodes
    (SLURM_GPUS), of each task, and the numbers of this node's GPUs (SLURM_JOB_GPUS). Where the
    variables say that nodes differ, and not how, the number is not known.
    """
    variables = Variables(environment, suffix)
    total, total_type = variables.gpus("SLURM_GPUS")
    number, device_type = variables.gpus("SLURM_GPUS_PER_NODE")
    of_nodes: Sequence[int | None] | None = None
    why = None
    if number is None:
        number, device_type = variables.gpus("SLURM_GPUS_ON_NODE")
        why = f"SLURM_GPUS_ON_NODE{suffix}, which this node has"
    if number is None:
        of_nodes, device_type = variables.gpus_of_tasks(len(names))
        why = f"the tasks of a node by SLURM's variables{suffix}, and the GPUs of each task"
    if number is None and of_nodes is None and total is not None and total % len(names) == 0:
        number = total // len(names)
        why = f"an even part of SLURM_GPUS{suffix}"
    if number is None and of_nodes is None:
        listed = [part for part in variables.text("SLURM_JOB_GPUS").split(",") if part]
        number = len(listed) or None
        why = f"SLURM_JOB_GPUS{suffix}, which this node has"
    numbers = of_nodes if of_nodes is not None else [number] * len(names)
    known = [count for count in numbers if count is not None]
    if total is not None and known and sum(known) != total:
        why = f"SLURM_GPUS{suffix} is {total}, which {len(names)} nodes share unevenly"
        numbers = [None] * len(names)
    driver_name = device_type or total_type
    return [
        Host(name, count, devices_from=why, driver_name=driver_name, component=component)
        for name, count in zip(names, numbers, strict=True)
    ]


class Variables:
    """The variables of a job, or of one component of a heterogeneous job."""

    def __init__(self, environment: Environment, suffix: str) -> None:
        self.environment, self.suffix = environment, suffix

    def text(self, name: str) -> str:
        """The text of a variable; empty where it is not set."""
        return self.environment.get(f"{name}{self.suffix}", "").strip()

    def gpus(self, name: str) -> tuple[int | None, str | None]:
        """(number of GPUs, their type) in a variable such as `a100:4`; None for what it does not
        tell. Other resources than GPUs are passed over."""
        number, types = 0, set()
        for part in filter(None, map(str.strip, self.text(name).split(","))):
            match = GPUS.fullmatch(part)
            if match is None:
                continue
            number += int(match["count"])
            types.add(match["type"])
        where = f"{name}{self.suffix}"
        require(
            len(types) <= 1,
            "names several types, and a node of a cluster file has one",
            where=where,
            got=self.text(name),
        )
        return number or None, next(iter(types), None)

    def gpus_of_tasks(self, nodes: int) -> tuple[list[int | None] | None, str | None]:
        """([N] GPUs of each node, their type) by the GPUs of a task; (None, None) where the
        variables do not tell both."""
        per_task, device_type = self.gpus("SLURM_GPUS_PER_TASK")
        if per_task is None:
            resources = [
                part for part in self.text("SLURM_TRES_PER_TASK").split(",") if "gpu" in part
            ]
            part_only = Variables({"SLURM_TRES_PER_TASK": ",".join(resources)}, "")
            per_task, device_type = part_only.gpus("SLURM_TRES_PER_TASK")
        tasks = self.tasks_per_node(nodes)
        if per_task is None or tasks is None:
            return None, None
        return [per_task * count for count in tasks], device_type

    def tasks_per_node(self, nodes: int) -> list[int] | None:
        """[N] tasks of each node, from `SLURM_TASKS_PER_NODE=2(x3),1`; None where not told."""
        tasks: list[int] = []
        for part in filter(None, self.text("SLURM_TASKS_PER_NODE").split(",")):
            match = TASKS.fullmatch(part.strip())
            if match is None:
                return None
            times = int(match[2] or 1)
            check_number_of_hosts(times, f"SLURM_TASKS_PER_NODE{self.suffix}")
            tasks += [int(match[1])] * times
        return tasks if len(tasks) == nodes else None


def pbs_job(environment: Environment) -> list[Host] | None:
    """The nodes of a PBS job; None outside of jobs. Torque's file of GPUs counts before a site's
    PBS_NGPUS, and both before the file with one line per process."""
    gpus, nodes = environment.get("PBS_GPUFILE"), environment.get("PBS_NODEFILE")
    if gpus and os.path.isfile(gpus):
        counts: dict[str, int] = {}
        for line in read_foreign_text(gpus).split():
            match = GPU_OF_HOST.fullmatch(line)
            if match is None:
                raise InputError("not usable", where=gpus, got=line, expected="HOST-gpuN")
            counts[match["host"]] = counts.get(match["host"], 0) + 1
        if counts:
            return [
                Host(name, check_number_of_devices(count, gpus)) for name, count in counts.items()
            ]
    if not nodes:
        return None
    hosts = read_hostfile(nodes)
    total = environment.get("PBS_NGPUS", "")
    if total.isdecimal() and int(total[:9]) % len(hosts) == 0 and int(total[:9]):
        # Where a site counts the GPUs of a job, the file has a line for each processor.
        number = check_number_of_devices(int(total[:9]) // len(hosts), "PBS_NGPUS")
        why = "an even part of PBS_NGPUS"
        hosts = [replace(host, devices=number, devices_from=why) for host in hosts]
    return hosts


def lsf_job(environment: Environment) -> list[Host] | None:
    """The nodes of an LSF job, without numbers of devices; None outside of jobs."""
    words = environment.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return None
    names, cores = words[::2], words[1::2]
    usable = len(names) == len(cores) and all(map(str.isdecimal, cores))
    require(usable, "not usable", where="LSB_MCPU_HOSTS", got=" ".join(words), expected="HOST N …")
    check_number_of_hosts(len(names), "LSB_MCPU_HOSTS")
    why = "LSB_MCPU_HOSTS counts cores"
    return [Host(name, devices_from=why) for name in dict.fromkeys(names)]
