"""Decoders of types that are not listed, taken by the keys of their configurations.

A decoder is taken as blocks of attention and a feed-forward network or experts, each after a norm,
between an embedding and a head, as in Llama. Keys decide what differs: the kind of attention, its
heads and windows, experts, biases, norms and positions. A configuration with keys of parts that are
not known, such as convolutions, is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.models.configuration_keys import (
    CONTEXT,
    DEPTH,
    EXPERT_WIDTH,
    HEADS,
    KINDS,
    NETWORK_KINDS,
    POSITIONS,
    SHARED_EXPERTS,
    VOCABULARY,
    WIDTH,
    WINDOW,
    EveryOrFlags,
    EveryOrLetters,
    Indices,
    Key,
    Size,
    names_of,
    required,
)
from hetplan.profiling.models.decoder_types import GATED_DELTA, LATENT, MAMBA_2
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import LLAMA
from hetplan.schema import Count, as_name

# Types whose structure is known to differ from that of a decoder of this module -> what differs.
OTHERS = {
    "axk1": "norms after experts alone",
    "axk2": "gates of norms",
    "bailing_hybrid": "Kimi's delta attention",
    "blt": "patches of bytes",
    "cohere2_moe": "experts that are averaged with others",
    "whisper": "an encoder of sound",
    "wav2vec2": "convolutions over sound",
    "wav2vec2-bert": "an encoder of sound",
    "hubert": "convolutions over sound",
    "wavlm": "convolutions over sound",
    "ctrl": "a bias of the head without its own table",
    "dbrx": "nested configurations of attention and experts",
    "deepseek_v4": "hyper-connections",
    "diffllama": "differential attention",
    "doge": "dynamic masks",
    "dots3_note_text": "attention with two kinds of latent vectors",
    "falcon_h1": "attention and Mamba-2 side by side",
    "falcon_mamba": "Mamba-1",
    "flint": "no description of its blocks",
    "gpt_neox_japanese": "a bias of attention in one block",
    "hrm_text": "two stacks of blocks in turn",
    "hy_v4": "hyper-connections",
    "inkling2_text": "convolutions",
    "inkling_text": "convolutions",
    "jamba": "Mamba-1",
    "jetmoe": "experts of attention",
    "kimi_linear": "Kimi's delta attention",
    "lfm2": "convolutions",
    "lfm2_moe": "convolutions",
    "lfm3": "convolutions",
    "longcat_flash": "two attentions in a block",
    "mamba": "Mamba-1",
    "mamba2": "blocks without attention and network",
    "mimo_v2_flash": "values of another width",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": "an indexer of blocks of keys",
    "mllama_text_model": "attention to images",
    "modernbert-decoder": "heads of an encoder",
    "recurrent_gemma": "recurrent blocks",
    "rwkv": "recurrent blocks",
    "xlstm": "recurrent blocks",
    "zamba": "Mamba-1",
    "zamba2": "blocks that share weights",
    "zaya": "convolutions",
}
# Patterns of keys of parts that no decoder of this module has, and the part.
UNKNOWN_PARTS = {
    r"is_encoder_decoder|(en|de)coder_(layers|config|ffn_dim)|num_(en|de)coder_layers": (
        "an encoder beside the decoder"
    ),
    r"type_vocab_size|relative_attention|pos_att_type|classifier_pooling": "an encoder of texts",
    # BERT and its kin, whose decoders have norms behind sums, and a bias of the head
    r"attention_probs_dropout_prob|n_langs|use_lang_emb": "an encoder of texts",
    r"segment_types|prompt_types|position_bias_\w+": "positions by segments",
    r"mem_len|untie_r|bi_data": "memories of earlier texts",
    r"num_hashes|lsh_\w+|axial_\w+": "attention by hashes",
    r"depth_decoder_\w+|\w*codebooks?|\w*codebook_\w+": "codes of sounds",
    r"backbone_hidden_size|num_centroids": "states of another model",
    r"add_cross_attention|cross_attention\w*|cross_attn\w*": "attention to another text or image",
    r"\w*conv\w*": "a convolution",
    r"(ssm|mamba|time_step|dt|lru|rwkv|recurrent|kda|lightning|retention)_\w+|state_size": (
        "a mixer that is neither attention, Mamba-2 nor the gated delta rule"
    ),
    r"attn_type_list": "a mixer that is not attention",
    r"hc_\w+|hyper_connection\w*|altup_\w+|laurel_\w+": "further versions of the hidden states",
    r"hidden_size_per_layer_input": "inputs of single blocks",
    r"(key|query|values?)_(head_)?dim|v_head_dim": "heads whose values have another width",
}
# Parts that are known, each with the key without which its other keys mean something else.
PARTS: tuple[tuple[str, dict[str, Key]], ...] = (
    ("linear_num_value_heads", GATED_DELTA),
    ("mamba_n_heads", MAMBA_2),
    ("kv_lora_rank", LATENT),
)
BIASES = {
    "attention_bias": ("attention_bias", "output_bias"),
    "mlp_bias": ("feed_forward_bias",),
    "use_bias": ("attention_bias", "output_bias", "feed_forward_bias"),
    "bias": ("attention_bias", "output_bias"),  # InternLM's, which has none elsewhere
    "add_bias_linear": ("output_bias", "feed_forward_bias"),
    "qkv_bias": ("attention_bias",),
    "use_qkv_bias": ("attention_bias",),
    "add_qkv_bias": ("attention_bias",),
    "attention_out_bias": ("output_bias",),
    "attention_output_bias": ("output_bias",),
    "lm_head_bias": ("head_bias",),
}
# Keys that a decoder may have -> their meaning. Those that a file lacks count as absent.
OPTIONAL: dict[str, Key] = {
    "num_key_value_heads": Key(("kv_heads",), Size | None, None),
    "head_dim": Key(("head_dim",), Size | None, None),
    "max_position_embeddings": Key(("context",), CONTEXT, 4096),
    "sliding_window": WINDOW,
    "use_sliding_window": Key(("window_used",), bool, True),
    "layer_types": KINDS,
    "sliding_window_pattern": Key(("window_pattern",), EveryOrLetters | None, None),
    "num_experts": Key(("experts.count",), Count | None, None),
    "num_experts_per_tok": Key(("experts.active",), Count | None, None),
    "moe_intermediate_size": EXPERT_WIDTH,
    "n_shared_experts": SHARED_EXPERTS,
    "shared_expert_intermediate_size": Key(("experts.shared",), Count | None, 0),
    "first_k_dense_replace": Key(("experts.dense",), Count, 0),
    "num_dense_layers": Key(("experts.dense",), Count, 0),
    "moe_layer_freq": Key(("experts.every",), EveryOrFlags, 1),
    "decoder_sparse_step": Key(("experts.every",), Size, 1),
    "interleave_moe_layer_step": Key(("experts.every",), Size, 1),
    "mlp_only_layers": Key(("dense_blocks",), Indices | None, None),
    "mlp_layer_types": NETWORK_KINDS,
    "use_qk_norm": Key(("head_qk_norm",), bool, False),
    "qk_layernorm": Key(("head_qk_norm",), bool, False),
    "qk_norm": Key(("head_qk_norm",), bool, False),
    **{bias: Key(fields, bool, False) for bias, fields in BIASES.items()},
}


# Keys that may be of the structure of blocks, and words of keys that are not.
STRUCTURAL = re.compile(
    r"expert|moe|layer|dim|rank|head|width|size|mlp|ffn|gate|attention|attn|norm"
)
HARMLESS = re.compile(
    r"token|dropout|drop$|eps|init|loss|aux|cache|rope|rotary|scal|dtype|implementation|config$"
    r"|image|vision|audio|norm_topk|router_|group|mtp|nextn|predict|fp32|quant|max_window_layers"
)
OTHERWISE_READ = {
    *("hidden_act", "activation_function", "hidden_activation", "activation", "rmsnorm"),
    *("position_embedding_type", "model_type", "architectures"),
}


def check_describable(value: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise UnsupportedError for a configuration whose model is no decoder of this module."""
    expected = "a decoder of attention, Mamba-2 or the gated delta rule; any torch module goes by "
    expected += "`hetplan profile predict --factory MODULE:FUNCTION`"
    require(
        kind not in OTHERS,
        f"model type is not supported: it has {OTHERS.get(kind)}",
        where=f"{where}: model_type",
        got=kind,
        expected=expected,
        kind=UnsupportedError,
    )
    architectures = value.get("architectures")
    encoders = [
        name
        for name in (architectures if isinstance(architectures, list) else ())
        if str(name).endswith("ForMaskedLM")
    ]
    require(
        not encoders,
        f"model type {as_name(kind)} is not listed, and its architecture is an encoder of texts",
        where=f"{where}: architectures",
        got=encoders[0] if encoders else None,
        expected=expected,
        kind=UnsupportedError,
    )
    read: set[str] = set()  # keys of parts that are known where the first key of the part is there
    for first_key, part_keys in PARTS:
        if value.get(first_key):
            read |= {name for key in part_keys for name in names_of(key)}
    for key, given in value.items():
        if not given or key in read:
            continue
        for pattern, part in UNKNOWN_PARTS.items():
            require(
                not re.fullmatch(pattern, str(key)[:200]),
                f"model type {as_name(kind)} is not listed, and this key is of {part}",
                where=f"{where}: {as_name(str(key))}",
                expected=expected,
                kind=UnsupportedError,
            )


