"""What the solvers behind Pyomo call the options that hetplan sets for all of them. Imports no
solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.solvers.native import GAP_SHARE
from hetplan.solvers.options import NativeValue, Options

HIGHS = "highs"
# Interface names that are tried when the caller asks what is installed.
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


@dataclass(frozen=True)
class Dialect:
    """A solver's names of the common options (None: it has none), and what hetplan always sets.

    clock: of the time limit, for the older direct interfaces, which ignore the one that Pyomo
    passes.
    """

    gap: str | None = None
    threads: str | None = None
    seed: str | None = None
    clock: str | None = None
    always: Mapping[str, NativeValue] = field(default_factory=dict)

    def options(self, common: Options, limit: float | None = None) -> dict[str, NativeValue]:
        """The common options in the solver's own words; limit: seconds, where `clock` is to be
        set."""
        named = {
            self.gap: common.gap * GAP_SHARE,
            self.threads: common.threads,
            self.seed: common.seed,
        }
        if limit is not None:
            named[self.clock] = limit
        return {**self.always, **{name: value for name, value in named.items() if name is not None}}

    def common_name(self, native: str) -> str | None:
        """The common option that `native` would repeat."""
        for common in ("gap", "threads", "seed", "clock"):
            if native == getattr(self, common):
                return "time_limit" if common == "clock" else common
        return None


_DIALECTS = {
    HIGHS: Dialect(
        gap="mip_rel_gap",
        threads="threads",
        seed="random_seed",
        clock="time_limit",
        always={
            "output_flag": False,
            "mip_abs_gap": 0.0,
            "mip_feasibility_tolerance": _TIGHT,
            "primal_feasibility_tolerance": _TIGHT,
            "dual_feasibility_tolerance": _TIGHT,
        },
    ),
    "gurobi": Dialect(
        gap="MIPGap",
        threads="Threads",
        seed="Seed",
        clock="TimeLimit",
        always={"MIPGapAbs": 0, "FeasibilityTol": _TIGHT, "IntFeasTol": _TIGHT},
    ),
    "cplex": Dialect(
        gap="mip_tolerances_mipgap",
        threads="threads",
        seed="randomseed",
        clock="timelimit",
        always={
            "mip_tolerances_absmipgap": 0,
            "mip_tolerances_integrality": 0,
            "simplex_tolerances_feasibility": _TIGHT,
        },
    ),
    "scip": Dialect(
        gap="limits/gap",
        threads="lp/threads",
        seed="randomization/randomseedshift",
        always={"numerics/feastol": _TIGHT},
    ),
    "cbc": Dialect(
        gap="ratioGap",
        threads="threads",
        seed="randomCbcSeed",
        always={"allowableGap": 0, "primalTolerance": _TIGHT, "integerTolerance": _TIGHT},
    ),
    "glpk": Dialect(gap="mipgap", seed="seed"),
}


def engine(name: str) -> str:
    """The solver behind one of Pyomo's interface names: `gurobi_direct_v2`, `appsi_gurobi` ->
    `gurobi`."""
    base = name.removeprefix("appsi_").removesuffix("_v2")
    for suffix in ("_direct", "_persistent"):
        base = base.removesuffix(suffix)
    return base


def dialect(name: str) -> Dialect:
    """The dialect of a Pyomo interface name; an empty one for solvers that hetplan does not
    know."""
    return _DIALECTS.get(engine(name), Dialect())
