"""`hetplan plan search`: pools, parameters, rules, plots, its instance, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import get_args

import pytest

from fakes.cli import Call
from hetplan.formulations.astra.search.pool import Mode
from hetplan.formulations.astra.search.rules import __doc__ as GRAMMAR
from hetplan.formulations.astra.search.space import PARAMETERS, rule_columns
from hetplan.formulations.astra.search.table import GRANULARITIES, METHODS
from hetplan.plans.making import workload_of
from hetplan.plans.plan import load_plan
from hetplan.profiling.models.model import load_model
from hetplan.replays.replay import replay

SMALL = ("plan", "search", "--model", "gpt2", "--global-batch", 64)
NARROW = ("--param", "tensor=1,2,4", "--param", "micro-batch=1,2,4")


def test_homogeneous_document(hetplan: Call, tmp_path: Path) -> None:
    ran = hetplan(*SMALL, *NARROW, "--gpus", "A800:16", "--json", "-o", tmp_path / "found.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["mode"] == "homogeneous" and ran.json["proven"] is True
    assert ran.json["pool"]["types"][0]["type"] == "A800-SXM4-80GB"
    assert (
        ran.json["counts"]["generated"]
        > ran.json["counts"]["after_rules"]
        >= ran.json["counts"]["priced"]
        > 0
    )
    assert ran.json["best"] == ran.json["top"][0]
    assert (tmp_path / "found.json").read_text() == ran.out


def test_mixed_pool_and_its_instance(hetplan: Call, tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    ran = hetplan(*SMALL, "--gpus", "A800:8,H100:8", "--instance", file, "--json", *NARROW)
    assert ran.code == 0 and ran.json["mode"] == "heterogeneous"
    assert sum(ran.json["best"]["devices"].values()) == 16
    solved = hetplan("solve", file, "--method", "exact,milp", "--json", "--threads", 1)
    assert solved.code == 0
    assert [r["status"] for r in solved.json["results"]] in (
        ["optimal"] * 2,
        ["optimal", "feasible"],
    )
    objectives = [r["objective"] for r in solved.json["results"]]
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-5)
    best = ran.json["best"]
    assert objectives[0] == pytest.approx(best["pipeline_seconds"], rel=1e-9)
    rest = best["reduction_seconds"] + best["optimizer_seconds"]
    assert best["pipeline_seconds"] + rest == pytest.approx(best["seconds"], rel=1e-12)
    assert "pipeline's seconds" in file.read_text()
    table = hetplan(*SMALL, "--gpus", "A800:8,H100:8", *NARROW)
    assert table.code == 0 and "Pareto set" in table.out and "proof:" in table.out
    assert "dollars/1 B tokens" in table.out
    assert "pipeline + " in table.out and "left out: on segments" in " ".join(table.out.split())


def test_what_segments_cannot_have_is_said(hetplan: Call) -> None:
    ran = hetplan(*SMALL, *NARROW, "--gpus", "A800:8,H100:8", "--param", "recompute=hybrid")
    assert ran.code == 1 and "there is nothing to try" in " ".join(ran.out.split())
    ran = hetplan(*SMALL, *NARROW, "--gpus", "A800:8,H100:8", "--param", "virtual=1", "--json")
    assert any("virtual stages" in text for text in ran.json["left_out"])


def test_rules_of_the_user(hetplan: Call, tmp_path: Path) -> None:
    rules = tmp_path / "mine.rules"
    rules.write_text("# no tensor parallelism\n$tensor_model_parallel_size > 1\n")
    ran = hetplan(*SMALL, *NARROW, "--gpus", "A800:16", "--rules", rules, "--json")
    assert all(c["strategy"]["tensor_model_parallel_size"] == 1 for c in ran.json["top"])
    rules.write_text("$tensor_model_parallel_size > 1\n$tensor_modl_parallel_size > 1\n")
    ran = hetplan(*SMALL, "--gpus", "A800:16", "--rules", rules)
    assert (
        ran.code == 2 and "line 2 column 1" in ran.err and "$tensor_model_parallel_size" in ran.err
    )
    rules.write_text("$num_gpus > 0\n")
    ran = hetplan(*SMALL, "--gpus", "A800:16", "--rules", rules)
    assert ran.code == 1 and "every strategy meets a rule" in ran.out


def test_shipped_rules_are_shown(hetplan: Call) -> None:
    ran = hetplan("plan", "search", "--show-rules")
    assert ran.code == 0 and "$recompute_num_layers > $pipeline_model_parallel_size" in ran.out


@pytest.mark.parametrize(("name", "begins"), [("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG")])
def test_plots(hetplan: Call, tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib", reason="the optional extra `plots` is not installed")
    pool = ("--gpus", "A800:8,H100:8", "--mode", "cost")
    ran = hetplan(*SMALL, *NARROW, *pool, "--plot", tmp_path / name)
    assert ran.code == 0 and (tmp_path / name).read_bytes().startswith(begins)


def test_a_plot_without_matplotlib_is_refused_before_the_search(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = hetplan(*SMALL, "--gpus", "A800:16", "--plot", tmp_path / "plot.png")
    assert ran.code == 2 and "hetplan[plots]" in ran.err


def test_money_limit(hetplan: Call) -> None:
    ran = hetplan(*SMALL, *NARROW, "--gpus", "A800:16", "--money-limit", "0.0001", "--json")
    assert ran.code == 1 and ran.json["best"] is None and "dollars" in ran.json["reason"]
    cheapest = hetplan(*SMALL, *NARROW, "--gpus", "A800:16", "--json").json["pareto"][-1]["money"]
    assert f"the cheapest costs {cheapest:.6g}" in ran.json["reason"]


PAGE = (Path(__file__).parents[2] / "docs" / "search.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under one heading of the second level."""
    return PAGE.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]


