"""What the papers' paradigms cost, and what each freedom of a plan is worth, in replayed seconds.

    python -m evidence.speed paradigms DIR [--part K/N] [--only PATTERN]

Rows of a study, in DIR. Workloads: documented ones, clusters of two and three kinds of nodes,
thirty random ones, and all combinations of four models, four clusters and two batches; of those,
the ones of at most sixteen devices. For each of them:

STRATEGY/METHOD   what the planner's strategies propose, replayed; `details_json` has the price that
                  the strategy's own formula gives (`closed_form_seconds`)
within PAPER      the best replay within the paper's own space (`evidence/speed/restricted.py`)
without FREEDOM   the best replay without one freedom of the whole space (`nothing`: with all)
bound             seconds that no chain of stages is below

All searches begin with the plans of the strategies and take equally many steps, with one seed.
Rows that are there are not made again; `--part 0/2` makes every second workload's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from evidence.speed.joint_instances import DOCUMENTED, MIXED, Nodes, cluster
from evidence.speed.restricted import SPACES, WITHOUT, search_within
from hetplan.formulations.joint.annealing import Parameters
from hetplan.formulations.joint.bound.driver import lower_bound
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.evaluate import broken, decision_of, evaluate
from hetplan.instances.generate import SIZES, Draw
from hetplan.instances.library import Instance
from hetplan.planner.candidate import Candidate
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.planner.variants import useful_modes
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.pose import pose
from hetplan.solvers.run import Options, Run
from hetplan.studies.rows import Task, compact_json, digest, keys, task_key, write_row
from hetplan.studies.workers import now, outline

STRATEGIES = ("amp", "astra", "hap", "poplar", "ditto", "dp")
PLAN_SECONDS, HAP_SECONDS = 4.0, 2.0
STEPS, SEARCH_SECONDS = 3600, 20.0
BOUND_SECONDS = 3.0
MOST_DEVICES = 16  # on more, so few steps say little
CROSSED: dict[str, Nodes] = {
    "eight-alike": [(2, 4, "A100-SXM4-40GB", 2400, 100)],
    "two-kinds": [(1, 4, "A100-SXM4-40GB", 2400, 100), (1, 4, "V100-SXM2-32GB", 1200, 25)],
    "slow-network": [(1, 4, "V100-SXM2-32GB", 1200, 10), (2, 2, "T4", 64, 10)],
    "three-kinds": [(1, 2, "RTX-4090", 128, 25), (2, 1, "RTX-3090", 128, 25), (1, 2, "L4", 64, 25)],
}
MODELS, BATCHES = ("gpt2-medium", "bert-large", "llama-1.1b", "gpt2-xl"), (32, 128)


def workloads() -> Iterator[tuple[str, Workload]]:
    """Names and workloads; those that are packaged as instances have their instances' names."""
    for model, batch, (name, nodes) in product(MODELS, BATCHES, CROSSED.items()):
        on = cluster(name, nodes)
        yield f"crossed-{model}-{name}-{batch}", make_workload(model, on, batch)
    for size, count in (("small", 26), ("medium", 4)):
        for seed in range(count):
            drawn = Draw(Random(f"joint-{size}-{seed}"), SIZES[size]).workload()
            yield f"random-joint-{size}-{seed}", drawn
    for name, (model, on_name, batch) in DOCUMENTED.items():
        yield f"joint-{name}", make_workload(model, example_cluster(on_name), batch)
    for name, (model, batch, nodes) in MIXED.items():
        yield f"joint-{name}", make_workload(model, cluster(name, nodes), batch)


class Rows:
    """The rows of one workload, written one by one."""

    def __init__(self, folder: Path, name: str, workload: Workload) -> None:
        self.folder, self.name, self.workload = folder, name, workload
        self.data: Any = pose(workload, ("none", *useful_modes(workload)))
        self.instance = Instance(problem="joint", name=name, origin=__doc__ or "", data=self.data)
        self.digest, self.options = digest(self.instance), Options(threads=1).as_dict()
        self.about = {
            "model": workload.model.name,
            "devices": workload.cluster.counts(),
            "batch": workload.global_batch,
        }

    def key(self, method: str) -> str:
        """Of the method's row."""
        return task_key(self.digest, method, self.options)

    def write(self, method: str, seconds: float, details: dict[str, Any], **more: Any) -> None:
        """One row. seconds: of the solve."""
        document = {"name": self.name, "problem": "joint"}
        task = Task(self.key(method), "paradigms", document, "auto", self.options, None, None, ())
        made = {
            **outline(task, now()),
            "method": method,
            "exact": False,
            "status": "unknown" if more.get("objective") is None else "feasible",
            "stop": "done",
            "objective": None,
            "bound": None,
            "gap": None,
            "message": "",
            "seconds": seconds,
            "solver": "hetplan, evidence/speed/paradigms.py",
            "details_json": compact_json({**self.about, **details}),
        }
        write_row(self.folder, {**made, **more})

    def make(self) -> None:
        """All of them."""
        strategies = make_strategies(STRATEGIES, {"hap": {"seconds": HAP_SECONDS}})
        run = Run(Options(time_limit=PLAN_SECONDS, threads=1))
        candidates = make_plans(self.workload, strategies, run).candidates
        for candidate in candidates:
            self.write_candidate(candidate)
        starts = [
            decision_of(c.plan)
            for c in candidates
            if c.plan and c.fits_memory and not c.plan.program
            and not any(broken(self.data, c.plan))
        ]  # fmt: skip
        parts = {f"within {name}": part for name, part in SPACES.items()}
        parts |= {f"without {name}": part for name, part in WITHOUT.items()}
        for method, part in parts.items():
            run = Run(Options(time_limit=SEARCH_SECONDS, threads=1, seed=0))
            outcome = search_within(self.data, part, run, starts, Parameters(steps=STEPS))
            decision = outcome.decision
            seconds = decision and evaluate(self.data, decision).objective
            dumped = decision and compact_json(decision.model_dump(mode="json"))
            self.write(
                method, run.elapsed, dict(outcome.details),
                objective=seconds, decision_json=dumped, message=outcome.message,
            )  # fmt: skip
        run = Run(Options(time_limit=BOUND_SECONDS, threads=1))
        self.write("bound", run.elapsed, {}, bound=lower_bound(Relaxation(self.data), run))

    def write_candidate(self, candidate: Candidate) -> None:
        """What a strategy proposes; without a figure where it does not fit."""
        plan, fits = candidate.plan, candidate.fits_memory and candidate.replay is not None
        chain = plan is not None and plan.program is None
        dumped = plan and chain and compact_json(decision_of(plan).model_dump(mode="json"))
        self.write(
            candidate.name,
            candidate.solve_seconds,
            {
                "strategy": candidate.strategy,
                "paper": candidate.method.paper,
                "exact": candidate.method.exact,
                "own_status": candidate.status,
                "closed_form_seconds": candidate.closed_form_seconds,
                "schedule": plan and plan.schedule,
            },
            objective=candidate.predicted_seconds if fits else None,
            decision_json=dumped or None,
            message=candidate.message[:500],
        )


def main() -> None:
    """Write the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--only", default="*")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    few = [(n, w) for n, w in workloads() if len(w.cluster.devices) <= MOST_DEVICES]
    few.sort(key=lambda pair: len(pair[1].cluster.devices))
    for at, (name, workload) in enumerate(few):
        if at % parts != part or not fnmatch(name, options.only):
            continue
        rows = Rows(options.folder, name, workload)
        if rows.key("bound") not in keys(options.folder):
            rows.make()
            print(name, flush=True)


if __name__ == "__main__":
    main()
