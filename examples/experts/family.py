"""The problem and its methods, all named by strings."""

from hetplan.solvers.registry import Family, Method

FAMILY = Family(
    name="experts",
    title="placement of experts",
    paper="none",
    data="experts.data:ExpertsData",
    decision="experts.data:ExpertsDecision",
    evaluate="experts.evaluate:evaluate",
    methods=(
        Method("auto", "experts.exact:solve", True, "the fastest way to a proven optimum: `exact`"),
        Method("exact", "experts.exact:solve", True, "branch and bound, heaviest experts first"),
        Method("cp-sat", "experts.model:formulate", True, "one model, CP-SAT"),
        Method("milp", "experts.model:formulate", True, "the same model, HiGHS"),
        Method("greedy", "experts.greedy:solve", False, "longest first", "Graham 1969"),
    ),
)
