"""Whether a model can be trained on a cluster: a search of regular layouts for one that fits in
memory. Time is not considered.

A layout has D equal replicas of P stages, each stage on T tensor ranks of one node; a ZeRO level; a
mode of recomputation; and a micro-batch size. Where none fits, the stages of a replica also have
context ranks, which divide the tokens of a sample, and the experts of a block are spread over
ranks. Every stage runs on one device type. The types with
the most memory come first, since early stages keep the activations of the most micro-batches at a
time (1F1B: min(P - s, M) of M micro-batches on stage s). Replicas of one stage may run on several
types, of which the one with the least memory decides.

Layers are cut by memory: each stage in turn takes as many layers as fit into a share of its limit.
The layout uses the least share at which all layers find room, so that devices are equally full.

The bytes on a device are counted by `replays.memory` and `replays.peaks`, as in the replay.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import combinations, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from hetplan.errors import require, unknown_name
from hetplan.plans.degrees import Degrees
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.hardware.cluster import MAX_DEVICES, Cluster, Node, open_cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import DEFAULT_STACK, Precision
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.profiling.profiles.predict import (
    LARGEST_MICRO_BATCH,
    default_micro_batches,
    default_tensor_degrees,
    predict,
)
from hetplan.profiling.rates.times import Recomputation
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.arrays import Floats
from hetplan.replays.costs import Costs, StageBytes
from hetplan.replays.degrees import bytes_of_rank
from hetplan.replays.memory import PeakBytes
from hetplan.replays.peaks import Shards, held_on_device
from hetplan.replays.pose import costs_of
from hetplan.replays.ranks import Ranks, own_shards
from hetplan.text import bytes_text, counted, percent_text

# Share of each device's memory that stays free: PyTorch's allocator keeps blocks that no tensor
# fits into. They are 15 % on average over eight language models on A100 (Guo et al. 2024, GMLake),
# and a few percent with expandable segments.
MEMORY_MARGIN = 0.05
MOST_CONTEXT = 8  # ranks that divide the tokens of a sample
EACH_UP_TO = 8  # numbers of further nodes that are tried one by one
SHORTER = 3  # how often a sequence is halved in the search for one that fits: to an eighth of it
# Shares of the limits are multiples of 1 / FINE, because `smallest` searches whole numbers.
FINE = 1000


@dataclass(frozen=True)
class Wanted:
    """Figures that a layout must have; None: any."""

    zero: int | None = None
    recomputation: Recomputation | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Shape:
    """The degrees of parallelism of a layout, and the device types of its stages."""

    tensor: int  # tensor ranks of each stage
    data: int  # replicas
    kinds: tuple[tuple[str, ...], ...]  # [P] device types of each stage
    context: int = 1  # ranks of each stage that divide the tokens of a sample
    expert: int = 1  # ranks over which the experts of a block are spread

    @property
    def pipeline(self) -> int:
        """Stages of each replica."""
        return len(self.kinds)

    @property
    def devices(self) -> int:
        """The number of devices in use; the cluster may have more."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def ranks(self) -> Ranks[int]:
        """The degrees. Ranks that share experts hold them whole; otherwise tensor ranks divide
        their columns."""
        expert_tensor = self.tensor if self.expert == 1 else 1
        return Ranks(self.tensor, self.context, self.data, self.expert, expert_tensor, 1)

    @property
    def degrees(self) -> Degrees:
        """The further degrees, in the words of a plan."""
        expert_tensor = self.ranks.expert_tensor
        return Degrees(context=self.context, expert=self.expert, expert_tensor=expert_tensor)


Choice = tuple[Shape, int, Recomputation]  # shape, ZeRO level, mode of recomputation


