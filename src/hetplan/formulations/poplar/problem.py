"""The instance as arrays, equal devices grouped, and what a ZeRO stage holds and sends (the
evaluator does not use this module).

Devices with the same curve are interchangeable, so every search below counts devices per group and
costs the same for 8 devices as for 16 384.

Memory and communication of the ZeRO stages.

Model states per parameter in mixed precision with Adam: 2 bytes of weight, 2 of gradient, K = 12 of
optimizer (fp32 weight, momentum, variance); in fp32: 4, 4 and 8. With a part s of the shards on a
device (1/N when equal):

    stage 0: w + g + o      1: w + g + s o      2: w + s (g + o)      3: s (w + g + o)

plus the activations of a micro-batch, which ZeRO leaves alone. Stages 2 and 3 hold the whole
gradient of the layer at work, stage 3 also its weights and those fetched ahead for the next one
(hetplan's addition; the paper counts states).
Who takes part: under stages 1 to 3 every device of the cluster, since each holds shards, whether it
gets samples or not; under stage 0 the devices on which the states and one sample fit, the others
being of no use.
Volumes: all-reduce 2 W (stage 0); reduce-scatter W + all-gather W (1, 2); two all-gathers and a
reduce-scatter, 3 W (3).
Source: Rajbhandari et al. 2020 (ZeRO), Sections 3.1, 5 and 7; Poplar (AAAI 2025), appendix "Details
about ZeRO".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import require
from hetplan.formulations.poplar.data import PoplarData
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.workload import Workload
from hetplan.replays.collectives import collective_seconds
from hetplan.text import grouped

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Times that differ by less than this part are equal: sums of the same terms in another order.
SAME_TIME = 1e-9


@dataclass(frozen=True)
class Group:
    """Devices that share one curve.

    members: their numbers in the instance, ascending. seconds [mbs + 1]: t(b), t(0) = 0.
    """

    name: str
    members: tuple[int, ...]
    seconds: Floats

    @property
    def count(self) -> int:
        """n_k, the number of devices."""
        return len(self.members)

    @property
    def largest(self) -> int:
        """mbs_k, the largest micro-batch (0: not even one sample fits)."""
        return len(self.seconds) - 1

    @cached_property
    def peak_batch(self) -> int:
        """The micro-batch of the highest speed (the smallest of several), 0 where nothing fits."""
        return (
            0
            if self.largest == 0
            else 1 + int(np.argmax(np.arange(1, self.largest + 1) / self.seconds[1:]))
        )

    @cached_property
    def peak(self) -> float:
        """p_k = max_b b / t(b), samples per second; 0 where nothing fits."""
        return self.peak_batch / float(self.seconds[self.peak_batch]) if self.peak_batch else 0.0


@dataclass(frozen=True)
class PoplarProblem:
    """groups: those that hold at least one sample; devices: n of the instance; total: G; comm: C
    seconds."""

    groups: tuple[Group, ...]
    devices: int
    total: int
    comm: float
    zero_stage: int

    @property
    def stepwise(self) -> bool:
        """Whether every step synchronises (ZeRO 2 and 3)."""
        return self.zero_stage >= 2

    @cached_property
    def speed(self) -> float:
        """Samples per second with every device at its peak: no plan is faster."""
        return sum(group.count * group.peak for group in self.groups)


NOTHING_FITS = "no device holds even one sample: every step_seconds is empty"


def compile_problem(data: PoplarData) -> PoplarProblem:
    """`data` as groups, in the order of their first devices; devices that hold nothing are left
    out."""
    curves = [tuple(device.step_seconds) for device in data.devices]
    members = grouped((curve, i) for i, curve in enumerate(curves) if curve)
    groups = tuple(
        Group(data.devices[numbers[0]].name, tuple(numbers), np.array([0.0, *curve]))
        for curve, numbers in members.items()
    )
    return PoplarProblem(
        groups, len(data.devices), data.global_batch, data.comm_seconds, data.zero_stage
    )


Shards = Literal["equal", "memory"]
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class States:
    """Bytes of one model. weights, gradients, optimizer: whole model; layer: weights of its largest
    layer; per_sample: activations kept for the backward pass of one sample, and those of the layer
    that is computed again; layers: how many; framework: what shards and layers at work take."""

    weights: float
    gradients: float
    optimizer: float
    layer: float
    per_sample: float
    layers: int
    element_bytes: int = 2
    framework: Framework = HETPLAN

    @classmethod
    def of(cls, workload: Workload) -> "States":
        """From the profile's layers; tied parameters count once, as one device holds the whole
        model."""
        layers = workload.profile.layers
        saved = sum(layer.saved_bytes for layer in layers) + workload.working_bytes.get(1, 0.0)
        return cls.of_weights(
            [layer.param_bytes for layer in layers], workload.precision, saved, workload.framework
        )

    @classmethod
    def of_weights(
        cls,
        layers: Sequence[float],
        precision: Precision,
        per_sample: float = 0.0,
        framework: Framework = HETPLAN,
    ) -> "States":
        """From the bytes of weights that each layer owns, with Adam's states."""
        each, weights = ELEMENT_BYTES[precision], float(sum(layers))
        _, gradients, optimizer = framework.state_bytes(each)
        return cls(
            weights=weights,
            gradients=weights / each * gradients,
            optimizer=weights / each * optimizer,
            layer=float(max(layers)),
            per_sample=per_sample,
            layers=len(layers),
            element_bytes=each,
            framework=framework,
        )

    def resident(self, stage: int, part: float) -> float:
        """Bytes on a device that holds `part` of the shards, without activations."""
        check_stage(stage)
        held = self.framework.held_bytes(self.weights, self.layer, self.element_bytes, stage, part)
        return sum(held)

    def largest_batch(self, stage: int, part: float, memory: float) -> int:
        """The largest micro-batch beside the states in `memory` bytes; 0 when none fits."""
        free = memory - self.resident(stage, part)
        if free < self.per_sample or free < 0:
            return 0
        return int(free / self.per_sample) if self.per_sample > 0 else 10**9


