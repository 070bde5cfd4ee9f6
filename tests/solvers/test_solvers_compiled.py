"""What `kernel` promises beyond speed: one signature whatever the constants, no arrays made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError

from hetplan.compiled import kernel


def sums(values: Any, power: int) -> float:
    total = 0.0
    for i in range(len(values)):
        total += values[i] ** power
    return total


def test_a_constant_makes_no_signature_of_its_own() -> None:
    inner: Any = kernel(sums)

    def outer(values: Any) -> float:
        return inner(values, 1) + inner(values, 2)  # type: ignore[no-any-return]

    assert kernel(outer)(np.array([2.0, 3.0])) == 18.0
    assert len(inner.signatures) == 1


def test_a_kernel_that_makes_an_array_does_not_compile() -> None:
    def doubled(values: Any) -> Any:
        out = np.empty(len(values))
        for i in range(len(values)):
            out[i] = 2 * values[i]
        return out

    with pytest.raises(TypingError, match="empty"):
        kernel(doubled)(np.ones(2))
