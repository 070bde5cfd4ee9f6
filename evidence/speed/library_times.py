"""How long the default method takes on every packaged instance, and side by side with an earlier
run.

    python -m evidence.speed library_times [-o after.json] [--problem hap] [--limit 60]
    python -m evidence.speed library_times --read after.json [--against before.json]

The earlier run is `library_times_before.json` unless another is named.

Every instance is solved by `auto` in one process, on one thread, after the family's first instance
was solved once untimed (that compiles its kernels). An instance that takes less than half a second
is solved three times and its least time counts. The seconds are the process's CPU seconds, which
other work on the machine moves less than a clock's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from hetplan.formulations import FAMILIES
from hetplan.instances.library import Entry, library
from hetplan.solvers.registry import load, solve
from hetplan.solvers.run import Options, Run

# The times before the families were rewritten (November 2026), one Intel Xeon core.
BEFORE = Path(__file__).with_name("library_times_before.json")
REPEATED_BELOW = 0.5
# Times below this are fast enough for a person, whatever their ratio.
ALWAYS_ALLOWED = 0.5


def measure(entry: Entry, limit: float) -> dict[str, Any]:
    """One row: status, objective, bound and the least CPU seconds."""
    instance = entry.load()
    family = load(FAMILIES[entry.problem])
    data = instance.data
    least = math.inf
    for _ in range(3):
        begun = time.process_time()
        result = solve(family, data, "auto", Run(Options(time_limit=limit, threads=1)))
        least = min(least, time.process_time() - begun)
        if least > REPEATED_BELOW:
            break
    return {
        "problem": entry.problem,
        "instance": entry.name,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "seconds": least,
    }


def run(problem: str | None, limit: float) -> list[dict[str, Any]]:
    """All rows, the families one after another."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for entry in library(problem):
        if entry.problem not in seen:
            seen.add(entry.problem)
            measure(entry, limit)
        rows.append(measure(entry, limit))
        print(
            f"{entry.problem} {entry.name} {rows[-1]['status']} {rows[-1]['seconds']:.3f}",
            file=sys.stderr,
        )
    return rows


def side_by_side(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """Per family: proven before and after; of what is proven in both, the sums and the worst ratio
    where it takes over half a second."""
    old = {(row["problem"], row["instance"]): row for row in before}
    families: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for row in after:
        key = (row["problem"], row["instance"])
        if key in old:
            families[row["problem"]].append((old[key], row))
    lines = [
        "family    instances  proven before  after  sum before, s  sum after, s  worst ratio "
        "over 0.5 s"
    ]
    lost: list[str] = []
    for name, pairs in families.items():
        proven = [sum(pair[side]["status"] == "optimal" for pair in pairs) for side in (0, 1)]
        both = [pair for pair in pairs if all(row["status"] == "optimal" for row in pair)]
        sums = [sum(pair[side]["seconds"] for pair in both) for side in (0, 1)]
        ratios = [
            (b["seconds"] / a["seconds"], b["instance"])
            for a, b in both
            if b["seconds"] > ALWAYS_ALLOWED
        ]
        worst = max(ratios, default=None)
        worst_text = "-" if worst is None else f"{worst[0]:.2f} ({worst[1]})"
        lines.append(
            f"{name:9} {len(pairs):9} {proven[0]:14} {proven[1]:6} {sums[0]:14.2f} "
            f"{sums[1]:13.2f}  {worst_text}"
        )
        lost += [f"lost: {name}/{b['instance']} was {a['status']}, is "
                 f"{b['status']}" for a, b in pairs
                 if a["status"] == "optimal" and b["status"] != "optimal"]  # fmt: skip
        lost += [
            f"slower than 3x: {name}/{b['instance']} {a['seconds']:.2f} -> {b['seconds']:.2f} s"
            for a, b in pairs
            if a["status"] == "optimal" and b["seconds"] > max(ALWAYS_ALLOWED, 3 * a["seconds"])
        ]
    return lines + lost


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--against", type=Path, default=BEFORE)
    parser.add_argument("--problem")
    parser.add_argument("--limit", type=float, default=60.0)
    arguments = parser.parse_args()
    rows = (
        json.loads(arguments.read.read_text())
        if arguments.read
        else run(arguments.problem, arguments.limit)
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=0) + "\n")
    if arguments.against:
        print("\n".join(side_by_side(json.loads(arguments.against.read_text()), rows)))


if __name__ == "__main__":
    main()
