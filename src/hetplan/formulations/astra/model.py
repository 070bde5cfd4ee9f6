"""Problem `astra` for general solvers. The model counts the stages with the same type and number of
layers. It does not number the stages, so that it has no symmetric solutions.

Sets   q in 0..Q-1 kinds of stage: a type i(q) and a number of layers x(q) in 1..most_layers;
       i in 0..M-1 types; k in 0..S-1 the distinct times v_0 < v_1 < ... of the kinds.
Data   a_q = c x + h seconds of a stage of kind q; most_stages_i; N, P, K.
Vars   w_q in Z>=0: stages of kind q;  step_k in {0,1}: the slowest stage takes v_k or longer;
       theta: time of the slowest stage;  with equal layers per type also
       pick_q in {0,1}: type i(q) uses x(q).
Min    sum_q a_q w_q + (K-1) theta   s.t.
(1) sum_q w_q = P                                   (2) sum_q x_q w_q = N
(3) sum_{q of i} w_q <= most_stages_i
(4) sum_{q' of i(q), x(q') >= x(q)} w_q' <= most_stages_i step_k, for every q with v_k = a_q
(5) step_0 = 1, step_k >= step_(k+1), theta = v_0 + sum_k (v_k - v_(k-1)) step_k
(6) w_q <= most_stages_i pick_q, sum_{q of i} pick_q <= 1    only with equal layers per type
(7) P theta >= sum_q a_q w_q                 implied: the slowest is no faster than the average
A kind is left out when every decision with a stage of this kind costs more than the even decision
(`even_stages`). Every stage has at least one layer and at most max_layers layers, because there are
no other kinds.
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
    even_objective,
    even_stages,
    infeasible_because,
    least_total,
    least_work,
)
from hetplan.solvers.expressions import Columns
from hetplan.solvers.general import Formulation, PriorResult, solve_with
from hetplan.solvers.model import Model, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# Share by which `least_total` may exceed the evaluator's objective by rounding, since the evaluator
# sums in another order.
ROUNDING = 1e-12


class Kinds:
    """The Q kinds of stage of a problem, sorted by type and number of layers."""

    problem: AstraProblem
    upper: float  # seconds, an upper bound on the optimum
    type: Ints  # [Q] number of each kind's type
    layers: Ints  # [Q] layers of one stage of the kind
    seconds: Floats  # [Q] seconds of one micro-batch on one stage of the kind
    most: Ints  # [Q] most stages of the kind, by its type's devices

    def __init__(self, problem: AstraProblem) -> None:
        self.problem = p = problem
        upper = even_objective(p)
        if upper is None:  # an upper bound: all stages take as long as the slowest kind
            upper = (p.P + p.K - 1) * float(p.thresholds[-1])
        self.upper = upper
        # Two lower bounds on every decision with a stage of this type and number of layers, [M, N +
        # 1]. K micro-batches pass this stage. Or one micro-batch passes all stages, and the K - 1
        # others pass this stage after it.
        by_this_stage = p.K * p.stage_seconds
        by_all_stages = least_work(p) + (p.K - 1) * p.stage_seconds
        least = np.maximum(by_this_stage, by_all_stages)
        # More layers take no less time, so that the affordable numbers of a type are 1, 2, … The
        # factor keeps rounding from excluding the optimum.
        affordable = least[:, 1:] <= self.upper * (1 + 1e-9)
        most_layers = np.minimum(p.most_layers, affordable.sum(axis=1))  # [M]
        self.type = np.repeat(np.arange(p.M), most_layers)
        self.layers = np.concatenate([np.arange(1, most + 1) for most in most_layers])
        self.seconds = p.stage_seconds[self.type, self.layers]
        self.most = p.most_stages[self.type]

    @cached_property
    def totals(self) -> Totals:
        """Lower bound of the optimum, and the largest value of any total of the model, seconds."""
        p, lower = self.problem, least_total(self.problem)
        return Totals(
            least=lower,
            largest=max(lower, self.upper, p.P * float(self.seconds.max())),
            # The objective has the rounding of each stage once, and the rounding of theta K - 1
            # times.
            roundings=p.P + p.K - 1,
        )

    def of(self, i: int) -> Ints:
        """The kinds of type i."""
        return np.flatnonzero(self.type == i)

    def at_least(self, q: int) -> Ints:
        """The kinds of q's type whose stages have at least as many layers as those of q."""
        return np.flatnonzero((self.type == self.type[q]) & (self.layers >= self.layers[q]))

    def stages(self, counts: Ints) -> list[tuple[int, int]]:
        """(type, layers) of every stage, from the number of stages of each kind. counts: w [Q]."""
        chosen = np.repeat(np.arange(len(counts)), counts)
        return list(zip(self.type[chosen].tolist(), self.layers[chosen].tolist(), strict=True))


def keep_to_devices(model: Model, kinds: Kinds, w: Columns) -> None:  # (3)
    """No type carries more stages than it has device groups."""
    for i, most in enumerate(kinds.problem.most_stages):
        if len(kinds.of(i)):
            model.row("devices", w[kinds.of(i)].sum() <= most)


def cover_slowest_stage(model: Model, kinds: Kinds, w: Columns) -> Columns:  # (4), (5)
    """The column theta, no less than the time of any stage: stages of kind q need step_k = 1 where
    v_k is the time of q."""
    times, time_of = np.unique(kinds.seconds, return_inverse=True)  # v [S], k of each kind [Q]
    step = model.binary("step", len(times))
    model.fix(step[:1], 1)
    theta = model.staircase("theta", step, times)
    for q in np.flatnonzero(time_of > 0).tolist():
        no_faster = w[kinds.at_least(q)].sum()  # stages of the type that take v_k or longer
        model.row("reach", no_faster <= kinds.most[q] * step[time_of[q]])
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
    """The model of a problem for which `infeasible_because` is None."""
    model = Model("astra", run, kinds.totals)
    w = model.integer("w", len(kinds.type), 0, kinds.most)
    model.row("stages", w.sum() == kinds.problem.P)  # (1)
    model.row("layers", kinds.layers @ w == kinds.problem.N)  # (2)
    keep_to_devices(model, kinds, w)
    theta = cover_slowest_stage(model, kinds, w)
    one_number_per_type(model, kinds, w)
    outlast_the_average(model, kinds, w, theta)
    model.minimize(kinds.seconds @ w + (kinds.problem.K - 1) * theta)
    return model


def formulate(data: AstraData, run: Run) -> Formulation[AstraDecision] | Outcome[AstraDecision]:
    """The model, with the even decision (`even_stages`) as a first incumbent and `least_total` as a
    first lower bound; the outcome where counting alone proves that no decision exists."""
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    kinds = Kinds(problem)
    stages = even_stages(problem)
    return Formulation(
        build=lambda: build(kinds, run),
        read=lambda answer: decision_of(problem, kinds.stages(answer.counts("w"))),
        infeasible="proven by the solver: no numbers of layers, one per type, add up to all layers",
        prior=PriorResult(
            bound=kinds.totals.least * (1 - ROUNDING),
            decision=None if stages is None else decision_of(problem, stages),
            objective=even_objective(problem),
        ),
    )


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """The outcome of the model under CP-SAT.

    Native options are not passed on: they are meant for the method `cp-sat` alone.
    """
    return solve_with(
        "cp-sat", formulate, data, replace(run, options=replace(run.options, native={}))
    )
