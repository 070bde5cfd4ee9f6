"""Derive `src/hetplan/profiling/rates/measured.json.gz` from published measurements, and print how
wrong it is on what is left out.

    python -m evidence.speed fit_rates OPERATORS ALL_REDUCES [--parts PART ...] [-o FILE]

OPERATORS holds NeuSight's and vidur's measurements as `neusight_gemm_fp32.csv.gz`,
`neusight_elementwise_fp32.csv.gz`, `vidur_gemm_fp16.csv.gz` and `vidur_collectives.csv.gz`, and
aiconfigurator's as `aic_nccl.csv.gz` and `aic_gemm.csv.gz`; ALL_REDUCES vTrain's tables
`a100_AR_GPU8_1M_1024M_LUT` and so on. A part that is not named stays as it is in FILE. Needs
xgboost and torch, which predictions do not.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import xgboost
from numpy.typing import NDArray

from hetplan.files import read_json, to_json, write_text
from hetplan.profiling.hardware.cluster import device
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.rates.products import MOVING, Trees
from hetplan.profiling.rates.shipped import Format, ProductTrees, Tiling
from hetplan.profiling.rates.tiles import (
    PHYSICS,
    Machine,
    Tiles,
    architecture,
    mean_of,
    physical,
)

Floats = NDArray[np.float64]
OUTPUT = Path(__file__).parents[2] / "src/hetplan/profiling/rates/measured.json.gz"
DEPTH, ROUNDS = 4, 200
SETTINGS: dict[str, Any] = {
    "max_depth": DEPTH, "eta": 0.08, "subsample": 0.7, "colsample_bynode": 0.5, "max_bin": 128,
    "objective": "reg:absoluteerror", "tree_method": "hist", "nthread": 1, "seed": 0,
}  # fmt: skip
ORIGINS = [
    {
        "name": "neusight",
        "source": "sitar-lab/NeuSight@6945927",
        "licence": "MIT (Georgia Institute of Technology and Microsoft, 2025)",
        "conditions": "fp32 with TF32 off, torch 2.1",
    },
    {
        "name": "vidur",
        "source": "microsoft/vidur@7d47513",
        "licence": "MIT",
        "conditions": "fp16, medians of kernel times; collectives by NCCL",
    },
    {
        "name": "vtrain",
        "source": "VIA-Research/vTrain@f8dda84",
        "licence": "MIT",
        "conditions": "nccl-tests all_reduce_perf, out of place, 1 MiB to 1 GiB",
    },
    {
        "name": "aiconfigurator",
        "source": "ai-dynamo/aiconfigurator@095f58a",
        "licence": "Apache-2.0 (NVIDIA)",
        "conditions": "nccl-tests of 16-bit numbers, 512 bytes to 512 MiB; products in bursts "
        "under CUDA graphs, the best of sglang, trtllm and vllm",
    },
]
# What a measured device is called there; the catalogue's type with its figures, then those that
# have the same chip.
PRODUCTS: dict[tuple[str, Precision], tuple[str, ...]] = {
    ("a100", "fp16"): (
        "A100-SXM4-80GB", "A100-SXM4-40GB", "A100-PCIE-40GB", "A100-PCIE-80GB", "A800-SXM4-80GB",
    ),
    ("a40", "fp16"): ("A40", "A6000"),
    ("h100", "fp16"): ("H100-SXM5-80GB", "H800-SXM5-80GB", "H200-SXM-141GB", "GH200-96GB"),
    ("Tesla P4", "fp32"): ("P4",),
    ("Tesla P100-PCIE-16GB", "fp32"): ("P100-PCIE-16GB",),
    ("Tesla V100-PCIE-32GB", "fp32"): (
        "V100-PCIE-32GB", "V100-PCIE-16GB", "V100-SXM2-16GB", "V100-SXM2-32GB", "V100S-PCIE-32GB",
    ),
    ("Tesla T4", "fp32"): ("T4",),
    ("NVIDIA L4", "fp32"): ("L4",),
    ("NVIDIA A100-PCIE-40GB", "fp32"): (
        "A100-PCIE-40GB", "A100-PCIE-80GB", "A100-SXM4-40GB", "A100-SXM4-80GB", "A800-SXM4-80GB",
    ),
}  # fmt: skip
FOLDS = 5
SAMPLE, STEPS = 4000, 250  # of a fit of tiles


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a table, unpacked."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        yield from csv.DictReader(stream)


@dataclass(frozen=True)
class Measured:
    """Products of one device: sizes [N, 4], seconds [N], weight of each (rows behind it), and the
    groups of which one at a time is left out; a row may belong to several."""

    sizes: Floats
    seconds: Floats
    weights: Floats
    groups: list[set[str]]


def products_16(folder: Path) -> dict[str, Measured]:
    """vidur's, medians of equal shapes; a group is a model, and takes its shapes (k, n) along."""
    seconds: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    models: dict[tuple[str, float, float], set[str]] = defaultdict(set)
    for row in rows(folder / "vidur_gemm_fp16.csv.gz"):
        m, k, n = (float(row[key]) for key in "mkn")
        seconds[row["device"]][1.0, m, k, n].append(float(row["seconds"]))
        models[row["device"], k, n].add(row["model"])
    return {
        name: Measured(
            np.array(list(of)),
            np.array([np.median(s) for s in of.values()]),
            np.array([float(len(s)) for s in of.values()]),
            [models[name, k, n] for _, _, k, n in of],
        )
        for name, of in seconds.items()
    }


