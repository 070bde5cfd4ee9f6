"""Damage for files: random edits of a parsed document, and random edits of its bytes."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    10**400,
    -0.0,
    0.5,
    -3.7,
    5e-324,
    1e-300,
    1e30,
    1e31,
    1e308,
    10**9,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "x" * 5000,
    "12",
    "\n\x1b[31m\x00\u202e",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"": None},
    {"format": "hetplan-instance"},
    [[1, 2], [3]],
)


def mutate(rng: Random, document: Any, edits: int | None = None) -> Any:
    """A copy of `document` (JSON types) with one to three random edits."""
    value = copy.deepcopy(document)
    for _ in range(edits or rng.randint(1, 3)):
        value = _edit(rng, value)
    return value


def _edit(rng: Random, document: Any) -> Any:
    places = list(_places(document))
    if not places:
        return rng.choice(NASTY)
    container, key = rng.choice(places)
    kind = rng.choice(("replace", "replace", "replace", "delete", "add", "repeat", "scale", "swap"))
    value = container[key]
    if kind == "delete":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[
            rng.choice(("", "unknown", "Format", "__class__", "x" * 300, "\x00", str(key) + " "))
        ] = value
    elif kind == "add":
        container.insert(rng.randrange(len(container) + 1), copy.deepcopy(rng.choice(NASTY)))
    elif kind == "repeat" and isinstance(container, list):
        container.extend(copy.deepcopy(container))
    elif kind == "scale" and isinstance(value, int | float):
        container[key] = value * rng.choice((-1, 0, 0.5, 2, 10**6, 1e30))
    elif kind == "swap":
        other, other_key = rng.choice(places)
        container[key] = copy.deepcopy(
            other.get(other_key) if isinstance(other, dict) else _at(other, other_key)
        )
    else:
        container[key] = copy.deepcopy(rng.choice(NASTY))
    return document


def _at(row: list[Any], index: int) -> Any:
    return row[index] if index < len(row) else None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in the document; a long list gives some of its entries only."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        container = stack.pop()
        if not isinstance(container, dict | list):
            continue
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))[:8]
        for key in keys:
            found.append((container, key))
            stack.append(container[key])
    return found


def damage(rng: Random, content: bytes) -> bytes:
    """`content` cut, flipped, repeated or interleaved with what no sane writer would put there."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        kind = rng.choice(("cut", "flip", "insert", "remove", "repeat", "bracket"))
        if kind == "cut":
            del data[at:]
        elif kind == "flip" and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == "remove":
            del data[at : at + rng.randint(1, 30)]
        elif kind == "repeat":
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif kind == "bracket":
            data[at:at] = rng.choice((b"[", b"{", b"]", b"}")) * rng.choice((1, 2, 100, 5000))
        else:
            data[at:at] = rng.choice(
                (b"\x00", b"\xff\xfe", b"NaN", b"1e999", b'"', b"\\", b",", b"\r", b"&a *a", b"!!")
            )
    return bytes(data)


def as_json(document: Any) -> bytes:
    """JSON text of a mutated document, `NaN` and lone surrogates included (strict readers refuse
    them)."""
    return json.dumps(document).encode()


def check_one_line(text: str, start: str = "") -> None:
    """An error message is one printable line that says something (and begins with `start`)."""
    assert text.startswith(start)
    assert text.strip() == text != ""
    assert text.isprintable(), f"control characters in {text!r}"
    assert len(text) < 1500
