"""`hetplan plan search --write-plan`: the winner as a plan that other commands take, or what a plan
file cannot say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.formulations.joint.plan import Plan

SEARCH = ("plan", "search", "-m", "gpt2-medium", "--cluster", "p3-4", "-b", 64, "--top", 1)
PLAIN = {
    "overlap": "false",
    "sequence_parallel": "false",
    "offload": "false",
    "recompute": "none,selective,full",
    "recompute_method": "uniform",
    "recompute_layers": "1",
    "expert": "1",
}


SOME = ["recomputation of some layers"]


def params(**values: str) -> list[str]:
    """As options."""
    return [part for name, value in values.items() for part in ("--param", f"{name}={value}")]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, {}),
        (
            {"recompute": "full", "distributed_optimizer": "true"},
            {"recomputation": "full", "zero": 1},
        ),
        (
            {"recompute": "none", "distributed_optimizer": "false"},
            {"recomputation": "none", "zero": 0},
        ),
        ({"pipeline": "4", "virtual": "2", "tensor": "2"}, {}),
    ],
)
def test_the_winner_becomes_a_plan(
    hetplan: Call, tmp_path: Path, more: dict[str, str], says: dict[str, Any]
) -> None:
    file = tmp_path / "plan.json"
    ran = hetplan(*SEARCH, *params(**PLAIN | more), "--write-plan", file, "--json")
    assert ran.code == 0, ran.err
    plan, best = Plan.load(file), ran.json["best"]
    strategy = best["strategy"]
    assert {name: getattr(plan, name) for name in says} == says
    assert plan.zero == strategy["use_distributed_optimizer"]
    assert plan.recomputation == (strategy["recompute_granularity"] or "none")
    assert len(plan.replicas) == strategy["data_parallel_size"]
    stages = plan.replicas[0].stages
    assert len(stages) == strategy["pipeline_model_parallel_size"] == len(best["stages"])
    assert len(stages[0].layers) == (strategy["virtual_pipeline_model_parallel_size"] or 1)
    assert len(stages[0].devices[0]) == strategy["tensor_model_parallel_size"]
    (batches,) = plan.replicas[0].micro_batches
    assert batches.samples == strategy["micro_batch_size"]
    assert plan.prediction is not None
    assert plan.prediction.closed_form_seconds == best["seconds"]
    shown = hetplan("show", file, "--cluster", "p3-4")
    assert shown.code == 0 and "hetplan plan search" in shown.out
    exported = hetplan("export", file, "--to", "megatron")
    assert exported.code == 0
    assert f"--pipeline-model-parallel-size {len(stages)}" in exported.out


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"tensor": "4", "sequence_parallel": "true"}, ["sequence parallelism"]),
        (
            {"tensor": "2", "pipeline": "1", "overlap": "true", "sequence_parallel": "true",
             "distributed_optimizer": "true"},
            ["sequence parallelism", "overlapped tensor-parallel collectives",
             "overlapped reduction of gradients", "overlapped gathering of weights"],
        ),
        ({"recompute": "full", "recompute_layers": "2", "pipeline": "4"}, SOME),
        ({"recompute": "full", "recompute_method": "block", "pipeline": "1"}, SOME),
        ({"recompute": "hybrid", "pipeline": "1"}, SOME),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_say_is_refused_by_name(
    hetplan: Call, tmp_path: Path, more: dict[str, str], names: list[str]
) -> None:
    """The search's own answer stands all the same; the parameters named make it a plan."""
    file, rules = tmp_path / "plan.json", tmp_path / "fused.rules"
    rules.write_text("$num_gpus > 16\n")
    given = {"distributed_optimizer": "false"} | PLAIN | more
    ran = hetplan(*SEARCH, *params(**given), "--no-default-rules", "--write-plan", file)
    assert ran.code == 2 and not file.exists() and "tokens/s" in ran.out
    assert f"a plan file cannot say {', '.join(names)} (expected --param" in ran.err
    advice = ran.err.split("(expected ")[1].strip().removesuffix(")").split(" --param ")
    named = dict(one.removeprefix("--param ").split("=") for one in advice)
    again = hetplan(*SEARCH, *params(**given | named), "--write-plan", file)
    assert again.code == 0 and file.exists()


def test_offloading_and_experts_are_refused(hetplan: Call, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    offloaded = hetplan(
        "plan", "search", "-m", "gpt2-xl", "--cluster", "p3-4", "-b", 64, "-p", "recompute=none",
        "-p", "pipeline=1", "-p", "tensor=1", "-p", "overlap=false", "-p",
        "distributed_optimizer=false", "-p", "sequence_parallel=false", "-p", "micro-batch=1",
        "--write-plan", file,
    )  # fmt: skip
    assert offloaded.code == 2 and "cannot say offloaded optimizer states (" in offloaded.err
    mixed = hetplan(
        "plan", "search", "-m", "bert-moe", "--cluster", "p3-4", "-b", 64, "-p", "expert=2",
        "-p", "overlap=false", "-p", "sequence_parallel=false", "-p", "recompute=none",
        "--write-plan", file,
    )  # fmt: skip
    assert mixed.code == 2 and "cannot say expert parallelism (" in mixed.err
    nowhere = hetplan("plan", "search", "-m", "gpt2", "-g", "A800:8", "--write-plan", file)
    assert nowhere.code == 2 and "expected --cluster" in nowhere.err and not file.exists()
