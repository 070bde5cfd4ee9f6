"""Seconds of one iteration of a plan, and bytes on its fullest device, from Sailor's data. Nothing
is fitted to totals.

Layer times come from tables with faults, which are cleaned. A layer does not get faster when its
micro-batch grows, so a time above that of a larger micro-batch is a fault. In its place stands what
bounds it: the larger one's time from above; from below the least time in which the GPU ever got
through that layer (its launches) and the throughput. Under tensor parallelism compute/tp and
bytes/bandwidth grow with the micro-batch, and a fixed part (launches, the all-reduces' latency and
their waiting for the slowest rank) does not. Forward and backward pay it once each. A profile of
many equal micro-batches in a row hides it behind queued work, a training step does not.

The order of work is 1F1B. Two groups exchange by NCCL in one queue per pair: activations and
gradients go one after the other, each when both ends have come to it. The sender posts its message
and computes on; the receiver has nothing to compute before it has it (`waiting` in the simulator's
terms). The host posts each exchange at both ends.

All ranks of a node share its network cards, for transfers and reductions alike. Gradients are
reduced after the flush, fp32, 2 (D - 1) / D of a stage's parameters through every card, when all
pipelines are done (the engine has a barrier).

The fullest device holds 16 bytes per parameter (fp32 weight and gradient, and two copies of the
framework's), activations of min(S - s, M) micro-batches on stage s, three buffers of the largest
intermediate (attention scores, or logits where the head is), two of what the stage exchanges, and
what framework and driver take before anything is computed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from evidence.truth.tables import Compared, Predicted, Published
from hetplan.adapters.importers.sailor import (
    Floats,
    Group,
    Links,
    ModelData,
    NotPricedError,
    PlanRun,
    RunPipeline,
    SizesFile,
    load_links,
    load_model_data,
    load_run,
    model_names,
)
from hetplan.errors import require
from hetplan.profiling.frameworks import RESERVED_BYTES
from hetplan.replays.simulator.pipeline import Replica, Sends, simulate_replicas
from hetplan.replays.simulator.tasks import Traffic
from hetplan.schema import read_foreign

# A larger time at a smaller micro-batch: up to this ratio it is noise, beyond it a fault.
NOISE = 1.1
BYTES_PER_PARAM = 16
ELEMENT = 4  # all of it is fp32

# What Megatron-DeepSpeed takes on a device before a model is on it: kernels loaded, CUDA's context,
# NCCL. Sailor's own simulator gives the figure for Alps, whose devices are GH200; others: CUDA and
# NCCL alone.
FRAMEWORK_BYTES = {"GH-96": 4.76e9}


# How DeepSpeed's pipeline engine exchanges activations and gradients: as torch's p2p over NCCL
# does; at each end some ten calls of torch (buffers, detaching, the send or receive itself) of
# about 30 us each, as eager kernel launches take on the host.
SENDS: Sends = "waiting"
HOST_SECONDS = 3e-4
# Attention heads; the data do not tell them. By the models' own configurations.
HEADS = {"OPT-350": 16, "GPT-Neo-2.7": 20, "OPT-30": 56, "LLAMA-3-8": 32}


@dataclass(frozen=True)
class Curve:
    """One GPU type and tensor degree: forward and backward [2, B, L] at `sizes` [B]; per_sample
    [2, L] seconds."""

    sizes: Floats
    passes: Floats
    per_sample: Floats
    update: float
    tensor: int

    def layer_seconds(self, samples: float) -> Floats:
        """[2, L] forward and backward seconds of a micro-batch of `samples`.

        Between two sizes a straight line; beyond the last one its throughput; before the first one
        its time.
        """
        place = np.interp(samples, self.sizes, np.arange(len(self.sizes)))
        at, share = int(place), place % 1
        after = self.passes[:, min(at + 1, len(self.sizes) - 1)]
        beyond = max(samples - self.sizes[-1], 0.0) * self.per_sample
        measured = (1 - share) * self.passes[:, at] + share * after + beyond
        if self.tensor == 1 or samples <= self.sizes[0]:
            return np.asarray(measured)
        fixed_part = self.passes[:, 0] + (samples - self.sizes[0]) * self.per_sample
        return np.asarray(np.maximum(measured, fixed_part))


def curve(model: ModelData, kind: str, tensor: int) -> Curve:
    """The curve of a GPU type and degree; a degree without tables is scaled from the nearest one
    that has some."""
    require(
        kind in model.tables,
        f"no profile of {model.name}",
        where="profiles",
        got=kind,
        expected=", ".join(model.tables),
        kind=NotPricedError,
    )
    tables = model.tables[kind]
    nearest = nearest_degree((degree for degree, _ in sorted(tables)), tensor)
    sizes = np.array(sorted(batch for degree, batch in tables if degree == nearest), float)
    chosen = np.stack([tables[nearest, int(batch)] for batch in sizes], axis=1)  # [3, B, L]
    passes, update = chosen[:2], float(np.median(chosen[2].max(axis=1)))
    floor = np.min([table[:2] for table in tables.values()], axis=0)
    per_sample = (passes / sizes[:, None]).min(axis=1)
    scale = nearest / tensor
    cleaned = clean(passes, sizes, floor, per_sample)
    return Curve(sizes, cleaned * scale, per_sample * scale, update * scale, tensor)


def nearest_degree(degrees: Iterable[int], tensor: int) -> int:
    """The degree whose ratio to `tensor` is least."""
    return min(degrees, key=lambda degree: abs(np.log2(degree / tensor)))


def clean(raw: Floats, sizes: Floats, floor: Floats, per_sample: Floats) -> Floats:
    """[2, B, L] `raw` without times above those of larger micro-batches. floor, per_sample: [2,
    L]."""
    above = np.minimum.accumulate(raw[:, ::-1], axis=1)[:, ::-1]
    below = np.maximum(floor[:, None], per_sample[:, None] * sizes[None, :, None])
    return np.asarray(np.where(raw > NOISE * above, np.minimum(above, below), above))


class Predictor:
    """Predictions of one model's plans. framework: bytes that the framework takes, if known."""

    def __init__(self, model: ModelData, links: Links, framework: float | None = None) -> None:
        self.model = model
        self.links = links
        self.framework = framework
        self.output = model.sizes[min(model.sizes)].output  # [L] bytes per sample, on every rank
        self.curve = cache(lambda kind, tensor: curve(model, kind, tensor))

    def predict(self, run: PlanRun) -> Predicted:
        """One plan; raises InputError where the data lack a GPU type or a degree's sizes."""
        flush, after, peaks = [], [], []
        for pipeline in run.pipelines:
            share = run.global_batch / len(run.pipelines)
            batches = max(1, math.ceil(share / (run.micro_batch * len(pipeline.groups[0]))))
            flush.append(
                simulate_replicas(self.replicas(pipeline, run.micro_batch, batches)).seconds
            )
            after.append((self.reduction(pipeline, len(run.pipelines)), self.update(pipeline)))
            peaks.append(self.peak_bytes(pipeline, run.micro_batch, batches))
        ending = float(np.max(after, axis=0).sum())
        known = [peak for peak in peaks if peak is not None]
        return Predicted(max(flush) + ending, max(known) if known == peaks else None)

    def replicas(self, pipeline: RunPipeline, micro_batch: int, batches: int) -> list[Replica]:
        """The pipeline's replicas; of stages with unlike numbers of replicas one of the slowest
        each."""
        stages, widest = len(pipeline.layers), len(pipeline.groups[0])
        cards = _cards(pipeline)
        times = [
            [self.group_seconds(g, layers, micro_batch * widest / len(groups)) for g in groups]
            for layers, groups in zip(pipeline.layers, pipeline.groups, strict=True)
        ]
        chosen = (
            [[int(np.argmax([t.sum() for t in stage])) for stage in times]]
            if len(set(map(len, times))) > 1
            else [[r] * stages for r in range(widest)]
        )
        replicas = []
        for choice in chosen:
            passes = np.array([times[s][r] for s, r in enumerate(choice)])
            moves = [
                self.transfer(pipeline, s, choice[s : s + 2], cards, micro_batch)
                for s in range(stages - 1)
            ]
            replicas.append(
                Replica(
                    stages=stages,
                    micro_batches=batches,
                    sends=SENDS,
                    exchange_seconds=HOST_SECONDS,
                    forward=passes[:, 0, None, None],
                    backward=passes[:, 1, None, None],
                    kinds=np.zeros(batches, np.int64),
                    hops=[[[move[way]] for move in moves] for way in (0, 1)],
                )
            )
        return replicas

    def group_seconds(self, group: Group, layers: list[int], samples: float) -> Floats:
        """[2] forward and backward of one micro-batch on the group: its slowest type, and
        all-reduces over nodes."""
        curves = [self.curve(kind, group.tensor) for kind in group.kinds]
        both = np.max([c.layer_seconds(samples)[:, layers].sum(axis=1) for c in curves], axis=0)
        if len(group.nodes) > 1:
            # two all-reduces of the output, forward and backward, through every node's card
            size = 2 * float(self.output[layers].sum()) * samples
            share = 2 * (len(group.nodes) - 1) / len(group.nodes)
            slowest = min(self.links.network(node.kind, node.gpus, size) for node in group.nodes)
            both = both + size * share / slowest
        return np.asarray(both)

    def transfer(
        self,
        pipeline: RunPipeline,
        stage: int,
        replicas: list[int],
        cards: list[list[int]],
        micro_batch: int,
    ) -> tuple[Traffic, Traffic]:
        """One micro-batch's activation to the next stage, each tensor rank sending its part, and
        its gradient. Ports: two for each card, and one for the two groups, whose messages go one
        after the other."""
        groups = [pipeline.groups[stage + i][r] for i, r in enumerate(replicas)]
        a, b = (cards[stage + i][r] for i, r in enumerate(replicas))
        queue = 2 * (max(map(max, cards)) + 1) + stage * len(pipeline.groups[0]) + replicas[0]
        between = ((queue, 1.0),)
        rows = micro_batch * len(pipeline.groups[0]) / len(pipeline.groups[stage])
        size = float(self.output[pipeline.layers[stage][-1]]) * rows
        if a == b:
            here = Traffic(
                size
                / self.links.local(
                    groups[0].kinds[0], max(2, groups[0].tensor + groups[1].tensor), size
                ),
                0.0,
                between,
            )
            return here, here
        pairs = min(group.tensor for group in groups)
        bandwidth = min(
            self.links.network(node.kind, min(pairs, node.gpus), size)
            for group in groups
            for node in group.nodes
        )
        there, back = (
            Traffic(size / bandwidth, 0.0, ((2 * x, 1.0), (2 * y + 1, 1.0), *between))
            for x, y in ((a, b), (b, a))
        )
        return there, back

    def reduction(self, pipeline: RunPipeline, pipelines: int) -> float:
        """Gradients over replicas: what passes each node's cards, at their speed; within nodes at
        the node's."""
        loads: Counter[int] = Counter()
        slowest, inside = np.inf, 0.0
        for layers, groups, nodes in zip(
            pipeline.layers, pipeline.groups, _cards(pipeline), strict=True
        ):
            members = len(groups) * pipelines
            # a ring passes a node once, whatever the number of its ranks
            by_node = dict(zip(nodes, groups, strict=True)) if members > 1 else {}
            for number, group in by_node.items():
                node = group.nodes[0]
                each = 2 * (members - 1) / members * self.params(group.tensor)[layers].sum()
                if len(by_node) == 1 and pipelines == 1:
                    inside = max(
                        inside, each / self.links.local(node.kind, members, each / members)
                    )
                    continue
                size = each * group.tensor / len(group.nodes)
                loads[number] += size
                slowest = min(
                    slowest,
                    self.links.network(node.kind, min(group.tensor, node.gpus), size / members),
                )
        # A ring moves at the pace of its slowest card.
        return max(inside, max(loads.values(), default=0.0) / slowest)

    def update(self, pipeline: RunPipeline) -> float:
        """The optimizer's step on the largest stage: its part of the whole model's."""
        return max(
            float(self.params(group.tensor)[layers].sum() / self.params(group.tensor).sum())
            * max(self.curve(kind, group.tensor).update for kind in group.kinds)
            for layers, groups in zip(pipeline.layers, pipeline.groups, strict=True)
            for group in groups
        )

    def params(self, tensor: int) -> Floats:
        """[L] bytes on one device; of a degree without sizes an even part of the nearest one's."""
        nearest = nearest_degree(self.model.sizes, tensor)
        return np.asarray(self.model.sizes[nearest].params * (nearest / tensor))

    def peak_bytes(self, pipeline: RunPipeline, micro_batch: int, batches: int) -> float | None:
        """Bytes on the fullest device; None where sizes of a degree are not told."""
        model, stages = self.model, len(pipeline.layers)
        peak = 0.0
        for s, (layers, groups) in enumerate(zip(pipeline.layers, pipeline.groups, strict=True)):
            samples = micro_batch * len(pipeline.groups[0]) / len(groups)
            sent = layers[-1] if s < stages - 1 else layers[0] - 1
            for group in groups:
                sizes = model.sizes.get(group.tensor)
                if sizes is None:
                    return None
                exchanged = 2 * sizes.output[sent] if stages > 1 else 0.0
                # attention scores; 0 where heads or tokens are not told
                inner = ELEMENT * HEADS.get(model.name, 0) / group.tensor * model.sequence**2
                if layers[-1] == model.layers - 1:
                    inner = max(inner, float(sizes.output[-1]))
                kept = min(stages - s, batches) * sizes.kept[layers].sum() + 3 * inner + exchanged
                states = BYTES_PER_PARAM * sizes.params[layers].sum() / ELEMENT
                usual = max(FRAMEWORK_BYTES.get(kind, RESERVED_BYTES) for kind in group.kinds)
                reserved = usual if self.framework is None else self.framework
                peak = max(peak, float(states + samples * kept + reserved))
        return peak


