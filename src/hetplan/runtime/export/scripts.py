"""Shell scripts, called once per node, that start every rank of a plan on its device: of
Megatron-LM, and of hetplan's own runtime.

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
"""

import shlex
from collections.abc import Mapping

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.plan import Plan
from hetplan.profiling.transformer import Transformer
from hetplan.runtime.export.grid import RECOMPUTATION, Grid, heading, settings
from hetplan.runtime.refusals import check_executed
from hetplan.text import grouped

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
    ranked = grid.ranked
    places = grouped(
        (plan.devices[device].node, (local_number(plan, device), rank))
        for rank, device in enumerate(ranked)
    )
    lines = [
        "#!/usr/bin/env bash",
        *heading(plan, "Megatron-LM", MEGATRON),
        f"# Behind the script come pretrain_gpt.py and the flags of "
        f"{'data' if shape else 'model, data'} and optimizer.",
        f"# On every node n of {', '.join(map(str, sorted(places)))}: "
        f"NODE=n MASTER_ADDR=<address of node {plan.devices[ranked[0]].node}> bash <this file> ...",
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
        f"# On every node n of {', '.join(map(str, order))}: "
        f"NODE=n MASTER_ADDR=<address of node {order[0]}> bash <this file> PLAN.json ...",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in (variables or {}).items()),
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