def products_32(folder: Path) -> dict[str, Measured]:
    """NeuSight's; groups are a fifth of the shapes (m, k, n) each, whatever their count."""
    of: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in rows(folder / "neusight_gemm_fp32.csv.gz"):
        of[row["Device"]].append(tuple(float(row[key]) for key in ("B", "M", "K", "N", "seconds")))
    measured = {}
    for name, found in of.items():
        shapes = sorted({row[1:4] for row in found})
        Random(0).shuffle(shapes)
        fold = {shape: str(i % FOLDS) for i, shape in enumerate(shapes)}
        table = np.array(found)
        groups = [{fold[row[1:4]]} for row in found]
        measured[name] = Measured(table[:, :4], table[:, 4], np.ones(len(table)), groups)
    return measured


def complete(booster: Any) -> dict[str, Any]:
    """XGBoost's trees as complete binary ones, in whole numbers; see ProductTrees."""
    inner = 2**DEPTH - 1
    out: dict[str, Any] = {"feature": [], "threshold": [], "leaf": []}
    for text in booster.get_dump(dump_format="json"):
        feature, threshold, leaf = [0] * inner, [10**6] * inner, [0] * (inner + 1)

        def place(tree: dict[str, Any], node: int) -> None:
            if node >= inner:
                leaf[node - inner] = round(tree["leaf"] * 1e4)  # noqa: B023
                return
            if "leaf" in tree:  # nothing is as large as the threshold: the left one is taken
                place(tree, 2 * node + 1)
                return
            feature[node] = int(tree["split"][1:])  # noqa: B023
            threshold[node] = int(np.ceil(tree["split_condition"]))  # noqa: B023
            kids = {kid["nodeid"]: kid for kid in tree["children"]}
            place(kids[tree["yes"]], 2 * node + 1)
            place(kids[tree["no"]], 2 * node + 2)

        place(json.loads(text), 0)
        for key, values in (("feature", feature), ("threshold", threshold), ("leaf", leaf)):
            out[key].append(values)
    config = json.loads(booster.save_config())["learner"]["learner_model_param"]
    return {**out, "start": float(config["base_score"].strip("[]"))}


def grown(features: Floats, logs: Floats, weights: Floats) -> Any:
    """Trees of logarithms of measured / physical seconds. A weight of 1 / seconds makes the median
    in a leaf that of the least |predicted / measured - 1|."""
    told = xgboost.DMatrix(features, logs, weight=weights * np.exp(-logs))
    return xgboost.train(SETTINGS, told, ROUNDS)


def errors(ratio: Floats, weights: Floats) -> dict[str, float]:
    """Of measured / predicted."""
    order = np.argsort(ratio)
    share = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(ratio[order][np.searchsorted(share, q)]) for q in (0.1, 0.9))
    mean = float(np.average(np.abs(1 / ratio - 1), weights=weights))
    return {
        "mean": round(mean, 4), "low": round(min(low, 1.0), 4), "high": round(max(high, 1.0), 4),
        "rows": int(weights.sum()),
    }  # fmt: skip


