"""The solvers behind Pyomo: which are here, and what they call the common options.

A solver goes by the name that Pyomo's `SolverFactory` has for its interface: `highs`, `gurobi`,
`cplex`, `scip`, `cbc`, `glpk` and more. A solver that is not in `SOLVERS` is told the time limit
and none of the other common options.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    "appsi_highs", "highs", "gurobi", "gurobi_direct", "cplex", "cplex_direct", "scip",
    "scip_direct", "cbc", "glpk", "xpress_direct", "mosek_direct",
)  # fmt: skip


@dataclass(frozen=True)
class Solver:
    """A solver's names of the common options. None: it has no such option, or Pyomo passes it."""

    gap: str | None = None
    seed: str | None = None
    threads: str | None = None
    # the interfaces `gurobi`, `gurobi_direct` and `cplex_direct` ignore the limit that Pyomo passes
    time_limit: str | None = None
    always: Mapping[str, NativeValue] = field(default_factory=dict)  # further options to set
    whole_seconds: bool = False  # whether the time limit has to be whole, as for glpsol
    prints: bool = False  # whether it prints in this process, whatever its options

    def common(self) -> dict[str, str]:
        """Common option -> the solver's own name of it, where it has one."""
        names = ("gap", "seed", "threads", "time_limit")
        return {name: own for name in names if (own := getattr(self, name)) is not None}


_TIGHT = 1e-9  # feasibility tolerance: a plan's bound has to hold to 1e-6
_GUROBI = {"MIPGapAbs": 0, "FeasibilityTol": _TIGHT, "IntFeasTol": _TIGHT}
_CPLEX = {
    "mip_tolerances_absmipgap": 0,
    "mip_tolerances_integrality": 0,
    "simplex_tolerances_feasibility": _TIGHT,
}
_SCIP = {"numerics/feastol": _TIGHT, "display/verblevel": 0}
_SCIP_SEED = "randomization/randomseedshift"
_CBC = {"allowableGap": 0, "primalTolerance": _TIGHT, "integerTolerance": _TIGHT}
_HIGHS = {**highs.SETTINGS, **highs.EXACT}
SOLVERS = {
    # gap, seed, threads, time limit, further options
    HIGHS: Solver("mip_rel_gap", "random_seed", "threads", "time_limit", _HIGHS),
    "gurobi": Solver("MIPGap", "Seed", "Threads", "TimeLimit", _GUROBI, prints=True),
    "cplex": Solver("mip_tolerances_mipgap", "randomseed", "threads", "timelimit", _CPLEX),
    "scip": Solver("limits/gap", _SCIP_SEED, "lp/threads", "limits/time", _SCIP),
    "cbc": Solver("ratioGap", "randomCbcSeed", "threads", None, _CBC),
    "glpk": Solver("mipgap", "seed", whole_seconds=True),
}
UNKNOWN = Solver(prints=True)


def solver_of(name: str) -> Solver:
    """The solver behind an interface of Pyomo; `UNKNOWN` where it is not in `SOLVERS`."""
    return SOLVERS.get(engine(name), UNKNOWN)


def own_options(name: str, common: Options) -> dict[str, NativeValue]:
    """The options of an interface by its solver's own names, without the time limit."""
    solver = solver_of(name)
    values = {"gap": common.gap * GAP_SHARE, "seed": common.seed, "threads": common.threads}
    own = {own: values[option] for option, own in solver.common().items() if option in values}
    return {**solver.always, **own}


def limit_time(interface: Any, name: str, seconds: float) -> float | None:
    """Set the time limit of an interface. Returns the limit for Pyomo to pass, None for none.

    name: name of the interface. seconds: seconds of the limit, infinite for no limit.
    """
    if math.isinf(seconds):
        return None
    solver = solver_of(name)
    # several solvers take 0 for no limit
    limit = math.ceil(seconds) if solver.whole_seconds else max(seconds, 1e-3)
    if solver.time_limit is None:
        return limit
    interface.options[solver.time_limit] = limit
    return None


def available(name: str) -> bool:
    """Whether Pyomo knows an interface of that name and finds its solver on this machine."""
    if name not in set(pyo.SolverFactory):  # an unknown name would be tried as a program to execute
        return False
    return bool(pyo.SolverFactory(name).available(exception_flag=False))


def solver_label(options: Options) -> str:
    """The names of solver and interface with Pyomo's version, for results."""
    return f"{options.pyomo_solver} (Pyomo {PYOMO_VERSION})"


def configured(options: Options) -> Any:
    """The solver's Pyomo interface with its options, without the time limit.

    Raises UnsupportedError where that solver is not installed (naming those that are), InputError
    for an unknown solver name or a native option that repeats a common one.
    """
    name = options.pyomo_solver
    expected = "a name such as " + ", ".join(COMMON_SOLVERS)
    require(name in set(pyo.SolverFactory), "unknown Pyomo solver", got=name, expected=expected)
    if not available(name):
        here = ", ".join(filter(available, COMMON_SOLVERS)) or "none"
        raise UnsupportedError(
            f"Pyomo does not find the solver {name!r} on this machine; available here: {here}"
        )
    chosen, native = own_options(name, options), options.native.get(BACKEND, {})
    for common, own in solver_of(name).common().items():
        where = f"native option {BACKEND}.{own}"
        require(own not in native, f"{where} repeats the common option {common}")
    if engine(name) == HIGHS:
        # Pyomo passes options on to HiGHS and ignores whether HiGHS refuses them
        checked = highs.instance(options)
        for key, value in native.items():
            highs.set_native(checked, key, value, f"native option {BACKEND}.{key}")
        chosen |= options.native.get(highs.BACKEND, {})
    interface = pyo.SolverFactory(name)
    for key, value in (chosen | dict(native)).items():
        interface.options[key] = value
    return interface
