"""What padding costs and what packing and balance gain on three published distributions of lengths.

    python -m evidence.speed lengths [--model llama2-7b] [--cluster department] [--seconds 120]
                                     [--global-batch 64] [FILE.md|FILE.json]

For each distribution of `planner/lengths/published.yaml` and each strategy (pipelines by AMP,
unequal data parallelism by Poplar) the plan that `hetplan plan --lengths` chooses, and its replayed
seconds on drawn samples: padded to the longest of a micro-batch, packed in the order drawn, and
balanced. `all so long` is the iteration that the plan was made for.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from evidence.speed.harness import machine, markdown, save
from hetplan.planner.lengths.drawn import QUANTILE, LengthsAnswer, plan_lengths
from hetplan.planner.lengths.samples import published
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.profiling.hardware.cluster import Cluster, open_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Options, Run
from hetplan.text import percent_text, seconds_text, signed_percent_text

STRATEGIES = ("amp", "poplar")


def workloads_at(model: str, cluster: Cluster, global_batch: int, tokens: int) -> list[Workload]:
    """The workload whose samples all have so many tokens."""
    return [make_workload(model, cluster, global_batch, sequence=tokens)]


def answer_of(name: str, strategy: str, options: argparse.Namespace) -> LengthsAnswer:
    """The plans of one strategy for one distribution."""
    at = partial(workloads_at, options.model, open_cluster(options.cluster), options.global_batch)

    def planning_at(tokens: int, run: Run) -> Planning:
        return make_plans(at(tokens), make_strategies([strategy]), run)

    run = Run(Options(time_limit=options.seconds, threads=2))
    return plan_lengths(published()[name], at, planning_at, run)


def row_of(name: str, strategy: str, answer: LengthsAnswer) -> dict[str, Any]:
    """One row: the chosen plan on drawn lengths."""
    told = answer.document()
    chosen = None if answer.chosen is None else told["plans"][answer.chosen]
    return {
        "lengths": name,
        "strategy": strategy,
        "mean": told["mean"],
        "longest": told["longest"],
        "plan": None if chosen is None else chosen["for"],
        "all_so_long_seconds": None if chosen is None else chosen["predicted_seconds"],
        "drawn": None if chosen is None else chosen["drawn"],
        "seed": answer.seed,
        "machine": machine(),
    }


def cells(row: dict[str, Any]) -> list[object]:
    """The cells of a row of the table."""
    names = [row["lengths"], row["strategy"], row["plan"] or "none fits"]
    drawn = row["drawn"]
    if drawn is None:
        return [*names, *[None] * 7]
    padded, packed, balanced = (drawn[way] for way in ("padded", "packed", "balanced"))

    def change(before: float | None, after: float | None) -> str | None:
        if before is None or after is None:
            return None
        return signed_percent_text(after / before - 1)

    padding = padded["tokens"] and percent_text(1 - balanced["tokens"] / padded["tokens"])
    seconds = []
    for way in (padded, packed, balanced):
        fits = way["seconds"] is not None
        seconds.append(seconds_text(way["seconds"]) if fits else "does not fit")
    return [
        *names,
        seconds_text(row["all_so_long_seconds"]),
        padding,
        *seconds,
        change(padded["seconds"], packed["seconds"]),
        change(packed["seconds"], balanced["seconds"]),
    ]


HEADER = [
    "lengths", "strategy", "plan for the", "all so long", "padding", "padded", "packed",
    "balanced", "by packing", "by balance",
]  # fmt: skip


def sources() -> str:
    """The table of the distributions, with their sources."""
    header = ["lengths", "tokens, mean", f"{QUANTILE:.0%} at most", "longest", "source"]
    lines = [
        [name, f"{one.mean:.0f}", one.quantile(QUANTILE), one.longest, one.source]
        for name, one in published().items()
    ]
    return markdown("Published lengths", header, lines)


def main() -> None:
    """Plan, replay and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--cluster", default="department")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("file", nargs="?")
    options = parser.parse_args()
    rows = []
    for name in published():
        for strategy in STRATEGIES:
            rows.append(row_of(name, strategy, answer_of(name, strategy, options)))
            print(json.dumps(rows[-1]), flush=True)
    title = f"Samples of unequal length: {options.model} on {options.cluster}"
    replayed = markdown(title, HEADER, [cells(row) for row in rows])
    save(options.file, [sources(), replayed], rows)


if __name__ == "__main__":
    main()
