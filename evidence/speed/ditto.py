"""Ditto: exact method, general solvers, the paper's algorithms and its exhaustive baseline, side by
side in one run.

    python -m evidence.speed ditto [--quick] [--only TABLE] [--general-seconds S]
        [-o FILE.md|FILE.json]

How far Oobleck's and Ditto's algorithms are from the optimum: --only gaps.

Every solve runs in a fresh process after one warm-up that compiles, so that peak memory is its own;
seconds are those of building and solving. The instances are those of `ditto_instances.py`:
predicted layer times, not measured ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from evidence.speed.ditto_instances import CLUSTERS, FIVE_TYPES, LARGE, posed, tiny
from evidence.speed.harness import Measured, markdown, measured, save
from hetplan.errors import UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.ditto.data import DittoData
from hetplan.formulations.ditto.templates import (
    instantiate,
    template_list,
)
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

GENERAL = ("cp-sat", "cp-sat-linear", "milp", "pyomo")
HEURISTICS = ("oobleck", "greedy-joined", "paper", "paper-communication", "merge")
GROWTH_METHODS = ("exact", "cp-sat", "milp", "oobleck", "greedy-joined", "paper", "merge")
PARTS = ("targets", "gaps", "general", "growth", "templates")
MIB = 2**20
Row = dict[str, Any]


def run(data: DittoData, method: str, limit: float | None, threads: int) -> Row:
    """One solve as a row of plain values."""
    result = solve(family("ditto"), data, method, Run(Options(threads=threads, time_limit=limit)))
    return {
        "method": method,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "seconds": result.seconds,
        "message": result.message,
    }


def fresh(data: DittoData, method: str, limit: float | None = None, threads: int = 1) -> Row:
    """`run` in a process of its own, with its peak memory."""
    found: Measured = measured(
        run, data, method, limit, threads, warm_up=(tiny(), method, limit, threads)
    )
    return {**found.value, "peak_mib": found.peak_bytes / MIB}


def papers_instances() -> Iterator[tuple[str, int, str, DittoData]]:
    """(cluster, N_b, head, data) of Figure 8."""
    for name, cluster in CLUSTERS.items():
        for micro_batches in (32, 128):
            for head in ("predicted", "flat"):
                yield name, micro_batches, head, posed(cluster, micro_batches, flat=head == "flat")


def seconds_text(seconds: float) -> str:
    """Three digits, in ms below one second."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def target_rows() -> list[Row]:
    """The targets: every instance of the paper, five types, and 96 devices; then what is harder and
    has no target."""
    cases: list[tuple[str, float | None, DittoData]] = [
        (f"{name}, N_b {n}, {head} head", 1.0, data) for name, n, head, data in papers_instances()
    ]
    for n in (32, 128):
        for head in ("predicted", "flat"):
            label = f"ex3 with A100s (5 types), N_b {n}, {head} head"
            cases.append((label, 5.0, posed(FIVE_TYPES, n, flat=head == "flat")))
    for n in (32, 64, 96, 128, 512):
        cases.append(
            (f"3 types x 4 nodes x 8, 96 layers, N_b {n}", 30.0, posed(LARGE, n, blocks=94))
        )
    for name in CLUSTERS:
        cases.append((f"{name} with memory, N_b 32", None, posed(CLUSTERS[name], 32, memory=True)))
    cases.append(("5 types with memory, N_b 32", None, posed(FIVE_TYPES, 32, memory=True)))
    cases.append(("ex3, N_b 12 (fewer than devices)", None, posed(CLUSTERS["ex3"], 12)))
    cases.append(("5 types, N_b 12 (fewer than devices)", None, posed(FIVE_TYPES, 12)))
    cases.append(
        (
            "3 types x 4 nodes x 8 with memory, N_b 32",
            None,
            posed(LARGE, 32, blocks=94, memory=True),
        )
    )
    return [
        {"instance": label, "target": target, **fresh(data, "exact", None if target else 60.0)}
        for label, target, data in cases
    ]


def target_table(rows: list[Row]) -> str:
    """Seconds and peak memory against the targets; the gap where 60 s do not suffice."""
    cells = []
    for row in rows:
        proven, target = row["status"] == "optimal", row["target"]
        gap = (
            None
            if row["bound"] is None
            else f"gap {100 * (1 - row['bound'] / row['objective']):.2g} %"
        )
        met = proven and target is not None and row["seconds"] < target and row["peak_mib"] < 2048
        cells.append(
            (
                row["instance"],
                f"{row['objective']:.6g} s",
                "proven" if proven else gap,
                seconds_text(row["seconds"]),
                f"{row['peak_mib']:.0f} MiB",
                None if target is None else f"{'met' if met else 'MISSED'}: {target:g} s",
            )
        )
    header = ("instance", "best", "", "exact", "peak memory", "target (and 2 GB)")
    return markdown("Exact method, one thread: seconds to the proof, or 60 s", header, cells)


