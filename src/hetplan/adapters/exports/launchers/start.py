"""The ranks that a launcher starts, by one call of `node.sh` on every node.

Nodes with equally many ranks on the same device type are a group: one component of a Slurm job, one
replicated job of a JobSet. Within a group any node may stand for any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Start:
    """A plan to start, and how."""

    plan: Plan
    launcher: Any  # the section `launcher` of a job file: a model of `kinds.KINDS`
    name: str  # of the job, as Kubernetes takes it
    root: str  # the folder where ranks start, absolute
    folder: str  # of the files, seen from there
    words: Sequence[str] = ()  # options of `hetplan run`
    gpus: bool = True  # whether ranks need GPUs

    @property
    def groups(self) -> dict[tuple[str, int], list[int]]:
        """(device type, ranks) -> the nodes with so many ranks on such devices."""
        groups: dict[tuple[str, int], list[int]] = {}
        for node, devices in self.plan.nodes.items():
            kind = self.plan.devices[devices[0]].type
            groups.setdefault((kind, len(devices)), []).append(node)
        return groups

    def selectors(self, kind: str, label: str) -> dict[str, str]:
        """The labels (sbatch: options) by which a scheduler selects nodes of a device type.

        They are those of the job file, else `label` with the type's name. A cluster of one type
        needs none.
        """
        several_types = len({device.type for device in self.plan.devices}) > 1
        default = {label: kind} if several_types else {}
        return dict(self.launcher.types.get(kind, default))

    def task(self, number: str, nodes: Sequence[int], folder: str, begin: str = "") -> list[str]:
        """The command of a scheduler's task.

        number: the shell variable with the place of the task's node in `nodes`. folder: where the
        task finds the files. begin: shell commands that come first.
        """
        choose_node = f"nodes=({' '.join(map(str, nodes))}); export NODE=${{nodes[{number}]}}"
        shell = f'{begin}{choose_node}; exec bash "$@"'
        return [
            *("bash", "-c", shell, "node"),
            *(f"{folder}/node.sh", f"{folder}/plan.json", *self.words),
        ]
