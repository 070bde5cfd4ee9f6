"""Which of a test's cases run by default, and which only with `pytest -m wide`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_wide(cases: Iterable[Any], quick: int) -> list[Any]:
    """All cases; those behind the first `quick` are marked wide."""
    return [
        case if number < quick else pytest.param(case, marks=pytest.mark.wide)
        for number, case in enumerate(cases)
    ]
