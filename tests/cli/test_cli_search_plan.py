"""`hetplan plan search --write-plan`: the winner as a plan that other commands take, or what a plan
file cannot say of it."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fakes.cli import Call
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan

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
    ("more", "degrees"),
    [
        ({"tensor": "4", "sequence_parallel": "true"}, {"sequence_parallel": True}),
        (
            {"tensor": "2", "pipeline": "1", "overlap": "true", "sequence_parallel": "true",
             "distributed_optimizer": "true"},
            {"sequence_parallel": True, "overlap": ["tensor", "gradients", "weights"]},
        ),
        ({"recompute": "full", "recompute_layers": "2", "pipeline": "4"},
         {"recompute_method": "uniform", "recompute_layers": 2}),
        ({"recompute": "full", "recompute_method": "block", "pipeline": "1"},
         {"recompute_method": "block", "recompute_layers": 1}),
    ],
)  # fmt: skip
def test_further_degrees_stand_in_a_block_of_their_own(
    hetplan: Call, tmp_path: Path, more: dict[str, str], degrees: dict[str, Any]
) -> None:
    file = tmp_path / "plan.json"
    given = {"distributed_optimizer": "false"} | PLAIN | more
    ran = hetplan(*SEARCH, *params(**given), "--no-default-rules", "--write-plan", file, "--json")
    assert ran.code == 0, ran.err
    plan = Plan.load(file)
    tensor = ran.json["best"]["strategy"]["tensor_model_parallel_size"]
    assert plan.degrees == Degrees(expert_tensor=tensor, **degrees)
    if degrees.get("recompute_method") == "block":
        assert plan.refused is None
    else:
        assert plan.refused is not None and plan.degrees.text in plan.refused


MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
EVERYTHING = {
    "overlap": "false", "offload": "false", "recompute": "none", "tensor": "2", "pipeline": "2",
    "expert": "4", "context": "2", "whole_experts": "true", "fsdp": "true", "uneven": "true",
    "virtual": "2", "sequence_parallel": "true", "distributed_optimizer": "true",
    "micro_batch": "1",
}  # fmt: skip


CLUSTER = """format: hetplan-cluster
version: 1
name: two-nodes
nodes:
  - {count: 2, devices: 8, device: A100-SXM4-80GB, intra_node_gbit_per_s: 2400,
     network_gbit_per_s: 800}
