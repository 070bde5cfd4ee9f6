"""Shell scripts, called once per node, that start every rank of a plan on its device: of
Megatron-LM, and of hetplan's own runtime.

Megatron-LM gets flags for degrees, micro-batch, uneven stages, recomputation and the distributed
optimizer. Ranks are numbered tensor first, then data, then pipeline (Megatron's default order), and
every process is started with its rank, so that any placement can be kept. What stays the user's:
the model's other flags, data and learning rate. Uneven stages are
`--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` where only the ends
differ, else `--pipeline-model-parallel-layout` (E embedding, t block, L loss; stages separated by
|, chunk by chunk).

hetplan's runtime runs what the frameworks cannot express and reads the plan file itself: ranks are
the plan's own, the devices in use, node by node, so that torchrun's numbering is the plan's. Nodes
may start different numbers of processes.
"""

import shlex

from hetplan.formulations.joint.plan import Plan
from hetplan.runtime.export.grid import RECOMPUTATION, Grid, heading
from hetplan.runtime.export.layout import runs_text

MEGATRON = (
    "Megatron-LM core 0.13 and later: megatron/training/arguments.py at 000c4ac, parallel_state.py"
)
PRECISION_FLAGS = {"fp16": ["--fp16"], "bf16": ["--bf16"], "fp32": []}


def megatron(plan: Plan) -> str:
    """A script that starts a command with Megatron's flags once per rank; raises UnsupportedError
    for what stock Megatron-LM cannot express.

    Every process gets RANK, LOCAL_RANK (its device within the node), WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, which is what torchrun would give it.
    """
    grid = Grid(plan, "Megatron-LM")
    grid.only("schedule", ("1f1b", "interleaved-1f1b"), "the order of passes")
    lost = "sharded gradients and weights; --to deepspeed or torchtitan may take them"
    grid.only("zero", (0, 1), lost)
    grid.only("recomputation", tuple(RECOMPUTATION), "which activations are kept")
    grid.check()
    ranked, places = grid.ranked, dict[int, list[tuple[int, int]]]()
    for rank, device in enumerate(ranked):
        node, local = plan.devices[device].node, local_number(plan, device)
        places.setdefault(node, []).append((local, rank))
    lines = [
        "#!/usr/bin/env bash",
        *heading(plan, "Megatron-LM", MEGATRON),
        "# Behind the script come pretrain_gpt.py and the flags of model, data and optimizer.",
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
    """What decides the parallel run: each flag with its value."""
    plan = grid.plan
    values = {
        "tensor-model-parallel-size": grid.equal_width(),
        "pipeline-model-parallel-size": grid.pipeline,
        "micro-batch-size": grid.micro_batch,
        "global-batch-size": plan.workload.global_batch,
        "num-layers": grid.blocks(),
        "seq-length": plan.workload.sequence,
    }
    pairs = [[f"--{name}", str(value)] for name, value in values.items()]
    pairs += [[flag] for flag in PRECISION_FLAGS[plan.workload.precision]]
    pairs += stage_flags(grid)
    for name, value in RECOMPUTATION[plan.recomputation].items():
        pairs.append([f"--{name.replace('_', '-')}", str(value)])
    if plan.zero == 1:
        pairs.append(["--use-distributed-optimizer"])
    return pairs


def stage_flags(grid: Grid) -> list[list[str]]:
    """How the blocks divide: nothing where that is Megatron's own even cut, which divides what the
    first and the last stage leave evenly over the others."""
    counts = grid.blocks_by_stage()
    if len(counts) == 1:
        return []
    if all(counts) and len(set(counts)) == 1:
        chunked = [["--num-layers-per-virtual-pipeline-stage", str(counts[0])]]
        return chunked if grid.chunks > 1 else []
    first, *middle, last = counts
    if all(counts) and grid.chunks == 1 and len(set(middle)) == 1:
        ends = {"first": first, "last": last}
        return [
            [f"--decoder-{end}-pipeline-num-layers", str(count)]
            for end, count in ends.items()
            if count != middle[0]
        ]
    kinds = f"E{'t' * grid.blocks()}L"
    texts = [runs_text(kinds[first:last]) for first, last in grid.virtual_stages]
    return [["--pipeline-model-parallel-layout", "|".join(texts)]]


def local_number(plan: Plan, device: int) -> int:
    """The device's number within its node."""
    node = plan.devices[device].node
    return sum(other.node == node for other in plan.devices[:device])


def torchrun(plan: Plan) -> str:
    """hetplan's runtime under torchrun; every plan can be expressed."""
    nodes: dict[int, list[str]] = {}
    for device in plan.ranks:
        local = str(local_number(plan, device))
        nodes.setdefault(plan.devices[device].node, []).append(local)
    order = list(nodes)
    lines = [
        "#!/usr/bin/env bash",
        *heading(plan, "hetplan's runtime", "torchrun"),
        f"# On every node n of {', '.join(map(str, order))}: "
        f"NODE=n MASTER_ADDR=<address of node {order[0]}> bash <this file> PLAN.json ...",
        "set -euo pipefail",
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
