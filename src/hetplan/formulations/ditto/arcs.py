"""Problem `ditto` as a path in two phases, for the general solvers (CP-SAT, HiGHS, Pyomo).

Sets   arcs q = (r, a, b): layers [a, b) as one stage under option r (a kind i and its x devices);
       peaks p = (q, j): arc q as k*, with j stages behind it.
Data   t_q seconds of a stage; D_i devices of kind i; N_b micro-batches; S_max the most stages
       possible; alive_q the most micro-batches in flight whose memory the group of arc q holds.
Vars   before_q, after_q in {0, 1}: arc q is a stage in front of k*, or behind it;
       peak_p in {0, 1}: p is k* with its number of stages behind.
Min    sum_q t_q before_q + 2 sum_q t_q after_q + sum_{p = (q, j)} (N_b - j) t_q peak_p
S.t.   (1) arcs form a path from layer 0 to layer L:  in front of k*, then k*, then behind it
       (2) for each layer l:  sum_{q covers l} t_q (before_q + after_q) <= sum_p t_p peak_p  (+ the
       tie behind k*)
       (3) sum_p j_p peak_p = sum_q after_q
       (4) for each kind i:  devices of the stages on i <= D_i
       (5) number of stages <= N_b
       (6) with memory, for each layer a:  stages that begin at a or later <= alive_q of the one
       that begins at a
The objective is T = T1 + T2 + T3 written with theta = t_k* (see exact/search.py). One row per layer
suffices in
(2), because one arc covers it. Of equally slow stages k* may be any: the first makes T least.
A template known beforehand of price U leaves out what costs more on its own: a peak (q, j) if (N_b
- j) t_q and the least time of the layers outside q exceed U, and arcs slower than every peak left.
Source: hetplan, for Ditto's problem (Section 3) with Oobleck's cost (SOSP 2023, Section 4.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.data import DittoDecision
from hetplan.formulations.ditto.exact import first_template
from hetplan.formulations.ditto.problem import (
    MEMORY_TOLERANCE,
    DittoProblem,
    Floats,
    Ints,
    Stages,
    tie,
)
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Known

# Beyond this many variables no general solver makes sense of the model.
MOST_VARIABLES = 1_000_000
# Prices are compared with this relative allowance, for the rounding of sums in another order.
ALLOWANCE = 1e-9


@dataclass(frozen=True)
class Arcs:
    """The stages that can occur, as arrays.

    option, first, last, seconds, devices, kind [Q]; alive [Q]: at most S_max.
    peak_arc, behind [P]: arc and number of stages behind it, of each peak.
    start: the template known beforehand, None without one; price: its T.
    """

    problem: DittoProblem
    option: Ints
    first: Ints
    last: Ints
    seconds: Floats
    devices: Ints
    kind: Ints
    alive: Ints
    peak_arc: Ints
    behind: Ints
    start: Stages | None
    price: float | None

    def __len__(self) -> int:
        return len(self.option)

    @property
    def tie(self) -> float:
        """How much longer than k* a stage behind it may be, in seconds."""
        return tie(float(self.seconds.max(initial=0.0)))

    def covering(self, layer: int) -> Ints:
        """Arcs whose stage holds `layer`."""
        return np.flatnonzero((self.first <= layer) & (layer < self.last))

    def peaks_of(self, arcs: Ints) -> Ints:
        """Peaks whose arc is among `arcs`."""
        return np.flatnonzero(np.isin(self.peak_arc, arcs))

    def stages(self, chosen: Ints) -> Stages:
        """The template of the chosen arcs, in order."""
        ordered = sorted(chosen.tolist(), key=lambda q: int(self.first[q]))
        return [(int(self.first[q]), int(self.last[q]), int(self.option[q])) for q in ordered]

    def roles(self) -> tuple[Ints, Ints, Ints]:
        """The start template as (arcs before, peaks, arcs after); raises ValueError without one."""
        if self.start is None:
            raise ValueError("no template is known beforehand")
        number = {
            (int(a), int(b), int(r)): q
            for q, (a, b, r) in enumerate(zip(self.first, self.last, self.option, strict=True))
        }
        arcs = [number[stage] for stage in self.start]
        times = self.seconds[arcs]
        k = int(np.argmax(times >= times.max() - tie(float(times.max()))))
        peaks = np.flatnonzero((self.peak_arc == arcs[k]) & (self.behind == len(arcs) - 1 - k))
        return np.array(arcs[:k], dtype=np.int64), peaks, np.array(arcs[k + 1 :], dtype=np.int64)


def list_arcs(problem: DittoProblem, run: Run) -> Arcs:
    """Arcs and peaks of a problem; raises UnsupportedError where they are too many for a general
    solver."""
    p = problem
    start = first_template(p)
    price = None if start is None else p.price(start)
    fits = p.option_devices <= p.devices[p.option_kind]
    option, first, last = np.nonzero(np.isfinite(p.time) & fits[:, None, None])
    seconds, alive = p.time[option, first, last], micro_batches_held(p, option, first, last)
    layer = np.concatenate([[0.0], np.cumsum(p.weight.min(axis=0))])
    outside = layer[-1] - (layer[last] - layer[first])
    behind = np.arange(p.most_stages)
    alone = (p.micro_batches - behind)[None, :] * seconds[:, None] + outside[:, None]
    # Any stage behind needs a layer of its own, and memory for as many micro-batches.
    possible = (alone <= (np.inf if price is None else price * (1 + ALLOWANCE))) & (
        alive[:, None] > behind[None, :]
    )
    possible &= (p.layers - last)[:, None] >= behind[None, :]
    slowest = float(seconds[possible.any(axis=1)].max(initial=0.0))
    kept = (alive >= 1) & (seconds <= slowest + tie(slowest))
    peak_arc, which = np.nonzero(possible[kept])
    variables = 2 * int(kept.sum()) + len(peak_arc)
    if variables > MOST_VARIABLES:
        raise UnsupportedError(
            f"a model of {variables} variables is too large for a general solver",
            expected=f"at most {MOST_VARIABLES} (method exact takes more)",
        )
    option, first, last = option[kept], first[kept], last[kept]
    return Arcs(
        problem=p,
        option=option,
        first=first,
        last=last,
        seconds=seconds[kept],
        devices=p.option_devices[option],
        kind=p.option_kind[option],
        alive=alive[kept],
        peak_arc=peak_arc,
        behind=behind[which],
        start=start,
        price=price,
    )


def micro_batches_held(p: DittoProblem, option: Ints, first: Ints, last: Ints) -> Ints:
    """[Q] how many micro-batches in flight the group's memory holds beside the states, at most
    S_max."""
    each = p.activation[last] - p.activation[first]
    room = p.capacity[option] * (1 + MEMORY_TOLERANCE) - (p.state[last] - p.state[first])
    with np.errstate(divide="ignore", invalid="ignore"):
        held = np.where(room < 0, 0.0, np.where(each > 0, np.floor(room / each), p.most_stages))
    return np.minimum(held, p.most_stages).astype(np.int64)


def least_objective(problem: DittoProblem) -> float:
    """A simple lower bound on T (0 when layers are free): W + (N_b - S_max) theta, every layer on
    its best option.

    T = sum_k t_k + (N_b - S + k* - 1) theta + sum_{k >= k*} t_k >= sum_k t_k + (N_b - S) theta,
    with sum_k t_k >= W, the work of all layers; the slowest stage theta takes no less than any
    layer, nor than W / S, but for the tie.
    """
    layers = problem.weight.min(axis=0)
    work, stages = float(layers.sum()), problem.most_stages
    longest = max(float(layers.max(initial=0.0)), work / stages)
    theta = max(0.0, longest - tie(longest))
    return (work + (problem.micro_batches - stages) * theta) * (1 - ALLOWANCE)


def known_before(arcs: Arcs) -> Known[DittoDecision]:
    """What needs no solver: the simple bound, and the first template."""
    decision = None if arcs.start is None else arcs.problem.decision(arcs.start)
    return Known(bound=least_objective(arcs.problem), decision=decision, objective=arcs.price)


def simple_objective(problem: DittoProblem) -> float:
    """The order of magnitude of T: an even pipeline over all devices (0 when layers are free)."""
    single = problem.weight[problem.option_devices == 1].sum(axis=1)
    costly = single > 0
    if not costly.any():
        return 0.0
    speed = float((problem.devices[costly] / single[costly]).sum())
    stages = problem.most_stages
    return (problem.micro_batches + stages - 1) * max(
        1.0 / speed, least_objective(problem) / stages
    )
