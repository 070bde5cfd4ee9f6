"""A fault in one strategy costs that strategy's row and nothing else: every other answer stands,
and the row has what a report of the fault needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from fakes.workloads import one_thread, small
from hetplan import __version__
from hetplan.cli.plan import planning_tables
from hetplan.errors import DisagreementError, InputError
from hetplan.planner.amp import DataParallel
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.hap import Hap
from hetplan.planner.planning import Planning
from hetplan.planner.proposals import propose
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import StrategySearch
from hetplan.planner.strategy import Strategy
from hetplan.profiling.profiles.profile import ProfileLayer
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Run
from present import present


@dataclass
class Faulty(Strategy):
    """Data parallelism that raises an error where it is told to."""

    name: ClassVar[str] = "faulty"
    methods: ClassVar[tuple[StrategyMethod, ...]] = DataParallel.methods
    recomputes: ClassVar[bool] = True
    place: str = "pose"
    error: Exception | None = None

    def pose(self, workload: Workload, run: Run) -> Any:
        """The problem of plain data parallelism, or the error."""
        self.fail_in("pose")
        (problem,) = DataParallel().pose(workload, run)
        return [FaultyProblem(self, problem)]

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """Nothing, or the error."""
        self.fail_in("within_replay")
        return None

    def beginning_with(self, plans: Any) -> Strategy:
        """Itself, or the error."""
        self.fail_in("beginning_with")
        return self

    def fail_in(self, place: str) -> None:
        """Raise the error where this is the place."""
        if place == self.place and self.error is not None:
            raise self.error


@dataclass
class FaultyProblem:
    """A problem whose solution raises the strategy's error."""

    strategy: Faulty
    problem: Any

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method itself."""
        return method

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The candidate; one that is said to fit and does not, or one without a plan file."""
        self.strategy.fail_in("solve")
        candidate: Candidate = self.problem.solve(method, run)
        if self.strategy.place == "replay":
            broken = present(candidate.plan).model_copy(update={"zero": None})
            return replace(candidate, plan=broken)
        return candidate


def planned(workload: Workload, strategy: Strategy) -> Planning:
    """What it and plain data parallelism propose."""
    return make_plans(workload, [strategy, DataParallel()], one_thread())


@pytest.mark.parametrize("place", ["pose", "solve", "beginning_with", "replay"])
@pytest.mark.parametrize(
    "error", [KeyError("embedding"), ZeroDivisionError(), DisagreementError("two unequal prices")]
)
def test_a_fault_costs_one_row(workload: Workload, place: str, error: Exception) -> None:
    planning = planned(workload, Faulty(place, error))
    alone = make_plans(workload, [DataParallel()], one_thread())
    assert present(planning.best).predicted_seconds == present(alone.best).predicted_seconds
    failed = [c for c in planning.candidates if c.failed]
    assert {c.strategy for c in failed} == {"faulty"} and {c.status for c in failed} == {"unknown"}
    assert all(c.plan is None for c in failed)
    for candidate in failed:
        assert f"hetplan {__version__}, Python 3." in candidate.message
        assert ", line " in candidate.message and "\n" not in candidate.message
        if place != "replay":
            assert type(error).__name__ in candidate.message
    tables = "\n".join(line for t in planning_tables(planning, False) for line in t.notes)
    assert "faulty/enumeration failed: " in tables and "report" in tables


def test_a_fault_where_the_replay_needs_more_memory_costs_one_row(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(search: StrategySearch, proposed: Any, first: Any, posed: Any, run: Any) -> Any:
        return search.strategy.within_replay(posed, run, first.bound) or first

    monkeypatch.setattr(StrategySearch, "within_memory", lacks)
    planning = planned(workload, Faulty("within_replay", IndexError("list index out of range")))
    assert present(planning.best).strategy == "dp"
    (failed,) = {c.message for c in planning.candidates if c.failed}
    assert "IndexError: list index out of range" in failed


@pytest.mark.parametrize("place", ["pose", "solve"])
def test_what_the_user_can_mend_still_ends_the_planning(workload: Workload, place: str) -> None:
    with pytest.raises(InputError, match="no such curve"):
        planned(workload, Faulty(place, InputError("no such curve")))


def test_debugging_shows_the_fault_itself(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPLAN_DEBUG", "1")
    with pytest.raises(KeyError, match="embedding"):
        planned(workload, Faulty("solve", KeyError("embedding")))


def with_layer_names(workload: Workload, names: list[str]) -> Workload:
    """The workload made anew from its profile with these names of layers."""
    profile = workload.profile
    layers = [
        ProfileLayer.model_validate({**dict(layer), "name": name})
        for layer, name in zip(profile.layers, names, strict=True)
    ]
    renamed = profile.model_copy(update={"layers": layers})
    return make_workload(workload.model, workload.cluster, workload.global_batch, profile=renamed)


def test_layers_of_an_imported_profile_bear_the_models_names() -> None:
    """HAP's programs, plan files and exports speak of layers by name; importers count them."""
    on = small()
    named = with_layer_names(on, [f"layer-{i}" for i in range(len(on.profile.layers))])
    assert named.profile.layers == on.profile.layers and named.profile.tables == on.profile.tables
    quick = [method for method in Hap.methods if method.quick]
    (candidate,) = propose(Hap(), named, one_thread(), quick)
    (original,) = propose(Hap(), on, one_thread(), quick)
    assert present(candidate.plan) == present(original.plan)
    assert candidate.closed_form_seconds == original.closed_form_seconds


def test_layers_in_another_order_are_refused() -> None:
    on = small()
    names = [layer.name for layer in on.profile.layers]
    message = r"layers\[0\].name: .*another order .*got 'head', expected 'embedding'"
    with pytest.raises(InputError, match=message):
        with_layer_names(on, names[::-1])
