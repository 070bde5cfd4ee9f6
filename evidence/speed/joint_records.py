"""Takes the best-known records of the packaged `joint` instances again, and keeps what is better.

    python -m evidence.speed joint_records [--seconds S] [--seed N] [--only PATTERN]

Each instance is solved by `auto` in so many counted seconds, beginning with the recorded plan. A
faster plan replaces the recorded one, and a higher bound the recorded bound. Instances whose record
is proven are left out. The problem has whole backward passes, so that no record has split ones.
"""

from __future__ import annotations

import argparse

from evidence.speed.packaging import LIBRARY
from hetplan.files import to_json, write_text
from hetplan.formulations import family
from hetplan.formulations.joint.data import JointDecision
from hetplan.instances.library import BestKnown, Instance, library
from hetplan.solvers.registry import solve
from hetplan.solvers.run import OPTIMAL_GAP, Options, Run

FOLDER = LIBRARY / "joint"
ROUNDING = 1e-9  # a relative difference below which two values count as equal


def taken_again(record: BestKnown, instance: Instance, seconds: float, seed: int) -> BestKnown:
    """The instance's record with the better of its plan and a new one, and with the higher bound.
    seconds: counted seconds of the new run."""
    start = JointDecision.model_validate(record.decision)
    run = Run(Options(threads=1, seed=seed), budget=seconds)
    result = solve(family("joint"), instance.data, "auto", run, starts=[start])
    by = f"{result.method} ({result.solver})"
    changes: dict[str, object] = {}
    faster = record.objective * (1 - ROUNDING)
    if result.decision is not None and result.objective is not None and result.objective < faster:
        decision = result.decision.model_dump(mode="json")
        changes |= {"objective": result.objective, "decision": decision, "found_by": by}
    if result.bound is not None and result.bound > (record.bound or 0.0) * (1 + ROUNDING):
        changes |= {"bound": result.bound, "proved_by": by}
    return record.model_copy(update=changes)


def main() -> None:
    """Take the records of all instances that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="counted seconds for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="*", help="pattern of the instances' names")
    options = parser.parse_args()
    for entry in library("joint", options.only):
        record = entry.best_known()
        if record is None:
            continue
        if record.gap is not None and record.gap <= OPTIMAL_GAP:
            continue
        again = taken_again(record, entry.load(), options.seconds, options.seed)
        if again != record:
            write_text(FOLDER / f"{entry.name}.best.json", to_json(again.model_dump(mode="json")))
        print(
            f"{entry.name}: {record.objective:.6g} s -> {again.objective:.6g} s, "
            f"bound {record.bound} -> {again.bound}",
            flush=True,
        )


if __name__ == "__main__":
    main()
