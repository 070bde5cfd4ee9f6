"""Problem `astra` for general solvers: stages counted by (type, layers) instead of numbered, so
that nothing is symmetric.

Sets   q in 0..Q-1 kinds of stage, each a type i(q) and a number of layers x(q) <= most_layers;
       i in 0..M-1 types; k in 0..S-1 the distinct times v_0 < v_1 < ... of the kinds.
Data   a_q = c x + h seconds of a stage of kind q; most_stages_i; N, P, K.
Vars   w_q in Z>=0: stages of kind q;  step_k in {0,1}: the slowest stage takes v_k or longer;
       theta: time of the slowest stage;  with equal layers per type also
       pick_q in {0,1}: type i(q) uses x(q).
Min    sum_q a_q w_q + (K-1) theta   s.t.
(1) sum_q w_q = P                                   (2) sum_q x_q w_q = N
(3) sum_{q of i} w_q <= most_stages_i
(4) sum_{q' of i(q), x(q') >= x(q)} w_q' <= most_stages_i step_k, v_k = a_q
(5) step_0 = 1, step_k >= step_(k+1), theta = v_0 + sum_k (v_k - v_(k-1)) step_k
(6) w_q <= most_stages_i pick_q, sum_{q of i} pick_q <= 1    only with equal layers per type
(7) P theta >= sum_q a_q w_q                 implied: the slowest is no faster than the average
Kinds that cost more than a simple decision does, whatever goes with them, are left out; n_s >= 1
and max_layers hold by the choice of the kinds.
Source Astra, eq. 22-23; the counted form is hetplan's.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Floats,
    Ints,
    compile_problem,
    decision_of,
    even_decision,
    even_stages,
    infeasible_because,
    least_total,
    least_work,
)
from hetplan.solvers.expressions import Columns
from hetplan.solvers.general import Formulation, Known, solve_with
from hetplan.solvers.model import Model, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# Bounds are sums in another order than the evaluator's.
ROUNDING = 1e-12


class Kinds:
    """The kinds of stage of a problem: type [Q], layers [Q], seconds [Q]; a type's kinds lie side
    by side, x = 1, 2, …"""

    def __init__(self, problem: AstraProblem) -> None:
        p = self.problem = problem
        even = even_decision(p)
        worst = (p.P + p.K - 1) * float(p.thresholds[-1])
        # what the optimum costs at most, seconds; a stage that alone costs more is left out
        self.upper = worst if even is None else even
        alone = np.maximum(p.K * p.stage_seconds, (p.K - 1) * p.stage_seconds + least_work(p))
        kept = np.minimum(p.most_layers, (alone[:, 1:] <= self.upper * (1 + 1e-9)).sum(axis=1))
        self.type: Ints = np.repeat(np.arange(p.M), kept)
        self.layers: Ints = np.concatenate([np.arange(1, most + 1) for most in kept])
        self.seconds: Floats = p.stage_seconds[self.type, self.layers]
        self.most: Ints = p.most_stages[self.type]

    @cached_property
    def totals(self) -> Totals:
        """Bounds on the optimum and on every total of the model."""
        p, lower = self.problem, least_total(self.problem)
        return Totals(
            least=lower,
            largest=max(lower, self.upper, p.P * float(self.seconds.max())),
            roundings=p.P + p.K - 1,
        )

    def of(self, i: int) -> Ints:
        """The kinds of type i."""
        return np.flatnonzero(self.type == i)

    def at_least(self, q: int) -> Ints:
        """The kinds of q's type with as many layers as q, or more."""
        return np.flatnonzero((self.type == self.type[q]) & (self.layers >= self.layers[q]))

    def stages(self, counts: Ints) -> list[tuple[int, int]]:
        """Counts w [Q] as stages (type, layers)."""
        chosen = np.repeat(np.arange(len(counts)), counts)
        return list(zip(self.type[chosen].tolist(), self.layers[chosen].tolist(), strict=True))


def keep_to_devices(model: Model, kinds: Kinds, w: Columns) -> None:  # (3)
    """No type carries more stages than it has device groups."""
    for i, most in enumerate(kinds.problem.most_stages):
        if len(kinds.of(i)):
            model.row("devices", w[kinds.of(i)].sum() <= most)


def cover_slowest_stage(model: Model, kinds: Kinds, w: Columns) -> Columns:  # (4), (5)
    """theta is no less than the time of any stage: a kind in use needs its step."""
    levels, rung = np.unique(kinds.seconds, return_inverse=True)
    step = model.binary("step", len(levels))
    model.fix(step[:1], 1)
    theta = model.staircase("theta", step, levels)
    for q in np.flatnonzero(rung > 0).tolist():
        as_long = w[kinds.at_least(q)].sum()
        model.row("reach", as_long <= kinds.most[q] * step[rung[q]])
    return theta


def one_number_per_type(model: Model, kinds: Kinds, w: Columns) -> None:  # (6)
    """With equal layers per type, each type picks one number of layers."""
    if not kinds.problem.equal:
        return
    pick = model.binary("pick", len(w))
    model.row("use", w <= kinds.most * pick)
    for i in range(kinds.problem.M):
        if len(kinds.of(i)):
            model.row("pick", pick[kinds.of(i)].sum() <= 1)


def outlast_the_average(model: Model, kinds: Kinds, w: Columns, theta: Columns) -> None:  # (7)
    """The slowest stage takes no less than the average one."""
    model.row("average", kinds.problem.P * theta >= kinds.seconds @ w)


def build(kinds: Kinds, run: Run | None = None) -> Model:
    """The model of a problem that `infeasible_because` has no objection to."""
    model = Model("astra", run, kinds.totals)
    w = model.integer("w", len(kinds.type), 0, kinds.most)
    model.row("stages", w.sum() == kinds.problem.P)  # (1): as many as the pipeline has
    model.row("layers", kinds.layers @ w == kinds.problem.N)  # (2): every one on one stage
    keep_to_devices(model, kinds, w)
    theta = cover_slowest_stage(model, kinds, w)
    one_number_per_type(model, kinds, w)
    outlast_the_average(model, kinds, w, theta)
    model.minimize(kinds.seconds @ w + (kinds.problem.K - 1) * theta)
    return model


def formulate(data: AstraData, run: Run) -> Formulation[AstraDecision] | Outcome[AstraDecision]:
    """The model, with the simplest decision and the bound from the least work and its even
    share."""
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    kinds, stages = Kinds(problem), even_stages(problem)
    return Formulation(
        build=lambda: build(kinds, run),
        read=lambda answer: decision_of(problem, kinds.stages(answer.counts("w"))),
        infeasible="proven by the solver: no numbers of layers, one per type, add up to all layers",
        known=Known(
            bound=kinds.totals.least * (1 - ROUNDING),
            decision=None if stages is None else decision_of(problem, stages),
            objective=even_decision(problem),
        ),
    )


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """The model through CP-SAT, without the options that are meant for a method of that name."""
    return solve_with(
        "cp-sat", formulate, data, replace(run, options=replace(run.options, native={}))
    )
