"""Reads what a model computes from its Hugging Face configuration.

`KINDS` has the model types whose modules are known, with the defaults of their configuration
classes in `transformers` 5. Of any other type the function is unknown: None. A key that changes
what a model computes, and for which `Function` has no field, is named in `Function.others` unless
its value changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetplan.errors import printable
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


@dataclass(frozen=True)
class Kind:
    """A model type: the defaults of its class, and what all its models share."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)  # fields of `Function`
    # Fields of `Router` that do not come from keys; None: the type has no experts.
    router: Mapping[str, Any] | None = None
    others: tuple[str, ...] = ()  # what its modules do that `Function` has no field for


SILU = {"hidden_act": "silu", "norm_eps": 1e-6, "rope_theta": 10000.0}
EPSILON_5 = {**SILU, "norm_eps": 1e-5}
SIGMOID = {"scoring": "sigmoid", "expert_bias": True, "float32": True, "group_score_topk": 2}
GROUPED = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
GEMMA = ("scaled embeddings", "norms of 1 + weight")
KINDS: dict[str, Kind] = {
    "gpt2": Kind({
        "hidden_act": "gelu_new", "norm_eps": 1e-5, "embedding_dropout": 0.1,
        "attention_dropout": 0.1, "hidden_dropout": 0.1,
    }),
    "calculon": Kind({
        "hidden_act": "gelu_new", "norm_eps": 1e-5, "embedding_dropout": 0.1,
        "attention_dropout": 0.1, "hidden_dropout": 0.1,
    }),
    "llama": Kind(SILU),
    "mistral": Kind({**SILU, "sliding_window": 4096}),
    "mixtral": Kind({**EPSILON_5, "rope_theta": 1e6}, router={}),
    "opt": Kind(
        {"hidden_act": "relu", "norm_eps": 1e-5, "hidden_dropout": 0.1, "embedding_dropout": 0.1},
        others=("learned positions that begin at 2",),
    ),
    "bert": Kind(
        {
            "hidden_act": "gelu", "norm_eps": 1e-12, "attention_probs_dropout_prob": 0.1,
            "hidden_dropout_prob": 0.1,
        },
        {"norms": "behind"},
        others=("attention to both sides", "BERT's heads"),
    ),
    "qwen2": Kind({**SILU, "sliding_window": 4096, "max_window_layers": 28}),
    "qwen2_moe": Kind(
        {**SILU, "sliding_window": 4096, "max_window_layers": 28, "norm_topk_prob": False},
        router={"shared_gate": True},
    ),
    "qwen3": Kind({**SILU, "sliding_window": 4096, "max_window_layers": 28}),
    "qwen3_moe": Kind({**SILU, "sliding_window": 4096, "norm_topk_prob": False}, router={}),
    "gemma": Kind({**SILU, "hidden_act": "gelu_pytorch_tanh"}, others=GEMMA),
    "gemma2": Kind(
        {
            **SILU, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"norms": "both"},
        others=GEMMA,
    ),
    "gemma3_text": Kind(
        {
            **SILU, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "rope_theta": 1e6,
        },
        {"norms": "both"},
        others=(*GEMMA, "another rotary base in blocks with a window"),
    ),
    "phi3": Kind(EPSILON_5),
    "deepseek_v2": Kind(
        {
            **SILU, "topk_method": "greedy", "n_group": None, "topk_group": None,
            "routed_scaling_factor": 1.0,
        },
        # Its router never normalizes the weights, whatever `norm_topk_prob` says.
        router={"normalized": False, "float32": True, "group_score_topk": 1},
    ),
    "deepseek_v3": Kind(
        {
            **SILU, "norm_topk_prob": True, "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        router=SIGMOID,
    ),
    "kimi_k2": Kind({**SILU, **GROUPED}, router=SIGMOID),
    "glm": Kind({
        **SILU, "norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "rope_interleave": True,
    }),
    "glm4_moe": Kind({**EPSILON_5, **GROUPED, "partial_rotary_factor": 0.5}, router=SIGMOID),
    "gpt_oss": Kind(
        {
            **EPSILON_5, "sliding_window": 128, "rope_theta": 150000.0, "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096,
            },
        },
        # Its modules compute x sigmoid(1.702 x) in any case.
        {"activation": "quick_gelu", "sinks": True, "linear_offset": 1.0},
        router={"linear_bias": True},
    ),
    "llama4_text": Kind(
        {
            **EPSILON_5, "rope_theta": 500000.0, "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
        },
        router={"scoring": "sigmoid", "normalized": False},
        others=("router weights on the experts' inputs", "norms of rotated queries and keys"),
    ),
    "olmo": Kind({"hidden_act": "silu", "norm_eps": 1e-5, "rope_theta": 10000.0}),
    "olmo2": Kind(EPSILON_5, {"norms": "behind"}),
    "olmoe": Kind({**EPSILON_5, "norm_topk_prob": False}, router={}),
    "stablelm": Kind({**EPSILON_5, "partial_rotary_factor": 0.25}),
    "starcoder2": Kind({
        "hidden_act": "gelu_pytorch_tanh", "norm_eps": 1e-5, "rope_theta": 10000.0,
        "initializer_range": 0.018042,
    }),
    "falcon": Kind({
        "hidden_act": "gelu", "norm_eps": 1e-5, "rope_theta": 10000.0, "parallel_attn": True,
    }),
    "nemotron_h": Kind(
        {"hidden_act": "relu2", "norm_eps": 1e-5}, others=("blocks of different kinds",)
    ),
    "granite": Kind({**SILU, "attention_multiplier": 1.0}),
    "smollm3": Kind({**SILU, "rope_theta": 2e6, "no_rope_layer_interval": 4}),
    "ernie4_5": Kind({**EPSILON_5, "rope_theta": 500000.0, "rope_interleave": True}),
    "seed_oss": Kind({**SILU, "attention_dropout": 0.1, "hidden_dropout": 0.1}),
    "arcee": Kind({**EPSILON_5, "hidden_act": "relu2"}),
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
    keys = Keys(known.defaults, value)
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
        one_name = {alias: names[0] for names in ALIASES for alias in names}
        given = {one_name.get(key, key): entry for key, entry in value.items()}
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
