"""The options of the solvers behind Pyomo, by the solvers' own names.

Pyomo's own solver names are used: `highs`, `gurobi`, `cplex`, `scip`, `cbc`, `glpk` and more. Of
the common options, a solver whose own names of them hetplan does not know gets the time limit only.
"""

from typing import Any

import pyomo.environ as pyo
from pyomo.version import version as PYOMO_VERSION

from hetplan.errors import UnsupportedError, require
from hetplan.solvers import highs
from hetplan.solvers.native import GAP_SHARE
from hetplan.solvers.run import HIGHS, NativeValue, Options, engine

BACKEND = "pyomo"
# Interface names that are tried for messages that list the solvers on this machine.
COMMON_SOLVERS = (
    "appsi_highs",
    "highs",
    "gurobi",
    "gurobi_direct",
    "cplex",
    "cplex_direct",
    "scip",
    "scip_direct",
    "cbc",
    "glpk",
    "xpress_direct",
    "mosek_direct",
)
_TIGHT = 1e-9  # feasibility tolerance: a plan's bound has to hold to 1e-6

# Solver -> common option -> the solver's own name of it. "time_limit" is for the older direct
# interfaces, which ignore the limit that Pyomo passes.
NAMES = {
    HIGHS: {
        "gap": "mip_rel_gap", "threads": "threads", "seed": "random_seed",
        "time_limit": "time_limit",
    },
    "gurobi": {
        "gap": "MIPGap", "threads": "Threads", "seed": "Seed", "time_limit": "TimeLimit",
    },
    "cplex": {
        "gap": "mip_tolerances_mipgap", "threads": "threads", "seed": "randomseed",
        "time_limit": "timelimit",
    },
    "scip": {
        "gap": "limits/gap", "threads": "lp/threads", "seed": "randomization/randomseedshift",
    },
    "cbc": {"gap": "ratioGap", "threads": "threads", "seed": "randomCbcSeed"},
    "glpk": {"gap": "mipgap", "seed": "seed"},
}  # fmt: skip
# Solver -> its own options that hetplan always sets.
_ALWAYS: dict[str, dict[str, NativeValue]] = {
    HIGHS: {**highs.SETTINGS, **highs.EXACT},
    "gurobi": {"MIPGapAbs": 0, "FeasibilityTol": _TIGHT, "IntFeasTol": _TIGHT},
    "cplex": {
        "mip_tolerances_absmipgap": 0,
        "mip_tolerances_integrality": 0,
        "simplex_tolerances_feasibility": _TIGHT,
    },
    "scip": {"numerics/feastol": _TIGHT},
    "cbc": {"allowableGap": 0, "primalTolerance": _TIGHT, "integerTolerance": _TIGHT},
}


def own_options(name: str, common: Options, limit: float | None = None) -> dict[str, NativeValue]:
    """The options of an interface by its solver's own names; none for solvers that are not in
    `NAMES`.

    name: name of the interface. limit: seconds; None: the solver's own time limit is not set.
    """
    values = {
        "gap": common.gap * GAP_SHARE,
        "threads": common.threads,
        "seed": common.seed,
        "time_limit": limit,
    }
    options = dict(_ALWAYS.get(engine(name), {}))
    for common_name, own_name in NAMES.get(engine(name), {}).items():
        value = values[common_name]
        if value is not None:
            options[own_name] = value
    return options


def available(name: str) -> bool:
    """Whether Pyomo knows an interface of that name and finds its solver on this machine."""
    if name not in set(pyo.SolverFactory):  # an unknown name would be tried as a program to execute
        return False
    return bool(pyo.SolverFactory(name).available(exception_flag=False))


def solver_label(options: Options) -> str:
    """The names of solver and interface with Pyomo's version, for results."""
    return f"{options.pyomo_solver} (Pyomo {PYOMO_VERSION})"


def configured(options: Options, limit: float | None) -> Any:
    """The solver's Pyomo interface with its options set. limit: seconds; None: no limit."""
    name = options.pyomo_solver
    require(
        name in set(pyo.SolverFactory),
        "unknown Pyomo solver",
        got=name,
        expected="a name such as " + ", ".join(COMMON_SOLVERS),
    )
    solver = pyo.SolverFactory(name)
    if not solver.available(exception_flag=False):
        here = ", ".join(filter(available, COMMON_SOLVERS)) or "none"
        raise UnsupportedError(
            f"Pyomo does not find the solver {name!r} on this machine; available here: {here}"
        )
    takes_no_limit_of_pyomo = name.endswith(("_direct", "_persistent"))
    entries = own_options(name, options, limit if takes_no_limit_of_pyomo else None)
    # the solver's own name -> the common option
    common_of = {own: common for common, own in NAMES.get(engine(name), {}).items()}
    if engine(name) == HIGHS:
        highs.instance(options)  # refuses what HiGHS would refuse
        entries |= options.native.get(highs.BACKEND, {})
    for key, value in options.native.get(BACKEND, {}).items():
        where = f"native option {BACKEND}.{key}"
        require(key not in common_of, f"{where} repeats the common option {common_of.get(key)}")
        if engine(name) == HIGHS:
            # Pyomo passes options on to HiGHS and ignores whether HiGHS refuses them
            highs.set_native(highs.instance(Options()), key, value, where)
        entries[key] = value
    for key, value in entries.items():
        solver.options[key] = value
    return solver