def fit_tiling(machine: Machine, sizes: Floats, seconds: Floats) -> Tiling:
    """Least mean error of the logarithms of `physical`, by Adam on at most so many products."""
    chosen = np.random.default_rng(0).permutation(len(sizes))[:SAMPLE]
    cut = Tiles.of(machine, np.maximum(sizes[chosen], 1.0))
    busy, waves, moved = (torch.tensor(x) for x in (cut.busy, cut.waves, cut.moved[:, 0]))
    wanted, (sharp, blunt) = torch.tensor(np.log(seconds[chosen])), PHYSICS.sharpness
    area = torch.tensor([r * c for r, c in zip(PHYSICS.rows, PHYSICS.columns, strict=True)])
    slow = (0.15 * torch.log(32768.0 / area)).double().requires_grad_()
    wave = torch.full((len(area),), np.log(2e-6)).double().requires_grad_()
    rest = torch.tensor(np.log([0.8, 3e-6])).requires_grad_()
    optimizer = torch.optim.Adam([slow, wave, rest], lr=0.03)
    for _ in range(STEPS):
        each = torch.log(torch.exp(slow) * busy + torch.exp(wave) * waves)
        computed = -torch.logsumexp(-sharp * each, 1) / sharp
        both = torch.stack([computed, torch.log(moved) - rest[0]])
        told = torch.logaddexp(torch.logsumexp(blunt * both, 0) / blunt, rest[1])
        error = (told - wanted).abs().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    figures = [[float(f"{x:.3g}") for x in torch.exp(part).tolist()] for part in (slow, wave, rest)]
    return Tiling(
        slowness=figures[0], wave_seconds=figures[1], memory=figures[2][0],
        start_seconds=figures[2][1],
    )  # fmt: skip


def fit_products(name: str, precision: Precision, of: Measured, origin: str) -> dict[str, Any]:
    """Tiling and trees of all rows, and the errors of those that were fitted without each group."""
    devices = PRODUCTS[name, precision]
    machine = Machine.of(device(devices[0]), precision)
    ratios, weights = [], []
    for group in [*sorted(set().union(*of.groups)), ""]:  # at last nothing is left out
        left = np.array([group in groups for groups in of.groups])
        tiling = fit_tiling(machine, of.sizes[~left], of.seconds[~left])
        base, features = physical(machine, tiling, of.sizes)
        logs = np.log(of.seconds / base)
        booster = grown(features[~left], logs[~left], of.weights[~left])
        if left.any():
            ratio = np.exp(logs[left] - booster.predict(xgboost.DMatrix(features[left])))
            mean = errors(ratio, of.weights[left])["mean"]
            physics = errors(np.exp(logs[left]), of.weights[left])["mean"]
            print(
                f"{devices[0]:16} {precision} without {group:28} {mean:.2%} of {left.sum()}, "
                f"without trees {physics:.2%}"
            )
            ratios.append(ratio)
            weights.append(of.weights[left])
    table = {
        "devices": list(devices),
        "precision": precision,
        "origin": origin,
        "tiling": tiling.model_dump(),
        "least": of.sizes.min(axis=0).tolist(),
        "most": of.sizes.max(axis=0).tolist(),
        **complete(booster),
        "errors": errors(np.concatenate(ratios), np.concatenate(weights)),
    }
    trees = Trees.of(ProductTrees.model_validate(table))
    sums = trees.sums(features) - booster.predict(xgboost.DMatrix(features))
    assert np.abs(sums).max() < 0.01, np.abs(sums).max()
    print(f"{devices[0]:16} {precision} {table['errors']}")
    return table


def print_physics(tables: list[dict[str, Any]], of: dict[str, Measured]) -> None:
    """Errors of physics alone on each device, by the mean tiling of the others."""
    ratios = []
    for table in tables:
        name = next(n for (n, p), types in PRODUCTS.items() if list(types) == table["devices"])
        others = [Tiling(**t["tiling"]) for t in tables if t is not table]
        machine = Machine.of(device(table["devices"][0]), table["precision"])
        ratio = of[name].seconds / physical(machine, mean_of(others), of[name].sizes)[0]
        print(f"{name} {table['precision']} by the others: {errors(ratio, of[name].weights)}")
        ratios.append(np.random.default_rng(0).choice(ratio, 1000))
    print(f"physics alone: {errors(np.concatenate(ratios), np.ones(1000 * len(ratios)))}")


KINDS = {
    "binary": ("add", "mul", "pow", "div"),
    "pointwise": ("addu", "mulu", "divu", "relu", "gelu", "tanh"),
    "norm": ("ln",),
    "softmax": ("softmax",),
}
MOVED = {"binary": 3.0, "pointwise": 2.0, "norm": 2.0, "softmax": 2.0}  # fp32 numbers per element


BYTES, ROWS = np.arange(24.5, 29.0), np.array([9.5, 10.5, 11.5])  # knots, as logarithms


