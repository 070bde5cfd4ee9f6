"""A model stated once: columns, rows and costs by name, for CP-SAT, HiGHS, Pyomo and model files.

    min  sum of costs * columns    s.t.  lower <= sum of values * columns <= upper   for every row

Columns come in named blocks with a shape. Rows are comparisons of linear expressions, written as
numpy's arrays are; `expressions` has the operators. A row may hold only `when` some 0-1 columns are
1 (`~column`: when it is 0). An example, one job of two seconds and one of three on two machines:

    model = Model("jobs", run, Totals(least=2.5, largest=5.0, roundings=2))
    seconds = np.array([2.0, 3.0])                        # [job]
    on = model.binary("on", (2, 2))                       # [job, machine]
    end = model.seconds("end")                            # time of the slowest machine
    for job in range(2):
        model.row("placed", on[job].sum() == 1)           # (1)
    for machine in range(2):
        model.row("slowest", end >= seconds @ on[:, machine])  # (2)
    model.row("apart", on[0, 1] <= 0, when=on[1, 1])      # (3)
    model.minimize(end)
    answer = hetplan.solvers.general.minimise("cp-sat", model, run)
    answer.objective, answer.values("on")                 # 3.0, [[1, 0], [0, 1]] or the like

Units and rounding:
- Everything that adds up with a `seconds` column is in SI seconds: the column itself, the values of
  other columns in its rows, and the costs of other columns.
- Writers scale seconds: for double-precision solvers by one power of two that brings the objective
  to about 1e3 (`milp_scale`), for CP-SAT to integers, by `Totals` (see `cpsat.write`).
- Rows are kept with all columns on the left and the constant on the right, in the sense that they
  are compared by.
- Rounding only relaxes a row: values in `<=` rows are rounded down, in `>=` rows up, in equations
  towards 0, and costs down. No decision is priced too high, so that the model's bound holds as it
  is. Rows and costs in whole numbers pass unchanged.
- A model must therefore keep to three rules. A column whose values are not whole is never negative.
  The values and the cost of a `seconds` column itself are whole numbers. Rows bound a `seconds`
  column from below only, as those do that state the time of a slowest stage.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.errors import UnsupportedError
from hetplan.solvers.expressions import Columns, Condition, Floats, Ints, Linear, Rows, literals
from hetplan.solvers.native import Scale
from hetplan.solvers.run import Run, Stop

Shape = int | Sequence[int]
# The properties of a column: its bounds, whether it is integer, whether it is in seconds, and its
# grid (0 where there is none).
PROPERTIES = np.dtype(
    [("lower", float), ("upper", float), ("integer", bool), ("seconds", bool), ("grid", float)]
)
# Double-precision solvers drop or distort coefficients beyond these without a word.
SMALLEST, LARGEST = 1e-9, 1e15


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Bounds on a model's totals, by which the writers choose their units."""

    least: float  # seconds, a lower bound on the objective without offset; 0 where none is known
    largest: float  # seconds, an upper bound on every total of the model that matters
    roundings: float = 1.0  # number of values, each rounded down, in one objective value
    # their rounding error at most, relative to the objective: small beside a gap of 1e-6
    error: float = 5e-8
    offset: float = 0.0  # seconds that every decision costs beside the model's objective


@dataclass(frozen=True)
class Block:
    """A named block of columns."""

    name: str
    first: int  # the number of its first column; the others follow
    size: int  # number of columns
    shape: tuple[int, ...]


def member_names(blocks: list[Block]) -> list[str]:
    """The names of all columns, in order, such as `x_3_1`; they are safe for LP and MPS files.

    Where a block has the name of an earlier one, its columns are numbered on from the earlier ones.
    """
    names: list[str] = []
    seen = Counter[str]()  # block name -> columns so far
    for block in blocks:
        before = seen[block.name]
        indices: Iterable[tuple[int, ...]] = np.ndindex(block.shape)
        if before:
            indices = ((before + number,) for number in range(block.size))
        for index in indices:
            names.append("_".join([block.name, *map(str, index)]))
        seen[block.name] += block.size
    return names


