"""Exports plans as shell scripts that start every rank of a plan on its device. The user calls the
script once on each node.

`megatron` starts Megatron-LM with flags for degrees, micro-batch, uneven stages, recomputation,
sharded states, and the model's figures where the model is known. The user adds the flags of data
and learning rate. Ranks are numbered tensor first, then context, data and pipeline, which is
Megatron's default order. The script gives every process its rank, so that any placement can be
kept.

`torchrun` starts hetplan's runtime, which reads the plan file itself and also runs plans that the
frameworks cannot express. The plan numbers the devices in use node by node, and torchrun numbers
ranks in the same way. Nodes may start different numbers of processes. The launchers of `launchers`
save this script as `node.sh` and call it on all nodes. It takes the node's number in the plan from
the variable NODE, and the address of rank 0's node from MASTER_ADDR.
"""

import shlex
from collections.abc import Mapping

from hetplan.adapters.exports.grid import Grid, heading
from hetplan.adapters.exports.megatron_arguments import (
    FSDP_STRATEGIES,
    RECOMPUTATION,
    command_line_arguments,
    command_line_value,
    remarks,
    settings,
)
from hetplan.errors import UnsupportedError, printable, require
from hetplan.interpreter import SAFE_PATH
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_executed
from hetplan.profiling.models.transformer import Transformer
from hetplan.text import comments

MEGATRON = "Megatron-LM core 0.16: megatron/training/arguments.py, transformer_config.py"

# torchrun's own default port; MASTER_PORT gives another one.
PORT = 29500
# Starts a process for each `rank:device` in $PLACES. Ends with the exit code of a process that
# failed, else with 0.
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


def megatron(plan: Plan, shape: Transformer | None = None, *, model: bool = True) -> str:
    """A script that starts a command with Megatron's flags once per rank.

    Every process gets the variables that torchrun would give it: RANK, LOCAL_RANK (its device
    within the node), WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. shape: the model's
    shape; None where it is unknown. model: whether to write the model's flags where it is known.
    Raises UnsupportedError for a plan that stock Megatron-LM cannot express.
    """
    grid = Grid(plan, "Megatron-LM", shape, model=model)
    grid.only("schedule", ("1f1b", "interleaved-1f1b"), "the order of passes")
    grid.only("recomputation", tuple(RECOMPUTATION), "which activations are kept")
    grid.check()
    assignments = {
        node: f'PLACES="{" ".join(places)}"' for node, places in places_by_node(grid).items()
    }
    return "\n".join([
        "#!/usr/bin/env bash",
        *heading(plan, "Megatron-LM", MEGATRON),
        *megatron_usage(grid),
        "set -euo pipefail",
        f"export WORLD_SIZE={len(grid.devices_by_rank)} MASTER_ADDR "
        f'MASTER_PORT="${{MASTER_PORT:-{PORT}}}"',
        *connections(grid),
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        "FLAGS=(",
        *(f"  {shlex.join(words)}" for words in flags(grid)),
        ")",
        "# rank:device of every process of the node",
        *case_of_node(assignments),
        START_PROCESSES,
    ])  # fmt: skip


def connections(grid: Grid) -> list[str]:
    """The line that exports CUDA_DEVICE_MAX_CONNECTIONS, without which Megatron-LM refuses tensor
    and context parallelism on devices older than Blackwell. Its FSDP refuses the value 1."""
    degrees = grid.plan.degrees or Degrees()
    tensor = grid.widths[0]  # all stages have this tensor degree
    divided = tensor > 1 or degrees.context > 1
    if not divided or grid.plan.zero in FSDP_STRATEGIES:
        return []
    return ['export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"']


def megatron_usage(grid: Grid) -> list[str]:
    """Comment lines of Megatron-LM's script that say how to call it."""
    plan, nodes = grid.plan, places_by_node(grid)
    missing = "data" if grid.writes_model else "model, data"
    first = plan.devices[grid.devices_by_rank[0]].node
    return comments(
        f"Behind the script come pretrain_gpt.py and the flags of {missing} and optimizer.",
        f"On every node n of {', '.join(map(str, nodes))}: NODE=n "
        f"MASTER_ADDR=<address of node {first}> bash <this file> ...",
        *remarks(grid),
    )


def places_by_node(grid: Grid) -> dict[int, list[str]]:
    """Node -> one text `rank:device` for each of the node's processes.

    `device` is the device's number within its node. Nodes ascend, and devices within a node.
    """
    places: dict[int, list[tuple[int, int]]] = {}  # node -> (number within the node, rank)
    for rank, device in enumerate(grid.devices_by_rank):
        node = grid.plan.devices[device].node
        places.setdefault(node, []).append((local_number(grid.plan, device), rank))
    texts = {}
    for node in sorted(places):
        texts[node] = [f"{rank}:{local}" for local, rank in sorted(places[node])]
    return texts


def flags(grid: Grid) -> list[list[str]]:
    """Megatron's flags for the plan and its model: each a list of the flag and, unless the flag
    takes none, its value."""
    words = []
    for name, value in command_line_arguments(settings(grid)).items():
        flag = f"--{name.replace('_', '-')}"
        words.append([flag] if value is True else [flag, command_line_value(value)])
    return words


def local_number(plan: Plan, device: int) -> int:
    """The device's number within its node."""
    return sum(other.node == plan.devices[device].node for other in plan.devices[:device])


def torchrun(
    plan: Plan,
    shape: Transformer | None = None,
    *,
    model: bool = True,
    variables: Mapping[str, str] | None = None,
) -> str:
    """A script that starts hetplan's runtime under torchrun.

    shape, model: parameters of every exporter, which this one does not need. variables: environment
    variables of all ranks. Raises UnsupportedError for a plan that the runtime cannot run, and for
    one whose devices are numbered otherwise than torchrun numbers ranks.
    """
    check_executed(plan)
    nodes = {
        node: [str(local_number(plan, device)) for device in devices]
        for node, devices in plan.nodes.items()
    }
    devices_by_node = [device for devices in plan.nodes.values() for device in devices]
    require(
        devices_by_node == list(plan.ranks),
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
        # torch's warnings about names of hosts help nobody
        *exports({SAFE_PATH: "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **(variables or {})}),
        ': "${MASTER_ADDR:?address of the node of rank 0}"',
        *case_of_node(variables_of_node),
        'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$DEVICES}"',
        f'exec torchrun --nnodes {len(order)} --node-rank "$NODE_RANK" \\',
        '  --nproc-per-node "$PROCESSES" \\',
        f'  --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-{PORT}}}" \\',
        '  -m hetplan run "$@"',
        "",
    ])  # fmt: skip


def case_of_node(variables: Mapping[int, str]) -> list[str]:
    """Lines of a shell script that set variables according to the number in NODE.

    variables: node -> the assignments of its variables, in the shell's syntax.
    """
    return [
        'case "${NODE:?number of this node in the plan}" in',
        *(f"  {node}) {assigned} ;;" for node, assigned in variables.items()),
        '  *) echo "node $NODE has no part in this plan" >&2; exit 2 ;;',
        "esac",
    ]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of a shell script that export variables to every process that the script starts."""
    return [f"export {name}={shlex.quote(printable(value))}" for name, value in variables.items()]
