"""The defaults of the configuration classes of `transformers`, by model type.

A configuration inside another one is written without the values that are its class's defaults.
`class_defaults.json` has these values for the listed types, and those of keys that say what a model
computes, as tests/fakes/small_models.py wrote
them from the release that the file names. Of other types they come from transformers where it is
installed.
"""

import importlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

# Classes whose name is not that of the key under which their configuration stands.
CLASSES = {
    "vision_config": "clip_vision_model",
    "text_config": "clip_text_model",
    "calculon": "gpt2",
    "kimi_k2": "deepseek_v3",
}


@cache
def stored() -> dict[str, dict[str, dict[str, Any]]]:
    """The file: `defaults` of sizes and `functions` of what a model computes, each of them model
    type -> key -> default."""
    text = Path(__file__).with_name("class_defaults.json").read_text(encoding="utf-8")
    tables: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return tables


def class_defaults(kind: str) -> dict[str, Any]:
    """Key -> default of the class of a type, of keys of sizes; empty where it is not known."""
    return stored()["defaults"].get(CLASSES.get(kind, kind), {})


def function_defaults(kind: str) -> dict[str, Any]:
    """Key -> default of the class of a type, of keys that say what a model computes, under the
    names of `configured_functions`; empty where it is not known."""
    return stored()["functions"].get(CLASSES.get(kind, kind), {})


@cache
def installed_defaults(kind: str) -> dict[str, Any]:
    """Key -> default of the class that the installed transformers has for a type. Empty without
    transformers, for a type that it does not have, and for a class that it cannot make."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    try:
        classes = importlib.import_module("transformers.models.auto.configuration_auto")
        config_class = classes.CONFIG_MAPPING[kind]
        values = config_class().to_dict()
    except (ImportError, LookupError, AttributeError, TypeError, ValueError):
        return {}
    # What an object computes from its other sizes differs in a file with other sizes.
    return {key: getattr(config_class, key) for key in values if hasattr(config_class, key)}