"""


@pytest.fixture
def every_degree(hetplan: Call, tmp_path: Path) -> Path:
    """A plan with all degrees at once, and its model beside it."""
    file, config = tmp_path / "plan.json", tmp_path / "mixtral.json"
    config.write_text(json.dumps(MIXTRAL))
    rules, cluster = tmp_path / "chunks.rules", tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    rules.write_text("$num_layers_per_virtual_pipeline_stage == None\n")
    found = hetplan(
        "plan", "search", "-m", config, "--cluster", cluster, "-b", 64, "--sequence", 1024, "--top",
        1, "--precision", "bf16", "--no-default-rules", "--rules", rules, *params(**EVERYTHING),
        "--write-plan", file,
    )  # fmt: skip
    assert found.code == 0, found.err
    return file


def parallelism(program: str) -> dict[str, Any]:
    """The constant PARALLELISM of a Python module."""
    for statement in ast.parse(program).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PARALLELISM":
            return dict(ast.literal_eval(statement.value))
    raise AssertionError(program)


def test_every_degree_is_written(hetplan: Call, every_degree: Path) -> None:
    """16 GPUs: 2 stages of 2 chunks, 2 tensor, 2 context and 2 data ranks; 4 x 1 of each stage's 8
    ranks hold the experts of a block."""
    plan = Plan.load(every_degree)
    assert plan.degrees == Degrees(context=2, expert=4, expert_tensor=1, sequence_parallel=True)
    assert plan.zero == 3 and len(plan.replicas) == 2
    stages = plan.replicas[0].stages
    assert [stage.layers for stage in stages] == [[(0, 4), (7, 9)], [(4, 7), (9, 12)]]
    assert [len(stage.devices) for stage in stages] == [2, 2]
    shown = hetplan("show", every_degree)
    assert shown.code == 0 and "context 2, expert 4, expert tensor 1" in shown.out
    config = every_degree.with_name("mixtral.json")
    megatron = hetplan("export", every_degree, "--to", "megatron", "-m", config)
    for flag in (
        "--context-parallel-size 2", "--expert-model-parallel-size 4", "--sequence-parallel",
        "--expert-tensor-parallel-size 1", "--pipeline-model-parallel-layout 'Et*3|t*3|t*2|t*2L'",
        "--data-parallel-sharding-strategy optim_grads_params", "--no-overlap-p2p-communication",
        "--num-experts 8", "--moe-router-topk 2", "--hidden-size 1024", "--num-query-groups 8",
        "--vocab-size 32000", "--ffn-hidden-size 3584", "--swiglu", "--normalization RMSNorm",
        "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--hidden-dropout 0.0",
    ):  # fmt: skip
        assert f"  {flag}\n" in megatron.out, flag
    way = parallelism(hetplan("export", every_degree, "--to", "torchtitan").out)
    assert way["context_parallel_degree"] == 2 and way["expert_parallel_degree"] == 4
    assert (way["data_parallel_shard_degree"], way["data_parallel_replicate_degree"]) == (2, 1)
    whole = hetplan("export", every_degree, "--to", "bridge", "-m", config)
    bridge = yaml.safe_load(whole.out)
    assert bridge["model"]["num_moe_experts"] == 8 and not bridge["model"]["add_bias_linear"]
    assert bridge["model"]["expert_model_parallel_size"] == 4
    assert bridge["train"] == {"micro_batch_size": 1, "global_batch_size": 64}
    assert bridge["ddp"]["data_parallel_sharding_strategy"] == "optim_grads_params"
    scale = yaml.safe_load(hetplan("export", every_degree, "--to", "flagscale", "-m", config).out)
    assert scale["system"]["expert_model_parallel_size"] == 4
    assert scale["model"]["num_experts"] == 8 and "hetero" not in scale["system"]


def test_shard_groups_and_all_to_all_are_written(hetplan: Call, every_degree: Path) -> None:
    """Shards over two of the four context and data ranks; torchtitan has the ring alone."""
    plan = Plan.load(every_degree)
    assert plan.degrees is not None
    for more in ({"shard_groups": 2}, {"exchange": "all-to-all"}):
        degrees = plan.degrees.model_copy(update=more)
        Plan.model_validate(plan.model_dump() | {"degrees": degrees.model_dump()}).save(
            every_degree
        )
        megatron = hetplan("export", every_degree, "--to", "megatron")
        titan = hetplan("export", every_degree, "--to", "torchtitan")
        if degrees.shard_groups == 1:
            assert "  --cp-comm-type a2a\n" in megatron.out
            assert titan.code == 2 and "attention by all-to-all" in titan.err
            continue
        assert "  --num-distributed-optimizer-instances 2\n" in megatron.out
        assert "  --outer-dp-sharding-strategy no_shard\n" in megatron.out
        way = parallelism(titan.out)
        assert (way["data_parallel_replicate_degree"], way["data_parallel_shard_degree"]) == (2, 1)
    with pytest.raises(ValueError, match=r"degrees\.shard_groups is 3, expected a divisor"):
        Plan.model_validate(plan.model_dump() | {"degrees": {"context": 2, "shard_groups": 3}})


def test_what_cannot_take_the_degrees_names_them(hetplan: Call, every_degree: Path) -> None:
    for words in (
        ("run", every_degree), ("export", every_degree, "--to", "torchrun"),
        ("export", every_degree, "--to", "deepspeed"),
    ):  # fmt: skip
        refused = hetplan(*words)
        assert refused.code != 0 and "context 2, expert 4, expert tensor 1" in refused.err, words


def test_the_plan_is_replayed(hetplan: Call, every_degree: Path) -> None:
    """As it was when it was written; a plan that its model cannot have is refused in one line."""
    words = (
        "plan", "simulate", every_degree, "--cluster", every_degree.with_name("cluster.yaml"),
        "--model", every_degree.with_name("mixtral.json"), "--json",
    )  # fmt: skip
    plan = Plan.load(every_degree)
    assert plan.prediction is not None and plan.prediction.closed_form_seconds is not None
    ran = hetplan(*words)
    assert ran.code == 0, ran.err
    assert ran.json["predicted_seconds"] == pytest.approx(plan.prediction.predicted_seconds)
    assert ran.json["predicted_seconds"] == pytest.approx(
        plan.prediction.closed_form_seconds, rel=0.2
    )
    config = every_degree.with_name("mixtral.json")
    config.write_text(json.dumps(MIXTRAL | {"num_local_experts": 6}))
    refused = hetplan(*words)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "degrees.expert does not divide the experts (got 4, expected a divisor" in refused.err


@pytest.mark.parametrize("replayed", [0, 3])
def test_the_best_are_replayed(hetplan: Call, replayed: int) -> None:
    """Hybrid recomputation has no words in a plan, and is left without seconds."""
    given = params(**PLAIN | {"recompute": "none,hybrid", "overlap": "true"})
    words = (*SEARCH[:-1], 3, "--no-default-rules", *given, "--replay", replayed)
    ran, text = hetplan(*words, "--json"), hetplan(*words)
    seconds, top = ran.json["replayed_seconds"], ran.json["top"]
    assert len(seconds) == replayed and ("fastest replay first" in text.out) == (replayed > 0)
    for one, candidate in zip(seconds, top, strict=False):
        hybrid = candidate["strategy"]["recompute_granularity"] == "hybrid"
        assert (one is None) == hybrid
        assert hybrid or one == pytest.approx(candidate["seconds"], rel=0.3)
    nowhere = hetplan("plan", "search", "-m", "gpt2", "-g", "A800:8", "--replay", 1)
    assert nowhere.code == 2 and "--replay: a plan is for a cluster" in nowhere.err


def test_the_rule_of_degrees(every_degree: Path) -> None:
    plan = Plan.load(every_degree).model_dump(mode="json")
    for degrees, message in (
        ({"context": 4}, "has 2 row groups, expected one per context rank (4)"),
        ({"context": 2, "expert": 3}, "expected a divisor of the ranks"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Plan.model_validate(plan | {"degrees": degrees})


@pytest.mark.wide
def test_megatron_takes_the_flags(hetplan: Call, every_degree: Path) -> None:
    """As Megatron Core's own configuration reads them, by the names of its arguments."""
    core = pytest.importorskip(
        "megatron.core.transformer.transformer_config",
        reason="needs megatron-core (pip install megatron-core)",
    )
    config = every_degree.with_name("mixtral.json")
    written = hetplan("export", every_degree, "--to", "bridge", "-m", config)
    values = yaml.safe_load(written.out)["model"]
    fields = {field.name for field in dataclasses.fields(core.TransformerConfig)}
    others = {
        "vocab_size", "seq_length", "position_embedding_type", "share_embeddings_and_output_weights"
    }  # of the model's provider  # fmt: skip
    assert set(values) - fields == others
    own = {name: value for name, value in values.items() if name in fields}
    made = core.TransformerConfig(**own, pipeline_dtype=torch.bfloat16, bf16=True)
    assert made.virtual_pipeline_model_parallel_size == 2


