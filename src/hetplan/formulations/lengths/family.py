"""The family of problem `lengths`: the names of its schemas, its evaluator and its methods, whose
modules are imported on first use."""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.lengths"

FAMILY = Family(
    name="lengths",
    title="samples of unequal length on unequal replicas",
    paper="none",
    data=f"{_HERE}.data:LengthsData",
    decision=f"{_HERE}.data:LengthsDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
    methods=(
        Method(
            "auto", f"{_HERE}.exact:solve", True, "the fastest way to a proven optimum: `exact`"
        ),
        Method(
            "exact", f"{_HERE}.exact:solve", True, "branch and bound, the longest samples first"
        ),
        Method("cp-sat", f"{_HERE}.cp:formulate", True, "a place for every sample, by constraints"),
        Method(
            "greedy",
            f"{_HERE}.heuristic:solve",
            False,
            "the longest first, then moves and exchanges",
            "Graham 1969",
        ),
    ),
)
