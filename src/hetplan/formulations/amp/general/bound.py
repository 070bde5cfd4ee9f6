"""A cheap lower bound of one configuration: one pipeline with few slow stages and the fastest
links.

Let F be the slowest f of the device types. All devices are used, so at least n_F / tp tensor groups
hold a device of F, and some pipeline has at least g = ceil(ceil(n_F / tp) / dp) of its stages on
such groups. Every pipeline costs at least the cheapest chain of stages of which g or more are on F,
where

(1) a stage on F runs at the pace of the fastest type in F, any other at that of the fastest type of
all
(2) tensor groups, links and data groups have the best bandwidth that any group of their size can
have
(3) a stage on F has the capacity of the roomiest type in F, any other that of the roomiest of all

T is at least (gas - 1) max_j t_j + sum_j (t_j + e_j) of that chain, plus the least synchronisation;
the largest over f counts. The chain is a shortest path once max_j t_j is bounded, which
`bottleneck.minimise` searches.
"""

from __future__ import annotations

import math

import numpy as np

from hetplan.formulations.amp.cuts import parameter_cut
from hetplan.formulations.amp.general.tables import Tables
from hetplan.formulations.amp.problem import AmpProblem, Floats
from hetplan.formulations.amp.strategy import ring_factor
from hetplan.solvers.bottleneck import Continuum, Probe, minimise
from hetplan.solvers.run import Run

# Bounds are sums of many floats in another order than the evaluator's.
ROUNDING = 1e-12
SEARCH_GAP = 1e-4


def least_seconds(tables: Tables, run: Run) -> float | None:
    """What every decision of the configuration costs at least; None where no chain of stages fits
    the memory."""
    best, run = 0.0, run.part()  # the chains are not decisions: nothing to report
    for slow in slow_sets(tables):
        found = chain_seconds(tables, slow, run)
        if found is None:
            return None
        best = max(best, found)
    return (best + sync_seconds(tables)) * (1 - ROUNDING)


def quick_seconds(tables: Tables) -> float:
    """A weaker bound in no time: the fastest tables, the bottleneck at least the largest layer and
    the average."""
    layer = tables.seconds.min(axis=0)
    bottleneck = max(float(layer.max()), float(layer.sum()) / tables.shape[0])
    total = (tables.configuration.gas - 1) * bottleneck + float(layer.sum()) + sync_seconds(tables)
    return total * (1 - ROUNDING)


def slow_sets(tables: Tables) -> list[list[int]]:
    """The slowest f types for every f, by their total seconds (any order would be valid)."""
    total = tables.seconds.sum(axis=1)
    order = np.argsort(-total, kind="stable").tolist()
    return [order[:count] for count in range(1, len(order) + 1)]


def chain_seconds(tables: Tables, slow: list[int], run: Run) -> float | None:
    """(gas - 1) max_j t_j + sum_j (t_j + e_j) of the cheapest chain with enough stages on `slow`;
    None: no chain."""
    _, dp, tp = tables.shape
    devices = int(np.isin(tables.problem.device_type, slow).sum())
    needed = math.ceil(math.ceil(devices / tp) / dp)
    pace = np.stack(
        [stage_seconds(tables, list(range(len(tables.problem.types)))), stage_seconds(tables, slow)]
    )
    links = link_seconds(tables)

    def probe(theta: float) -> Probe[None] | None:
        return cheapest_chain(np.where(pace <= theta, pace, np.inf), links, needed)

    top = float(pace[np.isfinite(pace)].max(initial=0.0))
    found = minimise(
        tables.configuration.gas - 1, probe, Continuum(), (0.0, top), run, gap=SEARCH_GAP
    )
    return None if found.proven_empty else found.bound or 0.0


def cheapest_chain(pace: Floats, links: Floats, needed: int) -> Probe[None] | None:
    """Least sum of stages and links with at least `needed` stages on the second pace.

    pace [2, pp, L + 1, L + 1]: seconds of layers a to b - 1 on stage j, +inf where not possible.
    links [L + 1]: seconds when a stage but the last ends before layer l.
    """
    stages, size = pace.shape[1], pace.shape[2]
    # by stages on the second pace so far (capped), layers done
    cost = np.full((needed + 1, size), np.inf)
    cost[0, 0] = 0.0
    largest = np.zeros_like(cost)  # the slowest stage on the way there
    for j in range(stages):
        after, slowest = np.full_like(cost, np.inf), np.zeros_like(cost)
        for s in range(needed + 1):
            for kind in (0, 1):
                here = pace[kind, j]
                total = cost[s][:, None] + here
                a = total.argmin(axis=0)
                value = total[a, np.arange(size)]
                into = min(s + kind, needed)
                better = value < after[into]
                after[into][better] = value[better]
                through = np.maximum(largest[s][a], here[a, np.arange(size)])
                slowest[into][better] = through[better]
        cost, largest = after + (links if j < stages - 1 else 0.0), slowest
    if not math.isfinite(cost[needed, -1]):
        return None
    return Probe(float(cost[needed, -1]), float(largest[needed, -1]), None)


def stage_seconds(tables: Tables, types: list[int]) -> Floats:
    """[pp, L + 1, L + 1] seconds of one micro-batch at the pace of the fastest of `types`, +inf
    where none fits."""
    problem, tp = tables.problem, tables.shape[2]
    layer = tables.seconds[types].min(axis=0)
    if tp > 1:
        layer = layer + ring_factor(
            tp
        ) * tables.configuration.micro_batch * problem.tensor / best_bandwidth(problem, tp)
    room = tables.capacity[types].max()
    matrix = np.full((len(tables.stages), problem.layers + 1, problem.layers + 1), np.inf)
    sums = [np.cumsum(layer[a:]) for a in range(problem.layers)]
    for j, intervals in enumerate(tables.stages):
        fits = intervals.bytes <= room
        for a, b in zip(intervals.first[fits], intervals.last[fits], strict=True):
            matrix[j, a, b] = sums[a][b - a - 1]
    return matrix


def link_seconds(tables: Tables) -> Floats:
    """[L + 1] seconds behind each boundary at the highest bandwidth."""
    problem = tables.problem
    size = np.concatenate([[0.0], problem.activation]) * tables.configuration.micro_batch
    return size / best_bandwidth(problem, 2)


def sync_seconds(tables: Tables) -> float:
    """Least gradient all-reduce: the most even cut of the parameters at the best bandwidth."""
    problem, (pp, dp, tp) = tables.problem, tables.shape
    if dp == 1:
        return 0.0
    heaviest = float(np.add.reduceat(problem.params, parameter_cut(problem.params, pp)[:-1]).max())
    return ring_factor(dp) * heaviest / tp / best_bandwidth(problem, dp)


def best_bandwidth(problem: AmpProblem, ranks: int) -> float:
    """The lowest bandwidth of any group of `ranks` devices is at most this: the best (ranks - 1)-th
    best link."""
    if ranks > problem.devices:
        return math.inf
    links = np.sort(np.where(np.isfinite(problem.bandwidth), problem.bandwidth, 0.0), axis=1)
    return float(links[:, -(ranks - 1)].max()) if ranks > 1 else math.inf