def _cards(pipeline: RunPipeline) -> list[list[int]]:
    """The node of every stage's replica: nodes are filled in the order of ranks, stage by stage."""
    cards: list[list[int]] = []
    free: dict[tuple[str, int], tuple[int, int]] = {}  # (type, GPUs per node) -> (node, GPUs left)
    count = 0
    for groups in pipeline.groups:
        cards.append([])
        for group in groups:
            kind, gpus = group.nodes[0][:2]
            node, left = free.get((kind, gpus), (-1, 0))
            if len(group.nodes) > 1 or left < group.tensor:
                node, left = count, max(gpus, group.tensor)
                count += len(group.nodes)
            if len(group.nodes) == 1:
                free[kind, gpus] = node, left - group.tensor
            cards[-1].append(node)
    return cards


def compare_plans(folder: Path, framework: float | None = None) -> list[Compared]:
    """Every plan in `folder`/validation beside its prediction, in order of its name; each is a file
    of its own. framework: bytes that the framework takes, if known.

    Raises InputError for a folder or a file that cannot be used; a plan that the data cannot price
    keeps its reason.
    """
    root = folder / "validation"
    require(
        root.is_dir(),
        "no such folder",
        where=str(root),
        expected="plans that were run, as JSON files",
    )
    runs = [load_run(path, root) for path in sorted(root.rglob("*.json"))]
    require(runs, "no plan", where=str(root), expected="at least one JSON file")
    links = load_links(folder)
    info = read_foreign(SizesFile, folder / "llm_info.json")
    names = [name for name in model_names(folder) if name in info.root]
    load = cache(lambda name: load_model_data(folder, name, info))
    predictor = cache(lambda name: Predictor(load(name), links, framework))
    compared = []
    for run in runs:
        try:
            outcome, reason = predictor(model_of(run, names, load).name).predict(run), None
        except NotPricedError as error:
            outcome, reason = None, str(error)
        compared.append(Compared(run.file, 0, published(run), outcome, reason))
    return compared


