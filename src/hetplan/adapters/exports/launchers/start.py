"""The start of a plan by a launcher, which calls `node.sh` once on every node.

Nodes with equally many ranks on the same device type form a group: one component of a Slurm job, or
one replicated job of a JobSet. The scheduler may exchange nodes within a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Start:
    """A plan to start, with everything that the files of a launcher say about the job."""

    plan: Plan
    launcher: Any  # the section `launcher` of a job file: a model of `kinds.LauncherSection`
    name: str  # the job's name, as Kubernetes accepts it
    root: str  # absolute path of the working folder of all ranks
    folder: str  # path of the folder of the job's files, relative to `root`
    run_options: Sequence[str] = ()  # options of `hetplan run`
    gpus: bool = True  # whether ranks need GPUs

    @property
    def groups(self) -> dict[tuple[str, int], list[int]]:
        """(device type, ranks of a node) -> the nodes with that type and that number of ranks."""
        groups: dict[tuple[str, int], list[int]] = {}
        for node, devices in self.plan.nodes.items():
            kind = self.plan.devices[devices[0]].type
            groups.setdefault((kind, len(devices)), []).append(node)
        return groups

    def selectors(self, kind: str, label: str) -> dict[str, str]:
        """Label -> value: the labels by which a scheduler selects the nodes of a device type. For
        Slurm, they are options of sbatch.

        kind: the device type. Labels that the job file gives for the type are taken as they are.
        Otherwise nodes are selected by the one label `label`, whose value is the type's name; a
        cluster of one device type needs no label then.
        """
        several_types = len({device.type for device in self.plan.devices}) > 1
        default = {label: kind} if several_types else {}
        return dict(self.launcher.types.get(kind, default))

    def task(
        self, index_variable: str, nodes: Sequence[int], folder: str, begin: str = ""
    ) -> list[str]:
        """The command of a scheduler's task.

        index_variable: name of the shell variable with the index of the task's node in `nodes`.
        folder: path of the folder in which the task finds the job's files. begin: shell commands
        that come first.
        """
        numbers = " ".join(map(str, nodes))
        choose_node = f"nodes=({numbers}); export NODE=${{nodes[{index_variable}]}}"
        shell = f'{begin}{choose_node}; exec bash "$@"'
        arguments = [f"{folder}/node.sh", f"{folder}/plan.json", *self.run_options]
        # bash takes the word behind the commands as its own name, "$0", and the rest as "$@".
        return ["bash", "-c", shell, "node", *arguments]
