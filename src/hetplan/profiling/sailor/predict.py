"""Seconds of one iteration of a plan, and bytes on its fullest device, from Sailor's data. Nothing
is fitted to totals.

Layer times come from tables with faults, which are cleaned. A layer does not get faster when its
micro-batch grows, so a time above that of a larger micro-batch is a fault. In its place stands what
bounds it: the larger one's time from above; from below the least time in which the GPU ever got
through that layer (its launches) and the throughput. Under tensor parallelism compute/tp and
bytes/bandwidth grow with the micro-batch, and a fixed part (launches, the all-reduces' latency and
their waiting for the slowest rank) does not. Forward and backward pay it once each. A profile of
many equal micro-batches in a row hides it behind queued work, a training step does not.

All ranks of a node share its network cards, for transfers and reductions alike. Gradients are
reduced after the flush, fp32, 2 (D - 1) / D of a stage's parameters through every card, when all
pipelines are done (the engine has a barrier).

The fullest device holds 16 bytes per parameter (fp32 weight and gradient, and two copies of the
framework's), activations of min(S - s, M) micro-batches on stage s, three buffers of the largest
intermediate (attention scores, or logits where the head is), two of what the stage exchanges, and
what framework and driver take before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.profiling.sailor.data import (
    Floats,
    Group,
    Links,
    ModelData,
    NotPricedError,
    PlanRun,
    RunPipeline,
    Tables,
)
from hetplan.profiling.sailor.schedule import Lane, simulate_lanes
from hetplan.profiling.simulator.tasks import NO_PORT
from hetplan.profiling.workload import RESERVED_BYTES

# A larger time at a smaller micro-batch: up to this ratio it is noise, beyond it a fault.
NOISE = 1.1


@dataclass(frozen=True)
class Curve:
    """One GPU type and tensor degree: forward and backward [B, L] at `sizes` [B]; per_sample [2, L]
    seconds."""

    sizes: Floats
    passes: Floats
    per_sample: Floats
    update: float
    tensor: int

    def seconds(self, samples: float) -> Floats:
        """[2, L] forward and backward seconds of a micro-batch of `samples`."""
        known: Floats = self._measured(samples)
        if self.tensor == 1 or samples <= self.sizes[0]:
            return known
        model = self.passes[:, 0] + (samples - self.sizes[0]) * self.per_sample
        return np.asarray(np.maximum(known, model))

    def _measured(self, samples: float) -> Floats:
        """Between two sizes a straight line; beyond the last one its throughput; before the first
        one its time."""
        last = self.sizes[-1]
        if samples > last:
            return np.asarray(self.passes[:, -1] + (samples - last) * self.per_sample)
        at = int(np.searchsorted(self.sizes, samples))
        if self.sizes[at] == samples or at == 0:
            return np.asarray(self.passes[:, at])
        share = (samples - self.sizes[at - 1]) / (self.sizes[at] - self.sizes[at - 1])
        return np.asarray((1 - share) * self.passes[:, at - 1] + share * self.passes[:, at])


def curve(model: ModelData, kind: str, tensor: int) -> Curve:
    """The curve of a GPU type and degree; a degree without tables is scaled from the nearest one
    that has some."""
    tables = model.tables.get(kind)
    if tables is None:
        known = ", ".join(model.tables)
        raise NotPricedError(
            f"no profile of {model.name}", where="profiles", got=kind, expected=known
        )
    degrees = sorted({degree for degree, _ in tables})
    nearest = min(degrees, key=lambda degree: abs(np.log2(degree / tensor)))
    sizes = sorted(batch for degree, batch in tables if degree == nearest)
    raw = _passes(tables, nearest, sizes)
    floor = np.min([_passes(tables, *key) for key in ((d, [b]) for d, b in tables)], axis=0)[:, 0]
    grid = np.array(sizes, float)
    per_sample = (raw / grid[None, :, None]).min(axis=1)
    scale = nearest / tensor
    update = float(np.median([tables[nearest, b].update for b in sizes]))
    return Curve(
        grid,
        clean(raw, grid, floor, per_sample) * scale,
        per_sample * scale,
        update * scale,
        tensor,
    )


def clean(raw: Floats, sizes: Floats, floor: Floats, per_sample: Floats) -> Floats:
    """[2, B, L] `raw` without times above those of larger micro-batches. floor, per_sample: [2,
    L]."""
    above = np.minimum.accumulate(raw[:, ::-1], axis=1)[:, ::-1]
    below = np.maximum(floor[:, None], per_sample[:, None] * sizes[None, :, None])
    faulty = raw > NOISE * above
    return np.asarray(np.where(faulty, np.minimum(above, below), above))


def _passes(tables: Tables, degree: int, sizes: list[int]) -> Floats:
    """[2, B, L]."""
    measured = [tables[degree, batch] for batch in sizes]
    return np.array([[m.forward for m in measured], [m.backward for m in measured]])


BYTES_PER_PARAM = 16
ELEMENT = 4  # all of it is fp32

# What Megatron-DeepSpeed takes on a device before a model is on it: kernels loaded, CUDA's context,
# NCCL. Sailor's own simulator gives the figure for Alps, whose devices are GH200; others: CUDA and
# NCCL alone.
FRAMEWORK_BYTES = {"GH-96": 4.76e9}

# Attention heads; the data do not tell them. By the models' own configurations.
HEADS = {"OPT-350": 16, "GPT-Neo-2.7": 20, "OPT-30": 56, "LLAMA-3-8": 32}


def framework_bytes(kind: str, given: float | None) -> float:
    """`given`, or the figure known for that GPU type."""
    return FRAMEWORK_BYTES.get(kind, RESERVED_BYTES) if given is None else given


def peak_bytes(
    model: ModelData,
    pipeline: RunPipeline,
    micro_batch: int,
    micro_batches: int,
    framework: float | None,
) -> float | None:
    """Bytes on the fullest device; None where sizes of a degree are not told."""
    fullest = 0.0
    stages = len(pipeline.layers)
    for s, (layers, groups) in enumerate(zip(pipeline.layers, pipeline.groups, strict=True)):
        for group in groups:
            sizes = model.sizes.get(group.tensor)
            if sizes is None:
                return None
            samples = micro_batch * len(pipeline.groups[0]) / len(groups)
            of = np.array(layers)
            alive = min(stages - s, micro_batches)
            exchanged = (
                2 * sizes.output[of[-1] if s < stages - 1 else of[0] - 1] if stages > 1 else 0.0
            )
            inner = _scores(model, group.tensor)
            if layers[-1] == model.layers - 1:
                inner = max(inner, float(sizes.output[-1]))
            held = (
                BYTES_PER_PARAM * sizes.params[of].sum() / ELEMENT
                + samples * (alive * sizes.kept[of].sum() + 3 * inner + exchanged)
                + max(framework_bytes(kind, framework) for kind in group.kinds)
            )
            fullest = max(fullest, float(held))
    return fullest


def _scores(model: ModelData, tensor: int) -> float:
    """Attention scores of one sample on one device; 0 where heads or tokens are not told."""
    return ELEMENT * HEADS.get(model.name, 0) / tensor * model.sequence**2


@dataclass(frozen=True)
class Prediction:
    """seconds: transfers occupy both ends; overlapped: they only hold the cards; the truth lies
    between.

    reduction, update: the parts after the flush, seconds. peak_bytes: None where sizes are not
    told.
    """

    seconds: float
    overlapped: float
    reduction: float
    update: float
    peak_bytes: float | None


class Predictor:
    """Predictions of one model's plans."""

    def __init__(self, model: ModelData, links: Links, framework: float | None = None) -> None:
        self.model = model
        self.links = links
        self.framework = framework
        self._curves: dict[tuple[str, int], Curve] = {}

    def predict(self, run: PlanRun) -> Prediction:
        """One plan; raises InputError where the data lack a GPU type or a degree's sizes."""
        flush, overlapped, peak = 0.0, 0.0, 0.0
        reduction, update = 0.0, 0.0
        known = True
        for pipeline in run.pipelines:
            replicas = len(pipeline.groups[0])
            share = run.global_batch / len(run.pipelines)
            batches = max(1, int(np.ceil(share / (run.micro_batch * replicas))))
            lanes = self._lanes(pipeline, run.micro_batch)
            flush = max(flush, simulate_lanes(lanes, batches).seconds)
            overlapped = max(overlapped, simulate_lanes(lanes, batches, rendezvous=False).seconds)
            reduction = max(reduction, self._reduction(pipeline, len(run.pipelines)))
            update = max(update, self._update(pipeline))
            held = peak_bytes(self.model, pipeline, run.micro_batch, batches, self.framework)
            known = known and held is not None
            peak = max(peak, held or 0.0)
        after = reduction + update
        return Prediction(
            flush + after, overlapped + after, reduction, update, peak if known else None
        )

    def curve(self, kind: str, tensor: int) -> Curve:
        """Layer times, from memory where asked before."""
        if (kind, tensor) not in self._curves:
            self._curves[kind, tensor] = curve(self.model, kind, tensor)
        return self._curves[kind, tensor]

    def group_seconds(self, group: Group, layers: tuple[int, ...], samples: float) -> Floats:
        """[2] forward and backward of one micro-batch on the group: its slowest type, and
        all-reduces over nodes."""
        of = np.array(layers)
        both = np.max(
            [self.curve(k, group.tensor).seconds(samples)[:, of].sum(axis=1) for k in group.kinds],
            axis=0,
        )
        if (
            len(group.nodes) > 1
        ):  # two all-reduces of the output, forward and backward, through every node's card
            size = 2 * float(self._output()[of].sum()) * samples
            share = 2 * (len(group.nodes) - 1) / len(group.nodes)
            slowest = min(self.links.network(kind, used, size) for kind, used in group.nodes)
            both = both + size * share / slowest
        return np.asarray(both)

    def _lanes(self, pipeline: RunPipeline, micro_batch: int) -> list[Lane]:
        """One lane per replica; of stages with unlike numbers of replicas one lane of the slowest
        each."""
        counts = {len(groups) for groups in pipeline.groups}
        most = len(pipeline.groups[0])
        cards = _cards(pipeline)
        times = [
            [self.group_seconds(g, layers, micro_batch * most / len(groups)) for g in groups]
            for layers, groups in zip(pipeline.layers, pipeline.groups, strict=True)
        ]
        lanes = []
        for r in range(most if len(counts) == 1 else 1):
            chosen = [min(r, len(groups) - 1) for groups in pipeline.groups]
            if len(counts) > 1:
                chosen = [int(np.argmax([t.sum() for t in stage])) for stage in times]
            stage = np.array([times[s][i] for s, i in enumerate(chosen)])
            moved, ports = [], []
            for s in range(len(chosen) - 1):
                ends = [(s, chosen[s]), (s + 1, chosen[s + 1])]
                seconds, used = self._transfer(pipeline, ends, cards, micro_batch)
                moved.append(seconds)
                ports.append(used)
            lanes.append(
                Lane(
                    stage[:, 0],
                    stage[:, 1],
                    np.array(moved),
                    np.array(ports, np.int64).reshape(-1, 2),
                )
            )
        return lanes

    def _transfer(
        self,
        pipeline: RunPipeline,
        ends: list[tuple[int, int]],
        cards: list[list[int]],
        micro_batch: int,
    ) -> tuple[float, tuple[int, int]]:
        """(seconds, cards held) of one micro-batch between two groups; each tensor rank sends its
        part."""
        groups = [pipeline.groups[s][i] for s, i in ends]
        stage = ends[0][0]
        rows = micro_batch * len(pipeline.groups[0]) / len(pipeline.groups[stage])
        size = float(self._output()[pipeline.layers[stage][-1]]) * rows
        a, b = (cards[s][i] for s, i in ends)
        if a == b:
            pair = max(2, groups[0].tensor + groups[1].tensor)
            return size / self.links.local(groups[0].kinds[0], pair, size), (NO_PORT, NO_PORT)
        pairs = min(group.tensor for group in groups)
        bandwidth = min(
            self.links.network(kind, min(pairs, used), size)
            for group in groups
            for kind, used in group.nodes
        )
        return size / bandwidth, (a, b)

    def _reduction(self, pipeline: RunPipeline, pipelines: int) -> float:
        """Gradients over replicas: what passes each node's cards, at their speed; within nodes at
        the node's."""
        cards = _cards(pipeline)
        loads: dict[int, tuple[float, float]] = {}
        inside = 0.0
        for s, (layers, groups) in enumerate(zip(pipeline.layers, pipeline.groups, strict=True)):
            members = len(groups) * pipelines
            if members == 1:
                continue
            of = np.array(layers)
            nodes = {cards[s][r]: group for r, group in enumerate(groups)}
            for r, group in enumerate(groups):
                each = 2 * (members - 1) / members * self._params(group.tensor)[of].sum()
                if len(nodes) == 1 and pipelines == 1:
                    kind = group.kinds[0]
                    inside = max(inside, each / self.links.local(kind, members, each / members))
                elif (
                    nodes[cards[s][r]] is group
                ):  # a ring passes a node once, whatever the number of its ranks
                    kind, used = group.nodes[0]
                    ranks = min(group.tensor, used)
                    size = each * group.tensor / len(group.nodes)
                    bandwidth = self.links.network(kind, ranks, size / members)
                    load, slowest = loads.get(cards[s][r], (0.0, np.inf))
                    loads[cards[s][r]] = load + size, min(slowest, bandwidth)
        # A ring moves at the pace of its slowest card.
        slowest = min((bandwidth for _, bandwidth in loads.values()), default=np.inf)
        return max(inside, max((load for load, _ in loads.values()), default=0.0) / slowest)

    def _update(self, pipeline: RunPipeline) -> float:
        """The optimizer's step on the largest stage: its part of the whole model's."""
        slowest = 0.0
        for layers, groups in zip(pipeline.layers, pipeline.groups, strict=True):
            for group in groups:
                params = self._params(group.tensor)
                part = float(params[np.array(layers)].sum() / params.sum())
                slowest = max(
                    slowest, *(part * self.curve(k, group.tensor).update for k in group.kinds)
                )
        return slowest

    def _params(self, tensor: int) -> Floats:
        """[L] bytes on one device; of a degree without sizes an even part of the nearest one's."""
        sizes = self.model.sizes
        nearest = min(sizes, key=lambda degree: abs(np.log2(degree / tensor)))
        return np.asarray(sizes[nearest].params * (nearest / tensor))

    def _output(self) -> Floats:
        """[L] bytes per sample sent on; whole on every rank."""
        return self.model.sizes[min(self.model.sizes)].output


