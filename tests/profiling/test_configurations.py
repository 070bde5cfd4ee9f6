"""Configurations of others: names and defaults of their classes, what nobody reads, text parts of
models with encoders, and decoders of types that are not listed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.small_models import SMALL_MODELS
from hetplan.adapters.exports.megatron_model import inexpressible
from hetplan.errors import InputError, UnsupportedError
from hetplan.plans.refusals import check_shape
from hetplan.profiling.inputs.parts import ModelRecord
from hetplan.profiling.models.configurations import KNOWN, from_config
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import Matmul
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.programs.networks import program_of
from present import present

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 1024,
    "moe_intermediate_size": 128, "num_experts_per_tok": 4, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    "mamba_num_heads": 32, "mamba_head_dim": 64,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip


def params(spec: ModelSpec) -> int:
    """All parameters of a model."""
    _, layers = spec.chain(16 if spec.sequence else None)
    return sum(layer.params for layer in layers)


def test_counts_are_those_of_the_modules_of_transformers() -> None:
    """One small model of each listed type, written and counted by transformers 5.23."""
    models = json.loads(SMALL_MODELS.read_text(encoding="utf-8"))
    kinds = {model["config"]["model_type"] for model in models}
    not_in_transformers = {"baichuan", "calculon", "exaone", "orion", "phi-msft", "qwen"}
    assert kinds == set(KNOWN) - not_in_transformers
    counts = {
        model["config"]["model_type"]: params(from_config(model["config"], name="x"))
        for model in models
    }
    assert counts == {model["config"]["model_type"]: model["params"] for model in models}


def test_experts_have_the_names_of_both_versions() -> None:
    old, new = (
        from_config(QWEN3_MOE | {key: 16}, name="x") for key in ("num_experts", "num_local_experts")
    )
    assert present(old.shape) == present(new.shape)
    assert present(old.shape).experts is not None and old.notes == new.notes
    with pytest.raises(InputError, match=r"num_experts: not usable \(got '16'"):
        from_config(QWEN3_MOE | {"num_local_experts": "16"}, name="x")


def test_blocks_of_hybrids_have_the_names_of_both_versions() -> None:
    pattern = "M-M*"
    words = ["mamba", "mlp", "linear_attention", "full_attention"]
    old = from_config(NEMOTRON | {"hybrid_override_pattern": pattern}, name="x")
    new = from_config(NEMOTRON | {"layers_block_type": words}, name="x")
    assert present(old.shape) == present(new.shape) and present(old.shape).layers == 4
    with pytest.raises(InputError, match=r"kind of block is not known \(got 'conv'"):
        from_config(NEMOTRON | {"layers_block_type": ["conv"]}, name="x")


@pytest.mark.parametrize(
    ("addition", "text"),
    [
        ("time_step_limit", "[0.0, Infinity]"),
        ("quantization_config", '{"scale": NaN, "limits": [-Infinity, 1e999]}'),
        ("pad_token_id", '0, "pad_token_id": 1'),
        ("seed", "9" * 5000),
        ("nested", "[" * 100 + "]" * 100),
    ],
    ids=["infinity", "nan", "twice", "digits", "depth"],
)
def test_keys_that_nobody_reads_are_not_judged(addition: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    whole = json.dumps(LLAMA)
    path.write_text(f'{whole[:-1]}, "{addition}": {text}}}', encoding="utf-8")
    assert present(load_model(path).spec.shape) == present(from_config(LLAMA, name="x").shape)


def test_keys_that_are_read_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"hidden_size": float("inf")}), encoding="utf-8")
    with pytest.raises(InputError, match=r"hidden_size: not usable \(got inf"):
        load_model(path)
    path.write_text("[" * 1000 + "]" * 1000, encoding="utf-8")
    with pytest.raises(InputError, match="line 1: nested too deeply"):
        load_model(path)


# Gemma 3's own files: hidden size, feed-forward width, blocks and what else they give, and the
# parameters of the text models.
GEMMA_3 = {
    "4b": (3_880_263_168, (2560, 10240, 34), {}),
    "12b": (
        11_766_034_176, (3840, 15360, 48), {"num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    "27b": (
        27_009_346_304, (5376, 21504, 62),
        {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", GEMMA_3)
def test_text_parts_lean_on_their_classes(size: str) -> None:
    count, (hidden, feed_forward, layers), more = GEMMA_3[size]
    text = {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": feed_forward,
        "num_hidden_layers": layers, "sliding_window": 1024, **more,
    }  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    spec = from_config(whole, name="x", where="c")
    assert params(spec) == count
    left_out, assumed = spec.notes
    assert left_out == "c: the text model alone; left out: vision_config"
    assert assumed.startswith("c: text_config: assumed, as transformers does: vocab_size = 262208")


@pytest.mark.parametrize(
    ("config", "count"),
    [
        # LLaVA 1.5's own file: a Llama 2 with all defaults of the class but the vocabulary
        (
            {
                "model_type": "llava",
                "text_config": {"model_type": "llama", "vocab_size": 32064},
                "vision_config": {"model_type": "clip_vision_model"},
            },
            6_738_939_904,
        ),
        # Qwen3-VL-2B: the wrapper ties the embeddings
        (
            {
                "model_type": "qwen3_vl",
                "tie_word_embeddings": True,
                "text_config": {
                    "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 2048,
                    "intermediate_size": 6144, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                },
                "vision_config": {"hidden_size": 1024},
            },
            1_720_574_976,
        ),
        # Qwen2.5-VL-3B's older file, flat
        (
            {
                "model_type": "qwen2_5_vl", "vocab_size": 151936, "hidden_size": 2048,
                "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
                "num_key_value_heads": 2, "tie_word_embeddings": True,
                "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280},
            },
            3_085_938_688,
        ),
    ],
    ids=["llava", "qwen3-vl", "qwen2.5-vl"],
)  # fmt: skip
def test_text_parts_of_models_with_encoders(config: dict[str, Any], count: int) -> None:
    spec = from_config(config, name="x", where="c")
    assert params(spec) == count and "the text model alone" in spec.notes[0]


def test_text_parts_lean_alone_and_on_classes_of_their_own() -> None:
    """A text part in a file of its own leans, too; Qwen3-VL's class has another context than
    Qwen3's."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    spec = from_config({"model_type": "gemma3_text", **sizes}, name="x", where="c")
    assert spec.notes[0].startswith("c: assumed, as transformers does: vocab_size = 262208")
    assert present(spec.shape).vocabulary == 262208
    spec = from_config({"model_type": "qwen3_vl_text", **sizes}, name="x", where="c")
    assert "max_position_embeddings = 128000" in spec.notes[0]
    with pytest.raises(InputError, match=r"^c: text_config: not an object \(got 3"):
        from_config({"model_type": "gemma3", "text_config": 3}, name="x", where="c")
    with pytest.raises(InputError, match=r"^c: text_config: model_type: required key"):
        from_config({"model_type": "new", "text_config": sizes}, name="x", where="c")


