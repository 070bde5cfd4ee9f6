"""Published `config.json` files plan end to end; types that have no chain say how they go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.plans.plan import Plan
from quick import rest_wide

FOLDER = Path(__file__).parents[1] / "files" / "configurations"
# Released weights, in billions (the model cards).
PARAMETERS = {
    "Qwen2-7B": 7.616,
    "Qwen1.5-MoE-A2.7B": 14.32,
    "Qwen3-8B": 8.191,
    "Qwen3-30B-A3B": 30.53,
    "gemma-2-9b": 9.242,
    "Phi-3-mini": 3.821,
    "DeepSeek-V2-Lite": 15.71,
    "DeepSeek-V3": 671.0,
    "Mixtral-8x7B": 46.70,
    "gpt-oss-20b": 20.91,
    "Llama-4-Scout": 107.8,
    "OLMo-2-7B": 7.299,
}
# Models with encoders, which the search for decoders does not take.
ENCODERS = ("t5-base", "vit-base-patch16-224", "clip-vit-base-patch32")
CLUSTER = """format: hetplan-cluster
version: 1
name: h100
nodes:
  - {count: 64, devices: 8, device: H100-SXM5-80GB, intra_node_gbit_per_s: 3600,
     network_gbit_per_s: 3200}
"""
NARROW = {
    "pipeline": "4,8,16", "tensor": "1,2,4,8", "micro_batch": "1", "whole_experts": "true,false",
    "expert": "1,8", "context": "1,2", "fsdp": "false", "uneven": "true",
    "interleaving": "false", "offload": "false", "recompute": "full",
    "recompute_method": "uniform", "recompute_layers": "1", "distributed_optimizer": "true",
}  # fmt: skip


def test_every_file_is_counted() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {*PARAMETERS, *ENCODERS}
    families = {json.loads(path.read_text())["model_type"] for path in FOLDER.glob("*.json")}
    assert len(families) >= 10


# One of each kind of block: dense, windows, latent attention with experts, shared experts. The
# others' parameters are counted in tests/profiling/test_models.py.
QUICK = ("Qwen3-8B", "gemma-2-9b", "DeepSeek-V3", "gpt-oss-20b")


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(n, marks=pytest.mark.wide) for n in PARAMETERS if n not in QUICK),
    ],
)
def test_a_published_configuration_is_searched_and_written(
    hetplan: Call, tmp_path: Path, name: str
) -> None:
    cluster, plan = tmp_path / "h100.yaml", tmp_path / "plan.json"
    cluster.write_text(CLUSTER)
    ran = hetplan(
        "plan", "search", "--model", FOLDER / f"{name}.json", "--cluster", cluster, "-b", 512,
        "--sequence", 4096, "--precision", "bf16", "--top", 1, "--write-plan", plan, "--json",
        *(word for key, values in NARROW.items() for word in ("-p", f"{key}={values}")),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["proven"] and ran.json["counts"]["priced"] > 1
    best = ran.json["best"]
    assert max(stage["peak_bytes"] for stage in best["stages"]) <= 80 * 2**30
    # 6 FLOPs per parameter and token at most (active ones in mixtures), at no more than the peak
    tokens = best["tokens_per_second"] / 512
    assert 6 * tokens * 1e9 * PARAMETERS[name] * 0.02 < 989e12
    written = Plan.load(plan)
    assert len(written.devices) == 512 and written.prediction is not None


@pytest.mark.parametrize("name", ["Qwen3-8B"])
def test_a_published_configuration_is_planned(hetplan: Call, tmp_path: Path, name: str) -> None:
    cluster, plan = tmp_path / "h100.yaml", tmp_path / "plan.json"
    cluster.write_text(CLUSTER.replace("64", "1"))
    ran = hetplan(
        "plan", "--model", FOLDER / f"{name}.json", "--cluster", cluster, "--global-batch", 16,
        "--sequence", 2048, "--precision", "bf16", "--strategies", "poplar", "-o", plan,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert Plan.load(plan).prediction is not None


@pytest.mark.parametrize("name", rest_wide(ENCODERS, 1))
def test_an_encoder_is_planned(hetplan: Call, tmp_path: Path, cluster: Path, name: str) -> None:
    plan = tmp_path / "plan.json"
    ran = hetplan(
        "plan", "--model", FOLDER / f"{name}.json", "--cluster", cluster, "--global-batch", 16,
        "--strategies", "amp,poplar", "--time-limit", 20, "-o", plan, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "assumed" not in ran.err  # the published file says all that is read
    assert ran.json["winner"] == 0 and ran.json["candidates"][0]["fits_memory"]
    assert Plan.load(plan).workload.layers[-1] == "head"


@pytest.mark.parametrize("kind", ["mamba", "whisper", "wav2vec2"])
@pytest.mark.parametrize("command", [("plan",), ("plan", "search"), ("profile", "predict")])
def test_types_without_a_chain_say_how(
    hetplan: Call, tmp_path: Path, kind: str, command: tuple[str, ...]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": kind, "hidden_size": 768, "d_model": 512}))
    of = ("--global-batch", 64) if command[0] == "plan" else ()
    ran = hetplan(*command, "--model", config, "--cluster", "p3-4", *of)
    assert ran.code == 2 and f"got '{kind}'" in ran.err and "--factory MODULE:FUNCTION" in ran.err
