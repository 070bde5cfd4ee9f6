"""Which of a test's cases run at once, and which in the slow run (`pytest -m slow`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], quick: int) -> list[Any]:
    """All cases; those behind the first `quick` are marked slow."""
    return [
        case if number < quick else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
