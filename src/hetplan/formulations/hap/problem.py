"""The instance as arrays, for the solvers (the evaluator does not use this module).

Devices of equal speed become one type: t(Q, .) is convex and indifferent to exchanging them, so giving them
equal ratios loses nothing, and no cost below depends on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.data import Communication, HapData, HapDecision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One triple: its number in the data, property numbers, and work in FLOP (compute) or seconds (comm)."""

    index: int
    comm: bool
    pre: frozenset[int]
    post: frozenset[int]
    segment: int
    fixed: float
    shared: float

    @property
    def free(self) -> bool:
        """A computation that costs nothing: it fits into any stage."""
        return not self.comm and self.fixed == 0 and self.shared == 0


@dataclass(frozen=True)
class Stages:
    """A program's cost: constant + sum_k comm[k] max_j B[k][j] + sum_s max_j (F[s] + S[s] . B[:, j]) / v_j.

    constant in seconds; comm [g] seconds; F [s] and S [s, g] FLOP, one row per distinct mixture of work.
    """

    constant: float
    comm: Floats
    F: Floats
    S: Floats


@dataclass(frozen=True)
class HapProblem:
    """speeds [K] FLOP/s ascending and distinct, counts [K] devices of each; kind [m] device -> type;
    g segments; steps by number; properties their names; goal a property number (None: no triple names it)."""

    speeds: Floats
    counts: Ints
    kind: Ints
    g: int
    steps: tuple[Step, ...]
    properties: tuple[str, ...]
    goal: int | None
    given: tuple[int, ...] | None

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

    def stages(self, program: Iterable[int]) -> Stages:
        """The cost of a program as a function of the ratios; proportional rows merged."""
        constant, comm = 0.0, np.zeros(self.g)
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
        merged = _merged(np.array(rows))
        return Stages(constant, comm, merged[:, 0], merged[:, 1:])

    def seconds(self, stages: Stages, ratios: Floats) -> float:
        """Cost at ratios [g, K] (one device of each type)."""
        busy = (stages.F[:, None] + stages.S @ ratios) / self.speeds
        total = busy.max(axis=1).sum() if len(busy) else 0.0
        return float(stages.constant + stages.comm @ ratios.max(axis=1) + total)

    def decision(self, program: Sequence[int], ratios: Floats) -> HapDecision:
        """The decision with ratios [g, K] spread over the devices, each row summing to 1 exactly enough."""
        rows = []
        for row in np.maximum(ratios, 0.0)[:, self.kind]:
            row = row / math.fsum(row)
            rows.append([float(x) for x in row])
        return HapDecision(program=[int(i) for i in program], ratios=rows)


def _merged(rows: Floats) -> Floats:
    """Rows [s, 1 + g] with proportional ones added up and empty ones left out."""
    sizes = rows.sum(axis=1)
    rows, sizes = rows[sizes > 0], sizes[sizes > 0]
    if not len(rows):
        return rows
    # equal to 12 digits: the cost changes by less than 1e-12 of itself
    shapes = np.round(rows / sizes[:, None], 12)
    _, where = np.unique(shapes, axis=0, return_inverse=True)
    merged = np.zeros((int(where.max()) + 1, rows.shape[1]))
    np.add.at(merged, where.ravel(), rows)
    return merged


def compile_problem(data: HapData) -> HapProblem:
    """`data` as arrays."""
    speed = np.array([device.flops_per_second for device in data.devices])
    speeds, kind, counts = np.unique(speed, return_inverse=True, return_counts=True)
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    steps = []
    for i, triple in enumerate(data.triples):
        pre, post = frozenset(map(number, triple.pre)), frozenset(map(number, triple.post))
        if isinstance(triple, Communication):
            steps.append(
                Step(i, True, pre, post, triple.segment, triple.fixed_seconds, triple.shared_seconds)
            )
        else:
            steps.append(Step(i, False, pre, post, triple.segment, triple.fixed_flops, triple.shared_flops))
    return HapProblem(
        speeds=speeds,
        counts=counts.astype(np.int64),
        kind=kind.ravel().astype(np.int64),
        g=data.segments,
        steps=tuple(steps),
        properties=tuple(numbers),
        goal=numbers.get(data.goal),
        given=None if data.program is None else tuple(data.program),
    )


def infeasible_because(data: HapData, problem: HapProblem) -> str | None:
    """Why no program exists, complete: the goal cannot be derived, or the given program is none."""
    if problem.given is not None:
        return _given_is_wrong(data, problem)
    known, _ = closure(problem.steps)
    if problem.goal is not None and problem.goal in known:
        return None
    if problem.goal is None:
        return f"no triple establishes the goal {data.goal!r}"
    waiting = [s for s in problem.steps if problem.goal in s.post]
    if not waiting:
        return f"no triple establishes the goal {data.goal!r}"
    lacking = sorted(problem.properties[p] for p in waiting[0].pre - known)
    return (
        f"the goal {data.goal!r} cannot be derived: {data.triples[waiting[0].index].instruction} "
        f"needs {lacking[0]!r}, which no applicable triple establishes"
    )


def _given_is_wrong(data: HapData, problem: HapProblem) -> str | None:
    known: set[int] = set()
    assert problem.given is not None
    if len(set(problem.given)) < len(problem.given):
        return "the given program repeats a triple"
    for position, i in enumerate(problem.given):
        step = problem.steps[i]
        if lacking := step.pre - known:
            name = problem.properties[min(lacking)]
            return f"program[{position}] ({data.triples[i].instruction}) needs {name!r}, which nothing before it gives"
        known |= step.post
    if problem.goal not in known:
        return f"the given program does not establish the goal {data.goal!r}"
    return None


def closure(steps: Iterable[Step]) -> tuple[set[int], list[Step]]:
    """All properties that `steps` can establish, and the steps in an order in which they apply."""
    consumers: dict[int, list[int]] = {}
    listed = list(steps)
    missing = []
    ready = []
    for n, step in enumerate(listed):
        missing.append(len(step.pre))
        for p in step.pre:
            consumers.setdefault(p, []).append(n)
        if not step.pre:
            ready.append(n)
    known: set[int] = set()
    order: list[Step] = []
    for n in ready:
        order.append(listed[n])
        for p in listed[n].post - known:
            known.add(p)
            for c in consumers.get(p, ()):
                missing[c] -= 1
                if missing[c] == 0:
                    ready.append(c)
    return known, order
