"""Products in CP-SAT's own constraints."""

from __future__ import annotations

import pytest
from ortools.sat.python.cp_model import IntVar

from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import minimise
from hetplan.solvers.model import Totals
from hetplan.solvers.run import Options, Run, Stop


def a_model(weight: int, fewest: int) -> tuple[ConstraintModel, IntVar]:
    """A multiple of a 0-1 variable that is 1, times a variable of `fewest` at least."""
    model = ConstraintModel("products", None, Totals(least=1.0, largest=100.0, roundings=1))
    chosen = model.cp.new_bool_var("chosen")
    count = model.cp.new_int_var(0, 9, "count")
    model.cp.add(chosen == 1)
    model.cp.add(count >= fewest)
    product = model.product("product", (weight * chosen, count), (weight, 9), 9 * weight)
    model.cp.minimize(product)
    return model, product


@pytest.mark.parametrize(("weight", "fewest"), [(7, 3), (7, 0), (1, 9), (0, 4)])
def test_a_product_is_exact_at_the_optimum(weight: int, fewest: int) -> None:
    model, product = a_model(weight, fewest)
    answer = minimise("cp-sat", model, Run(Options(threads=1)))
    assert answer.stop is Stop.OPTIMAL
    assert answer.value(product) == weight * fewest


def test_no_factor_of_a_product_equals_an_expression() -> None:
    """Presolve would put a multiple of a 0-1 variable in a product, which may end the process."""
    model, _ = a_model(7, 3)
    constraints = model.cp.proto.constraints
    factors = {i for c in constraints for e in c.int_prod.exprs for i in e.vars}
    assert len(factors) == 2
    linear = [c.linear for c in constraints if factors & set(c.linear.vars)]
    assert len(linear) == 2
    assert all(each.domain[0] < each.domain[-1] for each in linear)


def test_a_variable_stands_in_a_product_as_it_is() -> None:
    """With a variable in its place that is only bounded from below, the search of HAP's model is a
    hundred times as long."""
    model, _ = a_model(7, 3)
    factors = {i for c in model.cp.proto.constraints for e in c.int_prod.exprs for i in e.vars}
    names = {model.cp.proto.variables[i].name for i in factors}
    assert names == {"product_factor_0", "count"}
