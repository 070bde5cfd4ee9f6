"""The text model in a configuration: of a model with encoders of images or sounds, the part that
reads and writes text."""

from dataclasses import dataclass
from typing import Any

from hetplan.errors import InputError, require
from hetplan.schema import as_name

# Keys under which a configuration holds that of its text model, and those of the configurations
# that are left out.
TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
# Type of a model with encoders -> type of its text model where the text model's configuration does
# not say it.
TEXT_TYPES = {
    "aria": "aria_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
}
# Model type -> the listed type of which its configurations are.
SAME_AS = {
    "emu3_text_model": "llama",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "gpt-sw3": "gpt2",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "mt5": "t5",
    "mixformer-sequential": "phi-msft",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "stablelm_epoch": "stablelm",
}


@dataclass(frozen=True)
class TextPart:
    """The configuration of a text model, or of a model whose parts belong together (CLIP)."""

    kind: str  # its type, or the listed one that is the same
    stated: str  # the type that it states, whose class has its defaults
    value: dict[str, Any]
    where: str  # its place, for messages
    # Whether it stands in another configuration, or is of a type that usually does: transformers
    # writes such a configuration without the values that are its class's defaults.
    leans: bool
    notes: tuple[str, ...]


def text_part(value: dict[str, Any], where: str) -> TextPart:
    """The text model's part of a configuration. Raises InputError where its type is not stated."""
    notes: list[str] = []
    outer, leans, place = value, False, where
    kind = model_type(value, where, required=text_key(value) is None) or ""
    text_config = value.get("text_config")
    require(
        text_config is None or isinstance(text_config, dict),
        "not an object",
        where=f"{where}: text_config",
        got=text_config,
        expected="the configuration of a text model",
    )
    key = text_key(value)
    while kind != "clip" and key is not None:
        outer, value, leans = value, value[key], True
        place, key = f"{place}: {key}", text_key(value)
        stated = model_type(value, place, required=kind not in TEXT_TYPES and key is None)
        if stated is None or stated == kind:
            stated = TEXT_TYPES.get(kind, kind)
        kind = stated
    encoders = [key for key, part in outer.items() if key.endswith("_config") and is_model(part)]
    if leans:
        encoders += [key for key in outer if key == "vision_config" and key not in encoders]
    others = [key for key in encoders if key not in TEXT_KEYS]
    if leans:
        left_out = ", ".join(map(as_name, others)) or "encoders"
        notes.append(f"{where}: the text model alone; left out: {left_out}")
        if "tie_word_embeddings" in outer and "tie_word_embeddings" not in value:
            value = value | {"tie_word_embeddings": outer["tie_word_embeddings"]}
    elif others and kind != "clip":
        left_out = ", ".join(map(as_name, others))
        notes.append(f"{where}: the text model alone; left out: {left_out}")
    if kind in TEXT_TYPES and kind not in SAME_AS:
        kind = TEXT_TYPES[kind]
    leans = leans or kind.endswith("_text")
    return TextPart(SAME_AS.get(kind, kind), kind, value, place, leans, tuple(notes))


def text_key(value: dict[str, Any]) -> str | None:
    """The key of the text model's configuration; None where there is none."""
    return next((key for key in TEXT_KEYS if isinstance(value.get(key), dict)), None)


def is_model(part: Any) -> bool:
    """Whether the value of a key is the configuration of a model."""
    return isinstance(part, dict) and any(key in part for key in ("hidden_size", "model_type"))


def model_type(value: dict[str, Any], where: str, *, required: bool) -> str | None:
    """The stated type of a configuration; None where it is not stated and not required."""
    kind = value.get("model_type")
    if kind is None and not required:
        return None
    require(
        kind is not None,
        "required key is missing",
        where=f"{where}: model_type",
        expected="the name of the model's class, as gpt2 or llama",
    )
    if not isinstance(kind, str):
        raise InputError(
            "not usable", where=f"{where}: model_type", got=kind, expected="a text, as gpt2"
        )
    return kind
