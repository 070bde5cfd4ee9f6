"""The instance as arrays, equal devices grouped, and what a ZeRO stage sends.

The evaluator does not use this module.

Devices with the same curve are interchangeable, so every search below counts devices per group and
costs the same for 8 devices as for 16 384.

Communication of the ZeRO stages.

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
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.replays.collectives import collective_seconds
from hetplan.replays.model_states import States, check_stage
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
