"""Strict JSON from text: what the standard library lets pass is refused, with file, JSON path and
line.

Refused beside wrong syntax: NaN and infinities, a key twice in one object, integers of thousands of
digits, and nesting that would exhaust a reader's stack. The text is parsed by the standard library,
at full speed; only when that finds one of these faults is the text walked a second time for the
place.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hetplan.errors import InputError, json_path, shorten

MAX_DEPTH = 64


def parse_json(content: bytes | str, *, where: str) -> Any:
    """The document in `content` (UTF-8); raises InputError. `where` names the source in errors."""
    if isinstance(content, bytes):
        try:
            content = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text at byte {error.start}", where=where) from None
    _check_depth(content, where)
    try:
        return json.loads(content, parse_constant=_refuse, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        place = f"{where}: line {error.lineno} column {error.colno}"
        raise InputError(f"not valid JSON: {error.msg}", where=place) from None
    except ValueError:  # ours, or Python's own about an integer of too many digits
        raise _Walk(where).fault(content) from None


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


# One JSON string (its brackets do not count; an unclosed one runs to the end) or one bracket.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


def _check_depth(text: str, where: str) -> None:
    """Refuse nesting beyond MAX_DEPTH before the parser recurses into it."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                place = f"{where}: {line_and_column(text, match.start())}"
                raise InputError(
                    "nested too deeply", where=place, expected=f"at most {MAX_DEPTH} levels"
                )
        elif first in "]}":
            depth -= 1


def line_and_column(text: str, at: int) -> str:
    """`line 3 column 14` of an offset, both counted from 1."""
    return f"line {text.count(chr(10), 0, at) + 1} column {at - text.rfind(chr(10), 0, at)}"


# A run of short numbers, each with its comma (most of a large file, in one step), else a single
# token.
_TOKEN = re.compile(
    r'(?P<run>(?:[-+0-9.eE]{1,40}+\s*+,\s*+)++)|(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+")'
    r'|(?P<mark>[\[\]{},:])|(?P<word>[^\s\[\]{},:"]++)',
    re.DOTALL,
)


@dataclass
class _Level:
    """An open list (`place`: the index) or object (`place`: the latest key, `keys`: all of them so
    far)."""

    is_list: bool
    place: int | str = 0
    keys: set[str] = field(default_factory=set)
    awaits_key: bool = True

    def go_on(self, commas: int) -> None:
        """Pass that many commas."""
        if isinstance(self.place, int):
            self.place += commas
        self.awaits_key = True


class _Walk:
    """Follows a text, which is JSON up to its first fault, to that fault."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.levels: list[_Level] = []

    def fault(self, text: str) -> InputError:
        """The error that says what is refused and where it stands."""
        for match in _TOKEN.finditer(text):
            token = match.group()
            found = None
            match match.lastgroup:
                case "run":
                    self.levels[-1].go_on(token.count(","))
                case "string":
                    found = self._string(token)
                case "mark":
                    self._mark(token)
                case _:
                    found = _number_fault(token)
            if found is not None:
                what, got, expected = found
                place = json_path([level.place for level in self.levels])
                line = line_and_column(text, match.start())
                where = f"{self.where}: {place} ({line})" if place else f"{self.where}: {line}"
                return InputError(what, where=where, got=got, expected=expected)
        raise AssertionError("the parser found a fault in a JSON text without one")

    def _mark(self, mark: str) -> None:
        if mark in "[{":
            self.levels.append(_Level(mark == "["))
        elif mark in "]}":
            self.levels.pop()
        elif mark == ",":
            self.levels[-1].go_on(1)

    def _string(self, token: str) -> tuple[str, str | None, str | None] | None:
        level = self.levels[-1] if self.levels else None
        if level is None or level.is_list or not level.awaits_key:
            return None
        key = json.loads(token)
        level.place, level.awaits_key = key, False
        if key in level.keys:
            return f"key {shorten(key)} stands twice in one object", None, None
        level.keys.add(key)
        return None


# What the parser reads of a word before it looks at what follows: a constant, or a number and its
# parts.
_CONSTANT = re.compile(r"NaN|-?Infinity")
_NUMBER = re.compile(
    r"-?(?P<digits>0|[1-9][0-9]*)(?P<rest>\.[0-9]+(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)?"
)


def _number_fault(word: str) -> tuple[str, str | None, str | None] | None:
    """What is wrong with a number (or true, false, null): what, got, expected."""
    constant = _CONSTANT.match(word)
    if constant is not None:
        return "number is not finite", constant.group(), "a finite number"
    limit, number = sys.get_int_max_str_digits(), _NUMBER.match(word)
    if limit and number is not None and number["rest"] is None and len(number["digits"]) > limit:
        return f"an integer of {len(number['digits'])} digits", None, f"at most {limit}"
    return None
