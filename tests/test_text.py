"""Figures as they read."""

from __future__ import annotations

import pytest

from hetplan.text import seconds_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (2.5e-4, "250 us"),
        (0.0546, "54.6 ms"),
        (12.0, "12 s"),
        (-0.0546, "-54.6 ms"),
    ],
)
def test_seconds_read_in_their_unit(value: float | None, text: str) -> None:
    assert seconds_text(value) == text
