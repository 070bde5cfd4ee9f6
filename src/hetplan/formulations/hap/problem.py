"""The instance as arrays, for the solvers (the evaluator does not use this module).

Devices of equal speed become one type: t(Q, .) is convex and indifferent to exchanging them, so
giving them equal ratios loses nothing. The cost below depends on the types, not on how many devices
have one. With memory, only devices of equal speed and equal memory become one type: what each holds
is linear in its ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """One triple of the theory, with properties as numbers."""

    index: int  # the triple's number in the data
    comm: bool  # whether it is a collective
    pre: frozenset[int]  # properties that it needs
    post: frozenset[int]  # properties that it gives
    segment: int  # the segment whose ratios cut it
    fixed: float  # FLOP of a computation, seconds of a collective, whatever the ratios
    shared: float  # FLOP per ratio of the device, or seconds per largest ratio
    fixed_bytes: float = 0.0  # bytes on every device; 0 without memory
    shared_bytes: float = 0.0  # bytes per ratio of the device; 0 without memory

    @property
    def costless(self) -> bool:
        """Whether it is a computation without work and without bytes, which fits into any stage."""
        if self.comm:
            return False
        return not (self.fixed or self.shared or self.fixed_bytes or self.shared_bytes)


@dataclass(frozen=True)
class CostOfRatios:
    """The cost of a program as a function of the ratios B [g, K].

    seconds = constant + sum_k comm[k] max_d B[k, d] + sum_s max_d (F[s] + S[s] . B[:, d]) / v_d.
    A device of type d holds fixed_bytes + shared_bytes . B[:, d]. Stages with proportional work are
    added up into one row, because their slowest type is the same.
    """

    constant: float  # seconds of collectives, whatever the ratios
    comm: Floats  # [g] seconds of collectives per largest ratio of each segment
    F: Floats  # [s] FLOP of each stage, whatever the ratios
    S: Floats  # [s, g] FLOP of each stage per ratio of each segment
    fixed_bytes: float  # bytes on every device
    shared_bytes: Floats  # [g] bytes per ratio of each segment


@dataclass(frozen=True)
class HapProblem:
    """An instance of K device types, g segments and m devices, as arrays."""

    speeds: Floats  # [K] FLOP/s of one device of each type, ascending; distinct without memory
    counts: Ints  # [K] devices of each type
    type_of: Ints  # [m] the type of each device
    g: int  # segments
    steps: tuple[Step, ...]  # the triples, by their numbers in the data
    properties: tuple[str, ...]  # the name of each property
    goal: int  # the number of the goal's property
    program: tuple[int, ...] | None  # triple numbers of the given program; None: it is sought
    # [K] bytes of one device of each type, the tolerance included; None: memory is not limited
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
        """The cost of a program (triple numbers in order) as a function of the ratios."""
        constant, comm, shared_bytes = 0.0, np.zeros(self.g), np.zeros(self.g)
        rows: list[Floats] = [np.zeros(1 + self.g)]  # of each stage: F, then S of each segment
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
        """Whether the program of this cost fits in every device's memory at ratios [g, K]."""
        if self.capacity is None:
            return True
        device_bytes = cost.fixed_bytes + cost.shared_bytes @ ratios
        return bool((device_bytes <= self.capacity * (1 + FIT_TOLERANCE / 2)).all())

    @cached_property
    def seconds_of_all(self) -> float:
        """Seconds of all triples, each alone on the slowest type.

        No program that runs each triple at most once takes longer, whatever the ratios.
        """
        slowest = float(self.speeds[0])

        def most_seconds(step: Step) -> float:
            work = step.fixed + step.shared
            return work if step.comm else work / slowest

        return math.fsum(map(most_seconds, self.steps))

    def program_seconds(self, cost: CostOfRatios, ratios: Floats) -> float:
        """Seconds of a program of this cost at ratios [g, K] (of one device of each type)."""
        collectives = cost.constant + cost.comm @ ratios.max(axis=1)
        if not len(cost.F):
            return float(collectives)
        busy = (cost.F[:, None] + cost.S @ ratios) / self.speeds  # [s, K]
        return float(collectives + busy.max(axis=1).sum())

    def decision(self, program: Sequence[int], ratios: Floats) -> HapDecision:
        """The decision in which each device has the ratio of its type, of ratios [g, K].

        Each row is scaled to sum 1.
        """
        spread = np.maximum(ratios, 0.0)[:, self.type_of]
        rows = [(row / math.fsum(row)).tolist() for row in spread]
        return HapDecision(program=[int(i) for i in program], ratios=rows)


def _merged(rows: Floats) -> Floats:
    """The rows [s, 1 + g] of stages with proportional ones added up and empty ones left out."""
    sizes = rows.sum(axis=1)
    rows, sizes = rows[sizes > 0], sizes[sizes > 0]
    if not len(rows):
        return rows
    # equal to 12 digits: the cost changes by less than 1e-12 of itself
    mixtures = np.round(rows / sizes[:, None], 12)
    distinct, mixture_of = np.unique(mixtures, axis=0, return_inverse=True)
    merged = np.zeros_like(distinct)
    np.add.at(merged, mixture_of.ravel(), rows)
    return merged


def compile_problem(data: HapData) -> HapProblem:
    """The instance as arrays, devices of equal speed (and equal memory) made one type."""
    speed = np.array([device.flops_per_second for device in data.devices])
    limited = data.memory is not None
    room = np.zeros(len(speed))
    if data.memory is not None:
        room = np.array(data.memory.device_bytes)
    types, type_of, counts = np.unique(
        np.column_stack([speed, room]), axis=0, return_inverse=True, return_counts=True
    )
    numbers: dict[str, int] = {}

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
        )
        if limited:
            step = replace(
                step,
                fixed_bytes=triple.fixed_bytes or 0.0,
                shared_bytes=triple.shared_bytes or 0.0,
            )
        steps.append(step)
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
