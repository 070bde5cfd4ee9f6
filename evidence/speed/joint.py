"""How good plans are by their replays: the papers' winner, the local search, and the bound.

    python -m evidence.speed joint [--case a]… [--seconds 10] [--seconds 60] [--seeds 5]
    python -m evidence.speed joint --seeds 0 [--case a]… [--bound 60]…
    python -m evidence.speed joint --ladder 60 [--case a]…
    python -m evidence.speed joint --exact 10

Four workloads, and two large ones where they are named: e, 64 GPUs of four types; f, 1024 of two.
The search begins with what the papers' strategies propose. Prints a Markdown table: replayed
milliseconds of the papers' best plan; of the search's, as the median over seeds, after each number
of seconds, with the target; and of the best plan that a search by hand had found on the simulator
of then (its ports were fewer). In brackets stand the same plans where senders block until their
message is sent. Seconds are those of the processor: the machine may be shared. Without seeds it
prints the bounds alone, after each number of seconds, beside the best plan known and the bound of
an earlier version, with the seconds of the clock and of the processor that it took; `--ladder`: the
ladder of bounds that `exact` tells after so many counted seconds; `--exact`: how long `exact` takes
on so many random instances of 4 devices and 10 to 12 layers, as the tests draw them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from evidence.speed.joint_instances import DOCUMENTED, MIXED, Nodes, cluster
from hetplan.formulations.joint import exact
from hetplan.formulations.joint.bound.driver import lower_bound
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import decision_of, evaluate, plan_of
from hetplan.formulations.joint.search import search
from hetplan.planner import STRATEGIES
from hetplan.planner.library import plan
from hetplan.planner.proofs import rung_text
from hetplan.planner.variants import useful_modes
from hetplan.plans.ladder import Rung
from hetplan.profiling.hardware.cluster import Cluster, example_cluster
from hetplan.profiling.workload import make_workload
from hetplan.replays.chains import ChainReplayer, Settings
from hetplan.replays.pose import pose
from hetplan.solvers.run import Options, Progress, Run, Watcher

# Model, global batch, nodes.
LARGE: dict[str, tuple[str, int, Nodes]] = {
    "e": (
        "llama2-70b", 512,
        [(2, 8, "H100-SXM5-80GB", 7200, 400), (2, 8, "A100-SXM4-80GB", 4800, 200),
         (2, 8, "A100-SXM4-40GB", 4800, 200), (2, 8, "V100-SXM2-32GB", 1200, 100)],
    ),
    "f": (
        "llama2-70b", 2048,
        [(64, 8, "H100-SXM5-80GB", 7200, 400), (64, 8, "A100-SXM4-80GB", 4800, 200)],
    ),
}  # fmt: skip
# The cases' names among `MIXED`; the first is of AMP's cluster of 16 devices.
NAMES = {
    "a": "amp", "b": "two-kinds-gpt2-xl", "c": "two-kinds-llama2-7b", "d": "desk-gpt2-large",
}  # fmt: skip
# Milliseconds: to be reached after 10 and 60 seconds; the latter were found by hand.
TARGETS = {"a": (215, 203.9), "b": (960, 908), "c": (11_900, 11_660), "d": (985, 958.7)}
PAPERS_SECONDS = 60.0  # of all methods of the planner together
# Milliseconds: the best plan known, and the bound after 60 processor seconds before there was a
# programme over nodes (2026-11-29, two busy cores of an AMD EPYC).
KNOWN = {"a": (270.3, 114.6), "b": (915.0, 649.5), "c": (12_045.0, 9_178.1), "d": (977.8, 919.6)}


class ProcessorRun(Run):
    """A run whose clock is the processor's."""

    begun = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of this process since `begun`."""
        return time.process_time() - self.begun


def processor_run(seconds: float, seed: int = 0, watch: Watcher | None = None) -> Run:
    """One that ends after so many seconds of the processor."""
    run = ProcessorRun(Options(time_limit=seconds, seed=seed), watch)
    run.begun = time.process_time()
    return run


def workload_of(case: str) -> tuple[str, int, Cluster]:
    """Model, global batch, cluster."""
    if case == "a":
        model, example, batch = DOCUMENTED[NAMES[case]]
        return model, batch, example_cluster(example)
    model, batch, nodes = LARGE[case] if case in LARGE else MIXED[NAMES[case]]
    return model, batch, cluster(case, nodes)


def milliseconds(data: JointData, decision: JointDecision) -> str:
    """Of a plan, and in brackets of the same where senders block."""
    blocking = ChainReplayer.of(data, Settings(sends="blocking")).seconds(plan_of(data, decision))
    return f"{1e3 * seconds_of(data, decision):,.1f} ({1e3 * blocking:,.1f})"


def seconds_of(data: JointData, decision: JointDecision) -> float:
    """Replayed seconds; infinite where the plan does not fit."""
    objective = evaluate(data, decision).objective
    return math.inf if objective is None else objective


def bounds_after(data: JointData, limits: list[float], enough: float = math.inf) -> list[float]:
    """Of one run, after each number of seconds. enough: seconds of a plan that is known."""
    seen: list[Progress] = []
    last = lower_bound(Relaxation(data), processor_run(limits[-1], watch=seen.append), enough)
    known = [max(p.bound or 0.0 for p in seen if p.seconds <= limit) for limit in limits[:-1]]
    return [*known, last]


def ladder_rows(case: str, seconds: float) -> Iterator[list[str]]:
    """A line for each rung of the ladder of bounds that `exact` tells after so many counted
    seconds, beginning with what the papers' strategies propose."""
    model, batch, on = workload_of(case)
    workload = make_workload(model, on, batch)
    data = pose(workload, ("none", *useful_modes(workload)))
    run = Run(Options(), budget=seconds)
    outcome = exact.solve(data, run, starts=papers_plans(model, batch, on))
    rungs: Any = outcome.details["ladder"]
    for rung in map(Rung.model_validate, rungs):
        assert rung.best is not None, case
        bound, best = (f"{1e3 * value:,.1f}" for value in (rung.bound, rung.best))
        yield [case, rung_text(rung), bound, best, f"{100 * (1 - rung.bound / rung.best):.1f} %"]


