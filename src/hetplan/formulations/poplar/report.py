"""Predicted speeds of DeepSpeed, Whale, Poplar and the optimum by ZeRO stage, beside the measured
ones.

Ours are predictions: equal curves go into every method, and each plan is priced by the same
evaluator, plus what ZeRO 2 pays once per iteration. The paper's are measured training throughputs
on its own clusters, of which its text states only the ranges below; its bar charts carry no
figures.
The experiments: three clusters, three models, four ZeRO stages; cluster C in other proportions. 2
million tokens per iteration, predicted curves at every micro-batch. The paper states neither
sequence lengths nor the network between nodes: 2048 tokens (Llama), 512 (BERT) and the cluster
files' figures are assumed.
Source: Poplar (AAAI 2025), Table 1, Figures 3 to 5; of the measured figures abstract and "Different
models".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

from hetplan.formulations.poplar.family import FAMILY
from hetplan.formulations.poplar.pose import Posed, pose
from hetplan.formulations.poplar.zero import STAGES
from hetplan.profiling.cluster import Cluster, example_cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.workload import PREDICTOR, Workload, predict
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from hetplan.text import Table

Row = dict[str, Any]
TOKENS = 2**21
CLUSTERS = ("poplar-a", "poplar-b", "poplar-c")
MODELS = ("llama-0.5b", "llama-1.1b", "bert-1.1b")
# A800 to V100S, Figure 5; 4:4 is cluster C itself.
RATIOS = ((4, 1), (4, 2), (4, 3), (3, 4), (2, 4), (1, 4))
LARGEST_PREDICTED = 64


@dataclass(frozen=True)
class Experiment:
    """One combination of the paper's evaluation; name as in the library, which holds those that are
    possible.

    alone: the same on the devices of each type alone, the stronger first. flops: per iteration.
    """

    name: str
    origin: str
    posed: Posed
    alone: tuple[Posed, ...]
    flops: float


def experiments() -> Iterator[Experiment]:
    """Every combination, those included that do not fit (posed.unfit says why)."""
    for name in CLUSTERS:
        for model in MODELS:
            yield from _stages(example_cluster(name), model, "Figures 3 and 4", f"{name}-{model}")
    for a800, v100s in RATIOS:
        cluster = in_proportion(example_cluster("poplar-c"), (a800, v100s))
        yield from _stages(
            cluster, "llama-0.5b", "Figure 5", f"poplar-c-{a800}to{v100s}-llama-0.5b"
        )


def in_proportion(cluster: Cluster, counts: tuple[int, ...]) -> Cluster:
    """The same nodes with other numbers of devices."""
    nodes = tuple(replace(node, devices=n) for node, n in zip(cluster.nodes, counts, strict=True))
    return replace(cluster, nodes=nodes)


def paper_workload(cluster: Cluster, model_name: str) -> Workload:
    """Two million tokens of a model on a cluster, profile predicted at every micro-batch up to
    64."""
    model = load_model(model_name)
    batches = range(1, LARGEST_PREDICTED + 1)
    profile = predict(model, cluster, micro_batches=batches, tensor_degrees=(1,), date="2025-01-01")
    return Workload(model, cluster, profile, TOKENS // model.tokens_per_sample)


def _stages(cluster: Cluster, model: str, figure: str, name: str) -> Iterator[Experiment]:
    workload = paper_workload(cluster, model)
    parts = [replace(workload, cluster=replace(cluster, nodes=(node,))) for node in cluster.nodes]
    for stage in STAGES:
        posed, alone = pose(workload, stage), tuple(pose(part, stage) for part in parts)
        origin = _origin(workload, figure, posed.once_seconds)
        flops = workload.flops_per_iteration
        yield Experiment(f"{name}-zero{stage}", origin, posed, alone, flops)


def _origin(workload: Workload, figure: str, once_seconds: float) -> str:
    counts = " + ".join(f"{n} x {name}" for name, n in workload.cluster.counts().items())
    model, cluster = workload.model, workload.cluster
    return (
        f"Poplar (AAAI 2025), {figure}: {model.name} on {counts}, 2^21 tokens per "
        "iteration. Times are "
        f"hetplan's prediction (predictor {PREDICTOR}), not the paper's measurements; the "
        "sequence length "
        f"({model.sequence}) and the network between the nodes (cluster {cluster.name}) "
        "are assumed."
        + (
            f" An iteration takes {once_seconds:.6g} s more: ZeRO 2's all-gather."
            if once_seconds
            else ""
        )
    )


METHODS = ("deepspeed", "whale", "paper", "exact")
# DeepSpeed on the devices of one type, as if the others were not there: baselines 2 and 1.
ALONE = ("strong-only", "weak-only")
COMPARED = (("paper", "deepspeed"), ("paper", "whale"), ("exact", "paper"))
NAMES = {
    "weak-only": "weak only", "strong-only": "strong only", "deepspeed": "DeepSpeed",
    "whale": "Whale", "paper": "Poplar", "exact": "optimum",
}  # fmt: skip


# What the paper measured: which speed over which, the lowest ratio (None: not stated) and the
# highest.
MEASURED = (
    ("Poplar over other systems, all experiments (abstract)", 1.02, 3.92),
    ("Poplar over DeepSpeed, Llama 1.1B (Figure 4b)", None, 2.27),
    ("Poplar over Whale, Llama 1.1B (Figure 4b)", None, 1.14),
    ("Poplar over DeepSpeed, BERT 1.1B (Figure 4c)", None, 3.92),
    ("Poplar over Whale, BERT 1.1B (Figure 4c)", None, 1.98),
)
PREDICTED = (
    "predicted by hetplan, not measured: analytical curves, the same for every method; "
    "Whale, Poplar and optimum are speeds relative to DeepSpeed (1.00)"
)
RANGES_ONLY = (
    "the paper states ranges over experiments only, none per ZeRO stage; its bar charts carry no "
    "numbers"
)


def row_of(case: Experiment) -> Row:
    """Predicted seconds per iteration by method (None: no plan), what follows from them, and
    under-utilisation (eq. 4). message: why there is no plan at all."""
    posed = case.posed
    seconds, idle = dict[str, float | None](), dict[str, float | None]()
    for method in METHODS:
        result = solve(FAMILY, posed.data, method, Run())
        seconds[method] = (
            None if result.objective is None else result.objective + posed.once_seconds
        )
        idle[method] = result.details.get("under_utilisation")  # type: ignore[assignment]
    for name, part in zip(ALONE, case.alone, strict=True):
        alone = solve(FAMILY, part.data, "deepspeed", Run()).objective
        seconds[name] = None if alone is None else alone + part.once_seconds
    return {
        "experiment": case.name,
        "zero_stage": posed.data.zero_stage,
        "predicted_seconds": seconds,
        "predicted_flops_per_second": {
            name: None if s is None else case.flops / s for name, s in seconds.items()
        },
        "predicted_ratios": {
            f"{fast}_over_{slow}": ratio(seconds, fast, slow) for fast, slow in COMPARED
        },
        "under_utilisation": idle,
        "message": posed.unfit or "",
    }


def ratio(seconds: Mapping[str, float | None], fast: str, slow: str) -> float | None:
    """How many times faster `fast` is than `slow`; None where either has no plan."""
    short, long = seconds[fast], seconds[slow]
    return None if short is None or long is None else long / short


def report(
    name: str | None, tell: Callable[[str], None] | None = None
) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON types for the experiments whose names match the shell pattern `name`; all
    without.

    rows: the experiments. predicted_ranges: of their ratios, by ZeRO stage. measured: the paper's
    ratios.
    """
    rows = list[Row]()
    for case in experiments():
        if fnmatchcase(case.name, name or "*"):
            if tell is not None:
                tell(case.name)
            rows.append(row_of(case))
    rows.sort(key=lambda row: (row["zero_stage"], row["experiment"]))
    ranges = [
        {
            "zero_stage": stage,
            **{f"{fast}_over_{slow}": span(rows, stage, fast, slow) for fast, slow in COMPARED},
        }
        for stage in sorted({row["zero_stage"] for row in rows})
    ]
    return as_tables(rows), {
        "rows": rows,
        "predicted_ranges": ranges,
        "measured": [dict(zip(("ratio", "low", "high"), row, strict=True)) for row in MEASURED],
    }