def unlisted_keys(value: Mapping[str, Any]) -> dict[str, Key]:
    """The keys of a configuration that describe a decoder. Those of its width, depth, heads and
    vocabulary are required."""
    keys = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": Key(("feed_forward",), Size | None, None),
        # transformers 4 writes this key where it is not true
        "tie_word_embeddings": Key(("tied",), bool, True),
    }
    for first_key, part_keys in PARTS:
        if value.get(first_key):
            keys |= {key: needed(key, entry) for key, entry in part_keys.items()}
    for key, entry in OPTIONAL.items():
        given = [value[name] for name in names_of(key) if value.get(name) is not None]
        read_already = [fields for fields in (k.fields for k in keys.values()) if fields]
        known = {field for fields in read_already for field in fields}
        if given and not (set(entry.fields) <= known):
            keys[key] = entry
    if learned_positions(value):
        keys["max_position_embeddings"] = Key(POSITIONS, Size, 1024)
    return keys


def needed(key: str, entry: Key) -> Key:
    """A key of a known part, whose class is not known: sizes of heads have no default."""
    if entry.default is None or entry.default is ... or key.endswith(("kernel_dim", "d_conv")):
        return entry
    if key.endswith(("chunk_size", "expand", "n_groups")):
        return entry
    return required(f"size {key}", *entry.fields, kind=entry.type)


