"""The CP-SAT driver: statuses, bounds, time-outs, cancellation, options."""

from __future__ import annotations

import random
import threading
import time

import pytest
from ortools.sat.python import cp_model

from hetplan.errors import InputError
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale
from hetplan.solvers.options import Options
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Progress, Run


def run(**options: object) -> Run:
    return Run(Options(**{"threads": 1, **options}))  # type: ignore[arg-type]


def hard_knapsack(
    items: int = 150, rows: int = 60
) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """A multi-dimensional knapsack that no solver closes in seconds."""
    draw = random.Random(7)
    model = cp_model.CpModel()
    x = [model.new_bool_var(f"x{i}") for i in range(items)]
    for _ in range(rows):
        weights = [draw.randint(1, 1000) for _ in x]
        model.add(sum(w * v for w, v in zip(weights, x, strict=True)) <= sum(weights) // 3)
    values = [draw.randint(100, 1000) for _ in x]
    model.minimize(sum(v * (1 - taken) for v, taken in zip(values, x, strict=True)))
    return model, x


def test_optimum_is_returned_in_the_instances_unit() -> None:
    model = cp_model.CpModel()
    x, y = model.new_int_var(0, 10, "x"), model.new_int_var(0, 10, "y")
    model.add(x + y >= 7)
    model.add(x <= 3)
    model.minimize(2 * x + 3 * y)
    answer = cpsat.solve(model, run(), Scale(per_unit=4.0, offset=1.5))
    assert answer.stop is Stop.OPTIMAL
    assert (answer.value(x), answer.value(y)) == (3, 4)
    assert answer.objective == answer.bound == 18 / 4 + 1.5
    assert answer.solver.startswith("CP-SAT 9.")


def test_bound_is_lowered_by_what_the_model_overprices() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(3, 10, "x")
    model.minimize(x)
    seen: list[Progress] = []
    watched = Run(Options(threads=1), watch=seen.append)
    answer = cpsat.solve(model, watched, Scale(under=0.25, over=0.5))
    assert (answer.objective, answer.bound) == (3.0, 2.5)
    assert (watched.incumbent, watched.bound) == (3.25, 2.5)
    assert seen


def test_infeasible_has_neither_objective_nor_bound() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 5, "x")
    model.add(x >= 6)
    model.minimize(x)
    answer = cpsat.solve(model, run())
    assert answer.stop is Stop.INFEASIBLE
    assert answer.objective is None and answer.bound is None and answer.solution is None


def test_without_an_objective_any_solution_will_do() -> None:
    model = cp_model.CpModel()
    x = [model.new_bool_var(f"x{i}") for i in range(3)]
    model.add_exactly_one(x)
    model.add(x[0] + x[2] == 0)
    answer = cpsat.solve(model, run())
    assert answer.stop is Stop.OPTIMAL
    assert answer.chosen(x) == [1]
    assert answer.bound is None


def test_invalid_model_is_an_error_that_says_why() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 2**62, "x")
    model.minimize(x + model.new_int_var(0, 2**62, "y"))
    answer = cpsat.solve(model, run())
    assert answer.stop is Stop.ERROR
    assert "domain" in answer.message


def test_time_out_keeps_incumbent_and_bound() -> None:
    model, x = hard_knapsack()
    answer = cpsat.solve(model, run(time_limit=0.6))
    assert answer.stop is Stop.LIMIT
    assert answer.objective is not None and answer.bound is not None
    assert 0 < answer.bound < answer.objective
    assert len(answer.chosen(x)) > 0


def test_time_out_without_incumbent_is_not_infeasible() -> None:
    model, _ = hard_knapsack(800, 400)
    answer = cpsat.solve(model, run(time_limit=0.02))
    assert answer.stop is Stop.LIMIT
    assert answer.objective is None
    assert answer.bound is None or answer.bound > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_cancel_keeps_what_is_known(workers: int) -> None:
    model, _ = hard_knapsack()
    going = run(threads=workers)
    threading.Timer(0.6, going.cancel.set).start()
    answer = cpsat.solve(model, going)
    assert answer.stop is Stop.INTERRUPTED
    assert answer.objective is not None and answer.bound is not None


def test_cancelled_before_the_start() -> None:
    going = run()
    going.cancel.set()
    model, _ = hard_knapsack()
    assert cpsat.solve(model, going).stop is Stop.INTERRUPTED


