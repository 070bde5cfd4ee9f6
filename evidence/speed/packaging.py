"""How instances get into the packaged library: each is solved, and written with its record.

The scripts `*_instances` name the instances; their folder is the first argument of the command
line, or that of the library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetplan.files import to_json, write_text
from hetplan.instances.library import BEST_FORMAT, Instance, save_instance
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Result, Run

LIBRARY = Path(__file__).parents[2] / "src" / "hetplan" / "instances" / "library"
SECONDS = 120.0  # for an instance that need not be proven
LONG = 8192  # characters of an instance that is packed


def given_folder(default: Path) -> Path:
    """The folder that the command line names, else the default."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else default


def write_proven(instances: Iterable[Instance], folder: Path) -> None:
    """Write every instance with its optimum into the folder. Infeasible ones are left out. A
    missing proof ends the script with an error."""
    for instance in instances:
        result = solve(instance.family, instance.data, "exact")
        if result.status == "infeasible":
            print(f"{instance.name}: {result.message}; left out")
            continue
        if result.status != "optimal":
            raise SystemExit(f"{instance.name}: {result.status}, expected a proven optimum")
        add_to_library(folder, instance, result)
        print(f"{instance.name}: {result.objective:.6g} s in {result.seconds * 1e3:.1f} ms")


def write_best(instance: Instance, folder: Path, seconds: float = SECONDS) -> None:
    """Write the instance with what is found in so many seconds, into its problem's folder within
    `folder`; one without a decision is left out."""
    run = Run(Options(time_limit=seconds, threads=1))
    result = solve(instance.family, instance.data, "auto", run)
    text = f"{instance.name}: {result.status}"
    if result.decision is None:
        print(f"{text}, left out: {result.message}", flush=True)
        return
    size = len(instance.data.model_dump_json())
    add_to_library(folder / instance.problem, instance, result, packed=size > LONG)
    print(
        f"{text}, {result.objective:.6g} s (gap {result.gap}) in {result.seconds:.3f} s, "
        f"{size} bytes",
        flush=True,
    )


def add_to_library(
    folder: Path, instance: Instance, result: Result[Any], *, note: str = "", packed: bool = False
) -> None:
    """Write `<name>.json` (`.json.gz` when packed) and `<name>.best.json` into `folder`, creating
    it.

    Raises ValueError when the result has no decision: an instance in the library has a best-known
    one.
    """
    if result.decision is None:
        raise ValueError(f"{instance.name}: {result.status}, expected a decision to record")
    by = f"{result.method} ({result.solver})"
    record = {
        "format": BEST_FORMAT,
        "version": 1,
        "problem": instance.problem,
        "instance": instance.name,
        "objective": result.objective,
        "bound": result.bound,
        "found_by": by,
        "proved_by": by if result.bound is not None else None,
        "note": note,
        "decision": result.decision.model_dump(mode="json"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_instance(instance, folder / f"{instance.name}.json{'.gz' if packed else ''}")
    write_text(folder / f"{instance.name}.best.json", to_json(record))