def test_hybrid_recomputation_is_refused_by_name(hetplan: Call, tmp_path: Path) -> None:
    """The search's own answer stands all the same; the parameters named make it a plan."""
    file = tmp_path / "plan.json"
    given = PLAIN | {"recompute": "hybrid", "pipeline": "1"}
    ran = hetplan(*SEARCH, *params(**given), "--no-default-rules", "--write-plan", file)
    assert ran.code == 2 and not file.exists() and "tokens/s" in ran.out
    assert "cannot say hybrid recomputation (expected --param recompute=none,sel" in ran.err


def test_offloading_is_written(hetplan: Call, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    offloaded = hetplan(
        "plan", "search", "-m", "gpt2-xl", "--cluster", "p3-4", "-b", 64, "-p", "recompute=none",
        "-p", "pipeline=1", "-p", "tensor=1", "-p", "overlap=false", "-p",
        "distributed_optimizer=false", "-p", "sequence_parallel=false", "-p", "micro-batch=1",
        "--write-plan", file,
    )  # fmt: skip
    degrees = Plan.load(file).degrees
    assert offloaded.code == 0 and degrees is not None and 0.9 < degrees.offloaded < 1
    # Megatron's optimizer on the host needs ZeRO 1
    assert "use_distributed_optimizer" in hetplan("export", file, "--to", "megatron").err
    nowhere = hetplan("plan", "search", "-m", "gpt2", "-g", "A800:8", "--write-plan", file)
    assert nowhere.code == 2 and "expected --cluster" in nowhere.err
