"""What each exact method proves on some packaged instances of every family, side by side.

    python -m evidence.speed proofs [--problem hap] [--limit 60] [--count 6] [-o proofs.json]
    python -m evidence.speed proofs --instance joint/joint-desk-gpt2-large [...]

Of each family, `--count` instances are taken, evenly over the order of the seconds that the method
`auto` needs (`library_times_after.json`), the first and the last included. `--instance` adds the
rows of single instances, or renews them, and keeps all others. Every method that proves optima
solves each of them on one thread, in a process of its own that has solved the family's first
instance once before. Limits and seconds are those of the processor, on which other work tells
little. `docs/proofs_table.py` writes the rows of `proofs.json` as the
tables of docs/benchmarks.md. The exit code is 3 where two methods contradict each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.speed.harness import measured
from hetplan.clock import CLOCK
from hetplan.errors import UnsupportedError
from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import find, library
from hetplan.solvers.registry import contradictions, solve
from hetplan.solvers.run import Options, Result, Run

RECORDED = Path(__file__).with_name("proofs.json")
TIMES = Path(__file__).with_name("library_times_after.json")
DISAGREEMENT = 3
LOADED = 1.0  # seconds of the solve that comes before the timed one
SKIPPED = "auto"  # another name for one of the other methods


def chosen(problem: str, count: int) -> list[str]:
    """The names of `count` instances of a family, evenly over the order of their seconds."""
    rows = [row for row in json.loads(TIMES.read_text()) if row["problem"] == problem]
    rows.sort(key=lambda row: row["seconds"])
    names = [row["instance"] for row in rows]
    if not names:  # no seconds are recorded of `joint`: its instances in the library's order
        names = [entry.name for entry in library(problem)]
    steps = max(1, count - 1)
    places = sorted({round(k * (len(names) - 1) / steps) for k in range(count)})
    return [names[place] for place in places]


def row_of(problem: str, instance: str, result: Result[Any]) -> dict[str, Any]:
    """One row of the table."""
    return {
        "problem": problem,
        "instance": instance,
        "method": result.method,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "seconds": round(result.seconds, 3),
        "clock": "processor",  # rows without it are in seconds of the wall
    }


def attempt(problem: str, instance: str, method: str, limit: float) -> Result[Any] | None:
    """The result of a method on a packaged instance; None where it does not take the instance.

    limit: seconds of this process's processor.
    """
    CLOCK.count_the_processor()
    entry = find(f"{problem}/{instance}")
    assert entry is not None, f"{problem}/{instance} is not packaged"
    run = Run(Options(time_limit=limit, threads=1))
    try:
        return solve(family(problem), entry.load().data, method, run)
    except UnsupportedError:
        return None


def measure(
    problem: str, names: Sequence[str], limit: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows of instances of a family, contradictions between its methods)."""
    exact = [method.name for method in family(problem).methods if method.exact]
    first = chosen(problem, 1)[0]
    rows, wrong = [], []
    for name in names:
        results = []
        for method in exact:
            if method == SKIPPED:
                continue
            # the first solve compiles kernels and loads libraries
            warm_up = (problem, first, method, LOADED)
            result = measured(attempt, problem, name, method, limit, warm_up=warm_up).value
            if result is None:
                continue
            results.append(result)
            rows.append(row_of(problem, name, result))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        wrong += [f"{problem}/{name}: {line}" for line in contradictions(results)]
    return rows, wrong


def named(instances: Sequence[str]) -> dict[str, list[str]]:
    """Problem -> names of its instances, from texts such as `hap/hap-chain-2x2`."""
    names: dict[str, list[str]] = {}
    for instance in instances:
        problem, _, name = instance.partition("/")
        names.setdefault(problem, []).append(name)
    return names


def replaced(
    row: Mapping[str, Any], problem: str, names: Sequence[str], whole_family: bool
) -> bool:
    """Whether new rows of these instances take the place of a kept row: where the whole family was
    measured, of all its rows."""
    return row["problem"] == problem and (whole_family or row["instance"] in names)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", choices=list(FAMILIES))
    parser.add_argument(
        "--instance", action="append", metavar="PROBLEM/NAME", help="this one alone; may repeat"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each method")
    parser.add_argument("--count", type=int, default=6, help="instances of each family")
    parser.add_argument("-o", "--output", type=Path, default=RECORDED)
    arguments = parser.parse_args()
    problems = [arguments.problem] if arguments.problem else list(FAMILIES)
    if arguments.instance:
        taken = named(arguments.instance)
    else:
        taken = {problem: chosen(problem, arguments.count) for problem in problems}
    kept: list[dict[str, Any]] = []
    if arguments.output.exists():
        kept = json.loads(arguments.output.read_text(encoding="utf-8"))["rows"]
    wrong: list[str] = []
    for problem, names in taken.items():
        rows, contradicting = measure(problem, names, arguments.limit)
        wrong += contradicting
        whole_family = not arguments.instance
        kept = [row for row in kept if not replaced(row, problem, names, whole_family)] + rows
        kept.sort(key=lambda row: list(FAMILIES).index(row["problem"]))
        document = {"limit": arguments.limit, "rows": kept}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(*wrong, sep="\n")
    return DISAGREEMENT if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
