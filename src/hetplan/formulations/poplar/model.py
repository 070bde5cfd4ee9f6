"""Problem `poplar` for general solvers: how many devices take which load, by what time.

Sets   k groups of n_k equal devices; l in 1..L_k loads; v_1 < ... < v_J the different times of all
       loads.
Data   tau_k(l) seconds of load l: h_k(l) of a whole share (ZeRO 0, 1) or t_k(l) of a micro-batch
       (ZeRO 2, 3); C seconds of a synchronisation.
Vars   y[k, l] devices of group k that take load l, over all steps; s_j steps that take v_j or
       longer (ZeRO 0, 1: one step, s_j is 0 or 1).
(1) sum_k,l  l y[k, l] = G
(2) s_j >= s_(j+1)
(3) sum over l with tau_k(l) >= v_j of y[k, l]  <=  n_k s_j    for each group, each of its times v_j
min  sum_j (v_j - v_(j-1)) s_j + C x (s_1, or 1 for ZeRO 0, 1)          v_0 = 0
(3) is Hall's condition: the loads that a step admits are nested by its time, so all loads find a
step that is long enough, and no variable says which. Only the steps' times are read from an answer:
what the devices take in them follows by `ties`.
Source: hetplan, for Poplar eq. 1 and Algorithm 2.
"""

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.paper import known_before
from hetplan.formulations.poplar.problem import NOTHING_FITS, Floats, PoplarProblem, compile_problem
from hetplan.formulations.poplar.shares import largest_shares, share_seconds
from hetplan.formulations.poplar.ties import shares_within, steps_within
from hetplan.solvers.expressions import Columns, total
from hetplan.solvers.general import Formulation
from hetplan.solvers.model import Model, ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# Beyond this many loads or times general solvers get nowhere; the message names the method that
# does.
MAX_LOADS = 20_000
# Steps may cost so many times the plan that is known: CP-SAT proves optima ten times sooner where
# there is room for other plans beside the best (seen on the packaged instances of cluster C).
SPARE = 2.0
TOO_LARGE = (
    "too many different loads and times for a general model; the method exact does not need one"
)


@dataclass(frozen=True)
class Levels:
    """seconds[k][l - 1] = tau; times [J] ascending.

    ceiling: no less than the time of some plan, without the one C of ZeRO 0, 1; floor: no plan
    takes less. Both in seconds.
    """

    problem: PoplarProblem
    seconds: tuple[Floats, ...]
    times: Floats
    floor: float
    ceiling: float

    @property
    def step_seconds(self) -> float:
        """What every step costs beside its time: C for ZeRO 2 and 3."""
        return self.problem.comm if self.problem.stepwise else 0.0

    @property
    def most_steps(self) -> int:
        """No plan within `ceiling` has more steps."""
        if not self.problem.stepwise:
            return 1
        shortest = float(self.times[0]) + self.problem.comm
        return min(self.problem.total, int(self.ceiling / shortest * (1 + 1e-12)))

    @property
    def totals(self) -> Totals:
        """What the writers choose their units by."""
        return Totals(
            least=self.floor,
            largest=max(self.ceiling, float(self.times[-1])) + self.step_seconds,
            roundings=self.most_steps,
            offset=0.0 if self.problem.stepwise else self.problem.comm,
        )


def build_levels(problem: PoplarProblem, ceiling: float) -> Levels | None:
    """The model's data; None where it has more than MAX_LOADS loads and times. ceiling: see
    `Levels`."""
    floor = problem.total / problem.speed * (1 - 1e-12)
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
    times = times[times <= ceiling * (1 + 1e-12)]
    if sum(len(row) for row in seconds) + len(times) > MAX_LOADS:
        return None
    return Levels(problem, tuple(seconds), times, floor, ceiling)


def add_up_to_the_batch(model: Model, levels: Levels, y: list[Columns]) -> None:  # (1)
    """All samples are taken."""
    samples = total(np.arange(1, len(of_group) + 1) @ of_group for of_group in y)
    model.row("batch", samples == levels.problem.total)


def fit_into_steps(model: Model, levels: Levels, y: list[Columns], s: Columns) -> None:  # (3)
    """Loads of v_j or longer need steps of v_j or longer."""
    for group, seconds, of_group in zip(levels.problem.groups, levels.seconds, y, strict=True):
        order = np.argsort(seconds, kind="stable")
        for first in np.flatnonzero(np.diff(seconds[order], prepend=-1.0) > 0).tolist():
            as_long = of_group[order[first:]].sum()
            j = np.searchsorted(levels.times, seconds[order[first]])
            steps = s[j : j + 1].sum()  # nothing where no step may take that long
            model.row("fit", as_long <= group.count * steps)


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
    model.minimize(model.staircase("time", s, levels.times + levels.step_seconds))  # (2)
    fit_into_steps(model, levels, y, s)
    return model


def read(levels: Levels, answer: ModelAnswer) -> PoplarDecision:
    """The decision behind the steps of an answer, by the tie rule (`ties`)."""
    problem, at_least = levels.problem, answer.counts("s")
    if not problem.stepwise:
        return shares_within(problem, float(levels.times[int(at_least.sum()) - 1]))
    counts = (at_least - np.append(at_least[1:], 0)).tolist()
    taken = {t: n for t, n in zip(levels.times.tolist(), counts, strict=True) if n}
    decision = steps_within(problem, taken)
    assert decision is not None, "the solver's loads add up to the batch"
    return decision


def formulate(data: PoplarData, run: Run) -> Formulation[PoplarDecision] | Outcome[PoplarDecision]:
    """The model with a fluid bound and a simple plan; no model where it would be too large."""
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    known = known_before(data, problem)
    seconds = known.objective or 0.0
    ceiling = seconds * SPARE if problem.stepwise else seconds - problem.comm
    levels = build_levels(problem, ceiling)
    if levels is None:
        return Outcome(
            stop=Stop.LIMIT, decision=known.decision, bound=known.bound, message=TOO_LARGE
        )
    return Formulation(
        build=lambda: build(levels, run),
        read=lambda answer: read(levels, answer),
        infeasible="proven by the solver: no loads add up to the batch",
        known=known,
    )
