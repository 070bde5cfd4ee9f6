"""HAP: the joint search against its targets, general solvers, the paper's alternation and its
baselines.

    python -m evidence.speed hap [--quick] [--time-limit S] [-o FILE.md|FILE.json]

Theories are hetplan's own, of the shape of a Transformer's (`hap_theories.py`), and
built-in networks'.
Each run is in a fresh process after one warm-up call that compiles; the ratio problem alone is a
median in one process. One thread; targets are held against seconds of processor time, which on an
idle machine are those elapsed.
The gap study over HAP's experiments is `python -m evidence.papers hap`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

from evidence.speed.hap_theories import SPEEDS, chain, cluster, model, residual, stages_only
from evidence.speed.harness import best_of, markdown, measured, save
from hetplan.formulations import family
from hetplan.formulations.hap.data import Device, HapData
from hetplan.formulations.hap.pricing import theory_of
from hetplan.programs.links import ring
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

# (shape, size, types) -> seconds allowed for a proof to 1e-6
TARGETS = {
    **{("chain", 4, types): 1.0 for types in (2, 3)},
    **{("chain", 24, types): 1.0 for types in (2, 3, 4)},
    **{("chain", 96, types): 5.0 for types in (2, 3, 4)},
    ("residual", 6, 2): 2.0,
    ("residual", 12, 2): 5.0,
    ("residual", 24, 2): 20.0,
    ("network", 2, 2): 10.0,
}
# Those that general solvers are given, too; the MILP's own target is a proof of these within 10 s.
SMALL, MILP_SECONDS = 4, 10.0
RATIO_SECONDS = 5e-3
GENERAL = ("milp", "cp-sat", "cp-sat-linear", "pyomo")
NETWORKS = ("vgg19", "vit", "vit-24", "bert-base", "bert-moe", "gpt2")


def network(layers: int, types: int, seed: int) -> HapData:
    """Number `layers` of NETWORKS with 4 samples a device on 8 devices of `types` types at 10.4
    Gbit/s."""
    devices = [
        Device(name=f"d{j}", flops_per_second=SPEEDS[(1, 3, 0, 2)[j % types]]) for j in range(8)
    ]
    return theory_of(model(NETWORKS[layers], 32, 8), devices, ring(8, 1.3e9)).data


def wider(each: int, types: int, seed: int) -> HapData:
    """A chain of 24 layers on `each` devices of every type."""
    return chain(24, types, seed).model_copy(update={"devices": cluster(types, each)})


MAKERS: Mapping[str, Callable[[int, int, int], HapData]] = {
    "chain": chain,
    "residual": residual,
    "network": network,
    "wider": wider,
}


def run(shape: str, size: int, types: int, seed: int, method: str, limit: float) -> dict[str, Any]:
    """One solve as a row."""
    data = MAKERS[shape](size, types, seed)
    begun = time.process_time()
    result = solve(family("hap"), data, method, Run(Options(threads=1, time_limit=limit)))
    return {
        "shape": shape,
        "size": size,
        "types": types,
        "seed": seed,
        "method": method,
        "seconds": result.seconds,
        "processor_seconds": time.process_time() - begun,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "details": dict(result.details),
        "message": result.message,
    }


def row(shape: str, size: int, types: int, seed: int, method: str, limit: float) -> dict[str, Any]:
    """The same in a fresh process, with its peak memory."""
    warm_up = ("chain", 1, types, 0, method, limit)
    found = measured(run, shape, size, types, seed, method, limit, warm_up=warm_up)
    return {**found.value, "peak_bytes": found.peak_bytes}


def targets(quick: bool, limit: float) -> tuple[str, list[dict[str, Any]]]:
    """The joint search at the sizes of its targets, general solvers beside it on the small ones."""
    rows, cells = [], []
    for (shape, size, types), allowed in TARGETS.items():
        if quick and (size > 24 or shape != "chain"):
            continue
        for seed in range(1 if shape == "network" else 4 if (size, types) == (96, 4) else 2):
            methods = ("exact", *GENERAL) if size <= SMALL and shape == "chain" else ("exact",)
            for method in methods:
                target = (
                    allowed if method == "exact" else MILP_SECONDS if method == "milp" else None
                )
                r = row(shape, size, types, seed, method, limit) | {"allowed": target}
                rows.append(r)
                name = NETWORKS[size] if shape == "network" else f"{shape} {size}"
                cells.append(
                    (
                        name,
                        types,
                        seed,
                        method,
                        *against(r, target),
                        f"{r['peak_bytes'] / 2**20:.0f}",
                    )
                )
    header = (
        "theory",
        "types",
        "seed",
        "method",
        "processor s",
        "elapsed s",
        "target s",
        "met",
        "gap",
        "peak MiB",
    )
    return markdown(
        "Targets: joint optimum over programs and ratios, proven to 1e-6", header, cells
    ), rows


def against(found: dict[str, Any], target: float | None) -> tuple[str, ...]:
    """Seconds, the target, whether it is met (by a proof within it), the gap."""
    spent = found["processor_seconds"]
    met = found["status"] == "optimal" and target is not None and spent <= target
    told = "–" if target is None else "yes" if met else "no"
    return (
        f"{spent:.2f}",
        f"{found['seconds']:.2f}",
        "–" if target is None else f"{target:g}",
        told,
        gap_text(found["gap"]),
    )


def growth(quick: bool, limit: float) -> tuple[str, list[dict[str, Any]]]:
    """Seconds as layers, blocks, and devices of the same types grow."""
    rows, cells = [], []
    for shape, sizes in (("chain", (6, 12, 24, 48, 96, 192)), ("residual", (1, 3, 6, 12, 24))):
        for size in sizes[: 3 if quick else None]:
            rows.append(row(shape, size, 2, 0, "exact", limit))
            cells.append((f"{shape} {size}", 8, *grown(rows[-1])))
    for each in (1, 4, 16, 64, 256):
        rows.append(row("wider", each, 3, 0, "exact", limit))
        cells.append(("chain 24", 3 * each, *grown(rows[-1])))
    header = ("theory", "devices", "processor s", "status", "states", "arcs", "cells", "peak MiB")
    return markdown("Growth", header, cells), rows


def grown(found: dict[str, Any]) -> tuple[object, ...]:
    """Cells of one row of `growth`."""
    details = found["details"]
    counts = (details.get(name) for name in ("states", "arcs", "cells"))
    return (
        f"{found['processor_seconds']:.2f}",
        found["status"],
        *counts,
        f"{found['peak_bytes'] / 2**20:.0f}",
    )


def networks(quick: bool, limit: float) -> tuple[str, list[dict[str, Any]]]:
    """Built-in networks: the joint search, and how far above it the paper's alternation ends."""
    rows, cells = [], []
    for number, name in enumerate(NETWORKS[:1] if quick else NETWORKS):
        for types in (2, 3):
            pair = [
                row("network", number, types, 0, method, limit) for method in ("exact", "paper")
            ]
            rows += pair
            best, paper = pair
            above = 100 * max(0.0, paper["objective"] / best["objective"] - 1)
            seconds = (
                f"{best['processor_seconds']:.2f}",
                best["status"],
                gap_text(best["gap"]),
                best["details"].get("cells"),
            )
            cells.append(
                (name, types, *seconds, f"{paper['processor_seconds']:.1f}", f"{above:.2f} %")
            )
    header = (
        "network",
        "types",
        "exact processor s",
        "status",
        "gap",
        "cells",
        "paper processor s",
        "paper above",
    )
    return markdown("Networks", header, cells), rows