def _cards(pipeline: RunPipeline) -> list[list[int]]:
    """The node of every stage's replica: nodes are filled in the order of ranks, stage by stage."""
    cards: list[list[int]] = []
    free: dict[tuple[str, int], tuple[int, int]] = {}  # (type, GPUs per node) -> (node, GPUs left)
    count = 0
    for groups in pipeline.groups:
        cards.append([])
        for group in groups:
            if len(group.nodes) > 1:
                cards[-1].append(count)
                count += len(group.nodes)
                continue
            kind = group.nodes[0]
            node, left = free.get(kind, (-1, 0))
            if left < group.tensor:
                node, left = count, max(kind[1], group.tensor)
                count += 1
            free[kind] = node, left - group.tensor
            cards[-1].append(node)
    return cards


def model_of(run: PlanRun, names: Sequence[str], load: Callable[[str], ModelData]) -> ModelData:
    """The plan's model: named in the plan or a folder above it, else the only one with its layers
    and GPU types.

    names: of models with profiles. load: reads one; those that a named plan does not need are not
    read.
    """
    named = (
        [run.model] if run.model else [part for part in run.file.split("/")[:-1] if part in names]
    )
    if named:
        if named[-1] not in names:
            raise NotPricedError(
                "no profiles of this model",
                where=run.file,
                got=named[-1],
                expected=", ".join(names),
            )
        model = load(named[-1])
        if model.layers != run.layers:
            expected = f"{model.layers} ({model.name})"
            raise NotPricedError(
                "number of layers differs from its model's",
                where=run.file,
                got=run.layers,
                expected=expected,
            )
        return model
    models = [load(name) for name in names]
    fitting = [m for m in models if m.layers == run.layers and run.kinds <= set(m.tables)]
    if len(fitting) != 1:
        got = ", ".join(m.name for m in fitting) or "none"
        kinds = ", ".join(sorted(run.kinds))
        raise NotPricedError(
            f"which model has {run.layers} layers and profiles of {kinds}", where=run.file, got=got,
            expected="exactly one",
        )  # fmt: skip
    return fitting[0]
