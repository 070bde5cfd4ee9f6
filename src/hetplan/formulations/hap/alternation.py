"""HAP's alternation for theories that are too large for its A*: the search for fixed ratios by
shortest paths.

For fixed ratios B a stage lasts max_d (F + S B_d) / v_d. Any mean over types, weights w, bounds it
from below; the sum over a program is then the length of a path in the graph of needs, in canonical
order, where the shortest one is found at once. The path is a program and is priced as it is; the
largest shortest length over the w tried is a bound of the best program for B. Where both meet, the
search is exact, as A* is. Round it goes as in HAP, Section 3.1: ratios in proportion to speed, a
program for them, the ratio programme for it, until a program repeats; the best pair is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.first import greedy_program, price_at
from hetplan.formulations.hap.graph import Graph, build
from hetplan.formulations.hap.problem import Floats, HapProblem, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import Theory, reduce_theory
from hetplan.solvers.run import Run

STATES = 300_000
# Means over types that are tried for each B beyond the types alone; what counts as exact.
HALVINGS, EXACT = 8, 1e-6


@dataclass(frozen=True)
class Found:
    """For fixed ratios: a program (triple numbers), its seconds at them, and a bound of the best
    one's."""

    program: list[int]
    seconds: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no program is better for these ratios."""
        return self.seconds - self.bound <= EXACT * self.seconds


@dataclass(frozen=True)
class Alternated:
    """seconds, program and ratios [1, K] of the best pair; first: seconds of the first one; exact:
    of `rounds`, how many searches were proven."""

    seconds: float
    program: list[int]
    ratios: Floats
    first: float
    rounds: int
    exact: int


def alternate(data: HapData, run: Run | None = None) -> Alternated | None:
    """The alternation on an instance of one segment; None where its theory is too large even for
    canonical states."""
    run = run or Run()
    theory = reduce_theory(compile_problem(data))
    problem = theory.problem
    graph = None if theory.goal is None else build(theory, STATES, canonical=True)
    if graph is None:
        return None
    ratios: Floats = np.tile(problem.proportional, (problem.g, 1))
    best: Alternated | None = None
    seen: set[tuple[int, ...]] = set()
    exact, first = 0, np.inf
    while True:
        found = program_for(theory, graph, ratios)
        if tuple(found.program) in seen or run.should_stop:
            break
        seen.add(tuple(found.program))
        exact += found.exact
        priced = best_ratios(problem, problem.stages(found.program), run)
        if not priced.fits:
            break
        ratios, first = priced.ratios, min(first, priced.seconds) if len(seen) == 1 else first
        if best is None or priced.seconds < best.seconds:
            best = Alternated(priced.seconds, found.program, ratios, first, len(seen), exact)
    if best is None:
        return None
    return Alternated(best.seconds, best.program, best.ratios, first, len(seen), exact)


def program_for(theory: Theory, graph: Graph, ratios: Floats) -> Found:
    """The best program found for ratios [g, K], and a bound of the best there is."""
    problem = theory.problem
    programs = [greedy_program(theory, price_at(theory, ratios))]
    bound = 0.0

    def tried(weights: Floats) -> Floats:
        """Seconds of each type along the shortest path, as if every stage waited for that type
        alone."""
        nonlocal bound
        length, steps = shortest(problem, graph, ratios, weights)
        bound = max(bound, length)
        program = theory.program(steps)
        programs.append(program)
        stages = problem.stages(program)
        busy: Floats = ((stages.F[:, None] + stages.S @ ratios) / problem.speeds).sum(axis=0)
        return busy

    def seconds(program: Sequence[int]) -> float:
        return problem.seconds(problem.stages(program), ratios)

    for weights in np.eye(problem.K):
        tried(weights)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS if problem.K > 1 else 0):
        best = min(map(seconds, programs))
        if best - bound <= EXACT * best:
            break
        middle = (low + high) / 2
        mean = np.full(problem.K, (1 - middle) / (problem.K - 1))
        mean[0] = middle
        busy = tried(mean)
        low, high = (middle, high) if busy[0] >= busy[1:].max() else (low, middle)
    program = min(programs, key=seconds)
    return Found(program, seconds(program), min(bound, seconds(program)))


def shortest(
    problem: HapProblem, graph: Graph, ratios: Floats, weights: Floats
) -> tuple[float, list[int]]:
    """(length, triple numbers in order of execution) of the shortest path from {goal} to the empty
    set."""
    steps = graph.theory.steps
    cost = []
    for step in steps:
        row = ratios[step.segment]
        if step.comm:
            cost.append(step.fixed + step.shared * float(row.max()))
        else:
            cost.append(float(((step.fixed + step.shared * row) / problem.speeds) @ weights))
    end = graph.n - 1
    first, head, arc_step = graph.first.tolist(), graph.head.tolist(), graph.label.tolist()
    length = [np.inf] * graph.n
    by: list[tuple[int, int]] = [(-1, -1)] * graph.n
    length[graph.start] = 0.0
    heap = [(0.0, graph.start)]
    while heap:
        value, node = heapq.heappop(heap)
        if value > length[node]:
            continue
        if node == end:
            break
        for a in range(first[node], first[node + 1]):
            after = value + cost[arc_step[a]]
            if after < length[head[a]]:
                length[head[a]] = after
                by[head[a]] = (node, arc_step[a])
                heapq.heappush(heap, (after, head[a]))
    path, node = [], end
    while node != graph.start:
        node, step_number = by[node]
        path.append(steps[step_number].index)
    return float(length[end]), path
