"""How many plans a second the replay prices, everything included: from the plan to its seconds.

    python -m evidence.speed replays

16 devices of examples/amp-mixed.yaml, 32 micro-batches, one core. Prints a Markdown table.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import Replayer

CLUSTER = Path(__file__).parents[2] / "examples" / "amp-mixed.yaml"
SECONDS = 1.0  # of repeats of each plan


def plan(
    workload: Workload, replicas: int, stages: int, chunks: int = 1, tensor: int = 1, **more: Any
) -> Plan:
    """Even cuts, devices in their order, 32 micro-batches of one sample."""
    layers, parts = len(workload.profile.layers), stages * chunks
    cuts = list(pairwise(layers * p // parts for p in range(parts + 1)))
    made = []
    for r in range(replicas):
        first = [tensor * (r * stages + s) for s in range(stages)]
        made.append(
            {
                "stages": [
                    {
                        "layers": cuts[s::stages],
                        "devices": [list(range(first[s], first[s] + tensor))],
                        "tensor_shares": [1.0] * tensor,
                    }
                    for s in range(stages)
                ],
                "micro_batches": [{"count": 32 // replicas, "samples": 1}],
            }
        )
    return new_plan(workload, made, **more)


def replays_per_second(replayer: Replayer, plan: Plan) -> float:
    """Of one plan, asked again and again; by the process's own time."""
    replayer.seconds(plan)
    count, begin = 0, time.process_time()
    while time.process_time() < begin + SECONDS:
        replayer.seconds(plan)
        count += 1
    return count / (time.process_time() - begin)


def main() -> None:
    """Print the table."""
    workload = make_workload("gpt2-medium", CLUSTER, 32)
    replayer = Replayer(workload)
    plans = {
        "16 stages, 1F1B": plan(workload, 1, 16),
        "16 stages, GPipe": plan(workload, 1, 16, schedule="gpipe"),
        "2 replicas of 8 stages": plan(workload, 2, 8),
        "2 replicas of 8 stages, ZeRO 1": plan(workload, 2, 8, zero=1),
        "2 replicas of 4 tensor pairs": plan(workload, 2, 4, tensor=2),
        "2 replicas of 8 stages, interleaved, 2 chunks": plan(
            workload, 2, 8, 2, schedule="interleaved-1f1b"
        ),
        "16 replicas": plan(workload, 16, 1),
    }
    print("| plan | tasks | replays a second |\n|---|---:|---:|")
    for name, one in plans.items():
        count = len(replayer.stages.tasks(one))
        print(f"| {name} | {count} | {replays_per_second(replayer, one):,.0f} |")


if __name__ == "__main__":
    main()
