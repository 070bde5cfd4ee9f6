"""The HAP family: the names of its schemas, its evaluator and its methods, whose modules are
imported on first use.

Every method uses HiGHS, which finds the best ratios of a program. `milp` has no `uses`, since
`BACKENDS` of the registry has HiGHS for its name.

Words of the methods' summaries: the graph of needs has a path for every program, with the
properties that the program must still provide as nodes (module `needs`). A sum over it is a
shortest path, the lower bound of a cell of ratios. "Paths times ratios": the models have products
of a path's 0-1 variables and the ratios (module `model`). "From gathered factors": the two factors
of a gradient's product are gathered on every device, in place of an all-reduce of the gradient.
"""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.hap"

FAMILY = Family(
    name="hap",
    title="distributed program and sharding ratios together",
    paper="HAP",
    data=f"{_HERE}.data:HapData",
    decision=f"{_HERE}.data:HapDecision",
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
            "branch and bound over cells of ratios, sums over the graph of needs; "
            "ratios alone for a given program",
            uses=("highs",),
        ),
        Method(
            "cp-sat",
            f"{_HERE}.cp:solve_by",
            True,
            "triples at positions, stages as intervals, ratios on a grid, by constraints",
            uses=("cp-sat", "highs"),
        ),
        Method(
            "cp-sat-linear",
            f"{_HERE}.model:solve_by",
            True,
            "paths in the graph of needs times ratios on a grid, CP-SAT",
            uses=("cp-sat", "highs"),
        ),
        Method(
            "milp",
            f"{_HERE}.model:solve_by",
            True,
            "paths in the graph of needs times ratios, HiGHS",
        ),
        Method(
            "pyomo",
            f"{_HERE}.model:solve_by",
            True,
            "the same programme through Pyomo, for any solver it knows",
            uses=("pyomo", "highs"),
        ),
        Method(
            "paper",
            f"{_HERE}.paper:solve",
            False,
            "A* for fixed ratios and the ratio programme for a fixed program, in turn",
            "HAP, §3.1, Fig. 10, §4.5, §5",
            uses=("highs",),
            version=2,
        ),
        *(
            Method(
                name,
                f"{_HERE}.baselines:solve_by",
                False,
                summary,
                "HAP, §7.1",
                baseline=True,
                uses=("highs",),
                version=2 if name == "deepspeed" else 1,
            )
            for name, summary in (
                ("dp-even", "data parallelism, even ratios (DP-EV)"),
                ("dp-proportional", "data parallelism, ratios in proportion to speed (DP-CP)"),
                # "the same" as `dp-proportional`
                ("tag", "the same, all-reduced or from gathered factors (TAG's data parallelism)"),
                ("deepspeed", "the best program at even ratios (as experts write for DeepSpeed)"),
            )
        ),
    ),
    describe=f"{_HERE}.evaluate:describe",
    show=f"{_HERE}.evaluate:show",
)