def gap_rows() -> list[Row]:
    """All heuristics and the optimum on the paper's instances."""
    rows = []
    for name, micro_batches, head, data in papers_instances():
        for method in ("exact", *HEURISTICS):
            rows.append(
                {"cluster": name, "N_b": micro_batches, "head": head, **fresh(data, method, 900.0)}
            )
    return rows


def gap_table(rows: list[Row]) -> tuple[str, str]:
    """How far above the optimum each heuristic is, and its seconds."""
    lines: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row["cluster"], row["N_b"], row["head"]), {})[row["method"]] = row
    gaps, times = [], []
    for key, found in lines.items():
        optimum = found["exact"]["objective"]
        gaps.append((*key, f"{optimum:.5g} s", *(excess(found[m], optimum) for m in HEURISTICS)))
        times.append((*key, *(seconds_text(found[m]["seconds"]) for m in ("exact", *HEURISTICS))))
    header = ("cluster", "N_b", "head")
    return (
        markdown("Above the proven optimum", (*header, "optimum", *HEURISTICS), gaps),
        markdown("Seconds of the same runs", (*header, "exact", *HEURISTICS), times),
    )


def excess(row: Row, optimum: float) -> str:
    """Percent above the optimum, a star where the method says more (`greedy-joined`:
    stages without devices)."""
    if row["objective"] is None:
        return "none"
    return f"{100 * (row['objective'] / optimum - 1):.2f} %" + ("*" if row["message"] else "")


def general_rows(limit: float) -> list[Row]:
    """General solvers beside the exact method, from small to the paper's sizes; two threads."""
    cases: list[tuple[str, DittoData]] = [
        ("ex1, 6 layers, N_b 32", posed(CLUSTERS["ex1"], 32, blocks=4))
    ]
    cases += [("ex1, 12 layers, N_b 32", posed(CLUSTERS["ex1"], 32, blocks=10))]
    cases += [
        (f"{n}, 50 layers, N_b 128", posed(CLUSTERS[n], 128, flat=True))
        for n in ("ex1", "ex2", "ex3")
    ]
    return [
        {"instance": label, **fresh(data, method, limit, 2)}
        for label, data in cases
        for method in ("exact", *GENERAL)
    ]


