"""The instance as arrays, for the solvers (the evaluator does not use this module).

Devices of equal speed become one type: t(Q, .) is convex and indifferent to exchanging them, so
giving them equal ratios loses nothing. The cost below depends on the types, not on how many devices
have one. With memory, only devices of equal speed and equal memory become one type: what each holds
is linear in its ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.data import Communication, HapData, HapDecision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Half of the evaluator's tolerance for memory, so that rounding alone cannot make it reject a
# decision found here.
FIT_TOLERANCE = 5e-10


@dataclass(frozen=True)
class Step:
    """One triple: its number in the data, property numbers, and work in FLOP (compute) or seconds
    (comm); bytes are 0 without memory."""

    index: int
    comm: bool
    pre: frozenset[int]
    post: frozenset[int]
    segment: int
    fixed: float
    shared: float
    fixed_bytes: float = 0.0
    shared_bytes: float = 0.0

    @property
    def costless(self) -> bool:
        """A computation that costs and holds nothing: it fits into any stage."""
        return not (self.comm or self.fixed or self.shared or self.fixed_bytes or self.shared_bytes)


@dataclass(frozen=True)
class CostOfRatios:
    """A program's cost: constant + sum_k comm[k] max_j B[k][j] + sum_s max_j (F[s] + S[s] . B[:,
    j]) / v_j.

    constant in seconds; comm [g] seconds; F [s] and S [s, g] FLOP. Stages with proportional work
    are added up into one row, because their slowest type is the same. A device of type d holds
    fixed_bytes + shared_bytes [g] . B[:, d].
    """

    constant: float
    comm: Floats
    F: Floats
    S: Floats
    fixed_bytes: float
    shared_bytes: Floats


@dataclass(frozen=True)
class HapProblem:
    """speeds [K] FLOP/s ascending and (without memory) distinct, counts [K] devices of each;
    type_of [m] device -> type; g segments; steps by number; properties their names; goal a property
    number (None: no triple names it); capacity [K] bytes of one device of each type, the tolerance
    included, None without memory."""

    speeds: Floats
    counts: Ints
    type_of: Ints
    g: int
    steps: tuple[Step, ...]
    properties: tuple[str, ...]
    goal: int
    program: tuple[int, ...] | None
    capacity: Floats | None = None

    @property
    def K(self) -> int:
        """Number of device types."""
        return len(self.speeds)

    @cached_property
    def proportional(self) -> Floats:
        """[K]: one device's ratio when work is shared in proportion to speed."""
        return self.speeds / float(self.speeds @ self.counts)

    @cached_property
    def even(self) -> Floats:
        """[K]: the same ratio for all devices."""
        return np.full(self.K, 1.0 / self.counts.sum())

    def cost_of(self, program: Sequence[int]) -> CostOfRatios:
        """The cost of a program as a function of the ratios; proportional rows merged."""
        constant, comm, shared_bytes = 0.0, np.zeros(self.g), np.zeros(self.g)
        rows: list[Floats] = [np.zeros(1 + self.g)]
        for i in program:
            step = self.steps[i]
            if step.comm:
                constant += step.fixed
                comm[step.segment] += step.shared
                rows.append(np.zeros(1 + self.g))
            else:
                rows[-1][0] += step.fixed
                rows[-1][1 + step.segment] += step.shared
            shared_bytes[step.segment] += step.shared_bytes
        merged = _merged(np.array(rows))
        fixed_bytes = math.fsum(self.steps[i].fixed_bytes for i in program)
        return CostOfRatios(constant, comm, merged[:, 0], merged[:, 1:], fixed_bytes, shared_bytes)

    def fits(self, cost: CostOfRatios, ratios: Floats) -> bool:
        """Whether every device holds its part at ratios [g, K]."""
        if self.capacity is None:
            return True
        held = cost.fixed_bytes + cost.shared_bytes @ ratios
        return bool((held <= self.capacity * (1 + FIT_TOLERANCE / 2)).all())

    @cached_property
    def seconds_of_all(self) -> float:
        """What no program without repeated triples exceeds, whatever the ratios."""
        slowest = float(self.speeds[0])
        return math.fsum((s.fixed + s.shared) / (1.0 if s.comm else slowest) for s in self.steps)

    def seconds(self, cost: CostOfRatios, ratios: Floats) -> float:
        """Cost at ratios [g, K] (one device of each type)."""
        busy = (cost.F[:, None] + cost.S @ ratios) / self.speeds
        total = busy.max(axis=1).sum() if len(busy) else 0.0
        return float(cost.constant + cost.comm @ ratios.max(axis=1) + total)

    def decision(self, program: Sequence[int], ratios: Floats) -> HapDecision:
        """The decision with ratios [g, K] spread over the devices; each row sums to 1, up to
        rounding."""
        spread = np.maximum(ratios, 0.0)[:, self.type_of]
        rows = [(row / math.fsum(row)).tolist() for row in spread]
        return HapDecision(program=[int(i) for i in program], ratios=rows)


def _merged(rows: Floats) -> Floats:
    """Rows [s, 1 + g] with proportional ones added up and empty ones left out."""
    sizes = rows.sum(axis=1)
    rows, sizes = rows[sizes > 0], sizes[sizes > 0]
    if not len(rows):
        return rows
    # equal to 12 digits: the cost changes by less than 1e-12 of itself
    _, where = np.unique(np.round(rows / sizes[:, None], 12), axis=0, return_inverse=True)
    merged = np.zeros((int(where.max()) + 1, rows.shape[1]))
    np.add.at(merged, where.ravel(), rows)
    return merged


def compile_problem(data: HapData) -> HapProblem:
    """`data` as arrays."""
    speed = np.array([device.flops_per_second for device in data.devices])
    limited = data.memory is not None
    room = np.array(data.memory.device_bytes) if data.memory is not None else np.zeros(len(speed))
    types, type_of, counts = np.unique(
        np.column_stack([speed, room]), axis=0, return_inverse=True, return_counts=True
    )
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    steps = []
    for i, triple in enumerate(data.triples):
        pre, post = frozenset(map(number, triple.pre)), frozenset(map(number, triple.post))
        work = (
            (triple.fixed_seconds, triple.shared_seconds)
            if isinstance(triple, Communication)
            else (triple.fixed_flops, triple.shared_flops)
        )
        held = (triple.fixed_bytes or 0.0, triple.shared_bytes or 0.0) if limited else (0.0, 0.0)
        steps.append(Step(i, triple.kind == "comm", pre, post, triple.segment, *work, *held))
    return HapProblem(
        goal=number(data.goal),
        speeds=types[:, 0].copy(),
        counts=counts.astype(np.int64),
        type_of=type_of.ravel().astype(np.int64),
        g=data.segments,
        steps=tuple(steps),
        properties=tuple(numbers),
        program=None if data.program is None else tuple(data.program),
        capacity=types[:, 1] * (1 + FIT_TOLERANCE) if limited else None,
    )