def share_grid(size: Floats, row: Floats, share: Floats) -> Floats:
    """[B, R] medians near each knot; where nothing is near, of the nearest four."""
    grid = np.empty((len(BYTES), len(ROWS)))
    for i, at in enumerate(BYTES):
        for j, width in enumerate(ROWS):
            far = np.maximum(np.abs(size - at), np.abs(row - width))
            grid[i, j] = np.median(share[far <= max(0.5, np.sort(far)[3])])
    return grid


def share_at(grid: Floats, size: Floats, row: Floats) -> Floats:
    """Straight lines between knots, as `move_seconds` draws them."""
    across = [[np.interp(r, ROWS, line) for line in grid] for r in row]
    return np.array([np.interp(s, BYTES, line) for s, line in zip(size, across, strict=True)])


def fit_moves(folder: Path) -> Iterator[dict[str, Any]]:
    """Shares of the bandwidth by device and kind; every third row is left out for the errors."""
    of: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    for line in rows(folder / "neusight_elementwise_fp32.csv.gz"):
        kind = kind_of.get(line["OPName"])
        if kind is not None:
            moved = 4 * MOVED[kind] * float(line["B"]) * float(line["H"])
            of[line["Device"], kind].append((moved, float(line["H"]), float(line["seconds"])))
    grids, tables = {}, {}
    for (name, kind), found in sorted(of.items()):
        devices = PRODUCTS[name, "fp32"]
        moved, row, seconds = np.array(found).T
        at_peak = moved / device(devices[0]).memory_bytes_per_s
        tables[name, kind] = size, row, share = (
            np.log2(moved), np.log2(row), at_peak / (seconds - MOVING.start_seconds)
        )  # fmt: skip
        kept = np.arange(len(moved)) % 3 > 0
        told = share_at(share_grid(size[kept], row[kept], share[kept]), size[~kept], row[~kept])
        made = errors(told / share[~kept], np.ones(len(told)))
        grids[name, kind] = grid = share_grid(size, row, share)
        print(f"{devices[0]:16} {kind:10} {made}")
        yield {
            "devices": list(devices), "kind": kind, "origin": "neusight",
            "log2_bytes": BYTES.tolist(), "log2_row": ROWS.tolist(),
            "share": grid.round(3).tolist(), "errors": made,
        }  # fmt: skip
    for (name, kind), (size, row, share) in tables.items():
        speed = device(PRODUCTS[name, "fp32"][0]).memory_bytes_per_s
        others = [n for n, k in grids if k == kind and n != name]
        near = min(
            others,
            key=lambda n: abs(np.log(device(PRODUCTS[n, "fp32"][0]).memory_bytes_per_s / speed)),
        )
        told = share_at(grids[near, kind], size, row)
        print(f"{name} {kind} by {near}: {errors(told / share, np.ones(len(share)))}")


