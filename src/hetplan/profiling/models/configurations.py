"""Hugging Face `config.json` files as models.

Nothing is downloaded and no remote code is loaded. A configuration is of a model type in `KEYS`.
The model's notes tell which keys were assumed. Keys that change no seconds or bytes are ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import create_model

from hetplan.errors import InputError, require
from hetplan.profiling.models.configuration_keys import (
    ALWAYS,
    CAPACITY,
    KEYS,
    TOWERS,
    WRAPPERS,
    Key,
)
from hetplan.profiling.models.configured_functions import function_of
from hetplan.profiling.models.encoders import clip_layers, t5_layers, vit_layers
from hetplan.profiling.models.transformer import Experts, Latent, Mamba, Transformer
from hetplan.profiling.models.zoo import ModelSpec, text_model
from hetplan.schema import Foreign, as_name, parse

# The default sequence is at most this long: contexts of 32k and more are for inference, and
# pre-training runs at a few thousand tokens.
LONGEST_DEFAULT_SEQUENCE = 4096
T5_DEFAULT_SEQUENCE = 512


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
    notes: list[str] = []
    kind, text_config = value.get("model_type"), value.get("text_config")
    if isinstance(kind, str) and kind in WRAPPERS and isinstance(text_config, dict):
        notes.append(f"{where}: the text model alone; encoders of images are left out")
        kind, value = WRAPPERS[kind], text_config
    require(
        kind is not None,
        "required key is missing",
        where=f"{where}: model_type",
        expected="the name of the model's class, as gpt2 or llama",
    )
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
    source = f"Hugging Face {kind} configuration"
    if kind == "vit":
        image, patch, labels = (sizes.pop(key) for key in ("image", "patch", "labels"))
        shape = shape_of(kind, sizes)
        chain = vit_layers(shape, image, patch, len(labels))
        return ModelSpec(
            name,
            source,
            sequence=None,
            build=lambda _: chain,
            fits=shape.tensor_degree_fits,
            notes=tuple(notes),
            encoder=shape,
        )
    if kind == "t5":
        decoders, buckets = sizes.pop("decoders"), sizes.pop("buckets")
        sizes["gated"] = sizes.pop("activation").startswith("gated-")
        shape = shape_of(kind, sizes)
        return ModelSpec(
            name,
            source,
            sequence=T5_DEFAULT_SEQUENCE,
            build=partial(t5_layers, shape, decoders, buckets),
            fits=shape.tensor_degree_fits,
            notes=tuple(notes),
        )
    sequence = min(sizes.pop("context"), LONGEST_DEFAULT_SEQUENCE)
    shape = shape_of(kind, sizes)
    shape = replace(shape, function=function_of(kind, value, shape))
    return text_model(name, source, sequence, shape, notes=tuple(notes))


def clip_from_config(value: dict[str, Any], name: str, where: str) -> ModelSpec:
    """CLIP: an encoder of images and one of texts. A sample is an image and its caption."""
    notes: list[str] = []
    clip = read_sizes(value, "clip", KEYS["clip"], where, notes)
    sizes_of = {
        tower: read_sizes(clip[tower], tower, keys, f"{where}: {tower}", notes)
        for tower, keys in TOWERS.items()
    }
    image, patch = (sizes_of["vision_config"].pop(size) for size in ("image", "patch"))
    vision = shape_of("vision_config", sizes_of["vision_config"])
    text = shape_of("text_config", sizes_of["text_config"])
    chain = clip_layers(vision, text, image, patch, clip["width"])
    return ModelSpec(
        name,
        "Hugging Face clip configuration",
        sequence=None,
        build=lambda _: chain,
        fits=lambda tensor: vision.tensor_degree_fits(tensor) and text.tensor_degree_fits(tensor),
        notes=tuple(notes),
    )


def read_sizes(
    value: dict[str, Any], kind: str, keys: Mapping[str, Key], where: str, notes: list[str]
) -> dict[str, Any]:
    """The checked sizes that a configuration gives, by field of `Transformer` (see `Key.fields`). A
    sentence about assumed values is added to `notes`."""
    config = parse_config(value, kind, keys, where)
    sizes = {field: config[key] for key, entry in keys.items() for field in entry.fields}
    if "decoders" in sizes and sizes["decoders"] is None:  # T5: as many as encoder layers
        sizes["decoders"] = sizes["layers"]
    if "hidden" in sizes:  # CLIP has no hidden size of its own: its two encoders have one each
        fill_sizes(sizes, where)
        check_sizes(sizes, where)
    assumed = []
    for key, entry in keys.items():
        # Where its default is None, the width of a head is hidden / heads, which nearly all files
        # leave out.
        usual_width = "head_dim" in entry.fields and entry.default is None
        if key in value or entry is CAPACITY or usual_width:
            continue
        assumed_value = config[key]
        if assumed_value is None:  # it follows from other sizes
            assumed_value = sizes[entry.fields[0]]
        assumed.append(f"{key} = {json.dumps(assumed_value)}")
    if assumed:
        notes.append(f"{where}: assumed, as transformers does: {', '.join(assumed)}")
    return sizes


def shape_of(kind: str, sizes: dict[str, Any]) -> Transformer:
    """The shape of these sizes, with the fields that all models of type `kind` share.

    Fields of a part, such as `experts.count`, are put together to that part.
    """
    for part, class_of_part in (("experts", Experts), ("latent", Latent), ("mamba", Mamba)):
        prefix = f"{part}."
        fields = [field for field in sizes if field.startswith(prefix)]
        values = {field.removeprefix(prefix): sizes.pop(field) for field in fields}
        sizes[part] = class_of_part(**values) if values else None
    if sizes["embedding_width"] == sizes["hidden"]:
        sizes["embedding_width"] = None
    return Transformer(**{**ALWAYS.get(kind, {}), **sizes})


def parse_config(
    value: dict[str, Any], kind: str, keys: Mapping[str, Key], where: str
) -> dict[str, Any]:
    """Key -> its checked value, or its default. Raises InputError where a required key is missing:
    with a default, another model would be planned."""
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


def fill_sizes(sizes: dict[str, Any], where: str) -> None:
    """Put in the sizes that follow from other sizes. Raises InputError where the width of a head is
    not given and does not follow."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    if "grouped" in sizes:  # Falcon: its new architecture has grouped heads and two norms
        grouped, single, parallel = (sizes.pop(key) for key in ("grouped", "single", "parallel"))
        if not grouped:
            sizes["kv_heads"] = 1 if single else heads
        sizes["block_norms"] = 1 if parallel and not grouped else 2
    if "latent.keys" in sizes:  # DeepSeek
        # n_shared_experts is a number of experts, `Experts.shared` their width together.
        sizes["experts.shared"] = (sizes["experts.shared"] or 0) * sizes["experts.width"]
        # Every head has keys of its own, which are computed from the latent ones.
        sizes["kv_heads"] = heads
        sizes["head_dim"] = sizes["latent.rope"] + sizes["latent.nope"]
    if sizes.get("head_dim") is None:
        require(
            hidden % heads == 0,
            "hidden size is not a multiple of the number of heads",
            where=where,
            got=hidden,
            expected=f"a multiple of {heads}",
        )
    usual = {
        "feed_forward": 4 * hidden,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "embedding_width": hidden,
    }
    sizes |= {field: size for field, size in usual.items() if sizes.get(field) is None}


def check_sizes(sizes: dict[str, Any], where: str) -> None:
    """Raise InputError where sizes contradict each other."""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    require(
        heads % kv_heads == 0,
        "number of heads is not a multiple of num_key_value_heads",
        where=where,
        got=heads,
        expected=f"a multiple of {kv_heads}",
    )
    pattern = sizes.get("pattern")
    require(
        not pattern or len(pattern) == sizes["layers"],
        "hybrid_override_pattern has another length than num_hidden_layers",
        where=where,
        got=len(pattern or ""),
        expected=str(sizes["layers"]),
    )
    patch, image = sizes.get("patch", 0), sizes.get("image", 0)
    require(
        patch <= image,
        "patch_size is too large",
        where=where,
        got=patch,
        expected=f"at most the image_size ({image})",
    )
    active, count = sizes.get("experts.active", 0), sizes.get("experts.count", 0)
    require(
        active <= count,
        "num_experts_per_tok is too large",
        where=where,
        got=active,
        expected=f"at most the number of experts ({count})",
    )
