"""The model in Megatron's arguments: every field that changes what it computes, against
transformers' own configurations, and models that no arguments describe, refused by name."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from export.by_hand import plan_of
from export.megatron_table import parsed
from export.models import GPT_OSS, MODELS, REFUSED, WHOLE_HEADS
from hetplan.adapters.exports import export
from hetplan.adapters.exports.megatron_model import inexpressible
from hetplan.cli.main import main
from hetplan.errors import InputError, UnsupportedError
from hetplan.plans.plan import Plan
from hetplan.profiling.models.adapters import Adapters
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import BUILT_IN
from present import present

PLAN = plan_of([[(0, 6)]], blocks=4)


def written(config: dict[str, Any], folder: Path, to: str = "megatron", plan: Plan = PLAN) -> str:
    """The export of a plan for the model of a configuration."""
    file = folder / "m.json"
    file.write_text(json.dumps(config))
    return export(plan, to, str(file))


def flags_of(script: str) -> dict[str, Any]:
    """The flags of a script, as Megatron's parser reads them."""
    (block,) = re.findall(r"^FLAGS=\(\n(.*?)^\)", script, re.M | re.S)
    return parsed(shlex.split(block))


def test_a_llama_keeps_base_scaling_and_epsilon(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 50000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }  # fmt: skip
    script = written(config, tmp_path, plan=plan_of([[(0, 6)]], blocks=4, tensor=2))
    flags = flags_of(script)
    said = ("rotary_base", "use_rope_scaling", "rope_scaling_factor", "norm_epsilon")
    assert [flags[name] for name in said] == [1000000, True, 8.0, 1e-6]
    assert flags["make_vocab_size_divisible_by"] * 2 * 3125 == 50000
    assert "original 8192, low_freq_factor 1, high_freq_factor 4, as in Llama 3.1" in script