def papers_plans(model: str, batch: int, on: Cluster) -> list[JointDecision]:
    """The plans of stages that the papers' strategies propose."""
    papers = [name for name in STRATEGIES if name != "joint"]
    planning = plan(model, on, global_batch=batch, strategies=papers, time_limit=PAPERS_SECONDS)
    chains = [c.plan for c in planning.candidates if c.plan and not c.plan.program]
    return [decision_of(each) for each in chains]


def bound_row(case: str, limits: list[float]) -> list[str]:
    """The case's bounds in milliseconds, with their gaps to the best plan known."""
    model, batch, on = workload_of(case)
    workload = make_workload(model, on, batch)
    data = pose(workload, ("none", *useful_modes(workload)))
    plan, earlier = KNOWN.get(case, (math.inf, math.nan))
    begun, worked = time.perf_counter(), time.process_time()
    bounds = bounds_after(data, limits, plan / 1e3)
    seconds = time.perf_counter() - begun, time.process_time() - worked
    cells = [case, f"{plan:,.1f}"]
    for milliseconds in (earlier, *(1e3 * bound for bound in bounds)):
        cells += [f"{milliseconds:,.1f}", f"{100 * (1 - milliseconds / plan):.1f} %"]
    return [*cells, *(f"{each:.0f}" for each in seconds)]


def compile_kernels() -> None:
    """Compile the bound's kernels: a processor's clock counts that, a time limit does not."""
    data = drawn_instance(Random(0), devices=3, layers=4)
    lower_bound(Relaxation(data), processor_run(20.0))


def drawn_instance(rng: Random, *, devices: int, layers: int, batch: int = 12) -> JointData:
    """One of at most so many devices, layers and samples, as the tests draw them."""
    path = Path(__file__).parents[2] / "tests" / "joint" / "enumeration.py"
    spec = spec_from_file_location("enumeration", path)
    assert spec is not None and spec.loader is not None
    drawn = module_from_spec(spec)
    spec.loader.exec_module(drawn)
    data: JointData = drawn.random_data(rng, devices=devices, layers=layers, batch=batch)
    return data