def test_nulls_that_a_class_does_not_take_are_its_defaults() -> None:
    gaps = dict.fromkeys(("num_key_value_heads", "mlp_bias", "tie_word_embeddings", "head_dim"))
    assert present(from_config(LLAMA | gaps, name="x").shape) == present(
        from_config(LLAMA, name="x").shape
    )


INTERNLM = LLAMA | {
    "model_type": "internlm2", "num_key_value_heads": 2, "bias": False, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
# ChatGLM's keys, none of which is Llama's
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm", "hidden_size": 256, "ffn_hidden_size": 512, "kv_channels": 64,
    "num_attention_heads": 4, "multi_query_group_num": 2, "num_layers": 2,
    "padded_vocab_size": 1000, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True,
    "layernorm_epsilon": 1e-5, "tie_word_embeddings": False, "seq_length": 8192,
}  # fmt: skip


def test_decoders_of_other_types_are_taken_by_their_keys() -> None:
    known = from_config(LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": False}, name="x")
    spec = from_config(INTERNLM, name="x", where="c")
    # the function of a type that is not listed is not known
    assert present(spec.shape) == replace(present(known.shape), function=None)
    (note,) = spec.notes
    assert note == (
        "c: internlm2 is no listed type and was taken by its keys for a decoder: 2 blocks; 4 heads "
        "of width 64, 2 of keys and values; gated networks of width 512; RMSNorm; no biases; a "
        f"head apart from the 1000 tokens' table; {params(known):,} parameters"
    )
    odd = from_config(INTERNLM | {"share_expert_dim": 64, "bos_token_id": 1}, name="x", where="c")
    assert odd.notes[1:] == ("c: keys that were not understood: share_expert_dim",)
    shape = present(from_config(CHATGLM, name="x").shape)
    assert (shape.kv_heads, shape.attention_bias, shape.output_bias) == (2, True, False)
    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    mixture = present(present(from_config(INTERNLM | experts, name="x").shape).experts)
    assert (mixture.count, mixture.active, mixture.width) == (8, 2, 96)
    assert (mixture.shared, mixture.dense) == (96, 1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"conv_L_cache": 3}, "conv_L_cache"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"v_head_dim": 16}, "v_head_dim"),
        ({"type_vocab_size": 2}, "type_vocab_size"),
        ({"architectures": ["NewForMaskedLM"]}, "architectures"),
        ({"layer_types": ["retention", "retention"]}, r"layer_types\[0\]"),
        ({"kv_lora_rank": 16}, "qk_rope_head_dim"),
        ({"linear_num_value_heads": 4}, "linear_num_key_heads"),
    ],
)
def test_other_parts_are_refused_by_their_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"^c: {key}: "):
        from_config(INTERNLM | changes, name="x", where="c")
    harmless: dict[str, Any] = {
        "is_encoder_decoder": False,
        "conv_L_cache": None,
        "cross_attention_layers": [],
    }
    assert from_config(INTERNLM | harmless, name="x").shape is not None


