"""The launchers that a job file may name, and the keys of its section `launcher`."""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, create_model

from hetplan.adapters.exports.launchers.kubernetes import kubernetes
from hetplan.adapters.exports.launchers.ray_train import ray
from hetplan.adapters.exports.launchers.slurm import slurm
from hetplan.adapters.exports.launchers.ssh import ssh
from hetplan.adapters.exports.launchers.start import Start
from hetplan.schema import PLAIN, StrictModel

Keys = dict[str, Any]  # key of a job file -> (type, default), as pydantic's create_model takes them

# A word may stand unquoted in a script, and no host's name is longer than 253 characters. A value
# may hold anything that fits on one line.
Word = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.:@/+-]*$", max_length=253)]
Value = Annotated[str, Field(pattern=PLAIN, max_length=1000)]
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
DeviceType = Annotated[str, Field(max_length=200)]

ENV: Keys = {"env": (dict[Variable, Value], {})}  # environment variables of all ranks
# Device type -> the options of sbatch that select the nodes of that type, or their labels in
# Kubernetes or Ray.
TYPES: Keys = {"types": (dict[DeviceType, dict[Word, Value]], {})}
# Of ssh: [USER@]NAME[:PORT], with an IPv6 address in brackets where a port follows (`ssh`).
USER = "([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?"
ADDRESS = r"(\[[0-9A-Fa-f:.]+\](:[0-9]+)?|[A-Za-z0-9_:][A-Za-z0-9_.:-]*)"
Host = Annotated[str, Field(pattern=f"^{USER}{ADDRESS}$", max_length=253)]
HOSTS: Keys = {"hosts": (list[Host], ...)}  # one host per node, in the cluster's order
OPTIONS: Keys = {"options": (dict[Word, Value], {})}  # options of sbatch for every job component
IMAGE: Keys = {"image": (Word, ...)}  # image of the pods' container


class Launcher(NamedTuple):
    """A program that starts a plan on all nodes, and what hetplan has to write for it."""

    program: str  # the executable that submits the job
    command: str  # the command line that submits the job; {} stands for the folder of the files
    # Returns file name -> text of the files that the launcher needs.
    files_of: Callable[[Start], dict[str, str]]
    keys: Keys  # the keys of its section in a job file, beside `kind` and `env`


def no_files(start: Start) -> dict[str, str]:
    """No files: the launcher needs nothing but the plan."""
    return {}


POD = Launcher("kubectl", "kubectl create -f {}/job.yaml", kubernetes, {**IMAGE, **TYPES})
LAUNCHERS: dict[str, Launcher] = {
    "local": Launcher("hetplan", "hetplan run {}/plan.json", no_files, {}),
    "ssh": Launcher("ssh", "bash {}/submit.sh", ssh, HOSTS),
    "slurm": Launcher("sbatch", "sbatch {}/job.sbatch", slurm, {**OPTIONS, **TYPES}),
    "kubeflow": POD,
    "jobset": POD,
    "ray": Launcher("ray", "ray job submit --working-dir . -- python -P {}/train.py", ray, TYPES),
}


def section_of(kind: str, keys: Keys) -> Any:
    """The pydantic model of a launcher's section in a job file."""
    fields = {"kind": (Literal[kind], ...), **ENV, **keys}
    return create_model(kind, __base__=StrictModel, **fields)


# The union of the sections of all launchers; `kind` tells them apart.
LauncherSection: Any = reduce(
    or_, (section_of(kind, launcher.keys) for kind, launcher in LAUNCHERS.items())
)
