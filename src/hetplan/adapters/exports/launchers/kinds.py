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

# Words stand unquoted in scripts; values stand in a line of their own.
Word = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.:@/+-]*$", max_length=253)]
Value = Annotated[str, Field(pattern=PLAIN, max_length=1000)]
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
DeviceType = Annotated[str, Field(max_length=200)]

ENV: Keys = {"env": (dict[Variable, Value], {})}  # variables of all ranks
# Device type -> options of sbatch, or labels of Kubernetes' or Ray's nodes, that select its nodes.
TYPES: Keys = {"types": (dict[DeviceType, dict[Word, Value]], {})}
HOSTS: Keys = {"hosts": (list[Word], ...)}  # one per node of the cluster, in its order
OPTIONS: Keys = {"options": (dict[Word, Value], {})}  # of sbatch, for every component
IMAGE: Keys = {"image": (Word, ...)}  # of the pods' container


class Launcher(NamedTuple):
    """A way to start a plan on all nodes."""

    program: str  # that submits
    command: str  # that submits; {}: the folder of the files
    files_of: Callable[[Start], dict[str, str]]  # name -> text of the files that it needs
    keys: Keys  # of its section in a job file, beside `kind` and `env`


def no_files(start: Start) -> dict[str, str]:
    """The files of a launcher that needs none but the plan."""
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


# The union of all sections.
KINDS: Any = reduce(or_, (section_of(kind, own.keys) for kind, own in LAUNCHERS.items()))
