"""The search over plans with further degrees: against an enumeration of like replicas in Megatron's
order of ranks, and what it may not propose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from typing import Any, Literal

import pytest

from fakes.workloads import BARE, cluster
from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.joint.annealing import LocalSearch
from hetplan.planner.astra import PoolProblem, least_seconds
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.joint import FURTHER, SCHEDULES, FurtherProblem, FurtherSpace
from hetplan.plans.degrees import Degrees
from hetplan.plans.making import new_plan
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.plans.plan import PassSchedule, Plan
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.pose import pose
from hetplan.replays.replay import replay
from hetplan.solvers.run import Options, Run
from present import present

BLOCKS = 2
EXCHANGES: tuple[Literal["ring", "all-to-all"], ...] = ("ring", "all-to-all")


def workload(memory_gib: float, experts: bool, mixed: bool = False) -> Workload:
    """A small model in fp16 on two nodes of two devices."""
    shape = llama(
        BLOCKS, 512, 4, 1024, kv_heads=4, experts=Experts(count=4, active=2) if experts else None
    )
    model = load_model(text_model("tiny", "test", 256, shape))
    kinds = ("T4", "V100-SXM2-16GB" if mixed else "T4")
    nodes = [
        {
            "count": 1, "devices": 2, "device": kind, "intra_node_gbit_per_s": 100,
            "network_gbit_per_s": 40,
        }
        for kind in kinds
    ]  # fmt: skip
    on = cluster(nodes=nodes, devices={kind: {"memory_gib": memory_gib} for kind in kinds})
    return make_workload(model, on, 8, stack=BARE)


def placed(on: Workload, pp: int, dp: int, cp: int, tp: int, ends: Any, samples: int) -> list[Any]:
    """Like replicas: tensor ranks next to each other, then context ranks, replicas, stages."""

    def devices(i: int, s: int) -> list[list[int]]:
        first = (s * dp + i) * cp * tp
        return [list(range(first + g * tp, first + (g + 1) * tp)) for g in range(cp)]

    return [
        {
            "stages": [
                {
                    "layers": [(ends[s], ends[s + 1])], "devices": devices(i, s),
                    "row_shares": [1.0] * cp, "tensor_shares": [1.0] * tp,
                }
                for s in range(pp)
            ],
            "micro_batches": [{"count": on.global_batch // dp // samples, "samples": samples}],
        }
        for i in range(dp)
    ]  # fmt: skip


def every_plan(on: Workload) -> Iterator[Plan]:
    """All degrees, cuts, micro-batches, two ZeRO levels and recomputations on 4 devices."""
    count, shape = BLOCKS + 2, present(on.model.spec.shape)
    for pp, dp, cp, tp in product((1, 2, 4), repeat=4):
        if pp * dp * cp * tp != 4 or tp > 2:
            continue
        further = product(
            EXCHANGES[: 1 + (cp > 1)],
            (1, 2, 4) if shape.experts else (1,),
            {1, tp},
            (False, True)[: 1 + (tp > 1)],
        )
        for exchange, expert, expert_tensor, sequence in further:
            degrees = Degrees(
                context=cp, exchange=exchange, expert=expert, expert_tensor=expert_tensor,
                sequence_parallel=sequence,
            )  # fmt: skip
            for cut, samples, zero, mode in product(
                combinations(range(1, count), pp - 1), (1, 4), (1, 3), ("none", "full")
            ):
                if on.global_batch % (dp * samples) == 0:
                    replicas = placed(on, pp, dp, cp, tp, (0, *cut, count), samples)
                    with suppress(InputError, ValueError):
                        yield new_plan(on, replicas, degrees=degrees, zero=zero, recomputation=mode)


def searched(on: Workload, start: Plan, steps: int, seed: int = 0) -> tuple[float, Plan]:
    """The best plan of so many steps from the plan, and its seconds."""
    space = FurtherSpace(pose(on, ("none", "full")), on)
    search = LocalSearch(space, Run(Options(threads=1, seed=seed)), replace(FURTHER, steps=steps))
    search.begin([start])
    search.vary()
    search.rounds()
    best = present(search.incumbent)
    (seconds, _), plan = best.order, best.plan
    return seconds, plan


def alone(on: Workload) -> float:
    """The bound by computing alone."""
    (offer,) = offers_of_cluster(on.cluster)
    problem = PoolProblem(on, "degrees", homogeneous(offer))
    assumed = Assumptions(profile=on.profile, stack=on.stack)
    return least_seconds(Job(on.model, on.global_batch), problem.plannable(), problem.pool, assumed)


@pytest.mark.parametrize(
    ("memory_gib", "experts"),
    [
        (16.0, False),
        pytest.param(1.8, True, marks=pytest.mark.wide),
        pytest.param(16.0, True, marks=pytest.mark.wide),
    ],
)
def test_no_plan_of_the_enumeration_is_faster(memory_gib: float, experts: bool) -> None:
    """The search begins with the slowest, twice; it has other placements and schedules, too."""
    on = workload(memory_gib, experts)
    runs = [(plan, replay(plan, on)) for plan in every_plan(on)]
    fitting = [(run.seconds, plan) for plan, run in runs if run.fits]
    assert len(fitting) > 100 and (len(fitting) < len(runs)) == (memory_gib < 2)
    slowest = max(fitting, key=lambda pair: pair[0])[1]
    tries = [searched(on, slowest, 3000, seed) for seed in (0, 1)]
    seconds, plan = min(tries, key=lambda pair: pair[0])
    again = replay(Plan.model_validate(plan.model_dump()), on)
    assert again.fits and again.seconds == pytest.approx(seconds, rel=1e-2)  # robust seconds
    assert again.seconds <= min(seconds for seconds, _ in fitting) * (1 + 1e-9)
    least = alone(on)
    assert all(least <= run.seconds for _, run in runs) and least <= again.seconds
    assert least > again.seconds / 4  # it says something


def test_stages_may_be_on_replicas_of_several_types() -> None:
    """Two types of device: every plan that is proposed can be replayed and fits, and none is slower
    than where the search began."""
    on = workload(16.0, False, mixed=True)
    start = new_plan(on, placed(on, 2, 1, 2, 1, (0, 2, BLOCKS + 2), 1), degrees=Degrees(context=2))
    _, plan = searched(on, start, 300)
    assert replay(plan, on).seconds < replay(start, on).seconds and plan.degrees is not None


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("row", [[0, 2], [3, 0], [0, 1, 2, 3]])
def test_the_search_begins_with_a_tensor_group_on_several_nodes(
    mixed: bool, row: list[int]
) -> None:
    """AMP places tensor groups on two nodes, of two types of device at times. What cannot be
    replayed is no start, and does not end the search."""
    on = workload(16.0, False, mixed=mixed)
    stage = {
        "layers": [(0, BLOCKS + 2)], "devices": [row], "row_shares": [1.0],
        "tensor_shares": [1.0] * len(row),
    }  # fmt: skip
    replicas: list[Any] = [{"stages": [stage], "micro_batches": [{"count": 8, "samples": 1}]}]
    start = new_plan(on, replicas)
    refused = new_plan(
        on, placed(on, 1, 1, 4, 1, (0, BLOCKS + 2), 1), degrees=Degrees(context=4)
    ).model_copy(update={"degrees": Degrees(expert=4)})
    few = replace(FURTHER, steps=200)
    problem = FurtherProblem(on, pose(on, ("none", "full")), [refused, start], 60.0, few)
    candidate = present(problem.solve(StrategyMethod("auto", exact=True), Run(Options(threads=1))))
    plan = present(candidate.plan)
    assert replay(plan, on).fits and replay(plan, on).seconds < replay(start, on).seconds


def test_the_choice_of_a_schedule_has_further_degrees() -> None:
    """From two stages of two context ranks under 1F1B to faster plans with split passes."""
    on = workload(16.0, False)
    degrees = Degrees(context=2, overlap=["messages"])
    start = new_plan(on, placed(on, 2, 1, 2, 1, (0, 2, BLOCKS + 2), 1), degrees=degrees)
    data = pose(on, ("none", "full"))

    def chosen(*schedules: PassSchedule) -> Candidate | None:
        problem = FurtherProblem(on, data, [start], 0.5, schedules=schedules)
        return problem.solve(SCHEDULES, Run(Options(threads=1)))

    for schedule in ("zb-h1", "explicit"):
        found = present(chosen(schedule))
        plan = present(found.plan)
        assert plan.schedule == schedule and plan.splits_backward
        assert "messages" in present(plan.degrees).overlap
        run = replay(plan, on)
        assert run.fits and run.seconds < 0.99 * replay(start, on).seconds
        assert found.objective == pytest.approx(run.seconds, rel=0.02)  # robust seconds
        assert found.name == "joint/degrees-schedules" and found.bound is None
    assert chosen(*WHOLE_SCHEDULES) is None  # method `degrees` has searched these


def test_ranks_that_exchange_tokens_stand_together() -> None:
    """What a block waits for is priced for neighbours: context ranks on two nodes where one has
    room, or experts on two types of device, are refused by name."""
    on = workload(16.0, True)
    together = placed(on, 2, 1, 2, 1, (0, 2, BLOCKS + 2), 1)
    assert replay(new_plan(on, together, degrees=Degrees(context=2)), on).fits
    apart = [dict(replica) for replica in together]
    apart[0]["stages"] = [
        stage | {"devices": [[j], [j + 2]]} for j, stage in enumerate(apart[0]["stages"])
    ]
    with pytest.raises(UnsupportedError, match="another order than Megatron's"):
        replay(new_plan(on, apart, degrees=Degrees(context=2)), on)
    mixed = workload(16.0, True, mixed=True)
    replicas = placed(mixed, 1, 4, 1, 1, (0, BLOCKS + 2), 1)
    assert replay(new_plan(mixed, replicas, degrees=Degrees(expert=2)), mixed).fits
    with pytest.raises(UnsupportedError, match="another order than Megatron's"):
        replay(new_plan(mixed, replicas, degrees=Degrees(expert=4)), mixed)


@pytest.mark.parametrize("experts", [False, True])
def test_on_one_device_the_bound_is_all_but_the_update(experts: bool) -> None:
    """There a plan is a size of micro-batches, and computes what the bound counts."""
    node = {
        "count": 1, "devices": 1, "device": "T4", "intra_node_gbit_per_s": 100,
        "network_gbit_per_s": 40,
    }  # fmt: skip
    on = make_workload(workload(16.0, experts).model, cluster(nodes=[node]), 64, stack=BARE)
    sizes = (1, 2, 4, 8)
    plans = [new_plan(on, placed(on, 1, 1, 1, 1, (0, BLOCKS + 2), size)) for size in sizes]
    best = min(replay(plan, on).seconds for plan in plans)
    assert 0.9 * best < alone(on) <= best
