"""The Ditto family: the names of its schemas, its evaluator and its methods, whose modules are
imported on first use.

`exact` computes the prices of devices with HiGHS. The methods of the linear model take HiGHS'
options too, because they begin with a template of `exact`.
"""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.ditto"
_MERGED = "the paper's virtual stages, merged exactly"  # beginning of three summaries

FAMILY = Family(
    name="ditto",
    title="pipeline template of a heterogeneous cluster",
    paper="Ditto, on Oobleck (SOSP 2023)",
    data=f"{_HERE}.data:DittoData",
    decision=f"{_HERE}.data:DittoDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
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
            "search over θ: prices of devices, then label setting",
            uses=("highs",),
        ),
        Method(
            "cp-sat",
            f"{_HERE}.cp:formulate",
            True,
            "places of stages from the end, by constraints",
        ),
        Method(
            "cp-sat-linear",
            f"{_HERE}.model:formulate",
            True,
            "stages as arcs of a path, CP-SAT",
            uses=("cp-sat", "highs"),
        ),
        Method("milp", f"{_HERE}.model:formulate", True, "stages as arcs of a path, HiGHS"),
        Method(
            "pyomo",
            f"{_HERE}.model:formulate",
            True,
            "the same programme through Pyomo, for any solver",
            uses=("pyomo", "highs"),
        ),
        Method(
            "paper",
            f"{_HERE}.paper:solve_by",
            False,
            "folding and recovery programme",
            "Ditto, Algorithm 2",
        ),
        Method(
            "paper-powers",
            f"{_HERE}.paper:solve_by",
            False,
            "the same, its choices only groups of 1, 2, 4, … devices",
            "hetplan, on Ditto's Algorithm 2",
        ),
        Method(
            "paper-communication",
            f"{_HERE}.paper:solve_by",
            False,
            "the same, folding with in-node communication",
            "Ditto, §5.3.2",
        ),
        Method("merge", f"{_HERE}.paper:solve_by", False, _MERGED, uses=("highs",)),
        Method(
            "merge-cp-sat",
            f"{_HERE}.paper:solve_by",
            False,
            f"{_MERGED} by CP-SAT",
            uses=("cp-sat", "highs"),
        ),
        Method(
            "merge-milp",
            f"{_HERE}.paper:solve_by",
            False,
            f"{_MERGED} by HiGHS",
            uses=("highs",),
        ),
        Method(
            "greedy",
            f"{_HERE}.paper:solve_by",
            False,
            "greedy recovery",
            "Ditto, Algorithm 1",
            baseline=True,
        ),
        Method(
            "greedy-joined",
            f"{_HERE}.paper:solve_by",
            False,
            "the same from every virtual template; stages without devices join neighbours",
            "hetplan, on Ditto's Algorithm 1",
            baseline=True,
        ),
        Method(
            "oobleck",
            f"{_HERE}.oobleck:solve",
            False,
            "divide and conquer over device vectors",
            "Ditto, eq. 1-3",
            baseline=True,
        ),
    ),
    describe=f"{_HERE}.templates:describe",
)
