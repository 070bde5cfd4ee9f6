"""Columns of a model, linear expressions of them, and rows, which are comparisons of expressions.

An expression is `sum of values * columns + constant`. Columns and expressions are arrays with a
shape, and the operators work as numpy's do: they broadcast, `@` contracts, `sum` adds along an
axis. With columns `on` [job, machine] and `end`, and numbers `seconds` [job]:

    on[:, 1].sum()              how many jobs are on machine 1
    seconds @ on                [machine] seconds of each machine
    end >= seconds @ on         [machine] rows, one for each machine
    on.sum(axis=1) == 1         [job] rows

A comparison alone adds nothing to a model: `Model.row` takes the rows and names them. Python warns
of rows that were never taken, as it warns of coroutines that were never awaited.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, Literal, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Sense = Literal["<=", ">=", "=="]
# The other operand of an operator. Numbers broadcast like arrays.
Operand = Union["Linear", ArrayLike]


class Linear:
    """Base of columns and expressions: the operators."""

    __slots__ = ()
    __array_ufunc__ = None  # numpy's arrays leave their operators to this class
    __hash__ = None  # type: ignore[assignment]  # == states rows

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""

    @abstractmethod
    def expression(self) -> "Expression":
        """The same array as sums of terms."""

    @abstractmethod
    def sum(self, axis: int | None = None) -> "Expression":
        """The sum along an axis; without one, the sum of all elements."""

    def __add__(self, other: Operand) -> "Expression":
        return self.expression().plus(other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> "Expression":
        return self.expression().plus(-other if isinstance(other, Linear) else -_numbers(other))

    def __rsub__(self, other: Operand) -> "Expression":
        return (-self).plus(other)

    def __neg__(self) -> "Expression":
        same = self.expression()
        return Expression(same.columns, -same.values, -same.constant)

    def __mul__(self, other: Operand) -> "Expression":
        return self.expression().times(_factors(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> "Expression":
        return self.expression().over(_factors(other))

    def __matmul__(self, other: Operand) -> "Expression":
        """[...] self [..., n] @ numbers [n]."""
        factors = _factors(other)
        if factors.ndim != 1 or not self.shape or self.shape[-1] != len(factors):
            raise ValueError(f"columns @ numbers: got shapes {self.shape} @ {factors.shape}")
        return self.expression().times(factors).sum(axis=-1)

    def __rmatmul__(self, other: Operand) -> "Expression":
        """Numbers [n] or [m, n] @ self [n] or [n, k], in numpy's shape of the product."""
        factors = _factors(other)
        fits = factors.ndim in (1, 2) and len(self.shape) in (1, 2)
        if not fits or factors.shape[-1] != self.shape[0]:
            raise ValueError(f"numbers @ columns: got shapes {factors.shape} @ {self.shape}")
        if len(self.shape) == 1:
            return self.expression().times(factors).sum(axis=-1)
        return self.expression().times(factors[..., None]).sum(axis=-2)

    def __le__(self, other: Operand) -> "Rows":
        return Rows(self - other, "<=")

    def __ge__(self, other: Operand) -> "Rows":
        return Rows(self - other, ">=")

    def __eq__(self, other: Operand) -> "Rows":  # type: ignore[override]
        return Rows(self - other, "==")


class Expression(Linear):
    """An array of sums of terms values * columns, each sum with a constant. All have equally many
    terms."""

    __slots__ = ("columns", "constant", "values")

    def __init__(self, columns: Ints, values: Floats, constant: Any) -> None:
        self.columns = columns  # [*shape, terms] numbers of columns
        self.values = values  # [*shape, terms]
        self.constant = constant  # a number, or [*shape]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.columns.shape[:-1]

    def expression(self) -> "Expression":
        """This expression itself."""
        return self

    def broadcast_to(self, shape: tuple[int, ...]) -> "Expression":
        """The expression broadcast to a larger shape."""
        if shape == self.shape:
            return self
        with_terms = (*shape, self.columns.shape[-1])
        columns = np.broadcast_to(self.columns, with_terms)
        return Expression(columns, np.broadcast_to(self.values, with_terms), self.constant)

    def plus(self, other: Operand) -> "Expression":
        """The sum with another operand. Terms are joined, and repeated columns stay apart."""
        if not isinstance(other, Linear):
            constant = self.constant + _numbers(other)
            if isinstance(constant, float):  # both are numbers: no shape changes
                return Expression(self.columns, self.values, constant)
            here = self.broadcast_to(np.broadcast_shapes(self.shape, np.shape(constant)))
            return Expression(here.columns, here.values, constant)
        one, two = self, other.expression()
        if one.shape != two.shape:
            shape = np.broadcast_shapes(one.shape, two.shape)
            one, two = one.broadcast_to(shape), two.broadcast_to(shape)
        return Expression(
            np.concatenate([one.columns, two.columns], axis=-1),
            np.concatenate([one.values, two.values], axis=-1),
            one.constant + two.constant,
        )

    def times(self, factors: Any) -> "Expression":
        """The product with factors, which broadcast to the shape."""
        if np.ndim(factors) == 0:
            return Expression(self.columns, self.values * factors, self._constant_by(factors))
        here = self.broadcast_to(np.broadcast_shapes(self.shape, np.shape(factors)))
        values = here.values * np.expand_dims(factors, -1)
        return Expression(here.columns, values, here._constant_by(factors))

    def over(self, divisors: Any) -> "Expression":
        """The quotient by divisors, which broadcast to the shape."""
        here = self.broadcast_to(np.broadcast_shapes(self.shape, np.shape(divisors)))
        values = here.values / np.expand_dims(divisors, -1)
        return Expression(here.columns, values, here.constant / divisors)

    def _constant_by(self, factors: Any) -> Any:
        """The constant times its factor. A constant of 0 stays 0, also with an infinite factor."""
        return self.constant * factors if self._has_constant else 0.0

    @property
    def _has_constant(self) -> bool:
        """Whether the constant is an array, or a number other than 0."""
        return not isinstance(self.constant, float) or self.constant != 0

    def sum(self, axis: int | None = None) -> "Expression":
        """The sum along an axis; without one, the sum of all elements."""
        shape = self.shape
        constant = 0.0
        if self._has_constant:
            constant = np.broadcast_to(self.constant, shape).sum(axis=axis)
        if axis is None:
            return Expression(self.columns.reshape(-1), self.values.reshape(-1), constant)
        axis = range(len(shape))[axis]  # counted from the front: the terms have the last axis
        terms = shape[axis] * self.columns.shape[-1]
        summed_shape = (*shape[:axis], *shape[axis + 1 :], terms)
        return Expression(
            np.moveaxis(self.columns, axis, -2).reshape(summed_shape),
            np.moveaxis(self.values, axis, -2).reshape(summed_shape),
            constant,
        )


