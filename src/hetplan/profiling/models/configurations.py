"""Hugging Face `config.json` files as models.

Nothing is downloaded and no remote code is loaded. Configurations of listed types (`KNOWN`) are
read by their classes' names and defaults; a decoder of any other type is read by its keys
(`unlisted_types`). The model's notes tell which keys were assumed. Keys that change no seconds or
bytes are not looked at.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hetplan.errors import InputError, require, short_repr
from hetplan.profiling.models.class_defaults import class_defaults, installed_defaults
from hetplan.profiling.models.configuration_keys import (
    ALWAYS,
    CAPACITY,
    KEYS,
    TOWERS,
    Key,
    names_of,
    takes_nothing,
)
from hetplan.profiling.models.configured_functions import function_of
from hetplan.profiling.models.decoder_types import DECODER_ALWAYS, DECODER_KEYS
from hetplan.profiling.models.derived_sizes import check_sizes, derive
from hetplan.profiling.models.encoders import clip_layers, t5_layers, vit_layers
from hetplan.profiling.models.text_parts import TextPart, text_part
from hetplan.profiling.models.transformer import (
    Delta,
    Experts,
    Latent,
    Mamba,
    Reaching,
    Transformer,
    transformer_layers,
)
from hetplan.profiling.models.unlisted_types import (
    check_describable,
    leans,
    not_understood,
    taken_for_text,
    unlisted_fields,
    unlisted_keys,
)
from hetplan.profiling.models.zoo import ModelSpec, text_model
from hetplan.schema import as_name, input_error

# The default sequence is at most this long: contexts of 32k and more are for inference, and
# pre-training runs at a few thousand tokens.
LONGEST_DEFAULT_SEQUENCE = 4096
T5_DEFAULT_SEQUENCE = 512
# Keys with the number of layers of multi-token prediction.
PREDICTIONS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
)
# model type -> keys of its configuration, and the fields that all models of the type share
KNOWN: dict[str, dict[str, Key]] = KEYS | DECODER_KEYS
SHARED_FIELDS: dict[str, dict[str, Any]] = ALWAYS | DECODER_ALWAYS
for keys_of_type in KNOWN.values():
    if any("experts.count" in key.fields for key in keys_of_type.values()):
        keys_of_type["moe_expert_capacity_factor"] = CAPACITY


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
    part = text_part(value, where)
    notes = list(part.notes)
    notes += predictions_left_out(part)
    if part.kind not in KNOWN:
        part = part_by_class(part, notes)
    kind = part.kind
    if kind == "clip":
        return clip_from_config(part.value, name, where)
    if kind not in KNOWN:
        return unlisted_model(part, name, notes)
    sizes = read_sizes(
        part.value, kind, KNOWN[kind], part.where, notes, leans_on=part.stated if part.leans else ""
    )
    source = f"Hugging Face {kind} configuration"
    if kind == "vit":
        image, patch, labels = (sizes.pop(key) for key in ("image", "patch", "labels"))
        shape = shape_of(sizes)
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
        shape = shape_of(sizes)
        return ModelSpec(
            name,
            source,
            sequence=T5_DEFAULT_SEQUENCE,
            build=partial(t5_layers, shape, decoders, buckets),
            fits=shape.tensor_degree_fits,
            notes=tuple(notes),
        )
    sequence = min(sizes.pop("context", LONGEST_DEFAULT_SEQUENCE), LONGEST_DEFAULT_SEQUENCE)
    shape = shape_of(sizes)
    # a type that is listed under another name may have a class with other defaults
    function = function_of(part.stated, part.value, shape) or function_of(kind, part.value, shape)
    shape = replace(shape, function=function)
    spec = text_model(name, source, sequence, shape, notes=tuple(notes))
    return replace(spec, kind=part.stated)


def part_by_class(part: TextPart, notes: list[str]) -> TextPart:
    """The text part of a type that is not listed, as that of the listed type whose class of
    transformers its `architectures` name, with a note; without such a class as it is."""
    architectures = part.value.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        model = re.fullmatch(r"(\w{1,60})For(?:CausalLM|ConditionalGeneration)", str(name)[:100])
        named = None if model is None else classes_of_listed_types().get(model[1].lower())
        if named is not None:
            stated = as_name(part.stated)
            notes.append(
                f"{part.where}: {stated} is no listed type and was taken for {named}, whose class "
                f"{as_name(str(name))} it names"
            )
            return replace(part, kind=named)
    return part


@cache
def classes_of_listed_types() -> dict[str, str]:
    """Name of a listed type's class in small letters, without `ForCausalLM` -> the type. The names
    of classes are those of types without underscores."""
    return {kind.replace("_", ""): kind for kind in KNOWN}


def predictions_left_out(part: TextPart) -> list[str]:
    """A note on layers of multi-token prediction, which neither transformers builds nor hetplan
    plans; none where the configuration has none."""
    for key in PREDICTIONS:
        count = part.value.get(key)
        if isinstance(count, int) and count > 0:
            layers = f"{key} = {short_repr(count)}"
            text = f"without its layers of multi-token prediction ({layers}), as transformers"
            return [f"{part.where}: {text} builds the model"]
    return []


def unlisted_model(part: TextPart, name: str, notes: list[str]) -> ModelSpec:
    """The decoder of a type that is not listed, by its keys. A note says which sizes were read from
    them."""
    check_describable(part.value, part.kind, part.where)
    defaults: dict[str, Any] = {}
    if part.leans and leans(part.value):
        defaults = installed_defaults(part.stated)
    left_out = [key for key in defaults if key not in part.value]
    value = defaults | part.value
    keys = unlisted_keys(value)
    shared = unlisted_fields(value)
    no_width = all(value.get(name) is None for name in names_of("intermediate_size"))
    require(
        not (no_width and shared["gated"] and "num_experts" not in keys),
        "key is missing",
        where=f"{part.where}: intermediate_size",
        expected="the inner width of a gated network, for which no number of hidden ones is usual",
    )
    sizes = read_sizes(value, part.kind, keys, part.where, [], shared=shared)
    sequence = min(sizes.pop("context", LONGEST_DEFAULT_SEQUENCE), LONGEST_DEFAULT_SEQUENCE)
    shape = shape_of(sizes)
    params = sum(layer.params for layer in transformer_layers(shape, 1))
    notes.append(f"{part.where}: {taken_for_text(part.kind, shape, params)}")
    assumed = [f"{key} = {json.dumps(value[key])}" for key in keys if key in left_out]
    if no_width and shape.experts is None:
        assumed.append(f"intermediate_size = {shape.feed_forward}")
    if not any(name in value for name in names_of("tie_word_embeddings")):
        assumed.append("tie_word_embeddings = true")
    if assumed:
        notes.append(f"{part.where}: assumed, as transformers does: {', '.join(assumed)}")
    unread = not_understood(part.value, keys)
    if unread:
        notes.append(f"{part.where}: keys that were not understood: {', '.join(unread[:20])}")
    source = f"Hugging Face {as_name(part.kind)} configuration, by its keys"
    return text_model(name, source, sequence, shape, notes=tuple(notes))


def clip_from_config(value: dict[str, Any], name: str, where: str) -> ModelSpec:
    """CLIP: an encoder of images and one of texts. A sample is an image and its caption."""
    notes: list[str] = []
    clip = read_sizes(value, "clip", KEYS["clip"], where, notes)
    sizes_of = {
        tower: read_sizes(clip[tower], tower, keys, f"{where}: {tower}", notes, leans_on=tower)
        for tower, keys in TOWERS.items()
    }
    image, patch = (sizes_of["vision_config"].pop(size) for size in ("image", "patch"))
    vision = shape_of(sizes_of["vision_config"])
    text = shape_of(sizes_of["text_config"])
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
    value: dict[str, Any],
    kind: str,
    keys: Mapping[str, Key],
    where: str,
    notes: list[str],
    *,
    leans_on: str = "",
    shared: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The checked sizes that a configuration gives, by field of `Transformer` (see `Key.fields`). A
    sentence about assumed values is added to `notes`.

    leans_on: the type of whose class the configuration may leave out sizes; empty: it may not.
    shared: fields that all models of the type have; None: those of `SHARED_FIELDS`.
    """
    given = own_names(value, keys)
    config = parse_config(given, kind, keys, where, leans_on=leans_on)
    always = SHARED_FIELDS.get(kind, {}) if shared is None else shared
    sizes = dict(always)
    for key, entry in keys.items():
        sizes |= dict.fromkeys(entry.fields, config[key])
    if "num_key_value_heads" in keys and "num_key_value_heads" not in given:
        # A class's own number may not divide the heads of this file: each head has its own then.
        default = sizes.get("kv_heads")
        if default and sizes["heads"] % default:
            sizes["kv_heads"] = None
    if "decoders" in sizes and sizes["decoders"] is None:  # T5: as many as encoder layers
        sizes["decoders"] = sizes["layers"]
    if "hidden" in sizes:  # CLIP has no hidden size of its own: its two encoders have one each
        derive(sizes, where)
        check_sizes(sizes, where)
    assumed = []
    for key, entry in keys.items():
        unneeded = entry is CAPACITY or not set(entry.fields) & set(sizes)
        # Where the class has no default, the width of a head is hidden / heads, which nearly all
        # files leave out.
        usual_width = "head_dim" in entry.fields and config[key] is None
        follows = "kv_heads" in entry.fields and "latent.keys" in sizes
        if key in given or unneeded or usual_width or follows:
            continue
        assumed_value = config[key]
        if assumed_value is None or entry.fields == ("kv_heads",):  # it follows from other sizes
            assumed_value = sizes[entry.fields[0]]
        assumed.append(f"{key} = {json.dumps(assumed_value)}")
    if assumed:
        notes.append(f"{where}: assumed, as transformers does: {', '.join(assumed)}")
    return sizes


