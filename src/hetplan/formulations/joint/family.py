"""The joint family: its schemas, its evaluator and its methods, each named as text and imported
when it is first used."""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.joint"

FAMILY = Family(
    name="joint",
    title="the plan whose replayed iteration is shortest",
    paper="hetplan",
    data=f"{_HERE}.data:JointData",
    decision=f"{_HERE}.data:JointDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
    describe=f"{_HERE}.evaluate:describe",
    certify=f"{_HERE}.certificate.write:certify",
    verify=f"{_HERE}.certificate.document:verify",
    methods=(
        Method(
            "auto",
            f"{_HERE}.exact:solve",
            True,
            "the fastest way to a proven optimum: `exact`",
            uses=("highs",),
        ),
        Method(
            "exact",
            f"{_HERE}.exact:solve",
            True,
            "local search, then branch and bound (up to 6 devices) or a bound of all plans",
            uses=("highs",),
        ),
        Method(
            "cp-sat",
            f"{_HERE}.cp:solve",
            True,
            "passes and messages as intervals, by constraints; plans replayed and excluded",
        ),
        Method(
            "cp-sat-linear",
            f"{_HERE}.general:solve_by",
            True,
            "layouts and ways to run replicas as one model, plans replayed and excluded; CP-SAT",
            uses=("cp-sat", "highs"),
        ),
        Method(
            "milp",
            f"{_HERE}.general:solve_by",
            True,
            "the same model as a mixed-integer programme, HiGHS",
        ),
        Method(
            "pyomo",
            f"{_HERE}.general:solve_by",
            True,
            "the same programme through Pyomo, for any solver it knows",
            uses=("pyomo", "highs"),
        ),
        Method("search", f"{_HERE}.search:search", False, "local search over plans by replay"),
        Method(
            "schedule",
            f"{_HERE}.schedule.solve:solve",
            False,
            "the plan of `search`, with the best order of its passes and a bound; CP-SAT",
        ),
    ),
)
