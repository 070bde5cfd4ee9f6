"""The general methods of every family, stopped anywhere: a valid bound, and whatever decision there
was by then."""

from __future__ import annotations

import pytest

from hetplan.formulations import family
from hetplan.instances.library import find
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run, Stop
from present import present
from quick import rest_wide
from stopping import cancelled_after, over

# Of each family one that general solvers do not finish at once, with the looks at which its model
# is half built.
INSTANCES = {
    "amp/amp-homogeneous-memory": (0, 40, 3000),
    "astra/four-types-32x96-equal": (0, 50, 200),
    "ditto/ditto-ex1-nb32-head": (0, 10, 100),
    "poplar/poplar-a-llama-0.5b-zero1": (0, 20, 200),
    "poplar/poplar-a-llama-0.5b-zero3": (0, 20, 200),
}
CASES = [(name, looks) for name, places in INSTANCES.items() for looks in places]
# `pyomo` has the model and the solver of `milp`.
GENERAL = rest_wide(("cp-sat", "cp-sat-linear", "milp", "pyomo"), 3)


def stopped_result_holds(name: str, method: str, run: Run, stop: Stop) -> None:
    """Bound at most the record, objective at least the record, seconds that are not nothing."""
    packaged = present(find(name))
    best = present(packaged.best_known()).objective
    result = solve(family(packaged.problem), packaged.load().data, method, run)
    assert result.stop in (stop, Stop.OPTIMAL), result.message
    assert result.bound is not None and 0 < result.bound <= best * (1 + 1e-7)
    assert result.objective is None or result.objective >= best * (1 - 1e-7)
    assert result.seconds > 0


@pytest.mark.parametrize(("name", "looks"), CASES)
@pytest.mark.parametrize("method", GENERAL)
def test_stopped_anywhere_there_is_a_bound(name: str, looks: int, method: str) -> None:
    stopped_result_holds(name, method, cancelled_after(looks), Stop.INTERRUPTED)


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("method", GENERAL)
def test_without_any_time_there_is_a_bound(name: str, method: str) -> None:
    stopped_result_holds(name, method, over(), Stop.LIMIT)
