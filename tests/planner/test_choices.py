"""What is planned beside the whole cluster in one precision: parts of it, where time and money are
weighed, and precisions that are allowed and that every device has, ranked together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import hetplan as hp
from fakes.workloads import cluster, cluster_document, one_thread, profile_document, small
from hetplan.errors import InputError
from hetplan.planner.library import AUTO, PREFERRED, make_workloads, precisions_of
from hetplan.planner.ranking import Criteria, Planning, make_plans, pareto, winner_of
from hetplan.planner.strategy import chosen
from hetplan.planner.variant import parts, renumbered
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.runtime.replay import replay
from present import present


def node(device: str, intra: float, network: float, devices: int = 2, count: int = 1) -> object:
    """An entry of a cluster file."""
    links = {"intra_node_gbit_per_s": intra, "network_gbit_per_s": network}
    return {"count": count, "devices": devices, "device": device, **links}


THREE = [*cluster_document()["nodes"], node("RTX-3090", 100, 10, 1, 2)]
AMPERE, GAMING = [node("A100-SXM4-40GB", 2400, 100)], [node("RTX-3090", 100, 10)]
ON_PARTS = Criteria(on_parts=True)


@pytest.fixture(scope="module")
def by_parts(workload: Workload) -> Planning:
    """Everything on parts, too."""
    strategies = chosen(["amp", "dp", "poplar"])
    return make_plans(workload, strategies, one_thread(), criteria=ON_PARTS)


def test_every_subset_of_the_types_is_a_part() -> None:
    found = {part.name: part.nodes for part in parts(small(nodes=THREE))}
    assert len(found) == 2**3 - 2
    assert found["V100-SXM2-16GB+RTX-3090"] == (0, 2, 3) and found["T4"] == (1,)
    assert list(parts(small(nodes=THREE[:1]))) == []


def test_plans_of_parts_hold_on_the_whole_cluster(by_parts: Planning, workload: Workload) -> None:
    on_parts = [c for c in by_parts.candidates if c.variant.part is not None]
    assert on_parts
    for candidate in on_parts:
        assert candidate.plan is not None and candidate.variant.part is not None
        assert candidate.name.endswith(f"@{candidate.variant.part.name}")
        used = {candidate.plan.devices[d].type for d in candidate.plan.ranks}
        assert used == set(candidate.variant.part.name.split("+"))
        assert replay(candidate.plan, workload).seconds == candidate.predicted_seconds


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
    found = make_plans(workload, chosen([strategy]), one_thread(30), criteria=ON_PARTS).candidates
    shown = {c.tables[0].rows[0][column] for c in found if c.name.endswith("@T4")}
    assert shown == {devices}


def test_the_front_is_what_nothing_beats(by_parts: Planning, workload: Workload) -> None:
    front = pareto(by_parts.candidates, workload)
    points = [
        (c.predicted_seconds or 9.9, c.money_per_million_tokens(workload) or 9.9)
        for c in by_parts.candidates
    ]
    fits = [i for i, c in enumerate(by_parts.candidates) if c.fits_memory]
    for i, j in product(front, fits):
        assert not (points[j][0] < points[i][0] and points[j][1] < points[i][1])
    for j in fits:
        assert any(points[i][0] <= points[j][0] and points[i][1] <= points[j][1] for i in front)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)
    on_parts = {i for i, c in enumerate(by_parts.candidates) if c.variant.part is not None}
    assert on_parts <= set(front)  # others are left out


def test_the_cheapest_of_the_nearly_fastest(by_parts: Planning, workload: Workload) -> None:
    allowed = [c for c in by_parts.candidates if c.fits_memory]
    first, second, *rest = pareto(allowed, workload)
    times = [allowed[i].predicted_seconds or 0.0 for i in (first, second)]
    percent = 100 * (times[1] / times[0] - 1)
    assert winner_of(allowed, workload, None) == winner_of(allowed, workload, 0.0) == first == 0
    assert winner_of(allowed, workload, 1e9) == [first, second, *rest][-1]
    assert winner_of(allowed, workload, percent * 1.001) == second
    assert winner_of(allowed, workload, percent * 0.999) == first
    assert winner_of([], workload, 5.0) is None


def test_the_winner_is_the_cheapest_if_asked_for(workload: Workload) -> None:
    asked = Criteria(cheapest_within=1e9)
    found = make_plans(workload, chosen(["dp"]), criteria=asked)
    explained = found.explanation
    assert explained is not None and found.winner == pareto(found.candidates, workload)[-1]
    assert found.candidates[0].name in explained.chosen and "1e+09 %" in explained.chosen
    assert ("chosen", explained.chosen) in explained.table(workload).rows
    assert explained.document()["chosen"] == explained.chosen
    plain = make_plans(workload, chosen(["dp"]), criteria=ON_PARTS)
    assert plain.winner == 0 and plain.explanation is not None
    assert plain.explanation.chosen == ""


def test_unequal_zero_shards_move_with_their_devices(workload: Workload) -> None:
    inner = replace(workload, cluster=workload.cluster.part([1]))
    poplar = chosen(["poplar"], {"poplar": {"zero": 3, "shards": "memory"}})
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
    assert both.precisions == ("fp32", "fp16") and len(both.candidates) == 8
    for precision in both.precisions:
        alone = planned(None, [precision], "amp", "dp")
        assert alone.document()["candidates"][0]["precision"] == precision
        mine = {c.name: c for c in both.candidates if c.variant.precision == precision}
        assert set(mine) == {f"{c.name}+{precision}" for c in alone.candidates}
        for candidate in alone.candidates:
            other = mine[f"{candidate.name}+{precision}"]
            assert other.predicted_seconds == candidate.predicted_seconds
            assert other.peak_bytes == candidate.peak_bytes
            assert other.plan is not None and other.plan.workload.precision == precision
    seconds = [c.predicted_seconds for c in both.candidates]
    assert seconds == sorted(s for s in seconds if s is not None)
    document, best = both.document(), both.best  # in fp16: tensor cores are several times faster
    assert both.workload.precision == "fp16" and best is not None and best.plan is not None
    assert document["workload"]["precisions"] == ["fp32", "fp16"]
    assert document["workload"]["precision"] == document["candidates"][0]["precision"] == "fp16"
    assert hp.replay(best.plan, both.workload).seconds == best.predicted_seconds


def test_what_a_device_lacks_is_left_out_and_said() -> None:
    found = planned(None, AUTO, "dp")
    assert found.precisions == ("fp16", "fp32")
    assert found.notes[0] == "bf16 is left out: no units for it in V100-SXM2-16GB, T4"
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    lacking = cluster(nodes=[node("mine", 50, 10)], devices=own)
    with pytest.raises(InputError, match=r"no precision that every device has \(got 'bf16, fp32'"):
        make_workloads("gpt2", lacking, 8, precision="bf16,fp32")


@pytest.mark.parametrize("nodes", [AMPERE, GAMING])
def test_equal_times_and_bytes_are_one_problem(nodes: list[object]) -> None:
    """fp16 and bf16 have one peak and one size on these; the preferred one is planned."""
    found = planned(nodes, AUTO, "dp")
    assert found.precisions == ("bf16", "fp32")
    assert "fp16 is not planned apart: times and bytes are those of bf16" in found.notes
    assert planned(nodes, "fp16,bf16", "dp").precisions == ("fp16",)


def test_peaks_apart_are_planned_apart() -> None:
    slow = {"RTX-3090": {"peak_tflops": {"bf16": 10}}}
    choice = make_workloads("gpt2", cluster(nodes=GAMING, devices=slow), 8, precision="fp16,bf16")
    assert [w.precision for w in choice.workloads] == ["fp16", "bf16"] and choice.notes == ()


def test_a_profile_is_of_one_precision() -> None:
    profile = Profile.model_validate(profile_document())
    (workload,) = make_workloads("gpt2", cluster(), 8, precision="fp16", profile=profile).workloads
    assert workload.profile == profile
    with pytest.raises(InputError, match="a profile is of one precision"):
        make_workloads("gpt2", cluster(), 8, precision=AUTO, profile=profile)


def test_parts_and_notes_name_the_precision() -> None:
    every = [make_workload("gpt2", cluster(), 8, precision=name) for name in ("fp16", "fp32")]
    found = make_plans(every, chosen(["dp"]), one_thread(), criteria=ON_PARTS)
    on_parts = [c.name for c in found.candidates if "@" in c.name]
    assert on_parts and all("+fp16@" in name or "+fp32@" in name for name in on_parts)
    assert any(note.startswith("dp in fp16, dp in fp32: recomputation") for note in found.notes)