def test_types_with_other_blocks_say_what_they_have() -> None:
    with pytest.raises(UnsupportedError, match=r"it has convolutions \(got 'lfm2'"):
        from_config({"model_type": "lfm2"}, name="x")


def test_contexts_longer_than_ten_million_tokens_are_read() -> None:
    spec = from_config(LLAMA | {"max_position_embeddings": 10_485_760}, name="x")
    assert spec.sequence == 4096


def test_blocks_with_windows_and_other_mixers_cost_what_they_reach() -> None:
    """A window bounds the scores of its blocks; the gated delta rule has none."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    windows = from_config(
        LLAMA
        | {
            "model_type": "smollm3", "num_hidden_layers": 4, "layer_types": kinds,
            "sliding_window": 64, "num_key_value_heads": 2,
        },
        name="x",
    )  # fmt: skip
    _, layers = windows.chain(1024)
    flops = [layer.forward_flops() for layer in layers[1:-1]]
    assert flops[0] == flops[3] < flops[1] == flops[2]
    next_ = LLAMA | {
        "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 64,
        "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    spec = from_config(next_, name="x")
    work = []
    for sequence in (1024, 2048):
        _, layers = spec.chain(sequence)
        work.append([layer.forward_flops() for layer in layers[1:-1]])
        names = [{op.name for op in layer.operators} for layer in layers[1:-1]]
        assert ["delta-in" in name for name in names] == [True, True, True, False]
    grown = [long / short for short, long in zip(*work, strict=True)]
    assert grown[:3] == pytest.approx([2.0] * 3) and grown[3] > 2.01
    assert spec.fits(2) and not spec.fits(4)


def test_an_indexer_bounds_the_keys_of_attention() -> None:
    sizes = {
        "num_hidden_layers": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 8,
    }  # fmt: skip
    scores = {}
    for top in (64, 512):
        config = LLAMA | sizes | {"model_type": "glm_moe_dsa", "index_topk": top}
        _, layers = from_config(config, name="x").chain(1024)
        found = {op.name: op for op in layers[1].operators if isinstance(op, Matmul)}
        assert found["index-scores"].n == 1024
        scores[top] = found["scores"].n
    assert scores == {64: 64, 512: 512}


@pytest.mark.wide
def test_modules_of_transformers_have_the_counts_of_the_table() -> None:
    """The table, with the flags of each type turned over, against transformers as installed."""
    pytest.importorskip("transformers")
    from fakes.small_models import listed_types, small_model

    # What differs: transformers ignores that Nemotron-H's embeddings are tied, and BERT's head has
    # two biases where it is not tied.
    known_differences = {("nemotron_h", "tie_word_embeddings"), ("bert", "tie_word_embeddings")}
    wrong: list[tuple[object, ...]] = []
    for kind in listed_types():
        config, _ = small_model(kind)
        flags = [
            key
            for key, entry in KNOWN[kind].items()
            if entry.type is bool and isinstance(config.get(key), bool)
        ]
        changes = [{}, *({key: not config[key]} for key in flags)]
        for change in changes:
            if {(kind, key) for key in change} & known_differences:
                continue
            try:
                written, count = small_model(kind, **change)
            except (AttributeError, TypeError, ValueError, NotImplementedError):
                continue  # the class or the module does not take this change alone
            try:
                got = params(from_config(written, name="x"))
            except InputError as error:
                if not isinstance(error, UnsupportedError) and not change:
                    wrong.append((kind, change, str(error)))
                continue
            if abs(got - count) > 1e-6 * count:
                wrong.append((kind, change, got, count))
    assert not wrong


@pytest.mark.wide
def test_unlisted_types_of_transformers_have_the_counts_of_their_modules_or_are_refused() -> None:
    """Every causal model that transformers has: none is planned as another model."""
    pytest.importorskip("transformers")
    from huggingface_hub.errors import StrictDataclassError

    from fakes.small_models import small_model, unlisted_types

    wrong: list[tuple[object, ...]] = []
    taken = 0
    for kind in unlisted_types():
        try:
            written, count = small_model(kind)
        except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                StrictDataclassError, TypeError, ValueError):  # fmt: skip
            continue  # its class does not take these sizes
        try:
            spec = from_config(written, name="x")
        except InputError:
            continue
        taken += 1
        got = params(spec)
        # a module may have encoders of images or sounds beside the text model
        alone = any("left out" in note for note in spec.notes)
        if abs(got - count) > 1e-6 * count and not (alone and got < count):
            wrong.append((kind, got, count))
    assert not wrong and taken > 5


PHI_2 = {
    "activation_function": "gelu_new", "model_type": "phi-msft", "n_embd": 2560, "n_head": 32,
    "n_head_kv": None, "n_inner": None, "n_layer": 32, "n_positions": 2048, "rotary_dim": 32,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "vocab_size": 51200,
}  # fmt: skip
STABLELM_3B = {
    "hidden_size": 2560, "intermediate_size": 6912, "model_type": "stablelm_epoch",
    "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rope_pct": 0.25, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
ORION_14B = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 15360, "max_position_embeddings": 4096, "model_type": "orion",
    "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 40,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "vocab_size": 84608,
}  # fmt: skip
INTERNLM_7B = {
    "bias": True, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "model_type": "internlm", "num_attention_heads": 32, "num_hidden_layers": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "vocab_size": 103168,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (PHI_2, 2_779_683_840),
        (PHI_2 | {"model_type": "mixformer-sequential"}, 2_779_683_840),
        (STABLELM_3B, 2_795_443_200),
        (INTERNLM_7B, 7_321_948_160),
        (ORION_14B, 14_498_703_360),
    ],
)
def test_models_whose_own_code_has_other_names_have_their_published_counts(
    config: dict[str, Any], count: int
) -> None:
    assert params(from_config(config, name="x")) == count


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"attention_probs_dropout_prob": 0.1}, "an encoder of texts"),
        ({"n_langs": 1}, "an encoder of texts"),
        ({"segment_types": 32}, "positions by segments"),
        ({"mem_len": 512}, "memories of earlier texts"),
        ({"num_hashes": 4}, "attention by hashes"),
        ({"num_codebooks": 8, "depth_decoder_config": {}}, "codes of sounds"),
        ({"backbone_hidden_size": 64}, "states of another model"),
    ],
)
def test_parts_that_no_decoder_here_has_are_refused(keys: dict[str, Any], part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        from_config(LLAMA | {"model_type": "new"} | keys, name="x")


def test_a_class_that_is_named_is_that_of_the_listed_type() -> None:
    """EXAONE 4.5's text part has a type of its own and names the class of EXAONE 4, which is untied
    by default and norms queries and keys."""
    text = {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4_vl_text",
        "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 153600,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "reorder_qk_norm": True,
    }  # fmt: skip
    config = {"model_type": "exaone4_5", "text_config": text, "vision_config": {"depth": 28}}
    spec = from_config(config, name="x")
    blocks = 5120 * 128 * (2 * 40 + 2 * 8) + 3 * 5120 * 27392 + 2 * 5120 + 2 * 128
    assert params(spec) == 64 * blocks + 2 * 153600 * 5120 + 5120
    assert any(
        "taken for exaone4, whose class Exaone4ForCausalLM it names" in n for n in spec.notes
    )
    text["architectures"] = ["Exaone4VLForCausalLM"]
    notes = from_config(config, name="x").notes
    assert any("no listed type and was taken by its keys" in note for note in notes)
    assert any("assumed, as transformers does: tie_word_embeddings = true" in n for n in notes)


def test_the_width_of_a_gated_network_is_not_guessed() -> None:
    """LLaDA-8B names its sizes as OLMo's own code does; its published count is 8.02 B."""
    llada = {
        "model_type": "llada", "activation_type": "silu", "d_model": 4096, "n_heads": 32,
        "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288, "mlp_ratio": 4,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 126464, "weight_tying": False,
    }  # fmt: skip
    assert params(from_config(llada, name="x")) == 8_015_581_184
    del llada["mlp_hidden_size"]
    with pytest.raises(InputError, match=r"intermediate_size: key is missing .*a gated network"):
        from_config(llada, name="x")
    plain = {
        "model_type": "new", "activation_function": "gelu", "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "n_positions": 32,
        "layer_norm_eps": 1e-5,
    }  # fmt: skip
    notes = from_config(plain, name="x").notes
    assert any("assumed, as transformers does: intermediate_size = 256" in note for note in notes)


