"""The instance as arrays, for the solvers (the evaluator does not use this module).

Types with equal times and memory become one *kind*: their nodes are interchangeable. An *option* is
a kind with a group size x, the number of devices of a stage. time[r, a, b] is the time of a stage
with layers [a, b) under option r.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.ditto.data import (
    DeviceType,
    DittoData,
    DittoDecision,
    DittoStage,
    group_sizes,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# A template among solvers: (first layer a, layer b behind the last one, option r) of each stage.
Stages = list[tuple[int, int, int]]

# The table of stage times grows with the square of the layers; beyond this nothing here is
# practical.
MOST_TABLE_BYTES = 2**30
# Stages within this relative difference of the slowest one tie, as in the evaluator. Every method
# must allow a stage behind the slowest one to be slower by this much.
TIE = 1e-9
# Half of the evaluator's tolerance for memory, so that sums in another order cannot make the
# evaluator reject a template of a solver.
MEMORY_TOLERANCE = 5e-10


@dataclass(frozen=True)
class Kind:
    """Interchangeable devices: device types with equal times and memory."""

    names: tuple[str, ...]  # names of the types, in the file's order
    counts: tuple[int, ...]  # devices of each of these types

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(self.counts)


@dataclass(frozen=True)
class DittoProblem:
    """Arrays of a DittoData with K kinds, R options and L layers. `compile_problem` makes it."""

    micro_batches: int  # N_b
    kinds: tuple[Kind, ...]  # kinds without devices are left out
    devices: Ints  # [K] devices of each kind
    option_kind: Ints  # [R] the kind of each option
    option_devices: Ints  # [R] the group size x of each option
    weight: Floats  # [R, L] seconds of one layer and micro-batch
    time: Floats  # [R, L + 1, L + 1] seconds of a stage of layers [a, b); +inf unless a < b
    capacity: Floats  # [R] bytes of a whole group, +inf without memory
    state: Floats  # [L + 1] bytes of the states of the layers in front of each, prefix sums
    activation: Floats  # [L + 1] bytes of their activations for one micro-batch, prefix sums

    @property
    def layers(self) -> int:
        """L."""
        return int(self.weight.shape[1])

    @property
    def options(self) -> int:
        """R."""
        return len(self.option_kind)

    @property
    def most_stages(self) -> int:
        """No template has more stages: layers, devices and micro-batches limit them."""
        return min(self.layers, int(self.devices.sum()), self.micro_batches)

    @property
    def has_memory(self) -> bool:
        """Whether the memory constraint is given."""
        return bool(np.isfinite(self.capacity).any())

    def last_in_memory(self, alive: int) -> Ints:
        """[R, L + 1] the largest b such that layers [a, b) fit in memory under option r, with the
        activations of `alive` micro-batches."""
        layer_bytes = self.state + alive * self.activation  # [L + 1] prefix sums
        limits = layer_bytes[None, :] + self.capacity[:, None] * (1 + MEMORY_TOLERANCE)
        fitting = np.searchsorted(layer_bytes, limits.ravel(), side="right")
        return fitting.reshape(limits.shape) - 1

    def decision(self, stages: Stages) -> DittoDecision:
        """The decision with these stages. The stages of a kind are given to its device types."""
        sizes = [int(self.option_devices[r]) for _, _, r in stages]
        names = [""] * len(stages)
        for number, kind in enumerate(self.kinds):
            of_kind = [k for k, (_, _, r) in enumerate(stages) if self.option_kind[r] == number]
            unused = list(kind.counts)  # devices of each type of the kind
            # Large groups first: sizes are powers of two, so that no type is left with a remainder
            # that is too small.
            for k in sorted(of_kind, key=lambda k: -sizes[k]):
                i = next(i for i, count in enumerate(unused) if count >= sizes[k])
                unused[i] -= sizes[k]
                names[k] = kind.names[i]
        return DittoDecision(
            stages=[
                DittoStage(first=a, last=b, type=name, devices=size)
                for (a, b, _), name, size in zip(stages, names, sizes, strict=True)
            ]
        )

    def fits(self, stages: Stages) -> bool:
        """Whether every stage fits in memory."""
        for alive, (a, b, r) in enumerate(reversed(stages), start=1):
            states = self.state[b] - self.state[a]
            activations = alive * (self.activation[b] - self.activation[a])
            if states + activations > self.capacity[r] * (1 + MEMORY_TOLERANCE):
                return False
        return True

    def accepts(self, stages: Stages) -> bool:
        """Whether stages that keep to layers and devices keep to micro-batches and memory too."""
        return len(stages) <= self.micro_batches and self.fits(stages)

    def price(self, stages: Stages) -> float:
        """T of stages in seconds, with the evaluator's rule for ties."""
        return total_seconds(self.micro_batches, [float(self.time[r, a, b]) for a, b, r in stages])


