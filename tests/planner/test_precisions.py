"""Precision as a choice: those that are allowed and that every device has, planned apart, ranked
together."""

from __future__ import annotations

import pytest

import hetplan as hp
from fakes.workloads import cluster, profile_document
from hetplan.errors import InputError
from hetplan.planner.precisions import AUTO, PREFERRED, make_workloads, precisions_of
from hetplan.planner.ranking import Planning, make_plans
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import make_workload
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run

AMPERE = [
    {
        "devices": 2,
        "device": "A100-SXM4-40GB",
        "intra_node_gbit_per_s": 2400,
        "network_gbit_per_s": 100,
    }
]
GAMING = [
    {"devices": 2, "device": "RTX-3090", "intra_node_gbit_per_s": 100, "network_gbit_per_s": 10}
]


def planned(
    nodes: list[dict[str, object]] | None, precision: str | list[str], **more: object
) -> Planning:
    """gpt2 by AMP and data parallelism on two devices of a kind, or on two fast and two slow
    ones."""
    on = cluster() if nodes is None else cluster(nodes=nodes)
    arguments = {"strategies": ["amp", "dp"], "threads": 1, "time_limit": 300.0, **more}
    return hp.plan("gpt2", on, global_batch=8, precision=precision, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp16", ("fp16",)),
        ("fp32, bf16,fp32", ("fp32", "bf16")),
        (AUTO, PREFERRED),
        (["bf16"], ("bf16",)),
    ],
)
def test_names(given: str | list[str], expected: tuple[str, ...]) -> None:
    assert precisions_of(given) == expected


@pytest.mark.parametrize("given", ["fp8", "fp16,", "", "auto,fp16", []])
def test_wrong_names(given: str | list[str]) -> None:
    with pytest.raises(InputError, match="precision"):
        precisions_of(given)


def test_one_precision_is_planned_as_ever() -> None:
    one, listed = planned(None, "fp16"), planned(None, ["fp16"])
    assert [c.name for c in one.candidates] == [c.name for c in listed.candidates]
    assert {c.name for c in one.candidates} == {
        "amp/auto",
        "amp/paper",
        "amp/megatron",
        "dp/enumeration",
    }
    assert one.precisions == ("fp16",) and {c.precision for c in one.candidates} == {"fp16"}
    assert one.document()["workload"]["precision"] == "fp16"


def test_both_are_ranked_together_each_as_if_alone() -> None:
    both = planned(None, "fp16,fp32")
    assert both.precisions == ("fp16", "fp32") and len(both.candidates) == 8
    for precision in both.precisions:
        alone = {f"{c.name}+{precision}": c for c in planned(None, precision).candidates}
        mine = {c.name: c for c in both.candidates if c.precision == precision}
        assert set(mine) == set(alone)
        for name, candidate in mine.items():
            assert candidate.predicted_seconds == alone[name].predicted_seconds
            assert candidate.peak_bytes == alone[name].peak_bytes
            assert candidate.plan is not None and candidate.plan.workload.precision == precision
    best = both.best
    assert best is not None and best.precision == "fp16"  # tensor cores: several times faster
    assert both.workload.precision == "fp16"
    seconds = [c.predicted_seconds for c in both.candidates]
    assert seconds == sorted(s for s in seconds if s is not None)


def test_the_winner_is_in_its_own_workload_and_document() -> None:
    both = planned(None, "fp32,fp16")
    document = both.document()
    assert document["workload"]["precisions"] == ["fp32", "fp16"]
    assert document["workload"]["precision"] == document["candidates"][0]["precision"] == "fp16"
    assert hp.replay(
        hp.Plan(**document["candidates"][0]["plan"]), both.workload
    ).seconds == pytest.approx(document["candidates"][0]["predicted_seconds"])


def test_what_a_device_lacks_is_left_out_and_said() -> None:
    found = planned(None, AUTO, strategies=["dp"])
    assert found.precisions == ("fp16", "fp32")
    assert found.notes[0] == "bf16 is left out: no units for it in V100-SXM2-16GB, T4"


def test_no_precision_is_left() -> None:
    own = {"mine": {"memory_gib": 16, "peak_tflops": {"fp16": 90}, "memory_gb_per_s": 900}}
    node = {"devices": 2, "device": "mine", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 10}
    with pytest.raises(InputError, match=r"no precision that every device has \(got 'bf16, fp32'"):
        make_workloads("gpt2", cluster(nodes=[node], devices=own), 8, precision="bf16,fp32")


def test_equal_times_and_bytes_are_one_problem() -> None:
    """A100: fp16 and bf16 have one peak and one size; RTX-3090 likewise; the preferred one is
    planned."""
    for nodes in (AMPERE, GAMING):
        found = planned(nodes, AUTO, strategies=["dp"])
        assert found.precisions == ("bf16", "fp32")
        assert "fp16 is not planned apart: times and bytes are those of bf16" in found.notes
        swapped = planned(nodes, "fp16,bf16", strategies=["dp"])
        assert swapped.precisions == ("fp16",)
        bf16, fp16 = (
            next(c for c in p.candidates if c.precision != "fp32") for p in (found, swapped)
        )
        assert (
            bf16.predicted_seconds == fp16.predicted_seconds and bf16.peak_bytes == fp16.peak_bytes
        )


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
    every = [
        make_workload("gpt2", cluster(), 8, precision=precision) for precision in ("fp16", "fp32")
    ]
    found = make_plans(every, ["dp"], Run(Options(threads=1, time_limit=300)), parts=True)
    on_parts = [c.name for c in found.candidates if "@" in c.name]
    assert on_parts and all("+fp16@" in name or "+fp32@" in name for name in on_parts)
    assert any(note.startswith("dp in fp16, dp in fp32: recomputation") for note in found.notes)
