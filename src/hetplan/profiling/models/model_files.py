"""Model files: Hugging Face `config.json` files, and traces of modules.

Nothing is downloaded and no remote code is loaded. Of a configuration (of a type in `KEYS`), keys
that the `transformers` classes would fill with the dimensions of one certain model are required
here; the others keep the defaults of those classes (their documentation, "Configuration"), and the
model's notes tell which were assumed. All that does not change a chain's cost is ignored.

A trace is JSON of format `hetplan-model`, written by `hetplan profile predict --factory`: a chain
of layers as they were counted. Sizes are in elements of `precision` and grow in straight lines with
the samples of a micro-batch; equal layers share one list of operators.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, create_model, model_validator

from hetplan.errors import InputError, require
from hetplan.files import read_json
from hetplan.profiling.models.encoders import clip_layers, t5_layers, vit_layers
from hetplan.profiling.models.operators import (
    TRACED,
    Counted,
    Layer,
    Precision,
    Saved,
)
from hetplan.profiling.models.transformer import Experts, Latent, Mamba, Transformer
from hetplan.profiling.models.zoo import BERT, LLAMA, ModelSpec, text_model
from hetplan.profiling.source_files import SourceFile
from hetplan.schema import (
    Count,
    Date,
    Document,
    Foreign,
    Name,
    NonNegative,
    PositiveCount,
    StrictModel,
    as_name,
    parse,
)

# Contexts of 32k and more are for inference; pre-training runs at a few thousand tokens.
LONGEST_DEFAULT_SEQUENCE = 4096

Size = Annotated[int, Field(ge=1, le=10**7)]
Pattern = Annotated[str, Field(pattern=r"^[M*E-]+$", max_length=4000)]
Layers = Annotated[int, Field(ge=1, le=4000)]  # a chain has at most 4096 layers


class Key(NamedTuple):
    """A key of a configuration: what it is of the shape (fields of `Transformer`, of its experts
    and latent vectors as `experts.count`, or `context`), its type, and the default of its class in
    transformers. Without a default the key is required, and said in words where it is missing."""

    fields: tuple[str, ...]
    type: Any
    default: Any = ...


def required(words: str, *fields: str, kind: Any = Size) -> Key:
    """A key that every configuration of its type gives."""
    return Key(fields, Annotated[kind, Field(description=words)])


VOCABULARY = required("number of tokens in the vocabulary", "vocabulary")
WIDTH = required("width of the hidden states", "hidden")
INNER = required("inner width of the feed-forward networks", "feed_forward")
DEPTH = required("number of blocks", "layers", kind=Layers)
HEADS = required("number of attention heads", "heads")
# What Llama, Mistral and Mixtral share; a size of None follows from others.
ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "head_dim": Key(("head_dim",), Size | None, None),
    "tie_word_embeddings": Key(("tied",), bool, False),
}
# Learned positions are the longest sequence, too.
POSITIONS = ("positions", "context")
# What Qwen, Gemma, Phi, OLMo and later models share with Llama.
LATER = {
    **ROTARY,
    "num_key_value_heads": Key(("kv_heads",), Size | None, None),
    "max_position_embeddings": Key(("context",), Size, 32768),
}
QKV_BIAS = Key(("attention_bias", "output_bias"), bool, False)
EXPERTS = required("number of experts in a block", "experts.count")
VISITED = required("number of experts that a token visits", "experts.active")
EXPERT_WIDTH = required("inner width of one expert", "experts.width")
QWEN_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "decoder_sparse_step": Key(("experts.every",), Size, 1),
}
GEMMA = {
    **LATER,
    "head_dim": Key(("head_dim",), Size, 256),
    "num_key_value_heads": Key(("kv_heads",), Size, 4),
    "sliding_window": Key(("window",), Size | None, 4096),
    "attention_bias": QKV_BIAS,
    "tie_word_embeddings": Key(("tied",), bool, True),
}
DEEPSEEK = {
    **LATER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": VISITED,
    "moe_intermediate_size": EXPERT_WIDTH,
    "n_shared_experts": Key(("experts.shared",), Size | None, None),
    "first_k_dense_replace": Key(("experts.dense",), Count, 0),
    "moe_layer_freq": Key(("experts.every",), Size, 1),
    "q_lora_rank": Key(("latent.query",), Size | None, None),
    "kv_lora_rank": required("rank of the latent keys and values", "latent.keys"),
    "qk_rope_head_dim": required("rotated width of a key", "latent.rope"),
    "qk_nope_head_dim": required("width of a key that is not rotated", "latent.nope"),
    "v_head_dim": required("width of a head's values", "latent.value"),
}

LABELS = Key(("labels",), dict[str, str], {"0": "LABEL_0", "1": "LABEL_1"})
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "image_size": Key(("image",), Size, 224),
    "patch_size": Key(("patch",), Size, 16),
}
# CLIP's towers: where they stand in its configuration, and their keys.
TOWERS: dict[str, dict[str, Key]] = {
    "vision_config": VISION | {"patch_size": Key(("patch",), Size, 32)},
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "max_position_embeddings": Key(("positions",), Size, 77),
    },
}

# model type -> keys of its configuration.
KEYS: dict[str, dict[str, Key]] = {
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "n_positions": Key(POSITIONS, Size, 1024),
        "n_inner": Key(("feed_forward",), Size | None, None),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "llama": {
        **ROTARY,
        "num_key_value_heads": Key(("kv_heads",), Size | None, None),
        "max_position_embeddings": Key(("context",), Size, 2048),
        "attention_bias": Key(("attention_bias", "output_bias"), bool, False),
        "mlp_bias": Key(("feed_forward_bias",), bool, False),
    },
    "mistral": {
        **ROTARY,
        "num_key_value_heads": Key(("kv_heads",), Size | None, 8),
        "max_position_embeddings": Key(("context",), Size, 131072),
        # None attends to everything, as from version 0.2 on
        "sliding_window": Key(("window",), Size | None, 4096),
    },
    "mixtral": {
        **ROTARY,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "num_key_value_heads": Key(("kv_heads",), Size | None, 8),
        "max_position_embeddings": Key(("context",), Size, 131072),
        "sliding_window": Key(("window",), Size | None, None),
    },
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "ffn_dim": INNER,
        "num_attention_heads": HEADS,
        "max_position_embeddings": Key(POSITIONS, Size, 2048),
        # post-norm models have no final norm
        "do_layer_norm_before": Key(("final_norm",), bool, True),
        "word_embed_proj_dim": Key(("embedding_width",), Size | None, None),
        "enable_bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "bert": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": Key(POSITIONS, Size, 512),
        "type_vocab_size": Key(("types",), Size, 2),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "qwen2": LATER,
    "qwen2_moe": {
        **LATER,
        **QWEN_EXPERTS,
        "shared_expert_intermediate_size": Key(("experts.shared",), Count, 5632),
    },
    "qwen3": {**LATER, "attention_bias": QKV_BIAS},
    "qwen3_moe": {**LATER, **QWEN_EXPERTS, "attention_bias": QKV_BIAS},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "sliding_window_pattern": Key(("full_every",), Size, 6)},
    "phi3": {**LATER, "sliding_window": Key(("window",), Size | None, None)},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {
        **LATER,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "sliding_window": Key(("window",), Size | None, 128),
    },
    "llama4_text": {
        **LATER,
        "intermediate_size": required(
            "inner width of one expert", "experts.width", "experts.shared"
        ),
        "intermediate_size_mlp": required("inner width of a dense network", "feed_forward"),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "interleave_moe_layer_step": Key(("experts.every",), Size, 1),
        "attention_chunk_size": Key(("window",), Size | None, 8192),
    },
    "olmo": {**LATER, "attention_bias": QKV_BIAS},
    "olmo2": {**LATER, "attention_bias": QKV_BIAS},
    "starcoder2": {
        **LATER,
        "sliding_window": Key(("window",), Size | None, None),
        "use_bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "falcon": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": Key(("feed_forward",), Size | None, None),
        "num_kv_heads": Key(("kv_heads",), Size | None, None),
        "max_position_embeddings": Key(("context",), Size, 2048),
        "bias": Key(("attention_bias", "output_bias", "feed_forward_bias"), bool, False),
        "new_decoder_architecture": Key(("grouped",), bool, False),
        "multi_query": Key(("single",), bool, True),
        "parallel_attn": Key(("parallel",), bool, True),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "nemotron_h": {
        **LATER,
        "hybrid_override_pattern": required(
            "kind of each block, as M, *, - or E", "pattern", kind=Pattern
        ),
        "mamba_num_heads": Key(("mamba.heads",), Size, 128),
        "mamba_head_dim": Key(("mamba.head_dim",), Size, 64),
        "n_groups": Key(("mamba.groups",), Size, 8),
        "ssm_state_size": Key(("mamba.state",), Size, 128),
        "conv_kernel": Key(("mamba.kernel",), Size, 4),
        "chunk_size": Key(("mamba.chunk",), Size, 128),
        "n_routed_experts": Key(("experts.count",), Size, 8),
        "num_experts_per_tok": Key(("experts.active",), Size, 2),
        "moe_intermediate_size": Key(("experts.width",), Size, 7688),
        "moe_shared_expert_intermediate_size": Key(("experts.shared",), Count, 7688),
        "moe_latent_size": Key(("experts.latent",), Size | None, None),
    },
    "vit": VISION | {"id2label": LABELS},
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": required("width of one attention head", "head_dim"),
        "d_ff": INNER,
        "num_layers": DEPTH,
        "num_heads": HEADS,
        "num_decoder_layers": Key(("decoders",), Layers | None, None),
        "relative_attention_num_buckets": Key(("buckets",), Size, 32),
        "feed_forward_proj": Key(("activation",), str, "relu"),
        "tie_word_embeddings": Key(("tied",), bool, True),
    },
    "clip": {
        "projection_dim": Key(("width",), Size, 512),
        **{tower: Key((tower,), dict[str, Any], {}) for tower in TOWERS},
    },
    # calculon's model description (Isaev et al. 2023), with a vocabulary, which it leaves out:
    # GPT blocks whose heads may be wider than hidden / heads
    "calculon": {
        "vocab_size": VOCABULARY,
        "hidden": WIDTH,
        "feedforward": INNER,
        "seq_size": Key(
            POSITIONS, Annotated[Size, Field(description="number of tokens of a sample")]
        ),
        "attn_heads": HEADS,
        "attn_size": required("width of one attention head", "head_dim"),
        "num_blocks": DEPTH,
    },
}
# Megatron-LM's key, which transformers does not have.
CAPACITY = Key(("experts.capacity",), Annotated[float, Field(gt=0, le=1000)] | None, None)
for keys in KEYS.values():
    if any("experts.count" in key.fields for key in keys.values()):
        keys["moe_expert_capacity_factor"] = CAPACITY
CALCULON_KEYS = tuple(key for key in KEYS["calculon"] if key != "vocab_size")

IMAGES: dict[str, Any] = {"vocabulary": 0, "dropout": False}
# model type -> what all its models have, where that is not GPT-2's.
ALWAYS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "opt": {"position_offset": 2},
    "bert": BERT,
    "qwen2": {**LLAMA, "attention_bias": True},
    "qwen2_moe": {**LLAMA, "attention_bias": True},
    "qwen3": {**LLAMA, "qk_norm": "head"},
    "qwen3_moe": {**LLAMA, "qk_norm": "head"},
    "gemma2": {**LLAMA, "block_norms": 4, "full_every": 2},
    "gemma3_text": {**LLAMA, "block_norms": 4, "qk_norm": "head"},
    "phi3": LLAMA,
    "deepseek_v2": LLAMA,
    "deepseek_v3": LLAMA,
    "gpt_oss": {
        **LLAMA,
        "attention_bias": True,
        "output_bias": True,
        "feed_forward_bias": True,
        "full_every": 2,
    },
    "llama4_text": {**LLAMA, "full_every": 4},
    "olmo": {**LLAMA, "norm": "pixel"},  # its LayerNorm has no parameters
    "olmo2": {**LLAMA, "qk_norm": "all"},
    "starcoder2": {"rotary": True, "dropout": False},
    "falcon": {"rotary": True, "dropout": False},
    "nemotron_h": {**LLAMA, "gated": False, "rotary": False},  # squared ReLU
    "vit": IMAGES,
    "t5": {**LLAMA, "gated": False, "rotary": False, "dropout": True},
    "vision_config": IMAGES,
    "text_config": {"dropout": False},
}
# Wrappers of a text model with encoders of images, which are left out.
WRAPPERS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}


def load_file(path: Path) -> ModelSpec:
    """A traced model, or a Hugging Face configuration, whichever the file is. A configuration is
    called after its file, or after its folder where that is config.json."""
    value, where = read_json(path), str(path)
    if isinstance(value, dict) and value.get("format") == FORMAT:
        described = ModelFile.parsed(value, where=where).spec()
    else:
        name = path.resolve().parent.name if path.stem == "config" else path.stem
        described = from_config(value, name=name, where=where)
    return replace(described, file=SourceFile.of(path))


def from_config(value: Any, *, name: str, where: str = "config") -> ModelSpec:
    """The model that a parsed config.json describes."""
    require(
        isinstance(value, dict),
        "not an object",
        where=where,
        got=value,
        expected="a Hugging Face configuration",
    )
    name = as_name(name) or "model"
    kind, notes, inner = value.get("model_type"), [], value.get("text_config")
    if isinstance(kind, str) and kind in WRAPPERS and isinstance(inner, dict):
        notes.append(f"{where}: the text model alone; encoders of images are left out")
        kind, value = WRAPPERS[kind], inner
    require(
        isinstance(kind, str) and kind in KEYS,
        "model type is not supported",
        where=f"{where}: model_type",
        got=kind,
        expected=f"one of {', '.join((*KEYS, *WRAPPERS))}; any torch module goes by "
        "`hetplan profile predict --factory MODULE:FUNCTION`",
    )
    if kind == "clip":
        return clip_from_config(value, name, where)
    sizes = read_sizes(value, kind, KEYS[kind], where, notes)
    source, own = f"Hugging Face {kind} configuration", tuple(notes)
    if kind == "vit":
        image, patch, labels = (sizes.pop(key) for key in ("image", "patch", "labels"))
        shape = shape_of(kind, sizes)
        chain = vit_layers(shape, image, patch, len(labels))
        fits = shape.tensor_degree_fits
        return ModelSpec(name, source, None, lambda _: chain, fits, None, own, encoder=shape)
    if kind == "t5":
        decoders, buckets = sizes.pop("decoders"), sizes.pop("buckets")
        sizes["gated"] = sizes.pop("activation").startswith("gated-")
        shape = shape_of(kind, sizes)
        build = partial(t5_layers, shape, decoders, buckets)
        return ModelSpec(name, source, 512, build, shape.tensor_degree_fits, None, own)
    sequence = min(sizes.pop("context"), LONGEST_DEFAULT_SEQUENCE)
    return text_model(name, source, sequence, shape_of(kind, sizes), notes=own)


def clip_from_config(value: dict[str, Any], name: str, where: str) -> ModelSpec:
    """CLIP's two towers; a sample is an image and its caption."""
    notes: list[str] = []
    own = read_sizes(value, "clip", KEYS["clip"], where, notes)
    towers = {
        key: read_sizes(own[key], key, keys, f"{where}: {key}", notes)
        for key, keys in TOWERS.items()
    }
    image, patch = (towers["vision_config"].pop(size) for size in ("image", "patch"))
    vision, text = (shape_of(key, sizes) for key, sizes in towers.items())
    chain = clip_layers(vision, text, image, patch, own["width"])
    return ModelSpec(
        name,
        "Hugging Face clip configuration",
        None,
        lambda _: chain,
        lambda t: vision.tensor_degree_fits(t) and text.tensor_degree_fits(t),
        notes=tuple(notes),
    )