def exact_rows(count: int) -> Iterator[list[str]]:
    """Seed, layers, what is proven, gap and seconds of the processor of each instance."""
    exact.solve(drawn_instance(Random(0), devices=2, layers=3, batch=2), Run())  # compiles
    for seed in itertools.count():
        data = drawn_instance(Random(seed), devices=4, layers=12)
        if len(data.devices) == 4 and len(data.layers) >= 10:
            run = processor_run(60.0)
            outcome = exact.solve(data, run)
            best = seconds_of(data, outcome.decision) if outcome.decision else math.nan
            gap = 1 - (outcome.bound or 0.0) / best
            yield [str(seed), str(len(data.layers)), outcome.stop.value, f"{gap:.1e}",
                   f"{run.elapsed:.1f}"]  # fmt: skip
            count -= 1
            if not count:
                return


def table(heads: list[str], rows: Iterable[list[str]]) -> None:
    """In Markdown, row by row."""
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)


def row(case: str, limits: list[float], seeds: int) -> list[str]:
    """The case's line of the table."""
    model, batch, on = workload_of(case)
    workload = make_workload(model, on, batch)
    data = pose(workload, ("none", *useful_modes(workload)))
    starts = papers_plans(model, batch, on)
    cells = [milliseconds(data, min(starts, key=lambda start: seconds_of(data, start)))]
    reached: list[list[float]] = [[] for _ in limits]
    last: list[tuple[float, JointDecision]] = []
    steps = 0
    for seed in range(seeds):
        seen: list[Progress] = []
        outcome = search(data, processor_run(limits[-1], seed, seen.append), starts)
        decision, replays = outcome.decision, outcome.details["replays"]
        assert decision is not None, case
        assert isinstance(replays, int)
        steps += replays
        for values, limit in zip(reached, limits, strict=True):
            known = [p.incumbent for p in seen if p.incumbent and p.seconds <= limit]
            values.append(known[-1] if known else math.inf)
        last.append((seconds_of(data, decision), decision))
    last.sort(key=lambda pair: pair[0])
    middle = last[seeds // 2]
    targets = ", ".join(f"{target:,}" for target in TARGETS.get(case, ())) or "–"
    cells += [f"{1e3 * median(values):,.1f}" for values in reached[:-1]]
    cells += [milliseconds(data, middle[1]), f"{1e3 * last[0][0]:,.1f}"]
    cells += [targets, f"{steps / seeds / limits[-1]:,.0f}"]
    return [case, *cells]


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", choices=[*NAMES, *LARGE])
    parser.add_argument("--seconds", action="append", type=float)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bound", action="append", type=float)
    parser.add_argument("--ladder", type=float)
    parser.add_argument("--exact", type=int)
    asked = parser.parse_args()
    cases, bounds = asked.case or NAMES, sorted(asked.bound or [60.0])
    after = [f"bound after {limit:g} s, ms" for limit in bounds]
    if asked.exact:
        return table(["seed", "layers", "ends", "gap", "seconds"], exact_rows(asked.exact))
    compile_kernels()
    if asked.ladder:
        heads = ["workload", "plans", "bound, ms", "best known, ms", "gap"]
        rungs = (ladder_rows(case, asked.ladder) for case in cases)
        return table(heads, itertools.chain.from_iterable(rungs))
    if not asked.seeds:
        heads = ["workload", "best plan, ms", "earlier bound, ms", "gap"]
        heads += [head for each in after for head in (each, "gap")]
        heads += ["seconds", "of the processor"]
        return table(heads, (bound_row(case, bounds) for case in cases))
    limits = sorted(asked.seconds or [10.0, 60.0])
    heads = ["workload", "papers, ms", *(f"after {limit:g} s, ms" for limit in limits)]
    heads += ["best seed", "targets, ms", "plans a second"]
    return table(heads, (row(case, limits, asked.seeds) for case in cases))


if __name__ == "__main__":
    main()
