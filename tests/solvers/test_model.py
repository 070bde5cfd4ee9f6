"""Models stated once: every writer agrees with enumeration; rounding, conditions, names,
refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from hetplan.errors import UnsupportedError
from hetplan.solvers import cpsat
from hetplan.solvers.general import (
    CONTRADICTION,
    UNBUILT,
    Formulation,
    PriorResult,
    minimise,
    solve_with,
)
from hetplan.solvers.model import Model, Totals, member_names
from hetplan.solvers.run import Options, Outcome, Run, Stop, Stopped
from stopping import cancelled_after, over

METHODS = ("cp-sat", "milp", "pyomo")
every_method = pytest.mark.parametrize("method", METHODS)


def a_run() -> Run:
    return Run(Options(threads=1))


def machines(seed: int, run: Run | None = None) -> tuple[Model, float | None]:
    """Jobs on machines: the last one done counts double, two jobs may exclude each other on a
    machine, each machine in use costs a step of a staircase. With the optimum by enumeration."""
    draw = Random(seed)
    jobs, count = draw.randint(2, 4), draw.randint(1, 3)
    seconds = [[draw.uniform(0.1, 3.0) for _ in range(count)] for _ in range(jobs)]
    apart = sorted(draw.sample(range(jobs), 2)) if draw.random() < 0.6 else None
    levels = np.cumsum([draw.choice([0.0, 0.3, 1.1]) for _ in range(count)])
    room = draw.randint(1, jobs)

    model = Model("machines", run, Totals(least=0.1, largest=40.0, roundings=2 * jobs + count))
    on = model.binary("on", (jobs, count))
    used = model.binary("used", count)
    model.row("placed", on.sum(axis=1) == 1)
    end = model.seconds("end", upper=20.0)
    for machine in range(count):
        model.row("room", on[:, machine].sum() <= room)
        values = np.array([row[machine] for row in seconds])
        model.row("end", values @ on[:, machine] <= end)
        if apart is not None:
            first, second = on[apart[0], machine], on[apart[1], machine]
            model.row("apart", second <= 0, when=first)
            model.row("also", first >= 0, when=(~second, first))
    steps = model.binary("steps", count)
    model.row("count", used.sum() == steps.sum())
    for job in on:
        for machine, column in enumerate(job):
            model.row("use", used[machine] >= 1, when=column)
    rent = model.staircase("rent", steps, levels)
    model.minimize(2 * end + rent + (np.array(seconds) * on).sum())

    best: float | None = None
    for place in itertools.product(range(count), repeat=jobs):
        if max(place.count(m) for m in range(count)) > room:
            continue
        if apart is not None and place[apart[0]] == place[apart[1]]:
            continue
        busy = [sum(seconds[j][m] for j in range(jobs) if place[j] == m) for m in range(count)]
        cost = 2 * max(busy) + sum(busy) + float(levels[len(set(place)) - 1])
        best = cost if best is None else min(best, cost)
    return model, best


@every_method
@pytest.mark.parametrize("seed", range(30))
def test_every_writer_finds_the_optimum_of_enumeration(method: str, seed: int) -> None:
    model, best = machines(seed)
    answer = minimise(method, model, a_run())
    if best is None:
        assert (answer.stop, answer.objective, answer.bound) == (Stop.INFEASIBLE, None, None)
        return
    assert answer.stop is Stop.OPTIMAL and answer.bound is not None
    assert answer.objective == pytest.approx(best, rel=1e-6)
    assert answer.bound <= best * (1 + 1e-12)
    on = answer.counts("on")
    assert (on.sum(axis=1) == 1).all()
    assert answer.values("end") * 2 < best


@every_method
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("state", [0, 1])
@pytest.mark.parametrize(("at_least", "range_of_x"), [(True, (3, 5)), (False, (0, 2))])
def test_a_row_under_a_condition_binds_where_the_condition_holds_and_nowhere_else(
    method: str,
    negated: bool,
    state: int,
    at_least: bool,
    range_of_x: tuple[int, int],
) -> None:
    """x is at least 3 under the condition, or at most 2."""
    expected = range_of_x if bool(state) != negated else (0, 5)
    reached = []
    for least in (True, False):
        model = Model("conditional", None, Totals(least=1.0, largest=10.0))
        x, rest = model.integer("x", upper=5), model.integer("rest", upper=5)
        condition = model.binary("condition")
        model.fix(condition, state)
        model.row("whole", x + rest == 5)
        row = x >= 3 if at_least else x <= 2
        model.row("conditional", row, when=~condition if negated else condition)
        model.minimize(x if least else rest)
        answer = minimise(method, model, a_run())
        assert answer.stop is Stop.OPTIMAL
        reached.append(int(answer.counts("x")))
    assert tuple(reached) == expected


def test_the_cases_cover_both_kinds() -> None:
    optima = [machines(seed)[1] for seed in range(30)]
    assert 3 <= sum(best is None for best in optima) <= 15


@pytest.mark.parametrize("seed", range(20))
def test_cp_sat_prices_no_decision_too_high(seed: int) -> None:
    """However coarse its integers are."""
    model, best = machines(seed)
    model.totals = Totals(least=0.1, largest=40.0, roundings=10, error=0.5)
    answer = cpsat.solve(model, a_run())
    if best is None:
        return
    assert answer.objective is not None and answer.bound is not None
    assert answer.objective <= best * (1 + 1e-12)
    assert answer.bound <= best


def test_levels_of_a_staircase_are_rounded_down() -> None:
    model = Model("stairs", None, Totals(least=0.1, largest=40.0, roundings=10, error=0.5))
    steps = model.binary("steps", 3)
    model.fix(steps, 1)
    model.minimize(model.staircase("t", steps, [0.3, 0.5, 0.7]))
    answer = minimise("cp-sat", model, a_run())
    assert answer.objective is not None and 0.6 < answer.objective < 0.7


def test_linear_arrays_merge_repeated_columns_and_name_members() -> None:
    model = Model("rows")
    x = model.binary("x", (2, 3))
    model.row("a", x[1, 2] + 2 * x[0, 0] + 3 * x[1, 2] <= 1)
    model.row("a", 0 * x[0].sum() <= 1)
    arrays = model.arrays()
    assert arrays.shape == (2, 6)
    assert arrays.starts.tolist() == [0, 2, 2]
    assert arrays.columns.tolist() == [0, 5] and arrays.values.tolist() == [2.0, 4.0]
    assert member_names(model.column_blocks)[5] == "x_1_2"
    assert model.row_names == ["a", "a"]


def test_times_are_scaled_for_double_precision_and_stay_for_integers() -> None:
    model = Model("scaled", None, Totals(least=1e-6, largest=2e-6))
    x, t = model.integer("x", upper=3), model.seconds("t")
    model.row("busy", 1e-6 * x <= t)
    model.row("tiny", 1e-22 * x <= t)
    model.row("some", x >= 2)
    model.minimize(t)
    arrays, unit = model.arrays(), model.milp_scale().per_unit
    assert 512 <= 1e-6 * unit <= 1024
    assert arrays.values.tolist() == [1e-6 * unit, -1.0, -1.0, 1.0]
    assert arrays.cost.tolist() == [0.0, 1.0]
    for method in METHODS:
        assert minimise(method, model, a_run()).objective == pytest.approx(2e-6, rel=1e-6)


def unbounded_condition(model: Model) -> None:
    x, y = model.binary("x"), model.integer("y")
    model.row("loose", y >= -5, when=x)
    model.row("loose", y <= 5, when=x)


def fractional_seconds(model: Model) -> None:
    x, t = model.binary("x"), model.seconds("t")
    model.row("half", x + 0.5 * t >= 1)


def real_column(model: Model) -> None:
    model.continuous("y", upper=1.0)


def fractional_cost(model: Model) -> None:
    model.minimize(0.5 * model.seconds("t"))


@pytest.mark.parametrize(
    ("state", "method"),
    [
        (unbounded_condition, "milp"),
        (unbounded_condition, "cp-sat"),
        (fractional_seconds, "cp-sat"),
        (fractional_cost, "cp-sat"),
        (real_column, "cp-sat"),
    ],
)
def test_what_a_writer_cannot_say_is_refused(state: Callable[[Model], None], method: str) -> None:
    model = Model("refused", None, Totals(least=1.0, largest=10.0))
    state(model)
    with pytest.raises(ValueError, match="refused"):
        minimise(method, model, a_run())


def test_a_condition_needs_one_bound() -> None:
    model = Model()
    x = model.binary("x", 2)
    with pytest.raises(ValueError, match="one bound"):
        model.row("both", x[0] == 1, when=x[1])


@pytest.mark.parametrize("coefficient", [1e-12, 1e18, float("inf")])
def test_coefficients_beyond_doubles_are_refused(coefficient: float) -> None:
    model = Model("wild")
    x = model.binary("x", (2,))
    model.row("wild", x[0] + coefficient * x[1] <= 1)
    with pytest.raises(UnsupportedError, match="wild"):
        minimise("milp", model, a_run())


def test_a_model_stops_between_its_pieces() -> None:
    model = Model("stopped", cancelled_after(10))
    x = model.binary("x", (5,))
    for _ in range(9):  # one look went to the columns
        model.row("any", x.sum() <= 3)
    with pytest.raises(Stopped):
        model.row("any", x.sum() <= 3)
    with pytest.raises(Stopped):
        model.binary("y")
    with pytest.raises(Stopped):
        model.arrays()
    with pytest.raises(Stopped):
        cpsat.write(model)


# From a model to an outcome. The model's optimum is 4.


def posed(
    known: PriorResult[str] | None = None, least: float = 4.0
) -> Callable[[object, Run], Formulation[str]]:
    def formulate(data: object, run: Run) -> Formulation[str]:
        def build() -> Model:
            model = Model("four", run, Totals(least=1.0, largest=8.0))
            x = model.integer("x", upper=5)
            model.row("least", x >= least)
            model.minimize(x)
            return model

        return Formulation(
            build=build,
            read=lambda answer: f"solver's {answer.counts('x')}",
            infeasible="because",
            prior=known or PriorResult(),
        )

    return formulate


KNOWN: PriorResult[str] = PriorResult(bound=2.0, decision="known", objective=5.0)


@every_method
def test_a_formulation_becomes_an_outcome(method: str) -> None:
    run = a_run()
    outcome = solve_with(method, posed(), None, run)
    assert (outcome.stop, outcome.decision) == (Stop.OPTIMAL, "solver's 4")
    assert outcome.bound == pytest.approx(4.0, rel=1e-6)
    assert outcome.solver.split()[0] in ("CP-SAT", "HiGHS", "highs")


@every_method
def test_what_is_known_is_the_answer_when_there_is_no_time_to_build(method: str) -> None:
    outcome = solve_with(method, posed(KNOWN), None, over())
    assert (outcome.stop, outcome.decision, outcome.bound) == (Stop.LIMIT, "known", 2.0)
    assert outcome.message == UNBUILT
    assert solve_with(method, posed(KNOWN), None, cancelled_after(0)).stop is Stop.INTERRUPTED


@pytest.mark.parametrize(
    ("objective", "decision"), [(None, "solver's 4"), (5.0, "solver's 4"), (3.0, "known")]
)
def test_the_better_decision_counts(objective: float | None, decision: str) -> None:
    known = PriorResult(bound=3.5, decision="known", objective=objective)
    watched = a_run()
    outcome = solve_with("cp-sat", posed(known), None, watched)
    assert outcome.decision == decision
    assert outcome.bound == 4.0
    assert watched.bound == 4.0 and watched.incumbent is not None


@every_method
def test_an_infeasible_answer_has_no_bound_and_contradicts_a_known_decision(method: str) -> None:
    outcome = solve_with(method, posed(PriorResult(bound=1.0), least=6.0), None, a_run())
    assert (outcome.stop, outcome.decision, outcome.bound) == (Stop.INFEASIBLE, None, None)
    assert outcome.message == "because"
    outcome = solve_with(method, posed(KNOWN, least=6.0), None, a_run())
    assert (outcome.stop, outcome.decision, outcome.bound) == (Stop.ERROR, "known", 2.0)
    assert outcome.message == CONTRADICTION


def test_what_needs_no_model_asks_no_solver() -> None:
    outcome: Outcome[str] = solve_with(
        "milp", lambda data, run: Outcome(stop=Stop.INFEASIBLE, message="too few"), None, a_run()
    )
    assert (outcome.stop, outcome.message) == (Stop.INFEASIBLE, "too few")
    assert outcome.solver.startswith("HiGHS") and math.isfinite(outcome.build_seconds)