def test_an_exception_of_the_watcher_stops_the_search_and_comes_out() -> None:
    class Enough(Exception):
        pass

    def watch(progress: Progress) -> None:
        raise Enough

    model, _ = hard_knapsack()
    before = threading.enumerate()
    with pytest.raises(Enough):
        cpsat.solve(model, Run(Options(threads=1), watch=watch))
    mine = [t for t in threading.enumerate() if t.name == "hetplan-native" and t not in before]
    deadline = time.monotonic() + 30
    while any(t.is_alive() for t in mine):
        assert time.monotonic() < deadline, "the search goes on although nobody waits for it"
        time.sleep(0.01)


def test_watcher_is_called_from_the_methods_thread() -> None:
    callers = set()
    model, _ = hard_knapsack()
    watched = Run(
        Options(threads=2, time_limit=0.6),
        watch=lambda progress: callers.add(threading.current_thread()),
    )
    cpsat.solve(model, watched)
    assert callers == {threading.current_thread()}


def test_gap_asked_for_ends_the_search() -> None:
    model, _ = hard_knapsack(60, 5)
    answer = cpsat.solve(model, run(gap=0.5, time_limit=60))
    assert answer.stop is Stop.OPTIMAL
    assert answer.objective is not None and answer.bound is not None
    assert answer.bound <= answer.objective <= answer.bound / (1 - 0.5)


def test_native_options_reach_cpsat() -> None:
    model, _ = hard_knapsack(60, 5)
    answer = cpsat.solve(model, run(native={"cp-sat": {"stop_after_first_solution": True}}))
    assert answer.stop is Stop.LIMIT and answer.objective is not None


def enforced_rows(draw: random.Random) -> tuple[cp_model.CpModel, int]:
    """min t over choices of one member each: t >= the costs of the chosen members of the chosen
    row; its optimum."""
    members, rows, big = draw.randint(2, 4), draw.randint(2, 3), 2**31
    costs = [
        [[draw.randint(0, big) for _ in range(members)] for _ in range(2)] for _ in range(rows)
    ]
    model = cp_model.CpModel()
    choices = [[model.new_bool_var("") for _ in range(members)] for _ in range(2)]
    chosen_row = [model.new_bool_var("") for _ in range(rows)]
    for one_of in (*choices, chosen_row):
        model.add_exactly_one(one_of)
    t = model.new_int_var(0, 4 * big, "t")
    for enforced, row in zip(chosen_row, costs, strict=True):
        total = sum(
            cost * var
            for pair in zip(row, choices, strict=True)
            for cost, var in zip(*pair, strict=True)
        )
        model.add(total <= t).only_enforce_if(enforced)
    model.minimize(t)
    return model, min(sum(min(member) for member in row) for row in costs)


@pytest.mark.parametrize("seed", range(30))
def test_large_coefficients_under_enforcement_are_solved_right(seed: int) -> None:
    model, optimum = enforced_rows(random.Random(seed))
    answer = cpsat.solve(model, run())
    assert answer.stop is Stop.OPTIMAL
    assert answer.objective == pytest.approx(optimum, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("no_such_option", 1, "cp-sat.no_such_option"),
        ("linearization_level", "high", "cp-sat.linearization_level"),
        ("copy_from", 1, "cp-sat.copy_from"),
        ("__class__", 1, "cp-sat.__class__"),
    ],
)
def test_bad_native_option_is_an_input_error(name: str, value: object, says: str) -> None:
    model, _ = hard_knapsack()
    with pytest.raises(InputError, match=says):
        cpsat.solve(model, run(native={"cp-sat": {name: value}}))


def test_integer_scale_keeps_the_rounding_error_it_promises() -> None:
    factor = cpsat.integer_scale(least=0.3, largest=1.0, roundings=40, error=1e-7)
    assert 40 / (factor * 0.3) <= 1e-7 < 80 / (factor * 0.3)
    assert factor == 2.0 ** round(factor).bit_length() / 2


def test_integer_scale_never_exceeds_the_largest_total() -> None:
    factor = cpsat.integer_scale(least=1e-12, largest=1e9, roundings=10)
    assert factor * 1e9 <= cpsat.LARGEST_TOTAL
    assert cpsat.integer_scale(1e20, 1e25, 1) < 1


@pytest.mark.parametrize(("least", "largest"), [(0.0, 1.0), (2.0, 1.0), (1.0, float("inf"))])
def test_integer_scale_refuses_nonsense(least: float, largest: float) -> None:
    with pytest.raises(ValueError, match="least"):
        cpsat.integer_scale(least, largest, 1)


def test_rounding_goes_the_way_it_says() -> None:
    values = [0.1, 1.0, 2.999]
    assert cpsat.rounded_down(values, 10).tolist() == [1, 10, 29]
    assert cpsat.rounded_up(values, 10).tolist() == [1, 10, 30]