@dataclass(frozen=True)
class CutLayout:
    """A layout with its cut of the layers, and the memory that it uses and leaves free."""

    shape: Shape
    zero: int
    recomputation: Recomputation
    micro_batch: int
    ends: tuple[int, ...]  # [P] number of the first layer after each stage
    held: tuple[PeakBytes[float], ...]  # [P] bytes on each device of a stage
    free: dict[str, float]  # device type -> bytes left, below 0 for bytes that are lacking

    @property
    def text(self) -> str:
        """The layout in words."""
        recomputation = "no" if self.recomputation == "none" else self.recomputation
        shape = self.shape
        degrees = [f"tensor {shape.tensor}", f"pipeline {shape.pipeline}", f"data {shape.data}"]
        if shape.context > 1:
            degrees.append(f"context {shape.context}")
        if shape.expert > 1:
            degrees.append(f"expert {shape.expert}")
        if self.zero:
            degrees.append(f"ZeRO {self.zero}")
        return (
            f"{', '.join(degrees)}, {recomputation} recomputation, micro-batch {self.micro_batch}"
        )

    @property
    def fullest(self) -> PeakBytes[float]:
        """The bytes on a device of the fullest stage."""
        return max(self.held, key=lambda device: device.allocated)

    def margin_text(self, limits: Mapping[str, float]) -> str:
        """The memory that stays free on each device type, and its share of what is usable: `1.2 GiB
        of V100 (9 %)`. limits: device type -> usable bytes."""
        return ", ".join(
            f"{bytes_text(free)} of {kind} ({percent_text(free / max(limits[kind], 1.0))})"
            for kind, free in self.free.items()
        )

    def document(self) -> dict[str, Any]:
        """The layout as JSON types."""
        return {
            "tensor": self.shape.tensor,
            "pipeline": self.shape.pipeline,
            "data": self.shape.data,
            "context": self.shape.context,
            "expert": self.shape.expert,
            "zero": self.zero,
            "recomputation": self.recomputation,
            "micro_batch": self.micro_batch,
            "free_bytes": self.free,
            "stages": [
                {"types": list(kinds), "last_layer": end - 1, "bytes": asdict(held)}
                for kinds, end, held in zip(self.shape.kinds, self.ends, self.held, strict=True)
            ],
        }


@dataclass(frozen=True)
class Fit:
    """The answer of `fits`: the layouts that fit; or what is lacking, and what would help."""

    workload: Workload = field(repr=False)
    # The simplest layout that fits of each ZeRO level, the simplest first.
    layouts: tuple[CutLayout, ...]
    nearest: CutLayout | None  # the layout that lacks least, where none fits
    advice: tuple[str, ...]  # changes with which some layout would fit, the smallest first
    limit_bytes: dict[str, float]  # device type -> usable bytes

    def __str__(self) -> str:
        """The simplest layout that fits and what it leaves free; or what is largest in the layout
        that lacks least, and the changes with which one would fit."""
        if self.layouts:
            simplest = self.layouts[0]
            return f"fits: {simplest.text}; free: {simplest.margin_text(self.limit_bytes)}"
        answer = "does not fit"
        if self.nearest is not None:
            answer += f" ({self.nearest.fullest.largest_text})"
        return "; ".join([answer, *(f"would fit: {line}" for line in self.advice)])

    @property
    def fits(self) -> bool:
        """Whether some layout fits."""
        return bool(self.layouts)

    @property
    def without_peak(self) -> tuple[str, ...]:
        """Device types whose speed in the precision is not known, so that no plan can be timed."""
        return tuple(
            name
            for name, spec in self.workload.cluster.specs.items()
            if self.workload.precision not in spec.peak_tflops
        )

    def document(self) -> dict[str, Any]:
        """The answer as JSON types."""
        return {
            "fits": self.fits,
            "model": self.workload.model.name,
            "cluster": self.workload.cluster.name,
            "framework": self.workload.framework.name,
            "precision": self.workload.precision,
            "without_peak": list(self.without_peak),
            "limit_bytes": self.limit_bytes,
            "layouts": [layout.document() for layout in self.layouts],
            "nearest": self.nearest and self.nearest.document(),
            "advice": list(self.advice),
        }


