"""Every method keeps to the ZeRO levels that the data allow."""

from random import Random
from typing import ClassVar

import pytest

from hetplan.formulations import family
from hetplan.formulations.joint.annealing import LocalSearch, Parameters
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.evaluate import broken, decision_of, evaluate
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import Plan
from hetplan.profiling.frameworks import FSDP
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from joint.enumeration import all_plans, random_data
from quick import rest_wide

LEVELS = [[0], [1], [2, 3], [0, 1], [3], [0, 2]]


def drawn(seed: int, levels: list[int], **sizes: int) -> JointData:
    """A random instance in which everything fits, so that the levels alone rule plans out."""
    data = random_data(Random(seed), **sizes)
    types = {
        name: kind.model_copy(update={"memory_bytes": 1e12}) for name, kind in data.types.items()
    }
    return data.model_copy(update={"types": types, "zero_levels": levels})


def least_seconds(data: JointData) -> float:
    """The seconds of the fastest plan that the evaluator accepts, by enumeration."""
    replayer = ChainReplayer.of(data)
    allowed = [plan for plan in all_plans(data) if not any(broken(data, plan))]
    return min(replayer.replay(plan).seconds for plan in allowed)


@pytest.mark.parametrize("levels", rest_wide(LEVELS, 4), ids=str)
@pytest.mark.parametrize("method", ["exact", "cp-sat", "milp"])
def test_equal_to_enumeration_within_levels(method: str, levels: list[int]) -> None:
    data = drawn(3, levels, devices=2, layers=2, batch=2)
    result = solve(family("joint"), data, method, Run(Options(time_limit=600)))
    assert result.decision is not None and result.status == "optimal"
    assert result.objective == pytest.approx(least_seconds(data), rel=1e-9)
    assert not any(broken(data, data.plan(**result.decision.model_dump())))


class Offers(LocalSearch):
    """A local search that keeps all plans that were offered as its incumbent."""

    offered: ClassVar[list[Plan]]

    def offer(self, plan: Plan, seconds: float) -> float:
        self.offered.append(plan)
        return super().offer(plan, seconds)


@pytest.mark.parametrize("levels", rest_wide(LEVELS, 3), ids=str)
def test_the_local_search_keeps_to_the_levels(levels: list[int]) -> None:
    """Levels 2 and 3 act as 1 on the pipelines of most frameworks, and as themselves on FSDP's."""
    for framework in (None, FSDP):
        data = drawn(5, levels, devices=4, layers=5, batch=6)
        if framework is not None:
            data = data.model_copy(update={"framework": framework})
        search = Offers(Space(data), Run(Options(time_limit=600)), Parameters())
        Offers.offered = []
        search.construct()
        search.vary()
        assert search.incumbent is not None
        assert {plan.zero for plan in search.offered} <= {*levels}
        assert not any(message for plan in search.offered for message in broken(data, plan))


def test_the_level_that_a_level_acts_as_is_judged() -> None:
    data = drawn(5, [2], devices=4, layers=5, batch=6)
    zeroes: dict[tuple[int, bool], Plan] = {}
    for plan in all_plans(data.model_copy(update={"zero_levels": [0, 1, 2, 3]})):
        pipeline = any(len(replica.stages) > 1 for replica in plan.replicas)
        zeroes.setdefault((plan.zero, pipeline), plan)
        if len(zeroes) == 8:
            break
    for (zero, pipeline), plan in zeroes.items():
        violations = evaluate(data, decision_of(plan)).violations
        acting = min(zero, 1) if pipeline else zero
        expected = () if acting == 2 else (f"ZeRO {acting}, expected one of 2",)
        assert violations == expected
