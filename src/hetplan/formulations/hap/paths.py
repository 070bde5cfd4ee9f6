"""Shortest paths of a graph of programs, and potentials: lower bounds of the cost from a node to
the last one."""

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.hap.graph import Flags, Graph
from hetplan.formulations.hap.problem import Floats, Ints

# Sums whose relative difference is less are equal. Of means with equal sums the first is taken.
CLOSE = 1e-9


def shortest(graph: Graph, cost: Floats) -> tuple[Floats, Ints]:
    """([n, J] the least sum of costs from each node to the last one, [n, J] the first arc of a path
    with this sum, or -1 where there is no path).

    cost: [A, J] nonnegative costs of the arcs, J independent ones.
    """
    length = np.full((graph.n, cost.shape[1]), np.inf)
    length[-1] = 0.0
    first_arc = np.full(length.shape, -1)
    # No arc closes a stage, so that the point `mu` and the table `at_stage_begin` have no effect.
    # `mu` stands for J means of one vertex each. The table is empty.
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
    """[n, L, V] lower bounds of the cost from each node to the last one.

    There is one bound for each of the L means, by which the costs of the stage under way are
    weighed, and for each of the V vertices of a cell. The bounds are affine over the cell. Where
    paths are programs in execution order, each stage has a mean of its own. It is the mean whose
    value at mu is largest at the node where the stage begins; of equal means the first one.

    cost: [A, L, V] the costs of arcs by L means at the V vertices. mu: [V] a point of the cell
    (barycentric).
    """
    rows = np.ascontiguousarray(cost.reshape(len(cost), -1))
    if not graph.in_execution_order:
        return shortest(graph, rows)[0].reshape(graph.n, *cost.shape[1:])
    value = np.full((graph.n, rows.shape[1]), np.inf)
    value[-1] = 0.0
    at_stage_begin = value.copy()
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
    """Fill value [n, J], the least sums of cost [A, J] from each node to the last one, and arc
    [n, J], the first arcs of such paths.

    The J columns are V = len(mu) columns for each mean. After an arc that `closes` a stage,
    at_stage_begin [n, J] of its head counts in place of the value. There all means have the columns
    of the mean with the largest value at mu. The components are filled from the last to the first,
    and at_stage_begin of a component only when all its values are final.
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
                    # Inside the component at_stage_begin is not final. There `value` is a lower
                    # bound, too: one mean then serves for both stages.
                    after = at_stage_begin if closes[a] and h >= end else value
                    for j in range(J):
                        total = cost[a, j] + after[h, j]
                        if total < value[u, j]:
                            value[u, j] = total
                            arc[u, j] = a
                            # other nodes of the component may lead to u
                            changed = changed or end - begin > 1
        for u in range(begin, min(end, len(at_stage_begin))):
            best, chosen = -np.inf, 0
            for j in range(0, J, V):
                level = 0.0
                for i in range(V):
                    # a value may be infinite, and 0 times infinity is no number
                    level += mu[i] * value[u, j + i] if mu[i] > 0 else 0.0
                if best == -np.inf or level > best + CLOSE * abs(best):
                    best, chosen = level, j
            for j in range(J):
                at_stage_begin[u, j] = value[u, chosen + j % V]
        end = begin
