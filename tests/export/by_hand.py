"""Plans by hand to export, and what their scripts start."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from hetplan.plans.plan import Plan

BLOCKS = 12


def plan_of(
    stages: list[list[tuple[int, int]]],
    *,
    data: int = 1,
    tensor: int | list[int] = 1,
    count: int = 8,
    samples: int = 2,
    by_stage: bool = True,
    blocks: int = BLOCKS,
    types: list[str] | None = None,
    per_node: int = 4,
    model: str = "some",
    **changes: Any,
) -> Plan:
    """Even replicas; devices numbered stage by stage, or replica by replica; `per_node` devices on
    each node."""
    widths = tensor if isinstance(tensor, list) else [tensor] * len(stages)
    grid: dict[tuple[int, int], list[int]] = {}
    places = [(j, i) for j in range(len(stages)) for i in range(data)]
    total = 0
    for j, i in places if by_stage else sorted(places, key=lambda p: (p[1], p[0])):
        grid[j, i] = list(range(total, total + widths[j]))
        total += widths[j]
    document = {
        "name": "by hand",
        "workload": {
            "model": model,
            "cluster": "some",
            "global_batch": data * count * samples,
            "sequence": 128,
            "precision": "bf16",
            "layers": ["embedding", *(f"block-{b}" for b in range(blocks)), "head"],
        },
        "devices": [
            {"type": (types or ["A100"] * total)[d], "node": d // per_node} for d in range(total)
        ],
        "replicas": [
            {
                "stages": [
                    {"layers": ranges, "devices": [grid[j, i]], "tensor_shares": [1.0] * widths[j]}
                    for j, ranges in enumerate(stages)
                ],
                "micro_batches": [{"count": count, "samples": samples}],
            }
            for i in range(data)
        ],
    }
    return Plan.model_validate(document | changes)


def cut(*counts: int, blocks: int = BLOCKS) -> list[list[tuple[int, int]]]:
    """Stages of that many blocks, embedding and head at the ends."""
    ends = [sum(counts[: i + 1]) + 1 for i in range(len(counts))]
    ends[-1] += 1
    assert sum(counts) == blocks
    return [[(begin, end)] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


UNEVEN = cut(2, 3, 3, 4)


def kinds_of(plan: Plan) -> list[list[str]]:
    """The same of the plan."""
    kinds = ["E", *["t"] * (len(plan.workload.layers) - 2), "L"]
    stages = plan.replicas[0].stages
    chunks = len(stages[0].layers)
    return [kinds[s.layers[c][0] : s.layers[c][1]] for c in range(chunks) for s in stages]


def run_script(text: str, folder: Path, node: int, program: str = "python") -> list[dict[str, Any]]:
    """What every process of a node is started with: its environment and words, by a program that
    only notes them."""
    folder.mkdir(parents=True, exist_ok=True)
    script, fake, log = folder / "run.sh", folder / program, folder / f"log-{node}"
    script.write_text(text)
    fake.write_text(
        '#!/usr/bin/env bash\nprintf "%s\\t%s\\t%s\\t%s\\t%s\\n" '
        '"${RANK-}" "${LOCAL_RANK-}" "${WORLD_SIZE-}" '
        f'"${{LOCAL_WORLD_SIZE-}}" "$(printf "%q " "$@")" >> {shlex.quote(str(log))}\n'
    )
    fake.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "NODE": str(node),
        "MASTER_ADDR": "host",
    }
    ran = subprocess.run(
        ["bash", str(script), "entry.py", "--lr", "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    keys = ("rank", "local", "world", "local_world")
    started = [{**dict(zip(keys, row, strict=False)), "words": shlex.split(row[4])} for row in rows]
    return sorted(started, key=lambda one: one["rank"])