# Of each model, what differs from a Llama of the same sizes with Megatron's defaults.
EXPECTED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "position_embedding_type": "learned_absolute", "max_position_embeddings": 512,
        "normalization": "LayerNorm", "norm_epsilon": 1e-5, "disable_bias_linear": False,
        "swiglu": False, "attention_dropout": 0.1, "hidden_dropout": 0.1,
        "untie_embeddings_and_output_weights": False, "make_vocab_size_divisible_by": 1,
    },
    "llama": {
        "norm_epsilon": 1e-5, "rotary_base": 500000, "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
    },
    "llama of transformers 5": {
        "rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 32.0,
    },
    "llama, stretched": {"rotary_seq_len_interpolation_factor": 4},
    "mistral": {"window_size": (127, 0)},
    "mixtral": {
        "norm_epsilon": 1e-5, "rotary_base": 1000000, "num_experts": 8, "moe_router_topk": 2,
    },
    "qwen2": {"rotary_base": 1000000, "add_qkv_bias": True},
    "qwen2, last blocks in windows": {
        "add_qkv_bias": True, "window_size": (127, 0), "window_attn_skip_freq": [0, 0, 1, 1],
    },
    "qwen2_moe": {
        "add_qkv_bias": True, "num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 32,
        "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_gate": True,
    },
    "qwen3": {"rotary_base": 1000000, "qk_layernorm": True},
    "qwen3_moe": {
        "rotary_base": 1000000, "qk_layernorm": True, "num_experts": 8, "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
    },
    "qwen3_moe, a dense block": {
        "qk_layernorm": True, "num_experts": 8, "moe_layer_freq": [1, 0, 1, 1],
    },
    "phi3": {"norm_epsilon": 1e-5, "rotary_percent": 0.5},
    "deepseek_v2": {
        "qk_layernorm": True, "multi_latent_attention": True, "rope_type": "yarn",
        "rotary_scaling_factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707, "num_experts": 8,
        "moe_router_topk": 2, "moe_router_pre_softmax": True, "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 64, "q_lora_rank": None, "moe_router_dtype": "fp32",
    },
    "deepseek_v3": {
        "qk_layernorm": True, "multi_latent_attention": True, "rope_type": "yarn",
        "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "num_experts": 16,
        "moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True, "moe_layer_freq": [0, 1, 1, 1], "q_lora_rank": 32,
    },
    "deepseek_v3, unscaled": {
        "qk_layernorm": True, "rope_type": "rope", "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0, "moe_router_num_groups": None,
        "moe_router_topk_scaling_factor": None, "moe_router_score_function": "sigmoid",
    },
    "starcoder2": {
        "normalization": "LayerNorm", "norm_epsilon": 1e-5, "disable_bias_linear": False,
        "swiglu": False, "rotary_base": 100000, "window_size": (127, 0), "attention_dropout": 0.1,
        "hidden_dropout": 0.1, "untie_embeddings_and_output_weights": False,
        "init_method_std": 0.018042,
    },
    "smollm3": {
        "rotary_base": 2000000, "no_rope_freq": [0, 0, 0, 1],
        "untie_embeddings_and_output_weights": False,
    },
    "arcee": {"norm_epsilon": 1e-5, "swiglu": False, "squared_relu": True},
    "ernie4_5": {
        "norm_epsilon": 1e-5, "rotary_base": 500000, "rotary_interleaved": True,
        "untie_embeddings_and_output_weights": False,
    },
    "seed_oss": {"add_qkv_bias": True, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "glm": {
        "norm_epsilon": 1.5625e-07, "rotary_percent": 0.5, "rotary_interleaved": True,
        "add_qkv_bias": True,
    },
    "stablelm": {
        "normalization": "LayerNorm", "norm_epsilon": 1e-5, "rotary_percent": 0.25,
    },
    "granite": {},
    "glm4_moe": {
        "norm_epsilon": 1e-5, "rotary_percent": 0.5, "add_qkv_bias": True,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 32, "moe_layer_freq": [0, 1, 1, 1],
    },
}  # fmt: skip
PLAIN = {
    "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0,
    "use_rope_scaling": False, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "swiglu": True,
    "qk_layernorm": False, "disable_bias_linear": True, "add_qkv_bias": False, "window_size": None,
    "window_attn_skip_freq": None, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "untie_embeddings_and_output_weights": True, "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax", "moe_shared_expert_gate": False,
    "init_method_std": 0.02, "rotary_seq_len_interpolation_factor": None,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_the_model_is_said(name: str, tmp_path: Path) -> None:
    flags = flags_of(written(MODELS[name], tmp_path))
    expected = PLAIN | EXPECTED[name]
    if expected["position_embedding_type"] != "rope":
        del expected["rotary_base"], expected["rotary_percent"]
    assert {key: flags[key] for key in expected} == expected


def test_features_that_the_arguments_do_not_have_are_refused_unseen() -> None:
    """A field that shapes get later on is no reason to write another model."""

    @dataclass(frozen=True)
    class Wider(Transformer):
        of_tomorrow: int = 1

    llama = present(BUILT_IN["llama2-7b"].shape)
    values = {field.name: getattr(llama, field.name) for field in fields(llama)}
    assert inexpressible(Wider(**values)) == []
    assert inexpressible(Wider(**values, of_tomorrow=2)) == ["of_tomorrow 2"]
    (words,) = inexpressible(replace(llama, adapters=Adapters(8)))
    assert words.startswith("adapters ")


@pytest.mark.parametrize("to", ["megatron", "bridge"])
@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name: str, to: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    if (name, to) == ("gpt_oss", "bridge"):
        pytest.skip("Megatron Bridge has a recipe with fields of YaRN")
    with pytest.raises(UnsupportedError, match=re.escape(words)) as caught:
        written(config, tmp_path, to)
    assert "--without-model" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_arguments_of_the_plan_come_without_the_model(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(REFUSED["gemma2"][0]))
    (tmp_path / "plan.json").write_text(PLAN.model_dump_json())
    command = ["export", "plan.json", "--to", "megatron", "--model", "m.json", "-o", "run.sh"]
    words = [str(tmp_path / word) if "." in word else word for word in command]
    assert main(words) == 2
    assert main([*words, "--without-model"]) == 0
    script = (tmp_path / "run.sh").read_text()
    assert "--num-layers 4" in script and "--hidden-size" not in script
    assert "the flags of model, data and optimizer" in script


def test_models_of_types_that_exports_do_not_know_are_left_to_the_user(tmp_path: Path) -> None:
    config = {"model_type": "gpt_neox", **WHOLE_HEADS}
    script = written(config, tmp_path)
    assert "of its type hetplan knows the sizes, not what it computes beyond them" in script
    assert "the flags of model, data and optimizer" in script and "--hidden-size" not in script


def test_a_model_that_is_left_out_is_told_beside_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(PLAN.model_dump_json())
    (tmp_path / "m.json").write_text(json.dumps({"model_type": "gpt_neox", **WHOLE_HEADS}))
    command = ["export", str(tmp_path / "plan.json"), "--model", str(tmp_path / "m.json"), "--to"]
    for to in ("megatron", "bridge", "torchtitan"):
        assert main([*command, to]) == 0
        assert "plan.json: The arguments of the model are left to you" in capsys.readouterr().err
    assert main([*command, "deepspeed"]) == 0, "DeepSpeed does not build the model"
    assert main([*command, "megatron", "--without-model"]) == 0
    assert "left to you" not in capsys.readouterr().err


def test_another_model_than_the_plans_is_told(tmp_path: Path) -> None:
    config = {**MODELS["llama"], "num_hidden_layers": 6}
    with pytest.raises(InputError, match=r"another number of blocks .*\(got 6, expected 4\)"):
        written(config, tmp_path)


def with_degrees(zero: int = 1, **degrees: Any) -> Plan:
    """The plan on two tensor ranks and two replicas with further degrees."""
    document = plan_of([[(0, 6)]], blocks=4, tensor=2, data=2, zero=zero).model_dump(mode="json")
    return Plan.model_validate(document | {"degrees": degrees})


def test_flagscale_is_told_nothing_that_its_megatron_lacks(tmp_path: Path) -> None:
    plan = with_degrees(sequence_parallel=True)
    with pytest.raises(UnsupportedError, match="moe_shared_expert_gate"):
        written(MODELS["qwen2_moe"], tmp_path, "flagscale", plan)
    document = yaml.safe_load(written(MODELS["qwen3_moe"], tmp_path, "flagscale", plan))
    assert document["model"]["rotary_base"] == 1000000 and "softmax_type" not in document["model"]
    dense = yaml.safe_load(written(MODELS["deepseek_v3"], tmp_path, "flagscale", plan))
    assert (
        dense["model"]["moe_layer_freq"] == "[0,1,1,1]"
    )  # one word, which Megatron's parser reads


def test_a_small_share_of_offloaded_states_is_said() -> None:
    """Without a fraction Megatron offloads all; it offloads only beside its precise optimizer."""
    script = export(with_degrees(offloaded=3e-05), "megatron")
    assert "--optimizer-offload-fraction 3e-05\n" in script
    assert "--use-precision-aware-optimizer\n" in script


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (with_degrees(overlap=["weights"]), "overlap of weights without overlap of gradients"),
        (with_degrees(0, overlap=["weights", "gradients"]), "overlap of weights without ZeRO"),
        (with_degrees(overlap=["tensor"]), "overlap of tensor ranks without sequence parallelism"),
        (with_degrees(0, offloaded=0.5), "optimizer states on the host without ZeRO"),
    ],
)
@pytest.mark.parametrize("to", ["megatron", "bridge", "flagscale"])
def test_options_that_need_others_are_refused_alone(plan: Plan, words: str, to: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        export(plan, to)
    together = with_degrees(overlap=["weights", "gradients", "tensor"], sequence_parallel=True)
    assert "overlap" in export(together, to)


def test_connections_are_limited_beside_tensor_ranks() -> None:
    """Megatron-LM refuses to start without the variable; its FSDP refuses to start with it."""
    line = 'export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"'
    assert line in export(with_degrees(), "megatron")
    assert line not in export(with_degrees(3), "megatron")
    assert line not in export(PLAN, "megatron")


def test_bridge_replaces_what_its_recipe_has(tmp_path: Path) -> None:
    """An override that is left out keeps the recipe's value, so that all are written."""
    model = yaml.safe_load(written(MODELS["qwen3_moe"], tmp_path, "bridge"))["model"]
    absent = {"window_size", "rotary_base", "moe_router_pre_softmax", "attention_dropout"} - {
        *model
    }
    assert not absent
    assert model["window_size"] is None and model["moe_router_pre_softmax"] is False
    assert model["layernorm_epsilon"] == 1e-6 and model["moe_layer_freq"] == 1
    windows = yaml.safe_load(written(MODELS["mistral"], tmp_path, "bridge"))["model"]
    assert windows["window_size"] == [127, 0] and windows["num_moe_experts"] is None


def test_bridge_has_yarn_sinks_and_clamps_of_gpt_oss(tmp_path: Path) -> None:
    text = written(GPT_OSS, tmp_path, "bridge")
    model = yaml.safe_load(text)["model"]
    expected = {
        "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 32.0,
        "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": False, "rotary_base": 150000,
        "softmax_type": "learnable", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
        "window_size": [127, 0], "window_attn_skip_freq": [1, 0, 1, 0], "add_bias_linear": True,
    }  # fmt: skip
    assert {key: model[key] for key in expected} == expected
    assert "activation quick_gelu" in text


@pytest.mark.parametrize(
    ("change", "tensor", "words"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, 8, "4 attention heads on 8 ranks"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16},
            2,
            "3 key and value heads on 2 ranks",
        ),
        (
            {"num_key_value_heads": 4, "intermediate_size": 130},
            4,
            "130 inner width of feed-forward networks on 4 ranks",
        ),
    ],
)
@pytest.mark.parametrize("to", ["megatron", "bridge", "flagscale", "torchtitan"])
def test_heads_are_held_against_tensor_degrees(
    change: dict[str, Any], tensor: int, words: str, to: str, tmp_path: Path
) -> None:
    plan = plan_of([[(0, 6)]], blocks=4, tensor=tensor, data=2, zero=3 if to == "torchtitan" else 0)
    with pytest.raises(UnsupportedError, match=words):
        written({"model_type": "llama", **MODELS["qwen3"], **change}, tmp_path, to, plan)


