"""Number formats of training: those that devices have peaks for and models have sizes in."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp16", "bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp32")