def total_seconds(micro_batches: int, times: list[float]) -> float:
    """T1 + T2 + T3 of stages that take `times` seconds per micro-batch. Of the stages that tie with
    the slowest, the first counts as the slowest."""
    least = max(times) * (1 - TIE)
    slowest = next(k for k, t in enumerate(times) if t >= least)
    warm_up = sum(times)
    steady = (micro_batches - len(times) + slowest - 1) * times[slowest]
    drain = sum(times[slowest:])
    return warm_up + steady + drain


def infeasible_because(problem: DittoProblem) -> str | None:
    """Why there is no template, as far as that needs no search: there are no devices, or a layer is
    too large for every group. None where neither holds."""
    if problem.options == 0:
        return "no device type has a node"
    last = problem.last_in_memory(1)[:, : problem.layers]
    layer_fits = (last > np.arange(problem.layers)).any(axis=0)
    too_large = np.flatnonzero(~layer_fits)
    if not len(too_large):
        return None
    return f"layer {too_large[0]} alone does not fit in the memory of any group of devices"


def compile_problem(data: DittoData) -> DittoProblem:
    """`data` as arrays; raises UnsupportedError where the table of stage times would be too
    large."""
    sizes = group_sizes(data.devices_per_node)
    memory = data.memory
    # (layer seconds as bytes, bytes of a device) -> the device types of a kind
    alike: dict[tuple[bytes, float], list[DeviceType]] = {}
    for device_type in data.device_types:
        if device_type.nodes:
            seconds = layer_seconds(device_type, sizes)
            device_bytes = memory.device_bytes[device_type.name] if memory else np.inf
            alike.setdefault((seconds.tobytes(), device_bytes), []).append(device_type)
    kinds = tuple(
        Kind(
            names=tuple(member.name for member in members),
            counts=tuple(member.nodes * data.devices_per_node for member in members),
        )
        for members in alike.values()
    )
    weight = np.zeros((0, data.layers))
    if alike:
        weight = np.concatenate([layer_seconds(types[0], sizes) for types in alike.values()])
    return DittoProblem(
        micro_batches=data.micro_batches,
        kinds=kinds,
        devices=np.array([kind.devices for kind in kinds], dtype=np.int64),
        option_kind=np.repeat(np.arange(len(kinds)), len(sizes)),
        option_devices=np.tile(np.array(sizes, dtype=np.int64), len(kinds)),
        weight=weight,
        time=stage_times(weight),
        capacity=np.array([size * x for _, size in alike for x in sizes], dtype=float),
        state=prefix(memory.layer_state_bytes if memory else [0.0] * data.layers),
        activation=prefix(memory.layer_activation_bytes if memory else [0.0] * data.layers),
    )


def layer_seconds(device_type: DeviceType, sizes: Sequence[int]) -> Floats:
    """[sizes, L] seconds of each layer for one micro-batch on x devices of a type, for each size x:
    forward, backward and two all-reduces."""
    forward = np.array(device_type.forward_seconds, dtype=float)
    backward = np.array(device_type.backward_seconds, dtype=float)
    compute = forward + backward
    rows = []
    for x in sizes:
        all_reduce = np.zeros(len(compute))
        if x > 1:
            all_reduce = np.array(device_type.allreduce_seconds[str(x)], dtype=float)
        rows.append(compute / x + 2 * all_reduce)
    return np.array(rows)


def prefix(row: list[float]) -> Floats:
    """[L + 1] prefix sums, beginning with 0."""
    return np.concatenate([[0.0], np.cumsum(np.array(row, dtype=float))])


def stage_times(weight: Floats) -> Floats:
    """[R, L + 1, L + 1] seconds of stages of layers [a, b); +inf unless a < b. weight: [R, L]
    seconds of each layer.

    Sums begin anew at each a, so that equal layers in the same order give equal floats, and ties
    stay ties.
    """
    options, layers = weight.shape
    require(
        options * (layers + 1) ** 2 * 8 <= MOST_TABLE_BYTES,
        f"stage times of {layers} layers under {options} options exceed {MOST_TABLE_BYTES} bytes",
        expected="fewer layers: merge neighbouring ones",
        kind=UnsupportedError,
    )
    time = np.full((options, layers + 1, layers + 1), np.inf)
    for a in range(layers):
        time[:, a, a + 1 :] = np.cumsum(weight[:, a:], axis=1)
    return time
