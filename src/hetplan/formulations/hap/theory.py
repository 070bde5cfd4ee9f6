"""The theory reduced to what an optimal program can use. No optimum is lost.

- It keeps only triples that can apply and from which the goal can be reached.
- Properties that costless computations establish from nothing hold at any time.

An optimal program can be taken to be minimal: without a triple whose every effect is already there
or never needed. Dropping a computation costs nothing, and dropping a communication joins two
stages, which costs no more because a stage's time is a sublinear function of its work; neither adds
bytes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from hetplan.formulations.hap.derivations import derivable
from hetplan.formulations.hap.problem import HapProblem, Step
from hetplan.text import grouped

# In place of a property's number: of a goal that holds at any time, and of the precondition of a
# triple that needs nothing.
NOTHING = -1


@dataclass(frozen=True)
class ReducedTheory:
    """The triples that an optimal program can use, and the properties that hold at any time."""

    problem: HapProblem
    # The useful triples, without the properties that hold at any time.
    steps: tuple[Step, ...]
    by_post: dict[int, tuple[int, ...]]  # property -> positions in `steps` of the triples giving it
    # The costless triples, in order, that establish the properties that hold at any time.
    for_nothing: tuple[Step, ...]
    goal: int  # NOTHING where the goal holds at any time

    @cached_property
    def level(self) -> dict[int, int]:
        """The level of each property.

        The effects of a triple share one level, at or above the levels of its preconditions.
        """
        graph: nx.DiGraph[int] = nx.DiGraph()
        for step in self.steps:
            graph.add_nodes_from(step.pre | step.post)
            first, *others = step.post  # a useful triple has an effect
            graph.add_edges_from((p, first) for p in step.pre)
            # edges both ways put all effects into one component
            graph.add_edges_from((first, q) for q in others)
            graph.add_edges_from((q, first) for q in others)
        components = nx.condensation(graph)
        level: dict[int, int] = {}
        for n, component in enumerate(nx.topological_sort(components)):
            level.update(dict.fromkeys(components.nodes[component]["members"], n))
        return level

    def key(self, need: frozenset[int]) -> tuple[int, ...]:
        """The key by which states of needs are ordered: triples lead to the same or a later key.

        Replacing a property by any number of lower ones is a step down in the order of multisets of
        levels. The trailing 1 sorts a state before its subsets, because a tuple that is the
        beginning of another compares as smaller.
        """
        return (*sorted(-self.level[p] for p in need), 1)

    def program(self, chosen: Sequence[int]) -> list[int]:
        """The program (triple numbers) that uses the triples `chosen` in this order.

        The costless triples that it needs come first. Repeated triples, and triples that give
        nothing that is needed, are dropped.
        """
        numbers = dict.fromkeys([*(s.index for s in self.for_nothing), *chosen])
        steps = [self.problem.steps[i] for i in numbers]
        established: set[int] = set()
        new_effects: list[frozenset[int]] = []
        for step in steps:
            new_effects.append(step.post - established)
            established |= step.post
        needed = {self.problem.goal}
        program = []
        for step, new in zip(reversed(steps), reversed(new_effects), strict=True):
            if new & needed:
                program.append(step.index)
                needed = (needed - new) | step.pre
        return program[::-1]


def reduce_theory(problem: HapProblem) -> ReducedTheory:
    """The reduced theory of a feasible problem without a given program."""
    _, applicable = derivable(problem.steps)
    always, for_nothing = derivable(step for step in applicable if step.costless)
    steps = [replace(s, pre=s.pre - always, post=s.post - s.pre - always) for s in applicable]
    leads_to: nx.DiGraph[int] = nx.DiGraph()  # from a step's preconditions to its postconditions
    for step in steps:
        leads_to.add_edges_from(itertools.product(step.pre, step.post))
    leads_to.add_node(problem.goal)
    useful = nx.ancestors(leads_to, problem.goal) | {problem.goal}
    steps = [replace(s, post=s.post & useful) for s in steps if s.post & useful]
    by_post = grouped((p, n) for n, step in enumerate(steps) for p in step.post)
    return ReducedTheory(
        problem=problem,
        steps=tuple(steps),
        by_post={p: tuple(positions) for p, positions in by_post.items()},
        for_nothing=tuple(for_nothing),
        goal=NOTHING if problem.goal in always else problem.goal,
    )