def test_layers_of_predictions_are_told_and_left_out() -> None:
    """MiMo-7B is a Qwen2 with such a layer; its published number of parameters has 7 B."""
    config = {
        "model_type": "mimo", "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 640000, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151680,
    }  # fmt: skip
    spec = from_config(config, name="x")
    block = 4096 * 128 * (2 * 32 + 2 * 8) + 128 * (32 + 16) + 3 * 4096 * 11008 + 2 * 4096
    assert params(spec) == 36 * block + 2 * 151680 * 4096 + 4096
    told = "without its layers of multi-token prediction (num_nextn_predict_layers = 1)"
    assert any(told in note for note in spec.notes)
    assert spec.shape is not None and spec.shape.function is not None
    assert spec.shape.function.predictions == 1 and not inexpressible(spec.shape)
    del config["num_nextn_predict_layers"]
    assert not any("prediction" in note for note in from_config(config, name="x").notes)


@pytest.mark.wide
def test_text_parts_of_unlisted_types_lean_on_the_installed_transformers() -> None:
    pytest.importorskip("transformers")
    part = {"model_type": "cohere_compass_text", "num_hidden_layers": 4}
    spec = from_config({"model_type": "new", "text_config": part}, name="x", where="c")
    assert present(spec.shape).hidden == 8192
    assert "c: text_config: assumed, as transformers does: vocab_size = 256000" in spec.notes[2]


