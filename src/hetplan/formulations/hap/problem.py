"""The instance as arrays, for the solvers (the evaluator does not use this module).

Devices of equal speed become one type: t(Q, .) is convex and indifferent to exchanging them, so
giving them equal ratios loses nothing. The cost below depends on the types, not on how many devices
have one. With memory, only devices of equal speed and equal memory become one type: what each holds
is linear in its ratios.

The theory reduced to what an optimal program can use, losing no optimum.

- Only triples that can apply and from which the goal can be reached.
- Properties that costless computations establish from nothing are had at any time.

An optimal program can be taken to be minimal: without a triple whose every effect is already there
or never needed. Dropping a computation costs nothing, and dropping a communication joins two
stages, which costs no more because a stage's time is a sublinear function of its work; neither adds
bytes.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.formulations.hap.evaluate import check_program
from hetplan.solvers.registry import objections
from hetplan.text import grouped

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TripleSeconds = Callable[["Step"], float]
Combine = Callable[[list[float]], float]
# The number of what needs no property.
NOTHING = -1
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


def infeasible_because(data: HapData, problem: HapProblem) -> str | None:
    """Why there is no program, None where there is one: the goal cannot be derived, or the given
    program is no program. Memory is not looked at."""
    if data.program is not None:
        return next(iter(objections(check_program, data, data.program)), None)
    known, _ = derivable(problem.steps)
    if problem.goal in known:
        return None
    waiting = [s for s in problem.steps if problem.goal in s.post]
    if not waiting:
        return f"no triple establishes the goal {data.goal!r}"
    lacking = sorted(problem.properties[p] for p in waiting[0].pre - known)
    return (
        f"the goal {data.goal!r} cannot be derived: {data.triples[waiting[0].index].instruction} "
        f"needs {lacking[0]!r}, which no applicable triple establishes"
    )


def derivable(steps: Iterable[Step]) -> tuple[set[int], list[Step]]:
    """All properties that `steps` can establish, and the steps in an order in which they apply."""
    listed = list(steps)
    cost, _, order = derivations(listed, lambda step: 0.0, max)
    return set(cost), [listed[n] for n in order]


def derivations(
    steps: Sequence[Step], seconds_of: TripleSeconds, combine: Combine
) -> tuple[dict[int, float], dict[int, int], list[int]]:
    """(property -> cost, property -> number of the step that gives it at that cost, the steps that
    apply in order). A step costs its seconds and what `combine` makes of its preconditions'."""
    waiting: dict[int, list[int]] = {}
    missing = [len(step.pre) for step in steps]
    heap: list[tuple[float, int, int]] = []
    cost: dict[int, float] = {}
    by: dict[int, int] = {}
    order: list[int] = []

    def applies(n: int) -> None:
        step = steps[n]
        value = seconds_of(step) + (combine([cost[q] for q in step.pre]) if step.pre else 0.0)
        order.append(n)
        for p in step.post:
            heapq.heappush(heap, (value, n, p))

    for n, step in enumerate(steps):
        for q in step.pre:
            waiting.setdefault(q, []).append(n)
        if not step.pre:
            applies(n)
    while heap:
        value, n, p = heapq.heappop(heap)
        if p not in cost:
            cost[p], by[p] = value, n
            for m in waiting.get(p, ()):
                missing[m] -= 1
                if missing[m] == 0:
                    applies(m)
    return cost, by, order


@dataclass(frozen=True)
class ReducedTheory:
    """steps: the useful triples, without the properties that are had for nothing; by_post: property
    -> positions in `steps`; for_nothing: the costless triples, in order, that establish those
    properties; goal: NOTHING when it is one of them."""

    problem: HapProblem
    steps: tuple[Step, ...]
    by_post: dict[int, tuple[int, ...]]
    for_nothing: tuple[Step, ...]
    goal: int

    @cached_property
    def level(self) -> dict[int, int]:
        """property -> level: the effects of a triple share one, at or above those of its
        preconditions."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        for step in self.steps:
            graph.add_nodes_from(step.pre | step.post)
            one, *others = step.post
            graph.add_edges_from((p, one) for p in step.pre)
            graph.add_edges_from(edge for q in others for edge in ((one, q), (q, one)))
        parts = nx.condensation(graph)
        order = enumerate(nx.topological_sort(parts))
        return {p: n for n, part in order for p in parts.nodes[part]["members"]}

    def key(self, need: frozenset[int]) -> tuple[int, ...]:
        """What states of needs are ordered by, so that triples lead to the same or a later key:
        replacing a property by any number of lower ones is a step down in the order of multisets
        of levels. The trailing 1 sorts a state before its subsets, because a tuple that is the
        beginning of another compares as smaller."""
        return (*sorted(-self.level[p] for p in need), 1)

    def program(self, chosen: Sequence[int]) -> list[int]:
        """Triple numbers of a program that uses `chosen` (triple numbers in order). The costless
        ones that it needs come first; repeated triples, and those that give nothing needed, are
        dropped."""
        numbers = dict.fromkeys([*(s.index for s in self.for_nothing), *chosen])
        steps = [self.problem.steps[i] for i in numbers]
        needed = {self.problem.goal}
        known: set[int] = set()
        gives: list[frozenset[int]] = []
        for step in steps:
            gives.append(step.post - known)
            known |= step.post
        kept = []
        for step, new in zip(reversed(steps), reversed(gives), strict=True):
            if new & needed:
                kept.append(step.index)
                needed = (needed - new) | step.pre
        return kept[::-1]


def reduce_theory(problem: HapProblem) -> ReducedTheory:
    """The reduced theory of a feasible problem without a given program."""
    _, applicable = derivable(problem.steps)
    had, for_nothing = derivable(step for step in applicable if step.costless)
    steps = [replace(s, pre=s.pre - had, post=s.post - s.pre - had) for s in applicable]
    # properties from which the goal may follow, the goal included
    leads: nx.DiGraph[int] = nx.DiGraph((p, q) for s in steps for p in s.pre for q in s.post)
    leads.add_node(problem.goal)
    useful = nx.ancestors(leads, problem.goal) | {problem.goal}
    steps = [replace(s, post=s.post & useful) for s in steps if s.post & useful]
    by_post = grouped((p, n) for n, step in enumerate(steps) for p in step.post)
    goal = NOTHING if problem.goal in had else problem.goal
    return ReducedTheory(
        problem, tuple(steps), {p: tuple(ns) for p, ns in by_post.items()}, tuple(for_nothing), goal
    )
