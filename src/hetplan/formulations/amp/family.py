"""The AMP family: its schemas, its evaluator and its methods, each named as text and imported when
it is first used."""

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.amp"

FAMILY = Family(
    name="amp",
    title="degrees, device placement, micro-batch and stage assignment",
    paper="AMP (NeurIPS 2022)",
    data=f"{_HERE}.data:AmpData",
    decision=f"{_HERE}.data:AmpDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
    describe=f"{_HERE}.evaluate:describe",
    # of each method: its name, its target, whether it is exact, a summary, the source
    methods=(
        Method(
            "auto", f"{_HERE}.exact:solve", True, "the fastest way to a proven optimum: `exact`"
        ),
        Method(
            "exact",
            f"{_HERE}.exact:solve",
            True,
            "bounded search over degrees, cuts and placements",
        ),
        Method(
            "cp-sat",
            f"{_HERE}.cp_search:solve_by",
            True,
            "one constraint model per degrees and micro-batch, in tables",
        ),
        Method(
            "cp-sat-linear",
            f"{_HERE}.model:solve_by",
            True,
            "one mixed-integer programme per degrees and micro-batch, CP-SAT",
        ),
        Method(
            "milp",
            f"{_HERE}.model:solve_by",
            True,
            "one mixed-integer programme per degrees and micro-batch, HiGHS",
        ),
        Method(
            "pyomo",
            f"{_HERE}.model:solve_by",
            True,
            "the same programme through Pyomo, for any solver it knows",
        ),
        Method(
            "paper",
            f"{_HERE}.paper:solve_by",
            False,
            "enumeration; cuts by an O(k L^4) dynamic programme, k stages and L layers",
            "AMP, Algorithm 1",
        ),
        Method(
            "paper-released",
            f"{_HERE}.paper:solve_by",
            False,
            "the same as in the published code: costs without links, rings by their closing edge",
            "AMP, published code",
        ),
        Method(
            "paper-uniform",
            f"{_HERE}.paper:solve_by",
            False,
            "Algorithm 1's strategy, cut into equally many layers",
            "AMP, §4.5 (ours w/ uniform)",
            baseline=True,
        ),
        Method(
            "paper-parameter",
            f"{_HERE}.paper:solve_by",
            False,
            "Algorithm 1's strategy, cut by parameters",
            "AMP, §4.5 (ours w/ parameter)",
            baseline=True,
        ),
        Method(
            "megatron",
            f"{_HERE}.baselines:megatron",
            False,
            "Megatron's rules",
            "AMP, §4.1",
            baseline=True,
        ),
        Method(
            "annealing",
            f"{_HERE}.baselines:annealing",
            False,
            "annealing over placements",
            "AMP, §4.2",
            baseline=True,
            version=2,
        ),
        Method(
            "random",
            f"{_HERE}.baselines:random",
            False,
            "50 random strategies",
            "AMP, §4.5 (RS)",
            baseline=True,
        ),
    ),
)
