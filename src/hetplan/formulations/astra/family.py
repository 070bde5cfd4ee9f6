"""The Astra family: its schemas, its evaluator and its methods, each named as text and imported
when it is first used."""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.astra"

FAMILY = Family(
    name="astra",
    title="segments of a heterogeneous pipeline",
    paper="Astra",
    data=f"{_HERE}.data:AstraData",
    decision=f"{_HERE}.data:AstraDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
    methods=(
        Method(
            "auto", f"{_HERE}.model:solve", True, "the fastest way to a proven optimum: `exact`"
        ),
        Method("exact", f"{_HERE}.model:solve", True, "the counted model through CP-SAT"),
        Method(
            "cp-sat",
            f"{_HERE}.cp:formulate",
            True,
            "slots of each type filled with layers, CP-SAT's own constraints",
        ),
        Method(
            "cp-sat-linear",
            f"{_HERE}.model:formulate",
            True,
            "stages counted by type and layers, CP-SAT",
        ),
        Method(
            "milp", f"{_HERE}.model:formulate", True, "stages counted by type and layers, HiGHS"
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
            "enumeration of stage counts and layers per type",
            "Astra, §3.4",
        ),
    ),
    describe=f"{_HERE}.evaluate:describe",
)