@dataclass(frozen=True)
class Row:
    """lower <= sum of values * columns <= upper, where all conditions of `when` hold."""

    columns: Ints  # numbers of the columns, ascending, each once
    values: Floats  # the value of each of these columns; none is 0
    lower: float
    upper: float
    # numbers of 0-1 columns: `column` where it must be 1, `~column` where it must be 0
    when: tuple[int, ...] = ()
    # the levels whose differences are the values, see `Model.staircase`; None: any other row
    levels: Floats | None = None


@dataclass(frozen=True)
class LinearArrays:
    """A model as a mixed-integer linear programme of n columns and m rows."""

    cost: Floats  # [n] cost of each column
    constant: float  # constant of the objective
    lower: Floats  # [n] lower bound of each column
    upper: Floats  # [n] upper bound of each column
    integer: NDArray[np.bool_]  # [n] whether a column is integer
    starts: Ints  # [m + 1] the entries of row r are starts[r] .. starts[r + 1] - 1
    columns: Ints  # [entries]
    values: Floats  # [entries]
    row_lower: Floats  # [m]
    row_upper: Floats  # [m]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.row_lower), len(self.cost)

    def satisfied_by(self, x: Floats, tolerance: float = 1e-6) -> bool:
        """Whether x [n] keeps to integers, to the bounds and to the rows.

        tolerance: of columns, and of rows relative to the size of their terms.
        """
        off = np.maximum(self.lower - x, x - self.upper)
        if (off > tolerance).any() or (np.abs(x - np.round(x))[self.integer] > tolerance).any():
            return False
        rows = np.repeat(np.arange(len(self.row_lower)), np.diff(self.starts))
        terms = self.values * x[self.columns]
        sums = np.bincount(rows, terms, minlength=len(self.row_lower))
        slack = tolerance * (1.0 + np.bincount(rows, np.abs(terms), minlength=len(sums)))
        return bool(
            (self.row_lower - slack <= sums).all() and (sums <= self.row_upper + slack).all()
        )


class TooLarge(Exception):
    """A model has more terms than `most_terms` allows."""


