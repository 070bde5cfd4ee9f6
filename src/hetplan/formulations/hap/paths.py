"""Shortest paths of a graph of programs, and potentials: lower bounds of what is left of a path."""

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.graph import Flags, Graph
from hetplan.formulations.hap.problem import Floats, Ints

# Sums that differ by less, relatively, are the same: of such means the first is taken.
CLOSE = 1e-9


def shortest(graph: Graph, cost: Floats) -> tuple[Floats, Ints]:
    """([n, J] least sums of the costs [A, J] >= 0 from each node to the last one, [n, J] the first
    arc of such a path, -1 where there is none)."""
    length = np.full((graph.n, cost.shape[1]), np.inf)
    length[-1] = 0.0
    first_arc = np.full(length.shape, -1)
    closes_no_stage = np.zeros(len(graph.head), dtype=np.bool_)
    _fill_shortest(
        graph.first, graph.head, closes_no_stage, graph.component, np.ascontiguousarray(cost),
        np.ones(1), length, first_arc, length[:0],
    )  # fmt: skip
    return length, first_arc


def path(graph: Graph, first_arc: Ints) -> list[int]:
    """The arcs of the path from the start to the last node, given each node's first arc [n]."""
    node, arcs = graph.start, []
    while node < graph.n - 1:
        arcs.append(int(first_arc[node]))
        node = int(graph.head[arcs[-1]])
    return arcs


def potentials(graph: Graph, cost: Floats, mu: Floats) -> Floats:
    """[n, L, V] a lower bound, affine over a cell, of the cost from each node to the last one, when
    the stage under way costs what mean l says.

    cost: [A, L, V], of arcs by L means at the V vertices. Where paths are programs in execution
    order, each stage has a mean of its own: the one whose value at the point mu [V] (barycentric)
    is the largest at the node where the stage begins, read from the program's end. The first mean
    wins ties.
    """
    rows = np.ascontiguousarray(cost.reshape(len(cost), -1))
    if not graph.in_execution_order:
        return shortest(graph, rows)[0].reshape(graph.n, *cost.shape[1:])
    value, at_stage_begin = np.full((2, graph.n, rows.shape[1]), np.inf)
    value[-1] = at_stage_begin[-1] = 0.0
    _fill_shortest(
        graph.first, graph.head, graph.work.comm, graph.component, rows, mu, value,
        np.full(value.shape, -1), at_stage_begin,
    )  # fmt: skip
    return value.reshape(graph.n, *cost.shape[1:])


@kernel
def _fill_shortest(
    first: Ints, head: Ints, closes: Flags, component: Ints, cost: Floats, mu: Floats,
    value: Floats, arc: Ints, at_stage_begin: Floats,
) -> None:  # fmt: skip
    """Fill value [n, J], least sums of cost [A, J] to the last node, and arc [n, J].

    Every len(mu) columns belong to one mean. Behind an arc that `closes` a stage, at_stage_begin
    [n, J] of its head counts in place of the value: there all means have the columns of the one
    with the largest value at mu. Within a component that choice is made once, with the values
    before it.
    """
    J, V = cost.shape[1], len(mu)
    end = len(value) - 1
    while end > 0:
        begin = end - 1
        while begin > 0 and component[begin - 1] == component[end - 1]:
            begin -= 1
        changed = True
        while changed:
            changed = False
            for u in range(end - 1, begin - 1, -1):
                for a in range(first[u], first[u + 1]):
                    h = head[a]
                    after = at_stage_begin if closes[a] and h >= end else value
                    for j in range(J):
                        total = cost[a, j] + after[h, j]
                        if total < value[u, j]:
                            value[u, j] = total
                            arc[u, j] = a
                            # who looked at u before has to look again
                            changed = changed or end - begin > 1
        for u in range(begin, min(end, len(at_stage_begin))):
            best, chosen = -np.inf, 0
            for j in range(0, J, V):
                level = 0.0
                for i in range(V):
                    level += mu[i] * value[u, j + i] if mu[i] > 0 else 0.0
                if best == -np.inf or level > best + CLOSE * abs(best):
                    best, chosen = level, j
            for j in range(J):
                at_stage_begin[u, j] = value[u, chosen + j % V]
        end = begin
