"""The graph of needs of a theory, in all orders or in one.

Read a program backwards. A node N is the set of properties still needed: the first one is {goal},
the last one is empty. A triple (`Step`) that gives a needed property settles it, and leads from N
to (N - post) + pre. Every minimal program is a path of the same cost. Every path is a program that
costs no more, once repetitions of triples behind their first occurrence are dropped (`theory`). An
arc to N itself or to a superset of N is left out: the triples of any path from the superset to the
empty node settle N, too, so that the detour through the superset saves nothing. Parallel branches
interleave in every order, because the order decides which computations share a stage.

This is the graph of needs in all orders. Where the costs of triples simply add up, the order is
irrelevant, and it is enough to settle the needed properties of the highest level first
(`ReducedTheory.level`). The graph of needs in this one order is called canonical. It is small for
theories of any width.

The canonical graph has a path for every program, with triples of the program only, each at most
once. Let g(p) be the program's first triple that gives property p. At each node, the path compares
the triples g(p) of the needed properties p of the highest level, and takes the one that comes last
in the program. Call it g. The next triple that the path takes at this level stands before g in the
program, because this holds for g(q) of every property q of the level that is still needed:

- If q was needed before the path took g, g(q) stands before g by the choice of g.
- If q is a precondition of g, the program gives q before g.

The path takes triples of one level in one go: the effects of a triple share one level, and its
preconditions are at or below that level. No triple is therefore taken twice.
"""

from collections.abc import Sequence

import numpy as np

from hetplan.formulations.hap.graph import Graph, graph_of_arcs, work_of
from hetplan.formulations.hap.problem import Ints
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Run

# Seconds that a state counts towards the budget of a run.
STATE_SECONDS = 5e-5

Need = frozenset[int]


def graph_of_needs(
    theory: ReducedTheory, limit: int, run: Run | None = None, *, canonical: bool = False
) -> Graph | None:
    """The graph of needs in all orders, or the canonical one; None where it has more than `limit`
    nodes.

    Raises `Stopped` where `run` should stop.
    """
    states = [frozenset((theory.goal,))]
    numbers = {states[0]: 0}
    arcs: list[tuple[int, int, int]] = []
    for u, need in enumerate(states):  # the loop appends to the list
        if run is not None:
            run.check(STATE_SECONDS)
        to_settle = need
        if canonical and need:
            to_settle = of_highest_level(theory, need)
        for s in steps_that_give(theory, to_settle):
            after = need_before(theory, need, s)
            if after >= need:
                continue  # such an arc only adds needs, so that no shortest path takes it
            if after not in numbers:
                if len(states) == limit:
                    return None
                numbers[after] = len(states)
                states.append(after)
            arcs.append((u, numbers[after], s))
    return graph_of_states(
        theory, states, np.array(arcs, dtype=np.int64), in_execution_order=not canonical
    )


def of_highest_level(theory: ReducedTheory, need: Need) -> Need:
    """The needed properties of the highest level, which the canonical order settles first."""
    highest = max(theory.level[p] for p in need)
    return frozenset(p for p in need if theory.level[p] == highest)


def steps_that_give(theory: ReducedTheory, properties: Need) -> list[int]:
    """The steps (positions, ascending) that give at least one of these properties."""
    return sorted({s for p in properties for s in theory.by_post[p]})


def need_before(theory: ReducedTheory, need: Need, s: int) -> Need:
    """The properties needed before step s, where `need` are those needed after it."""
    step = theory.steps[s]
    return (need - step.post) | step.pre


def graph_of_states(
    theory: ReducedTheory, states: Sequence[Need], arcs: Ints, *, in_execution_order: bool
) -> Graph:
    """The graph of these states, {goal} first, with arcs [A, 3]: tail, head, step."""
    tail, head, step = arcs.reshape(-1, 3).T
    return graph_of_arcs(
        theory,
        keys=[theory.key(need) for need in states],
        arcs=(tail, head, step),
        steps_of_action=[(s,) for s in range(len(theory.steps))],
        work=work_of(theory.problem, theory.steps),
        in_execution_order=in_execution_order,
    )