class Model:
    """Collects columns, rows and costs.

    run: the run that builds the model: adding columns and rows and writing raise `Stopped` once it
    should stop. totals: needed for CP-SAT, and for `seconds`. most_terms: adding a row raises
    `TooLarge` once all rows together have more values.
    """

    def __init__(
        self,
        name: str = "model",
        run: Run | None = None,
        totals: Totals | None = None,
        most_terms: float = math.inf,
    ) -> None:
        self.name, self.totals = name, totals
        self.terms_left = most_terms  # values that further rows may have together
        self.check = (run or Run()).check  # raises `Stopped` once the run should stop
        self.size = 0  # number of columns
        self.column_blocks: list[Block] = []
        self.rows: list[Row] = []
        self.row_names: list[str] = []  # name of the constraint that each row belongs to
        self.constant = 0.0  # constant of the objective
        self._properties: list[NDArray[Any]] = []  # the `PROPERTIES` of each block's columns
        self._costs: list[tuple[Ints, Floats]] = []  # (columns, values) of each cost
        self._fixed: list[tuple[Ints, float]] = []  # (columns, value) of each `fix`

    def continuous(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
        *,
        grid: int = 0,
    ) -> Columns:
        """A block of real columns that are not in seconds.

        Bounds broadcast to the shape; None is no bound. grid: CP-SAT has no real columns. It takes
        a column with a grid as an integer, in steps of 1 / grid, rounded down; 0: no grid.
        """
        return self._add_columns(name, shape, lower, upper, grid=grid)

    def seconds(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
    ) -> Columns:
        """A block of real columns in seconds. Bounds broadcast; None is no bound."""
        return self._add_columns(name, shape, lower, upper, seconds=True)

    def integer(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
    ) -> Columns:
        """A block of integer columns. Bounds broadcast; None is no bound. CP-SAT needs both."""
        return self._add_columns(name, shape, lower, upper, integer=True)

    def binary(self, name: str, shape: Shape = ()) -> Columns:
        """A block of 0-1 columns."""
        return self._add_columns(name, shape, 0.0, 1.0, integer=True)

    def _add_columns(
        self,
        name: str,
        shape: Shape,
        lower: ArrayLike | None,
        upper: ArrayLike | None,
        *,
        integer: bool = False,
        seconds: bool = False,
        grid: int = 0,
    ) -> Columns:
        """A new block of columns with these properties."""
        self.check()
        block = np.empty(shape, PROPERTIES)
        block["lower"] = -np.inf if lower is None else lower
        block["upper"] = np.inf if upper is None else upper
        block["integer"], block["seconds"], block["grid"] = integer, seconds, grid
        self._properties.append(block.ravel())
        self.column_blocks.append(Block(name, self.size, block.size, block.shape))
        self.size += block.size
        numbers = np.arange(self.size - block.size, self.size, dtype=np.int64)
        return Columns(numbers.reshape(block.shape))

    def fix(self, columns: Columns, value: float) -> None:
        """Set both bounds of the columns to `value`."""
        self._fixed.append((columns.numbers, value))

    def minimize(self, cost: Linear) -> None:
        """Add an expression without a shape to the objective."""
        expression = cost.expression()
        if expression.shape:
            raise ValueError(f"{self.name}: a cost of shape {expression.shape}, expected one sum")
        self._costs.append((expression.columns, expression.values))
        self.constant += float(expression.constant)

    def row(self, name: str, rows: Rows, *, when: Condition = ()) -> None:
        """Add one row, or an array of rows, under the name of their constraint.

        Columns that occur twice add up. when: the rows hold only where all these 0-1 columns are 1
        (`~column`: 0); they are then no equations.
        """
        if not isinstance(rows, Rows):
            raise TypeError(f"{name}: expected a comparison of columns, got {rows!r}")
        conditions, taken = literals(when), rows.take()
        if conditions and rows.sense == "==":
            raise ValueError(f"{name}: a row under a condition needs one bound, <= or >=")
        for columns, values, right in taken:
            lower = -np.inf if rows.sense == "<=" else right
            upper = np.inf if rows.sense == ">=" else right
            self._add_row(name, Row(*_merged(columns, values), lower, upper, conditions))

    def staircase(
        self, name: str, stairs: Columns, levels: ArrayLike, upper: float | None = None
    ) -> Columns:
        """A `seconds` column t >= sum_j (levels_j - levels_(j-1)) stairs_j, levels_(-1) = 0.

        stairs [J] are columns; rows `{name}_order` make them descend. levels [J] ascend. Where the
        stairs are 0-1 columns, t is the level of the last stair that is 1. Levels are rounded
        before their differences are taken; a difference too small for double precision is added
        to the next one.
        """
        heights = np.asarray(levels, dtype=float)
        self.row(f"{name}_order", stairs[:-1] >= stairs[1:])
        time = self.seconds(name, upper=upper)
        self._add_row(
            f"{name}_stairs",
            Row(
                np.append(stairs.numbers, time.numbers),
                np.append(-np.diff(heights, prepend=0.0), 1.0),
                0.0,
                np.inf,
                levels=heights,
            ),
        )
        return time

    def _add_row(self, name: str, row: Row) -> None:
        self.check()
        self.terms_left -= len(row.columns)
        if self.terms_left < 0:
            raise TooLarge
        self.rows.append(row)
        self.row_names.append(name)

    @property
    def discrete(self) -> bool:
        """Whether the model has integer columns."""
        return bool(self.properties()["integer"].any())

    # The methods that the writers call.

    def properties(self) -> NDArray[Any]:
        """[n] the `PROPERTIES` of each column; bounds are infinite where there is none."""
        joined = np.concatenate([np.empty(0, PROPERTIES), *self._properties])
        for numbers, value in self._fixed:
            joined["lower"][numbers] = joined["upper"][numbers] = value
        return joined

    def costs(self) -> Floats:
        """[n] the cost of each column in the objective."""
        cost = np.zeros(self.size)
        for numbers, costs in self._costs:
            np.add.at(cost, numbers, costs)
        return cost

    def milp_scale(self) -> Scale:
        """The scale for double-precision solvers: the power of two that brings the objective to
        about 1e3; 1 without `totals`."""
        if self.totals is None:
            return Scale()
        # the totals may state no lower bound, or one that is far too low
        estimate = max(self.totals.least, self.totals.largest * 1e-3)
        unit = 2.0 ** (10 - math.ceil(math.log2(estimate))) if estimate > 0 else 1.0
        return Scale(per_unit=unit, offset=self.totals.offset)

    def milp_units(self) -> Floats:
        """[n] the factor of each column for double-precision solvers."""
        return np.where(self.properties()["seconds"], self.milp_scale().per_unit, 1.0)

    def without_costs(self) -> "Model":
        """The model with the same columns and rows and no costs.

        It is never unbounded, so that a solver's answer tells whether the rows have a solution.
        """
        free = copy(self)
        free._costs = []
        return free

    def arrays(self) -> LinearArrays:
        """The model as a linear programme whose times are seconds times `milp_scale`'s unit.

        Raises UnsupportedError where coefficients are too small or too large. Coefficients of times
        that are too small become 0 instead. Raises ValueError for a row under a condition whose
        columns have no bounds.
        """
        unit = self.milp_scale().per_unit
        properties = self.properties()
        seconds, scale = properties["seconds"], np.where(properties["seconds"], unit, 1.0)
        lower, upper = properties["lower"] * scale, properties["upper"] * scale
        written = [
            self._linear_row(number, row, unit, seconds, (lower, upper))
            for number, row in enumerate(self.rows)
        ]
        starts = np.zeros(len(written) + 1, dtype=np.int64)
        np.cumsum([len(row.columns) for row in written], out=starts[1:])
        cost = self.costs()
        if self.totals is not None:  # else nothing is scaled
            cost = np.where(seconds, cost, _dropped(cost * unit))
        result = LinearArrays(
            cost=cost,
            constant=self.constant * unit,
            lower=lower,
            upper=upper,
            integer=properties["integer"],
            starts=starts,
            columns=np.concatenate([np.zeros(0, np.int64), *(row.columns for row in written)]),
            values=np.concatenate([np.zeros(0), *(row.values for row in written)]),
            row_lower=np.array([row.lower for row in written], dtype=float),
            row_upper=np.array([row.upper for row in written], dtype=float),
        )
        self._check_magnitudes(result)
        return result

    def _linear_row(
        self,
        number: int,
        row: Row,
        unit: float,
        seconds: NDArray[np.bool_],
        bounds: tuple[Floats, Floats],
    ) -> Row:
        """The row in the programme's unit, with each condition as a big-M coefficient.

        number: number of the row. unit: the factor of seconds. seconds: [n] whether a column is in
        seconds. bounds: ([n] lower, [n] upper) of the columns in the programme's unit.
        """
        self.check()
        values, low, high = row.values, row.lower, row.upper
        in_seconds = seconds[row.columns]
        if in_seconds.any():
            if row.levels is None:
                values = np.where(in_seconds, values, _dropped(values * unit))
            else:
                values = np.append(-_rises(row.levels * unit), 1.0)
            low, high = low * unit, high * unit
        columns, values = _merged(row.columns, values)
        if not row.when:
            return Row(columns, values, low, high)
        lower, upper = bounds[0][columns], bounds[1][columns]
        # bounds of the row's sum, by the bounds of its columns
        least = float(np.where(values > 0, values * lower, values * upper).sum())
        most = float(np.where(values > 0, values * upper, values * lower).sum())
        # by how much the sum may miss the one bound of the row
        big_m = min(0.0, least - low) if high == np.inf else max(0.0, most - high)
        if not math.isfinite(big_m):
            raise ValueError(
                f"{self.name}: {self.row_names[number]}: a row under a condition needs bounded "
                "columns"
            )
        # The row's sum loses big_m (1 - column) for `column`, and big_m column for `~column`.
        shift = sum(big_m for condition in row.when if condition >= 0)
        factors = [big_m if condition >= 0 else -big_m for condition in row.when]
        conditions = [c if c >= 0 else ~c for c in row.when]
        columns, values = _merged(
            np.append(columns, np.array(conditions, dtype=np.int64)), np.append(values, factors)
        )
        return Row(columns, values, low + shift, high + shift)

    def _check_magnitudes(self, arrays: LinearArrays) -> None:
        for where, entries in (("constraints", arrays.values), ("objective", arrays.cost)):
            sizes = np.abs(entries[entries != 0])
            if sizes.size and not (sizes.min() >= SMALLEST and sizes.max() <= LARGEST):
                raise UnsupportedError(
                    f"coefficients of the {where} span {sizes.min():.3g} to {sizes.max():.3g}",
                    where=f"linear model {self.name}",
                    expected=f"{SMALLEST:g} to {LARGEST:g}; the methods cp-sat and exact do not "
                    "need that",
                )


