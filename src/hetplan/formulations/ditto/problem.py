"""The instance as arrays, for the solvers (the evaluator does not use this module).

Types whose rows and memory are all equal become one *kind*: their nodes are interchangeable. An
*option* is a kind with a group size x; time[r, a, b] is the time of a stage with layers [a, b)
under option r.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.ditto.data import DittoData, DittoDecision, DittoStage, group_sizes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# A template among solvers: (first layer, last layer, option) of each stage.
Stages = list[tuple[int, int, int]]

# The table of stage times grows with the square of the layers; beyond this nothing here is
# practical.
MOST_TABLE_BYTES = 2**30
# The evaluator's tie, relative to the slowest stage, which the model must grant lest it cut off
# what the evaluator accepts; and half of its tolerance for memory, so that sums in another order
# cannot make it reject what a solver found.
TIE = 1e-9
MEMORY_TOLERANCE = 5e-10


@dataclass(frozen=True)
class Kind:
    """Interchangeable devices. names, counts: the types behind it with their devices, in the file's
    order."""

    names: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(self.counts)


@dataclass(frozen=True)
class DittoProblem:
    """Arrays of a DittoData; K kinds, R options, L layers. Kinds without devices are left out.

    weight [R, L] seconds of one layer; time [R, L + 1, L + 1], +inf unless a < b.
    option_kind, option_devices [R]; devices [K].
    capacity [R] bytes of a whole group, +inf without memory; state, activation [L + 1] prefix sums,
    bytes.
    """

    micro_batches: int
    kinds: tuple[Kind, ...]
    devices: Ints
    option_kind: Ints
    option_devices: Ints
    weight: Floats
    time: Floats
    capacity: Floats
    state: Floats
    activation: Floats

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
        """[R, L + 1] the largest b such that layers [a, b) fit option r with `alive` micro-batches
        alive."""
        held = self.state + alive * self.activation
        limits = held[None, :] + self.capacity[:, None] * (1 + MEMORY_TOLERANCE)
        return np.searchsorted(held, limits.ravel(), side="right").reshape(limits.shape) - 1

    def decision(self, stages: Stages) -> DittoDecision:
        """Stages (first, last, option) as a decision: kinds are given back their types' names."""
        names = [""] * len(stages)
        for number, kind in enumerate(self.kinds):
            mine = [k for k, (_, _, r) in enumerate(stages) if self.option_kind[r] == number]
            left = list(kind.counts)
            # Large groups first: sizes are powers of two, so no type is left with a remainder too
            # small.
            for k in sorted(mine, key=lambda k: -self.option_devices[stages[k][2]]):
                size = int(self.option_devices[stages[k][2]])
                at = next(i for i, room in enumerate(left) if room >= size)
                left[at] -= size
                names[k] = kind.names[at]
        return DittoDecision(
            stages=[
                DittoStage(first=a, last=b, type=name, devices=int(self.option_devices[r]))
                for (a, b, r), name in zip(stages, names, strict=True)
            ]
        )

    def fits(self, stages: Stages) -> bool:
        """Whether every stage fits in memory."""
        for alive, (a, b, r) in enumerate(reversed(stages), start=1):
            held = self.state[b] - self.state[a] + alive * (self.activation[b] - self.activation[a])
            if held > self.capacity[r] * (1 + MEMORY_TOLERANCE):
                return False
        return True

    def accepts(self, stages: Stages) -> bool:
        """Whether stages that keep to layers and devices keep to micro-batches and memory too."""
        return len(stages) <= self.micro_batches and self.fits(stages)

    def price(self, stages: Stages) -> float:
        """T of stages (first, last, option), with the evaluator's rule for ties."""
        return total_seconds(self.micro_batches, [float(self.time[r, a, b]) for a, b, r in stages])


def total_seconds(micro_batches: int, times: list[float]) -> float:
    """T1 + T2 + T3 of stage times; of stages within the tie of the slowest, the first."""
    least = max(times) * (1 - TIE)
    slowest = next(k for k, t in enumerate(times) if t >= least)
    return (
        sum(times)
        + (micro_batches - len(times) + slowest - 1) * times[slowest]
        + sum(times[slowest:])
    )


def infeasible_because(problem: DittoProblem) -> str | None:
    """A reason that needs no search: no devices, or a layer too large for every group; None
    otherwise."""
    if problem.options == 0:
        return "no device type has a node"
    last = problem.last_in_memory(1)
    lacking = np.flatnonzero(~(last[:, : problem.layers] > np.arange(problem.layers)).any(axis=0))
    text = "layer {} alone does not fit in the memory of any group of devices"
    return text.format(lacking[0]) if len(lacking) else None


def compile_problem(data: DittoData) -> DittoProblem:
    """`data` as arrays; raises UnsupportedError where the table of stage times would be too
    large."""
    sizes, memory = group_sizes(data.devices_per_node), data.memory
    grouped: dict[tuple[bytes, float], list[int]] = {}
    rows = []
    for i, kind in enumerate(data.device_types):
        compute = np.array(kind.forward_seconds, dtype=float) + np.array(
            kind.backward_seconds, dtype=float
        )
        reduce = [np.zeros(data.layers)] + [
            np.array(kind.allreduce_seconds[str(x)], float) for x in sizes[1:]
        ]
        rows.append(np.array([compute / x + 2 * r for x, r in zip(sizes, reduce, strict=True)]))
        if kind.nodes:
            held = memory.device_bytes[kind.name] if memory else np.inf
            grouped.setdefault((rows[i].tobytes(), held), []).append(i)
    members = list(grouped.values())
    kinds = tuple(
        Kind(
            tuple(data.device_types[i].name for i in group),
            tuple(data.device_types[i].nodes * data.devices_per_node for i in group),
        )
        for group in members
    )
    weight = (
        np.concatenate([rows[group[0]] for group in members])
        if members
        else np.zeros((0, data.layers))
    )
    return DittoProblem(
        micro_batches=data.micro_batches,
        kinds=kinds,
        devices=np.array([kind.devices for kind in kinds], dtype=np.int64),
        option_kind=np.repeat(np.arange(len(kinds)), len(sizes)),
        option_devices=np.tile(np.array(sizes, dtype=np.int64), len(kinds)),
        weight=weight,
        time=stage_times(weight),
        capacity=np.array([held * x for _, held in grouped for x in sizes], dtype=float),
        state=prefix(memory.layer_state_bytes if memory else [0.0] * data.layers),
        activation=prefix(memory.layer_activation_bytes if memory else [0.0] * data.layers),
    )


def prefix(row: list[float]) -> Floats:
    """[L + 1] prefix sums, beginning with 0."""
    return np.concatenate([[0.0], np.cumsum(np.array(row, dtype=float))])


def stage_times(weight: Floats) -> Floats:
    """[R, L + 1, L + 1] sums of weight over [a, b); +inf unless a < b.

    Each row is summed from its own start, so that equal runs of layers give equal floats (ties stay
    ties).
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
