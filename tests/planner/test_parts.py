"""Parts of the cluster: devices that do not pay are left out, and time and money are weighed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fakes.workloads import cluster_document, small
from hetplan.errors import InputError
from hetplan.planner.explain import explain, ranking_rows
from hetplan.planner.parts import cheapest_within, lifted_plan, pareto, parts
from hetplan.planner.ranking import Planning, make_plans
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import replay
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run

THREE = [
    *cluster_document()["nodes"],
    {
        "count": 2,
        "devices": 1,
        "device": "RTX-3090",
        "intra_node_gbit_per_s": 100,
        "network_gbit_per_s": 10,
    },
]


@pytest.fixture(scope="module")
def workload() -> Workload:
    """gpt2 on two fast and two slow devices."""
    return small()


@pytest.fixture(scope="module")
def planning(workload: Workload) -> Planning:
    """Everything on parts, too."""
    run = Run(Options(time_limit=30, threads=1))
    return make_plans(workload, ["amp", "dp", "poplar"], run, parts=True)


def test_every_subset_of_the_types_is_a_part() -> None:
    found = list(parts(small(nodes=THREE)))
    names = [name for name, _ in found]
    assert len(names) == len(set(names)) == 2**3 - 2
    assert dict(found)["V100-SXM2-16GB+RTX-3090"] == [0, 2, 3]
    assert dict(found)["T4"] == [1]
    assert list(parts(small(nodes=THREE[:1]))) == []


def test_a_part_is_the_cluster_without_the_others(workload: Workload) -> None:
    part = workload.cluster.part([1], "slow")
    assert part.counts() == {"T4": 2} and part.name == "slow" and set(part.specs) == {"T4"}
    assert workload.cluster.devices_of([1]) == [2, 3]
    assert workload.cluster.devices_of([1, 0]) == [2, 3, 0, 1]


def test_plans_of_parts_hold_on_the_whole_cluster(planning: Planning, workload: Workload) -> None:
    some = [c for c in planning.candidates if "@" in c.method]
    assert some
    for candidate in some:
        assert candidate.plan is not None
        names = candidate.method.partition("@")[2].split("+")
        used = {candidate.plan.devices[d].type for d in candidate.plan.ranks}
        assert used == set(names)
        assert replay(candidate.plan, workload).seconds == candidate.predicted_seconds
        assert [d.type for d in candidate.plan.devices] == [
            d.type for d in workload.cluster.devices
        ]


@pytest.mark.parametrize(
    ("strategy", "column", "devices"),
    [
        ("amp", 3, "node 1: 1 T4 (2)"),
        ("dp", 3, "node 1: 2 T4 (2-3)"),
        ("poplar", 0, "2 T4 (2-3)"),
        pytest.param("hap", 0, "2-3", marks=pytest.mark.slow),
    ],
)
def test_tables_of_parts_have_the_numbers_of_the_cluster(
    strategy: str, column: int, devices: str, workload: Workload
) -> None:
    run = Run(Options(time_limit=30, threads=1))
    found = make_plans(workload, [strategy], run, parts=True).candidates
    shown = {c.tables[0].rows[0][column] for c in found if c.method.endswith("@T4")}
    assert shown == {devices}


def test_the_front_is_what_nothing_beats(planning: Planning, workload: Workload) -> None:
    front = pareto(planning.candidates, workload)
    points = [
        (c.predicted_seconds or 9.9, c.money_per_million_tokens(workload) or 9.9)
        for c in planning.candidates
    ]
    fits = [i for i, c in enumerate(planning.candidates) if c.fits_memory]
    for i, j in product(fits, fits):
        if i in front:
            assert not (points[j][0] < points[i][0] and points[j][1] < points[i][1])
    for j in fits:
        assert any(points[i][0] <= points[j][0] and points[i][1] <= points[j][1] for i in front)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)
    assert all(
        i in front for i, c in enumerate(planning.candidates) if "@" in c.method
    )  # others are left out


def test_the_cheapest_of_the_nearly_fastest(planning: Planning, workload: Workload) -> None:
    front = pareto(planning.candidates, workload)
    assert len(front) > 1
    assert cheapest_within(planning.candidates, workload, 0.0) == front[0]
    assert cheapest_within(planning.candidates, workload, 1e9) == front[-1]
    slower = (planning.candidates[front[1]].predicted_seconds or 0) / (
        planning.candidates[front[0]].predicted_seconds or 1
    )
    percent = 100 * (slower - 1)
    assert cheapest_within(planning.candidates, workload, percent * 1.001) == front[1]
    assert cheapest_within(planning.candidates, workload, percent * 0.999) == front[0]


def test_the_winner_is_the_cheapest_if_asked_for(workload: Workload) -> None:
    found = make_plans(workload, ["dp"], parts=True, cheapest_within=1e9)
    assert found.best is not None and found.winner == pareto(found.candidates, workload)[-1]
    fastest = make_plans(workload, ["dp"], parts=True)
    assert fastest.winner == 0
    explained = explain(found)
    assert found.candidates[0].name in explained.chosen and "1e+09 %" in explained.chosen
    assert dict(ranking_rows(explained, workload))["chosen"] == explained.document()["chosen"]
    assert explain(make_plans(workload, ["dp"])).chosen == ""


@pytest.mark.parametrize("percent", [-1.0, float("nan"), float("inf")])
def test_nonsense_shares(workload: Workload, percent: float) -> None:
    with pytest.raises(InputError, match="percent that a cheaper plan may be slower"):
        make_plans(workload, ["dp"], cheapest_within=percent)


def test_without_prices_there_is_no_front() -> None:
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    node = {"devices": 2, "device": "mine", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 10}
    bare = small(devices=own, nodes=[node])
    found = make_plans(bare, ["dp"])
    assert pareto(found.candidates, bare) == []
    with pytest.raises(InputError, match="cheapest plan, but device 'mine' has no price"):
        make_plans(bare, ["dp"], cheapest_within=5.0)


def test_unequal_zero_shards_move_with_their_devices(workload: Workload) -> None:
    inner = replace(workload, cluster=workload.cluster.part([1]))
    settings = {"poplar": {"zero": 3, "shards": "memory"}}
    plan = make_plans(inner, ["poplar"], settings=settings).candidates[0].plan
    assert plan is not None
    plan = plan.model_copy(update={"zero_shares": [1.0, 3.0]})
    assert lifted_plan(plan, workload, [2, 3]).zero_shares == [0.0, 0.0, 1.0, 3.0]