def as_tables(rows: Sequence[Row]) -> list[Table]:
    """Speeds by experiment, their ranges per ZeRO stage beside the paper's, and what the paper
    measured."""

    def table(title: str, notes: tuple[str, ...], columns: Mapping[str, Any]) -> Table:
        first: dict[str, Any] = {
            "ZeRO": lambda row: str(row["zero_stage"]),
            "experiment": itemgetter("experiment"),
        }
        return Table.of(title, rows, first | dict(columns), notes, right=(0, *range(2, 9)))

    def speed(fast: str, slow: str, digits: int) -> Callable[[Row], str]:
        return lambda row: _cell(ratio(row["predicted_seconds"], fast, slow), digits)

    def part(key: str, method: str, digits: int, unit: float = 1.0) -> Callable[[Row], str]:
        return lambda row: _cell(row[key][method], digits, unit)

    speeds = table(
        "Predicted speeds on Poplar's experiments",
        (PREDICTED, *(f"{row['experiment']}: {row['message']}" for row in rows if row["message"])),
        {
            "DeepSpeed s": part("predicted_seconds", "deepspeed", 4),
            **{NAMES[method]: speed(method, "deepspeed", 2) for method in METHODS[1:]},
            "optimum / Poplar": speed("exact", "paper", 4),
        },
    )
    useful = table(
        "Predicted TFLOP/s of the whole cluster (Figures 3 to 5)",
        (
            "predicted; weak only and strong only: DeepSpeed on one type, the other not there; of "
            "poplar-c-4to1 to 1to4 they are Figure 5's homogeneous bars, A4 to A1 and V1 to V4",
        ),
        {NAMES[m]: part("predicted_flops_per_second", m, 1, 1e12) for m in NAMES},
    )
    stages = sorted({row["zero_stage"] for row in rows})
    ranges = Table(
        "Ranges of the predicted ratios",
        ("ZeRO", *(f"{NAMES[fast]} over {NAMES[slow]}" for fast, slow in COMPARED)),
        tuple((str(stage), *(_range(rows, stage, *pair) for pair in COMPARED)) for stage in stages),
        ("predicted",),
        right=(0,),
    )
    idle = table(
        "Predicted under-utilisation (Poplar, eq. 4): samples that idle devices could "
        "have processed at peak speed",
        ("predicted",),
        {NAMES[method]: part("under_utilisation", method, 3) for method in METHODS},
    )
    lines = tuple(
        (ratio, f"up to {high:.2f}" if low is None else f"{low:.2f} to {high:.2f}")
        for ratio, low, high in MEASURED
    )
    measured = Table(
        "As the paper measured it", ("ratio of speeds", "measured"), lines, (RANGES_ONLY,)
    )
    return [speeds, useful, idle, ranges, measured]


def span(rows: Sequence[Row], stage: int, fast: str, slow: str) -> dict[str, Any] | None:
    """Least and greatest predicted ratio of a stage, and of how many experiments; None of none."""
    own = [row["predicted_seconds"] for row in rows if row["zero_stage"] == stage]
    known = [each for seconds in own if (each := ratio(seconds, fast, slow)) is not None]
    return {"low": min(known), "high": max(known), "experiments": len(known)} if known else None


def _range(rows: Sequence[Row], stage: int, fast: str, slow: str) -> str:
    known = span(rows, stage, fast, slow)
    return (
        "-"
        if known is None
        else "{low:.3f} to {high:.3f} ({experiments} experiments)".format(**known)
    )


def _cell(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"