def general(quick: bool, limit: float) -> tuple[str, list[dict[str, Any]]]:
    """Every method on chains that general solvers can do; heuristics above the optimum in
    percent."""
    rows, cells = [], []
    for size in (1, 2, 4) if quick else (1, 2, 4, 24):
        for types in (2, 3):
            best = row("chain", size, types, 0, "exact", limit)
            line: list[object] = [size, types, f"{1e3 * best['processor_seconds']:.0f}"]
            rows.append(best)
            for method in (*GENERAL, "paper", "dp-even", "dp-proportional"):
                found = row("chain", size, types, 0, method, limit)
                rows.append(found)
                above = (
                    found["objective"]
                    and f"{100 * max(0.0, found['objective'] / best['objective'] - 1):.2f} % above"
                )
                gap = above if found["bound"] is None else f"gap {gap_text(found['gap'])}"
                line.append(f"{1e3 * found['processor_seconds']:.0f} ({gap or 'no program'})")
            cells.append(line)
    header = (
        "layers",
        "types",
        "exact",
        *GENERAL,
        "paper",
        "dp-even",
        "dp-proportional",
    )
    return markdown("Milliseconds of processor time on chains", header, cells), rows


def alternation(quick: bool, limit: float) -> tuple[str, list[dict[str, Any]]]:
    """How often and how far the paper's alternation ends above the joint optimum."""
    rows, cells = [], []
    seeds = range(10 if quick else 60)
    for size in (1, 2):
        for types in (2, 3, 4):
            worse = []
            for seed in seeds:
                pair = [
                    run("chain", size, types, seed, method, limit) for method in ("exact", "paper")
                ]
                rows += pair
                worse.append(pair[1]["objective"] / pair[0]["objective"] - 1)
            above = [x for x in worse if x > 1e-6]
            cells.append((size, types, len(worse), len(above), f"{100 * max(worse):.2f} %"))
    header = ("layers", "types", "theories", "suboptimal", "worst")
    return markdown("The paper's alternation beside the joint optimum", header, cells), rows


