"""The defaults of the configuration classes of `transformers`, by model type.

A configuration inside another one is written without the values that are its class's defaults.
`class_defaults.json` has these values for the listed types, as tests/fakes/small_models.py wrote
them from the release that the file names.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

# Classes whose name is not that of the key under which their configuration stands.
CLASSES = {"vision_config": "clip_vision_model", "text_config": "clip_text_model"}


@cache
def stored() -> dict[str, dict[str, Any]]:
    """Model type -> key -> default, of the listed types."""
    text = Path(__file__).with_name("class_defaults.json").read_text(encoding="utf-8")
    defaults: dict[str, dict[str, Any]] = json.loads(text)["defaults"]
    return defaults


def class_defaults(kind: str) -> dict[str, Any]:
    """Key -> default of the class of a type; empty where it is not known."""
    return stored().get(CLASSES.get(kind, kind), {})
