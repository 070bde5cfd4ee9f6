"""Problem `ditto` as a path in two phases, for the general solvers (CP-SAT, HiGHS, Pyomo).

Sets   arcs q = (r, a, b): layers [a, b) as one stage under option r (a kind i and its x devices).
Data   t_q seconds of a stage; D_i devices of kind i; N_b micro-batches; S_max the most stages possible;
       alive_q the most micro-batches in flight whose memory the group of arc q holds.
Vars   before_q, after_q in {0, 1}: arc q is a stage in front of k*, or behind it;
       peak_qj in {0, 1}: arc q is k* and j stages lie behind it, j in 0..S_max-1.
Min    sum_q t_q before_q + 2 sum_q t_q after_q + sum_qj (N_b - j) t_q peak_qj
S.t.   (1) arcs form a path from layer 0 to layer L:  in front of k*, then k*, then behind it
       (2) for each layer l:  sum_{q covers l} t_q (before_q + after_q) <= sum_qj t_q peak_qj  (+ the tie behind k*)
       (3) sum_qj j peak_qj = sum_q after_q
       (4) for each kind i:  devices of the stages on i <= D_i
       (5) number of stages <= N_b
       (6) with memory, for each layer a:  stages that begin at a or later <= alive_q of the one that begins at a
The objective is T = T1 + T2 + T3 written with theta = t_k* (see exact/search.py). One row per layer suffices in
(2), because one arc covers it. Of equally slow stages k* may be any: the first makes T least.
Source: hetplan, for Ditto's problem (Section 3) with Oobleck's cost (SOSP 2023, Section 4.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.problem import MEMORY_TOLERANCE, DittoProblem, Floats, Ints, Stages, tie

# Beyond this many variables no general solver makes sense of the model.
MOST_VARIABLES = 1_000_000


@dataclass(frozen=True)
class Arcs:
    """All stages that fit in memory with one micro-batch, as arrays [Q].

    option, first, last, seconds, devices, kind; alive: at most S_max.
    """

    problem: DittoProblem
    option: Ints
    first: Ints
    last: Ints
    seconds: Floats
    devices: Ints
    kind: Ints
    alive: Ints

    def __len__(self) -> int:
        return len(self.option)

    @property
    def counts(self) -> int:
        """How many values j takes: the numbers of stages that can lie behind k*, 0 among them."""
        return self.problem.most_stages

    @property
    def tie(self) -> float:
        """How much longer than k* a stage behind it may be, in seconds."""
        return tie(float(self.seconds.max()))

    def covering(self, layer: int) -> Ints:
        """Arcs whose stage holds `layer`."""
        return np.flatnonzero((self.first <= layer) & (layer < self.last))

    def stages(self, chosen: Ints) -> Stages:
        """The template of the chosen arcs, in order."""
        ordered = sorted(chosen.tolist(), key=lambda q: int(self.first[q]))
        return [(int(self.first[q]), int(self.last[q]), int(self.option[q])) for q in ordered]


def list_arcs(problem: DittoProblem) -> Arcs:
    """The arcs of a problem; raises UnsupportedError where they are too many for a general solver."""
    p = problem
    fits = p.option_devices <= p.devices[p.option_kind]
    option, first, last = np.nonzero(np.isfinite(p.time) & fits[:, None, None])
    state = p.state[last] - p.state[first]
    each = p.activation[last] - p.activation[first]
    room = p.capacity[option] * (1 + MEMORY_TOLERANCE) - state
    with np.errstate(divide="ignore", invalid="ignore"):
        alive = np.where(room < 0, 0.0, np.where(each > 0, np.floor(room / each), p.most_stages))
    alive = np.minimum(alive, p.most_stages).astype(np.int64)
    kept = alive >= 1
    variables = int(kept.sum()) * (p.most_stages + 2)
    if variables > MOST_VARIABLES:
        raise UnsupportedError(
            f"a model of {variables} variables is too large for a general solver",
            expected=f"at most {MOST_VARIABLES} (method exact takes more)",
        )
    option, first, last, alive = option[kept], first[kept], last[kept], alive[kept]
    return Arcs(
        problem=p,
        option=option,
        first=first,
        last=last,
        seconds=p.time[option, first, last],
        devices=p.option_devices[option],
        kind=p.option_kind[option],
        alive=alive,
    )


def least_objective(problem: DittoProblem) -> float:
    """A simple lower bound on T: every layer computed once on its best option (0 when layers are free)."""
    return float(problem.weight.min(axis=0).sum())


def simple_objective(problem: DittoProblem) -> float:
    """The order of magnitude of T: an even pipeline over all devices (0 when layers are free)."""
    single = problem.weight[problem.option_devices == 1].sum(axis=1)
    costly = single > 0
    if not costly.any():
        return 0.0
    speed = float((problem.devices[costly] / single[costly]).sum())
    stages = problem.most_stages
    return (problem.micro_batches + stages - 1) * max(1.0 / speed, least_objective(problem) / stages)
