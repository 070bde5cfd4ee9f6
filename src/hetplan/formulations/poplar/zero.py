"""Memory and communication of the ZeRO stages.

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
from typing import Literal

import numpy as np

from hetplan.errors import require
from hetplan.formulations.poplar.problem import Floats
from hetplan.profiling.frameworks import HETPLAN, Framework
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.workload import Workload
from hetplan.replays.collectives import collective_seconds

Shards = Literal["equal", "memory"]
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class States:
    """Bytes of one model's states and activations."""

    weights: float  # of the whole model
    gradients: float  # of the whole model
    optimizer: float  # of the whole model
    layer: float  # weights of its largest layer
    # Activations kept for the backward pass of one sample, and those of the layer that is computed
    # again.
    per_sample: float
    layers: int  # number of layers
    element_bytes: int = 2
    framework: Framework = HETPLAN  # says what shards and layers at work take

    @classmethod
    def of(cls, workload: Workload) -> "States":
        """The states of a workload's profile. Tied parameters count once, since one device holds
        the whole model."""
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
        """The states of layers with these bytes of weights, with Adam."""
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
        equal_parts = np.full(len(taking), 1.0 / len(taking))
        half = collective_seconds(states.gradients, equal_parts, *link("all-reduce", taking))
        return Communication(0.0, 2.0 * half)
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
    if stage == 1:
        return Communication(0.0, reduce + gather)
    return Communication(reduce, gather)


def ring(cluster: Cluster, members: Sequence[int]) -> tuple[float, float]:
    """(bytes per second, seconds per message) of the slowest link of the ring through `members`."""
    here = np.asarray(members, dtype=np.int64)
    after = np.roll(here, -1)
    bandwidth, latency = cluster.bandwidth()[here, after], cluster.latency()[here, after]
    return float(bandwidth.min()), float(latency.max())
