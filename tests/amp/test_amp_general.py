"""The general models, configuration by configuration, and the loop, bounds and tables around
them."""

from __future__ import annotations

import math

import pytest

from amp.cases import CASES, QUICK, SMALL, data_of
from amp.mixed import mixed_cluster
from amp.oracle import Enumeration
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.evaluate import evaluate
from hetplan.formulations.amp.family import FAMILY
from hetplan.formulations.amp.layout import Tables
from hetplan.formulations.amp.model import Minimise, Parameters, Programme, Question, solve_by
from hetplan.formulations.amp.problem import Strategy, compile_problem, find_cells
from hetplan.formulations.amp.rows import quick_seconds
from hetplan.solvers.general import minimise
from hetplan.solvers.model import Model, ModelAnswer
from hetplan.solvers.native import Sink
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Progress, Run, Stop
from quick import rest_wide

Case = tuple[int, int | None]
# The first four tell whether ranks are ordered once for all stages or, wrongly, in each stage by
# itself.
HELD: list[Case] = [(34, None), (111, None), (112, None), (148, None), *SMALL[:20]]


def tables_of(data: AmpData) -> list[Tables]:
    """One per configuration."""
    problem = compile_problem(data)
    cells = find_cells(problem)
    return [Tables(problem, configuration, cells) for configuration in problem.configurations()]


def cheapest(data: AmpData, tables: Tables) -> float | None:
    """The optimum of one configuration by enumeration."""
    c = tables.configuration
    found = Enumeration(data, (c.pipeline, c.data, c.tensor, c.micro_batch, c.gas)).best(math.inf)
    return None if found is None else found[0]


def run(**options: object) -> Run:
    return Run(Options(**{"threads": 1, "time_limit": 120.0, **options}))  # type: ignore[arg-type]


def ask(
    method: str, tables: Tables, lower: float = 0.0, cutoff: float | None = None
) -> tuple[ModelAnswer, Strategy | None]:
    """One configuration without any help from the loop; and the strategy of the answer."""
    programme = Programme(Question(tables, lower, cutoff), math.inf)
    answer = minimise(method, programme.model, run(), lambda incumbent, bound: None)
    return answer, programme.strategy(answer) if answer.has_solution else None


@pytest.mark.parametrize("case", rest_wide(HELD, 3), ids=str)
@pytest.mark.parametrize("model", ["cp-sat-linear", "milp"])
def test_model_of_each_configuration_equals_enumeration(model: str, case: Case) -> None:
    data = data_of(case)
    for tables in tables_of(data):
        best = cheapest(data, tables)
        answer, strategy = ask(model, tables)
        if best is None:
            assert answer.stop is Stop.INFEASIBLE
            continue
        assert answer.stop is Stop.OPTIMAL, answer.message
        assert strategy is not None and answer.bound is not None
        assert evaluate(data, strategy.decision()).objective == pytest.approx(
            best, rel=1e-6, abs=1e-9
        )
        assert best * (1 - 1e-6) - 1e-9 <= answer.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("case", rest_wide(QUICK[:7], 2), ids=str)
@pytest.mark.parametrize("model", ["cp-sat-linear", "milp"])
def test_nothing_is_found_below_the_optimum_and_the_optimum_is_found_at_it(
    model: str, case: Case
) -> None:
    data = data_of(case)
    for tables in tables_of(data):
        best = cheapest(data, tables)
        if best is not None and best > 0:
            below, _ = ask(model, tables, cutoff=best * (1 - 1e-6))
            assert below.stop is Stop.INFEASIBLE
            _, strategy = ask(model, tables, lower=best * 0.9, cutoff=best * (1 + 1e-6))
            assert strategy is not None


