"""The instance as arrays, for the solvers (the evaluator does not use this module).

Devices of equal speed become one type with one ratio per segment. This loses nothing: the cost of a
program is convex in the ratios and does not change when devices of equal speed exchange theirs, so
their mean ratios cost no more. The cost is a maximum over types; the number of devices of a type
does not enter it. With memory, devices of one type have equal memory, too: a device's bytes are
linear in its ratios, so the mean ratios of devices of equal memory fit where the given ones do.
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
# Relative tolerance of the solvers for memory. It is half of the evaluator's, MEMORY_TOLERANCE, so
# that rounding alone cannot make the evaluator reject a decision of a solver.
FIT_TOLERANCE = 5e-10


@dataclass(frozen=True)
class Step:
    """One triple of the theory, with properties as numbers.

    With b_j the ratio of device j in the triple's segment, a computation takes
    (fixed + shared b_j) FLOP on device j, and a collective takes fixed + shared max_j b_j seconds.
    Either adds fixed_bytes + shared_bytes b_j bytes to device j.
    """

    index: int  # number of the triple in the data
    comm: bool  # True: a collective; False: a computation
    pre: frozenset[int]  # numbers of the properties that the triple needs
    post: frozenset[int]  # numbers of the properties that the triple gives
    segment: int  # segment whose ratios divide the triple's work
    fixed: float  # FLOP of a computation, seconds of a collective
    shared: float  # FLOP of a computation, seconds of a collective, per unit of ratio
    fixed_bytes: float = 0.0  # bytes on every device; 0 without memory
    shared_bytes: float = 0.0  # bytes per unit of ratio; 0 without memory

    @property
    def costless(self) -> bool:
        """Whether the step is a computation without work and bytes, which fits into any stage."""
        if self.comm:
            return False
        return not (self.fixed or self.shared or self.fixed_bytes or self.shared_bytes)


@dataclass(frozen=True)
class CostOfRatios:
    """The cost of a program as a function of the ratios B [g, K] of g segments and K device types.

    seconds = constant + sum_k comm[k] max_d B[k, d] + sum_s max_d (F[s] + S[s] . B[:, d]) / v_d
    with v_d the FLOP/s of a device of type d. A device of type d holds
    fixed_bytes + shared_bytes . B[:, d]. Stages with proportional work are added up into one row s,
    because their slowest type is the same.
    """

    constant: float  # seconds of the collectives that do not depend on the ratios
    comm: Floats  # [g] seconds of collectives per unit of the largest ratio of each segment
    F: Floats  # [s] FLOP of each row of stages that do not depend on the ratios
    S: Floats  # [s, g] FLOP of each row of stages per unit of ratio of each segment
    fixed_bytes: float  # bytes on every device that do not depend on the ratios
    shared_bytes: Floats  # [g] bytes on a device per unit of ratio of each segment


@dataclass(frozen=True)
class HapProblem:
    """An instance of K device types, g segments and m devices, as arrays."""

    # [K] FLOP/s of one device of each type, ascending; with memory, types may have equal speeds
    speeds: Floats
    counts: Ints  # [K] number of devices of each type
    type_of: Ints  # [m] type of each device
    g: int  # number of segments
    steps: tuple[Step, ...]  # the triples, in the order of the data
    properties: tuple[str, ...]  # names of the properties, in the order of their numbers
    goal: int  # number of the goal property
    program: tuple[int, ...] | None  # triple numbers of the given program; None: it is sought
    # [K] bytes of one device of each type, FIT_TOLERANCE included; None: memory is not limited
    capacity: Floats | None = None

    @property
    def K(self) -> int:
        """Number of device types."""
        return len(self.speeds)

    @cached_property
    def proportional(self) -> Floats:
        """[K] ratio of one device of each type in proportion to its speed; devices sum to 1."""
        return self.speeds / float(self.speeds @ self.counts)

    @cached_property
    def even(self) -> Floats:
        """[K] ratio 1/m of one device of each type."""
        return np.full(self.K, 1.0 / self.counts.sum())

    def cost_of(self, program: Sequence[int]) -> CostOfRatios:
        """The cost of a program as a function of the ratios.

        program: triple numbers in order of execution. A stage begins at each collective.
        """
        steps = [self.steps[i] for i in program]
        constant = 0.0
        comm = np.zeros(self.g)
        stage_fixed = [0.0]  # FLOP of each stage
        stage_shared = [np.zeros(self.g)]  # FLOP of each stage per unit of ratio of each segment
        shared_bytes = np.zeros(self.g)
        for step in steps:
            if step.comm:
                constant += step.fixed
                comm[step.segment] += step.shared
                stage_fixed.append(0.0)
                stage_shared.append(np.zeros(self.g))
            else:
                stage_fixed[-1] += step.fixed
                stage_shared[-1][step.segment] += step.shared
            shared_bytes[step.segment] += step.shared_bytes
        rows = _merged(np.column_stack([stage_fixed, np.array(stage_shared)]))
        return CostOfRatios(
            constant=constant,
            comm=comm,
            F=rows[:, 0],
            S=rows[:, 1:],
            fixed_bytes=math.fsum(step.fixed_bytes for step in steps),
            shared_bytes=shared_bytes,
        )

    def fits(self, cost: CostOfRatios, ratios: Floats) -> bool:
        """Whether a program of this cost fits in the memory of every device at ratios [g, K].

        The ratios may come from a linear program that kept to `capacity` up to rounding, so half
        of FIT_TOLERANCE is allowed on top; the evaluator's tolerance still covers both.
        """
        if self.capacity is None:
            return True
        device_bytes = cost.fixed_bytes + cost.shared_bytes @ ratios
        return bool((device_bytes <= self.capacity * (1 + FIT_TOLERANCE / 2)).all())

    @cached_property
    def seconds_of_all(self) -> float:
        """Sum of the seconds of all triples, each with ratio 1 on a device of the slowest type.

        This is an upper bound: no program that runs each triple at most once takes longer.
        """
        slowest = float(self.speeds[0])

        def most_seconds(step: Step) -> float:
            most = step.fixed + step.shared
            return most if step.comm else most / slowest

        return math.fsum(map(most_seconds, self.steps))

    def program_seconds(self, cost: CostOfRatios, ratios: Floats) -> float:
        """Seconds of a program of this cost.

        ratios: [g, K] ratio of one device of each type, per segment.
        """
        collectives = cost.constant + cost.comm @ ratios.max(axis=1)
        if not len(cost.F):
            return float(collectives)
        compute = (cost.F[:, None] + cost.S @ ratios) / self.speeds  # [s, K] seconds
        return float(collectives + compute.max(axis=1).sum())

    def decision(self, program: Sequence[int], ratios: Floats) -> HapDecision:
        """The decision in which each device has the ratio of its type.

        ratios: [g, K] ratio of one device of each type, per segment. Negative ratios, which
        rounding leaves, count as 0, and the devices' ratios of a segment are scaled to sum 1.
        """
        device_ratios = np.maximum(ratios, 0.0)[:, self.type_of]  # [g, m]
        scaled = [(row / math.fsum(row)).tolist() for row in device_ratios]
        return HapDecision(program=[int(i) for i in program], ratios=scaled)


def _merged(rows: Floats) -> Floats:
    """The rows without empty ones, and with proportional ones added up.

    rows: [s, 1 + g] FLOP of each stage: first the FLOP that do not depend on the ratios, then the
    FLOP per unit of ratio of each segment.
    """
    flops = rows.sum(axis=1)
    rows, flops = rows[flops > 0], flops[flops > 0]
    if not len(rows):
        return rows
    # Rows that are proportional to 12 digits are merged: the cost changes by less than 1e-12 of
    # itself.
    directions = np.round(rows / flops[:, None], 12)
    distinct, direction_of = np.unique(directions, axis=0, return_inverse=True)
    merged = np.zeros_like(distinct)
    np.add.at(merged, direction_of.ravel(), rows)
    return merged


def compile_problem(data: HapData) -> HapProblem:
    """The instance as arrays; devices of equal speed (and equal memory) become one type."""
    speed = np.array([device.flops_per_second for device in data.devices])
    memory = np.zeros(len(speed))  # bytes; equal for all devices where memory is not limited
    if data.memory is not None:
        memory = np.array(data.memory.device_bytes)
    types, type_of, counts = np.unique(
        np.column_stack([speed, memory]), axis=0, return_inverse=True, return_counts=True
    )
    speeds, type_memory = types.T.copy()
    numbers: dict[str, int] = {}  # property -> number, in order of first appearance

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    steps = []
    for i, triple in enumerate(data.triples):
        if isinstance(triple, Communication):
            fixed, shared = triple.fixed_seconds, triple.shared_seconds
        else:
            fixed, shared = triple.fixed_flops, triple.shared_flops
        step = Step(
            index=i,
            comm=isinstance(triple, Communication),
            pre=frozenset(map(number, triple.pre)),
            post=frozenset(map(number, triple.post)),
            segment=triple.segment,
            fixed=fixed,
            shared=shared,
            # the data gives no bytes without memory
            fixed_bytes=triple.fixed_bytes or 0.0,
            shared_bytes=triple.shared_bytes or 0.0,
        )
        steps.append(step)
    goal = number(data.goal)
    return HapProblem(
        speeds=speeds,
        counts=counts.astype(np.int64),
        type_of=type_of.ravel().astype(np.int64),
        g=data.segments,
        steps=tuple(steps),
        properties=tuple(numbers),
        goal=goal,
        program=None if data.program is None else tuple(data.program),
        capacity=None if data.memory is None else type_memory * (1 + FIT_TOLERANCE),
    )