def published(run: PlanRun) -> Published:
    """A plan's workload, by its folder, batch and GPUs, and what was measured."""
    used: Counter[str] = Counter()
    for pipeline in run.pipelines:
        for node in (n for stage in pipeline.groups for group in stage for n in group.nodes):
            used[node.kind] += node.gpus
    folder, gpus = run.file.rpartition("/")[0], ", ".join(f"{n} {k}" for k, n in used.items())
    return Published(
        f"{folder}, batch {run.global_batch}, {gpus}",
        run.seconds,
        run.max_bytes,
        kind=run.file.partition("/")[0] if "/" in run.file else "",
    )


def model_of(run: PlanRun, names: Sequence[str], load: Callable[[str], ModelData]) -> ModelData:
    """The plan's model: named in the plan or a folder above it, else the only one with its layers
    and GPU types.

    names: of models with profiles. load: reads one; those that a named plan does not need are not
    read.
    """
    folders = [part for part in run.file.split("/")[:-1] if part in names]
    name = run.model or (folders[-1] if folders else None)
    if name is None:
        models = [load(known) for known in names]
        fitting = [m for m in models if m.layers == run.layers and run.kinds <= set(m.tables)]
        require(
            len(fitting) == 1,
            f"which model has {run.layers} layers and profiles of {', '.join(sorted(run.kinds))}",
            where=run.file,
            got=", ".join(m.name for m in fitting) or "none",
            expected="exactly one",
            kind=NotPricedError,
        )
        return fitting[0]
    require(
        name in names,
        "no profiles of this model",
        where=run.file,
        got=name,
        expected=", ".join(names),
        kind=NotPricedError,
    )
    model = load(name)
    require(
        model.layers == run.layers,
        "number of layers differs from its model's",
        where=run.file,
        got=run.layers,
        expected=f"{model.layers} ({model.name})",
        kind=NotPricedError,
    )
    return model
