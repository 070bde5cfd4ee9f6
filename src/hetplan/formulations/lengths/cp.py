"""Problem `lengths` for CP-SAT.

Sets   i samples, the longest first; r replicas; k in 0..K_r-1 micro-batches of replica r.
Data   l_i tokens;  s_ri = a_r l_i + b_r l_i^2 seconds and c_r of a micro-batch;  s'_ri and c'_r
       fill seconds;  C_r.
Vars   x[i, r, k] in {0,1}: sample i is in the micro-batch;  used[r, k] in {0,1};
       t[r, k] ticks of the micro-batch;  m[r] ticks of the longest fill;  T ticks.
Min    T,  s.t.
(1) sum_r,k x[i, r, k] = 1                                                  `place_every_sample`
(2) sum_i l_i x[i, r, k] <= C_r used[r, k]                                  `keep_within_tokens`
(3) t[r, k] = c_r used[r, k] + sum_i s_ri x[i, r, k]                        `take_time`
(4) m[r] >= c'_r used[r, k] + sum_i s'_ri x[i, r, k]                        `fill_the_pipeline`
(5) T >= sum_k t[r, k] + m[r]                                               `wait_for_the_slowest`
(6) load[r, k] >= load[r, k+1], load the tokens           symmetry          `sort_micro_batches`
(7) equal replicas r < r': sum_k load[r, k] >= sum_k load[r', k]  symmetry  `sort_replicas`
(8) T >= L                                                implied           `last_as_long_as_priced`
L is the bound by prices of `problem`. Pairs of a sample and a replica with more tokens than C_r, or
more seconds alone than a known decision, are left out.
"""

from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python.cp_model import IntVar, LinearExpr

from hetplan.formulations.lengths.data import LengthsData, LengthsDecision
from hetplan.formulations.lengths.heuristic import best_packing
from hetplan.formulations.lengths.problem import Floats, LengthsProblem
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import (
    BuildConstraints,
    Formulation,
    PriorResult,
    constraint_formulation,
)
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# With more places of samples than this, CP-SAT finds nothing better than the heuristic in minutes.
MOST_PLACES = 200_000
TOO_LARGE = "too many places of samples for CP-SAT; the heuristic's decision, with its bound"
INFEASIBLE = "proven by CP-SAT: no micro-batches hold all samples"

Slot = tuple[int, int]  # (replica, micro-batch)


@dataclass(frozen=True)
class Variables:
    """The variables of the docstring, and the tokens of micro-batches as expressions."""

    samples: dict[Slot, dict[int, IntVar]]  # x
    used: dict[Slot, IntVar]
    ticks: dict[Slot, IntVar]  # t
    longest: list[IntVar]  # [R] m
    slowest: IntVar  # T
    load: dict[Slot, LinearExpr]


def make_variables(model: ConstraintModel, p: LengthsProblem, upper: float) -> Variables:
    """The variables with their domains. upper: seconds of a known decision."""
    cp = model.cp
    samples: dict[Slot, dict[int, IntVar]] = {}
    used, ticks, load = {}, {}, {}
    for r in range(p.replicas):
        alone = p.overhead[r] + p.fill_overhead[r] + p.seconds[r] + p.fill_seconds[r]
        fits = (p.tokens <= p.capacity[r]) & (alone <= upper)
        here = [i for i in range(p.samples) if fits[i]]
        for k in range(int(p.slots[r])):
            model.check()
            name = f"{r}_{k}"
            samples[r, k] = {i: cp.new_bool_var(f"x_{i}_{name}") for i in here}
            used[r, k] = cp.new_bool_var(f"used_{name}")
            ticks[r, k] = model.time(f"ticks_{name}")
            tokens = [int(p.tokens[i]) for i in here]
            load[r, k] = LinearExpr.weighted_sum(list(samples[r, k].values()), tokens)
    longest = [model.time(f"longest_{r}") for r in range(p.replicas)]
    return Variables(samples, used, ticks, longest, model.time("slowest"), load)


