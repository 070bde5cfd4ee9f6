"""A graph whose arcs are whole stages, made of a graph of single steps for one cell of ratios.

A mean over types that is chosen before the computations of a stage are known leaves a gap even when
the cell is a point, because the stage's slowest type depends on all of them. Once few programs are
open, their stages are few, too: for each node where a stage begins, the computations up to the next
communication, as sums of work. Each stage has a mean of its own, exact at a point, and so sums
become exact there.

Two kinds of stages are left out: those that by sums lie on no program below the threshold in the
cell, and those with no less work than another between the same nodes. Where F + S b is no less for
the smallest and the largest ratios of the cell, it is no less for all in between, on every type;
the same holds for bytes. The graph serves for every part of the cell and every lower threshold.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from hetplan.formulations.hap.graph import Graph, Rows, Work, graph_of_arcs
from hetplan.formulations.hap.paths import potentials
from hetplan.formulations.hap.problem import Floats, Ints

# Computations in a row beyond which a stage is taken to go round in a circle.
LONGEST = 256


@dataclass(frozen=True)
class _OpenStages(Rows):
    """m stages that have begun and have not ended."""

    begin: Ints  # [m] the node where the stage begins
    node: Ints  # [m] the node that it has reached
    work: Work  # [m] the work of its computations so far
    seconds: Floats  # [m, L, V] the costs of this work by the means
    parent: Ints  # [m] the stage that it extends, a number among all begun; -1: none
    arc: Ints  # [m] the arc by which it extends that stage; -1: none


def graph_of_stages(
    graph: Graph,
    cost: Floats,
    mu: Floats,
    potential: Floats,
    threshold: float,
    cell: Floats,
    most_begun: int,
) -> Graph | None:
    """The graph of the stages that sums leave open in a cell.

    None where more than `most_begun` stages are begun, and where computations lead round in a
    circle. cost: [A, L, V] of the arcs. potential: [n, L, V] made with it for the reference point
    mu [V].
    """
    before = _least_before(graph, cost, mu)
    begins = np.flatnonzero(np.isfinite(before[:-1]).all(axis=1))
    m = len(begins)
    no_work = Work(*(np.zeros((m, *c.shape[1:]), c.dtype) for c in graph.work.columns))
    none = np.full(m, -1)
    open_stages = _OpenStages(
        begin=begins,
        node=begins,
        work=no_work,
        seconds=np.zeros((m, *cost.shape[1:])),
        parent=none,
        arc=none,
    )
    rounds: list[_OpenStages] = []  # in round r, stages of r computations
    begun = 0  # stages of all rounds before the last one
    while len(open_stages.node):
        rounds.append(open_stages)
        if begun > most_begun or len(rounds) > LONGEST:
            return None
        longer = _extended(graph, cost, open_stages, begun)
        begun += len(open_stages.node)
        # a bound by each mean, affine over the cell: its least value is at a vertex
        through = before[longer.begin, None] + longer.seconds + potential[longer.node]
        below_threshold = (through.min(axis=2) < threshold).all(axis=1)
        longer = longer[np.flatnonzero(below_threshold)]
        open_stages = longer[_least_work(longer, cell)]
    return _graph_of(graph, _OpenStages.joined(rounds), cell)


def _least_before(graph: Graph, cost: Floats, mu: Floats) -> Floats:
    """[n, V] a lower bound, affine over the cell, of the cost from the start to each node where a
    stage begins.

    It is infinite at nodes where no stage begins. The bound is a potential of the graph read
    backwards, which has the same stages.
    """
    backward, arcs = graph.backward
    to_head = potentials(backward, cost[arcs], mu)[::-1]
    # a node that no path reaches is infinite by every mean, whichever is taken
    level = np.where(np.isfinite(to_head), to_head, 0.0) @ mu
    closed = to_head[np.arange(len(to_head)), level.argmax(axis=1)]
    comm = np.flatnonzero(graph.work.comm)
    before = np.full(closed.shape, np.inf)
    # a collective costs the same by all means, so that the first one stands for all
    np.minimum.at(before, graph.head[comm], closed[graph.tail[comm]] + cost[comm, 0])
    before[graph.start] = 0.0
    return before


def _extended(graph: Graph, cost: Floats, open_: _OpenStages, number: int) -> _OpenStages:
    """The open stages, each extended by every computation that may follow.

    number: the number of the first stage of `open_` among all begun stages.
    """
    arc, origin = graph.arcs_of(open_.node)
    computes = ~graph.work.comm[arc]
    arc, origin = arc[computes], origin[computes]
    return _OpenStages(
        begin=open_.begin[origin],
        node=graph.head[arc],
        work=open_.work[origin] + graph.work[arc],
        seconds=open_.seconds[origin] + cost[arc],
        parent=number + origin,
        arc=arc,
    )


def _least_work(open_: _OpenStages, cell: Floats) -> Ints:
    """The numbers of stages that no other one between the same nodes dominates by its work.

    Stages between the same nodes are sorted by work. A stage with no less work than its predecessor
    is dropped, until none is; some dominated stages may stay.
    """
    lowest, highest = cell.min(axis=(1, 2)), cell.max(axis=(1, 2))
    corners = np.array(list(product(*zip(lowest, highest, strict=True)))).T
    work = open_.work
    amounts = work.fixed_seconds[:, None] + work.shared_seconds @ corners
    device_bytes = work.fixed_bytes[:, None] + work.shared_bytes @ corners
    if device_bytes.any():
        amounts = np.hstack([amounts, device_bytes])
    stages = np.lexsort((*amounts.T[::-1], open_.node, open_.begin))
    while True:
        before, after = stages[:-1], stages[1:]
        dominated = np.zeros(len(stages), dtype=np.bool_)
        dominated[1:] = open_.begin[before] == open_.begin[after]
        dominated[1:] &= open_.node[before] == open_.node[after]
        dominated[1:] &= (amounts[after] >= amounts[before]).all(axis=1)
        if not dominated.any():
            return stages
        stages = stages[~dominated]


def _graph_of(graph: Graph, every: _OpenStages, cell: Floats) -> Graph:
    """The graph of these whole stages and of the collectives between them.

    A node u of the graph of steps becomes two: node u, where a stage begins, and node n + u, where
    a stage has ended.
    """
    n, end = graph.n, graph.n - 1
    comm = np.flatnonzero(graph.work.comm)
    closing = np.zeros(n, dtype=np.bool_)
    closing[graph.tail[comm]] = closing[end] = True
    closed = np.flatnonzero(closing[every.node])
    closed = closed[_least_work(every[closed], cell)]
    stage = every[closed]
    tail = np.concatenate([stage.begin, n + graph.tail[comm]])
    head = np.concatenate([np.where(stage.node == end, end, n + stage.node), graph.head[comm]])
    nodes, number = np.unique(np.concatenate([[graph.start, end], tail, head]), return_inverse=True)
    keys = [(int(graph.component[u % n]), int(u >= n)) for u in nodes]
    action = np.arange(len(tail))
    steps_of_action = [_chain(graph, every, int(c)) for c in closed]
    steps_of_action += [graph.steps_of_action[s] for s in graph.action[comm]]
    m = len(tail)
    # `number` has the start and the end in front of the tails and the heads
    whole = graph_of_arcs(
        graph.theory, keys, (number[2 : 2 + m], number[2 + m :], action), steps_of_action,
        Work.joined([stage.work, graph.work[comm]]), start=int(number[0]), arcs_are_stages=True,
    )  # fmt: skip
    # removing no arc still drops the nodes through which no path leads
    whole, _ = whole.without_arcs(np.zeros(m, dtype=np.bool_))
    return whole


def _chain(graph: Graph, every: _OpenStages, stage: int) -> tuple[int, ...]:
    """The steps of a stage, the last one in time first."""
    steps: list[int] = []
    while every.arc[stage] >= 0:
        steps[:0] = graph.steps_of_action[graph.action[every.arc[stage]]]
        stage = int(every.parent[stage])
    return tuple(steps)
