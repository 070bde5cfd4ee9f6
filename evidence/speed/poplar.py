"""Problem `poplar`: exact method beside general solvers, the paper's algorithm and its baselines,
in one run.

    python -m evidence.speed poplar [--quick] [--time-limit S] [--output FILE]

Prints Markdown: the targets with what was reached, growth with devices and with the batch, gaps of
the paper's algorithm, what unequal shards gain; machine, versions and peak memory. Kernels are
loaded and every method has run once before anything is timed; times are medians of build + solve,
one thread. What a first call in a new process takes, kernels loaded from the cache, is measured
apart, in processes of their own. The paper's experiments:
`python -m evidence.papers poplar`.
"""

from __future__ import annotations

import argparse
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from evidence.papers.poplar import paper_workload
from evidence.speed.harness import measured
from evidence.speed.poplar_instances import CLUSTERS
from hetplan import __version__
from hetplan.formulations import family
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.pose import Assumptions, measured_points, pose
from hetplan.formulations.poplar.zero import Shards
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Result, Run

POPLAR = family("poplar")
GENERAL = ("cp-sat", "cp-sat-linear", "milp", "pyomo")
HEURISTICS = ("paper", "deepspeed", "whale")
# (devices, types, global batch): seconds allowed at stages 0 and 1, at stages 2 and 3.
TARGETS = {
    (8, 2, 256): (0.010, 0.010),
    (1024, 2, 4096): (0.050, 0.010),
    (16_384, 4, 65_536): (2.0, 2.0),
}
REPEATS = 5
KINDS: tuple[Shards, ...] = ("equal", "memory")
# Seconds after which once is enough.
SLOW = 2.0


def device_types() -> list[Device]:
    """Four types with predicted curves of Llama 0.5B at 2048 tokens, up to the micro-batches that
    fit."""
    found = []
    for cluster, name, largest in (
        ("poplar-a", "A100-SXM4-80GB", 37),
        ("poplar-b", "V100-PCIE-16GB", 3),
        ("poplar-c", "V100S-PCIE-32GB", 12),
        ("poplar-a", "A100-PCIE-40GB", 16),
    ):
        points = measured_points(paper_workload(cluster, "llama-0.5b").profile, name)
        found.append(Device(name=name, step_seconds=[points[b] for b in range(1, largest + 1)]))
    return found


def kinked(device: Device, tile: int = 4) -> Device:
    """The same device where incomplete tiles cost 15 % more: the curve falls at each full tile."""
    slower = [t * (1.15 if b % tile else 1.0) for b, t in enumerate(device.step_seconds, 1)]
    return Device(name=f"{device.name}-kinked", step_seconds=slower)


def wild(seed: int, largest: int = 32) -> Device:
    """Times of 0.05 to 3 s in no order at all: nothing of a curve's shape helps."""
    draw = random.Random(seed)
    return Device(
        name=f"wild-{seed}", step_seconds=[draw.uniform(0.05, 3.0) for _ in range(largest)]
    )


def curves_of(types: list[Device], devices: int, count: int) -> Iterator[tuple[str, list[Device]]]:
    """The kinds of curves of a target: predicted ones, kinked ones; on few devices wild ones, every
    device its own."""
    yield "smooth", types[:count]
    yield "kinked", [kinked(d) for d in types[:count]]
    if devices <= 8:
        yield "wild", [wild(seed) for seed in range(devices)]


def instance(types: list[Device], devices: int, batch: int, stage: int) -> PoplarData:
    """`devices` devices, the types in turn."""
    return PoplarData(
        zero_stage=stage,
        global_batch=batch,
        comm_seconds=0.14 if stage < 2 else 0.2,
        devices=[types[i % len(types)] for i in range(devices)],
    )


def run(data: PoplarData, method: str, limit: float) -> Result[object]:
    """One run with one thread."""
    return solve(POPLAR, data, method, Run(Options(threads=1, time_limit=limit)))


