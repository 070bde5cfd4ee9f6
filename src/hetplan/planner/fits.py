"""Whether a model can be trained on a cluster: memory alone, over regular layouts.

A layout has D replicas of P stages on T tensor ranks of one node each, a ZeRO level, recomputation
and a micro-batch. All replicas are alike: every stage runs on one device type, those with the most
memory first, since early stages keep the most micro-batches (1F1B: min(P - s, M) on stage s).
Without stages, replicas may be of several types, and the one with the least memory decides. Layers
are cut to memory: each stage takes as many as fit, and of all shares of the limits the least at
which they do is taken, so that devices are equally full.

What a device holds is `replays.memory`'s, as the replay counts it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import combinations, islice, pairwise
from math import inf
from typing import Any

import numpy as np

from hetplan.errors import require, unknown_name
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.hardware.cluster import MAX_DEVICES, Cluster, Node, open_cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import DEFAULT_STACK, ELEMENT_BYTES, Precision
from hetplan.profiling.profiles.predict import (
    LARGEST_MICRO_BATCH,
    default_micro_batches,
    default_tensor_degrees,
    predict,
)
from hetplan.profiling.rates.times import Recomputation
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.arrays import Floats
from hetplan.replays.memory import Held, Passes, held_on
from hetplan.replays.pose import costs_of
from hetplan.text import bytes_text, counted

# PyTorch's allocator keeps blocks that nothing fits in: 15 % on average over eight language models
# on A100 (Guo et al. 2024, GMLake), few percent with expandable segments.
MEMORY_MARGIN = 0.05
SHORTER = 3  # how often a sequence is halved in search of one that fits
FINE = 1000  # parts of the limits: shares of them are searched in so small steps


@dataclass(frozen=True)
class Wanted:
    """Figures that a configuration must have; None: whatever fits."""

    zero: int | None = None
    recomputation: Recomputation | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Shape:
    """tensor ranks, and replicas of stages on these device types."""

    tensor: int
    data: int
    kinds: tuple[tuple[str, ...], ...]  # [P]

    @property
    def pipeline(self) -> int:
        """Stages of each replica."""
        return len(self.kinds)

    @property
    def devices(self) -> int:
        """The number of devices in use; the cluster may have more."""
        return self.tensor * self.pipeline * self.data


Choice = tuple[Shape, int, Recomputation]  # with the ZeRO level


@dataclass(frozen=True)
class Configuration:
    """A plan of equal replicas: its degrees, and what it leaves free on the devices."""

    shape: Shape
    zero: int
    recomputation: Recomputation
    micro_batch: int
    ends: tuple[int, ...]  # [P] first layer behind each stage
    held: tuple[Held[float], ...]  # [P] bytes on each device of a stage
    free: dict[str, float]  # bytes by device type, below 0 where they lack

    @property
    def text(self) -> str:
        """The layout in words."""
        again = "no" if self.recomputation == "none" else self.recomputation
        shape, zero = self.shape, f"ZeRO {self.zero}, " if self.zero else ""
        return (
            f"tensor {shape.tensor}, pipeline {shape.pipeline}, data {shape.data}, "
            f"{zero}{again} recomputation, micro-batch {self.micro_batch}"
        )

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "tensor": self.shape.tensor,
            "pipeline": self.shape.pipeline,
            "data": self.shape.data,
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
    """layouts: that fit, of each ZeRO level the simplest, simplest first. nearest: where none does,
    the one that lacks least. advice: what would make it fit, the smallest change first.
    limit_bytes: by device type."""

    workload: Workload = field(repr=False)
    layouts: tuple[Configuration, ...]
    nearest: Configuration | None
    advice: tuple[str, ...]
    limit_bytes: dict[str, float]

    def __str__(self) -> str:
        if self.layouts:
            return f"fits: {self.layouts[0].text}"
        return "; ".join(["does not fit", *(f"would fit: {line}" for line in self.advice)])

    @property
    def fits(self) -> bool:
        """Whether some layout does."""
        return bool(self.layouts)

    @property
    def without_peak(self) -> tuple[str, ...]:
        """Device types whose speed in the precision is not known, so that no plan can be timed."""
        return tuple(
            k
            for k, spec in self.workload.cluster.specs.items()
            if self.workload.precision not in spec.peak_tflops
        )

    def document(self) -> dict[str, Any]:
        """As JSON types."""
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
    model: str | os.PathLike[str] | Model,
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

    global_batch: samples per iteration, None: enough for every device. memory_margin: share of each
    device's memory that stays free. zero, recomputation, micro_batch: where only one will do.
    Raises InputError.
    """
    require(
        micro_batch is None or 1 <= micro_batch <= (global_batch or micro_batch),
        "micro-batch is not usable",
        got=micro_batch,
        expected="at least 1" + (f", at most the batch of {global_batch}" if global_batch else ""),
    )
    on = cluster if isinstance(cluster, Cluster) else open_cluster(cluster)

    def posed(margin: float = memory_margin, **changes: Any) -> Workload:
        """The workload, with another margin, sequence or precision."""
        bare = memory_workload(
            model,
            on,
            global_batch or 1,
            framework,
            **{"sequence": sequence, "precision": precision, **changes},
        )
        return replace(bare, memory_margin=margin)

    workload = posed()
    levels, modes = workload.framework.levels, workload.framework.recomputation
    mode = next((known for known in modes if known == recomputation), None)
    if recomputation is not None and mode is None:
        raise unknown_name(f"recomputation of {workload.framework.name}", recomputation, modes)
    require(
        zero is None or zero in levels,
        f"ZeRO of {workload.framework.name}",
        got=zero,
        expected=" or ".join(map(str, levels)),
    )
    wanted = Wanted(zero, mode, micro_batch)
    question = Question(workload, global_batch)
    fit = question.answer(wanted)
    if fit.fits:
        return fit

    def other(name: str, batch: int | None = global_batch, **held: Any) -> str | None:
        """The text of the configuration that would fit under the change of this name; None where
        none does, and where nothing is changed."""
        return next(
            (f"{name}: {layout.text}" for layout in Question(posed(**held), batch).fitting(wanted)),
            None,
        )

    lines = [
        *question.wishes(wanted),
        other("without a memory margin", margin=0.0),
        other("with a larger global batch", batch=None),
    ]
    if not isinstance(model, Model):
        lengths = ((workload.sequence or 0) >> halved for halved in range(1, SHORTER + 1))
        shorter = (other(f"with {n} tokens per sample", sequence=n) for n in lengths if n)
        lines += other("in fp16", precision="fp16"), next(filter(None, shorter), None)
    return replace(fit, advice=(*filter(None, lines), *question.devices(wanted)))


