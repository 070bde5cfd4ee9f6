"""Shell scripts, called once per node, that start every rank of a plan on its device: of
Megatron-LM, and of hetplan's own runtime (`node.sh`, which `launchers` call on all nodes).

Megatron-LM gets flags for degrees, micro-batch, uneven stages, recomputation, sharded states, and
the model's own figures where it is known. Ranks are numbered tensor first, then context, data and
pipeline (Megatron's default order), and every process is started with its rank, so that any
placement can be kept. What stays the user's: data and learning rate. Uneven stages are
`--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` where only the ends
differ, else `--pipeline-model-parallel-layout` (E embedding, t block, L loss; stages separated by
|, chunk by chunk).

hetplan's runtime runs what the frameworks cannot express and reads the plan file itself: ranks are
the plan's own, the devices in use, node by node, so that torchrun's numbering is the plan's. Nodes
may start different numbers of processes. `node.sh` gets the node's number in the plan (NODE) and
the address of rank 0's node (MASTER_ADDR).
"""

import shlex
from collections.abc import Mapping

from hetplan.adapters.exports.grid import Grid, heading
from hetplan.adapters.exports.megatron_arguments import RECOMPUTATION, settings
from hetplan.errors import UnsupportedError, printable, require
from hetplan.interpreter import SAFE_PATH
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.profiling.models.transformer import Transformer
from hetplan.text import comments

MEGATRON = (
    "Megatron-LM core 0.13 and later: megatron/training/arguments.py at 000c4ac, parallel_state.py"
)


# Starts the processes of $PLACES, and ends with the exit code of one that failed.
START_PROCESSES = """\
LOCAL_WORLD_SIZE=$(wc -w <<< "$PLACES"); export LOCAL_WORLD_SIZE
PROCESSES=()
for place in $PLACES; do
  RANK="${place%%:*}" LOCAL_RANK="${place##*:}" python "$@" "${FLAGS[@]}" &
  PROCESSES+=("$!")
done
CODE=0
for process in "${PROCESSES[@]}"; do wait "$process" || CODE=$?; done
exit "$CODE"
"""


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
    return "\n".join([
        "#!/usr/bin/env bash",
        *heading(plan, "Megatron-LM", MEGATRON),
        *megatron_usage(grid),
        "set -euo pipefail",
        f"export WORLD_SIZE={len(grid.devices_by_rank)} MASTER_ADDR "
        'MASTER_PORT="${MASTER_PORT:-29500}"',
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        "FLAGS=(",
        *(f"  {shlex.join(words)}" for words in flags(grid)),
        ")",
        "# rank:device of every process of the node",
        *case_of_node({
            node: f'PLACES="{" ".join(places)}"' for node, places in places_by_node(grid).items()
        }),
        START_PROCESSES,
    ])  # fmt: skip


def megatron_usage(grid: Grid) -> list[str]:
    """Comments that say how the script is called."""
    plan, nodes = grid.plan, places_by_node(grid)
    missing = "data" if grid.shape else "model, data"
    first = plan.devices[grid.devices_by_rank[0]].node
    return comments(
        f"Behind the script come pretrain_gpt.py and the flags of {missing} and optimizer.",
        f"On every node n of {', '.join(map(str, nodes))}: NODE=n "
        f"MASTER_ADDR=<address of node {first}> bash <this file> ...",
    )


def places_by_node(grid: Grid) -> dict[int, list[str]]:
    """Node -> `rank:device` of its processes, the device by its number within the node; both
    ascending."""
    places: dict[int, list[tuple[int, int]]] = {}  # node -> (device, rank)
    for rank, device in enumerate(grid.devices_by_rank):
        node = grid.plan.devices[device].node
        places.setdefault(node, []).append((local_number(grid.plan, device), rank))
    return {
        node: [f"{rank}:{local}" for local, rank in sorted(places[node])] for node in sorted(places)
    }


def flags(grid: Grid) -> list[list[str]]:
    """Megatron's flags of the parallel run and of the model, each with its value."""
    words = []
    for name, value in settings(grid).items():
        flag = f"--{name.replace('_', '-')}"
        words.append([flag] if value is True else [flag, str(value)])
    return words


def local_number(plan: Plan, device: int) -> int:
    """The device's number within its node."""
    return sum(other.node == plan.devices[device].node for other in plan.devices[:device])


def torchrun(
    plan: Plan, shape: Transformer | None = None, *, variables: Mapping[str, str] | None = None
) -> str:
    """A script that starts hetplan's runtime under torchrun; every plan that it runs can be
    expressed. variables: of all ranks. Raises UnsupportedError where devices are numbered
    otherwise than torchrun numbers ranks."""
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
    variables_of_node = {
        node: f'NODE_RANK={i} PROCESSES={len(local)} DEVICES="{",".join(local)}"'
        for i, (node, local) in enumerate(nodes.items())
    }
    return "\n".join([
        "#!/usr/bin/env bash",
        *heading(plan, "hetplan's runtime", "torchrun"),
        *comments(
            f"On every node n of {', '.join(map(str, order))}: "
            f"NODE=n MASTER_ADDR=<address of node {order[0]}> bash <this file> PLAN.json ..."
        ),
        "set -euo pipefail",
        *exports({SAFE_PATH: "1", **(variables or {})}),
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        *case_of_node(variables_of_node),
        'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$DEVICES}"',
        f'exec torchrun --nnodes {len(order)} --node-rank "$NODE_RANK" \\',
        '  --nproc-per-node "$PROCESSES" \\',
        '  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \\',
        '  -m hetplan run "$@"',
        "",
    ])  # fmt: skip


def case_of_node(variables: Mapping[int, str]) -> list[str]:
    """Lines of a shell script that set the variables of the node NODE. variables: node -> what is
    assigned there."""
    return [
        'case "${NODE:?number of this node in the plan}" in',
        *(f"  {node}) {assigned} ;;" for node, assigned in variables.items()),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
    ]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of a shell script that set variables of all ranks."""
    return [f"export {name}={shlex.quote(printable(value))}" for name, value in variables.items()]
