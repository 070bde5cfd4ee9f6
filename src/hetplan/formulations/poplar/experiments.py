"""The paper's experiments: three clusters, three models, four ZeRO stages; cluster C in other
proportions.

Predicted curves at every micro-batch, 2 million tokens per iteration. The paper states neither
sequence lengths nor the network between nodes: 2048 tokens (Llama), 512 (BERT) and the cluster
files' figures are assumed.
Source: Poplar (AAAI 2025), Table 1, Figures 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.formulations.poplar.pose import Posed, pose
from hetplan.formulations.poplar.zero import STAGES
from hetplan.profiling.cluster import Cluster, example_cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.profiling.workload import Workload

TOKENS = 2**21
CLUSTERS = ("poplar-a", "poplar-b", "poplar-c")
MODELS = ("llama-0.5b", "llama-1.1b", "bert-1.1b")
# A800 to V100S, Figure 5; 4:4 is cluster C itself.
RATIOS = ((4, 1), (4, 2), (4, 3), (3, 4), (2, 4), (1, 4))
LARGEST_PREDICTED = 64


@dataclass(frozen=True)
class Experiment:
    """One combination of the paper's evaluation; name as in the library, which holds those that are
    possible."""

    name: str
    origin: str
    posed: Posed


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
    for stage in STAGES:
        posed = pose(workload, stage)
        yield Experiment(
            f"{name}-zero{stage}", _origin(workload, figure, posed.once_seconds), posed
        )


def _origin(workload: Workload, figure: str, once_seconds: float) -> str:
    counts = " + ".join(f"{n} x {name}" for name, n in workload.cluster.counts().items())
    model, cluster = workload.model, workload.cluster
    return (
        f"Poplar (AAAI 2025), {figure}: {model.name} on {counts}, 2^21 tokens per iteration. Times are "
        f"hetplan's roofline prediction from datasheets, not the paper's measurements; the sequence length "
        f"({model.sequence}) and the network between the nodes (cluster {cluster.name}) are assumed."
        + (
            f" An iteration takes {once_seconds:.6g} s more: ZeRO 2's all-gather."
            if once_seconds
            else ""
        )
    )