def place_every_sample(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (1)
    """Every sample is in one micro-batch."""
    for i in range(p.samples):
        model.cp.add_exactly_one(x[i] for x in v.samples.values() if i in x)


def keep_within_tokens(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (2)
    """A micro-batch has C_r tokens at most, and none where it is not used."""
    for (r, k), used in v.used.items():
        model.cp.add(v.load[r, k] <= int(p.capacity[r]) * used)


def ticks_of(
    model: ConstraintModel, v: Variables, slot: Slot, seconds: Floats, overhead: Floats
) -> LinearExpr:
    """The ticks of a micro-batch. seconds: [R, n] of a sample. overhead: [R] of a micro-batch."""
    members, r = v.samples[slot], slot[0]
    ticks = model.ticks([seconds[r, i] for i in members])
    of_itself = model.tick(float(overhead[r]))
    return LinearExpr.weighted_sum([*members.values(), v.used[slot]], [*ticks, of_itself])


def take_time(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (3)
    """The ticks of a micro-batch are those of its samples, and of itself."""
    for slot, ticks in v.ticks.items():
        model.check()
        model.cp.add(ticks == ticks_of(model, v, slot, p.seconds, p.overhead))


def fill_the_pipeline(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (4)
    """The longest fill is no shorter than that of any micro-batch."""
    for slot in v.ticks:
        model.check()
        fill = ticks_of(model, v, slot, p.fill_seconds, p.fill_overhead)
        model.cp.add(v.longest[slot[0]] >= fill)


def wait_for_the_slowest(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (5)
    """T is no less than the ticks of any replica."""
    for r in range(p.replicas):
        ticks = [t for (replica, _), t in v.ticks.items() if replica == r]
        model.cp.add(v.slowest >= sum(ticks) + v.longest[r])


def sort_micro_batches(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (6)
    """Symmetry breaking: the tokens of a replica's micro-batches descend."""
    for r in range(p.replicas):
        for k, after in pairwise(range(int(p.slots[r]))):
            model.cp.add(v.load[r, k] >= v.load[r, after])


def sort_replicas(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (7)
    """Symmetry breaking: the tokens of equal replicas descend."""
    last: dict[int, int] = {}  # first replica of an equal group -> the last one so far
    for r, group in enumerate(p.alike):
        if group in last:
            before, slots = last[group], range(int(p.slots[r]))
            model.cp.add(sum(v.load[before, k] for k in slots) >= sum(v.load[r, k] for k in slots))
        last[group] = r


def last_as_long_as_priced(model: ConstraintModel, p: LengthsProblem, v: Variables) -> None:  # (8)
    """Implied: T is no less than the bound by prices."""
    roundings = model.totals.roundings
    model.cp.add(v.slowest >= max(0, model.tick(p.bound) - int(roundings)))


CONSTRAINTS = (
    place_every_sample,
    keep_within_tokens,
    take_time,
    fill_the_pipeline,
    wait_for_the_slowest,
    sort_micro_batches,
    sort_replicas,
    last_as_long_as_priced,
)


def totals_of(p: LengthsProblem, upper: float) -> Totals:
    """Bounds on totals, from which the tick follows. A replica's ticks are rounded once for each of
    its samples and micro-batches, and so are those of its longest micro-batch."""
    roundings = 2 * (p.samples + int(p.slots.max()))
    return Totals(least=p.bound, largest=upper, roundings=roundings)


def build(p: LengthsProblem, upper: float, run: Run) -> BuildConstraints[LengthsDecision]:
    """A function that builds the model and the reader of its answers."""

    def make() -> tuple[ConstraintModel, "Read"]:
        # A tick more than `upper`, so that rounding does not cut off the known decision.
        model = ConstraintModel("lengths", run, totals_of(p, upper * (1 + 1e-6)))
        variables = make_variables(model, p, upper * (1 + 1e-6))
        for constrain in CONSTRAINTS:
            constrain(model, p, variables)
        model.cp.minimize(variables.slowest)
        return model, Read(p, variables)

    return make


@dataclass(frozen=True)
class Read:
    """Reads the decision of an answer."""

    problem: LengthsProblem
    variables: Variables

    def __call__(self, answer: ModelAnswer) -> LengthsDecision:
        placed: list[list[list[int]]] = [[] for _ in range(self.problem.replicas)]
        for (r, _), samples in self.variables.samples.items():
            placed[r].append([i for i, x in samples.items() if answer.value(x) == 1])
        return self.problem.decision(placed)


def formulate(
    data: LengthsData, run: Run
) -> Formulation[LengthsDecision] | Outcome[LengthsDecision]:
    """The model of an instance; the outcome where counting proves that there is no decision, or
    where the model would be too large."""
    p = LengthsProblem(data)
    reason = p.infeasible_because()
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    packing = best_packing(p, run.part())
    decision = None if packing is None else p.decision(packing.placed())
    objective = None if packing is None else packing.objective
    if p.samples * int(p.slots.sum()) > MOST_PLACES:
        return Outcome(stop=Stop.LIMIT, decision=decision, bound=p.bound, message=TOO_LARGE)
    upper = p.longest_seconds if objective is None else objective
    return constraint_formulation(
        build(p, upper, run),
        infeasible=INFEASIBLE,
        prior=PriorResult(bound=p.bound, decision=decision, objective=objective),
    )
