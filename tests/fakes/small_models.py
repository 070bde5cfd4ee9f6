"""Configurations of small models of all types that hetplan and `transformers` both know, and the
parameters of transformers' own modules, which are made without memory.

    python -m fakes.small_models    (in the folder tests)

writes the defaults of the configuration classes for the listed types to the package, and the small
models with their counts to small_models.json, for the tests that run without transformers.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from hetplan.profiling.models import class_defaults
from hetplan.profiling.models.class_defaults import CLASSES
from hetplan.profiling.models.configuration_keys import Key, takes_nothing
from hetplan.profiling.models.configurations import KNOWN
from hetplan.profiling.models.configured_functions import DEFAULTED, KINDS, ONE_NAME

# Sizes of small models, in the names of all classes. Widths differ from each other, so that no two
# parameters are confused.
SMALL = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "moe_intermediate_size": 24, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40, "q_lora_rank": 20,
    "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "max_position_embeddings": 256, "n_embd": 96, "n_layer": 8, "n_head": 8, "n_positions": 256,
    "pad_token_id": 0, "ffn_dim": 80, "ffn_hidden_size": 80, "num_kv_heads": 4,
    "word_embed_proj_dim": 64, "moe_num_experts": 6, "num_layers": 8, "num_heads": 8,
    "d_model": 96, "attention_heads": 8, "n_layers": 8, "n_heads": 8, "max_seq_len": 256,
    "intermediate_size_mlp": 56, "shared_intermediate_size": 40, "mamba_n_heads": 12,
    "mamba_d_head": 16, "mamba_d_state": 10, "mamba_num_heads": 12, "mamba_head_dim": 16,
    "ssm_state_size": 10, "n_groups": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 14, "linear_value_head_dim": 18, "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 22, "index_n_heads": 3, "index_head_dim": 10,
    "moe_shared_expert_intermediate_size": 44, "moe_topk": 2, "moe_k": 2, "laurel_rank": 5,
}  # fmt: skip
SMALL_MODELS = Path(__file__).with_name("small_models.json")
# What some classes want besides, or instead. None: the key is left to the class.
FURTHER: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": None, "num_hidden_layers": 15},
    "gemma4_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 12},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 2},
    "gpt2": {"n_inner": None},
    "clip": {
        "text_config": {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3},
        "vision_config": {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2},
    },
    "t5": {"d_kv": 16, "d_ff": 80, "num_decoder_layers": 5},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
    "bamba": {"attn_layer_indices": [2, 5]},
    "helium": {"head_dim": 12},  # its output projection is of hidden x hidden numbers
    "laguna": {"num_attention_heads_per_layer": None},
}


def key_defaults(kind: str, keys: dict[str, Key]) -> dict[str, Any]:
    """Key -> default of the class of a type, for the keys that hetplan reads and whose default is
    one number, text or truth value."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = static_defaults(CONFIG_MAPPING[CLASSES.get(kind, kind)])
    found: dict[str, Any] = {}
    for key, entry in keys.items():
        if key not in values:
            continue
        value = values[key]
        simple = isinstance(value, bool | int | str) or (value is None and takes_nothing(entry))
        if simple:
            found[key] = value
    return found


def function_defaults_of(kind: str) -> dict[str, Any]:
    """Key -> default of the class of a type, for the keys that say what a model computes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[CLASSES.get(kind, kind)]
    values = {"rope_theta": getattr(config_class, "default_theta", None)}
    for key, value in static_defaults(config_class).items():
        values.setdefault(ONE_NAME.get(key, key), value)
    return {
        key: value
        for key, value in sorted(values.items())
        if key in DEFAULTED and isinstance(value, bool | int | float | str)
    }


def static_defaults(config_class: Any) -> dict[str, Any]:
    """The defaults of a configuration class, by all names that it has for them. Values that an
    object computes from its other sizes are left out: they are None here."""
    values = {
        name: getattr(config_class, name)
        for name in config_class().to_dict()
        if hasattr(config_class, name)
    }
    for name, own in config_class.attribute_map.items():
        if own in values:
            values[name] = values[own]
    return values


def listed_types() -> list[str]:
    """The listed types whose class transformers has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(kind for kind in KNOWN if kind in CONFIG_MAPPING)


def unlisted_types() -> list[str]:
    """The types of causal language models that transformers has and hetplan does not list."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind in CONFIG_MAPPING and kind not in KNOWN
    )


def small_sizes(kind: str) -> dict[str, Any]:
    """The arguments of a class for a small model of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = {key: size for key, size in SMALL.items() if key in known} | FURTHER.get(kind, {})
    return {key: size for key, size in sizes.items() if size is not None}


def parameters(config: Any) -> int:
    """The parameters of the module of a configuration, which is made without memory."""
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        module = module_of(config)
    encoders = "embed_tokens_extend"  # Phi-4's of images and sounds, which hetplan leaves out
    return sum(p.numel() for name, p in module.named_parameters() if encoders not in name)


def small_model(kind: str, **changes: Any) -> tuple[dict[str, Any], int]:
    """(configuration as transformers writes it, parameters of its module) of a small model.
    changes: further arguments of the class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**(small_sizes(kind) | changes))
    return json.loads(config.to_json_string()), parameters(config)


def module_of(config: Any) -> Any:
    """The module of a configuration with the head that hetplan describes."""
    import transformers

    if config.model_type == "bert":
        return transformers.BertForPreTraining(config)
    if config.model_type == "t5":
        return transformers.T5ForConditionalGeneration(config)
    if config.model_type == "vit":
        return transformers.ViTForImageClassification(config)
    if config.model_type == "clip":
        return transformers.CLIPModel(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Write `class_defaults.json`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from hetplan.profiling.models.configuration_keys import TOWERS
    from hetplan.profiling.models.text_parts import SAME_AS

    defaults = {kind: key_defaults(kind, KNOWN[kind]) for kind in listed_types()}
    # text models whose listed type has another class
    defaults |= {
        kind: key_defaults(kind, KNOWN[SAME_AS[kind]]) for kind in SAME_AS if kind in CONFIG_MAPPING
    }
    defaults |= {CLASSES[tower]: key_defaults(tower, keys) for tower, keys in TOWERS.items()}
    path = Path(class_defaults.__file__).with_name("class_defaults.json")
    functions = {
        CLASSES.get(kind, kind): function_defaults_of(kind)
        for kind in KINDS
        if CLASSES.get(kind, kind) in CONFIG_MAPPING
    }
    head = {"source": f"transformers {transformers.__version__}"}
    text = json.dumps(head)[:-1]
    for name, table in (("defaults", defaults), ("functions", functions)):
        lines = [f" {json.dumps(kind)}: {json.dumps(table[kind])}" for kind in sorted(table)]
        text += f', "{name}": {{\n' + ",\n".join(lines) + "\n}"
    path.write_text(text + "}\n", encoding="utf-8")
    rows = []
    for kind in listed_types():
        config, params = small_model(kind)
        rows.append(json.dumps({"params": params, "config": config}))
    SMALL_MODELS.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
