"""Model chains: parameters against published counts, FLOPs and saved bytes against closed
formulas; and models from Hugging Face configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetplan.adapters.exports.megatron_model import model_settings
from hetplan.errors import InputError
from hetplan.profiling.models.adapters import Adapters
from hetplan.profiling.models.configuration_keys import KEYS
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import Matmul
from hetplan.profiling.models.transformer import transformer_layers
from hetplan.profiling.models.zoo import BUILT_IN, gpt2, text_model
from hetplan.replays.facts import model_facts
from present import present

PUBLISHED = {name: spec.published for name, spec in BUILT_IN.items() if spec.published is not None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_agree_with_the_published_count(name: str) -> None:
    published = PUBLISHED[name]
    exact = not published.source.startswith(("the name", "released"))
    tolerance = 0.0 if exact else 0.005
    assert load_model(name).params == pytest.approx(published.params, rel=tolerance, abs=0), (
        published.source
    )


def test_all_models_but_one_have_a_published_count() -> None:
    assert set(BUILT_IN) - set(PUBLISHED) == {"transgan-amp"}
    rounded = {name for name, p in PUBLISHED.items() if p.source.startswith("the name")}
    # named by size in the papers, never released
    assert rounded == {"glm-67b", "llama-0.5b", "bert-1.1b"}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_chains_are_well_formed(name: str) -> None:
    model = load_model(name)
    assert len({layer.name for layer in model.layers}) == len(model.layers)
    assert all(layer.output > 0 for layer in model.layers[:-1]) and model.layers[-1].output == 0
    assert all(layer.operators and layer.params >= 0 for layer in model.layers)
    assert all(
        0 <= layer.replicated_saved_bytes("fp16") <= layer.saved_bytes("fp16")
        for layer in model.layers
    )
    assert model.tensor_degree_fits(1) and BUILT_IN[name].source
    assert 0 < model.backward_flops() <= 2 * model.forward_flops()


@pytest.mark.parametrize(
    ("hidden", "heads", "sequence"), [(768, 12, 1024), (1024, 16, 512), (6144, 64, 1000)]
)
def test_block_follows_the_published_formulas(hidden: int, heads: int, sequence: int) -> None:
    spec = text_model("x", "x", sequence, gpt2(2, hidden, heads))
    block = load_model(spec, attention="standard").layers[1]
    s, h, a = sequence, hidden, heads
    # Narayanan et al. 2021, Appendix: 24 s h^2 + 4 s^2 h forward.
    assert block.forward_flops() == 24 * s * h * h + 4 * s * s * h
    assert block.backward_flops() == 2 * block.forward_flops()
    # Korthikanti et al. 2022, equations 1 and 2.
    assert block.saved_bytes("fp16") == s * h * 34 + 5 * a * s * s
    assert block.replicated_saved_bytes("fp16") == 10 * s * h
    # Shoeybi et al. 2019, Section 3: two all-reduces forward, two backward, of s h elements.
    assert block.tensor_bytes("fp16") == 4 * 2 * s * h and block.output == s * h
    assert block.params == 12 * h * h + 13 * h


def test_head_follows_the_published_formulas() -> None:
    head = load_model("gpt2-medium").layers[-1]
    s, h, v = 1024, 1024, 50257
    assert head.forward_flops() == 2 * s * h * v
    assert head.saved_bytes("fp16") == 4 * s * h + 4 * s * v  # Korthikanti et al. 2022, Section 4.3
    assert head.params == 2 * h and head.tied_params == v * h
    assert load_model("llama2-7b").layers[-1].tied_params == 0


def test_whole_model_flops_of_gpt3_formula() -> None:
    """Narayanan et al. 2021, equation 3 (without recomputation: 72 instead of 96), exact to
    rounding."""
    s, h, layers, v = 2048, 2304, 24, 51200
    model = load_model(text_model("x", "x", s, gpt2(layers, h, 24, vocabulary=v, positions=s)))
    expected = 72 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.forward_flops() + model.backward_flops() == pytest.approx(expected, rel=1e-12)


def test_grouped_queries_and_fused_attention_save_less() -> None:
    grouped, short, wide = (
        {t.name: t.elements for t in load_model(name, sequence=sequence).layers[1].saved}
        for name, sequence in (("llama3-8b", 8192), ("llama2-7b", 4096), ("llama2-7b", 8192))
    )
    assert wide["keys and values"] == 4 * grouped["keys and values"]
    # No s x s tensor is kept: what is saved grows linearly with the sequence.
    assert sum(wide.values()) == 2 * sum(short.values())


# He et al. 2016, Table 1; torchvision's model table for vit_b_16: multiply-adds.
@pytest.mark.parametrize(("name", "products"), [("vgg19", 19.6e9), ("vit-base", 17.56e9)])
def test_flops_match_the_published_products(name: str, products: float) -> None:
    assert load_model(name).forward_flops() / 2 == pytest.approx(products, rel=0.01)


def test_experts_cost_what_active_tokens_cost() -> None:
    model = load_model("bert-moe")
    dense, moe = model.layers[1], model.layers[2]
    assert (dense.kind, moe.kind) == ("block", "moe-block")
    router = 2 * 512 * 768 * 8
    up_and_down = 2 * 2 * 512 * 768 * 3072
    assert moe.forward_flops() - dense.forward_flops() == router + up_and_down  # top 2 instead of 1
    assert moe.params - dense.params == 768 * 8 + 7 * (2 * 768 * 3072 + 3072 + 768)


def test_transgan_has_two_kinds_of_blocks() -> None:
    blocks = [layer for layer in load_model("transgan-amp").layers if layer.kind == "block"]
    assert len(blocks) == 24
    assert {b.output for b in blocks[:12]} == {81 * 1024} and {b.output for b in blocks[12:]} == {
        288 * 288 * 16
    }
    # No norm parameters, no query-key-value biases, but biases everywhere else.
    assert blocks[0].params == 12 * 1024**2 + 6 * 1024 and blocks[-1].params == 12 * 16**2 + 6 * 16
    # windows, not all pairs
    assert blocks[-1].saved_bytes("fp16") < 2 * 288 * 288 * (16 * 17 + 4 * 256)


def test_megatron_splits_columns_then_rows() -> None:
    """Shoeybi et al. 2019, Section 3: no communication between the two products of each pair."""
    splits = {
        op.name: op.split for op in load_model("gpt2").layers[1].operators if isinstance(op, Matmul)
    }
    assert splits == {
        "qkv": "n",
        "scores": "count",
        "context": "count",
        "attention-output": "k",
        "up": "n",
        "down": "k",
    }


@pytest.mark.parametrize(
    ("name", "degrees"),
    [("gpt2", {1, 2, 4}), ("gpt2-xl", {1}), ("llama2-70b", {1, 2, 4, 8}), ("vgg19", {1})],
)
def test_tensor_degrees_divide_heads(name: str, degrees: set[int]) -> None:
    assert {tp for tp in (1, 2, 4, 8, 16) if load_model(name).tensor_degree_fits(tp)} == degrees


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2-mdium", {}, "unknown model 'gpt2-mdium'; did you mean gpt2-medium"),
        ("llama3", {}, "did you mean llama3-8b, llama3-70b"),
        ("g" * 300, {}, "unknown model 'gggg"),
        ("./" + "g" * 300, {}, "cannot be read: .*too long"),
        (
            "gpt2",
            {"sequence": 1025},
            r"longer than the learned positions \(got 1025, expected at most 1024\)",
        ),
        ("gpt2", {"sequence": 0}, r"gpt2: sequence length is not usable \(got 0"),
        ("llama2-7b", {"sequence": 10**9 + 1}, "sequence length is not usable"),
        (
            "vgg19",
            {"sequence": 128},
            r"vgg19: this model takes images and has no sequence length \(got 128",
        ),
        (
            "gpt2",
            {"precision": "fp8"},
            r"unknown precision 'fp8'.* \(expected one of fp16, bf16, fp32",
        ),
    ],
)
def test_errors(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(name, **options)  # type: ignore[arg-type]


# The files as they are published on the Hugging Face hub, less what is about dropout, tokens and
# generation.
GPT2_XL: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 1600,
    "n_head": 25,
    "n_layer": 48,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-05,
}


LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


LLAMA32 = LLAMA3 | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "mlp_bias": False, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip


LLAMA1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
}


MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip


MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None, "router_aux_loss_coef": 0.02,
}  # fmt: skip


def test_experts_compute_up_to_their_capacity() -> None:
    """A quarter more than at even load: products of the experts, and the bytes that travel; the
    same weights."""
    key = "moe_expert_capacity_factor"
    plain, padded = (
        load_model(from_config(MIXTRAL | more, name="m")) for more in ({}, {key: 1.25})
    )

    def products(model: Model) -> dict[str, float]:
        return {
            op.name: op.m * op.k * op.n * op.count
            for op in model.layers[1].operators
            if isinstance(op, Matmul)
        }

    grown = {"experts-up": 1.25, "experts-down": 1.25}
    for name, flops in products(plain).items():
        assert products(padded)[name] == flops * grown.get(name, 1), name
    sizes = [model_facts(model).dispatched_bytes for model in (plain, padded)]
    assert sizes[1] == 1.25 * sizes[0] and plain.params == padded.params
    assert padded.layers[1].saved_bytes("bf16") > plain.layers[1].saved_bytes("bf16")
    shape = present(padded.spec.shape)
    settings = model_settings(shape, 4096)
    assert settings[key] == 1.25 and settings["moe_pad_expert_input_to_capacity"] is True
    assert model_settings(present(plain.spec.shape), 4096)[key] is None
    with pytest.raises(InputError, match=key):
        from_config(MIXTRAL | {key: 0}, name="m")


OPT_125M: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "_remove_final_layer_norm": False,
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


OPT_350M = OPT_125M | {
    "hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16,
    "do_layer_norm_before": False, "word_embed_proj_dim": 512,
}  # fmt: skip


OPT_1_3B = OPT_125M | {
    "hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}  # fmt: skip


BERT: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "vocab_size": 30522,
}


# (file, parameters of its checkpoint, what it leaves to the defaults)
CHECKPOINTS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "gpt2-xl": (GPT2_XL, 1_557_611_200, {"n_inner": 6400, "tie_word_embeddings": True}),
    "llama-7b": (
        LLAMA1,
        6_738_415_616,
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 32,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "Meta-Llama-3-8B": (LLAMA3, 8_030_261_248, {"mlp_bias": False}),
    "Llama-3.2-1B": (LLAMA32, 1_235_814_400, {}),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096, {}),
    "Mixtral-8x7B-v0.1": (MIXTRAL, 46_702_792_704, {}),
    "opt-125m": (OPT_125M, 125_239_296, {"enable_bias": True, "tie_word_embeddings": True}),
    "opt-350m": (OPT_350M, 331_196_416, {"enable_bias": True, "tie_word_embeddings": True}),
    "opt-1.3b": (OPT_1_3B, 1_315_758_080, {"enable_bias": True, "tie_word_embeddings": True}),
    "bert-base-uncased": (BERT, 110_106_428, {"tie_word_embeddings": True}),
}


CALCULON: dict[str, Any] = {  # GPT-3 175B
    "model_type": "calculon",
    "vocab_size": 51200,
    "hidden": 12288,
    "feedforward": 49152,
    "seq_size": 2048,
    "attn_heads": 96,
    "attn_size": 128,
    "num_blocks": 96,
}


FILES = {config["model_type"]: config for config, _, _ in CHECKPOINTS.values()} | {
    "calculon": CALCULON
}


LLAMA_SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
}
ESSENTIAL = {
    "gpt2": {"vocab_size", "n_embd", "n_layer", "n_head"},
    "llama": LLAMA_SIZES,
    "mistral": LLAMA_SIZES,
    "mixtral": LLAMA_SIZES | {"num_local_experts", "num_experts_per_tok"},
    "opt": {"vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"},
    "bert": LLAMA_SIZES,
    "calculon": CALCULON.keys() - {"model_type"},
}


def test_calculons_blocks_are_gpts() -> None:
    h = 12288
    expected = 96 * (12 * h * h + 13 * h) + (51200 + 2048 + 2) * h
    assert load_model(from_config(CALCULON, name="x")).params == expected


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_published_file_has_its_parameters_and_what_it_leaves_out_is_told(name: str) -> None:
    config, count, assumed = CHECKPOINTS[name]
    model = load_model(from_config(config, name="x", where="c"))
    assert model.params == count
    parts = ", ".join(f"{key} = {json.dumps(value)}" for key, value in assumed.items())
    assert model.notes == ((f"c: assumed, as transformers does: {parts}",) if parts else ())


@pytest.mark.parametrize(
    ("kind", "width"), [("qwen3", 128), ("gpt_oss", 64), ("gemma2", 256), ("qwen2", None)]
)
def test_the_width_of_a_head_is_told_where_the_class_has_its_own(
    kind: str, width: int | None
) -> None:
    """Where it does not, heads are 768 / 8 wide."""
    config = configured(kind, (1000, 768, 64, 2, 8, 8))
    if kind == "gpt_oss":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = from_config(config, name="x")
    assert present(model.shape).head_dim == (width or 96)
    assert ("head_dim" in "".join(model.notes)) == (width is not None)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (MISTRAL, "sliding_window", "4096"),
        (MIXTRAL, "sliding_window", "null"),
        (MISTRAL, "num_key_value_heads", "8"),
        (LLAMA3, "num_key_value_heads", "32"),
        (LLAMA3, "max_position_embeddings", "2048"),
        (GPT2_XL, "n_positions", "1024"),
        (OPT_350M, "word_embed_proj_dim", "1024"),
    ],
)
def test_defaults_are_those_of_the_family(config: dict[str, Any], key: str, value: str) -> None:
    rest = {other: given for other, given in config.items() if other != key}
    assert f"{key} = {value}" in from_config(rest, name="x").notes[0]


@pytest.mark.parametrize("kind", FILES)
def test_every_dimension_is_required_and_nothing_else(kind: str) -> None:
    config = FILES[kind]
    for key in config.keys() - {"model_type"}:
        rest = {other: value for other, value in config.items() if other != key}
        if key in ESSENTIAL[kind]:
            with pytest.raises(
                InputError, match=rf"^c\.json: {key}: key is missing \(expected the .* {kind} model"
            ):
                from_config(rest, name="x", where="c.json")
        else:
            notes = from_config(rest, name="x").notes
            assert notes or key == "head_dim" or key not in KEYS[kind]


def test_default_sequence_is_the_context_capped() -> None:
    assert load_model(from_config(GPT2_XL, name="x")).sequence == 1024
    assert load_model(from_config(LLAMA32, name="x")).sequence == 4096
    images, text = load_model("vgg19"), load_model("gpt2", sequence=256)
    assert (images.sequence, images.tokens_per_sample, text.tokens_per_sample) == (None, 1, 256)


def test_sliding_window_bounds_attention() -> None:
    windowed, full = (
        from_config({**MISTRAL, "sliding_window": window}, name="x") for window in (4096, None)
    )
    assert load_model(windowed, sequence=4096).layers == load_model(full, sequence=4096).layers
    flops = [load_model(spec, sequence=8192).forward_flops() for spec in (windowed, full)]
    assert flops[0] < flops[1]


def test_files_and_folders_of_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        load_model(str(tmp_path / "nowhere.json"))
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        load_model(tmp_path)
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    for path in (folder / "config.json", tmp_path / "small.json"):
        path.write_text(json.dumps(GPT2_XL))
    assert load_model(folder).name == load_model(str(folder / "config.json")).name == "my-gpt"
    assert load_model(str(tmp_path / "small.json")).name == "small"


# Configurations as published on the Hugging Face hub (shortened to what is read), with the exact
# count of the checkpoint's parameters; of llama4 of the text model alone.
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
SCOUT = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
}  # fmt: skip


def configured(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """sizes: vocabulary, hidden, feed-forward, layers, heads, key-value heads."""
    keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads",
    )  # fmt: skip
    return {"model_type": kind, **dict(zip(keys, sizes, strict=False)), **more}


CONFIGURATIONS = {
    "Qwen2-7B": (7_615_616_512, configured("qwen2", (152064, 3584, 18944, 28, 28, 4))),
    "Qwen2.5-0.5B": (
        494_032_768,
        configured("qwen2", (151936, 896, 4864, 24, 14, 2), tie_word_embeddings=True),
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        configured(
            "qwen2_moe", (151936, 2048, 5632, 24, 16, 16), num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        ),
    ),
    "Qwen3-8B": (
        8_190_735_360,
        configured("qwen3", (151936, 4096, 12288, 36, 32, 8), head_dim=128),
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        configured("qwen3_moe", (151936, 2048, 6144, 48, 32, 4), head_dim=128, **MOE),
    ),
    "gemma-2-9b": (
        9_241_705_984, configured("gemma2", (256000, 3584, 14336, 42, 16, 8), head_dim=256),
    ),
    "gemma-3-1b": (
        999_885_952, configured("gemma3_text", (262144, 1152, 6912, 26, 4, 1), sliding_window=512),
    ),
    "Phi-3-mini": (3_821_079_552, configured("phi3", (32064, 3072, 8192, 32, 32, 32))),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        configured(
            "deepseek_v2", (102400, 2048, 10944, 27, 16, 16), n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
            first_k_dense_replace=1, q_lora_rank=None, **LATENT,
        ),
    ),
    "DeepSeek-V3": (
        671_026_419_200,
        configured(
            "deepseek_v3", (129280, 7168, 18432, 61, 128, 128), n_routed_experts=256,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
            first_k_dense_replace=3, q_lora_rank=1536, **LATENT,
        ),
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        configured(
            "gpt_oss", (201088, 2880, 2880, 24, 64, 8), head_dim=64, num_local_experts=32,
            num_experts_per_tok=4,
        ),
    ),
    "Llama-4-Scout": (107_769_861_120, {"model_type": "llama4", "text_config": SCOUT}),
    "OLMo-7B": (6_888_095_744, configured("olmo", (50304, 4096, 11008, 32, 32))),
    "OLMo-2-7B": (7_298_617_344, configured("olmo2", (100352, 4096, 11008, 32, 32))),
    "starcoder2-3b": (3_030_371_328, configured("starcoder2", (49152, 3072, 12288, 30, 24, 2))),
    "falcon-7b": (
        6_921_720_704,
        {
            "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544,
            "num_hidden_layers": 32, "num_attention_heads": 71,
        },
    ),
    "falcon-40b": (
        41_303_293_952,
        {
            "model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192,
            "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        configured(
            "mixtral", (32000, 4096, 14336, 32, 32, 8), num_local_experts=8, num_experts_per_tok=2
        ),
    ),
}  # fmt: skip
HYBRID = {
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "head_dim": 128,
}  # fmt: skip
# The counts of their technical reports, to three or four digits.
HYBRIDS = {
    "Nemotron-3-Nano": (
        31.6e9,
        configured(
            "nemotron_h", (131072, 2688, 1856, 52, 32, 2), mamba_num_heads=64, **HYBRID,
            n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            hybrid_override_pattern="MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME",
        ),
    ),
    "Nemotron-3-Super": (
        120.6e9,
        configured(
            "nemotron_h", (131072, 4096, 2688, 88, 32, 2), mamba_num_heads=128, **HYBRID,
            n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
            moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
            hybrid_override_pattern=40 * "ME" + 8 * "*",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_of_state_space_layers(name: str) -> None:
    params, config = HYBRIDS[name]
    spec = from_config(config, name=name)
    _, layers = spec.chain(2048)
    assert sum(layer.params for layer in layers) == pytest.approx(params, rel=0.002)
    _, longer = spec.chain(4096)
    work = {layer.name: layer.forward_flops() for layer in layers}
    for layer in longer[1:-1]:  # attention alone grows faster than the samples do
        names = {operator.name for operator in layer.operators}
        grown = layer.forward_flops() / work[layer.name]
        assert grown > 2.01 if "context" in names else grown == pytest.approx(2)
        assert len(layer.reduces) == 2 and ("experts-up" in names) == (layer.kind == "moe-block")
    assert spec.fits(2) and not spec.fits(4)  # two heads of keys and values


def test_adapters_leave_no_gradients_of_weights() -> None:
    """LoRA: backward computes one product for each of the forward's; rank x (inputs + outputs) are
    trained."""
    shape = load_model("llama2-7b", sequence=512).spec.shape
    assert shape is not None
    plain = transformer_layers(shape, 512)
    adapted = transformer_layers(replace(shape, adapters=Adapters(16, "qkv,o,gate_up,down")), 512)
    for before, after in zip(plain, adapted, strict=True):
        assert after.frozen == before.params
        names = {tensor.name for tensor in after.saved}
        frozen_ends = {"embedding": set(), "block": {"qkv input", "down input"}, "head": {"logits"}}
        assert frozen_ends[before.kind] <= names
    own = [layer.params - layer.frozen for layer in adapted]
    h, f = 4096, 11008
    assert own == [0, *[16 * (h + 3 * h + h + h + h + 2 * f + f + h)] * 32, 0]
    core = sum(
        2.0 * op.count * op.m * op.k * op.n
        for op in plain[1].operators
        if isinstance(op, Matmul) and not op.weight
    )
    products = plain[1].forward_flops() - core
    beside = adapted[1].forward_flops() - plain[1].forward_flops()
    assert adapted[1].backward_flops() == pytest.approx(products + 2 * core + 2 * beside)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parameters_of_published_configurations(name: str) -> None:
    params, config = CONFIGURATIONS[name]
    _, layers = from_config(config, name=name).chain(2048)
    assert sum(layer.params for layer in layers) == pytest.approx(params, rel=1e-5)


def test_work_per_token_is_of_the_active_parameters() -> None:
    """Short samples, where attention costs little: 2 FLOPs per active parameter and token; 37 of
    DeepSeek-V3's 671 billion, 3.3 of Qwen3-30B-A3B's (their model cards), embedding left out."""
    for name, active, vocabulary in (
        ("DeepSeek-V3", 37.0e9, 129280 * 7168),
        ("Qwen3-30B-A3B", 3.3e9, 151936 * 2048),
    ):
        _, layers = from_config(CONFIGURATIONS[name][1], name=name).chain(128)
        flops = sum(layer.forward_flops() for layer in layers)
        assert flops / 128 / 2 == pytest.approx(active - vocabulary, rel=0.05)


def test_windows_reach_back_but_in_full_blocks() -> None:
    config = CONFIGURATIONS["gemma-3-1b"][1]
    _, layers = from_config(config, name="gemma").chain(4096)
    flops = [layer.forward_flops() for layer in layers[1:-1]]
    assert len(set(flops)) == 2 and flops[5] == flops[11] == max(flops) > flops[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"^config: vocab_size: key is missing \(expected the number of tokens in the "
            r"vocabulary, without which the size of this gpt2 model is not known; n_embd, n_layer, "
            r"n_head missing too\)$",
        ),
        ([1], "not an object"),
        ({}, "model_type: required key is missing"),
        (
            {"model_type": "mamba"},
            r"not supported: it has Mamba-1 \(got 'mamba', expected a decoder of attention, .*; "
            r"any torch module goes by `hetplan profile predict --factory",
        ),
        ({"model_type": ["gpt2"]}, r"model_type: not usable \(got a list of 1, expected a text"),
        ({**GPT2_XL, "n_layer": "12"}, r"n_layer: not usable \(got '12', expected a whole number"),
        (
            {**GPT2_XL, "n_layer": None},
            r"n_layer: not usable \(got nothing, expected a whole number",
        ),
        ({**GPT2_XL, "n_layer": 0}, "n_layer: not usable"),
        ({**GPT2_XL, "n_layer": 10**6}, "n_layer: not usable"),
        (
            {**GPT2_XL, "n_head": 7},
            r"not a multiple of the number of heads \(got 1600, expected a multiple of 7",
        ),
        (
            {**LLAMA3, "num_key_value_heads": 5},
            r"num_key_value_heads \(got 32, expected a multiple of 5",
        ),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is too large"),
        ({**HYBRIDS["Nemotron-3-Nano"][1], "num_hidden_layers": 51}, r"got 52, expected 51"),
        (
            {**HYBRIDS["Nemotron-3-Nano"][1], "hybrid_override_pattern": "MXM"},
            r"hybrid_override_pattern: kind of block is not known \(got 'X', expected of M, \*, -",
        ),
    ],
)
def test_errors_of_configurations(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_config(config, name="x")
