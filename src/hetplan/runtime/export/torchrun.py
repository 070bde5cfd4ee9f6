"""hetplan's own runtime under torchrun: one call per node; it runs what the frameworks cannot
express.

Ranks are the plan's own: the devices in use, node by node, so that torchrun's numbering is the
plan's. Nodes may start different numbers of processes. The runtime reads the plan file itself.
"""

from __future__ import annotations

from hetplan.runtime.export.grid import heading, local_number
from hetplan.runtime.plan import Plan

RUNTIME = "hetplan.runtime"


def export(plan: Plan) -> str:
    """A shell script; every plan can be expressed."""
    nodes: dict[int, list[int]] = {}
    for device in plan.ranks:
        nodes.setdefault(plan.devices[device].node, []).append(local_number(plan, device))
    order = list(nodes)
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {line}" for line in heading(plan, "hetplan's runtime", "torchrun")),
        f"# On every node n of {', '.join(map(str, order))}: "
        f"NODE=n MASTER_ADDR=<address of node {order[0]}> bash <this file> PLAN.json ...",
        "set -euo pipefail",
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        'case "${NODE:?number of this node in the plan}" in',
        *(
            f'  {node}) NODE_RANK={i} PROCESSES={len(local)} DEVICES="{",".join(map(str, local))}" ;;'
            for i, (node, local) in enumerate(nodes.items())
        ),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
        'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$DEVICES}"',
        f'exec torchrun --nnodes {len(order)} --node-rank "$NODE_RANK" --nproc-per-node "$PROCESSES" \\',
        '  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \\',
        f'  -m {RUNTIME} "$@"',
    ]
    return "\n".join(lines) + "\n"
