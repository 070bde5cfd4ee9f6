"""What is planned beside the whole cluster in one precision: parts of it, where time and money are
weighed, and precisions that are allowed and that every device has, ranked together."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hetplan as hp
from fakes.noting import Noting
from fakes.workloads import cluster, cluster_document, one_thread, profile_document, small
from hetplan.cli.plan import proven_text
from hetplan.errors import InputError
from hetplan.planner.criteria import Criteria, pareto, winner_of
from hetplan.planner.joint import SCHEDULES, Joint, JointProblem
from hetplan.planner.phases import search_all
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.search import StrategySearch
from hetplan.planner.strategy import make_strategies
from hetplan.planner.variants import PLAIN, Variant, parts_of_cluster, renumbered
from hetplan.planner.workloads import AUTO, PREFERRED, make_workloads, precisions_of
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import replay
from hetplan.replays.stages import stage_table
from hetplan.solvers.run import Run
from present import present


def node(device: str, intra: float, network: float, devices: int = 2, count: int = 1) -> object:
    """An entry of a cluster file."""
    links = {"intra_node_gbit_per_s": intra, "network_gbit_per_s": network}
    return {"count": count, "devices": devices, "device": device, **links}


THREE = [*cluster_document()["nodes"], node("RTX-3090", 100, 10, 1, 2)]
AMPERE, GAMING = [node("A100-SXM4-40GB", 2400, 100)], [node("RTX-3090", 100, 10)]
ON_PARTS = Criteria(on_parts=True)


@pytest.fixture(scope="module")
def workload() -> Workload:
    """gpt2 on two V100 and two T4, which are slow, and so cheap that plans on them alone are the
    cheapest."""
    return small(devices={"T4": {"price_per_hour": 0.1}})


@pytest.fixture(scope="module")
def by_parts(workload: Workload) -> Planning:
    """Everything on parts, too."""
    strategies = make_strategies(["amp", "dp", "poplar"])
    return make_plans(workload, strategies, one_thread(), criteria=ON_PARTS)


def test_every_subset_of_the_types_is_a_part() -> None:
    nodes = {part.name: part.nodes for part in parts_of_cluster(small(nodes=THREE))}
    assert len(nodes) == 2**3 - 2
    assert nodes["V100-SXM2-16GB+RTX-3090"] == (0, 2, 3) and nodes["T4"] == (1,)
    assert list(parts_of_cluster(small(nodes=THREE[:1]))) == []


def test_plans_of_parts_hold_on_the_whole_cluster(by_parts: Planning, workload: Workload) -> None:
    """And are left out where they are beaten."""
    front = pareto(by_parts.candidates, workload)
    on_parts = [i for i, c in enumerate(by_parts.candidates) if c.variant.part is not None]
    assert on_parts and set(on_parts) <= set(front)
    for candidate in (by_parts.candidates[i] for i in on_parts):
        plan, part = present(candidate.plan), present(candidate.variant.part)
        assert candidate.name.endswith(f"@{part.name}")
        assert {plan.devices[d].type for d in plan.ranks} == set(part.name.split("+"))
        assert replay(plan, workload).seconds == candidate.predicted_seconds


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("amp", "node 1: 1 T4 (2)"),
        ("dp", "node 1: 2 T4 (2-3)"),
        ("poplar", "node 1: 2 T4 (2-3)"),
        pytest.param("hap", "node 1: 1 T4 (2)", marks=pytest.mark.wide),
    ],
)
def test_tables_of_parts_have_the_numbers_of_the_cluster(
    strategy: str, devices: str, workload: Workload
) -> None:
    found = make_plans(
        workload, make_strategies([strategy]), one_thread(30), criteria=ON_PARTS
    ).candidates
    shown = {
        stage_table(present(c.plan), present(c.replay), "").rows[0][2]
        for c in found
        if c.name.endswith("@T4")
    }
    assert shown == {devices}


def test_the_front_is_what_nothing_beats(by_parts: Planning, workload: Workload) -> None:
    allowed = [c for c in by_parts.candidates if c.fits_memory]
    points = [
        (present(c.predicted_seconds), present(c.money_per_million_tokens(workload)))
        for c in allowed
    ]
    front = [points[i] for i in pareto(allowed, workload)]
    assert front == sorted(front)
    for seconds, money in front:
        assert not any(s < seconds and m < money for s, m in points)
    for seconds, money in points:
        assert any(s <= seconds and m <= money for s, m in front)


def test_the_cheapest_of_the_nearly_fastest(by_parts: Planning, workload: Workload) -> None:
    allowed = [c for c in by_parts.candidates if c.fits_memory]
    front = pareto(allowed, workload)
    times = [present(allowed[i].predicted_seconds) for i in front]
    percent = 100 * (times[1] / times[0] - 1)
    expected = {None: 0, 0.0: 0, percent * 0.999: 0, percent * 1.001: front[1], 1e9: front[-1]}
    chosen = {p: winner_of(allowed, workload, Criteria(cheapest_within=p)) for p in expected}
    assert chosen == expected
    assert front[0] == 0 and winner_of([], workload, Criteria(cheapest_within=5.0)) is None


def test_the_cheapest_within_a_limit_of_seconds(workload: Workload) -> None:
    dp = make_strategies(["dp"])
    on_parts = make_plans(workload, dp, criteria=ON_PARTS)
    front = [on_parts.candidates[i] for i in pareto(on_parts.candidates, workload)]
    slower = present(front[1].predicted_seconds)
    for limit, expected in ((slower * 0.999, front[0]), (slower * 1.001, front[1])):
        planning = make_plans(workload, dp, criteria=Criteria(seconds_limit=limit))
        assert present(planning.best).name == expected.name
        assert f"at most {limit:.4g} s" in present(planning.explanation).why_chosen
    none = make_plans(workload, dp, criteria=Criteria(seconds_limit=1e-6))
    assert none.winner is None and "above the limit of 1e-06 s" in none.candidates[0].message
    with pytest.raises(InputError, match="--seconds-limit"):
        make_plans(workload, dp, criteria=Criteria(seconds_limit=0.0))


def test_only_the_levels_of_zero_that_are_asked_for_win(workload: Workload) -> None:
    poplar = make_strategies(["poplar"])
    for levels in ((3,), (1, 2)):
        planning = make_plans(workload, poplar, criteria=Criteria(zero_levels=levels))
        assert present(present(planning.best).plan).zero in levels
        # No problem of another level is posed.
        posed = {c.method.name.rpartition("-zero")[2] for c in planning.candidates}
        assert posed == {str(level) for level in levels}
    none = make_plans(workload, make_strategies(["dp"]), criteria=Criteria(zero_levels=(3,)))
    assert none.winner is None
    assert all("is not among the levels asked for" in c.message for c in none.candidates if c.plan)
    one = make_strategies(["poplar"], {"poplar": {"zero": 2}})
    refused = make_plans(workload, one, criteria=Criteria(zero_levels=(3,))).candidates
    assert {c.message for c in refused} == {"ZeRO 2 is not among the levels asked for"}
    with pytest.raises(InputError, match="--zero"):
        make_plans(workload, poplar, criteria=Criteria(zero_levels=(4,)))


def test_joint_and_astra_search_only_the_levels_of_zero_that_are_asked_for(
    workload: Workload,
) -> None:
    """A filter at the end would leave them without a plan, where their best has another level."""
    plain = present(make_plans(workload, make_strategies(["astra"])).best)
    other = 1 - present(plain.plan).zero
    planning = make_plans(
        workload, make_strategies(["astra"]), criteria=Criteria(zero_levels=(other,))
    )
    levels = {present(candidate.plan).zero for candidate in planning.candidates}
    best = present(planning.best)
    assert levels == {other} and best.status == "optimal"
    assert plain.bound is not None and best.bound is not None and best.bound > plain.bound
    none = make_plans(workload, make_strategies(["astra"]), criteria=Criteria(zero_levels=(3,)))
    assert [c.message for c in none.candidates] == ["Astra's space has no plans of ZeRO 3"]
    joint = Joint().within_levels((1, 0)).beginning_with([present(best.plan)])
    problem = joint.pose(workload, Run())[0]
    assert isinstance(problem, JointProblem) and problem.data.zero_levels == [0, 1]


def test_the_answer_says_which_levels_of_zero_its_bounds_are_of(workload: Workload) -> None:
    strategies = make_strategies(["poplar"])
    planning = make_plans(workload, strategies, criteria=Criteria(zero_levels=(1, 2)))
    best = present(planning.best)
    joint = replace(best, strategy="joint", bound=0.9 * present(best.predicted_seconds))
    of_joint = replace(planning, candidates=(joint,), winner=0)
    whole = "no plan of stages with ZeRO 1 or 2 and with whole backward passes is faster"
    assert whole in proven_text(joint, of_joint)
    chosen = replace(joint, method=SCHEDULES)
    of_any_order = replace(planning, candidates=(chosen,), winner=0)
    assert "no plan of stages with ZeRO 1 or 2 is faster" in proven_text(chosen, of_any_order)
    assert planning.document()["zero_levels"] == [1, 2]
    # A plan file has no place to say so.
    assert best.bound is not None and present(present(best.plan).prediction).bound is None
    usual = present(present(make_plans(workload, strategies).best).plan)
    assert present(usual.prediction).bound is not None


def test_the_winner_is_the_cheapest_if_asked_for(workload: Workload) -> None:
    cheapest = make_plans(workload, make_strategies(["dp"]), criteria=Criteria(cheapest_within=1e9))
    explained = present(cheapest.explanation)
    assert cheapest.winner == pareto(cheapest.candidates, workload)[-1]
    assert cheapest.candidates[0].name in explained.why_chosen and "1e+09 %" in explained.why_chosen
    assert ("chosen", explained.why_chosen) in explained.table(workload).rows
    assert explained.document()["chosen"] == explained.why_chosen
    fastest = make_plans(workload, make_strategies(["dp"]), criteria=ON_PARTS)
    assert fastest.winner == 0 and present(fastest.explanation).why_chosen == ""


def test_unequal_zero_shards_move_with_their_devices(workload: Workload) -> None:
    inner = replace(workload, cluster=workload.cluster.part([1]))
    poplar = make_strategies(["poplar"], {"poplar": {"zero": 3, "shards": "memory"}})
    plan = present(make_plans(inner, poplar).candidates[0].plan)
    plan = plan.model_copy(update={"zero_shares": [1.0, 3.0]})
    assert renumbered(plan, workload, [2, 3]).zero_shares == [0.0, 0.0, 1.0, 3.0]


def planned(nodes: list[object] | None, precision: str | list[str], *names: str) -> Planning:
    """gpt2 by these strategies on two devices of a kind, or on two fast and two slow ones."""
    on = cluster() if nodes is None else cluster(nodes=nodes)
    return hp.plan("gpt2", on, global_batch=8, precision=precision, strategies=names, threads=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp16", ("fp16",)),
        ("fp32, bf16,fp32", ("fp32", "bf16")),
        (AUTO, PREFERRED),
        (["bf16"], ("bf16",)),
    ],
)
def test_names_of_precisions(text: str | list[str], expected: tuple[str, ...]) -> None:
    assert precisions_of(text) == expected


@pytest.mark.parametrize("text", ["fp8", "fp16,", "", "auto,fp16", []])
def test_wrong_names_of_precisions(text: str | list[str]) -> None:
    with pytest.raises(InputError, match="precision"):
        precisions_of(text)


def test_precisions_are_ranked_together_each_as_if_alone() -> None:
    both = planned(None, "fp32,fp16", "amp", "dp")
    assert both.precisions == ("fp32", "fp16") and len(both.candidates) == 10
    ranked = {c.name: c for c in both.candidates}
    for precision in both.precisions:
        for candidate in planned(None, [precision], "amp", "dp").candidates:
            other = ranked.pop(f"{candidate.name}+{precision}")
            assert other.predicted_seconds == candidate.predicted_seconds
            assert other.peak_bytes == candidate.peak_bytes
            assert present(other.plan).workload.precision == precision
    seconds = [present(c.predicted_seconds) for c in both.candidates]
    assert not ranked and seconds == sorted(seconds)
    document, best = both.document(), present(both.best)
    # in fp16: tensor cores are several times faster
    assert both.workload.precision == document["workload"]["precision"] == "fp16"
    assert document["workload"]["precisions"] == ["fp32", "fp16"]
    assert document["candidates"][0]["precision"] == "fp16"
    assert hp.replay(present(best.plan), both.workload).seconds == best.predicted_seconds


def test_what_a_device_lacks_is_left_out_and_said() -> None:
    planning = planned(None, AUTO, "dp")
    assert planning.precisions == ("fp16", "fp32")
    assert planning.notes[0] == "bf16 is left out: no units for it in V100-SXM2-16GB, T4"
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    lacking = cluster(nodes=[node("mine", 50, 10)], devices=own)
    with pytest.raises(InputError, match=r"no precision that every device has \(got 'bf16, fp32'"):
        make_workloads("gpt2", lacking, 8, precision="bf16,fp32")


@pytest.mark.parametrize("nodes", [AMPERE, GAMING])
def test_equal_times_and_bytes_are_one_problem(nodes: list[object]) -> None:
    """fp16 and bf16 have one peak and one size on these; the preferred one is planned. With peaks
    apart they are two."""
    planning = planned(nodes, AUTO, "dp")
    assert planning.precisions == ("bf16", "fp32")
    assert "fp16 is not planned apart: times and bytes are those of bf16" in planning.notes
    assert planned(nodes, "fp16,bf16", "dp").precisions == ("fp16",)
    slow = {name: {"peak_tflops": {"bf16": 10}} for name in cluster(nodes=nodes).types}
    apart, notes = make_workloads(
        "gpt2", cluster(nodes=nodes, devices=slow), 8, precision="fp16,bf16"
    )
    assert [w.precision for w in apart] == ["fp16", "bf16"] and notes == []


def test_a_profile_is_of_one_precision() -> None:
    profile = Profile.model_validate(profile_document())
    ((workload,), _) = make_workloads("gpt2", cluster(), 8, precision="fp16", profile=profile)
    assert workload.profile == profile
    with pytest.raises(InputError, match="a profile is of one precision"):
        make_workloads("gpt2", cluster(), 8, precision=AUTO, profile=profile)


def test_parts_name_the_precision() -> None:
    every = [make_workload("gpt2", cluster(), 8, precision=name) for name in ("fp16", "fp32")]
    planning = make_plans(every, make_strategies(["dp"]), one_thread(), criteria=ON_PARTS)
    on_parts = [c.name for c in planning.candidates if "@" in c.name]
    assert on_parts and all("+fp16@" in name or "+fp32@" in name for name in on_parts)


def test_joint_on_a_part_begins_with_the_plans_of_that_part(workload: Workload) -> None:
    """In the part's own numbers; on the whole cluster with those of the whole, and again for the
    choice of a schedule."""
    joint, plans = Noting(), make_strategies(["dp"])
    run, part = one_thread(), parts_of_cluster(workload)
    variants = [PLAIN, *(Variant(part=each) for each in part)]
    searches = [StrategySearch(s, workload, run, v) for v in variants for s in (*plans, joint)]
    candidates = search_all(searches, run)
    assert [{len(plan.devices) for plan in noted} for noted in joint.noted] == [{4}, {2}, {2}, {4}]
    assert all({*plan.ranks} == {0, 1} for noted in joint.noted[1:3] for plan in noted)
    best = {(c.strategy, c.variant.part): present(c.predicted_seconds) for c in candidates}
    for variant in variants:
        assert best["joint", variant.part] <= best["dp", variant.part]
    on_t4 = next(c for c in candidates if c.name == "joint/auto@T4")
    assert {*present(on_t4.plan).ranks} <= {2, 3}
    assert replay(present(on_t4.plan), workload).seconds == on_t4.predicted_seconds
