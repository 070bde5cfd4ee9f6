"""Uneven plans rehearsed on virtual devices: `python rehearsals.py FILE [NAMES…]` writes what was
measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fakes.workloads import small
from hetplan.profiling.workload import Workload
from hetplan.runtime.job import Job, Measured
from hetplan.runtime.launch import launch
from hetplan.runtime.rehearsals import PLANS, plan
from hetplan.runtime.virtual import Rehearsal

Document = dict[str, Any]


def rehearse(name: str, workload: Workload, steps: int, scale: float) -> Document:
    """Predicted and measured seconds of one plan."""
    made = plan(name, workload)
    rehearsal = Rehearsal.of(made, workload, scale)
    job = Job(plan=made, steps=steps, rehearsal=rehearsal, virtual=True)
    return Measured(job, launch(job)).document()


def main(file: Path, names: list[str]) -> None:
    """All of them, or those named."""
    workload = small()
    found = {name: rehearse(name, workload, steps=4, scale=8.0) for name in names or PLANS}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
