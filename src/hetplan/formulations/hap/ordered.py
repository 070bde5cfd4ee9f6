"""HAP's A* in the order of the single-device program, for theories on which Figure 10 as printed
does not end.

As printed the search appends any instruction whose precondition is met. It meets independent
instructions in every order and at every time, and its estimate is that of one chain to the goal,
so that its states grow exponentially with the operators. Here

- tensors are computed once each, in one topological order of the single-device program;
  communications and local slices of what there is may stand between any two. The authors' code
  computes each tensor once, too (`unique_computation`), on forward graphs that are nearly chains;
- partial programs of as many tensors with the same properties still of use share a state, extended
  ones included (their `property_cache`); the one of the lowest score is kept;
- the estimate is the paper's, the least time of what is left at infinite bandwidth: with a fixed
  list of tensors, each one's cheapest form on every type, beside the stage under way.

Of the prunings of §4.5 the order takes the place of the first; the second is left out, since
programs that communicate a tensor twice are mostly the better ones; the third is the properties of
use. A property's tensor is what precedes its last `|`, without what follows a `~`, which names a
way to it. Nothing is found where tensors depend on each other in a circle, or one that cannot be
computed is not needed for the goal. Memory is not known here.
"""

import heapq
import itertools
from dataclasses import dataclass

import networkx as nx
import numpy as np

from hetplan.formulations.hap.problem import Floats, Step
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.run import Run

Known = frozenset[int]


@dataclass(frozen=True)
class Order:
    """making [n]: the steps that compute the tensor of that number; changing: property -> steps
    that turn it into other properties of the same tensor. useful [n + 1]: properties still of use
    once so many tensors are computed; rest [n + 1, K]: seconds of computing left at least, by
    type."""

    making: list[list[Step]]
    changing: dict[int, list[Step]]
    useful: list[Known]
    rest: Floats

    def moves(self, made: int, known: Known) -> list[tuple[Step, int]]:
        """What may follow `made` tensors with these properties, and how many there are then."""
        changes = dict.fromkeys(step for p in sorted(known) for step in self.changing.get(p, ()))
        moves = [(step, made) for step in changes if not step.post <= known]
        if made < len(self.making):
            moves += [(step, made + 1) for step in self.making[made]]
        return [(step, then) for step, then in moves if step.pre <= known]


@dataclass(frozen=True)
class _Partial:
    """A partial program: tensors computed, properties of use; seconds up to the last
    synchronisation, [K] since then; the one before and the step added."""

    made: int
    known: Known
    cost: float
    busy: Floats
    before: "tuple[_Partial, Step] | None"

    def program(self) -> list[int]:
        """Triple numbers in order."""
        numbers, at = list[int](), self.before
        while at is not None:
            numbers.append(at[1].index)
            at = at[0].before
        return numbers[::-1]


def search(theory: ReducedTheory, ratios: Floats, run: Run) -> list[int] | None:
    """The program that the search finds at ratios [g, K]; None where there is none, or where the
    run should stop."""
    seconds = {
        step: step.fixed + step.shared * ratios[step.segment].max(keepdims=True)
        if step.comm
        else (step.fixed + step.shared * ratios[step.segment]) / theory.problem.speeds
        for step in theory.steps
    }
    order = arranged(theory, seconds)
    if order is None:
        return None
    idle, count = np.zeros(theory.problem.K), itertools.count()
    start = _Partial(0, frozenset(), 0.0, idle, None)
    queue = [(0.0, next(count), start)]
    least = {(0, start.known): 0.0}
    while queue and not run.should_stop:
        score, _, old = heapq.heappop(queue)
        if theory.goal in old.known:
            return theory.program(old.program())
        if least[old.made, old.known] < score:
            continue
        for step, made in order.moves(old.made, old.known):
            known = (old.known | step.post) & order.useful[made]
            cost, busy = old.cost, old.busy + seconds[step]
            if step.comm:
                cost, busy = cost + float(busy.max()), idle
            score = cost + float((busy + order.rest[made]).max())
            if score < least.get((made, known), np.inf):
                least[made, known] = score
                new = _Partial(made, known, cost, busy, (old, step))
                heapq.heappush(queue, (score, next(count), new))
    return None


def arranged(theory: ReducedTheory, seconds: dict[Step, Floats]) -> Order | None:
    """The order of the theory's tensors; None where they depend on each other in a circle.

    seconds: of computing a step by type [K], of a communication [1].
    """
    names = theory.problem.properties
    graph: nx.DiGraph[str] = nx.DiGraph()

    def tensors(properties: Known) -> set[str]:
        return {(names[p].rpartition("|")[0] or names[p]).partition("~")[0] for p in properties}

    place: dict[str, int] = {}
    made_by = {step: tensors(step.post) - tensors(step.pre) for step in theory.steps}
    for n, (step, made) in enumerate(made_by.items()):
        graph.add_nodes_from(made)
        graph.add_edges_from(itertools.product(tensors(step.pre), made))
        place = dict.fromkeys(made, n) | place
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=lambda t: place.get(t, -1)))
    except nx.NetworkXUnfeasible:
        return None
    making: list[list[Step]] = [[] for _ in order]
    changing: dict[int, list[Step]] = {}
    sources: nx.DiGraph[int] = nx.DiGraph()
    for step, made in made_by.items():
        if made:
            making[min(order.index(tensor) for tensor in made)].append(step)
        else:
            sources.add_edges_from(itertools.product(step.post, step.pre))
            for p in step.pre:
                changing.setdefault(p, []).append(step)
    rest = np.zeros((len(order) + 1, theory.problem.K))
    assert theory.goal is not None, "a posed theory has a goal that costs something"
    wanted, useful = {theory.goal}, list[Known]()
    for i in range(len(order), -1, -1):
        steps = making[i] if i < len(order) else []
        for p in frozenset({theory.goal}).union(*(step.pre for step in steps)):
            wanted |= {p} | (nx.descendants(sources, p) if p in sources else set())
        useful.append(frozenset(wanted))
        if i < len(order):
            work = [np.zeros(len(rest[i])) if s.comm else seconds[s] for s in steps]
            rest[i] = rest[i + 1] + np.min(work, axis=0) if work else rest[i + 1]
    return Order(making, changing, useful[::-1], rest)