def ratios(limit: float) -> tuple[str, list[dict[str, Any]]]:
    """The ratio problem for a given program, milliseconds (median of 7)."""
    rows, cells = [], []
    for devices, stages, types, replicated in (
        (8, 50, 2, True), (64, 500, 8, False), (64, 500, 2, True), (64, 500, 4, True), (64, 500,
        64, True),
    ):  # fmt: skip
        data = stages_only(devices, stages, types, replicated=replicated)

        def once(data: Any = data) -> Any:
            return solve(family("hap"), data, "auto", Run(Options(threads=1, time_limit=limit)))

        result = once()
        seconds, inner = best_of(once), sorted(once().solve_seconds for _ in range(7))[3]
        rows.append(
            {"devices": devices, "stages": stages, "types": types, "replicated": replicated,
            "seconds": seconds,
             "solve_seconds": inner, "status": result.status, "objective": result.objective}
        )  # fmt: skip
        work = "shared and replicated" if replicated else "shared"
        told = "yes" if result.status == "optimal" and inner <= RATIO_SECONDS else "no"
        times = f"{1e3 * inner:.2f}", f"{1e3 * RATIO_SECONDS:g}", told, f"{1e3 * seconds:.2f}"
        cells.append((devices, stages, types, work, *times, result.status))
    header = (
        "devices", "stages", "speeds", "work", "ms", "target ms", "met", "ms with reading "
                                                                               "and "
                                                                               "checking", "status",
    )  # fmt: skip
    return markdown("Ratios of a given program", header, cells), rows


def gap_text(gap: float | None) -> str:
    """In percent; what counts as optimal as 0."""
    return "–" if gap is None else "0" if gap <= 1e-6 else f"{100 * gap:.3g} %"


def main() -> None:
    """All tables, printed and written where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds per method and theory"
    )
    parser.add_argument("-o", "--output", help="write Markdown (.md) or every row (.json) here too")
    arguments = parser.parse_args()
    limit = arguments.time_limit
    parts = [
        ratios(limit),
        targets(arguments.quick, limit),
        growth(arguments.quick, limit),
        networks(arguments.quick, limit),
        general(arguments.quick, limit),
        alternation(arguments.quick, limit),
    ]
    save(arguments.output, [table for table, _ in parts], [r for _, rows in parts for r in rows])


if __name__ == "__main__":
    main()
