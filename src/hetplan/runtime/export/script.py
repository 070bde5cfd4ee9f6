"""Shell scripts: one call per node that starts every rank of a plan on its device.

`started` is for frameworks that take their ranks from the environment. `torchrun` is for hetplan's
own runtime, which runs what the frameworks cannot express and reads the plan file itself: ranks are
the plan's own, the devices in use, node by node, so that torchrun's numbering is the plan's. Nodes
may start different numbers of processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hetplan.runtime.export.grid import heading, local_number
from hetplan.runtime.plan import Plan


def started(
    plan: Plan,
    ranked: Sequence[int],
    comments: Sequence[str],
    command: Sequence[str],
    flags: Sequence[str],
) -> str:
    """A script that starts `command` with `flags` once per rank. ranked: the device of each rank.

    command: shell words as they stand, quoting included. Every process gets RANK, LOCAL_RANK (its
    device within the node), WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which is
    what torchrun would give it.
    """
    places, words = node_places(plan, ranked), " ".join(command)
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {line}" for line in comments),
        f"# On every node n of {', '.join(map(str, places))}: "
        f"NODE=n MASTER_ADDR=<address of node {plan.devices[ranked[0]].node}> bash <this file> ...",
        "set -euo pipefail",
        f'export WORLD_SIZE={len(ranked)} MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}"',
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        "FLAGS=(",
        *(f"  {line}" for line in flag_lines(flags)),
        ")",
        "# rank:device of every process of the node",
        'case "${NODE:?number of this node in the plan}" in',
        *(f'  {node}) PLACES="{" ".join(pairs)}" ;;' for node, pairs in places.items()),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
        'LOCAL_WORLD_SIZE=$(wc -w <<< "$PLACES"); export LOCAL_WORLD_SIZE',
        "PROCESSES=()",
        "for place in $PLACES; do",
        f'  RANK="${{place%%:*}}" LOCAL_RANK="${{place##*:}}" {words} "${{FLAGS[@]}}" &',
        '  PROCESSES+=("$!")',
        "done",
        "CODE=0",
        'for process in "${PROCESSES[@]}"; do wait "$process" || CODE=$?; done',
        'exit "$CODE"',
    ]
    return "\n".join(lines) + "\n"


def node_places(plan: Plan, ranked: Sequence[int]) -> dict[int, list[str]]:
    """Node -> `rank:local device` of its processes, by device."""
    places: dict[int, list[tuple[int, int]]] = {}
    for rank, device in enumerate(ranked):
        places.setdefault(plan.devices[device].node, []).append((local_number(plan, device), rank))
    return {
        node: [f"{rank}:{local}" for local, rank in sorted(pairs)]
        for node, pairs in sorted(places.items())
    }


def flag_lines(flags: Sequence[str]) -> list[str]:
    """A flag with its value per line, quoted for the shell."""
    lines: list[str] = []
    for word in flags:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def torchrun(plan: Plan) -> str:
    """hetplan's runtime under torchrun; every plan can be expressed."""
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
            f"  {node}) NODE_RANK={i} PROCESSES={len(local)} "
            f'DEVICES="{",".join(map(str, local))}" ;;'
            for i, (node, local) in enumerate(nodes.items())
        ),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
        'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$DEVICES}"',
        f'exec torchrun --nnodes {len(order)} --node-rank "$NODE_RANK" \\',
        '  --nproc-per-node "$PROCESSES" \\',
        '  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \\',
        '  -m hetplan.runtime "$@"',
    ]
    return "\n".join(lines) + "\n"
