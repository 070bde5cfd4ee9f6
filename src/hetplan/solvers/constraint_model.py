"""A model in CP-SAT's own constraints: tables, elements, circuits, automata, intervals.

`solvers.model` states linear rows, which every solver takes. This module is for models that are
written for CP-SAT alone, in the idioms of constraint programming. CP-SAT knows whole numbers only,
so that seconds become ticks: whole numbers of a fraction of a second, rounded down. Rounding down
prices no decision too high, so that the bound holds as it is. An example, the choice of one of
three machines for each of two jobs that take 2 and 3 seconds on a machine of speed 1:

    model = ConstraintModel("jobs", run, Totals(least=1.0, largest=6.0, roundings=1))
    cp = model.cp
    speeds = np.array([1.0, 2.0, 3.0])
    machine = [cp.new_int_var(0, 2, f"machine_{job}") for job in range(2)]
    cp.add_all_different(machine)                                           # (1)
    seconds = [model.time(f"seconds_{job}") for job in range(2)]
    for job, work in enumerate((2.0, 3.0)):
        cp.add_element(machine[job], model.ticks(work / speeds), seconds[job])  # (2)
    slowest = model.time("slowest")
    cp.add_max_equality(slowest, seconds)                                   # (3)
    cp.minimize(slowest)
    answer = hetplan.solvers.general.minimise("cp-sat", model, run)
    answer.objective, [answer.value(each) for each in machine]              # 1.0, [1, 2]
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from ortools.sat.python import cp_model

from hetplan.solvers.model import Totals
from hetplan.solvers.native import Scale
from hetplan.solvers.run import Run
from hetplan.solvers.ticks import ticks_per_second


class ConstraintModel:
    """A CP-SAT model `cp` whose objective is in ticks.

    run: the run that builds the model; builders call `check` in long loops, which raises `Stopped`
    once the run should stop. totals: bounds on the model's totals, by which the tick is chosen.
    """

    def __init__(self, name: str, run: Run | None, totals: Totals) -> None:
        self.name, self.totals = name, totals
        self.check = (run or Run()).check
        self.cp = cp_model.CpModel()
        per_second = ticks_per_second(totals)
        self.scale = Scale(
            per_unit=per_second, offset=totals.offset, under=totals.roundings / per_second
        )
        self.most_ticks = math.ceil(totals.largest * self.scale.per_unit)

    @property
    def discrete(self) -> bool:
        """Whether the model has integer variables: it has no others."""
        return True

    def ticks(self, seconds: ArrayLike) -> list[int]:
        """[n] seconds in ticks, rounded down."""
        return [self.tick(value) for value in np.asarray(seconds, dtype=float).ravel().tolist()]

    def ticks_up(self, seconds: ArrayLike) -> list[int]:
        """[n] seconds in ticks, rounded up: for seconds that a model subtracts."""
        return [-ticks for ticks in self.ticks(-np.asarray(seconds, dtype=float))]

    def tick(self, seconds: float) -> int:
        """Seconds in ticks, rounded down."""
        return math.floor(seconds * self.scale.per_unit)

    def time(self, name: str, largest: float | None = None) -> cp_model.IntVar:
        """A variable in ticks. largest: seconds that it does not exceed; None: `totals.largest`."""
        most = self.most_ticks if largest is None else math.ceil(largest * self.scale.per_unit)
        return self.cp.new_int_var(0, most, name)

    def product(
        self, name: str, factors: Sequence[cp_model.LinearExprT], largest: Sequence[int], most: int
    ) -> cp_model.IntVar:
        """A variable that is no less than the product of expressions that are never negative.

        It equals the product at the optimum of a model that gains nothing from a larger one. In
        the place of an expression stands a variable of its own that is no less. An equality would
        let presolve put a multiple of a 0-1 variable in its place, upon which OR-Tools 9.14 may end
        the process ("int_prod with arity > 2"). A variable stands as it is, since the search loses
        much where it is bounded on one side alone. largest: the most of each factor. most: the most
        that the product can be.
        """
        bounded = []
        for i, (factor, upper) in enumerate(zip(factors, largest, strict=True)):
            if isinstance(factor, cp_model.IntVar):
                bounded.append(factor)
                continue
            at_least = self.cp.new_int_var(0, upper, f"{name}_factor_{i}")
            self.cp.add(at_least >= factor)
            bounded.append(at_least)
        product = self.cp.new_int_var(0, most, name)
        self.cp.add_multiplication_equality(product, bounded)
        return product