def check_stage(stage: int) -> None:
    """Raise InputError for anything but 0 to 3."""
    require(stage in STAGES, "ZeRO stage", got=stage, expected="0, 1, 2 or 3")


def parts(memory: Sequence[float], shards: Shards) -> Floats:
    """[n] the part of the shards on each device: equal, or in proportion to its memory (bytes)."""
    if shards == "equal":
        return np.full(len(memory), 1.0 / len(memory))
    require(shards == "memory", "shards", got=shards, expected="equal or memory")
    sizes = np.array(memory, dtype=float)
    require(
        sizes.sum() > 0, "shards by memory, but no device has any", expected="memory on some device"
    )
    return np.asarray(sizes / sizes.sum())


@dataclass(frozen=True)
class Communication:
    """Seconds of the collectives: in every accumulation step, and once per iteration."""

    per_step: float
    per_iteration: float


def communication(
    states: States,
    stage: int,
    cluster: Cluster,
    held: Floats,
    members: Sequence[int] | None = None,
    sharers: Sequence[int] | None = None,
    measured: Collectives | None = None,
) -> Communication:
    """Collectives over the members in the cluster's order, at the slowest link of the ring through
    them.

    Stage 3 gathers layer by layer and pays the latency once per layer. held [n]: parts of the
    shards. members: who takes part under stage 0, default all devices; later stages need everyone
    who holds shards. sharers [n]: whose parts `held` are, default all devices of the cluster.
    measured: collectives that take the place of the cluster's links.
    """

    def link(operation: str, taking: Sequence[int]) -> tuple[float, float]:
        return ring(cluster, taking) if measured is None else measured.ring(operation)

    check_stage(stage)
    if stage == 0:
        taking = range(len(held)) if members is None else members
        if not taking:
            return Communication(0.0, 0.0)
        return Communication(
            0.0,
            2.0
            * collective_seconds(
                states.gradients,
                np.full(len(taking), 1.0 / len(taking)),
                *link("all-reduce", taking),
            ),
        )
    all_of_them = range(len(held)) if sharers is None else sharers
    messages = states.layers if stage == 3 else 1
    reduce = collective_seconds(
        states.gradients, held, *link("reduce-scatter", all_of_them), messages=messages
    )
    gather = collective_seconds(
        states.weights, held, *link("all-gather", all_of_them), messages=messages
    )
    if stage == 3:
        return Communication(2.0 * gather + reduce, 0.0)
    return Communication(0.0, reduce + gather) if stage == 1 else Communication(reduce, gather)


def ring(cluster: Cluster, members: Sequence[int]) -> tuple[float, float]:
    """(bytes per second, seconds per message) of the slowest link of the ring through `members`."""
    here = np.asarray(members, dtype=np.int64)
    after = np.roll(here, -1)
    return float(cluster.bandwidth()[here, after].min()), float(
        cluster.latency()[here, after].max()
    )
