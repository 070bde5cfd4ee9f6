"""Problem `astra` as one CP-SAT model; sets, variables and the numbered constraints stand in
`counted`.

Seconds become integers by rounding down, so the model prices no decision too high and its bound
holds as it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from hetplan.formulations.astra.counted import Kinds, known_before
from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import compile_problem, decision_of, infeasible_because
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.whole import Whole


@dataclass(frozen=True)
class Variables:
    """w, reach, pick [Q] (pick empty unless equal layers are asked for) and theta, in integer time
    units."""

    w: list[cp_model.IntVar]
    reach: list[cp_model.IntVar]
    pick: list[cp_model.IntVar]
    theta: cp_model.IntVar


def make_variables(cp: cp_model.CpModel, kinds: Kinds, seconds: list[int]) -> Variables:
    """All variables with their bounds."""
    count = range(len(seconds))
    return Variables(
        w=[cp.new_int_var(0, int(kinds.most[q]), f"w{q}") for q in count],
        reach=[cp.new_bool_var(f"reach{q}") for q in count],
        pick=[cp.new_bool_var(f"pick{q}") for q in count] if kinds.problem.equal else [],
        theta=cp.new_int_var(min(seconds), max(seconds), "theta"),
    )


def fill_all_stages(cp: cp_model.CpModel, kinds: Kinds, v: Variables) -> None:  # (1)
    """As many stages as the pipeline has."""
    cp.add(sum(v.w) == kinds.problem.P)


def place_all_layers(cp: cp_model.CpModel, kinds: Kinds, v: Variables) -> None:  # (2)
    """Every layer on one stage."""
    cp.add(cp_model.LinearExpr.weighted_sum(v.w, [int(x) for x in kinds.layers]) == kinds.problem.N)


def keep_to_devices(cp: cp_model.CpModel, kinds: Kinds, v: Variables) -> None:  # (3)
    """No type carries more stages than it has device groups."""
    for i, most in enumerate(kinds.problem.most_stages):
        cp.add(sum(v.w[q] for q in kinds.of(i)) <= int(most))


def mark_what_is_reached(cp: cp_model.CpModel, kinds: Kinds, v: Variables) -> None:  # (4)
    """A type whose stages have x layers or more has reached x."""
    for q in range(len(v.w)):
        cp.add(sum(v.w[r] for r in kinds.at_least(q)) <= int(kinds.most[q]) * v.reach[q])


def cover_slowest_stage(cp: cp_model.CpModel, seconds: list[int], v: Variables) -> None:  # (5)
    """theta is no less than any stage's time."""
    for reached, value in zip(v.reach, seconds, strict=True):
        cp.add(v.theta >= value).only_enforce_if(reached)


# (7)
def outlast_the_average(
    cp: cp_model.CpModel, kinds: Kinds, seconds: list[int], v: Variables
) -> None:
    """The slowest stage takes no less than the average one."""
    cp.add(kinds.problem.P * v.theta >= cp_model.LinearExpr.weighted_sum(v.w, seconds))


def one_number_per_type(cp: cp_model.CpModel, kinds: Kinds, v: Variables) -> None:  # (6)
    """With equal layers per type, each type picks one number of layers."""
    for q, picked in enumerate(v.pick):
        cp.add(v.w[q] <= int(kinds.most[q]) * picked)
    if v.pick:
        for i in range(kinds.problem.M):
            cp.add_at_most_one(v.pick[q] for q in kinds.of(i))


@dataclass(frozen=True)
class Model:
    """The CP-SAT model and its variables."""

    cp: cpsat.Model
    v: Variables


def build(kinds: Kinds, seconds: list[int], run: Run) -> Model:
    """The whole model; seconds [Q] in integer time units. Raises `Stopped` when `run` should
    stop."""
    cp = cpsat.Model(run)
    v = make_variables(cp, kinds, seconds)
    for constrain in (
        fill_all_stages,
        place_all_layers,
        keep_to_devices,
        mark_what_is_reached,
        one_number_per_type,
    ):
        constrain(cp, kinds, v)
    cover_slowest_stage(cp, seconds, v)
    outlast_the_average(cp, kinds, seconds, v)
    cp.minimize(cp_model.LinearExpr.weighted_sum(v.w, seconds) + (kinds.problem.K - 1) * v.theta)
    return Model(cp, v)


def solve(data: AstraData, run: Run) -> Outcome[AstraDecision]:
    """Proven optimum up to the rounding stated in the bound, or what there is when time runs
    out."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        spent = time.perf_counter() - begun
        return Outcome(
            stop=Stop.INFEASIBLE, message=reason, build_seconds=spent, solver=cpsat.SOLVER
        )
    kinds = Kinds(problem)
    lower, upper = kinds.range
    roundings = problem.P + problem.K - 1
    per_unit = (
        cpsat.integer_scale(min(upper, max(lower, upper * 1e-6)), upper, roundings)
        if upper > 0
        else 1.0
    )
    seconds = [int(a) for a in cpsat.rounded_down(kinds.seconds, per_unit)]

    def read(model: Model, answer: cpsat.CpAnswer) -> AstraDecision:
        counts = np.array([answer.value(w) for w in model.v.w])
        return decision_of(problem, kinds.stages(counts))

    return Whole(
        build=lambda: build(kinds, seconds, run),
        ask=lambda model: cpsat.solve(
            model.cp, run, Scale(per_unit=per_unit, under=roundings / per_unit)
        ),
        read=read,
        solver=cpsat.SOLVER,
        infeasible="CP-SAT proves that no layers per type add up",
        known=known_before(kinds),
    ).solve(run, begun)
