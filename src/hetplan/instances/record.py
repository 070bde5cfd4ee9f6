"""Adding an instance to a library folder together with what a solve found and proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetplan.files import to_json, write_text
from hetplan.instances.envelope import Instance, save_instance
from hetplan.instances.library import BEST_FORMAT, BEST_VERSION
from hetplan.solvers.result import Result


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
        "version": BEST_VERSION,
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
