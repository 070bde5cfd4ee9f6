"""A graph whose arcs are whole stages: what one cell of ratios leaves open of a graph of single
steps.

A stage's slowest type depends on all its computations, so that a mean over types chosen before they
are known leaves something missing even at a single point. Once few programs are open, their stages
are few, too: for each node where a stage begins, the computations up to the next communication, as
sums of work. Each has a minorant of its own, exact at a point, and so sums become exact there.

Left out are stages of which sums show that no program below the threshold has them in the cell, and
those with no less work than another between the same nodes: with F + S b no less for the smallest
and the largest ratios of the cell it is so for all in between, on every type, and so for bytes. The
graph serves for every part of the cell and every lower threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from hetplan.formulations.hap.graph import Graph, Rows, Work, assembled, potentials
from hetplan.formulations.hap.problem import Floats, Ints

# Computations in a row after which a stage counts as going round in a circle.
LONGEST = 256


@dataclass(frozen=True)
class _Begun(Rows):
    """m stages under way."""

    begin: Ints  # [m] the node where each began
    node: Ints  # [m] where it is now
    work: Work  # [m]
    seconds: Floats  # [m, L, V] by the means
    parent: Ints  # [m] what it went on from, a number among all begun; -1: nothing
    arc: Ints  # [m] by which arc


def staged(
    graph: Graph,
    step: Floats,
    mu: Floats,
    potential: Floats,
    threshold: float,
    cell: Floats,
    most: int,
) -> Graph | None:
    """The graph of stages that sums leave open in a cell; None where more than `most` are begun, as
    where computations lead round in a circle.

    step [A, L, V]: the arcs' prices. potential [n, L, V]: made with them for the reference point mu
    [V].
    """
    arrive = _arrivals(graph, step, mu)
    begins = np.flatnonzero(np.isfinite(arrive[:-1]).all(axis=1))
    m = len(begins)
    nothing = Work(*(np.zeros((m, *c.shape[1:]), c.dtype) for c in graph.work.columns))
    none = np.full(m, -1)
    here = _Begun(begins, begins, nothing, np.zeros((m, *step.shape[1:])), none, none)
    rounds: list[_Begun] = []
    total = 0
    while len(here.node):
        rounds.append(here)
        if total > most or len(rounds) > LONGEST:
            return None
        here = _gone_on(graph, step, here, total)
        total += len(rounds[-1].node)
        least = (arrive[here.begin, None] + here.seconds + potential[here.node]).min(axis=2)
        here = here[np.flatnonzero((least < threshold).all(axis=1))]
        here = here[_least_work(here, cell)]
    return _graph(graph, _Begun.joined(rounds), cell)


def _arrivals(graph: Graph, step: Floats, mu: Floats) -> Floats:
    """[n, V]: a lower bound, affine over the cell, of what leads to a stage's begin at each node;
    infinite where none begins. The graph read backwards has the same stages."""
    backward, arcs = graph.backward
    before = potentials(backward, step[arcs], mu)[::-1]
    level = np.where(np.isfinite(before), before, 0.0) @ mu
    closed = before[np.arange(len(before)), level.argmax(axis=1)]
    comm = np.flatnonzero(graph.work.comm)
    arrive = np.full(closed.shape, np.inf)
    np.minimum.at(arrive, graph.head[comm], closed[graph.tail[comm]] + step[comm, 0])
    arrive[graph.start] = 0.0
    return arrive


def _gone_on(graph: Graph, step: Floats, here: _Begun, number: int) -> _Begun:
    """Every stage with one computation more; those `here` are numbered from `number` on."""
    arc, origin = graph.arcs_of(here.node)
    computes = ~graph.work.comm[arc]
    arc, origin = arc[computes], origin[computes]
    return _Begun(
        here.begin[origin], graph.head[arc], here.work[origin] + graph.work[arc],
        here.seconds[origin] + step[arc], number + origin, arc,
    )  # fmt: skip


def _least_work(here: _Begun, cell: Floats) -> Ints:
    """Numbers of the stages without those that another between the same nodes, next in order, makes
    needless."""
    lowest, highest = cell.min(axis=(1, 2)), cell.max(axis=(1, 2))
    corners = np.array(list(product(*zip(lowest, highest, strict=True)))).T
    work = here.work
    seconds = work.fixed[:, None] + work.shared @ corners
    held = work.fixed_bytes[:, None] + work.shared_bytes @ corners
    amounts = np.hstack([seconds, held]) if held.any() else seconds
    kept = np.lexsort((*amounts.T[::-1], here.node, here.begin))
    while True:
        one, other = kept[:-1], kept[1:]
        needless = np.zeros(len(kept), dtype=np.bool_)
        needless[1:] = (here.begin[one] == here.begin[other]) & (here.node[one] == here.node[other])
        needless[1:] &= (amounts[other] >= amounts[one]).all(axis=1)
        if not needless.any():
            return kept
        kept = kept[~needless]


def _graph(graph: Graph, every: _Begun, cell: Floats) -> Graph:
    """Nodes where stages begin, and apart from these, where communication ends them."""
    n, end = graph.n, graph.n - 1
    comm = np.flatnonzero(graph.work.comm)
    closing = np.zeros(n, dtype=np.bool_)
    closing[graph.tail[comm]] = closing[end] = True
    closed = np.flatnonzero(closing[every.node])
    closed = closed[_least_work(every[closed], cell)]
    stage = every[closed]
    # node u where a stage begins, n + u where one has ended
    tail = np.concatenate([stage.begin, n + graph.tail[comm]])
    head = np.concatenate([np.where(stage.node == end, end, n + stage.node), graph.head[comm]])
    ends = [graph.start, end]
    nodes, number = np.unique(np.concatenate([ends, tail, head]), return_inverse=True)
    keys = [(int(graph.component[u % n]), int(u >= n)) for u in nodes]
    label = np.arange(len(tail))
    chains = [_chain(graph, every, int(c)) for c in closed]
    chains += [graph.chains[s] for s in graph.label[comm]]
    m = len(tail)
    whole = assembled(
        graph.theory, keys, (number[2 : 2 + m], number[2 + m :], label), chains,
        Work.joined([stage.work, graph.work[comm]]), start=int(number[0]), staged=True,
    )  # fmt: skip
    return whole.without(np.zeros(m, dtype=np.bool_))[0]


def _chain(graph: Graph, every: _Begun, stage: int) -> tuple[int, ...]:
    """The steps of a stage, the last one in time first."""
    steps: list[int] = []
    while every.arc[stage] >= 0:
        steps[:0] = graph.chains[graph.label[every.arc[stage]]]
        stage = int(every.parent[stage])
    return tuple(steps)
