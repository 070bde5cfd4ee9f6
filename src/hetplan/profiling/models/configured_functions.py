"""Reads what a model computes from its Hugging Face configuration.

`KINDS` has the model types whose modules are known. What a configuration leaves out has the default
of its class (`class_defaults`). Of any other type the function is unknown: None. A key that changes
what a model computes, and for which `Function` has no field, is named in `Function.others` unless
its value changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetplan.errors import printable
from hetplan.profiling.models.class_defaults import function_defaults
from hetplan.profiling.models.function import Function, Rope, Router
from hetplan.profiling.models.transformer import Transformer
from hetplan.schema import LARGEST

LONGEST_TEXT = 60  # characters of a value in a message
SAME = 1e-4  # relative difference of two numbers that are written with few digits
# Names that mean the same, of different classes and of transformers 4 and 5: first the one that
# this module uses.
ALIASES = (
    ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"),
    ("norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    ("attention_dropout", "attn_pdrop"),
    ("hidden_dropout", "resid_pdrop", "residual_dropout", "dropout"),
    ("embedding_dropout", "embd_pdrop"),
    ("layer_types", "layers_block_type"),
)
ONE_NAME = {alias: names[0] for names in ALIASES for alias in names}
# Keys that change what a model computes and have no field -> the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "alibi": (False, None),
    "parallel_attn": (False, None),
    "use_parallel_residual": (False, None),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "attention_chunk_size": (None, 0),
    "attn_temperature_tuning": (False, None, 0),
    "use_mrope": (False, None),
    "qk_layernorm": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "lm_head_bias": (False, None),
}
# Model types that have a window only where `use_sliding_window` says so, and those of them whose
# first `max_window_layers` blocks have none.
OPTIONAL_WINDOW = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
FIRST_BLOCKS_IN_FULL = ("qwen2", "qwen2_moe", "qwen3")


# Keys whose class's defaults count where a file leaves them out, under the names of this module.
DEFAULTED = frozenset(
    (
        *("hidden_act", "norm_eps", "initializer_range", "swiglu_limit"),
        *("attention_dropout", "embedding_dropout", "hidden_dropout"),
        *("attention_probs_dropout_prob", "hidden_dropout_prob"),
        *("rope_theta", "partial_rotary_factor", "rope_interleave", "no_rope_layer_interval"),
        *("sliding_window", "use_sliding_window", "max_window_layers"),
        *("norm_topk_prob", "n_group", "topk_group", "topk_method", "routed_scaling_factor"),
        *("query_pre_attn_scalar", "attention_multiplier"),
        *NEUTRAL,
    )
)


@dataclass(frozen=True)
class Kind:
    """A model type: what all its models share."""

    shared: Mapping[str, Any] = field(default_factory=dict)  # fields of `Function`
    # Fields of `Router` that do not come from keys; None: the type has no experts.
    router: Mapping[str, Any] | None = None
    others: tuple[str, ...] = ()  # what its modules do that `Function` has no field for
    # Values where a file has none that are no attributes of the class: the class computes them, or
    # its modules have them in any case.
    computed: Mapping[str, Any] = field(default_factory=dict)


SIGMOID = {"scoring": "sigmoid", "expert_bias": True, "float32": True, "group_score_topk": 2}
GEMMA = ("scaled embeddings", "norms of 1 + weight")
KINDS: dict[str, Kind] = {
    "gpt2": Kind(),
    "calculon": Kind(),
    "llama": Kind(),
    "mistral": Kind(),
    "mixtral": Kind(router={}),
    "opt": Kind(
        others=("learned positions that begin at 2",),
        computed={"norm_eps": 1e-5, "embedding_dropout": 0.1},
    ),
    "bert": Kind({"norms": "behind"}, others=("attention to both sides", "BERT's heads")),
    "qwen2": Kind(),
    "qwen2_moe": Kind(router={"shared_gate": True}),
    "qwen3": Kind(),
    "qwen3_moe": Kind(router={}),
    "gemma": Kind(others=GEMMA),
    "gemma2": Kind({"norms": "both"}, others=GEMMA),
    "gemma3_text": Kind(
        {"norms": "both"},
        others=(*GEMMA, "another rotary base in blocks with a window"),
        computed={"rope_theta": 1e6},
    ),
    "phi3": Kind(),
    # Its router never normalizes the weights, whatever `norm_topk_prob` says.
    "deepseek_v2": Kind(router={"normalized": False, "float32": True, "group_score_topk": 1}),
    "deepseek_v3": Kind(router=SIGMOID),
    "kimi_k2": Kind(
        router=SIGMOID,
        computed={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    ),
    "glm": Kind(computed={"partial_rotary_factor": 0.5, "rope_interleave": True}),
    "glm4_moe": Kind(router=SIGMOID, computed={"partial_rotary_factor": 0.5}),
    "gpt_oss": Kind(
        # Its modules compute x sigmoid(1.702 x) in any case.
        {"activation": "quick_gelu", "sinks": True, "linear_offset": 1.0},
        router={"linear_bias": True},
        computed={
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096,
            }
        },
    ),
    "llama4_text": Kind(
        router={"scoring": "sigmoid", "normalized": False},
        others=("router weights on the experts' inputs", "norms of rotated queries and keys"),
    ),
    "olmo": Kind(computed={"norm_eps": 1e-5}),
    "olmo2": Kind({"norms": "behind"}),
    "olmoe": Kind(router={}),
    "stablelm": Kind(computed={"partial_rotary_factor": 0.25}),
    "starcoder2": Kind(),
    "falcon": Kind(computed={"hidden_act": "gelu"}),
    "nemotron_h": Kind(others=("blocks of different kinds",)),
    "granite": Kind(),
    "smollm3": Kind(),
    "ernie4_5": Kind(computed={"rope_interleave": True}),
    "seed_oss": Kind(),
    "arcee": Kind(),
}  # fmt: skip


def function_of(kind: str, value: Mapping[str, Any], shape: Transformer) -> Function | None:
    """The function of a configuration's model. None where the model type is not in `KINDS`.

    kind: the model type. value: the configuration; a key that is missing has its class's default.
    shape: the model's shape. A value that is unusable is named in `Function.others`: planning needs
    none of these keys, so that it goes on without them.
    """
    known = KINDS.get(kind)
    if known is None:
        return None
    keys = Keys({**function_defaults(kind), **known.computed}, value)
    has_router = shape.experts is not None and known.router is not None
    fields: dict[str, Any] = {
        "activation": keys.text("hidden_act"),
        "norm_epsilon": keys.number("norm_eps", 1e-5),
        "rope": rope_of(keys, shape) if shape.rotary else None,
        "router": router_of(known.router or {}, keys) if has_router else None,
        "window": window_of(kind, keys),
        "clamp": keys.number("swiglu_limit", None),
        "attention_dropout": keys.number("attention_dropout", 0.0),
        "hidden_dropout": keys.number("hidden_dropout", 0.0),
        "initializer_range": keys.number("initializer_range", 0.02),
        "predictions": keys.count("num_nextn_predict_layers"),
    }
    if fields["window"] is not None:
        fields["windowed"] = windowed_blocks(kind, keys, shape)
    fields |= known.shared
    others = [*known.others, *unnamed(kind, keys, shape), *keys.unread]
    return Function(kind=kind, **fields, others=", ".join(others))


class Keys:
    """The keys of a configuration under one name each, with the defaults of its class.

    A method returns the value of a key. It returns the default where the value is null or unusable;
    an unusable value is noted in `unread`.
    """

    def __init__(self, defaults: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        given = {ONE_NAME.get(key, key): entry for key, entry in value.items()}
        self.values: dict[str, Any] = {**defaults, **given}
        self.defaults = defaults
        self.unread: list[str] = []

    def number(self, key: str, default: Any, place: Mapping[str, Any] | None = None) -> Any:
        """A number from 0 to `LARGEST`. default: the default for a class that has none of its own.
        place: the object that holds the key, where it is not the configuration itself."""
        value = (self.values if place is None else place).get(key)
        default = self.defaults.get(key, default)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= LARGEST:
            self.unread.append(key_and_value(key, value))
            return default
        return float(value)

    def count(self, key: str, place: Mapping[str, Any] | None = None) -> int:
        """A whole number, 0 where it is null or missing."""
        value = self.number(key, 0, place) or 0
        if value != int(value):
            self.unread.append(key_and_value(key, value))
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool | None):
            self.unread.append(key_and_value(key, value))
        return default if value is None else bool(value)

    def text(self, key: str) -> str:
        """A short text, empty where it is null or missing."""
        value = self.values.get(key) or self.defaults.get(key, "")
        if not isinstance(value, str):
            self.unread.append(key_and_value(key, value))
        return printable(str(value))[:LONGEST_TEXT]

    def table(self, key: str) -> Mapping[str, Any]:
        """An object, empty where it is null or missing."""
        value = self.values.get(key)
        if not isinstance(value, dict | None):
            self.unread.append(key_and_value(key, value))
        return value if isinstance(value, dict) else {}

    def blocks(self, key: str, shape: Transformer) -> list[Any] | None:
        """A list with an entry for each block; None where it is null or missing."""
        value = self.values.get(key)
        if isinstance(value, list) and len(value) == shape.layers:
            return value
        if value:
            self.unread.append(key_and_value(key, value))
        return None


def key_and_value(key: str, value: Any) -> str:
    """A key and its value, for messages."""
    return f"{key} {printable(repr(value))[:LONGEST_TEXT]}"


def digits(chosen: Iterable[bool]) -> str:
    """[block] 1 for a chosen block, else 0."""
    return "".join(str(int(is_chosen)) for is_chosen in chosen)


def rope_of(keys: Keys, shape: Transformer) -> Rope:
    """The rotary positions. transformers 4 calls their table `rope_scaling`, transformers 5
    `rope_parameters`; the latter also has base and share."""
    table = keys.table("rope_scaling") or keys.table("rope_parameters")
    nested = [entry for entry in table.values() if isinstance(entry, dict)]
    if nested:  # a table for each kind of block
        table = nested[0]
        if any(entry != table for entry in nested):
            keys.unread.append("rotary positions that differ by kind of block")
    kind = table.get("rope_type", table.get("type")) or "default"
    theta = keys.number("rope_theta", 10000.0)
    partial = keys.number("partial_rotary_factor", keys.number("rotary_pct", 1.0))
    # transformers refuses llama3 without its two factors: such a file was written by hand, and its
    # longest sequence says nothing about the length before scaling.
    scaled = kind == "yarn" or (kind == "llama3" and "low_freq_factor" in table)
    longest = keys.number("max_position_embeddings", None) if scaled else None
    outside = keys.number("original_max_position_embeddings", longest)
    original = keys.number("original_max_position_embeddings", outside, table)
    optional = (
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "attention_factor"),
    )
    return Rope(
        theta=theta if table.get("rope_theta") is None else keys.number("rope_theta", theta, table),
        partial=keys.number("partial_rotary_factor", partial, table),
        kind=printable(str(kind))[:LONGEST_TEXT],
        factor=keys.number("factor", 1.0, table),
        original=None if original is None else int(original),
        truncate=table.get("truncate") is not False,
        interleaved=keys.flag("rope_interleave", shape.latent is not None),
        skipped=blocks_without_positions(keys, shape),
        **{name: keys.number(name, None, table) for name in optional},
    )


def blocks_without_positions(keys: Keys, shape: Transformer) -> str:
    """[block] 1 for a block without rotary positions; empty where all blocks have them."""
    rotated = keys.blocks("no_rope_layers", shape)  # 1: the block has positions
    interval = keys.count("no_rope_layer_interval")
    if rotated is not None:
        skipped = [not has_positions for has_positions in rotated]
    elif interval:
        skipped = [(block + 1) % interval == 0 for block in range(shape.layers)]
    else:
        skipped = []
    return digits(skipped) if any(skipped) else ""


def router_of(fixed: Mapping[str, Any], keys: Keys) -> Router:
    """The router. fixed: the fields that all models of the type share."""
    groups, group_topk = keys.count("n_group"), keys.count("topk_group")
    # Where all groups are allowed there is no choice of groups.
    grouped = 0 < group_topk < groups and keys.text("topk_method") != "greedy"
    fields = {
        "normalized": keys.flag("norm_topk_prob", True),
        "scaling": keys.number("routed_scaling_factor", 1.0),
        **fixed,
    }
    fields |= {
        "groups": groups if grouped else 0,
        "group_topk": group_topk if grouped else 0,
        "group_score_topk": fixed.get("group_score_topk", 0) if grouped else 0,
    }
    return Router(**fields)


def window_of(kind: str, keys: Keys) -> int | None:
    """The last keys that a token attends to in blocks with a window. None: there is no window."""
    if kind in OPTIONAL_WINDOW and not keys.flag("use_sliding_window", False):
        return None
    return keys.count("sliding_window") or None


def windowed_blocks(kind: str, keys: Keys, shape: Transformer) -> str:
    """[block] 1 for a block with the window; empty: all blocks have it."""
    listed = keys.blocks("layer_types", shape)
    blocks = range(shape.layers)
    if listed is not None:
        return digits(name == "sliding_attention" for name in listed)
    if kind in FIRST_BLOCKS_IN_FULL:
        first = keys.count("max_window_layers")
        return digits(block >= first for block in blocks)
    if shape.full_every:
        return digits((block + 1) % shape.full_every != 0 for block in blocks)
    return ""


def unnamed(kind: str, keys: Keys, shape: Transformer) -> list[str]:
    """The keys with a value that changes what the model computes, and for which `Function` has no
    field."""
    values = keys.values
    names = []
    for key, neutral in NEUTRAL.items():
        if key in values and values[key] not in neutral:
            names.append(key_and_value(key, values[key]))
    # Scores are divided by the root of a head's width.
    scalar = keys.number("query_pre_attn_scalar", None)
    if scalar is not None and scalar != shape.head_dim:
        names.append(key_and_value("query_pre_attn_scalar", scalar))
    multiplier = keys.number("attention_multiplier", None)
    if multiplier is not None and abs(multiplier * shape.head_dim**0.5 - 1) > SAME:
        names.append(key_and_value("attention_multiplier", multiplier))
    dropouts = [keys.number(name, 0.0) for name in ("embedding_dropout", "hidden_dropout")]
    if "embedding_dropout" in values and dropouts[0] != dropouts[1]:
        names.append(key_and_value("embedding_dropout", dropouts[0]))
    if "attention_bias" in values:
        with_bias = keys.flag("attention_bias", shape.attention_bias)
        if with_bias != shape.attention_bias:
            names.append(key_and_value("attention_bias", with_bias))
    return names
