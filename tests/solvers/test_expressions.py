"""Expressions and rows of columns: every operator against numpy at drawn points, and wrong uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetplan.solvers.expressions import Linear, Rows, total
from hetplan.solvers.model import Model

# Of the columns of `stated()`, in their order.
POINT = np.array([0.5, -2.0, 3.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0, 29.0])
WEIGHTS = np.array([2.0, -3.0])
TABLE = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])


def stated() -> tuple[Model, dict[str, Any]]:
    """Columns of every shape that formulations use."""
    model = Model("m")
    return model, {
        "t": model.continuous("t", (), None),
        "x": model.continuous("x", 3, None),
        "y": model.continuous("y", (2, 3), None),
    }


def at_point(operand: Linear) -> Any:
    """What an expression is at POINT, by its own terms."""
    expression = operand.expression()
    return (expression.values * POINT[expression.columns]).sum(axis=-1) + expression.constant


# Each formula is computed twice: of columns, and of numpy's arrays of their values.
FORMULAS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "column": lambda t, x, y: t + 0,
    "index": lambda t, x, y: y[1, 2] + 0,
    "slice": lambda t, x, y: y[:, 1] + 0,
    "mask": lambda t, x, y: x[np.array([True, False, True])] + 0,
    "new axis": lambda t, x, y: x[:, None] + y[0],
    "reshape": lambda t, x, y: y.reshape(3, 2) + 0,
    "flat": lambda t, x, y: y.reshape(-1) + 0,
    "sum": lambda t, x, y: y.sum(),
    "sum of rows": lambda t, x, y: y.sum(axis=0),
    "sum of columns": lambda t, x, y: y.sum(axis=-1),
    "sum of nothing": lambda t, x, y: x[:0].sum() + t,
    "sum of an expression": lambda t, x, y: (y + TABLE).sum(),
    "sum of an expression's rows": lambda t, x, y: (y * 2 + TABLE).sum(axis=0),
    "sum of an expression's columns": lambda t, x, y: (x + y + 5).sum(axis=1),
    "sum of a sum": lambda t, x, y: (y.sum(axis=0) + 1).sum(),
    "add": lambda t, x, y: x + y,
    "add a number": lambda t, x, y: x + 4,
    "add to a number": lambda t, x, y: 4 + x,
    "add an array": lambda t, x, y: x + TABLE[0],
    "add to an array": lambda t, x, y: TABLE + x,
    "add an array to one": lambda t, x, y: t + TABLE,
    "subtract": lambda t, x, y: t - y,
    "subtract an expression": lambda t, x, y: y - (x + 1),
    "subtract a number": lambda t, x, y: x - 4,
    "subtract from a number": lambda t, x, y: 4 - x,
    "subtract from an array": lambda t, x, y: TABLE - (x + 1),
    "subtract from numpy's number": lambda t, x, y: np.float64(0.25) - t,
    "minus": lambda t, x, y: -(x + 3),
    "times a number": lambda t, x, y: (x + 1) * 3,
    "a number times": lambda t, x, y: 3 * (x + 1),
    "numpy's number times": lambda t, x, y: np.float64(0.25) * (x + 1),
    "an array times": lambda t, x, y: TABLE * (x + 1),
    "an array times one": lambda t, x, y: TABLE * (t - 2),
    "truth values times": lambda t, x, y: np.array([[True], [False]]) * (y + 1),
    "over a number": lambda t, x, y: (x + 1) / 4,
    "over an array": lambda t, x, y: (x + 1) / TABLE,
    "numbers @ columns": lambda t, x, y: TABLE[0] @ x,
    "numbers @ block": lambda t, x, y: WEIGHTS @ y,
    "table @ columns": lambda t, x, y: TABLE @ x,
    "table @ block": lambda t, x, y: TABLE.T @ y,
    "numbers @ expression": lambda t, x, y: TABLE[0] @ (x + 1),
    "block @ numbers": lambda t, x, y: y @ TABLE[1],
    "expression @ numbers": lambda t, x, y: (y + 2) @ TABLE[1],
    "nothing @ nothing": lambda t, x, y: np.zeros(0) @ x[:0] + t,
    "column twice": lambda t, x, y: x[0] + 2 * x[0] - t,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_every_operator_agrees_with_numpy(name: str) -> None:
    _, columns = stated()
    expected = FORMULAS[name](POINT[0], POINT[1:4], POINT[4:].reshape(2, 3))
    found = FORMULAS[name](columns["t"], columns["x"], columns["y"])
    assert found.shape == np.shape(expected)
    assert np.array_equal(at_point(found), expected)


def test_parts_are_added_up() -> None:
    _, columns = stated()
    t, x = columns["t"], columns["x"]
    assert at_point(total([t, x.sum(), 2 * t + 1])) == 0.5 + 8.0 + 2.0
    assert at_point(total(part + 1 for part in x)) == 8.0 + 3
    assert at_point(total([])) == 0.0


def test_a_block_is_walked_by_its_first_axis() -> None:
    _, columns = stated()
    assert [row.numbers.tolist() for row in columns["y"]] == [[4, 5, 6], [7, 8, 9]]
    assert (len(columns["y"]), columns["y"].shape) == (2, (2, 3))


def rows_of(model: Model) -> list[tuple[str, list[int], list[float], float, float]]:
    return [
        (name, row.columns.tolist(), row.values.tolist(), row.lower, row.upper)
        for name, row in zip(model.row_names, model.rows, strict=True)
    ]


def test_constants_move_to_the_right_and_the_sense_stays() -> None:
    model, columns = stated()
    t, x = columns["t"], columns["x"]
    inf, five = float("inf"), 5.0
    model.row("a", t + 1 >= 2 * x[0] - 3)
    model.row("b", five >= t)
    model.row("c", five <= t)
    model.row("d", x[1] - 0.25 == t + 0.5)
    model.row("e", np.float64(2.0) >= x[2])
    assert rows_of(model) == [
        ("a", [0, 1], [1.0, -2.0], -4.0, inf),
        ("b", [0], [1.0], -inf, 5.0),
        ("c", [0], [1.0], 5.0, inf),
        ("d", [0, 2], [-1.0, 1.0], 0.75, 0.75),
        ("e", [3], [1.0], -inf, 2.0),
    ]


def test_a_right_hand_side_of_zero_has_no_sign() -> None:
    model, columns = stated()
    model.row("a", columns["t"] <= 0)
    model.row("a", columns["x"][:1] <= 0)
    model.row("a", columns["x"][:1] <= np.zeros(1))
    assert [str(row.upper) for row in model.rows] == ["0.0", "0.0", "0.0"]


@pytest.mark.filterwarnings("error")
def test_an_infinite_value_makes_no_constant() -> None:
    model, columns = stated()
    model.row("a", float("inf") * columns["t"] <= 1)
    model.row("a", np.full(1, float("inf")) @ columns["x"][:1] <= 1)
    assert [row.upper for row in model.rows] == [1.0, 1.0]


def test_arrays_of_rows_are_stated_one_by_one_in_order() -> None:
    model, columns = stated()
    t, x, y = columns["t"], columns["x"], columns["y"]
    inf = float("inf")
    model.row("block", t >= x[:2] + np.array([1.0, 2.0]))
    model.row("table", y[:, :2] <= np.array([[1.0], [2.0]]))
    model.row("array", np.array([3.0, 4.0]) == y[:, 0])
    model.row("none", x[:0] <= 1)
    assert rows_of(model) == [
        ("block", [0, 1], [1.0, -1.0], 1.0, inf),
        ("block", [0, 2], [1.0, -1.0], 2.0, inf),
        ("table", [4], [1.0], -inf, 1.0),
        ("table", [5], [1.0], -inf, 1.0),
        ("table", [7], [1.0], -inf, 2.0),
        ("table", [8], [1.0], -inf, 2.0),
        ("array", [4], [1.0], 3.0, 3.0),
        ("array", [7], [1.0], 4.0, 4.0),
    ]


def test_every_row_of_an_array_holds_under_the_condition() -> None:
    model = Model("m")
    on, x = model.binary("on", 3), model.integer("x", 2)
    model.row("one", x <= 1, when=on[0])
    model.row("both", x[0] <= 1, when=on[:2])
    model.row("off", x[0] <= 1, when=~on[2])
    model.row("mixed", x[0] <= 1, when=[on[0], ~on[1:]])
    model.row("always", x[0] <= 1, when=on[:0])
    assert [row.when for row in model.rows] == [(0,), (0,), (0, 1), (~2,), (0, ~1, ~2), ()]


def test_columns_that_occur_twice_add_up_and_zeros_go() -> None:
    model, columns = stated()
    t, x = columns["t"], columns["x"]
    model.row("a", x[2] + t + 2 * x[2] - t + 0 * x[1] <= 0)
    assert rows_of(model) == [("a", [3], [3.0], -float("inf"), 0.0)]


def test_costs_add_up_with_their_constants() -> None:
    model, columns = stated()
    model.minimize(2 * columns["t"] + columns["x"].sum() + 1.5)
    model.minimize(columns["t"] - 1)
    assert model.costs().tolist() == [3.0, 1.0, 1.0, 1.0, 0, 0, 0, 0, 0, 0]
    assert model.constant == 0.5


WRONG: dict[str, tuple[type[Exception], str, Callable[[Any, Any, Any], object]]] = {
    "product": (TypeError, "not linear", lambda m, t, x: t * x),
    "product of expressions": (TypeError, "not linear", lambda m, t, x: (t + 1) * (x + 1)),
    "columns @ columns": (TypeError, "not linear", lambda m, t, x: x @ x),
    "quotient": (TypeError, "not linear", lambda m, t, x: x / (t + 1)),
    "truth": (TypeError, "neither true nor false", lambda m, t, x: bool(t <= 1)),
    "chain": (TypeError, "two rows", lambda m, t, x: m.row("a", 0 <= t <= 1)),
    "unequal": (TypeError, "neither true nor false", lambda m, t, x: t != 1),
    "text": (TypeError, "got str", lambda m, t, x: t + "1"),
    "list of columns": (TypeError, "got list", lambda m, t, x: t + [x]),  # noqa: RUF005
    "strict": (TypeError, "not supported", lambda m, t, x: t < 1),
    "numbers compared": (TypeError, "a: expected a comparison", lambda m, t, x: m.row("a", True)),
    "expression as row": (TypeError, "a: expected a comparison", lambda m, t, x: m.row("a", t)),
    "other lengths": (ValueError, "mismatch", lambda m, t, x: x + x[:2]),
    "other numbers": (ValueError, "mismatch", lambda m, t, x: x <= np.ones(2)),
    "numbers of another length": (ValueError, r"\(2,\) @ \(3,\)", lambda m, t, x: np.ones(2) @ x),
    "columns of another length": (ValueError, r"\(3,\) @ \(2,\)", lambda m, t, x: x @ np.ones(2)),
    "one @ numbers": (ValueError, r"\(\) @ \(2,\)", lambda m, t, x: t @ np.ones(2)),
    "array as cost": (ValueError, r"m: a cost of shape \(3,\)", lambda m, t, x: m.minimize(x)),
    "hash": (TypeError, "unhashable", lambda m, t, x: {t: 1}),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_are_refused_in_words(name: str) -> None:
    kind, words, use = WRONG[name]
    model, columns = stated()
    with pytest.raises(kind, match=words):
        use(model, columns["t"], columns["x"])
    assert model.rows == []


def test_an_equation_under_a_condition_is_refused() -> None:
    model, columns = stated()
    on = model.binary("on")
    with pytest.raises(ValueError, match="a: a row under a condition"):
        model.row("a", columns["t"] == 1, when=on)
    assert model.rows == []


def test_a_comparison_that_nobody_takes_is_warned_of() -> None:
    _, columns = stated()
    with pytest.warns(RuntimeWarning, match=r"hand it to Model\.row") as caught:
        columns["t"] <= 1  # noqa: B015
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_stated_rows_are_not_warned_of() -> None:
    model, columns = stated()
    model.row("a", columns["x"] <= 1)
    rows = columns["t"] <= 1
    assert isinstance(rows, Rows)
    model.row("b", rows)
    del rows
    assert len(model.rows) == 4