def read_sizes(
    value: dict[str, Any], kind: str, keys: Mapping[str, Key], where: str, notes: list[str]
) -> dict[str, Any]:
    """By field what the keys say, checked; what is assumed goes to the notes."""
    config = parse_config(value, kind, keys, where)
    sizes = {field: config[key] for key, entry in keys.items() for field in entry.fields}
    if sizes.get("decoders", 0) is None:
        sizes["decoders"] = sizes["layers"]
    if "hidden" in sizes:
        fill_sizes(sizes)
        check_sizes(sizes, config, where)
    left_out = {
        key: entry.fields[0]
        for key, entry in keys.items()
        if key not in value and entry is not CAPACITY
    }
    assumed = [
        f"{key} = {json.dumps(sizes[field] if config[key] is None else config[key])}"
        for key, field in left_out.items()
    ]
    if assumed:
        notes.append(f"{where}: assumed, as transformers does: {', '.join(assumed)}")
    return sizes


def shape_of(kind: str, sizes: dict[str, Any]) -> Transformer:
    """The shape of these sizes, with what all models of the kind have."""
    for part, kind_of_part in (("experts", Experts), ("latent", Latent), ("mamba", Mamba)):
        fields = [field for field in sizes if field.startswith(f"{part}.")]
        own = {field.removeprefix(f"{part}."): sizes.pop(field) for field in fields}
        sizes[part] = kind_of_part(**own) if own else None
    if sizes["embedding_width"] == sizes["hidden"]:
        sizes["embedding_width"] = None
    return Transformer(**{**ALWAYS.get(kind, {}), **sizes})


