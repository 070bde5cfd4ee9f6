"""What split backward passes and orders of passes of their own save in a whole plan.

    python -m evidence.speed schedules [--case a]… [FILE.md|FILE.json]

On each of the four workloads of `joint`, `hetplan plan` with all its strategies, within the memory
of the devices: the fastest plan with whole backward passes (GPipe, 1F1B, interleaved 1F1B), and the
fastest plan of all with its schedule; the bound of plans with whole passes, and that of all orders
of passes with its gap to the fastest plan. "Order alone" says how much could be saved at most by
another order of passes, split or not, on the stages of the plan with whole passes and in the memory
of its devices.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from evidence.speed.harness import markdown, save
from evidence.speed.joint import NAMES, workload_of
from hetplan.formulations.joint.schedule.bounds import lower_bound
from hetplan.formulations.joint.schedule.pose import pose
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import StageReplayer
from hetplan.solvers.run import relative_gap


def row_of(case: str, planning: Planning) -> dict[str, Any]:
    """The row of one workload. None stands for what is not known."""
    fitting = [c for c in planning.candidates if c.fits_memory and c.plan is not None]
    whole = next(c for c in fitting if c.plan is not None and not c.plan.splits_backward)
    best = fitting[0]
    assert whole.plan is not None and best.plan is not None, "they have one"
    return {
        "workload": case,
        "whole": whole.predicted_seconds,
        "whole_name": whole.name,
        "best": best.predicted_seconds,
        "best_name": best.name,
        "schedule": best.plan.schedule,
        "under_1f1b": best.details.get("seconds_under_1f1b"),
        "saved": 1 - (best.predicted_seconds or 0.0) / (whole.predicted_seconds or 1.0),
        "bound_whole": planning.bound_whole,
        "bound": planning.bound,
        "gap": relative_gap(best.predicted_seconds, planning.bound),
        "order_alone": relative_gap(
            whole.predicted_seconds, least_of_any_order(whole.plan, planning.workload)
        ),
    }


def least_of_any_order(plan: Plan, workload: Workload) -> float | None:
    """Seconds that no order of passes on a plan's stages is below in the memory of its devices;
    None where its backward passes cannot be split."""
    if plan.program is not None or plan.recomputation not in ("none", "selective"):
        return None
    problems = pose(plan, StageReplayer(workload))
    return max(lower_bound(problem) for problem in set(problems))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""

    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g} s"

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.1%}"

    header = [
        "workload", "whole passes", "bound", "fastest", "schedule", "saved", "bound of any order",
        "gap", "order alone",
    ]  # fmt: skip
    lines = [
        [
            row["workload"],
            seconds(row["whole"]),
            seconds(row["bound_whole"]),
            seconds(row["best"]),
            row["schedule"],
            percent(row["saved"]),
            seconds(row["bound"]),
            percent(row["gap"]),
            percent(row["order_alone"]),
        ]
        for row in rows
    ]
    return markdown("Plans with split passes", header, lines)


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=[*NAMES])
    parser.add_argument("file", nargs="?")
    options = parser.parse_args()
    rows = []
    for case in options.case or [*NAMES]:
        model, batch, on = workload_of(case)
        rows.append(row_of(case, make_plans(make_workload(model, on, batch))))
        print(json.dumps(rows[-1]), flush=True)
    save(options.file, [table(rows)], rows)


if __name__ == "__main__":
    main()
