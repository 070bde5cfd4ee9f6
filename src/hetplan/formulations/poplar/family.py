"""The Poplar family: the names of its schemas, its evaluator and its methods, whose modules are
imported on first use."""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.poplar"

FAMILY = Family(
    name="poplar",
    title="integer batch allocation under ZeRO 0 to 3",
    paper="Poplar (AAAI 2025)",
    data=f"{_HERE}.data:PoplarData",
    decision=f"{_HERE}.data:PoplarDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
    describe=f"{_HERE}.evaluate:describe",
    beside=("under_utilisation",),
    methods=(
        Method(
            "auto",
            f"{_HERE}.exact:solve",
            True,
            "the fastest way to a proven optimum: `exact`",
        ),
        Method(
            "exact",
            f"{_HERE}.exact:solve",
            True,
            "threshold search (ZeRO 0, 1), knapsack over steps (ZeRO 2, 3)",
        ),
        Method(
            "cp-sat",
            f"{_HERE}.cp:formulate",
            True,
            "groups as crews with tables of seconds, CP-SAT's own constraints",
        ),
        Method(
            "cp-sat-linear",
            f"{_HERE}.model:formulate",
            True,
            "counts per device group and batch, CP-SAT",
        ),
        Method(
            "milp",
            f"{_HERE}.model:formulate",
            True,
            "the same counts as a mixed-integer programme, HiGHS",
        ),
        Method(
            "pyomo",
            f"{_HERE}.model:formulate",
            True,
            "the same programme through Pyomo, for any solver it knows",
        ),
        Method(
            "paper",
            f"{_HERE}.paper:solve",
            False,
            "profiling, splines and search",
            "Poplar, Algorithms 1 and 2",
        ),
        Method(
            "weak-only",
            f"{_HERE}.paper:solve_by",
            False,
            "`deepspeed` on the slowest type alone",
            "Poplar, baseline 1",
            baseline=True,
        ),
        Method(
            "strong-only",
            f"{_HERE}.paper:solve_by",
            False,
            "`deepspeed` on the fastest type alone",
            "Poplar, baseline 2",
            baseline=True,
        ),
        Method(
            "deepspeed",
            f"{_HERE}.paper:deepspeed",
            False,
            "one micro-batch for all",
            "Poplar, baseline 3",
            baseline=True,
        ),
        Method(
            "whale",
            f"{_HERE}.paper:whale",
            False,
            "shares by peak fp32 FLOP/s",
            "Poplar, baseline 4",
            baseline=True,
        ),
    ),
)