@pytest.mark.wide
def test_stored_defaults_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    from fakes.small_models import function_defaults_of, key_defaults, listed_types
    from hetplan.profiling.models.class_defaults import class_defaults, function_defaults
    from hetplan.profiling.models.configured_functions import KINDS

    for kind in listed_types():
        assert class_defaults(kind) == key_defaults(kind, KNOWN[kind]), kind
    for kind in KINDS:
        assert function_defaults(kind) == function_defaults_of(kind) != {}, kind


def test_a_default_of_the_class_decides_which_blocks_have_positions() -> None:
    """Every fourth block of Llama 4 has none, though files leave the interval out."""
    path = Path(__file__).parents[1] / "files" / "configurations" / "Llama-4-Scout.json"
    spec = from_config(json.loads(path.read_text(encoding="utf-8")), name="x")
    rope = present(present(present(spec.shape).function).rope)
    assert rope.skipped == "0001" * 12


@pytest.mark.parametrize("kind", ["gemma4_text", "qwen3_next", "glm_moe_dsa", "granitemoehybrid"])
def test_plan_files_carry_the_shapes(kind: str) -> None:
    """With mixers, indexers, heads of some blocks, and lists of blocks."""
    models = json.loads(SMALL_MODELS.read_text(encoding="utf-8"))
    (config,) = (m["config"] for m in models if m["config"]["model_type"] == kind)
    model = load_model(from_config(config, name="x"), sequence=16)
    record = ModelRecord.model_validate_json(ModelRecord.of(model).model_dump_json())
    names = [layer.name for layer in model.layers]
    again = record.model("x", names, model.sequence, model.precision, None)
    assert again.layers == model.layers and again.spec.shape == model.spec.shape


def test_rare_features_are_refused_where_they_would_be_left_out() -> None:
    """By hetplan's own layers, by HAP's programs and by the arguments of Megatron-LM."""
    spec = from_config(LLAMA | {"model_type": "phi", "num_key_value_heads": 4}, name="x")
    shape = present(spec.shape)
    assert shape.rare_features == ["a bias of the head"]
    with pytest.raises(UnsupportedError, match=r"own layers have no .*a bias of the head"):
        check_shape(shape)
    with pytest.raises(UnsupportedError, match="hap: no rule for a bias of the head"):
        program_of(load_model(spec, sequence=16), 2)
    plain = present(from_config(LLAMA, name="x").shape)
    assert plain.rare_features == [] and inexpressible(plain) == []
    known = replace(plain, mixers="*D", norm="scale", output_gate="head")
    assert set(inexpressible(known)) == {
        "output_gate head", "blocks with other mixers than attention", "LayerNorm without biases",
    }  # fmt: skip