def leans(value: Mapping[str, Any]) -> bool:
    """Whether a configuration lacks sizes that a class may have: those of a decoder, or the number
    of heads of keys and values."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "intermediate_size", "num_key_value_heads")  # fmt: skip
    return any(all(value.get(name) is None for name in names_of(key)) for key in sizes)


def unlisted_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that other keys than sizes decide: norms, gates of the network, positions."""
    activation = next(
        (
            str(value[key])[:100].lower()
            for key in ("hidden_act", "activation_function", "hidden_activation", "activation")
            if value.get(key) is not None
        ),
        "silu",
    )
    layer_norms = [
        key
        for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")
        if value.get(key) is not None
    ]
    rms = value.get("rms_norm_eps") is not None or not layer_norms or bool(value.get("rmsnorm"))
    has_gate = any(word in activation for word in ("silu", "swish", "glu"))
    rms = rms or has_gate  # many name the RMSNorm's epsilon as that of a LayerNorm
    plain = "relu" in activation or (not rms and not has_gate)
    fields = LLAMA | {"norm": "rms" if rms else "layer", "gated": not plain}
    if not rms and not has_gate:
        biases = {field: True for name in BIASES for field in BIASES[name]}
        del biases["head_bias"]
        fields |= biases
    if learned_positions(value):
        fields["rotary"] = False
    return fields


def learned_positions(value: Mapping[str, Any]) -> bool:
    """Whether a decoder has a table of positions: where its configuration says so, or counts
    positions and has no key of rotary or other positions."""
    kind = str(value.get("position_embedding_type"))[:100]
    if kind in ("learned", "learned_absolute", "absolute"):
        return True
    others = any(re.match(r"rope|rotary|partial_rotary|alibi", str(key)) for key in value)
    return value.get("n_positions") is not None and not others


def not_understood(value: Mapping[str, Any], keys: Mapping[str, Key]) -> list[str]:
    """The keys of a configuration that may be of its blocks' structure, and that were not read."""
    read = {name for key in keys for name in names_of(key)} | OTHERWISE_READ
    return [
        as_name(str(key))
        for key, given in value.items()
        if given
        and not isinstance(given, float)
        and key not in read
        and STRUCTURAL.search(str(key)[:200])
        and not HARMLESS.search(str(key)[:200])
    ]


def taken_for_text(kind: str, t: Transformer, params: int) -> str:
    """A sentence that says what a configuration was taken for."""
    attention = f"{t.heads} heads of width {t.head_dim}, {t.kv_heads} of keys and values"
    if t.latent is not None:
        attention = f"latent attention of {t.heads} heads, rank {t.latent.keys}"
    mixers = {"D": "the gated delta rule", "M": "Mamba-2"}
    others = [
        f"{t.mixers.count(letter)} blocks of {name}"
        for letter, name in mixers.items()
        if letter in t.mixers
    ]
    network = f"{'gated' if t.gated else 'plain'} networks of width {t.feed_forward}"
    if t.experts is not None:
        e = t.experts
        network = f"{e.count} experts of width {e.width}, of which a token visits {e.active}"
        if e.shared:
            network += f", and shared ones of width {e.shared} together"
    norms = {"rms": "RMSNorm", "layer": "LayerNorm"}[t.norm]
    biases = [
        words
        for words, present in (
            ("attention", t.attention_bias), ("networks", t.feed_forward_bias),
        )
        if present
    ]  # fmt: skip
    tied = "tied to" if t.tied else "apart from"
    parts = [
        f"{t.layers} blocks",
        attention,
        *others,
        network,
        norms,
        f"biases of {' and '.join(biases)}" if biases else "no biases",
        f"a head {tied} the {t.vocabulary} tokens' table",
    ]
    return (
        f"{as_name(kind)} is no listed type and was taken by its keys for a decoder: "
        f"{'; '.join(parts)}; {params:,} parameters"
    )
