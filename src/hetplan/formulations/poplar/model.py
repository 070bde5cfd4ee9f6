"""Problem `poplar` for general solvers: the numbers of devices that take each load, and of steps of
each time.

A load is the samples of one device in one step: its whole share of an iteration (ZeRO 0 and 1,
where an iteration is one step), or a micro-batch (ZeRO 2 and 3).

Sets   k groups of n_k equal devices; l in 1..L_k loads; v_1 < ... < v_J the different times of all
       loads.
Data   tau_k(l) seconds of load l: h_k(l) of a share (module `shares`) or t_k(l) of a micro-batch;
       C seconds of a synchronisation; G samples of an iteration.
Vars   y[k, l] devices of group k that take load l, summed over all steps;
       s_j steps that take v_j or longer (ZeRO 0, 1: s_j is 0 or 1).
Min    sum_j (v_j - v_(j-1)) s_j + C x (s_1, or 1 for ZeRO 0, 1)   with v_0 = 0,   s.t.
(1) sum_k,l  l y[k, l] = G
(2) s_j >= s_(j+1)
(3) sum over l with tau_k(l) >= v_j of y[k, l]  <=  n_k s_j    for each group, each of its times v_j
(3) is Hall's condition: a longer step admits all loads of a shorter one, so that every load has a
step that is long enough, and no variable assigns it. Only the times of the steps are read from an
answer. The loads of the devices then follow by the tie rule (module `ties`).
Source: hetplan, for Poplar eq. 1 and Algorithm 2.
"""

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.paper import prior_result
from hetplan.formulations.poplar.problem import (
    NOTHING_FITS,
    ROUNDING,
    Floats,
    PoplarProblem,
    compile_problem,
)
from hetplan.formulations.poplar.shares import largest_shares, share_seconds
from hetplan.formulations.poplar.ties import shares_within, steps_within
from hetplan.solvers.expressions import Columns, total
from hetplan.solvers.general import Formulation
from hetplan.solvers.model import Model, ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# With more loads and times than this, no general solver makes progress.
MAX_LOADS = 20_000
# The plans of a model cost at most this multiple of the first plan. CP-SAT proves optima ten times
# sooner where there is room for plans beside the best (seen on the packaged instances of cluster
# C).
SPARE = 2.0
TOO_LARGE = (
    "too many different loads and times for a general model; the method exact does not need one"
)


@dataclass(frozen=True)
class Levels:
    """The data of the model. `build_levels` makes it."""

    problem: PoplarProblem
    seconds: tuple[Floats, ...]  # [groups][loads] tau_k(l) at index l - 1
    times: Floats  # [J] v_j, ascending
    floor: float  # seconds that every plan takes at least
    # seconds that some plan does not exceed; for ZeRO 0 and 1 without C
    ceiling: float

    @property
    def step_seconds(self) -> float:
        """Seconds of every step beside its time: C for ZeRO 2 and 3, where each step
        synchronises."""
        return self.problem.comm if self.problem.stepwise else 0.0

    @property
    def most_steps(self) -> int:
        """The most steps of a plan within `ceiling`."""
        if not self.problem.stepwise:
            return 1
        shortest = float(self.times[0]) + self.problem.comm
        return min(self.problem.total, int(self.ceiling / shortest * (1 + ROUNDING)))

    @property
    def totals(self) -> Totals:
        """The totals by which the model's writers choose their units."""
        return Totals(
            least=self.floor,
            largest=max(self.ceiling, float(self.times[-1])) + self.step_seconds,
            roundings=self.most_steps,
            offset=0.0 if self.problem.stepwise else self.problem.comm,
        )


def build_levels(problem: PoplarProblem, ceiling: float) -> Levels | None:
    """The model's data; None where it has more than MAX_LOADS loads and times. ceiling: see
    `Levels`."""
    floor = problem.total / problem.speed * (1 - ROUNDING)
    if problem.stepwise:
        seconds = [group.seconds[1 : problem.total + 1] for group in problem.groups]
        floor = max(floor, float(min(row.min() for row in seconds)) + problem.comm)
    else:
        most = largest_shares(problem, ceiling)
        if sum(most) > MAX_LOADS:
            return None
        seconds = [
            share_seconds(group.seconds, m)[1:]
            for group, m in zip(problem.groups, most, strict=True)
        ]
    times = np.unique(np.concatenate(seconds))
    times = times[times <= ceiling * (1 + ROUNDING)]
    if sum(len(row) for row in seconds) + len(times) > MAX_LOADS:
        return None
    return Levels(problem, tuple(seconds), times, floor, ceiling)