class Columns(Linear):
    """A block of columns of a model, or a part of one: an array of their numbers."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Ints) -> None:
        self.numbers = numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.numbers.shape

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator["Columns"]:
        return map(Columns, self.numbers)

    def __getitem__(self, place: Any) -> "Columns":
        return Columns(self.numbers[place])

    def reshape(self, *shape: int) -> "Columns":
        """The same columns in another shape."""
        return Columns(self.numbers.reshape(*shape))

    def __invert__(self) -> "Off":
        return Off(self)

    def expression(self) -> Expression:
        """The columns as sums of one term."""
        columns = self.numbers[..., None]
        return Expression(columns, np.ones(columns.shape), 0.0)

    def sum(self, axis: int | None = None) -> Expression:
        """The sum along an axis; without one, the sum of all elements."""
        columns = self.numbers.reshape(-1) if axis is None else np.moveaxis(self.numbers, axis, -1)
        return Expression(columns, np.ones(columns.shape), 0.0)


def total(parts: Iterable[Linear]) -> Expression:
    """The sum of expressions; 0 without any."""
    nothing = Expression(np.empty(0, np.int64), np.empty(0), 0.0)
    return reduce(Expression.plus, parts, nothing)


class Off:
    """The condition that these 0-1 columns are 0: `~columns`."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns


# The condition of a row: all these 0-1 columns are 1, and those in `Off` are 0.
Condition = Columns | Off | Sequence[Columns | Off]


def literals(condition: Condition) -> tuple[int, ...]:
    """The numbers of the columns that are to be 1, and `~number` of those that are to be 0."""
    if isinstance(condition, Columns):
        return tuple(condition.numbers.reshape(-1).tolist())
    if isinstance(condition, Off):
        return tuple(~number for number in literals(condition.columns))
    return tuple(number for part in condition for number in literals(part))


class Rows:
    """Rows `difference <= 0`, `>= 0` or `== 0` for each expression of an array."""

    __slots__ = ("difference", "sense", "taken")

    def __init__(self, difference: Expression, sense: Sense) -> None:
        self.difference, self.sense = difference, sense
        self.taken = False  # whether a model has taken the rows

    def take(self) -> Iterator[tuple[Ints, Floats, float]]:
        """(columns, values, right-hand side) of each row: the constant moves to the right."""
        self.taken = True
        left, shape = self.difference, self.difference.shape
        if not shape:
            return iter([(left.columns, left.values, 0.0 - float(left.constant))])
        rows_and_terms = (math.prod(shape), left.columns.shape[-1])
        columns = left.columns.reshape(rows_and_terms)
        values = left.values.reshape(rows_and_terms)
        # 0 minus the constant: a constant of 0 does not become -0
        right = np.broadcast_to(0.0 - left.constant, shape).reshape(-1)
        return zip(columns, values, right.tolist(), strict=True)

    def __bool__(self) -> bool:
        self.taken = True  # so that no warning follows the error
        raise TypeError(
            "a row is neither true nor false: state it by Model.row; a <= x <= b is two rows"
        )

    def __del__(self) -> None:
        if not self.taken:
            warnings.warn(
                "a comparison of columns states nothing: hand it to Model.row",
                RuntimeWarning,
                stacklevel=2,
            )


def _numbers(operand: Operand) -> Any:
    """An operand of numbers, as a float or an array of floats; raises TypeError for others."""
    if isinstance(operand, float | int):
        return float(operand)
    numbers = np.asarray(operand)
    if numbers.dtype.kind not in "biuf":  # truth values, whole and real numbers
        kind = type(operand).__name__
        raise TypeError(f"expected columns, expressions or numbers, got {kind}")
    return numbers.astype(float, copy=False)


def _factors(operand: Operand) -> Any:
    """An operand by which an expression may be multiplied or divided, as an array of floats."""
    if isinstance(operand, Linear):
        raise TypeError("a product of two expressions is not linear")
    return np.asarray(_numbers(operand))