def own_names(value: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """The values of a configuration by the names of its type's class. A null that the class does
    not take is left out, as if the file had no such key."""
    given: dict[str, Any] = {}
    for key, entry in keys.items():
        present = [name for name in names_of(key) if name in value and usable(value[name], entry)]
        # a null counts only where no other name has a value
        filled = [name for name in present if value[name] is not None]
        if present:
            given[key] = value[(filled or present)[0]]
    return given


def usable(value: Any, entry: Key) -> bool:
    """Whether a value counts as given: every value does but a null where the key takes none."""
    return value is not None or takes_nothing(entry) or entry.default is ...


def shape_of(sizes: dict[str, Any]) -> Transformer:
    """The shape of these sizes. Fields of a part, such as `experts.count`, are put together to that
    part."""
    classes_of_parts = (
        ("experts", Experts),
        ("latent", Latent),
        ("mamba", Mamba),
        ("delta", Delta),
        ("reaching", Reaching),
    )
    for part, class_of_part in classes_of_parts:
        prefix = f"{part}."
        fields = [field for field in sizes if field.startswith(prefix)]
        values = {field.removeprefix(prefix): sizes.pop(field) for field in fields}
        sizes[part] = class_of_part(**values) if values else None
    if sizes["embedding_width"] == sizes["hidden"]:
        sizes["embedding_width"] = None
    return Transformer(**sizes)


def parse_config(
    given: dict[str, Any], kind: str, keys: Mapping[str, Key], where: str, *, leans_on: str
) -> dict[str, Any]:
    """Key -> its checked value, or its default. Raises InputError where a required key is missing,
    unless the configuration may lean on its class: with a default, another model would be
    planned."""
    defaults = class_defaults(leans_on or kind) or class_defaults(kind)
    values: dict[str, Any] = {}
    missing = []
    for key, entry in keys.items():
        if key in given:
            values[key] = checked(given[key], entry, key, where)
        elif entry.default is not ... or (leans_on and key in defaults):
            values[key] = defaults.get(key, entry.default)
        else:
            missing.append(key)
    if missing:
        first, *others = missing
        also = f"; {', '.join(others)} missing too" if others else ""
        raise InputError(
            "key is missing",
            where=f"{where}: {first}",
            expected=f"the {description(keys[first])}, without which the size of this "
            f"{as_name(kind)} model is not known{also}",
        )
    return values


def checked(value: Any, entry: Key, key: str, where: str) -> Any:
    """The value of a key, as the key's type has it. Raises InputError for any other value."""
    try:
        return adapter(entry.type).validate_python(value)
    except ValidationError as error:
        raise input_error(error, where=where, prefix=[key]) from None


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The validator of a key's type."""
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def description(entry: Key) -> str:
    """The meaning of a required key, in words."""
    for mark in get_args(entry.type):
        words = getattr(mark, "description", None)
        if words:
            return str(words)
    raise AssertionError(entry)