def fits(
    model: str | os.PathLike[str] | ModelSpec | Model,
    cluster: str | os.PathLike[str] | Cluster,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str = "fp16",
    framework: str | Framework = HETPLAN,
    memory_margin: float = MEMORY_MARGIN,
    zero: int | None = None,
    recomputation: str | None = None,
    micro_batch: int | None = None,
) -> Fit:
    """Whether the model can be trained with Adam on the cluster, as `hetplan fits` says.

    global_batch: samples per iteration; None: enough for every device. memory_margin: share of each
    device's memory that stays free. zero, recomputation, micro_batch: figures that the layout must
    have; None: any. Raises InputError.
    """
    at_most = f", at most the batch of {global_batch}" if global_batch else ""
    require(
        micro_batch is None or 1 <= micro_batch <= (global_batch or micro_batch),
        "micro-batch is not usable",
        got=micro_batch,
        expected=f"at least 1{at_most}",
    )
    opened = cluster if isinstance(cluster, Cluster) else open_cluster(cluster)

    def posed(margin: float = memory_margin, **changes: Any) -> Workload:
        """The workload, with another margin, sequence or precision."""
        choices = {"sequence": sequence, "precision": precision, **changes}
        # bytes do not depend on this batch; `LayoutSearch` gets the real one
        bare = memory_workload(model, opened, global_batch or 1, framework, **choices)
        return replace(bare, memory_margin=margin)

    workload = posed()
    levels, modes = workload.framework.levels, workload.framework.recomputation
    mode = next((known for known in modes if known == recomputation), None)
    if recomputation is not None and mode is None:
        raise unknown_name(
            f"recomputation of {workload.framework.name}",
            recomputation,
            modes,
            where="--recomputation",
        )
    require(
        zero is None or zero in levels,
        f"ZeRO of {workload.framework.name}",
        got=zero,
        expected=" or ".join(map(str, levels)),
    )
    wanted = Wanted(zero, mode, micro_batch)
    layout_search = LayoutSearch(workload, global_batch)
    fit = layout_search.answer(wanted)
    if fit.fits:
        return fit

    def change(name: str, batch: int | None = global_batch, **changes: Any) -> str | None:
        """The first layout that fits under the changes, with their name; None where none fits."""
        changed = LayoutSearch(posed(**changes), batch)
        layout = next(changed.fitting(wanted), None)
        return None if layout is None else f"{name}: {layout.text}"

    lines = [
        *layout_search.wishes(wanted),
        change("without a memory margin", margin=0.0),
        change("with a larger global batch", batch=None),
    ]
    if not isinstance(model, Model):  # a Model has its own precision and sequence
        lines.append(change("in fp16", precision="fp16"))
        # 0 for images, which have no sequence
        lengths = [(workload.sequence or 0) >> halvings for halvings in range(1, SHORTER + 1)]
        for tokens in filter(None, lengths):
            shorter = change(f"with {tokens} tokens per sample", sequence=tokens)
            if shorter is not None:
                lines.append(shorter)
                break
    return replace(fit, advice=(*filter(None, lines), *layout_search.devices(wanted)))


def advice(workload: Workload) -> tuple[str, ...]:
    """Changes with which a workload would fit, the smallest first; or, if some layout fits as it
    is, the simplest one. The planner asks for a workload none of whose plans fits."""
    wanted = Wanted()
    layout_search = LayoutSearch(workload, workload.global_batch)
    fit = layout_search.answer(wanted)
    if fit.fits:
        return (f"as {fit.layouts[0].text}",)
    lines = []
    if fit.nearest is not None:
        lacking = [
            f"{bytes_text(-free)} more on each {kind}"
            for kind, free in fit.nearest.free.items()
            if free < 0
        ]
        lines.append(
            f"{' and '.join(lacking)}: {fit.nearest.text} ({fit.nearest.fullest.largest_text})"
        )
    with_any_batch = next(LayoutSearch(workload, None).fitting(wanted), None)
    if with_any_batch is not None:
        lines.append(f"with a larger global batch: {with_any_batch.text}")
    return (*lines, *layout_search.devices(wanted))


def memory_workload(
    model: str | os.PathLike[str] | ModelSpec | Model,
    cluster: Cluster,
    batch: int,
    framework: str | Framework,
    **choices: Any,
) -> Workload:
    """A workload of which only the bytes are used, not the seconds (see `with_peaks`). choices:
    further arguments of `load_model`."""
    if not isinstance(model, Model):
        model = load_model(model, attention=DEFAULT_STACK.attention, **choices)
    return make_workload(
        model,
        cluster,
        batch,
        profile=predict(model, with_peaks(cluster, model.precision), micro_batches=[1]),
        framework=framework,
    )


