"""What is there although its type allows None."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """The value; fails where it is None."""
    assert value is not None
    return value