def advice(workload: Workload) -> tuple[str, ...]:
    """Changes with which a workload would fit of which no plan at hand fits, the smallest one
    first; or the simplest configuration, where one fits as it is."""
    wanted = Wanted()
    question = Question(workload, workload.global_batch)
    fit = question.answer(wanted)
    if fit.fits:
        return (f"as {fit.layouts[0].text}",)
    lines = []
    if fit.nearest is not None:
        more = " and ".join(
            f"{bytes_text(-free)} more on each {kind}"
            for kind, free in fit.nearest.free.items()
            if free < 0
        )
        lines.append(f"{more}: {fit.nearest.text}")
    lines += (
        f"with a larger global batch: {layout.text}"
        for layout in islice(Question(workload, None).fitting(wanted), 1)
    )
    return (*lines, *question.devices(wanted))


def memory_workload(
    model: str | os.PathLike[str] | Model,
    cluster: Cluster,
    batch: int,
    framework: str | Framework,
    **held: Any,
) -> Workload:
    """A workload whose bytes count and not its seconds; see `with_peaks`."""
    if not isinstance(model, Model):
        model = load_model(model, attention=DEFAULT_STACK.attention, **held)
    return make_workload(
        model,
        cluster,
        batch,
        profile=predict(model, with_peaks(cluster, model.precision), micro_batches=[1]),
        framework=framework,
    )