def median_run(data: PoplarData, method: str, limit: float) -> tuple[Result[object], float]:
    """A result and the median seconds of REPEATS runs; of one run where that takes longer than
    SLOW."""
    result = run(data, method, limit)
    if result.seconds > SLOW:
        return result, result.seconds
    return result, statistics.median(run(data, method, limit).seconds for _ in range(REPEATS))


def warm_up(types: list[Device], limit: float) -> None:
    """Every method once on a small instance of each kind: imports, kernels and back ends are loaded
    then."""
    for stage in (0, 2):
        for kinds in (types[:2], [kinked(d) for d in types[:2]]):
            for method in ("exact", *GENERAL, *HEURISTICS):
                run(instance(kinds, 4, 20, stage), method, limit)


def first_call(stage: int) -> tuple[float, float]:
    """In this process: the seconds that a first solve reports, and what passed with loading
    everything."""
    data = instance(device_types()[:2], 8, 256, stage)
    begun = time.perf_counter()
    seconds = run(data, "exact", 20.0).seconds
    return seconds, time.perf_counter() - begun


def first_calls() -> Iterator[str]:
    """First calls in fresh processes."""
    yield "\n## The first call of a process: 8 devices, batch 256, kernels in numba's cache\n"
    yield from head("ZeRO", "solve, as reported, ms", "with loading modules and kernels, ms")
    for stage in (0, 2):
        measured(first_call, stage)  # fills the cache
        reported, whole = measured(first_call, stage).value
        yield row(stage, milliseconds(reported), milliseconds(whole))


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def head(*cells: str) -> Iterator[str]:
    """A Markdown table's first two lines."""
    yield row(*cells)
    yield row(*("---" for _ in cells))


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{1e3 * seconds:.3g}"


def excess(result: Result[object], best: float) -> str:
    """How far above the optimum, in percent; a dash without a plan."""
    # sums of equal terms in another order differ in the last digits
    return (
        "–" if result.objective is None else f"{100 * max(0.0, result.objective / best - 1):.2f} %"
    )


def targets(types: list[Device], limit: float, general: tuple[str, ...]) -> Iterator[str]:
    """Exact against the targets, general solvers and heuristics on the same instances."""
    yield "## Targets: exact beside general solvers and heuristics\n"
    yield from head(
        "devices", "types", "batch", "ZeRO", "curves", "target ms", "exact ms", "met",
        *(f"{m} ms (gap)" for m in general), *(f"{m} ms (above optimum)" for m in HEURISTICS),
    )  # fmt: skip
    for (devices, count, batch), allowed in TARGETS.items():
        for stage in range(4):
            for name, kinds in curves_of(types, devices, count):
                data = instance(kinds, devices, batch, stage)
                best, seconds = median_run(data, "exact", limit)
                assert best.status == "optimal" and best.objective is not None
                target = allowed[stage >= 2]
                cells = [
                    devices,
                    len(kinds),
                    batch,
                    stage,
                    name,
                    milliseconds(target),
                    milliseconds(seconds),
                ]
                cells.append("yes" if seconds < target else "no")
                for method in general:
                    other, spent = median_run(data, method, limit)
                    cells.append(
                        f"{milliseconds(spent)} ({other.status}, {told_gap(other, best.objective)})"
                    )
                for method in HEURISTICS:
                    other, spent = median_run(data, method, limit)
                    cells.append(f"{milliseconds(spent)} ({excess(other, best.objective)})")
                yield row(*cells)


def told_gap(result: Result[object], best: float) -> str:
    """Agreement with the exact method, or the gap of an unfinished run."""
    if result.objective is None or result.gap is None:
        return "no plan" if result.objective is None else "no bound"
    if result.status == "optimal":
        return "agrees" if abs(result.objective / best - 1) <= 2e-6 else "DISAGREES"
    return f"gap {100 * result.gap:.2g} %"


