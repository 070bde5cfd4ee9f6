"""Poplar's experiments (AAAI 2025): every method on equal predicted curves, priced by the
evaluator, plus what ZeRO 2 pays once per iteration.

2 million tokens per iteration, curves predicted at every micro-batch up to 64. The paper states
neither sequence lengths nor the network between nodes: 2048 tokens (Llama), 512 (BERT) and the
cluster files' figures are assumed.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from evidence.papers import Row
from hetplan.formulations import family
from hetplan.formulations.poplar.curves import CurveDevice, spline_curve
from hetplan.formulations.poplar.pose import pose
from hetplan.formulations.poplar.problem import Floats
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.largest_batch import explore
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import Workload
from hetplan.replays.model_states import STAGES
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

TOKENS = 2**21
LARGEST_PREDICTED = 64
METHODS = {"deepspeed": "DeepSpeed", "whale": "Whale", "paper": "Poplar", "exact": "optimum"}


@cache
def paper_workload(cluster: str, model_name: str, counts: tuple[int, ...] = ()) -> Workload:
    """Two million tokens of a model on an example cluster, with other counts of devices if any; a
    node with none is not there."""
    model, whole = load_model(model_name), example_cluster(cluster)
    nodes = zip(whole.nodes, counts or [node.devices for node in whole.nodes], strict=True)
    on = replace(whole, nodes=tuple(replace(node, devices=n) for node, n in nodes if n))
    profile = predict(
        model,
        on,
        micro_batches=range(1, LARGEST_PREDICTED + 1),
        tensor_degrees=(1,),
        date="2025-01-01",
    )
    return Workload(model, on, profile, TOKENS // model.tokens_per_sample)


@cache
def seconds_by_method(
    cluster: str, model: str, counts: tuple[int, ...], stage: int
) -> dict[str, float]:
    """Of an iteration by every method that has a plan; `weak only` and `strong only`: DeepSpeed on
    the devices of the second and of the first type, the others not there."""
    whole = paper_workload(cluster, model, counts)
    alone = [
        replace(whole, cluster=replace(whole.cluster, nodes=(n,))) for n in whole.cluster.nodes
    ]
    cases = [("weak only", alone[1], "deepspeed"), ("strong only", alone[0], "deepspeed")]
    cases += [(name, whole, method) for method, name in METHODS.items()]
    posed = [(name, method, pose(workload, stage)) for name, workload, method in cases]
    return {
        name: objective + one.once_seconds
        for name, method, one in posed
        if (objective := solve(family("poplar"), one.data, method, Run()).objective) is not None
    }


def teraflops(cluster: str, model: str, counts: tuple[int, ...] = ()) -> float:
    """TFLOP of an iteration."""
    return paper_workload(cluster, model, counts).flops_per_iteration / 1e12


@cache
def optimum(cluster: str, model: str, counts: tuple[int, ...], stage: int) -> float | None:
    """Seconds of an iteration by the optimum of Poplar's problem on these devices; None where they
    cannot hold the model."""
    posed = pose(paper_workload(cluster, model, counts), stage)
    objective = solve(family("poplar"), posed.data, "exact", Run()).objective
    return None if objective is None else objective + posed.once_seconds


def idle_devices(fixed: Row, row: Row) -> Row:
    """TFLOP/s of the optimum where all devices take part, where all of one type may be left out,
    and where any may be; and which are used then.

    Those left out hold no shards and take part in no collective, so that each set of devices is an
    instance of its own.
    """
    cluster, model, stage = row["cluster"], row["model"], row["ZeRO"]
    nodes = example_cluster(cluster).nodes
    whole = tuple(node.devices for node in nodes)
    every = [counts for counts in product(*(range(n + 1) for n in whole)) if any(counts)]
    seconds = {counts: optimum(cluster, model, counts, stage) for counts in every}
    known = {counts: value for counts, value in seconds.items() if value is not None}
    if not known:
        return {}
    of_types = {
        counts: value
        for counts, value in known.items()
        if all(n in (0, most) for n, most in zip(counts, whole, strict=True))
    }
    flops = teraflops(cluster, model)
    best = min(known, key=lambda counts: known[counts])
    used = [f"{n} {node.device}" for n, node in zip(best, nodes, strict=True) if n]
    figures: Row = {"all": flops / known[whole] if whole in known else None}
    figures["whole types"] = flops / min(of_types.values()) if of_types else None
    figures |= {"any": flops / known[best], "used": ", ".join(used)}
    if whole in known:
        figures["gain, %"] = 100 * (known[whole] / known[best] - 1)
    return figures


def tflops(fixed: Row, row: Row) -> Row:
    """Figures 3 to 5: TFLOP/s of the whole cluster."""
    cluster, model = (row.get(key) or fixed[key] for key in ("cluster", "model"))
    counts = tuple(map(int, filter(None, row.get("A800:V100S", "").split(":"))))
    flops = teraflops(cluster, model, counts)
    return {
        name: flops / s
        for name, s in seconds_by_method(cluster, model, counts, row["ZeRO"]).items()
    }


def ratios(fixed: Row, row: Row) -> Row:
    """How much faster one method is than another, over the clusters and stages of the models."""
    fast, slow = row["ratio"].split(" over ")
    models = [row["model"]] if row["model"] in fixed["models"] else fixed["models"]
    speed_ups = [
        each[slow] / each[fast]
        for cluster in fixed["clusters"]
        for model in models
        for stage in STAGES
        if fast in (each := seconds_by_method(cluster, model, (), stage)) and slow in each
    ]
    return {"ours, lowest": min(speed_ups), "ours, highest": max(speed_ups)}


def rated(fixed: Row, row: Row) -> tuple[Floats, Floats, Row]:
    """Of a device type under ZeRO 0: samples per second of its micro-batches, by Poplar's spline
    too; and how Whale and Poplar rate it, beside its speed at the largest micro-batch."""
    data = pose(paper_workload(row["cluster"], fixed["model"]), 0).data
    own = next(one for one in data.devices if one.name == row["device"])
    batches = np.arange(1, len(own.step_seconds) + 1)
    aware = explore(CurveDevice(own.step_seconds))
    speed = batches / np.array(own.step_seconds)
    spline = batches / spline_curve(aware.points, aware.largest)[1:]
    return (
        speed,
        spline,
        {"Whale's": own.flops_per_second, "Poplar's": spline.max(), "true": speed[-1]},
    )


def capability(fixed: Row, row: Row) -> Row:
    """Figures 6 to 8: samples per second by micro-batch, how far the spline is from it, and how
    Whale and Poplar rate a device, in T4s."""
    speed, spline, ratings = rated(fixed, row)
    weakest = rated(fixed, fixed["weakest"])[2]
    shown = {f"at {b}": float(speed[b - 1]) for b in fixed["batches"] if b <= len(speed)}
    off = {"spline off by, %": float(100 * abs(spline / speed - 1).max())}
    return shown | off | {key: float(ratings[key] / weakest[key]) for key in ratings}
