"""A mixed-integer linear programme written once, for HiGHS directly and for every solver behind
Pyomo.

    min  c x + constant    s.t.  row_lower <= A x <= row_upper,  lower <= x <= upper,  x_i integer
    for some i

Columns come in named families with a shape (`x = model.binary("x", (D, P))` gives an integer array
of column numbers), rows in families named after the constraint they state. Absent bounds are None.
Scale the data before it comes here: coefficients beyond 1e-9 … 1e15 are refused because
double-precision solvers drop or distort them without a word. A model that is built for a run stops
building when the run should stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import UnsupportedError
from hetplan.solvers.native import Answer
from hetplan.solvers.run import Run

Columns = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = int | Sequence[int]
SMALLEST, LARGEST = 1e-9, 1e15


@dataclass(frozen=True)
class LinearArrays:
    """The programme as arrays: n columns, m rows, A by rows (row r: entries starts[r] to starts[r +
    1])."""

    cost: Floats
    constant: float
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    starts: Columns
    columns: Columns
    values: Floats
    row_lower: Floats
    row_upper: Floats

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.row_lower), len(self.cost)


@dataclass(frozen=True)
class Family:
    """A named block of columns or rows: `size` of them from number `first` on."""

    name: str
    first: int
    size: int
    shape: tuple[int, ...]

    def label(self, number: int) -> str:
        """The name of one member, safe for LP and MPS files: `x_3_1`."""
        if not self.shape:
            return self.name
        return "_".join(
            [self.name, *(str(i) for i in np.unravel_index(number - self.first, self.shape))]
        )


class LinearModel:
    """Collects columns, rows and costs; `arrays()` is what the back ends read.

    run: whose time building takes; columns, rows and arrays raise `Stopped` once it should stop.
    """

    def __init__(self, name: str = "model", run: Run | None = None) -> None:
        self.name = name
        self._check: Callable[[], None] = _nobody_asks if run is None else run.check
        self.constant = 0.0
        self.start: Floats | None = None  # a known solution [n], for back ends that can use one
        self.column_families: list[Family] = []
        self.row_families: list[Family] = []
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._costs: list[tuple[Columns, Floats]] = []
        self._fixed: list[tuple[Columns, float]] = []
        self._integer: list[NDArray[np.bool_]] = []
        self._size = 0
        self._rows: list[tuple[Columns, Floats]] = []
        self._row_bounds: list[tuple[float, float]] = []

    @property
    def size(self) -> int:
        """Number of columns so far."""
        return self._size

    def continuous(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
    ) -> Columns:
        """Real columns of that shape; bounds broadcast, None is no bound. Returns their numbers."""
        return self._add_columns(name, shape, lower, upper, integer=False)

    def integer(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
    ) -> Columns:
        """Integer columns."""
        return self._add_columns(name, shape, lower, upper, integer=True)

    def binary(self, name: str, shape: Shape = ()) -> Columns:
        """0-1 columns."""
        return self._add_columns(name, shape, 0.0, 1.0, integer=True)

    def _add_columns(
        self,
        name: str,
        shape: Shape,
        lower: ArrayLike | None,
        upper: ArrayLike | None,
        *,
        integer: bool,
    ) -> Columns:
        self._check()
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(dimensions, dtype=np.int64))

        def spread(bound: ArrayLike | None, none: float) -> Floats:
            values = np.asarray(none if bound is None else bound, dtype=float)
            return np.broadcast_to(values, dimensions).reshape(count).astype(float)

        self.column_families.append(Family(name, self._size, count, dimensions))
        self._lower.append(spread(lower, -np.inf))
        self._upper.append(spread(upper, np.inf))
        self._integer.append(np.full(count, integer))
        numbers = np.arange(self._size, self._size + count, dtype=np.int64).reshape(dimensions)
        self._size += count
        return numbers

    def minimize(self, columns: ArrayLike, costs: ArrayLike = 1.0) -> None:
        """Add costs * columns (broadcast against each other) to the objective."""
        self._costs.append(_paired(columns, costs))

    def fix(self, columns: ArrayLike, value: float) -> None:
        """Set both bounds of the columns to `value`."""
        self._fixed.append((np.asarray(columns, dtype=np.int64), value))

    def row(
        self,
        family: str,
        columns: ArrayLike,
        values: ArrayLike = 1.0,
        *,
        lower: float | None = None,
        upper: float | None = None,
    ) -> int:
        """One row lower <= sum(values * columns) <= upper; returns its number.

        columns and values broadcast against each other; repeated columns add up.
        """
        self._check()
        number = len(self._rows)
        self._rows.append(_paired(columns, values))
        self._row_bounds.append(
            (-np.inf if lower is None else lower, np.inf if upper is None else upper)
        )
        last = self.row_families[-1] if self.row_families else None
        if last is not None and last.name == family:
            size = last.size + 1
            self.row_families[-1] = Family(family, last.first, size, (size,))
        else:
            self.row_families.append(Family(family, number, 1, (1,)))
        return number

    def equal(self, family: str, columns: ArrayLike, values: ArrayLike = 1.0, *, to: float) -> int:
        """One row sum(values * columns) = to."""
        return self.row(family, columns, values, lower=to, upper=to)

    def arrays(self) -> LinearArrays:
        """The programme so far; raises UnsupportedError where coefficients are too small or too
        large."""
        merged = []
        for columns, values in self._rows:
            self._check()
            merged.append(_merged(columns, values))
        starts = np.zeros(len(merged) + 1, dtype=np.int64)
        np.cumsum([len(columns) for columns, _ in merged], out=starts[1:])
        bounds = np.array(self._row_bounds, dtype=float).reshape(-1, 2)
        cost, lower, upper = np.zeros(self._size), _joined(self._lower), _joined(self._upper)
        for numbers, costs in self._costs:
            np.add.at(cost, numbers, costs)
        for numbers, value in self._fixed:
            lower[numbers] = upper[numbers] = value
        result = LinearArrays(
            cost=cost,
            constant=self.constant,
            lower=lower,
            upper=upper,
            integer=np.concatenate([np.zeros(0, dtype=bool), *self._integer]),
            starts=starts,
            columns=np.concatenate(
                [np.zeros(0, dtype=np.int64), *(columns for columns, _ in merged)]
            ),
            values=_joined([values for _, values in merged]),
            row_lower=bounds[:, 0].copy(),
            row_upper=bounds[:, 1].copy(),
        )
        self._check_magnitudes(result)
        return result

    def _check_magnitudes(self, arrays: LinearArrays) -> None:
        for where, entries in (("constraints", arrays.values), ("objective", arrays.cost)):
            sizes = np.abs(entries[entries != 0])
            if sizes.size and not (sizes.min() >= SMALLEST and sizes.max() <= LARGEST):
                raise UnsupportedError(
                    f"coefficients of the {where} span {sizes.min():.3g} to {sizes.max():.3g}",
                    where=f"linear model {self.name}",
                    expected=f"{SMALLEST:g} to {LARGEST:g}; the methods cp-sat and exact do not need that",
                )


@dataclass(frozen=True, kw_only=True)
class MilpAnswer(Answer):
    """An answer with the incumbent's columns (integers made whole) and, for an optimal LP, its
    duals.

    x [n]; row_dual [m], column_dual [n] in objective units per unit of the row or column.
    """

    x: NDArray[np.float64] | None = None
    row_dual: NDArray[np.float64] | None = None
    column_dual: NDArray[np.float64] | None = None

    def values(self, columns: Any) -> Any:
        """The incumbent at those columns (an array of their shape, or a float)."""
        assert self.x is not None, "no incumbent to read"
        return self.x[columns]


def _nobody_asks() -> None:
    """A model built for no run has all the time it wants."""


def _joined(parts: Sequence[Any]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _paired(columns: ArrayLike, values: ArrayLike) -> tuple[Columns, Floats]:
    """Column numbers and values of equal length, broadcast and flat."""
    numbers, entries = np.broadcast_arrays(
        np.asarray(columns, dtype=np.int64), np.asarray(values, dtype=float)
    )
    return numbers.ravel(), entries.ravel()


def _merged(columns: Columns, values: Floats) -> tuple[Columns, Floats]:
    """Ascending distinct columns, values of repeated ones added, zeros dropped."""
    if len(columns) > 1 and not (np.diff(columns) > 0).all():
        distinct, where = np.unique(columns, return_inverse=True)
        values = np.bincount(where, weights=values, minlength=len(distinct)).astype(float)
        columns = distinct
    kept = values != 0
    return (columns, values) if kept.all() else (columns[kept], values[kept])