def rising(values: Floats, weights: Floats) -> Floats:
    """The nearest values that never fall (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            one, other = pools[-2:]
            total = one[1] + other[1]
            mean = (one[0] * one[1] + other[0] * other[1]) / total
            pools[-2:] = [[mean, total, one[2] + other[2]]]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


def fit_curve(
    fabric: str,
    operation: str,
    ranks: int,
    points: Iterable[tuple[float, float]],
    others: Iterable[tuple[float, float]],
    origin: str,
) -> dict[str, Any]:
    """Knots at every half power of two; every third point is left out for the errors. others:
    points of another machine, which count in the errors alone."""
    size, seconds = np.log2(np.array(sorted(points))).T
    kept = np.arange(len(size)) % 3 > 0

    def knots(chosen: Any) -> tuple[Floats, Floats]:
        x, y = size[chosen], seconds[chosen]
        at = np.arange(np.floor(2 * x.min()), np.ceil(2 * x.max()) + 1) / 2
        near = [np.abs(x - knot) <= 0.25 for knot in at]
        at, near = at[[n.any() for n in near]], [n for n in near if n.any()]
        # the point's own slope to the knot: half of the seconds grow with the bytes nearby
        values = np.array(
            [np.median(y[n] + 0.5 * (knot - x[n])) for n, knot in zip(near, at, strict=True)]
        )
        return at, rising(values, np.array([float(n.sum()) for n in near]))

    told = np.interp(size, *knots(kept))
    ratio = 2.0 ** (seconds - told)[~kept]
    more = [2.0 ** (np.log2(t) - np.interp(np.log2(s), *knots(kept))) for s, t in others]
    ratio = np.concatenate([ratio, more])
    made = errors(ratio, np.ones(len(ratio)))
    at, values = knots(np.full(len(size), True))
    print(f"{fabric:20} {operation:12} {ranks:2} {made}")
    return {
        "fabric": fabric, "operation": operation, "ranks": ranks, "origin": origin,
        "log2_bytes": at.tolist(), "seconds": [float(f"{2**v:.4g}") for v in values],
        "errors": made,
    }  # fmt: skip


# aiconfigurator's names of devices and of operations
AIC_FABRICS = {
    "NVIDIA A100-SXM4-80GB": "a100-nvswitch",
    "NVIDIA H100 80GB HBM3": "h100-nvswitch",
    "NVIDIA L40S": "l40s-pcie",
}
AIC_OPERATIONS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "alltoall": "all-to-all"}
AIC_BYTES = {"half": 2, "int8": 1}  # of an element; the column message_size counts elements


def nccl_rows(
    folder: Path, number: str = "half"
) -> Iterator[tuple[tuple[str, str, int], float, float]]:
    """((fabric, operation, ranks), bytes, seconds) of aiconfigurator's collectives of one type of
    numbers."""
    for row in rows(folder / "aic_nccl.csv.gz"):
        known = row["device"] in AIC_FABRICS and row["op_name"] in AIC_OPERATIONS
        if known and row["nccl_dtype"] == number:
            fabric, operation = AIC_FABRICS[row["device"]], AIC_OPERATIONS[row["op_name"]]
            size = float(row["message_size"]) * AIC_BYTES[number]
            yield (fabric, operation, int(row["num_gpus"])), size, float(row["latency"]) * 1e-3


def fit_collectives(folder: Path, tables: Path) -> Iterator[dict[str, Any]]:
    """A100 behind NVSwitch: vTrain from 1 MiB on, aiconfigurator below; V100: vTrain; pairs and
    messages: vidur. Groups within one node only, and of A40 none: its pairs have messages alone, at
    4 GB/s, which is not what their bridge carries. vidur's all-reduces on NVSwitch count in the
    errors from 1 MiB on; below, equal ones differ there by a factor of four."""
    # a smaller message of aiconfigurator's is taken for no slower than the smallest on vTrain's
    names = {"a100_dgx": "a100-nvswitch", "a100_pairwise_nvlink": "a100-pairs"}
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    others: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    origin: dict[tuple[str, str, int], set[str]] = defaultdict(set)
    smallest: dict[tuple[str, str, int], float] = {}
    for path in sorted(tables.glob("*_AR_GPU*_LUT")):
        chip, ranks = path.name.split("_")[0], int(path.name.split("GPU")[1].split("_")[0])
        key = ("a100-nvswitch" if chip == "a100" else "v100-nvlink", "all-reduce", ranks)
        lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
        found[key] += [(float(line[0]), float(line[3]) * 1e-9) for line in lines]
        smallest[key] = min(seconds for _, seconds in found[key])
        origin[key].add("vtrain")
    for row in rows(folder / "vidur_collectives.csv.gz"):
        operation = "send" if row["op"] == "send_recv" else "all-reduce"
        ranks, size = int(row["num_workers"]), float(row["size"])
        if int(row["devices_per_node"]) != ranks or row["system"] not in names:
            continue
        key = (names[row["system"]], operation, ranks)
        if "vtrain" not in origin[key]:
            found[key].append((size, float(row["seconds"])))
            origin[key].add("vidur")
        elif size >= 2**20:
            others[key].append((size, float(row["seconds"])))
    for key, size, seconds in nccl_rows(folder):
        if "vtrain" in origin[key] and size < 2**20:
            found[key].append((size, min(seconds, smallest[key])))
            origin[key].add("aiconfigurator")
    for key, points in sorted(found.items()):
        yield fit_curve(*key, points, others[key], ", ".join(sorted(origin[key])))


def fit_nccl(folder: Path, known: set[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """aiconfigurator's collectives of 16-bit numbers, apart from those that are `known`. Those of
    bytes count in the errors alone, since NVSwitch does not sum bytes itself. Gathers of A100 take
    half of vTrain's all-reduces, from which they differ by a few per cent."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    others: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for key, size, seconds in nccl_rows(folder):
        found[key].append((size, seconds))
    for key, size, seconds in nccl_rows(folder, "int8"):
        others[key].append((size, seconds))
    for key, points in sorted(found.items()):
        if key not in known and key[:2] != ("a100-nvswitch", "all-gather"):
            yield fit_curve(*key, points, others[key], "aiconfigurator")


