"""The search counts its work, so that a clock does not decide what it finds."""

from random import Random
from typing import Any

import pytest

from hetplan.clock import CLOCK
from hetplan.formulations.joint import exact, workers
from hetplan.formulations.joint.annealing import Parameters
from hetplan.formulations.joint.bound.driver import seconds_alone
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.replica_bounds import PATHS_SECONDS
from hetplan.formulations.joint.search import search
from hetplan.solvers.branch_and_bound import Incumbent
from hetplan.solvers.run import CUT, Options, Outcome, Run, Stop
from joint.enumeration import random_data
from joint.test_bound import even_data

BUDGET = 0.3  # counted seconds


def found(options: Options, parameters: Parameters, budget: float = BUDGET) -> Outcome[Any]:
    data = random_data(Random(31), devices=6, layers=7, batch=12)
    return search(data, Run(options, budget=budget), parameters=parameters)


@pytest.mark.parametrize("faster", [10.0, 0.1])
def test_another_clock_gives_the_same_plan(faster: float, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(time_limit=1e4)
    before = found(options, Parameters())
    real = CLOCK.now
    monkeypatch.setattr(CLOCK, "now", lambda: faster * real())
    after = found(options, Parameters())
    assert after.decision == before.decision is not None
    assert after.details == before.details
    assert after.stop is Stop.LIMIT and CUT not in after.message


def test_a_larger_budget_runs_more_steps() -> None:
    steps = [found(Options(), Parameters(), budget).details["steps"] for budget in (0.2, 0.4)]
    assert isinstance(steps[0], int) and isinstance(steps[1], int)
    assert 0 < steps[0] < steps[1]


def test_a_time_limit_cuts_and_the_answer_says_where() -> None:
    cut = found(Options(time_limit=1e-3), Parameters(grace=10.0), budget=1e6)
    assert cut.message.startswith(f"{CUT}: joint after ")


def test_parts_of_a_run_share_its_count() -> None:
    run = Run(Options(time_limit=100.0), budget=10.0)
    part = run.share(4)
    assert part.budget == 2.5
    part.count(2.0)
    assert (part.spent, part.remaining, run.spent, run.remaining) == (2.0, 0.5, 2.0, 8.0)
    part.count(1.0)
    assert part.should_stop and not part.cut and not run.should_stop
    assert run.part(seconds=3.0).budget == 3.0 and run.part(seconds=30.0).budget == 7.0


def test_a_worker_that_dies_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters(workers=2, least_shared=0.0)

    class Dead(workers.Helper):
        def begin(self, task: workers.Task) -> None:
            self.process.kill()
            self.process.wait()
            super().begin(task)

    monkeypatch.setattr(workers, "Helper", Dead)
    two, again = found(Options(), parameters), found(Options(), parameters)
    assert two.details["workers"] == 2
    assert (two.decision, two.details) == (again.decision, again.details)
    one = found(Options(), Parameters())
    assert int(two.details["replays"]) > 1.5 * int(one.details["replays"])  # type: ignore[call-overload]


@pytest.mark.engine
def test_a_process_finds_what_this_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters(workers=2, least_shared=0.0)
    kept = workers.run_rounds
    here: list[workers.Task] = []

    def noted(task: workers.Task, *more: Any) -> workers.Rounds:
        here.append(task)
        return kept(task, *more)

    monkeypatch.setattr(workers, "run_rounds", noted)
    by_process = found(Options(), parameters)
    assert not here
    monkeypatch.setattr(workers.Helper, "begin", lambda self, task: self.process.kill())
    by_this = found(Options(), parameters)
    assert len(here) == 1
    assert (by_process.decision, by_process.details) == (by_this.decision, by_this.details)


def test_programmes_over_nodes_count_their_iterations_and_end_with_the_budget() -> None:
    of = Relaxation(even_data((1, 1), 6, 16, network=1e7, inside=1e4, tied=False))
    homes = of.patterns(10)[-1]  # both nodes

    def asked(budget: float) -> tuple[float, float, float, float]:
        """(bound by the linear programme, counted seconds, those of the whole one)."""
        run = Run(Options(threads=1), budget=budget)
        model = NodeModel(of, seconds_alone(of, run), run)
        begun, linear = run.spent, model.seconds(homes, several=False, chunks=False)
        after = run.spent - begun
        whole = model.whole(homes, several=False, chunks=False, nodes=20)
        return linear, after, whole, run.spent - begun

    linear, after, whole, spent = asked(10.0)
    assert 0 < after < spent < 1.0
    assert linear < whole
    assert asked(1.5 * after) == (linear, after, linear, after)
    cut, after_cut, _, _ = asked(0.5 * after)
    assert cut <= linear and after_cut < after


def test_bounds_of_replicas_count_their_tables_and_their_cuts() -> None:
    """Tables of a type are made once; the cuts of each micro-batch are counted anew."""
    data = even_data((2,), 6, 4, network=1e9, inside=1e9, tied=False)
    run = Run(Options(threads=1), budget=10.0)
    branching = exact.Branching(data, run, exact.Parameters(), Incumbent(run))
    roots = [plan for _, plan in branching.roots()]
    after_tables = run.spent
    assert after_tables > 0
    of_two_stages = next(plan for plan in roots if plan.deepest == 2 and plan.chunks == 1)
    branching.options(of_two_stages, 0, 4)
    assert run.spent >= after_tables + 4 * PATHS_SECONDS
    before = run.spent
    again = list(branching.roots())  # with all tables and bounds at hand
    layouts = len({plan.layout for _, plan in again})
    alone = layouts * exact.LAYOUT_SECONDS + len(again) * exact.ROOT_SECONDS
    assert run.spent - before == pytest.approx(alone) and run.spent < 0.1
