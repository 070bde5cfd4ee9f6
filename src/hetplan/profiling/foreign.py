"""Reading what other programs wrote: JSON step by step, every step checked, every error with file
and place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetplan.errors import InputError, json_path
from hetplan.files import read_json
from hetplan.schema import LARGEST, MOST_SECONDS

Key = int | str


@dataclass(frozen=True)
class Foreign:
    """One value of a document: `value`, the document's file `where`, and the value's `path` within
    it."""

    value: Any
    where: str
    path: tuple[Key, ...] = ()

    @property
    def place(self) -> str:
        """File and JSON path, for messages."""
        return f"{self.where}: {json_path(self.path)}" if self.path else self.where

    def error(self, what: str, expected: str | None = None) -> InputError:
        """An error at this place that shows the value."""
        return InputError(what, where=self.place, got=self.value, expected=expected)

    def __getitem__(self, key: Key) -> Foreign:
        """The entry `key` of an object or a list; raises InputError where there is none."""
        entry = self.get(key)
        if entry is None:
            raise InputError(
                "required key is missing", where=Foreign(None, self.where, (*self.path, key)).place
            )
        return entry

    def get(self, key: Key) -> Foreign | None:
        """The entry `key`, or None; raises InputError where this is no object (for a name) or list
        (for a number)."""
        if isinstance(key, int):
            items = self._list()
            return self._inner(key, items[key]) if 0 <= key < len(items) else None
        content = self._object()
        return self._inner(key, content[key]) if key in content else None

    def items(self) -> Iterator[tuple[str, Foreign]]:
        """Keys and entries of an object."""
        for key, value in self._object().items():
            yield key, self._inner(key, value)

    def entries(self, least: int = 0, length: int | None = None) -> list[Foreign]:
        """Entries of a list: at least `least` of them, or exactly `length`."""
        items = self._list()
        if len(items) < least:
            raise self.error("too short", f"at least {least} entries")
        if length is not None and len(items) != length:
            raise self.error("of another length", f"{length} entries")
        return [self._inner(i, item) for i, item in enumerate(items)]

    def number(self, least: float = 0.0, most: float = LARGEST) -> float:
        """A number from `least` to `most`; booleans are none."""
        value = self.value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value <= most
        ):
            raise self.error("not usable", f"a number from {least:g} to {most:g}")
        return float(value)

    def seconds(self, unit: float = 1.0) -> float:
        """A duration in `unit` seconds, as seconds."""
        return self.number(0.0, MOST_SECONDS / unit) * unit

    def whole(self, least: int = 0, most: int = 10**9) -> int:
        """A whole number from `least` to `most` (2.0 is one)."""
        value = self.number(least, most)
        if value != int(value):
            raise self.error("not usable", "a whole number")
        return int(value)

    def text(self) -> str:
        """A text of 1 to 200 characters."""
        if not isinstance(self.value, str) or not 1 <= len(self.value) <= 200:
            raise self.error("not usable", "a text of 1 to 200 characters")
        return self.value

    def _inner(self, key: Key, value: Any) -> Foreign:
        return Foreign(value, self.where, (*self.path, key))

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.error("not usable", "an object")
        return self.value

    def _list(self) -> list[Any]:
        if not isinstance(self.value, list):
            raise self.error("not usable", "a list")
        return self.value


def read_foreign(path: str | os.PathLike[str]) -> Foreign:
    """The JSON document of a file."""
    return Foreign(read_json(path), os.fspath(path))


def key_number(key: str, entry: Foreign, least: int = 0, most: int = 10**6) -> int:
    """A key that is a whole number; raises InputError naming its place."""
    if not (key.isdecimal() and len(key) < 9 and least <= int(key) <= most):
        raise InputError(
            "key is no whole number", where=entry.place, got=key, expected=f"{least} to {most}"
        )
    return int(key)