@pytest.mark.parametrize("case", rest_wide(CASES[::4], 8), ids=str)
def test_cheap_bounds_are_below_and_the_slowest_total_above_every_configuration(case: Case) -> None:
    data = data_of(case)
    for tables in tables_of(data):
        best = cheapest(data, tables)
        if best is None:
            continue
        assert quick_seconds(tables.problem, tables.configuration) <= best * (1 + 1e-9)
        assert tables.slowest_seconds >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    ("method", "devices", "memory"),
    [
        pytest.param("cp-sat", 8, False, marks=pytest.mark.wide),
        ("cp-sat-linear", 8, False),
        ("milp", 8, True),
        pytest.param("pyomo", 8, True, marks=pytest.mark.wide),
        pytest.param("cp-sat", 8, True, marks=pytest.mark.wide),
        pytest.param("cp-sat-linear", 8, True, marks=pytest.mark.wide),
        *(pytest.param(method, 8, False, marks=pytest.mark.wide) for method in ("milp", "pyomo")),
        # large enough for coefficients beyond 2^31, where CP-SAT 9.15's presolve needs care
        pytest.param("cp-sat-linear", 16, False, marks=pytest.mark.wide),
    ],
)
def test_mixed_clusters_are_proven(method: str, devices: int, memory: bool) -> None:
    data = mixed_cluster(nodes=devices // 4, per_node=4, layers=3 * devices // 4, memory=memory)
    exact, general = solve(FAMILY, data, "exact", run()), solve(FAMILY, data, method, run())
    assert exact.status == general.status == "optimal"
    assert general.objective == pytest.approx(exact.objective, rel=1e-6)


@pytest.mark.parametrize("method", ["cp-sat-linear", "milp", "pyomo"])
def test_time_out_keeps_decision_and_bound(method: str) -> None:
    result = solve(
        FAMILY, mixed_cluster(nodes=4, per_node=8, layers=30), method, run(time_limit=0.3)
    )
    assert (result.stop, result.status) == (Stop.LIMIT, "feasible")
    assert result.bound is not None and result.objective is not None
    assert 0 < result.bound < result.objective


def test_cancel_keeps_decision_and_bound() -> None:
    """The user stops the run at the first model's note."""
    going = run(time_limit=None)

    def watch(progress: Progress) -> None:
        if progress.note.startswith("pp"):
            going.cancel.set()

    going.watch = watch
    result = solve(FAMILY, mixed_cluster(nodes=4, per_node=8, layers=30), "milp", going)
    assert (result.stop, result.status) == (Stop.INTERRUPTED, "feasible")
    assert result.bound is not None


@pytest.mark.parametrize("method", ["cp-sat", "cp-sat-linear"])
def test_infeasibility_says_why(method: str) -> None:
    data = mixed_cluster(nodes=2, per_node=2, layers=4, memory=True)
    tight = data.memory.model_copy(update={"device_bytes": {"fast": 1.0, "slow": 1.0}})  # type: ignore[union-attr]
    result = solve(FAMILY, data.model_copy(update={"memory": tight}), method, run())
    assert result.status == "infeasible" and result.bound is None
    assert "memory" in result.message
    undivided = data.model_copy(update={"global_batch": 7, "layer_seconds": [
        entry for entry in data.layer_seconds if entry.tensor == 1 and entry.micro_batch == 2
    ]})  # fmt: skip
    result = solve(FAMILY, undivided, method, run())
    assert result.status == "infeasible"
    assert "degrees" in result.message
    lonely = [
        entry for entry in data.layer_seconds if (entry.type == "fast") == (entry.tensor == 1)
    ]
    result = solve(FAMILY, data.model_copy(update={"layer_seconds": lonely}), method, run())
    assert result.status == "infeasible"  # no table that both types have


def answering(answer: ModelAnswer) -> Minimise:
    """A solver that always says the same."""
    return lambda method, model, run, report: answer


def test_a_failing_back_end_is_an_error_that_keeps_incumbent_and_bound() -> None:
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    outcome = solve_by(
        "cp-sat-linear", data, run(), answering(ModelAnswer(stop=Stop.ERROR, message="broken"))
    )
    assert outcome.stop is Stop.ERROR and "broken" in outcome.message
    assert outcome.decision is not None and outcome.bound is not None
    assert evaluate(data, outcome.decision).objective > outcome.bound > 0  # type: ignore[operator]


@pytest.mark.parametrize("stop", [Stop.OPTIMAL, Stop.INFEASIBLE])
def test_what_a_model_says_counts_up_to_the_cutoff_only(stop: Stop) -> None:
    """A model looks below the cut-off; decisions between that and the incumbent may still be
    cheaper than it says."""
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    bound = 1e9 if stop is Stop.OPTIMAL else None
    outcome = solve_by(
        "cp-sat-linear", data, run(gap=0.01), answering(ModelAnswer(stop=stop, bound=bound))
    )
    assert (
        outcome.stop is Stop.OPTIMAL and outcome.decision is not None and outcome.bound is not None
    )
    objective = evaluate(data, outcome.decision).objective
    assert objective is not None
    assert outcome.bound == pytest.approx(objective * (1 - 0.005))


def test_huge_models_are_given_up() -> None:
    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    outcome = solve_by("cp-sat-linear", data, run(), parameters=Parameters(most_terms=100))
    assert outcome.stop is Stop.LIMIT and "more than 100 terms" in outcome.message
    assert outcome.decision is not None and outcome.bound is not None


def test_an_open_configuration_leaves_the_others_their_turn() -> None:
    """One that another limit than time ends keeps its bound; all others are still asked."""
    asked: list[Model] = []
    configurations: set[str] = set()
    going = run(time_limit=None)

    def watch(progress: Progress) -> None:
        if progress.note.startswith("pp"):
            configurations.add(progress.note)

    def answer(method: str, model: Model, run: Run, report: Sink) -> ModelAnswer:
        asked.append(model)
        return ModelAnswer(stop=Stop.LIMIT if len(asked) == 1 else Stop.INFEASIBLE)

    going.watch = watch

    data = mixed_cluster(nodes=2, per_node=2, layers=6)
    outcome = solve_by("cp-sat-linear", data, going, answer)
    assert len(asked) == len(configurations) == outcome.details["models"]
    assert len(asked) > 1 and outcome.stop is Stop.LIMIT
    assert outcome.bound is not None and outcome.decision is not None