def with_peaks(cluster: Cluster, precision: Precision) -> Cluster:
    """The cluster with a peak in the precision for every device type, without which no profile is
    predicted. A type that has none gets the largest of its peaks in other precisions; any would do,
    since the predicted seconds are not used."""
    specs = {}
    for name, spec in cluster.specs.items():
        peaks = {precision: max(spec.peak_tflops.values()), **spec.peak_tflops}
        specs[name] = spec.model_copy(update={"peak_tflops": peaks})
    return replace(cluster, specs=specs)


class LayoutSearch:
    """The search for layouts of one model on one cluster."""

    def __init__(self, workload: Workload, batch: int | None) -> None:
        self.workload = workload
        self.batch = batch  # samples per iteration; None: enough for every device
        self.limits = workload.device_bytes()  # device type -> usable bytes
        # costs of memory do not depend on the cluster, and those of one node are quick to make:
        # links are priced for each pair of devices
        one_node = with_peaks(workload.cluster.part([0]), workload.precision)
        on_one_node = replace(workload, cluster=one_node)
        self.on_one_node = on_one_node
        self.modes = workload.framework.recomputation  # the first keeps most, the last keeps least
        self.layers = workload.profile.layers
        self.costs = cache(self._costs)
        self.data = costs_of(on_one_node, "none").data  # framework and bytes of a number
        self._runs: dict[tuple[Recomputation, Shape, int], Runs] = {}
        self.degrees = default_tensor_degrees(workload.model, workload.cluster)

    def _costs(self, mode: Recomputation, shape: Shape) -> Costs:
        """Costs, of which the bytes are used, of a shape's ranks; its replicas and stages do not
        matter. Computed once (`costs`)."""
        if shape.context == shape.expert == 1:
            return costs_of(self.on_one_node, mode)
        return bytes_of_rank(self.on_one_node, shape.ranks, shape.degrees, mode)

    def answer(self, wanted: Wanted) -> Fit:
        """The simplest layouts that fit, or the layout that lacks least. Advice is left empty."""
        layouts = tuple(self.fitting(wanted))
        if layouts:
            return Fit(self.workload, layouts, None, (), self.limits)
        batch, nodes = wanted.micro_batch or 1, self.workload.cluster.nodes
        least = inf
        nearest_choice: Choice | None = None
        for further in (False, True):
            for choice in self.choices(nodes, wanted, frugal=True, further=further):
                if least < inf and self.cut(*choice, batch, least - 1 / FINE) is None:
                    continue
                share = self.least_share(*choice, batch)
                if share < least:
                    least, nearest_choice = share, choice
        nearest = None if nearest_choice is None else self.layout(*nearest_choice, batch)
        return Fit(self.workload, (), nearest, (), self.limits)

    def fitting(self, wanted: Wanted) -> Iterator[CutLayout]:
        """The simplest layout that fits of each ZeRO level, the simplest first. Layouts with
        context ranks, and with ranks that share experts, are tried where no other one fits."""
        seen: set[int] = set()
        for further in (False, True):
            if seen or (further and not self.suffices(wanted)):
                return
            for shape, level, mode in self.choices(
                self.workload.cluster.nodes, wanted, further=further
            ):
                if level in seen:
                    continue
                batch = self.largest(shape, level, mode, wanted)
                if batch:
                    seen.add(level)
                    yield self.layout(shape, level, mode, batch)

    def suffices(self, wanted: Wanted) -> bool:
        """Whether some layout with context ranks, or with ranks that share experts, fits."""
        nodes, batch = self.workload.cluster.nodes, wanted.micro_batch or 1
        choices = self.choices(nodes, wanted, frugal=True, further=True)
        return any(self.cut(*choice, batch) for choice in choices)

    def wishes(self, wanted: Wanted) -> list[str]:
        """Texts of layouts that would fit if some of the wanted figures were others, as few of them
        as possible."""
        given = [name for name, value in vars(wanted).items() if value is not None]
        for count in range(1, len(given) + 1):
            lines = []
            for names in combinations(given, count):
                without = replace(wanted, **dict.fromkeys(names))
                layout = next(self.fitting(without), None)
                if layout is not None:
                    figures = " and ".join(names).replace("_", "-")
                    lines.append(f"another {figures}: {layout.text}")
            if lines:
                return lines
        return []

    def devices(self, wanted: Wanted) -> Iterator[str]:
        """For each device type, the number of further devices with which some layout would fit, as
        text. Types of which no number is enough are left out. The devices come in nodes like the
        largest one of the type."""
        for kind in self.limits:
            alike = [node for node in self.workload.cluster.nodes if node.device == kind]
            largest = max(alike, key=lambda node: node.devices)
            most = (MAX_DEVICES - len(self.workload.cluster.devices)) // largest.devices
            more = first_enough(partial(self.enough, like=largest, wanted=wanted), most)
            if more is not None:
                yield (
                    f"{more * largest.devices} more {kind} "
                    f"({counted(more, 'node')} of {largest.devices})"
                )

    def enough(self, count: int, like: Node, wanted: Wanted) -> bool:
        """Whether some layout fits on the cluster with `count` more nodes like `like`."""
        nodes = [*self.workload.cluster.nodes, *[like] * count]
        return any(
            self.cut(*choice, wanted.micro_batch or 1)
            for further in (False, True)
            for choice in self.choices(nodes, wanted, frugal=True, further=further)
        )

    def choices(
        self,
        nodes: Sequence[Node],
        wanted: Wanted,
        *,
        frugal: bool = False,
        further: bool = False,
    ) -> Iterator[Choice]:
        """All choices of shape, ZeRO level and recomputation, the simplest first: little
        recomputation, then few ranks per replica, then low levels.

        frugal: whether to give only the choices with the recomputation that takes least memory.
        further: the shapes with context or expert ranks, in place of those without.
        """
        modes = self.modes if wanted.recomputation is None else (wanted.recomputation,)
        found = self.shapes(nodes, wanted)
        if further:
            found = self.further_shapes(nodes, wanted, frugal=frugal)
        shapes = sorted(
            found,
            key=lambda shape: (
                shape.tensor * shape.context * shape.pipeline,
                shape.context,
                shape.pipeline,
                -shape.data,
                shape.expert,
            ),
        )
        if frugal:
            modes = modes[-1:]
        for mode in modes:
            for shape in shapes:
                for level in self.levels(shape, wanted):
                    yield shape, level, mode

    def levels(self, shape: Shape, wanted: Wanted) -> tuple[int, ...]:
        """The ZeRO levels of the framework that a shape can have. For a single replica only the
        lowest one is listed, since ZeRO divides nothing there."""
        framework = self.workload.framework
        one_rank = shape.tensor * shape.pipeline * shape.context == 1
        levels = framework.levels if one_rank else framework.pipeline_levels
        if shape.context * shape.expert > 1:  # no plan with such degrees has level 2
            levels = tuple(level for level in levels if level != 2)
        if shape.data * shape.context == 1:
            levels = levels[:1]
        return levels if wanted.zero is None else tuple(n for n in levels if n == wanted.zero)

    def shapes(self, nodes: Sequence[Node], wanted: Wanted, context: int = 1) -> Iterator[Shape]:
        """The shapes on a cluster of `nodes` with a context degree: replicas of one stage on the 1,
        2, … types with the most memory; and replicas of several stages, a power of two or as many
        as possible."""
        most_memory_first = sorted(self.limits, key=self.limits.__getitem__)[::-1]
        for tensor in self.degrees:
            groups = dict.fromkeys(most_memory_first, 0)  # type -> groups of `tensor` devices
            for node in nodes:
                groups[node.device] += node.devices // tensor
            if context > 1:  # as many groups of one type are then one group
                groups = {kind: count // context for kind, count in groups.items()}
            kinds = tuple(kind for kind in groups if groups[kind])
            total = sum(groups.values())
            for few in range(1, len(kinds) + 1):
                replicas = self.divided(sum(groups[kind] for kind in kinds[:few]), wanted)
                yield Shape(tensor, replicas, (kinds[:few],), context)
            longest = min(total, len(self.layers))
            powers = (2**i for i in range(1, longest.bit_length()))
            # 1: replicas of one stage are above; 0: no node has a group
            for stages in sorted({*powers, longest} - {1, 0}):
                replicas = total // stages
                # every stage needs `replicas` groups of one type; at 1 replica the sum is `total`,
                # which is enough
                while sum(count // replicas for count in groups.values()) < stages:
                    replicas -= 1
                replicas = self.divided(replicas, wanted)
                places = [(kind,) for kind in kinds for _ in range(groups[kind] // replicas)]
                yield Shape(tensor, replicas, tuple(places[:stages]), context)

    def further_shapes(
        self, nodes: Sequence[Node], wanted: Wanted, *, frugal: bool
    ) -> Iterator[Shape]:
        """The shapes with context ranks, with ranks that share experts, or with both. Context
        degrees are powers of two up to `MOST_CONTEXT`; degrees of experts divide their number.

        frugal: whether only the variant of each shape is tried whose experts are spread most.
        """
        model = self.workload.model
        if model.spec.shape is None:  # only language models have tokens to divide
            return
        tokens, mixture = model.tokens_per_sample, model.spec.shape.experts
        powers = [2**i for i in range(MOST_CONTEXT.bit_length())]
        for context in powers:
            if tokens % context:
                break
            for shape in self.shapes(nodes, wanted, context):
                ranks = shape.tensor * shape.context * shape.data  # of a stage, in all replicas
                common = math.gcd(mixture.count, ranks) if mixture else 1
                degrees = [n for n in range(1, common + 1) if common % n == 0]
                if frugal:
                    degrees = degrees[-1:]
                for expert in degrees:
                    if context * expert > 1:
                        yield replace(shape, expert=expert)

    def divided(self, replicas: int, wanted: Wanted) -> int:
        """The most replicas, at most `replicas`, that divide the global batch evenly and have at
        least one micro-batch each."""
        if self.batch is None:
            return replicas
        most = min(replicas, self.batch // (wanted.micro_batch or 1))
        # 1 is a divisor, and `most` is at least 1: no wanted micro-batch exceeds the batch
        return next(n for n in range(most, 0, -1) if self.batch % n == 0)

    def largest(self, shape: Shape, level: int, mode: Recomputation, wanted: Wanted) -> int | None:
        """The largest micro-batch with which the choice fits; None where none fits."""
        samples = LARGEST_MICRO_BATCH if self.batch is None else self.batch // shape.data
        sizes: Sequence[int] = default_micro_batches(samples)
        if wanted.micro_batch:
            sizes = [wanted.micro_batch]
        best = None
        for size in sizes:
            if self.cut(shape, level, mode, size) is None:
                break  # the sizes ascend, and no larger one takes less memory
            best = size
        return best

    def runs(self, mode: Recomputation, shape: Shape, first: int) -> "Runs":
        """The bytes of the runs of layers that begin with layer `first`; computed once."""
        of_rank = Shape(shape.tensor, 1, (), shape.context, shape.expert)
        key = mode, of_rank, first
        if key not in self._runs:
            costs = self.costs(mode, of_rank)
            tied = self.layers[-1].tied_param_bytes if first else 0.0
            stages = costs.stages_from(first, shape.tensor, tied)
            before = np.array(costs.expert_sums) + costs.frozen_expert_sums
            experts = before[first + 1 :] - before[first]
            self._runs[key] = Runs(stages, experts)
        return self._runs[key]

    def alive(self, shape: Shape, stage: int, batch: int) -> float:
        """The number of micro-batches of `batch` samples whose activations a stage keeps at a
        time."""
        if self.batch is None:  # with enough micro-batches for every stage to be full
            return shape.pipeline - stage
        steps = max(1, self.batch // shape.data // batch)
        return min(shape.pipeline - stage, steps)

    def cut(
        self, shape: Shape, level: int, mode: Recomputation, batch: int, share: float = 1.0
    ) -> tuple[int, ...] | None:
        """[P] number of the first layer after each stage, where each stage takes as many layers as
        fit into a share of its limit; None where some layers find no room."""
        stages, last = shape.pipeline, len(self.layers)
        ends, first = [], 0
        for stage, kinds in enumerate(shape.kinds):
            limit = share * min(self.limits[kind] for kind in kinds)
            held = self.held(shape, level, mode, batch, stage, first)
            fitting = np.flatnonzero(held.allocated <= limit)
            # the most layers that leave one for each later stage; the last one takes all the rest
            most = last - first - (stages - 1 - stage)
            if stage == stages - 1:
                fitting = fitting[fitting == most - 1]
            fitting = fitting[fitting < most]
            if not fitting.size:
                return None
            first += int(fitting[-1]) + 1
            ends.append(first)
        return tuple(ends)

    def held(
        self,
        shape: Shape,
        level: int,
        mode: Recomputation,
        batch: int,
        stage: int,
        first: int,
    ) -> PeakBytes[Floats]:
        """The bytes on a device of stage number `stage` with the layers from `first` on: arrays
        over the number of layers, from one to all that are left."""
        runs = self.runs(mode, shape, first)
        kept = batch * self.alive(shape, stage, batch) * runs.stages.passes.saved
        rows = np.full_like(kept, float(batch))
        share = np.ones_like(kept)
        if level:
            weights = runs.stages.weights + runs.stages.frozen
            dense = weights - runs.experts
            ranks = shape.ranks
            shards = own_shards(dense, runs.experts, ranks.sharing, ranks.expert_sharing)
            share = shards / np.maximum(weights, 1.0)
        part = 1 / shape.tensor
        staged = shape.pipeline > 1
        return held_on_device(
            self.data, runs.stages, kept, rows, Shards(part, level, share), staged=staged
        )

    def least_share(self, shape: Shape, level: int, mode: Recomputation, batch: int) -> float:
        """The least share of the limits at which all layers find room, above 1 where memory is
        lacking; inf where a thousandfold memory would not be enough."""
        least = smallest(
            lambda n: self.cut(shape, level, mode, batch, n / FINE) is not None, 1000 * FINE
        )
        return inf if least is None else least / FINE

    def layout(self, shape: Shape, level: int, mode: Recomputation, batch: int) -> CutLayout:
        """The layout of a choice, with its layers cut so that devices are equally full."""
        ends: tuple[int, ...] | None = (len(self.layers),)
        if shape.pipeline > 1:
            ends = self.cut(shape, level, mode, batch, self.least_share(shape, level, mode, batch))
        assert ends is not None, "only asked of choices whose layers fit somewhere"
        held, free = [], dict[str, float]()
        for stage, (first, end) in enumerate(pairwise((0, *ends))):
            of_runs = self.held(shape, level, mode, batch, stage, first)
            held.append(of_runs.at(end - first - 1))
            for kind in shape.kinds[stage]:
                left = self.limits[kind] - held[-1].allocated
                free[kind] = min(free.get(kind, left), left)
        return CutLayout(shape, level, mode, batch, ends, tuple(held), free)


class Runs(NamedTuple):
    """The bytes of layers that follow one another, from one layer on: arrays over their number."""

    stages: StageBytes[Floats]
    experts: Floats  # the part of the weights, trained and frozen, that belongs to experts


def first_enough(enough: Callable[[int], bool], limit: int) -> int | None:
    """The smallest number from 1 to `limit` that is enough; None where none of those that are asked
    is.

    Every number up to `EACH_UP_TO` is asked, because more nodes may be cut into layouts that need
    more. Beyond it, numbers are doubled until one is enough, and the numbers below that one are
    taken to be enough from some number on.
    """
    for number in range(1, min(limit, EACH_UP_TO) + 1):
        if enough(number):
            return number
    low = EACH_UP_TO
    while low < limit:
        high = min(2 * low, limit)
        if enough(high):
            return low + (smallest(partial(enough_beyond, enough, low), high - low) or high - low)
        low = high
    return None


def enough_beyond(enough: Callable[[int], bool], low: int, more: int) -> bool:
    """Whether `low` and `more` together are enough."""
    return enough(low + more)


def smallest(enough: Callable[[int], bool], limit: int) -> int | None:
    """The smallest number from 1 to `limit` that is enough; None where none is. If a number is
    enough, every larger number must be enough, too."""
    low, high = 0, 1  # `low` is not enough
    while high > limit or not enough(high):  # `high` exceeds the limit only if this is 0
        if high >= limit:
            return None
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
