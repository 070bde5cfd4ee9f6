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
from collections.abc import Mapping, Sequence
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
# What each column has: bounds, kind, and its grid (0 where there is none).
PROPERTIES = np.dtype(
    [("lower", float), ("upper", float), ("integer", bool), ("seconds", bool), ("grid", float)]
)
# Double-precision solvers drop or distort coefficients beyond these without a word.
SMALLEST, LARGEST = 1e-9, 1e15


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a model's totals are known to be; the writers choose their units by it.

    least: no decision has a smaller objective (0 where nothing is known), largest: no total of the
    model that matters is larger; both in seconds, without offset. roundings: how many values
    rounded down add up in one objective value. error: what these may come to, relative to the
    objective. offset: seconds that every decision pays beside the model's objective.
    """

    least: float
    largest: float
    roundings: float = 1.0
    error: float = 5e-8
    offset: float = 0.0


@dataclass(frozen=True)
class Block:
    """A named block of columns: `size` of them from number `first` on."""

    name: str
    first: int
    size: int
    shape: tuple[int, ...]


def member_names(blocks: list[Block]) -> list[str]:
    """The names of all members, in order, safe for LP and MPS files: `x_3_1`. Where two blocks have
    one name, the second one's members are numbered on from the first one's."""
    names: list[str] = []
    seen = Counter[str]()
    for block in blocks:
        before = seen[block.name]
        numbered_on = ((before + number,) for number in range(block.size))
        places = numbered_on if before else np.ndindex(block.shape)
        names += ["_".join(map(str, (block.name, *place))) for place in places]
        seen[block.name] += block.size
    return names


@dataclass(frozen=True)
class Row:
    """lower <= sum of values * columns <= upper, where all of `when` hold.

    columns: ascending, each once; values: none of them 0. when: 0-1 columns, `~column` for one that
    is to be 0. levels: the values are the differences of these, see `Model.staircase`.
    """

    columns: Ints
    values: Floats
    lower: float
    upper: float
    when: tuple[int, ...] = ()
    levels: Floats | None = None


@dataclass(frozen=True)
class LinearArrays:
    """The model as a mixed-integer linear programme: n columns, m rows, A by rows (row r: entries
    starts[r] to starts[r + 1])."""

    cost: Floats
    constant: float
    lower: Floats
    upper: Floats
    integer: NDArray[np.bool_]
    starts: Ints
    columns: Ints
    values: Floats
    row_lower: Floats
    row_upper: Floats

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.row_lower), len(self.cost)


class TooLarge(Exception):
    """A model would have more terms than it may."""


class Model:
    """Collects columns, rows and costs.

    run: whose time building takes; columns, rows and writing raise `Stopped` once it should stop.
    totals: needed for CP-SAT, and for `seconds`. most_terms: rows raise `TooLarge` once they have
    more values together.
    """

    def __init__(
        self,
        name: str = "model",
        run: Run | None = None,
        totals: Totals | None = None,
        most_terms: float = math.inf,
    ) -> None:
        self.name, self.totals, self.terms_left = name, totals, most_terms
        self.check = (run or Run()).check  # raises `Stopped` once the run should stop
        self.constant = 0.0
        self.column_blocks: list[Block] = []
        self.rows: list[Row] = []
        self.row_names: list[str] = []  # of the constraint that each row belongs to
        self._properties: list[NDArray[Any]] = []  # of each block of columns
        self._costs: list[tuple[Ints, Floats]] = []
        self._fixed: list[tuple[Ints, float]] = []
        self.size = 0

    def continuous(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
        *,
        grid: int = 0,
    ) -> Columns:
        """Real columns of that shape that are not in seconds.

        Bounds broadcast, None is no bound. grid: CP-SAT has no real columns. It takes those with a
        grid as integers, in steps of 1 / grid, rounded down.
        """
        return self._add_columns(name, shape, lower, upper, grid=grid)

    def seconds(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
    ) -> Columns:
        """Real columns in seconds."""
        return self._add_columns(name, shape, lower, upper, seconds=True)

    def integer(
        self,
        name: str,
        shape: Shape = (),
        lower: ArrayLike | None = 0.0,
        upper: ArrayLike | None = None,
    ) -> Columns:
        """Integer columns; for CP-SAT with both bounds."""
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
        integer: bool = False,
        seconds: bool = False,
        grid: int = 0,
    ) -> Columns:
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
        """Add one expression to the objective."""
        expression = cost.expression()
        if expression.shape:
            raise ValueError(f"{self.name}: a cost of shape {expression.shape}, expected one sum")
        self._costs.append((expression.columns, expression.values))
        self.constant += float(expression.constant)

    def row(self, name: str, rows: Rows, *, when: Condition = ()) -> None:
        """State one row, or an array of them, under the name of their constraint.

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

    # What the writers read.

    def properties(self) -> NDArray[Any]:
        """[n] of `PROPERTIES`; bounds are infinite where there is none."""
        joined = np.concatenate([np.empty(0, PROPERTIES), *self._properties])
        for numbers, value in self._fixed:
            joined["lower"][numbers] = joined["upper"][numbers] = value
        return joined

    def costs(self) -> Floats:
        """[n] of the objective."""
        cost = np.zeros(self.size)
        for numbers, costs in self._costs:
            np.add.at(cost, numbers, costs)
        return cost

    def milp_scale(self) -> Scale:
        """The power of two that brings the objective to about 1e3 (1 without `totals`)."""
        if self.totals is None:
            return Scale()
        estimate = max(self.totals.least, self.totals.largest * 1e-3)
        unit = 2.0 ** (10 - math.ceil(math.log2(estimate))) if estimate > 0 else 1.0
        return Scale(per_unit=unit, offset=self.totals.offset)

    def milp_units(self) -> Floats:
        """[n] what the columns are multiplied by for double-precision solvers."""
        return np.where(self.properties()["seconds"], self.milp_scale().per_unit, 1.0)

    def without_costs(self) -> "Model":
        """The same columns and rows. No model without costs is unbounded, so that a solver's answer
        tells whether the rows have a solution."""
        free = copy(self)
        free._costs = []
        return free

    def arrays(self) -> LinearArrays:
        """The model as a linear programme whose times are seconds times `milp_scale`'s unit.

        Raises UnsupportedError where coefficients are too small or too large; those of times that
        are too small become 0. Raises ValueError for a row under a condition that nothing bounds.
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
        if self.totals is not None:
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
        """The row in the programme's unit, its condition as a big-M coefficient."""
        self.check()
        values, low, high = row.values, row.lower, row.upper
        in_seconds = seconds[row.columns]
        if in_seconds.any():
            values = (
                np.where(in_seconds, values, _dropped(values * unit))
                if row.levels is None
                else np.append(-_rises(row.levels * unit), 1.0)
            )
            low, high = low * unit, high * unit
        columns, values = _merged(row.columns, values)
        if not row.when:
            return Row(columns, values, low, high)
        least, most = (  # of the row's sum, by the bounds of its columns
            float(np.where(values > 0, values * near[columns], values * far[columns]).sum())
            for near, far in (bounds, bounds[::-1])
        )
        big_m = min(0.0, least - low) if high == np.inf else max(0.0, most - high)
        if not math.isfinite(big_m):
            raise ValueError(
                f"{self.name}: {self.row_names[number]}: a row under a condition needs bounded "
                "columns"
            )
        shift = sum(big_m for condition in row.when if condition >= 0)
        factors = [big_m if condition >= 0 else -big_m for condition in row.when]
        columns, values = _merged(
            np.append(columns, np.array([c if c >= 0 else ~c for c in row.when], dtype=np.int64)),
            np.append(values, factors),
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
    """What a general solver said of a model, before any decision is read out of it.

    objective: the model's own price of the incumbent in the instance's unit (None without one).
    bound: proven, in the instance's unit, corrected for rounding; kept at time-outs; None without
    one. solver: name and version. statistics: JSON types only.
    x [n]: the incumbent, integers whole, seconds in seconds. model: whose columns they are,
    None for plain arrays.
    """

    stop: Stop
    objective: float | None = None
    bound: float | None = None
    solver: str = ""
    message: str = ""
    statistics: Mapping[str, object] = field(default_factory=dict)
    x: Floats | None = None
    model: Model | None = None

    @property
    def has_solution(self) -> bool:
        """Whether there is an incumbent to read."""
        return self.objective is not None

    def values(self, columns: Columns | str) -> Any:
        """The incumbent at those columns, or at the block of that name, in their shape (an array,
        or a float)."""
        assert self.x is not None, "no incumbent to read"
        if isinstance(columns, str):
            assert self.model is not None, "only a stated model has names"
            block = next(b for b in self.model.column_blocks if b.name == columns)
            return self.x[block.first : block.first + block.size].reshape(block.shape)
        return self.x[columns.numbers]

    def counts(self, columns: Columns | str) -> Ints:
        """`values` of integer columns as integers."""
        return np.asarray(np.rint(self.values(columns)), dtype=np.int64)


def _merged(columns: Ints, values: Floats) -> tuple[Ints, Floats]:
    """Ascending distinct columns, values of repeated ones added, zeros dropped."""
    if not (columns[1:] > columns[:-1]).all():
        order = np.argsort(columns, kind="stable")
        columns, values = columns[order], values[order]
        begins = np.append(True, columns[1:] > columns[:-1])  # of those that are the same
        if not begins.all():
            sums = np.bincount(begins.cumsum() - 1, weights=values)
            columns, values = columns[begins], sums.astype(float)
    kept = values != 0
    return (columns, values) if kept.all() else (columns[kept], values[kept])


def _dropped(values: Floats) -> Floats:
    """0 for what no double-precision solver tells from it."""
    return np.where(np.abs(values) < SMALLEST, 0.0, values)


def _rises(levels: Floats) -> Floats:
    """Differences of ascending levels; one too small for a solver is added to the next one."""
    rises, paid = np.zeros(len(levels)), 0.0
    for j, level in enumerate(levels.tolist()):
        if level - paid >= SMALLEST:
            rises[j], paid = level - paid, level
    return rises