def test_few_key_heads_are_shared_as_megatron_shares_them(tmp_path: Path) -> None:
    plan = plan_of([[(0, 6)]], blocks=4, tensor=4)
    flags = flags_of(written(MODELS["qwen3"], tmp_path, plan=plan))  # 2 key heads on 4 ranks
    assert flags["num_query_groups"] == 2


# Of Megatron's fields, transformers' attribute (Megatron Bridge 0.3.1, models/conversion/
# model_bridge.py, CONFIG_MAPPING). transformers fills the attributes that a file leaves out.
MAPPING = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size",
    "moe_router_topk": "num_experts_per_tok", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim",
    "init_method_std": "initializer_range",
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("name", MODELS)
def test_flags_are_what_transformers_makes_of_the_file(name: str, tmp_path: Path) -> None:
    """transformers' own classes, with their defaults, say what the flags say."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.AutoConfig.for_model(**MODELS[name])
    flags = flags_of(written(MODELS[name], tmp_path))
    for field, attribute in MAPPING.items():
        latent = field in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim")
        applies = flags["multi_latent_attention"] if latent else True
        if hasattr(config, attribute) and applies:
            assert flags[field] == getattr(config, attribute), field
    epsilons = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    assert flags["norm_epsilon"] in [getattr(config, key, None) for key in epsilons]
    assert flags["untie_embeddings_and_output_weights"] is not config.tie_word_embeddings
    rope: Any = getattr(config, "rope_parameters", None)
    if flags["position_embedding_type"] == "rope":
        assert flags["rotary_base"] == rope["rope_theta"]
        assert flags["rotary_percent"] == rope.get("partial_rotary_factor", 1.0)
        assert flags["use_rope_scaling"] == (rope["rope_type"] == "llama3")
    dropout = getattr(config, "attention_dropout", getattr(config, "attn_pdrop", 0.0))
    assert flags["attention_dropout"] == dropout


@pytest.mark.wide
@pytest.mark.parametrize("name", [*MODELS, "gpt_oss"])
def test_megatron_computes_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Both models with the same random weights give the same logits."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("megatron.core", reason="needs megatron-core (pip install megatron-core)")
    import torch

    from export.megatron_forward import built, logits, one_process, renamed

    torch.manual_seed(0)
    extra: dict[str, Any] = {}
    if name == "gpt_oss":
        settings = yaml.safe_load(written(GPT_OSS, tmp_path, "bridge"))["model"]
        extra = {key: value for key, value in settings.items() if key.startswith(("yarn", "posi"))}
        plain = {**GPT_OSS, "rope_scaling": {"rope_type": "default"}}
        flags = flags_of(written(plain, tmp_path))
        config = transformers.AutoConfig.for_model(**GPT_OSS)
    else:
        flags = flags_of(written(MODELS[name], tmp_path))
        config = transformers.AutoConfig.for_model(**MODELS[name])
    config._attn_implementation = "eager"
    config.pad_token_id = None
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in theirs.state_dict().values():
        if weight.is_floating_point():
            weight.copy_(torch.randn_like(weight) * 0.1 + (1 if weight.dim() == 1 else 0))
    tokens = torch.randint(0, 256, (2, 160))
    with torch.no_grad():
        expected = theirs(tokens).logits
    with one_process(tmp_path):
        ours = built(flags, extra)
        state = ours.state_dict()
        weights = renamed(theirs.state_dict(), config, flags)
        missing = [key for key in state if key not in weights and "_extra_state" not in key]
        assert not [key for key in missing if "inv_freq" not in key], missing
        ours.load_state_dict(weights, strict=False)
        got = logits(ours, tokens)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