@dataclass(frozen=True, kw_only=True)
class ModelAnswer:
    """The answer of a general solver to a model, before a decision is read from it."""

    stop: Stop
    # the incumbent's objective by the model, in the instance's unit; None without an incumbent
    objective: float | None = None
    # proven lower bound in the instance's unit, corrected for rounding, also at time-outs; None:
    # nothing is proven
    bound: float | None = None
    solver: str = ""  # name and version
    message: str = ""
    statistics: Mapping[str, object] = field(default_factory=dict)  # JSON types only
    # [n] the incumbent: integers whole, seconds in seconds, or in ticks for a `ConstraintModel`
    x: Floats | None = None
    model: Model | None = None  # the linear model of these columns

    @property
    def has_solution(self) -> bool:
        """Whether there is an incumbent to read."""
        return self.objective is not None

    def values(self, columns: Columns | str) -> Any:
        """The incumbent's values of these columns, or of the first block of that name, in their
        shape: an array, or a float for a single column."""
        assert self.x is not None, "no incumbent to read"
        if isinstance(columns, str):
            assert self.model is not None, "only a stated model has names"
            block = next(b for b in self.model.column_blocks if b.name == columns)
            return self.x[block.first : block.first + block.size].reshape(block.shape)
        return self.x[columns.numbers]

    def value(self, variable: Any) -> int:
        """The incumbent's value of a variable of a `ConstraintModel`."""
        assert self.x is not None, "no incumbent to read"
        index: int = variable.index
        if index < 0:  # the negation of a 0-1 variable
            return 1 - round(float(self.x[-index - 1]))
        return round(float(self.x[index]))

    def counts(self, columns: Columns | str) -> Ints:
        """The incumbent's values of integer columns as integers, see `values`."""
        return np.asarray(np.rint(self.values(columns)), dtype=np.int64)


