"""The programs of a theory as the paths of one graph, independent of the ratios.

Read a program backwards: a node is the set of properties still needed, the first one {goal}, the
last one empty. A triple that gives something needed leads from N to (N - post) + pre. Every minimal
program is a path, every path is a program, and parallel branches interleave in every order, because
the order decides which computations share a stage. The nodes are few when few tensors are live at a
time; `build` gives up beyond a limit. Nodes are numbered so that strongly connected components
(collectives lead from form to form and back) follow one another in topological order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.graph_parts import components
from hetplan.formulations.hap.problem import Ints
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run

Need = frozenset[int]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Graph:
    """n nodes, node n - 1 = empty, `start` = {goal}; arcs by tail: those of node u are first[u] …
    first[u+1].

    head [A], step [A] (position in theory.steps); component [n] ascending; needs: the node's
    properties.
    """

    theory: Theory
    first: Ints
    head: Ints
    step: Ints
    component: Ints
    needs: tuple[Need, ...]

    @property
    def start(self) -> int:
        """The node {goal}; n - 1 where no program is left."""
        assert self.theory.goal is not None
        goal = frozenset((self.theory.goal,))
        return self.needs.index(goal) if goal in self.needs else self.n - 1

    @property
    def n(self) -> int:
        """Number of nodes."""
        return len(self.first) - 1


def build(
    theory: Theory, limit: int, keep: Callable[[Need], bool] | None = None, run: Run | None = None
) -> Graph | None:
    """The graph of all states that `keep` admits (all, without it); None beyond `limit` nodes.

    Raises `Stopped` where `run` should stop.
    """
    assert theory.goal is not None
    numbers: dict[Need, int] = {frozenset((theory.goal,)): 0}
    queue: list[Need] = list(numbers)
    arcs: list[list[tuple[int, int]]] = []
    for need in queue:
        if run is not None:
            run.check()
        out: list[tuple[int, int]] = []
        for n in sorted({n for p in need for n in theory.by_post[p]}):
            step = theory.steps[n]
            after = (need - step.post) | step.pre
            if after == need or (after > need):
                continue  # needs no less than before: a longer program to the same end
            number = numbers.get(after)
            if number is None:
                if keep is not None and not keep(after):
                    continue
                if len(numbers) >= limit:
                    return None
                number = numbers[after] = len(queue)
                queue.append(after)
            out.append((number, n))
        arcs.append(out)
    return ordered(theory, queue, arcs)


def canonical(
    theory: Theory, limit: int, starts: tuple[Need, ...] | None = None, run: Run | None = None
) -> Graph | None:
    """Like `build`, but always settling the needed properties of the highest level first.

    Where costs simply add up the order of a program is irrelevant, and these few states suffice.
    Raises `Stopped` as `build` does.
    """
    level = levels(theory)
    assert theory.goal is not None
    queue: list[Need] = list(starts or (frozenset((theory.goal,)),))
    numbers = {need: i for i, need in enumerate(queue)}
    arcs: list[list[tuple[int, int]]] = []
    for need in queue:
        if run is not None:
            run.check()
        out: list[tuple[int, int]] = []
        top = max((level[p] for p in need), default=0)
        for n in sorted({n for p in need if level[p] == top for n in theory.by_post[p]}):
            step = theory.steps[n]
            after = (need - step.post) | step.pre
            if after >= need:
                continue
            number = numbers.get(after)
            if number is None:
                if len(numbers) >= limit:
                    return None
                number = numbers[after] = len(queue)
                queue.append(after)
            out.append((number, n))
        arcs.append(out)
    return ordered(theory, queue, arcs)


def levels(theory: Theory) -> dict[int, int]:
    """property -> level: a triple's effects share a level, at or above those of its
    preconditions."""
    names = sorted({p for step in theory.steps for p in step.pre | step.post})
    position = {p: i for i, p in enumerate(names)}
    edges: set[tuple[int, int]] = set()
    for step in theory.steps:
        post = sorted(position[p] for p in step.post)
        edges.update((position[p], post[0]) for p in step.pre)
        edges.update((post[0], q) for q in post[1:])
        edges.update((q, post[0]) for q in post[1:])
    ordered = sorted(edges)
    first = np.searchsorted([a for a, _ in ordered], np.arange(len(names) + 1)).astype(np.int64)
    component = components(first, np.array([b for _, b in ordered], dtype=np.int64))
    return {p: int(component[position[p]]) for p in names}


def ordered(theory: Theory, needs: list[Need], arcs: list[list[tuple[int, int]]]) -> Graph:
    """The graph without dead ends, renumbered by components in topological order, the goal
    first."""
    first, head, step = _rows(arcs)
    tail = np.repeat(np.arange(len(arcs)), np.diff(first))
    alive = _alive(needs, tail, head)
    kept = alive[tail] & alive[head]
    tail, head, step = tail[kept], head[kept], step[kept]
    number = np.cumsum(alive) - 1
    tail, head, left = number[tail], number[head], np.flatnonzero(alive)
    component = components(_firsts(tail, len(left)), head)
    order = np.argsort(component, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    tail, head = place[tail], place[head]
    by_tail = np.argsort(tail, kind="stable")
    return Graph(
        theory, _firsts(tail, len(left)), head[by_tail], step[by_tail], component[order],
        tuple(needs[u] for u in left[order]),
    )  # fmt: skip


def _firsts(tail: Ints, nodes: int) -> Ints:
    """[n + 1] where each node's arcs begin once they are sorted by tail."""
    first = np.zeros(nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(tail, minlength=nodes), out=first[1:])
    return first


def _rows(arcs: list[list[tuple[int, int]]]) -> tuple[Ints, Ints, Ints]:
    first = np.zeros(len(arcs) + 1, dtype=np.int64)
    np.cumsum([len(out) for out in arcs], out=first[1:])
    pairs = chain.from_iterable(chain.from_iterable(arcs))
    flat = np.fromiter(pairs, dtype=np.int64, count=2 * int(first[-1])).reshape(-1, 2)
    return first, flat[:, 0].copy(), flat[:, 1].copy()


def _alive(needs: list[Need], tail: Ints, head: Ints) -> Flags:
    """[n] which nodes lead to the empty set."""
    order = np.argsort(head, kind="stable")
    first, before = _firsts(head, len(needs)), tail[order]
    alive = np.array([not need for need in needs], dtype=np.bool_)
    reached = np.flatnonzero(alive)
    while len(reached):
        counts = first[reached + 1] - first[reached]
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found = np.unique(before[np.repeat(first[reached], counts) + inside])
        reached = found[~alive[found]]
        alive[reached] = True
    return alive