def general_table(rows: list[Row], limit: float) -> str:
    """Seconds where proven, the gap left where not."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        text = seconds_text(row["seconds"])
        if row["status"] != "optimal":
            known = row["objective"] is not None and row["bound"] is not None
            left = (
                f"gap {100 * (1 - row['bound'] / row['objective']):.1f} %"
                if known
                else row["status"]
            )
            text = f"{text}, {left}"
        lines.setdefault(row["instance"], []).append(f"{text}, {row['peak_mib']:.0f} MiB")
    cells = [(label, *texts) for label, texts in lines.items()]
    return markdown(f"General solvers, limit {limit:g} s", ("instance", "exact", *GENERAL), cells)


def growth_rows(quick: bool, limit: float) -> list[Row]:
    """Time of every method against layers, types and devices; general solvers and Oobleck stop at
    `limit`."""
    types = FIVE_TYPES[1]
    cases: list[tuple[str, DittoData]] = []
    for blocks in (10, 22, 46) if quick else (10, 22, 46, 94, 190):
        cases.append(
            (f"{blocks + 2} layers (ex3, N_b 64)", posed(CLUSTERS["ex3"], 64, blocks=blocks))
        )
    for count in (1, 2, 3, 4, 5):
        some = dict(list(types.items())[:count])
        cases.append(
            (f"{count} types, 2 devices per node (50 layers, N_b 64)", posed((2, some), 64))
        )
    for nodes in (1, 2) if quick else (1, 2, 4, 6):
        cluster = (8, dict.fromkeys(LARGE[1], nodes))
        cases.append(
            (
                f"{nodes * 24} devices of 3 types (98 layers, N_b 256)",
                posed(cluster, 256, blocks=96),
            )
        )
    return [
        {"instance": label, **grown(data, method, limit)}
        for label, data in cases
        for method in GROWTH_METHODS
    ]


def grown(data: DittoData, method: str, limit: float) -> Row:
    """One row; a table too large for the method is a row with its reason."""
    given = 300.0 if method == "exact" else limit
    try:
        return fresh(data, method, given, 2 if method in GENERAL else 1)
    except UnsupportedError as error:
        none = dict.fromkeys(("objective", "bound", "seconds", "peak_mib"))
        return {"method": method, "status": "refused", "message": str(error), **none}


def growth_table(rows: list[Row], limit: float) -> str:
    """One line per size: seconds; above the best bound where not proven; what is left where time
    ran out."""
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(row["instance"], {})[row["method"]] = row
    cells = [
        (
            label,
            *(growth_text(found[m], found["exact"]) for m in GROWTH_METHODS),
            f"{found['exact']['peak_mib']:.0f} MiB",
        )
        for label, found in lines.items()
    ]
    title = f"Growth: seconds; limit {limit:g} s but for exact; `+`: above the proven optimum"
    return markdown(title, ("size", *GROWTH_METHODS, "peak memory of exact"), cells)


def growth_text(row: Row, exact: Row) -> str:
    """`45 ms`; `2.1 ms, +3.4 %` above what is best known; the status where there is no template."""
    if row["seconds"] is None:
        return "too large"
    text = seconds_text(row["seconds"])
    if row["objective"] is None:
        return f"{text}, none"
    if row["status"] == "optimal":
        return text
    more = f"+{100 * max(0.0, row['objective'] / exact['objective'] - 1):.2g} %"
    if row["bound"] is None:
        return f"{text}, {more}"
    return f"{text}, {more}, gap {100 * (1 - row['bound'] / row['objective']):.2g} %"


def templates(name: str, micro_batches: int) -> Row:
    """The template list of a cluster, and its instantiation on all nodes."""
    data = posed(CLUSTERS[name], micro_batches)
    options = Options(threads=2, time_limit=300.0)
    listing = Run(options)
    found = template_list(data, listing)
    seconds, run = listing.elapsed, Run(options)
    nodes = tuple(kind.nodes for kind in data.device_types)
    result = instantiate(found.templates, nodes, micro_batches, run, failures=1)
    return {
        "cluster": name,
        "templates": len(found.templates),
        "list_seconds": seconds,
        "iteration": result.iteration_seconds,
        "seconds": run.elapsed,
        "pipelines": [[list(p.template.nodes), p.micro_batches] for p in result.pipelines],
    }


def template_rows(quick: bool) -> list[Row]:
    """Ex1 to Ex5, 128 micro-batches in all, one failure tolerated."""
    names = ("ex1", "ex2") if quick else tuple(CLUSTERS)
    return [measured(templates, name, 128, warm_up=("ex1", 128)).value for name in names]


def template_table(rows: list[Row]) -> str:
    """Templates and instantiations."""
    cells = [
        (
            row["cluster"],
            row["templates"],
            seconds_text(row["list_seconds"]),
            f"{row['iteration']:.5g} s, {len(row['pipelines'])} pipelines",
            seconds_text(row["seconds"]),
        )
        for row in rows
    ]
    header = ("cluster", "templates", "list in", "instantiation", "in")
    return markdown(
        "Templates for every part of the cluster; 128 micro-batches, f = 1", header, cells
    )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes: targets, small curves")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="these tables alone; may repeat"
    )
    parser.add_argument(
        "--general-seconds", type=float, default=60.0, help="limit of the general solvers"
    )
    parser.add_argument("-o", "--output", help="also write the tables (.md) or every row (.json)")
    chosen = parser.parse_args()
    quick, limit = chosen.quick, chosen.general_seconds
    wanted = chosen.only or [part for part in PARTS if not (quick and part in ("gaps", "general"))]
    tables: list[str] = []
    rows: list[Row] = []
    for part in wanted:
        if part == "targets":
            made = target_rows()
            tables.append(target_table(made))
        elif part == "gaps":
            made = gap_rows()
            tables += gap_table(made)
        elif part == "general":
            made = general_rows(limit)
            tables.append(general_table(made, limit))
        elif part == "growth":
            made = growth_rows(quick, limit)
            tables.append(growth_table(made, limit))
        else:
            made = template_rows(quick)
            tables.append(template_table(made))
        rows += [{"table": part, **row} for row in made]
    save(chosen.output, tables, rows)


if __name__ == "__main__":
    main()
