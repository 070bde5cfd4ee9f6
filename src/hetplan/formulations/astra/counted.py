"""What the general models share: stages counted by (type, layers) instead of numbered, so that
nothing is symmetric.

Sets   q in 0..Q-1 kinds of stage, each a type i(q) and a number of layers x(q) <= most_layers;
       i in 0..M-1 types.
Data   a_q = c x + h seconds of a stage of kind q; most_stages_i; N, P, K.
Vars   w_q in Z>=0: stages of kind q;  reach_q in {0,1}: some stage of type i(q) has x(q) layers or
       more; theta: time of the slowest stage;  with equal layers per type also
       pick_q in {0,1}: type i(q) uses x(q).
Min    sum_q a_q w_q + (K-1) theta   s.t.
(1) sum_q w_q = P                                   (2) sum_q x_q w_q = N
(3) sum_{q of i} w_q <= most_stages_i
(4) sum_{q' of i(q), x(q') >= x(q)} w_q' <= most_stages_i reach_q       (5) theta >= a_q where
reach_q
(6) w_q <= most_stages_i pick_q, sum_{q of i} pick_q <= 1               only with equal layers per
type
(7) P theta >= sum_q a_q w_q                            implied: the slowest is no faster than the
average Kinds that cost more than a simple decision does, whatever goes with them, are left out.
Source Astra, eq. 22-23; the counted form is hetplan's. n_s >= 1 and max_layers hold by the choice
of the kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.formulations.astra.data import AstraDecision
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Floats,
    Ints,
    decision_of,
    even_decision,
    even_stages,
)
from hetplan.solvers.whole import Known

# Bounds are sums in another order than the evaluator's.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Kinds:
    """The kinds of stage of a problem: type [Q], layers [Q], seconds [Q]; a type's kinds lie side
    by side, x = 1, 2, …"""

    problem: AstraProblem

    @cached_property
    def kept(self) -> Ints:
        """[M] the most layers of a kind of each type: beyond that, the stage alone costs more than
        `upper`."""
        p = self.problem
        worth = np.maximum(p.K * p.stage_seconds, (p.K - 1) * p.stage_seconds + least_work(p))
        within = worth[:, 1:] <= self.upper * (1 + 1e-9)
        return np.asarray(np.minimum(p.most_layers, within.sum(axis=1)), dtype=np.int64)

    @cached_property
    def upper(self) -> float:
        """What the optimum costs at most, seconds."""
        p = self.problem
        known = even_decision(p)
        return (p.P + p.K - 1) * float(p.thresholds[-1]) if known is None else known

    @cached_property
    def type(self) -> Ints:
        """i(q)."""
        return np.repeat(np.arange(self.problem.M), self.kept)

    @cached_property
    def layers(self) -> Ints:
        """x(q)."""
        return np.concatenate([np.arange(1, most + 1) for most in self.kept])

    @cached_property
    def seconds(self) -> Floats:
        """a_q."""
        return np.asarray(self.problem.stage_seconds[self.type, self.layers])

    @cached_property
    def most(self) -> Ints:
        """most_stages of i(q)."""
        return self.problem.most_stages[self.type]

    def of(self, i: int) -> Ints:
        """The kinds of type i."""
        return np.flatnonzero(self.type == i)

    def at_least(self, q: int) -> Ints:
        """The kinds of q's type with as many layers as q, or more."""
        return np.flatnonzero((self.type == self.type[q]) & (self.layers >= self.layers[q]))

    def stages(self, counts: Ints) -> list[tuple[int, int]]:
        """Counts w [Q] as stages (type, layers)."""
        return [
            (int(self.type[q]), int(self.layers[q]))
            for q in np.flatnonzero(counts)
            for _ in range(int(counts[q]))
        ]

    @cached_property
    def range(self) -> tuple[float, float]:
        """(lower, upper) bounds on the optimum and on every total of a model, seconds."""
        p = self.problem
        lower = least_total(p)
        return lower, max(lower, self.upper, p.P * float(self.seconds.max()))


def known_before(kinds: Kinds) -> Known[AstraDecision]:
    """What needs no solver: the simplest decision, and the bound from the least work and its even
    share."""
    stages = even_stages(kinds.problem)
    return Known(
        bound=kinds.range[0] * (1 - ROUNDING),
        decision=None if stages is None else decision_of(kinds.problem, stages),
        objective=even_decision(kinds.problem),
    )


def least_total(problem: AstraProblem) -> float:
    """What any decision costs, at least: the least work, and its even share for the slowest
    stage."""
    work = least_work(problem)
    return work + (problem.K - 1) * max(float(problem.thresholds[0]), work / problem.P)


def least_work(problem: AstraProblem) -> float:
    """What the stages of any decision take together, at least."""
    return problem.N * float(problem.c.min()) + problem.P * float(problem.h.min())