def with_peaks(cluster: Cluster, precision: Precision) -> Cluster:
    """The cluster where a device type without a peak in the precision borrows the largest that it
    has."""
    specs = {
        kind: spec.model_copy(
            update={"peak_tflops": {precision: max(spec.peak_tflops.values()), **spec.peak_tflops}}
        )
        for kind, spec in cluster.specs.items()
    }
    return replace(cluster, specs=specs)


class Question:
    """One model on one cluster; what layers hold is asked once per tensor degree."""

    def __init__(self, workload: Workload, batch: int | None) -> None:
        self.workload, self.batch = workload, batch
        self.limits = workload.device_bytes()
        # costs are priced by pairs
        alone = replace(
            workload, cluster=with_peaks(workload.cluster.part([0]), workload.precision)
        )
        self.modes = workload.framework.recomputation
        self.costs = {mode: costs_of(alone, mode) for mode in self.modes}
        self.layers = workload.profile.layers
        self.weights = np.cumsum([0.0, *(layer.param_bytes for layer in self.layers)])
        self.saved = cache(self._saved)
        self.degrees = default_tensor_degrees(workload.model, workload.cluster)

    def answer(self, wanted: Wanted) -> Fit:
        """The simplest layouts that fit, or what is lacking and what would help."""
        layouts = tuple(self.fitting(wanted))
        if layouts:
            return Fit(self.workload, layouts, None, (), self.limits)
        batch, nodes = wanted.micro_batch or 1, self.workload.cluster.nodes
        shares = [
            (self.least_share(*one, batch), one) for one in self.choices(nodes, wanted, frugal=True)
        ]
        share, choice = min(shares, key=lambda pair: pair[0], default=(inf, None))
        nearest = self.layout(*choice, batch) if choice is not None and share < inf else None
        return Fit(self.workload, (), nearest, (), self.limits)

    def fitting(self, wanted: Wanted) -> Iterator[Configuration]:
        """Layouts that fit, simplest first, of each ZeRO level one."""
        seen: set[int] = set()
        for shape, level, mode in self.choices(self.workload.cluster.nodes, wanted):
            if level not in seen and (batch := self.largest(shape, level, mode, wanted)):
                seen.add(level)
                yield self.layout(shape, level, mode, batch)

    def wishes(self, wanted: Wanted) -> list[str]:
        """Configurations that would fit if as few as possible of the wishes were others."""
        made = [name for name, value in vars(wanted).items() if value is not None]
        for count in range(1, len(made) + 1):
            lines = [
                f"another {' and '.join(names).replace('_', '-')}: {layout.text}"
                for names in combinations(made, count)
                for layout in islice(self.fitting(replace(wanted, **dict.fromkeys(names))), 1)
            ]
            if lines:
                return lines
        return []

    def devices(self, wanted: Wanted) -> Iterator[str]:
        """Texts of how many more devices of a type would do, for the types of which some number
        does."""
        for kind in self.limits:
            alike = [node for node in self.workload.cluster.nodes if node.device == kind]
            largest = max(alike, key=lambda node: node.devices)
            most = (MAX_DEVICES - len(self.workload.cluster.devices)) // largest.devices
            more = smallest(partial(self.enough, like=largest, wanted=wanted), most)
            if more is not None:
                yield (
                    f"{more * largest.devices} more {kind} "
                    f"({counted(more, 'node')} of {largest.devices})"
                )

    def enough(self, count: int, like: Node, wanted: Wanted) -> bool:
        """Whether so many further nodes of a kind make it fit."""
        return any(
            self.cut(*choice, wanted.micro_batch or 1)
            for choice in self.choices(
                [*self.workload.cluster.nodes, *[like] * count], wanted, frugal=True
            )
        )

    def choices(
        self, nodes: Sequence[Node], wanted: Wanted, *, frugal: bool = False
    ) -> Iterator[Choice]:
        """All, simplest first: little recomputation, few ranks per replica, low levels. frugal: of
        every shape what holds least."""
        modes = self.modes if wanted.recomputation is None else (wanted.recomputation,)
        shapes = sorted(
            self.shapes(nodes, wanted),
            key=lambda one: (one.tensor * one.pipeline, one.pipeline, -one.data),
        )
        for mode in modes[-1:] if frugal else modes:
            for shape in shapes:
                yield from (
                    (shape, level, mode)
                    for level in self.levels(shape, wanted)[-1 if frugal else 0 :]
                )

    def levels(self, shape: Shape, wanted: Wanted) -> tuple[int, ...]:
        """The framework's ZeRO levels; of a single replica the lowest, which has nothing to
        divide."""
        framework = self.workload.framework
        levels = (
            framework.levels if shape.tensor * shape.pipeline == 1 else framework.pipeline_levels
        )
        if shape.data == 1:
            levels = levels[:1]
        return levels if wanted.zero is None else tuple(n for n in levels if n == wanted.zero)

    def shapes(self, nodes: Sequence[Node], wanted: Wanted) -> Iterator[Shape]:
        """Replicas without stages on the types with the most memory, and as many stages as a power
        of two, or as there are groups of devices."""
        for tensor in self.degrees:
            groups = dict.fromkeys(sorted(self.limits, key=self.limits.__getitem__)[::-1], 0)
            for node in nodes:
                groups[node.device] += node.devices // tensor
            kinds = tuple(kind for kind in groups if groups[kind])
            total = sum(groups.values())
            for few in range(1, len(kinds) + 1):
                replicas = self.divided(sum(groups[kind] for kind in kinds[:few]), wanted)
                yield Shape(tensor, replicas, (kinds[:few],))
            longest = min(total, len(self.layers))
            for stages in sorted(
                {*(2**i for i in range(1, longest.bit_length())), longest} - {1, 0}
            ):
                replicas = total // stages
                while sum(count // replicas for count in groups.values()) < stages:
                    replicas -= 1
                replicas = self.divided(replicas, wanted)
                places = [(kind,) for kind in kinds for _ in range(groups[kind] // replicas)]
                yield Shape(tensor, replicas, tuple(places[:stages]))

    def divided(self, replicas: int, wanted: Wanted) -> int:
        """The most replicas that share the batch evenly, a micro-batch each at least."""
        if self.batch is None:
            return replicas
        return next(
            n
            for n in range(min(replicas, self.batch // (wanted.micro_batch or 1)), 0, -1)
            if self.batch % n == 0
        )

    def largest(self, shape: Shape, level: int, mode: Recomputation, wanted: Wanted) -> int | None:
        """The largest micro-batch that fits; None where none does."""
        own = LARGEST_MICRO_BATCH if self.batch is None else self.batch // shape.data
        best = None
        for size in (wanted.micro_batch,) if wanted.micro_batch else default_micro_batches(own):
            if self.cut(shape, level, mode, size) is None:
                break
            best = size
        return best

    def _saved(self, mode: Recomputation, tensor: int) -> tuple[Floats, Passes[float]]:
        """[L + 1] bytes per sample that the layers up to each keep; and those of the whole
        model."""
        costs, count = self.costs[mode], len(self.layers)
        each = [costs.saved_bytes((l, l + 1), tensor) for l in range(count)]
        return np.cumsum([0.0, *each]), costs.passes_bytes([(0, count)], tensor)

    def alive(self, shape: Shape, stage: int, batch: int) -> float:
        """Micro-batches that a stage keeps at once."""
        steps = inf if self.batch is None else max(1, self.batch // shape.data // batch)
        return min(shape.pipeline - stage, steps)

    def cut(
        self, shape: Shape, level: int, mode: Recomputation, batch: int, share: float = 1.0
    ) -> tuple[int, ...] | None:
        """[P] first layer behind each stage, each as full as a share of the limits allows; None
        where layers are left over."""
        kept, passes = self.saved(mode, shape.tensor)
        stages, last = shape.pipeline, len(self.layers)
        per_byte, fixed, head = self.linear(shape, level, passes, batch)
        ends, first = [], 0
        for stage, kinds in enumerate(shape.kinds):
            bytes_to = per_byte * self.weights + batch * self.alive(shape, stage, batch) * kept
            room = share * min(self.limits[kind] for kind in kinds) - fixed + bytes_to[first]
            if stage < stages - 1:  # at least one layer for each stage behind it
                fitting = int(np.searchsorted(bytes_to, room, side="right")) - 1
                end = min(fitting, last - (stages - 1 - stage))
            else:
                end = last if bytes_to[last] + head <= room else first
            if end <= first:
                return None
            ends.append(end)
            first = end
        return tuple(ends)

    def linear(
        self, shape: Shape, level: int, passes: Passes[float], batch: int
    ) -> tuple[float, float, float]:
        """The most that a device holds, as bytes per byte of its layers' weights, bytes beside its
        layers, and bytes beside them on the last stage."""
        framework, tensor = self.workload.framework, shape.tensor
        part, width = 1 / shape.data if level else 1.0, ELEMENT_BYTES[self.workload.precision]
        staged = shape.pipeline > 1
        each = sum(framework.held_bytes(1.0, 0.0, width, level, part)[:3])
        per_byte = (each + framework.whole_bytes(1.0, width, level, staged=staged)) / tensor
        sizes = [layer.param_bytes / tensor for layer in self.layers]
        states = framework.held_bytes(sum(sizes), max(sizes), width, level, part, staged=staged)
        logits, tied, reserved = batch * passes.logits, 0.0, self.workload.reserved_bytes
        if staged:
            sent = max(layer.activation_bytes for layer in self.layers) / (
                tensor if framework.sequence_parallel else 1
            )
            passes, tied = replace(passes, boundary=sent), self.layers[-1].tied_param_bytes
        fixed, last = (
            held_on(framework, states, one, logits, batch, reserved).allocated
            - logits
            - per_byte * tensor * sum(sizes)
            for one in (replace(passes, logits=0.0, loss=0.0), passes)
        )
        return per_byte, fixed, last - fixed + per_byte * tied

    def least_share(self, shape: Shape, level: int, mode: Recomputation, batch: int) -> float:
        """The least share of the limits, above 1 where they lack, at which all layers fit; inf
        where no thousandfold memory would do."""
        least = smallest(
            lambda n: self.cut(shape, level, mode, batch, n / FINE) is not None, 1000 * FINE
        )
        return inf if least is None else least / FINE

    def layout(self, shape: Shape, level: int, mode: Recomputation, batch: int) -> Configuration:
        """With its layers cut so that devices are equally full."""
        ends: tuple[int, ...] | None = (len(self.layers),)
        if shape.pipeline > 1:
            ends = self.cut(shape, level, mode, batch, self.least_share(shape, level, mode, batch))
        assert ends is not None, "only asked of choices whose layers fit somewhere"
        costs, tensor = self.costs[mode], shape.tensor
        framework, width = self.workload.framework, ELEMENT_BYTES[self.workload.precision]
        held, free = [], dict[str, float]()
        for stage, (first, end) in enumerate(pairwise((0, *ends))):
            here = self.layers[first:end]
            weights = [layer.param_bytes for layer in here]
            if first and end == len(self.layers):
                weights[-1] += here[-1].tied_param_bytes
            passes = costs.passes_bytes([(first, end)], tensor)
            states = framework.held_bytes(
                sum(weights) / tensor,
                max(weights) / tensor,
                width,
                level,
                1 / shape.data if level else 1.0,
                staged=shape.pipeline > 1,
            )
            kept = batch * self.alive(shape, stage, batch) * passes.saved
            reserved = self.workload.reserved_bytes
            held.append(held_on(framework, states, passes, kept, batch, reserved))
            for kind in shape.kinds[stage]:
                left = self.limits[kind] - held[-1].allocated
                free[kind] = min(free.get(kind, left), left)
        return Configuration(shape, level, mode, batch, ends, tuple(held), free)


def smallest(enough: Callable[[int], bool], limit: int) -> int | None:
    """The smallest number from 1 to `limit` that is enough, as all after it are; None where none
    is."""
    low, high = 0, 1
    while high > limit or not enough(high):
        if high >= limit:
            return None
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