def names(title: str) -> list[str]:
    """The names in the first cells of the section's tables."""
    cells = re.findall(r"^\| (`[^|]+`) \|", section(title), flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_name_is_there() -> None:
    assert sorted(names("Modes")) == sorted(get_args(Mode))
    assert sorted(names("Parameters")) == sorted(PARAMETERS)
    assert sorted(names("Rules")) == sorted(f"${name}" for name in rule_columns(("x",)))
    for word in (*GRANULARITIES, *METHODS, "none"):
        assert f"`{word}`" in section("Parameters")


def test_the_grammar_is_the_parsers() -> None:
    rules = [" ".join(line.split()) for line in section("Rules").splitlines()]
    for line in (GRAMMAR or "").splitlines():
        if re.match(r" +\w+ += ", line):
            assert " ".join(line.split("   left")[0].split()).split(" left to right")[0] in rules


@pytest.mark.parametrize("gpus", ["A800:8", "A800:4,H100:4"])
def test_every_key_is_there(hetplan: Call, gpus: str) -> None:
    found = hetplan(
        "plan", "search", "-m", "gpt2", "-g", gpus, "-b", 16, "-p", "tensor=1,2", "--json"
    )
    document = json.loads(found.out)
    best = document["best"]
    assert sorted(names("JSON")) == sorted([*document, *best])
    text = section("JSON")
    inner = [
        document["workload"],
        document["pool"],
        document["pool"]["types"][0],
        document["counts"],
    ]
    inner += [best["stages"][0], *best["segments"][:1]]
    for part in inner:
        assert [key for key in part if f"`{key}`" not in text] == []
    assert {f"${name}" for name in best["strategy"]} <= set(names("Rules"))


def test_products_in_fewer_bits_are_faster(hetplan: Call, tmp_path: Path) -> None:
    """Where devices have units for them; the plan names what computes."""
    seconds, plan = [], tmp_path / "plan.json"
    asked = ("plan", "search", "--model", "llama2-7b", "--global-batch", 64, "--precision", "bf16")
    pool = tmp_path / "two.yaml"
    pool.write_text(
        "format: hetplan-cluster\nversion: 1\nname: two\nnodes:\n  - {count: 2, devices: 4, "
        "device: B200, intra_node_gbit_per_s: 2400, network_gbit_per_s: 400}\n"
    )
    for stack in ("fused", "fp8", "fp4"):
        more = ("--stack", stack, "--write-plan", plan, "--json", *NARROW, "-p", "overlap=false")
        ran = hetplan(*asked, "--cluster", pool, *more)
        assert ran.code == 0, ran.err
        seconds.append(ran.json["best"]["seconds"])
        assert json.loads(plan.read_text())["workload"]["stack"] == stack
    assert seconds[0] > seconds[1] > seconds[2]
    refused = hetplan(*asked, "--gpus", "A800:16", "--stack", "fp8")
    assert refused.code == 2 and "stack fp8, bf16" in refused.error
    unknown = hetplan(*asked, "--gpus", "A800:16", "--stack", "fp16")
    assert unknown.code == 2 and "--stack: unknown software stack" in unknown.error


def test_the_framework_and_the_margin_say_what_fits(hetplan: Call) -> None:
    """12 bytes a logit and buffers of full shards, which Megatron's numbers lack; and a margin."""
    search = (
        "plan", "search", "-m", "llama3-8b", "--precision", "bf16", "--sequence", 32768, "-g",
        "H100-SXM5-80GB:8", "-b", 8, "-p", "pipeline=1", "-p", "tensor=1", "-p", "micro_batch=1",
        "-p", "fsdp=true", "-p", "recompute=full", "-p", "offload=false", "--json",
    )  # fmt: skip
    held = {}
    for name in ("fsdp", "megatron"):
        ran = hetplan(*search, "--framework", name, "--memory-margin", 0)
        (stage,) = json.loads(ran.out)["best"]["stages"]
        held[name] = stage["peak_bytes"]
    logits = 32768 * 128256
    assert held["fsdp"] - held["megatron"] > 6 * logits - 2e9  # one communicator less
    tight = hetplan(*search, "--framework", "fsdp", "--memory-margin", 0.2)
    assert tight.code == 1 and "fits in memory" in json.loads(tight.out)["reason"]
    assert "did you mean" in hetplan(*search, "--framework", "megatro").err.lower()


def test_types_of_gradients_and_moments_stand_in_the_plan_and_are_replayed(
    hetplan: Call, tmp_path: Path
) -> None:
    """14 bytes a parameter in place of 18, of 2 bytes of gradients and 3 of each moment: in the
    search, in the plan that it writes, and in the replay of this plan."""
    search = (
        "plan", "search", "-m", "gpt2", "-b", 64, "--cluster", "p3-4", "--json",
        "-p", "pipeline=1", "-p", "tensor=1", "-p", "micro_batch=1", "-p", "fsdp=false", "-p",
        "recompute=none", "-p", "offload=false", "-p", "distributed_optimizer=false",
    )  # fmt: skip
    held: list[float] = []
    replayed: list[float] = []
    options: tuple[tuple[object, ...], ...] = ((), ("--gradient-bytes", 2, "--moment-bytes", 3))
    for more in options:
        plan = tmp_path / f"{len(held)}.json"
        ran = hetplan(*search, *more, "--write-plan", plan)
        assert ran.code == 0, ran.err
        (stage,) = ran.json["best"]["stages"]
        held.append(stage["peak_bytes"])
        written = load_plan(plan)
        replayed.append(max(replay(written, workload_of(written, "plan")).peak_bytes))
    params = load_model("gpt2").params
    assert held[0] - held[1] == pytest.approx(4 * params)
    assert replayed[0] - replayed[1] == pytest.approx(4 * params)
