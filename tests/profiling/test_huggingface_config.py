"""config.json files: published parameter counts, defaults, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.profiling.huggingface import from_config
from hetplan.profiling.models import load_model

LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
MIXTRAL = {
    **MISTRAL,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
OPT_350M: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "do_layer_norm_before": False,
    "word_embed_proj_dim": 512,
    "vocab_size": 50272,
}
OPT_1_3B: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "ffn_dim": 8192,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}
LLAMA32 = {
    **LLAMA3,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}


# Counts of the released checkpoints on the Hugging Face hub.
@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA3, 8_030_261_248),
        (LLAMA32, 1_235_814_400),
        (MISTRAL, 7_241_732_096),
        (MIXTRAL, 46_702_792_704),
        ({"model_type": "opt"}, 125_239_296),
        (OPT_350M, 331_196_416),
        (OPT_1_3B, 1_315_758_080),
        (GPT2_XL, 1_557_611_200),
        ({"model_type": "bert"}, 110_106_428),
    ],
)
def test_parameters_equal_the_published_count(config: dict[str, Any], count: int) -> None:
    assert load_model(from_config(config, name="x")).params == count


def test_same_chain_as_the_built_in() -> None:
    assert load_model(from_config(LLAMA3, name="x")).layers == load_model("llama3-8b", sequence=4096).layers
    assert load_model(from_config({"model_type": "bert"}, name="x")).layers == load_model("bert-base").layers


def test_default_sequence_is_the_context_capped() -> None:
    assert load_model(from_config(GPT2_XL, name="x")).sequence == 1024
    assert load_model(from_config(LLAMA32, name="x")).sequence == 4096


def test_sliding_window_bounds_attention() -> None:
    windowed, full = (
        from_config(MISTRAL, name="x"),
        from_config({**MISTRAL, "sliding_window": None}, name="x"),
    )
    assert load_model(windowed, sequence=4096).layers == load_model(full, sequence=4096).layers
    assert (
        load_model(windowed, sequence=8192).forward_flops() < load_model(full, sequence=8192).forward_flops()
    )


def test_found_by_file_or_folder_and_named_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2_XL))
    assert load_model(folder).name == load_model(str(folder / "config.json")).name == "my-gpt"
    (tmp_path / "small.json").write_text('{"model_type": "gpt2"}')
    assert load_model(str(tmp_path / "small.json")).name == "small"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "not an object"),
        ({}, r"model_type: model type is not supported \(expected one of gpt2, llama"),
        (
            {"model_type": "t5"},
            r"not supported \(got 't5', expected one of gpt2, llama, mistral, mixtral, opt, bert",
        ),
        ({"model_type": ["gpt2"]}, "model type is not supported"),
        (
            {"model_type": "gpt2", "n_layer": "12"},
            r"n_layer: not usable \(got '12', expected a valid integer",
        ),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer: not usable"),
        ({"model_type": "gpt2", "n_layer": 10**6}, "n_layer: not usable"),
        (
            {"model_type": "gpt2", "n_head": 7},
            r"not a multiple of the number of heads \(got 768, expected a multiple of 7",
        ),
        ({**LLAMA3, "num_key_value_heads": 5}, r"num_key_value_heads \(got 32, expected a multiple of 5"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is too large"),
    ],
)
def test_errors(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_config(config, name="x")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        load_model(str(tmp_path / "nowhere.json"))
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        load_model(tmp_path)