def parse_config(
    value: dict[str, Any], kind: str, keys: Mapping[str, Key], where: str
) -> dict[str, Any]:
    """The keys that are read, checked. Raises InputError where an essential dimension is missing: a
    default would plan another model."""
    fields: dict[str, Any] = {key: (entry.type, entry.default) for key, entry in keys.items()}
    schema = create_model(kind, __base__=Foreign, **fields)
    missing = [key for key, entry in keys.items() if entry.default is ... and key not in value]
    if missing:
        first, *others = missing
        also = f"; {', '.join(others)} missing too" if others else ""
        raise InputError(
            "key is missing",
            where=f"{where}: {first}",
            expected=f"the {schema.model_fields[first].description}, which every {kind} "
            f"configuration gives{also}",
        )
    return parse(schema, value, where=where).model_dump()


def fill_sizes(sizes: dict[str, Any]) -> None:
    """Put in the sizes that follow from others."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "grouped" in sizes:  # Falcon
        grouped, single, parallel = (sizes.pop(key) for key in ("grouped", "single", "parallel"))
        sizes["kv_heads"] = sizes["kv_heads"] if grouped else 1 if single else heads
        sizes["block_norms"] = 1 if parallel and not grouped else 2
    if "latent.keys" in sizes:  # DeepSeek counts shared experts, and all heads have keys
        sizes["experts.shared"] = (sizes["experts.shared"] or 0) * sizes["experts.width"]
        sizes |= {"kv_heads": heads, "head_dim": sizes["latent.rope"] + sizes["latent.nope"]}
    usual = {
        "feed_forward": 4 * hidden,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "embedding_width": hidden,
    }
    sizes |= {field: size for field, size in usual.items() if sizes.get(field) is None}


def check_sizes(sizes: dict[str, Any], config: dict[str, Any], where: str) -> None:
    """Raise InputError where heads do not divide what they split, or more experts work than there
    are."""
    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    active, count = sizes.get("experts.active", 0), sizes.get("experts.count", 0)
    free = config.get("head_dim", config.get("attn_size")) is not None
    for wrong, what, got, expected in (
        (hidden % heads and not free, "hidden size is not a multiple of the number of heads",
         hidden, f"a multiple of {heads}"),
        (heads % kv_heads, "number of heads is not a multiple of num_key_value_heads",
         heads, f"a multiple of {kv_heads}"),
        (len(sizes.get("pattern") or "M" * sizes["layers"]) != sizes["layers"],
         "hybrid_override_pattern has another length than num_hidden_layers",
         len(sizes.get("pattern", "")), str(sizes["layers"])),
        (sizes.get("patch", 0) > sizes.get("image", 0), "patch_size is too large",
         sizes.get("patch"), f"at most the image_size ({sizes.get('image')})"),
        (active > count, "num_experts_per_tok is too large",
         active, f"at most the number of experts ({count})"),
    ):  # fmt: skip
        require(not wrong, what, where=where, got=got, expected=expected)


FORMAT = "hetplan-model"


class LayerEntry(StrictModel):
    """params, tied_params: numbers of them. output, saved: elements per sample. operators: which of
    the lists."""

    name: Name
    params: Count
    tied_params: Count = 0
    output: NonNegative
    saved: NonNegative
    operators: Count


class ModelFile(Document):
    """A traced model. samples: the micro-batches that were traced."""

    format: Literal["hetplan-model"] = "hetplan-model"
    version: Literal[1] = 1
    name: Name
    source: Name
    date: Date
    sequence: PositiveCount | None = None
    precision: Precision
    layers: list[LayerEntry] = Field(min_length=1, max_length=4096)
    operator_lists: list[list[Counted]] = Field(min_length=1)

    @model_validator(mode="after")
    def _lists_are_there(self) -> Self:
        for i, layer in enumerate(self.layers):
            require(
                layer.operators < len(self.operator_lists),
                f"layers[{i}].operators is {layer.operators}, expected less than the number of "
                f"lists ({len(self.operator_lists)})",
            )
        return self

    def chain(self) -> tuple[Layer, ...]:
        """As layers."""
        last = len(self.layers) - 1
        return tuple(
            Layer(
                name=layer.name,
                kind=TRACED if 0 < i < last else "traced-end",
                params=layer.params,
                operators=tuple(self.operator_lists[layer.operators]),
                output=round(layer.output),
                saved=(Saved("saved for backward", round(layer.saved), split=False),),
                tied_params=layer.tied_params,
            )
            for i, layer in enumerate(self.layers)
        )

    def without_rule(self) -> Mapping[str, int]:
        """Operators that no rule describes, with how often they are called in both passes."""
        return dict(
            Counter(
                op.name
                for layer in self.layers
                for op in self.operator_lists[layer.operators]
                if not op.ruled
            ).most_common()
        )

    def spec(self) -> ModelSpec:
        """As a model that can be loaded; it has no other sequence length, and no tensor
        parallelism."""
        layers, own = self.chain(), self.sequence

        def build(sequence: int) -> tuple[Layer, ...]:
            require(
                own is None or sequence == own,
                "was traced at another sequence length",
                where=self.name,
                got=sequence,
                expected=str(own),
            )
            return layers

        missing = ", ".join(f"{name} ({count})" for name, count in self.without_rule().items())
        note = (
            f"{self.name}: no rule for {missing}: counted as the memory that they move"
            if missing
            else ""
        )
        return ModelSpec(
            self.name,
            self.source,
            own,
            build,
            lambda tensor: tensor == 1,
            notes=tuple(filter(None, (note,))),
        )