def add_up_to_the_batch(model: Model, levels: Levels, y: list[Columns]) -> None:  # (1)
    """The loads add up to the samples of an iteration."""
    samples = total(np.arange(1, len(of_group) + 1) @ of_group for of_group in y)
    model.row("batch", samples == levels.problem.total)


def fit_into_steps(model: Model, levels: Levels, y: list[Columns], s: Columns) -> None:  # (3)
    """A group takes loads of v_j or longer only in steps of v_j or longer, one load per device."""
    for group, seconds, of_group in zip(levels.problem.groups, levels.seconds, y, strict=True):
        by_time = np.argsort(seconds, kind="stable")  # the group's loads, the shortest first
        sorted_seconds = seconds[by_time]
        is_longer = np.diff(sorted_seconds, prepend=-1.0) > 0  # than the load before
        for first in np.flatnonzero(is_longer).tolist():
            loads = of_group[by_time[first:]].sum()
            j = np.searchsorted(levels.times, sorted_seconds[first])
            steps = s[j : j + 1].sum()  # 0 where no step may take that long
            model.row("fit", loads <= group.count * steps)


def build(levels: Levels, run: Run | None = None) -> Model:
    """The whole model."""
    problem, steps = levels.problem, levels.most_steps
    model = Model("poplar", run, levels.totals)
    y = []
    for k, (group, row) in enumerate(zip(problem.groups, levels.seconds, strict=True)):
        most = problem.total // np.arange(1, len(row) + 1)
        y.append(model.integer(f"y{k}", len(row), 0, np.minimum(most, group.count * steps)))
    s = model.integer("s", len(levels.times), 0, steps)
    add_up_to_the_batch(model, levels, y)
    # `staircase` adds (2). Its levels v_j + C give the sum over j and C s_1. Under ZeRO 0 and 1 its
    # levels are the v_j, and `Totals.offset` adds C.
    model.minimize(model.staircase("time", s, levels.times + levels.step_seconds))
    fit_into_steps(model, levels, y, s)
    return model


def read(levels: Levels, answer: ModelAnswer) -> PoplarDecision:
    """The decision with the steps of an answer, by the tie rule (`ties`)."""
    problem, at_least = levels.problem, answer.counts("s")
    if not problem.stepwise:  # the s_j are 1 up to the time of the iteration
        longest = int(at_least.sum()) - 1
        return shares_within(problem, float(levels.times[longest]))
    counts = (at_least - np.append(at_least[1:], 0)).tolist()  # [J] steps that take exactly v_j
    steps = {v: count for v, count in zip(levels.times.tolist(), counts, strict=True) if count}
    decision = steps_within(problem, steps)
    assert decision is not None, "the solver's loads add up to the batch"
    return decision


def formulate(data: PoplarData, run: Run) -> Formulation[PoplarDecision] | Outcome[PoplarDecision]:
    """The model of an instance, with a first plan and the bound of peak speeds; or the outcome of
    an instance that needs no model or whose model is too large."""
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    prior = prior_result(data, problem)
    assert prior.objective is not None, "Algorithm 2 has a plan wherever a sample fits"
    ceiling = problem.computing_seconds(prior.objective)
    if problem.stepwise:
        ceiling = prior.objective * SPARE
    levels = build_levels(problem, ceiling)
    if levels is None:
        return Outcome(
            stop=Stop.LIMIT, decision=prior.decision, bound=prior.bound, message=TOO_LARGE
        )
    return Formulation(
        build=lambda: build(levels, run),
        read=lambda answer: read(levels, answer),
        infeasible="proven by the solver: no loads add up to the batch",
        prior=prior,
    )
