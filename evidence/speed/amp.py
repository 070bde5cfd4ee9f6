"""AMP: the exact method against its targets, general solvers, the paper's procedure and its
baselines.

    python -m evidence.speed amp [--quick] [--general-seconds S] [-o FILE.md|FILE.json]

Every figure of one table comes from one run, each solve in a fresh process after compilation. Times
of training iterations are predicted, times of solvers are measured.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from evidence.speed.harness import best_of, markdown, measured, save
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose
from hetplan.profiling.hardware.cluster import ClusterFile, build_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import make_workload
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

# (count, devices per node, type, Gb/s inside a node, Gb/s of its network card)
V100 = (4, "V100-SXM2-16GB", 170.0, 10.0)
T4 = (4, "T4", 50.0, 50.0)
P100 = (4, "P100-PCIE-16GB", 80.0, 10.0)
A100 = (4, "A100-SXM4-40GB", 600.0, 25.0)
V100_16 = (16, "V100-SXM2-16GB", 170.0, 10.0)
T4_16 = (16, "T4", 50.0, 10.0)

# name, model, nodes, global batch, target seconds, target gap
SETS: tuple[
    tuple[str, str, tuple[tuple[int, tuple[int, str, float, float]], ...], int, float, float], ...
] = (
    ("8 GPUs: 1 V100 + 1 T4 node", "gpt2-amp", ((1, V100), (1, T4)), 32, 1, 0),
    ("16 GPUs: AMP homogeneous (4 T4 nodes)", "gpt2-amp", ((4, T4),), 32, 5, 0),
    ("16 GPUs: AMP mixed cluster (3 V100 + 1 T4)", "gpt2-amp", ((3, V100), (1, T4)), 32, 5, 0),
    ("16 GPUs: AMP mixed model (TransGAN, 4 V100)", "transgan-amp", ((4, V100),), 64, 5, 0),
    (
        "16 GPUs: three types (2 V100 + 1 T4 + 1 P100)",
        "gpt2-amp",
        ((2, V100), (1, T4), (1, P100)),
        32,
        15,
        0,
    ),
    ("16 GPUs: mixed nodes (2 V100 + 2 T4 in each of 4)", "gpt2-amp", (), 32, 15, 0),
    ("32 GPUs: 6 V100 + 2 T4", "gpt2-amp", ((6, V100), (2, T4)), 64, 20, 0),
    ("64 GPUs: 8 V100 + 8 T4", "gpt2-amp", ((8, V100), (8, T4)), 128, 60, 0.005),
    ("64 GPUs: 8 V100 + 8 P100", "gpt2-amp", ((8, V100), (8, P100)), 128, 60, 0.005),
    (
        "64 GPUs: three types (5 A100 + 6 V100 + 5 P100)",
        "gpt2-amp",
        ((5, A100), (6, V100), (5, P100)),
        128,
        60,
        0.08,
    ),
    (
        "256 GPUs: 16 x 16 (8 V100 + 8 T4 nodes)",
        "gpt2-amp",
        ((8, V100_16), (8, T4_16)),
        256,
        300,
        1,
    ),
)
GENERAL = ("cp-sat", "cp-sat-linear", "milp")
HEURISTICS = ("paper", "megatron", "annealing", "random")
GENERAL_UP_TO = 16  # devices; beyond, general solvers have no answer worth a row


def instance(number: int) -> AmpData:
    """The data of SETS[number]."""
    name, model, nodes, batch, _, _ = SETS[number]
    if not nodes:
        return mixed_nodes(model, batch)
    entries = [
        {
            "count": count,
            "devices": devices,
            "device": device,
            "intra_node_gbit_per_s": inside,
            "network_gbit_per_s": across,
        }
        for count, (devices, device, inside, across) in nodes
    ]
    return posed(name, model, entries, batch)


def posed(name: str, model: str, entries: list[dict[str, Any]], batch: int) -> AmpData:
    """A workload on nodes as in a cluster file, posed as `amp`."""
    file = ClusterFile.model_validate(
        {"format": "hetplan-cluster", "version": 1, "name": name[:60], "nodes": entries}
    )
    return pose(make_workload(load_model(model), build_cluster(file), batch))


def mixed_nodes(model: str, batch: int) -> AmpData:
    """Four nodes of two V100s and two T4s each: 50 Gb/s inside a node, 10 Gb/s between nodes."""
    entries = [
        {
            "count": 4,
            "devices": 2,
            "device": device,
            "intra_node_gbit_per_s": inside,
            "network_gbit_per_s": 10.0,
        }
        for device, inside in ((V100[1], 170.0), (T4[1], 50.0))
    ]
    data = posed("mixed nodes", model, entries, batch).model_dump()
    half = len(data["devices"]) // 2
    for d, device in enumerate(data["devices"]):
        device["node"] = d % half // 2
    for d in range(half):
        for e in range(half, 2 * half):
            if data["devices"][d]["node"] == data["devices"][e]["node"]:
                data["bandwidth"][d][e] = data["bandwidth"][e][d] = 50e9 / 8
    return AmpData.model_validate(data)


def run_method(number: int, method: str, seconds: float | None) -> dict[str, Any]:
    """One solve; JSON types."""
    result = solve(family("amp"), instance(number), method, Run(Options(time_limit=seconds)))
    return {
        "instance": SETS[number][0],
        "method": method,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "solve_seconds": result.seconds,
        "message": result.message,
    }


def joint(numbers: list[int], general_seconds: float) -> tuple[list[str], list[dict[str, Any]]]:
    """The exact method on every set beside the general solvers, and what the heuristics lose."""
    rows, exact_rows, heuristic_rows = [], [], []
    for number in numbers:
        name, _, _, _, target, target_gap = SETS[number]
        answer = measured(
            run_method, number, "exact", max(target, 60.0), warm_up=(0, "exact", None)
        )
        best = {**answer.value, "peak_bytes": answer.peak_bytes}
        rows.append(best)
        cells: list[object] = [
            name,
            f"{best['objective']:.4f}",
            percent(best["gap"]),
            f"{best['solve_seconds']:.2f}",
        ]
        met = best["solve_seconds"] <= target and best["gap"] <= max(target_gap, 1e-6)
        cells += [
            f"{target:g} s, gap ≤ {target_gap:.1%}" if target_gap else f"{target:g} s, proven",
            "yes" if met else "no",
        ]
        cells.append(f"{best['peak_bytes'] / 2**20:.0f}")
        small = len(instance(number).devices) <= GENERAL_UP_TO
        for method in GENERAL:
            if not small or general_seconds <= 0:
                cells.append(None)
                continue
            row = measured(run_method, number, method, general_seconds).value
            rows.append(row)
            speed = row["solve_seconds"] / best["solve_seconds"]
            cells.append(
                f"{row['solve_seconds']:.1f} s ({speed:.0f}x), {row['status']}, gap "
                f"{percent(row['gap'])}"
            )
        exact_rows.append(cells)
        losses: list[object] = [name]
        for method in HEURISTICS:
            row = measured(run_method, number, method, 120.0).value
            rows.append(row)
            excess = None if row["objective"] is None else row["objective"] / best["bound"] - 1
            losses.append(
                f"{percent(excess)} in {row['solve_seconds']:.1f} s"
                if excess is not None
                else row["status"]
            )
        heuristic_rows.append(losses)
    header = ("instance", "predicted s/iteration", "gap", "seconds", "target", "met", "peak MiB")
    return [
        markdown(
            "Exact, jointly over degrees, micro-batch, placement and cut",
            [*header, *GENERAL],
            exact_rows,
        ),
        markdown(
            "Predicted time above the proven bound, and seconds to get there",
            ["instance", *HEURISTICS],
            heuristic_rows,
        ),
    ], rows


def cuts(most_layers: int) -> tuple[str, list[dict[str, Any]]]:
    """The inner cut with a fixed placement: ours beside the paper's O(k L^4) programme, growing."""
    from hetplan.formulations.amp import cuts as module
    from hetplan.formulations.amp.cuts import cut_chain
    from hetplan.formulations.amp.paper import chain_seconds, paper_cut

    kernels: Any = module  # whose kernel is replaced, to count its calls
    evaluate, evaluations = kernels.cheapest_cut, [0]

    def counted(*arguments: Any) -> Any:
        evaluations[0] += 1
        return evaluate(*arguments)

    rows, table = [], []
    rng = np.random.default_rng(0)
    for layers, stages, target in (
        (12, 4, None),
        (24, 8, 1.0),
        (48, 16, None),
        (96, 32, None),
        (192, 64, 50.0),
    ):
        seconds = rng.random(layers) + 0.5
        link = np.tile(rng.random(layers) * 0.1, (stages - 1, 1))
        times = np.tile(np.r_[0.0, np.cumsum(seconds)], (stages, 1))
        links = np.zeros((stages, layers + 1))
        links[:-1, 1:] = link
        # nothing is synchronised, and all fits in memory
        free = np.zeros(stages), links[-1], np.zeros(times.shape, dtype=np.int64)
        evaluations[0], kernels.cheapest_cut = 0, counted
        cut = cut_chain(32, times, links, *free)
        kernels.cheapest_cut = evaluate
        assert cut is not None
        ours = best_of(partial(cut_chain, 32, times, links, *free)) * 1e3
        theirs = None
        if layers <= most_layers:
            found = paper_cut(seconds, link, 32)
            assert found is not None
            ours_seconds = chain_seconds(seconds, link, 32, np.insert(cut, 0, 0))
            assert abs(found[1] - ours_seconds) < 1e-9 * ours_seconds, (
                "both are exact on equal devices"
            )
            repeats = 3 if layers < 96 else 1
            theirs = best_of(partial(paper_cut, seconds, link, 32), repeats) * 1e3
        rows.append(
            {
                "layers": layers,
                "stages": stages,
                "exact_ms": ours,
                "paper_ms": theirs,
                "evaluations": evaluations[0],
            }
        )
        ratio = None if theirs is None else f"{theirs / ours:.0f}x"
        wanted = None if target is None else f"{target:g} ms"
        table.append(
            (
                layers,
                stages,
                f"{ours:.2f}",
                evaluations[0],
                wanted,
                None if theirs is None else f"{theirs:.1f}",
                ratio,
            )
        )
    header = (
        "layers",
        "stages",
        "exact, ms",
        "evaluations of f",
        "target",
        "paper's programme, ms",
        "ratio",
    )
    return markdown("The cut alone, placement fixed", header, table), rows


def percent(value: float | None) -> str | None:
    """As a percentage with one decimal; zero for anything that counts as proven."""
    return (
        None if value is None else ("0 %" if value <= 1e-6 else f"{value:.1%}".replace("%", " %"))
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 16 GPUs only")
    parser.add_argument(
        "--general-seconds",
        type=float,
        default=60.0,
        help="time limit of CP-SAT and MILP; 0: leave out",
    )
    parser.add_argument("-o", "--output", help="write .md or .json")
    chosen = parser.parse_args()
    cut_table, cut_rows = cuts(48 if chosen.quick else 192)
    numbers = [
        n for n, entry in enumerate(SETS) if not chosen.quick or entry[0].startswith(("8 ", "16 "))
    ]
    tables, rows = joint(numbers, chosen.general_seconds)
    save(chosen.output, [cut_table, *tables], [*cut_rows, *rows])


if __name__ == "__main__":
    main()
