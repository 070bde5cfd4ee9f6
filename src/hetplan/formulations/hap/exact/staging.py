"""A graph of needs whose arcs are whole stages: what one cell of ratios leaves open of a graph of
single steps.

A stage's slowest type depends on all its computations, so that a mean over types chosen before they
are known
(`kernels.potentials`) leaves something missing even at a single point. Once few programs are open,
their stages are few, too: for each node where a stage begins, the computations up to the next
communication, as sums of fixed and shared work. An arc for each has a minorant of its own, exact at
a point, and bounds by sums become exact there.

Left out are stages of which sums show that no program below the threshold has them in the cell, and
those with no less work than another between the same nodes: with F + S b no less for the smallest
and the largest ratio of the cell it is so for all in between, on every type. So the graph serves
for every part of the cell and lower threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.hap.exact import kernels
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.problem import Floats, Ints
from hetplan.formulations.hap.states import Need, ordered

# Computations in a row, and stages begun, after which a graph stays as it is.
MOST_ROUNDS, PER_ARC = 256, 4


@dataclass(frozen=True)
class _Begun:
    """Stages under way, parallel arrays [m]: the node where each began and where it is, its work,
    shared by segment where there are several, its seconds [m, L, V] by the means; what it went on
    from (a number among all begun; -1: nothing) and by which arc."""

    begin: Ints
    node: Ints
    fixed: Floats
    shared: Floats
    seconds: Floats
    parent: Ints
    arc: Ints

    def only(self, kept: Ints) -> _Begun:
        """Those with these numbers, in their order."""
        return _Begun(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))


def staged(
    arrays: Arrays, step: Floats, mu: Floats, potential: Floats, threshold: float, extremes: Floats
) -> Arrays | None:
    """The graph of stages left open in a cell by sums with the arcs' prices step [A, L, V], whose
    potential [n, L, V] is given for the reference point mu [V]; None where they are too many, or
    computations lead round in a circle.

    extremes [C, g]: ratios of each segment; work that is less on one type for all of these is less
    all over the cell.
    """
    arrive = _arrivals(arrays, step, mu)
    begins = np.flatnonzero(np.isfinite(arrive[:-1]).all(axis=1))
    count, none = len(begins), np.full(len(begins), -1)
    work = (
        np.zeros(count),
        np.zeros((count, *arrays.shared.shape[1:])),
        np.zeros((count, *step.shape[1:])),
    )
    here = _Begun(begins, begins, *work, none, none)
    rounds, total = [], 0
    while len(here.node):
        rounds.append(here)
        if len(rounds) > MOST_ROUNDS or total > PER_ARC * len(arrays.graph.head):
            return None
        here = _gone_on(arrays, step, here, total)
        total += len(rounds[-1].node)
        least = (arrive[here.begin, None] + here.seconds + potential[here.node]).min(axis=2)
        here = here.only(np.flatnonzero((least < threshold).all(axis=1)))
        here = here.only(_least_work(here, extremes))
    every = _Begun(
        *(
            np.concatenate([getattr(r, name) for r in rounds])
            for name in _Begun.__dataclass_fields__
        )
    )
    return _graph(arrays, every, extremes)


def _arrivals(arrays: Arrays, step: Floats, mu: Floats) -> Floats:
    """[n, V]: a lower bound, affine over the cell, of what leads to a stage's begin at each node;
    infinite where none begins. The graph read backwards has the same stages."""
    first, back, component, arcs = arrays.reverse
    plain = arrays.comm[arcs]
    before = kernels.potentials_of(first, back, plain, component, step[arcs], mu, arrays.ordered)[
        ::-1
    ]
    level = np.where(np.isfinite(before), before, 0.0) @ mu
    closed = before[np.arange(len(before)), level.argmax(axis=1)]
    comm, tails = np.flatnonzero(arrays.comm), arrays.tails
    found = np.full(closed.shape, np.inf)
    np.minimum.at(found, arrays.graph.head[comm], closed[tails[comm]] + step[comm, 0])
    found[arrays.start] = 0.0
    return found


def _gone_on(arrays: Arrays, step: Floats, here: _Begun, number: int) -> _Begun:
    """Every stage with one computation more; those `here` are numbered from `number` on."""
    first = arrays.graph.first
    lengths = first[here.node + 1] - first[here.node]
    origin = np.repeat(np.arange(len(lengths)), lengths)
    arc = np.arange(lengths.sum()) + np.repeat(
        first[here.node] - np.cumsum(lengths) + lengths, lengths
    )
    origin, arc = origin[~arrays.comm[arc]], arc[~arrays.comm[arc]]
    return _Begun(
        here.begin[origin], arrays.graph.head[arc], here.fixed[origin] + arrays.fixed[arc],
        here.shared[origin] + arrays.shared[arc], here.seconds[origin] + step[arc], number + origin, arc,
    )  # fmt: skip


def _least_work(here: _Begun, extremes: Floats) -> Ints:
    """Numbers of the stages without those that another between the same nodes, next in order, makes
    needless."""
    shared = here.shared.reshape(len(here.fixed), extremes.shape[1])
    work = here.fixed[:, None] + shared @ extremes.T
    kept = np.lexsort((*work.T[::-1], here.node, here.begin))
    while True:
        one, other = kept[:-1], kept[1:]
        needless = np.zeros(len(kept), dtype=np.bool_)
        needless[1:] = (here.begin[one] == here.begin[other]) & (here.node[one] == here.node[other])
        needless[1:] &= (work[other] >= work[one]).all(axis=1)
        if not needless.any():
            return kept
        kept = kept[~needless]


def _graph(arrays: Arrays, every: _Begun, extremes: Floats) -> Arrays:
    """The graph: nodes where stages begin, and, apart from these, where communication ends them."""
    graph, end = arrays.graph, arrays.graph.n - 1
    comm, tails = np.flatnonzero(arrays.comm), arrays.tails
    closing = np.zeros(graph.n, dtype=np.bool_)
    closing[tails[comm]] = closing[end] = True
    whole = np.flatnonzero(closing[every.node])
    whole = whole[_least_work(every.only(whole), extremes)]
    # chain numbers: stages, then collectives
    chains = [_chain(every, int(w), graph.step) for w in whole] + [
        (int(s),) for s in graph.step[comm]
    ]
    out: dict[tuple[int, bool], list[tuple[tuple[int, bool], int]]] = {}
    for number, w in enumerate(whole):
        after = int(every.node[w])
        out.setdefault((int(every.begin[w]), True), []).append(((after, after == end), number))
    for number, a in enumerate(comm, len(whole)):
        out.setdefault((int(tails[a]), False), []).append(((int(graph.head[a]), True), number))
    nodes = [(arrays.start, True)]
    numbers = {nodes[0]: 0}
    arcs: list[list[tuple[int, int]]] = []
    for node in nodes:
        for there, _ in out.get(node, ()):
            if there not in numbers:
                numbers[there] = len(nodes)
                nodes.append(there)
        arcs.append([(numbers[there], number) for there, number in out.get(node, ())])
    needs: list[Need] = [graph.needs[u] for u, _ in nodes]
    made = ordered(graph.theory, needs, arcs)
    fixed = np.concatenate([every.fixed[whole], arrays.fixed[comm]])[made.step]
    shared = np.concatenate([every.shared[whole], arrays.shared[comm]])[made.step]
    return replace(
        arrays,
        graph=made,
        comm=made.step >= len(whole),
        fixed=fixed,
        shared=shared,
        start=0,
        chains=tuple(chains),
    )


def _chain(every: _Begun, stage: int, step: Ints) -> tuple[int, ...]:
    """The steps of a stage, the last one in reading order first."""
    found = []
    while every.arc[stage] >= 0:
        found.append(int(step[every.arc[stage]]))
        stage = int(every.parent[stage])
    return tuple(found)
