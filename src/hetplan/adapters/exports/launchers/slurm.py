"""Export for Slurm: a batch script with one job component per group of equal nodes."""

import shlex

from hetplan.adapters.exports.grid import heading
from hetplan.adapters.exports.launchers.start import Start
from hetplan.errors import printable

# The port follows from the job's number, so that two jobs on one node hardly ever share a port. Of
# a heterogeneous job, the first component holds rank 0: `Start.groups` keeps the order of nodes.
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
    """The line of a batch script that gives sbatch an option. sbatch reads quotes as a shell
    does."""
    return f"#SBATCH --{name}={shlex.quote(printable(str(value)))}"


def slurm(start: Start) -> dict[str, str]:
    """File name -> text of a batch script with one task per node. Where nodes differ, the job is a
    heterogeneous one with a component for each of `start.groups`."""
    components = []
    for (kind, ranks), nodes in start.groups.items():
        options = {
            "job-name": start.name,
            "chdir": start.root,
            "nodes": len(nodes),
            "ntasks-per-node": 1,
        }
        if start.gpus:
            options["gpus-per-node"] = ranks
        options |= start.launcher.options
        options |= start.selectors(kind, "constraint")
        components.append("\n".join(directive(name, value) for name, value in options.items()))
    every_node = [node for nodes in start.groups.values() for node in nodes]
    groups = f"--het-group=0-{len(components) - 1} " if len(components) > 1 else ""
    script = BATCH.format(
        comments="\n".join(heading(start.plan, "Slurm", "sbatch")),
        components="\n#SBATCH hetjob\n".join(components),
        groups=groups,
        task=shlex.join(start.task("SLURM_PROCID", every_node, start.folder)),
    )
    return {"job.sbatch": script}
