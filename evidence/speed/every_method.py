"""Every method on packaged instances, for a moment each: do methods contradict one another, and do
they keep their limit?

    python -m evidence.speed every_method [PROBLEM …] [--limit 2] [-o every_method.jsonl]

The file has a row for each instance and method; a stopped run goes on where it was. One thread.
Limit and seconds are those of the processor, on which other work tells little. An instance has a
process of its own; where a method has left a solver running, the next method begins another one.
In the end all rows of the file are checked against each other and against the library's records.
The exit code is 3 where an evaluator refutes a method, two rows of an instance contradict each
other, or a method goes on for more than LATE seconds after its limit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetplan.clock import CLOCK
from hetplan.errors import DisagreementError, UnsupportedError
from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import Entry, find, library
from hetplan.solvers.general import DRIVERS
from hetplan.solvers.native import is_settled
from hetplan.solvers.registry import Family, solve
from hetplan.solvers.run import OPTIMAL_GAP, Options, Run
from hetplan.text import number_text

Row = dict[str, Any]
RECORDED = Path("every_method.jsonl")
WRONG = 3  # exit code
LATE = 2.0  # seconds: HiGHS and CP-SAT are given up one second after the limit
REFUTED, REFUSED = "refuted", "refused"  # statuses of rows without a result


def row_of(one: Family, entry: Entry, method: str, data: Any, limit: float) -> Row:
    """The row of one method on one instance."""
    row: Row = {"problem": one.name, "instance": entry.name, "method": method, "limit": limit}
    run = Run(Options(time_limit=limit, threads=1))
    try:
        result = solve(one, data, method, run)
    except UnsupportedError as error:
        return {**row, "status": REFUSED, "message": str(error)}
    except DisagreementError as error:
        return {**row, "status": REFUTED, "message": str(error)}
    return {
        **row,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "seconds": round(result.seconds, 3),
        "message": result.message,
    }


def solve_each(name: str, methods: Sequence[str], limit: float, output: Path) -> None:
    """Append the rows of an instance's methods to a file, until a method leaves a solver running.

    name: `problem/instance`. It runs in a process of its own.
    """
    CLOCK.count_the_processor()
    entry = find(name)
    assert entry is not None, f"{name} is not packaged"
    one, data = family(entry.problem), entry.load().data
    for method in methods:
        row = row_of(one, entry, method, data, limit)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if not is_settled():
            return


def rows_in(output: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    if not output.exists():
        return []
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def methods_left(entry: Entry, output: Path) -> list[str]:
    """The methods of an instance's family that have no row of it yet."""
    done = {
        row["method"]
        for row in rows_in(output)
        if (row["problem"], row["instance"]) == (entry.problem, entry.name)
    }
    names = (method.name for method in family(entry.problem).methods)
    return [name for name in names if name not in done]


def load_modules(problems: Sequence[str]) -> None:
    """Import what methods need. Forked processes have it then, and need no seconds for it."""
    for problem in problems:
        for method in family(problem).methods:
            method.load()
    for module in set(DRIVERS.values()):
        importlib.import_module(module)


def fill(problems: Sequence[str], limit: float, output: Path) -> None:
    """Append the rows that are missing of all packaged instances of these problems."""
    load_modules(problems)
    context = multiprocessing.get_context("fork")
    entries = [entry for problem in problems for entry in library(problem)]
    for number, entry in enumerate(entries, start=1):
        while left := methods_left(entry, output):
            name = f"{entry.problem}/{entry.name}"
            print(f"{number} of {len(entries)}: {name}", file=sys.stderr, flush=True)
            process = context.Process(target=solve_each, args=(name, left, limit, output))
            process.start()
            process.join()
            if methods_left(entry, output) == left:  # it ended in its first method
                raise RuntimeError(f"{name}: {left[0]} ended the process: {process.exitcode}")


def faults(rows: Sequence[Row]) -> list[str]:
    """A line of text for each row, or pair of rows of one instance, that cannot be right.

    A record of the library counts as a row of its instance.
    """
    lines = []
    by_instance: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_instance.setdefault((row["problem"], row["instance"]), []).append(row)
        name = f"{row['problem']}/{row['instance']}: {row['method']}"
        if row["status"] == REFUTED:
            lines.append(f"{name}: {row['message']}")
        elif row.get("seconds", 0.0) > row["limit"] + LATE:
            lines.append(f"{name}: took {row['seconds']} s with a limit of {row['limit']} s")
    for (problem, instance), found in by_instance.items():
        entry = find(f"{problem}/{instance}")
        if entry is not None and (record := entry.best_known()) is not None:
            known: Row = {"method": "the record", "status": "", "objective": record.objective}
            found = [*found, {**known, "bound": record.bound}]
        lines += [f"{problem}/{instance}: {line}" for line in contradictions(found)]
    return lines


def contradictions(rows: Sequence[Row]) -> list[str]:
    """A line of text for each method whose bound or claim another row of the instance refutes."""
    with_decision = [row for row in rows if row.get("objective") is not None]
    if not with_decision:
        return []
    best = min(with_decision, key=lambda row: float(row["objective"]))
    lines = []
    for row in rows:
        said = f"objective {number_text(best['objective'], 8)} of {best['method']}"
        if row["status"] == "infeasible":
            lines.append(f"{row['method']} calls infeasible what has {said}")
        bound = row.get("bound")
        if bound is not None and bound > best["objective"] * (1 + OPTIMAL_GAP):
            lines.append(f"bound {number_text(bound, 8)} of {row['method']} is above {said}")
    return lines


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="all by default")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds for each method")
    parser.add_argument("-o", "--output", type=Path, default=RECORDED)
    given = parser.parse_args()
    fill(given.problems or list(FAMILIES), given.limit, given.output)
    rows = rows_in(given.output)
    found = faults(rows)
    print(*found, sep="\n")
    print(f"{len(rows)} rows, {len(found)} faults")
    return WRONG if found else 0


if __name__ == "__main__":
    sys.exit(main())
