"""Options of a back end: who takes them is known, and nobody's are ignored in silence."""

from __future__ import annotations

import pytest

from fakes.cli import Call, Write
from hetplan.errors import InputError
from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import library, load_from_library
from hetplan.solvers.options import RESERVED, Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("tiny-mixed", "--native", "cp-sat.linearization_level=2"),
            "--native cp-sat.linearization_level: no method chosen runs cp-sat (got 'auto', "
            "expected --method cp-sat)",
        ),
        (
            ("tiny-mixed", "-m", "exact,paper", "--native", "highs.presolve=off"),
            "runs highs (got 'exact, paper', exp",
        ),
        (
            ("tiny-mixed", "-m", "milp", "--native", "pyomo.x=1"),
            "--native pyomo.x: no method chosen runs pyomo",
        ),
        (
            ("tiny-mixed", "--pyomo-solver", "cbc"),
            "--pyomo-solver cbc: no method chosen runs pyomo (got 'auto', exp",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    hetplan: Call, arguments: tuple[str, ...], message: str
) -> None:
    assert message in hetplan("solve", *arguments).error


def test_one_method_that_takes_them_is_enough(hetplan: Call, numbers: Write) -> None:
    assert hetplan("solve", numbers(1), "-m", "first,auto", "--native", "highs.x=1").code == 0
    assert (
        "no method chosen"
        in hetplan("solve", numbers(1), "-m", "first", "--native", "highs.x=1").error
    )
    ran = hetplan(
        "solve",
        "tiny-mixed",
        "-m",
        "milp,cp-sat",
        "--native",
        "cp-sat.linearization_level=2",
        "--json",
    )
    assert [result["status"] for result in ran.json["results"]] == ["optimal", "optimal"]


METHODS = [(name, method.name) for name in FAMILIES for method in family(name).methods]


@pytest.mark.parametrize(("problem", "name"), METHODS)
def test_a_method_takes_the_options_that_it_says(problem: str, name: str) -> None:
    """An option that no back end has is refused by exactly those methods that say they pass it
    on."""
    entries = [
        entry
        for entry in library(problem)
        if entry.name.startswith(("tiny", "tiles", "hap-chain-2x2"))
    ]
    data = load_from_library(entries[0].name).data
    method = family(problem).method(name)
    for backend in method.backends:
        run = Run(Options(threads=1, time_limit=30, native={backend: {"no_such_option": 1}}))
        with pytest.raises(InputError, match=f"native option {backend}.no_such_option"):
            solve(family(problem), data, name, run)
    others = {
        backend: {"no_such_option": 1} for backend in RESERVED if backend not in method.backends
    }
    result = solve(
        family(problem), data, name, Run(Options(threads=1, time_limit=30, native=others))
    )
    assert result.status in ("optimal", "feasible", "infeasible"), result.message
