"""Hugging Face `config.json` files as models: gpt2, llama, mistral, mixtral, opt and bert families.

Nothing is downloaded and no remote code is loaded. A file without an essential dimension is
refused; what it leaves to the defaults of `transformers` is told in the model's notes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.architecture import Transformer
from hetplan.profiling.configurations import DERIVED, FAMILIES, Config
from hetplan.profiling.zoo import ModelSpec, text_model
from hetplan.schema import parse

# Contexts of 32k and more are for inference; pre-training runs at a few thousand tokens.
LONGEST_DEFAULT_SEQUENCE = 4096


def name_of(path: str | os.PathLike[str]) -> str:
    """The file's name, or its folder's for one called config.json."""
    stem = Path(path).stem
    name = Path(path).resolve().parent.name if stem == "config" else stem
    return name or "model"


def from_config(value: Any, *, name: str, where: str = "config") -> ModelSpec:
    """The model that a parsed config.json describes."""
    if not isinstance(value, dict):
        raise InputError(
            "not an object", where=where, got=value, expected="a Hugging Face configuration"
        )
    kind = value.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = f"one of {', '.join(FAMILIES)}"
        place = f"{where}: model_type"
        raise InputError("model type is not supported", where=place, got=kind, expected=supported)
    schema, convert = FAMILIES[kind]
    check_keys(schema, value, kind, where)
    config = parse(schema, value, where=where)
    shape, context = convert(config)
    check_shape(shape, value, where)
    source = f"Hugging Face {kind} configuration"
    sequence = min(context, LONGEST_DEFAULT_SEQUENCE)
    return text_model(name[:200], source, sequence, shape, notes=assumptions(config, shape, where))


def check_keys(schema: type[Config], value: dict[str, Any], kind: str, where: str) -> None:
    """Raise InputError where an essential dimension is missing: a default would plan another
    model."""
    missing = [
        key
        for key, field in schema.model_fields.items()
        if field.is_required() and key not in value
    ]
    if not missing:
        return
    first, *others = missing
    also = f"; {', '.join(others)} missing too" if others else ""
    meaning = schema.model_fields[first].description
    expected = f"the {meaning}, which every {kind} configuration gives{also}"
    raise InputError("key is missing", where=f"{where}: {first}", expected=expected)


def assumptions(config: Config, shape: Transformer, where: str) -> tuple[str, ...]:
    """One line with the keys that the file leaves out and the values that stand in; none where it
    has all."""
    parts = []
    for key in type(config).model_fields:
        if key not in config.model_fields_set:
            value = getattr(config, key)
            if value is None and key in DERIVED:
                value = DERIVED[key](shape)
            parts.append(f"{key} = {json.dumps(value)}")
    return (f"{where}: assumed, as transformers does: {', '.join(parts)}",) if parts else ()


def check_shape(shape: Transformer, value: dict[str, Any], where: str) -> None:
    """Raise InputError where heads do not divide what they split, or more experts work than there
    are."""
    if (
        shape.head_dim * shape.heads != shape.hidden
        and value.get("head_dim", value.get("attn_size")) is None
    ):
        raise InputError(
            "hidden size is not a multiple of the number of heads",
            where=where,
            got=shape.hidden,
            expected=f"a multiple of {shape.heads}",
        )
    if shape.heads % shape.kv_heads:
        raise InputError(
            "number of heads is not a multiple of num_key_value_heads",
            where=where,
            got=shape.heads,
            expected=f"a multiple of {shape.kv_heads}",
        )
    if shape.experts and shape.experts.active > shape.experts.count:
        raise InputError(
            "num_experts_per_tok is too large",
            where=where,
            got=shape.experts.active,
            expected=f"at most num_local_experts ({shape.experts.count})",
        )
