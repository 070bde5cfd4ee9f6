"""What a document breaks of a JSON schema: the part of JSON Schema that tests/files uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def complaints(
    value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], at: str = "$"
) -> Iterator[str]:
    """Every place where `value` is not what the schema says. `$ref` names a definition."""
    if "$ref" in schema:
        yield from complaints(value, definitions[schema["$ref"]], definitions, at)
        return
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(type(value) is NAMES[name] for name in wanted):
        yield f"{at}: {value!r} is no {wanted}"
        return
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{at}: lacks {key}" for key in schema.get("required", ()) if key not in value)
        for key, part in value.items():
            if key in known or isinstance(others, dict):
                yield from complaints(part, known.get(key, others), definitions, f"{at}.{key}")
            elif not others:
                yield f"{at}: unknown key {key}"
    if isinstance(value, list):
        for i, part in enumerate(value if "items" in schema else ()):
            yield from complaints(part, schema["items"], definitions, f"{at}[{i}]")
    size = value if isinstance(value, int) else len(value)
    for limit in ("minimum", "minItems", "minLength", "minProperties"):
        if size < schema.get(limit, size):
            yield f"{at}: {limit}"
    for limit in ("maximum", "maxItems", "maxLength"):
        if size > schema.get(limit, size):
            yield f"{at}: {limit}"
    if value not in schema.get("enum", (value,)) or not re.search(
        schema.get("pattern", ""), value if isinstance(value, str) else ""
    ):
        yield f"{at}: {value!r} is not allowed"