def trivial_answer(arrays: LinearArrays, scale: Scale, solver: str) -> ModelAnswer | None:
    """The answer that follows without a solver; None where there is none.

    A row without entries, whose sum is 0, holds or makes the model infeasible. Solvers take neither
    such rows nor a model without columns all in the same way. solver: its name, for the answer.
    """
    is_empty = np.diff(arrays.starts) == 0
    if (((arrays.row_lower > 0) | (arrays.row_upper < 0)) & is_empty).any():
        return ModelAnswer(stop=Stop.INFEASIBLE, solver=solver)
    if arrays.shape[1] > 0:
        return None
    value = scale.value(arrays.constant)
    return ModelAnswer(
        stop=Stop.OPTIMAL, objective=value, bound=value, x=np.zeros(0), solver=solver
    )


def _merged(columns: Ints, values: Floats) -> tuple[Ints, Floats]:
    """(columns, values) with ascending distinct columns: the values of repeated columns are added,
    and columns of value 0 are dropped."""
    if not (columns[1:] > columns[:-1]).all():
        order = np.argsort(columns, kind="stable")
        columns, values = columns[order], values[order]
        is_first = np.append(True, columns[1:] > columns[:-1])  # of equal columns
        if not is_first.all():
            sums = np.bincount(is_first.cumsum() - 1, weights=values)
            columns, values = columns[is_first], sums.astype(float)
    kept = values != 0
    return (columns, values) if kept.all() else (columns[kept], values[kept])


def _dropped(values: Floats) -> Floats:
    """The values, with 0 for those that no double-precision solver tells from 0."""
    return np.where(np.abs(values) < SMALLEST, 0.0, values)


def _rises(levels: Floats) -> Floats:
    """The differences of ascending levels. A difference too small for a solver is 0, and is added
    to the next one."""
    rises, last = np.zeros(len(levels)), 0.0
    for j, level in enumerate(levels.tolist()):
        if level - last >= SMALLEST:
            rises[j], last = level - last, level
    return rises
