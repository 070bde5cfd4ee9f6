"""The theory reduced to what an optimal program can use, losing no optimum.

- Only triples that can apply and from which the goal can be reached.
- Properties that costless computations establish from nothing are had at any time.

An optimal program can be taken to be minimal: without a triple whose every effect is already there
or never needed. Dropping a computation costs nothing, and dropping a communication joins two
stages, which costs no more because a stage's time is a sublinear function of its work; neither adds
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from hetplan.formulations.hap.derivations import derivable
from hetplan.formulations.hap.problem import HapProblem, Step
from hetplan.text import grouped

# The number of what needs no property.
NOTHING = -1


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