def fit_all_collectives(folder: Path, tables: Path) -> list[dict[str, Any]]:
    """The curves of all fabrics; where several sources measured one, vTrain's and vidur's."""
    curves = list(fit_collectives(folder, tables))
    known = {(curve["fabric"], curve["operation"], curve["ranks"]) for curve in curves}
    return [*curves, *fit_nccl(folder, known)]


def fit_all_products(folder: Path) -> list[dict[str, Any]]:
    """The tables of all products, with errors of physics alone printed."""
    of_16, of_32 = products_16(folder), products_32(folder)
    products = [fit_products(name, "fp16", of_16[name], "vidur") for name in sorted(of_16)]
    products += [fit_products(name, "fp32", of_32[name], "neusight") for name in sorted(of_32)]
    print_physics([t for t in products if t["precision"] == "fp16"], of_16)
    print_physics([t for t in products if t["precision"] == "fp32"], of_32)
    return products


# aiconfigurator's names of measured devices and formats; those of the same chip and power follow.
AIC_DEVICES = {
    "NVIDIA A100-SXM4-80GB": ("A100-SXM4-80GB", "A100-SXM4-40GB", "A800-SXM4-80GB"),
    "NVIDIA H100 80GB HBM3": ("H100-SXM5-80GB", "H800-SXM5-80GB"),
    "NVIDIA L40S": ("L40S",),
    "NVIDIA B200": ("B200",),
}
AIC_FORMATS: dict[str, Format] = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "fp4",
}  # fmt: skip
# Least k and n. Libraries have no kernels for less than a block of 128, or fall back to other ones.
LEAST_WIDTH: dict[Format, float] = {"bf16": 64, "fp8": 128, "fp8-block": 128, "fp4": 128}
LEFT_OUT = 3  # one row in so many gives the errors


def burst_products(folder: Path) -> dict[tuple[str, Format], tuple[Floats, Floats]]:
    """(sizes [N, 4], seconds [N]) of aiconfigurator's products by device and format, in a random
    order."""
    found: dict[tuple[str, Format], list[tuple[float, ...]]] = defaultdict(list)
    for row in rows(folder / "aic_gemm.csv.gz"):
        number = AIC_FORMATS.get(row["gemm_dtype"])
        m, k, n = (float(row[key]) for key in "mkn")
        if number is not None and row["device"] in AIC_DEVICES and min(k, n) >= LEAST_WIDTH[number]:
            found[row["device"], number].append((1.0, m, k, n, float(row["best_ms"]) * 1e-3))
    random = np.random.default_rng(0)
    tables = {key: random.permutation(np.array(found[key])) for key in sorted(found)}
    return {key: (table[:, :4], table[:, 4]) for key, table in tables.items()}


def burst_machine(name: str, number: Format) -> Machine:
    """The machine of a device of aiconfigurator's, whose bursts were measured."""
    return Machine.of(device(AIC_DEVICES[name][0]), number, regime="burst")


def fit_formats(folder: Path) -> Iterator[dict[str, Any]]:
    """The tiles of each architecture in each format. Every third product is left out for errors."""
    for (name, number), (sizes, seconds) in burst_products(folder).items():
        machine = burst_machine(name, number)
        left = np.arange(len(sizes)) % LEFT_OUT == 0
        tiling = fit_tiling(machine, sizes[~left], seconds[~left])
        ratio = seconds[left] / physical(machine, tiling, sizes[left])[0]
        made = errors(ratio, np.ones(len(ratio)))
        print(f"{name:24} {number:10} {made}")
        yield {
            "devices": list(AIC_DEVICES[name]),
            "architecture": architecture(device(AIC_DEVICES[name][0])),
            "number": number,
            "origin": "aiconfigurator",
            "tiling": tiling.model_dump(),
            "errors": made,
        }


PARTS = ("products", "formats", "moves", "collectives")


def main() -> None:
    """Fit the parts, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("operators", type=Path)
    parser.add_argument("all_reduces", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    folder = options.operators
    fits = {
        "products": lambda: fit_all_products(folder),
        "formats": lambda: list(fit_formats(folder)),
        "moves": lambda: list(fit_moves(folder)),
        "collectives": lambda: fit_all_collectives(folder, options.all_reduces),
    }
    document = {"format": "hetplan-rates", "version": 1, "origins": ORIGINS}
    before = read_json(options.output) if options.output.exists() else {}
    for part in PARTS:
        document[part] = fits[part]() if part in options.parts else before[part]
    write_text(options.output, to_json(document))
    print(f"{options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