def growth(types: list[Device], limit: float, quick: bool) -> Iterator[str]:
    """Exact with more devices at four samples each, and with a larger batch on eight devices."""
    yield (
        "\n## Growth with devices (4 types, 4 samples per device) and with the batch (8 "
        "devices, 2 types)\n"
    )
    yield from head(
        "devices",
        "batch",
        "curves",
        *(f"ZeRO {s} ms" for s in (0, 2)),
        "paper above optimum, ZeRO 0, 2",
    )
    sizes = [(n, 4 * n, 4) for n in (8, 64, 512, 4096, 16_384)]
    sizes += [(8, g, 2) for g in (64, 512, 4096, 32_768, 262_144)]
    for devices, batch, count in sizes[:2] if quick else sizes:
        for name, kinds in (
            ("smooth", types[:count]),
            ("kinked", [kinked(d) for d in types[:count]]),
        ):
            cells, gaps = [devices, batch, name], []
            for stage in (0, 2):
                data = instance(kinds, devices, batch, stage)
                best, seconds = median_run(data, "exact", limit)
                assert best.status == "optimal" and best.objective is not None
                cells.append(milliseconds(seconds))
                gaps.append(excess(run(data, "paper", limit), best.objective))
            yield row(*cells, ", ".join(gaps))


def shards(limit: float, quick: bool) -> Iterator[str]:
    """ZeRO shards by memory against equal ones: predicted seconds of the proven optimum."""
    yield "\n## Shards in proportion to memory instead of equal ones (predicted, optimum of each)\n"
    yield (
        "A dash: the model states or the first sample do not fit. Unequal shards make "
        "collectives dearer.\n"
    )
    yield from head(
        "cluster",
        "model",
        "ZeRO",
        "largest batches equal",
        "by memory",
        "s equal",
        "s by memory",
        "gain",
    )
    for cluster in CLUSTERS[:1] if quick else CLUSTERS:
        for model in ("llama-0.5b", "bert-1.1b", "llama2-7b"):
            workload = paper_workload(cluster, model)
            for stage in (1, 2, 3):
                sizes, seconds = [], []
                for kind in KINDS:
                    posed = pose(workload, stage, Assumptions(shards=kind))
                    sizes.append(
                        "/".join(str(len(d.step_seconds)) for d in unique(posed.data.devices))
                    )
                    found = run(posed.data, "exact", limit).objective
                    seconds.append(None if found is None else found + posed.once_seconds)
                told = ["–" if s is None else f"{s:.3f}" for s in seconds]
                equal, by_memory = seconds
                gain = "–" if equal is None or by_memory is None else f"{equal / by_memory:.3f}"
                yield row(cluster, model, stage, *sizes, *told, gain)


def unique(devices: list[Device]) -> list[Device]:
    """The first device of each name."""
    return list({device.name: device for device in reversed(devices)}.values())[::-1]


def machine() -> str:
    """Processor, memory used at most by this process, versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        model = f"{len(names)} x {names[0]}" if names else model
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform != "darwin" else 2**30
    )
    tools = ", ".join(
        f"{name} {version(name)}" for name in ("numpy", "numba", "ortools", "highspy", "pyomo")
    )
    return (
        f"\nMachine: {model}; Python {platform.python_version()}; hetplan {__version__}, {tools}. "
        f"One thread. Peak memory of the whole run: {peak:.2f} GiB."
    )


def report(limit: float, quick: bool) -> Iterator[str]:
    """All sections."""
    types = device_types()
    warm_up(types, limit)
    yield "# Poplar benchmark\n"
    yield from targets(types, limit, GENERAL[:3] if quick else GENERAL)
    yield from growth(types, limit, quick)
    yield from shards(limit, quick)
    yield from first_calls()
    yield machine()


def main() -> None:
    """Print the report, and write it where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rows of each table")
    parser.add_argument(
        "--time-limit", type=float, default=20.0, help="seconds per method and instance"
    )
    parser.add_argument("--output", type=Path, help="write the Markdown here too")
    arguments = parser.parse_args()
    lines = []
    for line in report(arguments.time_limit, arguments.quick):
        print(line, flush=True)
        lines.append(line)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
