"""`hetplan plan`: its document, its table, its plan file, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fakes.cli import Call, Ran
from fakes.workloads import TWO_BLOCKS, cluster_document, pipeline, profile_document, small
from hetplan.cli.plan import asked_levels, no_winner, versus_best
from hetplan.errors import InputError
from hetplan.planner import STRATEGIES
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.criteria import Criteria
from hetplan.planner.planning import Planning
from hetplan.plans.plan import load_plan
from hetplan.profiling.frameworks import FRAMEWORKS

CANDIDATE_KEYS = (
    "strategy",
    "method",
    "status",
    "predicted_seconds",
    "objective",
    "bound",
    "gap",
    "fits_memory",
    "peak_bytes",
    "interval_seconds",
    "tokens_per_second",
    "flops_per_device",
    "mfu",
    "money_per_million_tokens",
    "solve_seconds",
    "plan",
)


@pytest.fixture
def plan(hetplan: Call, cluster: Path) -> Callable[..., Ran]:
    """`hetplan plan` of gpt2 on that cluster, with further options."""

    def call(*more: object, batch: object = 8, model: object = "gpt2") -> Ran:
        return hetplan(
            "plan",
            "--model",
            model,
            "--cluster",
            cluster,
            "--global-batch",
            batch,
            "--threads",
            1,
            *more,
        )

    return call


def test_borrowed_curves_of_all_reduces_are_told(plan: Callable[..., Ran], tmp_path: Path) -> None:
    """In one line for the two cards in PCIe slots; the file may state them instead."""
    node = {"devices": 2, "device": "L4", "intra_node_gbit_per_s": 256, "network_gbit_per_s": 10}
    for stated, lines in (({}, 1), ({"all_reduce_gbit_per_s": {2: 100}}, 0)):
        path = tmp_path / "cards.yaml"
        nodes = {"nodes": [node | stated], "devices": {}}
        path.write_text(yaml.safe_dump(cluster_document() | nodes))
        ran = plan("--cluster", path, "--strategies", "dp", "-q")
        assert ran.code == 0
        assert ran.err.count("follow the curves of L40S over PCIe 4: 163 Gbit/s among 2") == lines


def test_document(plan: Callable[..., Ran], tmp_path: Path) -> None:
    ran = plan("--json", "-o", tmp_path / "plan.json", "--strategies", "amp,dp", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert list(ran.json)[:3] == ["workload", "candidates", "winner"]
    assert ran.json["workload"]["devices"] == {"V100-SXM2-16GB": 2, "T4": 2}
    assert ran.json["workload"]["tokens_per_iteration"] == 8 * 1024
    for candidate in ran.json["candidates"]:
        assert tuple(candidate)[: len(CANDIDATE_KEYS)] == CANDIDATE_KEYS
        assert len(candidate["peak_bytes"]) == 4
        assert candidate["tokens_per_second"] == pytest.approx(
            8 * 1024 / candidate["predicted_seconds"]
        )
        low, high = candidate["interval_seconds"]
        assert low < candidate["predicted_seconds"] < high
        assert 0 < candidate["mfu"] < 1
        assert 0 < candidate["flops_per_device"] < 125e12  # V100's datasheet
    assert ran.json["winner"] == 0
    best = ran.json["candidates"][0]
    assert best["replayed"] is True and best["closed_form_seconds"] != best["predicted_seconds"]
    assert ran.json["explanation"]["closed_form_ratio"] == pytest.approx(
        best["predicted_seconds"] / best["closed_form_seconds"]
    )
    assert (best["strategy"], best["method"], best["status"]) == ("amp", "auto", "optimal")
    assert best["bound"] == pytest.approx(best["objective"], rel=1e-6)
    assert load_plan(tmp_path / "plan.json").model_dump(mode="json") == best["plan"]


def test_answer_fits_a_screen_and_all_is_printed_on_request(plan: Callable[..., Ran]) -> None:
    ran = plan("--strategies", "amp", "--strategies", "dp")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    answer = " ".join(ran.out.split())
    for expected in (
        "gpt2 (124.4 M parameters) on two-by-two (2 V100-SXM2-16GB + 2 T4), batch 8 x 1024 "
        "tokens, fp16",
        "best plan amp/auto: ",
        "node 0: 2 V100-SXM2-16GB (",
        "/ 13.7 GiB",
        " TFLOP/s per device, ",
        "GiB of 13.7 GiB on V100-SXM2-16GB; ",
        "5 % of each device stays free for its allocator",
        "optimal for amp's objective",
        "the best plan of each paradigm",
        "dp/enumeration",
        " other plans, notes, and why: --all",
    ):
        assert expected in answer
    assert "megatron" not in answer
    everything = plan("--all", "--strategies", "amp", "--strategies", "dp").out
    for expected in ("amp/megatron", "why amp/auto", "runner-up", "objective"):
        assert expected in everything


def test_one_ratio_is_one_figure_and_memory_is_not_blamed_for_other_refusals(
    plan: Callable[..., Ran],
) -> None:
    ran = plan("--all", "--strategies", "dp")
    assert re.search(r"replayed event by event, [\d.]+ times the plan's objective", ran.out)
    ran = plan("--strategies", "dp", batch=7)
    assert ran.code == 1 and "divides 7 samples" in ran.out and "either" not in ran.out


def test_nothing_fits(plan: Callable[..., Ran], tmp_path: Path) -> None:
    target, wide = tmp_path / "plan.json", tmp_path / "wide.json"
    wide.write_text(json.dumps(TWO_BLOCKS | {"n_embd": 65536, "n_head": 512}))
    ran = plan("-o", target, model=wide)
    assert ran.code == 1
    assert not target.exists()
    assert f"hetplan: no winner: {target} is not written" in ran.err
    assert "no winner" in ran.out and "TiB in one copy of the model" in ran.out
    ran = plan("--json", model=wide)
    assert (ran.code, ran.json["winner"]) == (1, None)
    assert all(c["message"] for c in ran.json["candidates"])


def test_several_precisions(plan: Callable[..., Ran], tmp_path: Path) -> None:
    ran = plan("--strategies", "dp", "--precision", "auto", "-o", tmp_path / "plan.json")
    for expected in (
        "fp16 or fp32",
        "bf16 is left out: no units for it in V100-SXM2-16GB, T4",
        "best plan dp/enumeration+fp16",
        "1 other plan, notes, and why: --all",
        "devices 2 V100-SXM2-16GB + 2 T4 in fp16",
    ):
        assert expected in " ".join(ran.out.split())
    assert load_plan(tmp_path / "plan.json").workload.precision == "fp16"


def test_what_is_too_dear_is_told_in_money(plan: Callable[..., Ran]) -> None:
    ran = plan("--strategies", "dp", "--money-limit", "0.000001")
    assert ran.code == 1
    assert "no winner: nothing that fits costs at most 1e-06 per million tokens" in ran.out
    assert (
        "cheapest that fits: dp/enumeration" in ran.out
        and "in one copy of the model" not in ran.out
    )


def test_all_strategies_by_default(plan: Callable[..., Ran], two_blocks: Path) -> None:
    ran = plan("--json", model=two_blocks)
    assert ran.code == 0
    assert {c["strategy"] for c in ran.json["candidates"]} == set(STRATEGIES)
    assert all(c["plan"] or c["message"] for c in ran.json["candidates"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": "gpt3"},
            "model: model differs from the workload's (got 'gpt3', expected 'gpt2')",
        ),
        (
            {"sequence": 99},
            "sequence: sequence differs from the workload's (got 99, expected 1024)",
        ),
        (
            {"precision": "fp32"},
            "precision: precision differs from the workload's (got 'fp32', expected 'fp16')",
        ),
        ({"tables": []}, "tables: not usable (got a list of 0, expected"),
        (
            {"tables": "T4"},
            "tables: no table for device type 'V100-SXM2-16GB' of cluster two-by-two (got 'T4'",
        ),
    ],
)
def test_a_profile_that_does_not_fit_is_named(
    plan: Callable[..., Ran], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path, document = tmp_path / "profile.json", profile_document()
    if change.get("tables"):
        change = {"tables": [t for t in document["tables"] if t["device"] == change["tables"]]}
    path.write_text(json.dumps(document | change))
    assert plan("--profile", path, "--strategies", "dp").error.startswith(f"{path}: {message}")


def test_example_cluster_by_name(hetplan: Call) -> None:
    ran = hetplan(
        "plan",
        "--model",
        "gpt2",
        "--cluster",
        "g4dn-4",
        "--global-batch",
        32,
        "--strategies",
        "dp",
        "--json",
    )
    assert ran.json["workload"]["devices"] == {"T4": 16}


@pytest.mark.parametrize("missing", ["--model", "--cluster", "--global-batch"])
def test_required_options(hetplan: Call, missing: str) -> None:
    usual = {"--model": "gpt2", "--cluster": "x", "--global-batch": "8"}
    words = [word for name, value in usual.items() if name != missing for word in (name, value)]
    assert f"missing option '{missing}'" in hetplan("plan", *words).error


def test_a_cluster_file_of_megabytes(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# " + "x" * 2_000_000)
    ran = hetplan("plan", "--model", "gpt2", "--cluster", path, "--global-batch", 8)
    assert ran.error == f"{path}: file is too large (expected at most 1048576 bytes)"


BASE = (
    "plan",
    "--model",
    "llama2-7b",
    "--cluster",
    "poplar-a",
    "--global-batch",
    64,
    "--threads",
    1,
)


def test_settings_reach_the_strategy(hetplan: Call, tmp_path: Path) -> None:
    more = (
        "--strategies",
        "poplar",
        "--set",
        "poplar.zero=2",
        "--set",
        "poplar.shards=memory",
        "-q",
    )
    ran = hetplan(*BASE, *more, "--json")
    assert ran.code == 0
    assert {c["method"].partition("+")[0] for c in ran.json["candidates"]} == {
        "auto-zero2",
        "paper-zero2",
    }
    best = next(c for c in ran.json["candidates"] if c["method"] == "auto-zero2")
    assert len(best["plan"]["zero_shares"]) == 8
    assert "of all-gather once per iteration" in best["message"]
    told = hetplan(*BASE, *more, "--all")
    assert "once per iteration" in told.out


def test_replan(hetplan: Call, plan_files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, cluster = plan_files
    more = ("--cluster", cluster, "--strategies", "dp", "-q")
    ran = hetplan("plan", "replan", plan, "--lost", "node1", *more, "-o", tmp_path / "new.json")
    assert (ran.code, ran.err) == (0, "")
    assert "without node 1" in ran.out and "before the loss" in ran.out
    new = load_plan(tmp_path / "new.json")
    assert set(new.ranks) == {0, 1} and len(new.devices) == 4
    full = hetplan("plan", "replan", plan, "--lost", "node1", *more, "--memory-margin", 0.9)
    assert full.code == 1 and "nothing fits" in full.out
    again = hetplan("plan", "replan", plan, "--lost", "node0", *more, "--json").json
    assert again["lost_nodes"] == [0]
    assert again["candidates"][again["winner"]]["bytes_from_checkpoint"] == 0.0


def test_replan_where_nothing_is_left_that_fits(
    hetplan: Call, plan_files: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, cluster = plan_files
    tight = cluster_document(devices={"V100-SXM2-16GB": {"memory_gib": 2}})
    cluster.write_text(yaml.safe_dump(tight))
    target = tmp_path / "new.json"
    ran = hetplan(
        "plan",
        "replan",
        plan,
        "--cluster",
        cluster,
        "--lost",
        "node1",
        "--strategies",
        "dp",
        "-o",
        target,
    )
    assert ran.code == 1 and "nothing fits" in ran.out
    assert "is not written" in ran.err and not target.exists()


def test_what_if(hetplan: Call, cluster: Path, two_blocks: Path) -> None:
    base = (
        "plan",
        "what-if",
        "--model",
        two_blocks,
        "--cluster",
        cluster,
        "--global-batch",
        8,
        "--strategies",
        "dp",
        "-q",
    )
    ran = hetplan(*base, "--add", "2xT4", "--remove", "node0", "--network-gbit-per-s", 100)
    assert ran.code == 0 and ran.err.count("\n") == 1 and "assumed, as transformers" in ran.err
    for expected in ("as it is", "add 2xT4", "remove node0", "network at 100 Gbit/s", "on devices"):
        assert expected in ran.out
    found = hetplan(*base, "--json").json
    assert "network at 100 Gbit/s" in [v["change"] for v in found["variants"]]
    assert hetplan(*base, "--add", "2xT4", "--memory-margin", 0.9).code == 1
    assert "--add: not usable" in hetplan(*base, "--add", "T4").error


def test_idle_devices_and_paradigms_without_a_plan_are_named(hetplan: Call, tmp_path: Path) -> None:
    cluster = tmp_path / "uneven.yaml"
    cluster.write_text(
        "format: hetplan-cluster\nversion: 1\nname: uneven\nnodes:\n"
        "- {devices: 4, device: A100-SXM4-80GB, intra_node_gbit_per_s: 4800, "
        "network_gbit_per_s: 100}\n"
        "- {devices: 3, device: T4, intra_node_gbit_per_s: 100, network_gbit_per_s: 1}\n"
    )
    asked = ("plan", "--model", "gpt2", "--cluster", cluster, "--global-batch", 8, "-q")
    ran = hetplan(*asked, "--strategies", "dp,astra,poplar")
    assert "3 devices idle; the best plan on all 7, " in " ".join(ran.out.split())
    assert "no plan of dp: no micro-batch size" in ran.out
    free = ran.out.partition("free memory")[2].partition("time goes to")[0]
    assert "on A100-SXM4-80GB" in free and "T4" not in free, "no T4 is in use"
    ran = hetplan(*asked, "--strategies", "dp,astra,poplar", "--all")
    assert max(map(len, ran.out.splitlines())) <= 100


def test_methods_that_had_no_time_are_named_where_there_is_no_winner() -> None:
    """Memory is not blamed for it."""
    method = SimpleNamespace(
        name="hap/auto", status="unknown", message="no time", fits_memory=None, plan=None
    )
    planning: Any = SimpleNamespace(candidates=[method])
    table = no_winner(planning)
    assert table.title == "no winner: no method had time for an answer"
    assert list(table.notes) == ["hap/auto has no answer: no time"]


def test_a_framework_s_own_levels_of_zero_are_asked_for_by_a_word() -> None:
    levels = {name: asked_levels("framework", framework) for name, framework in FRAMEWORKS.items()}
    assert levels["megatron"] == (0, 1) and levels["fsdp"] == (2, 3)
    assert levels["hetplan"] == levels["deepspeed"] == (0, 1, 2, 3)
    assert asked_levels(None, FRAMEWORKS["fsdp"]) == ()
    assert asked_levels("0,2-3", FRAMEWORKS["fsdp"]) == (0, 2, 3)
    with pytest.raises(InputError, match="--zero"):
        asked_levels("frameworks", FRAMEWORKS["fsdp"])


def test_zero_levels_are_named_where_plans_fit_and_no_device_has_a_price() -> None:
    """Memory is not blamed for it, although no plan has a price."""
    planning = planning_of(1.0)
    cluster = planning.workload.cluster
    specs = {
        name: spec.model_copy(update={"price_per_hour": None})
        for name, spec in cluster.specs.items()
    }
    unpriced = replace(planning.workload, cluster=replace(cluster, specs=specs))
    criteria = Criteria(zero_levels=(3,))
    table = no_winner(replace(planning, workload=unpriced, criteria=criteria, winner=None))
    assert "no plan that fits has a ZeRO level of 3" in table.title


def planning_of(*seconds: float) -> Planning:
    """A planning whose plans take that long; the first one wins."""
    workload = small()
    plan = pipeline(workload, 7)
    candidates = [
        Candidate(
            strategy="dp",
            method=StrategyMethod(f"m{number}"),
            status="feasible",
            predicted_seconds=taken,
            fits_memory=True,
            plan=plan,
        )
        for number, taken in enumerate(seconds)
    ]
    return Planning(workload=workload, candidates=tuple(candidates), winner=0)


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ((1.0, 1.5, 6.0), ["", "+50 %", "+500 %"]),
        ((1.0, 1.5, 6.35, 110.0), ["", "1.5x", "6.35x", "110x"]),
    ],
)
def test_one_form_of_longer_in_a_column(seconds: tuple[float, ...], texts: list[str]) -> None:
    planning = planning_of(*seconds)
    column = versus_best(planning)
    assert [column.cell(candidate) for candidate in planning.candidates] == texts
