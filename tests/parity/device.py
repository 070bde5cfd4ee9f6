"""What the parity tests' ranks compute on."""

from __future__ import annotations

import os

import torch

DEVICE = os.environ.get("PARITY_DEVICE", "cpu").partition(" ")[0]


def exact() -> None:
    """GPUs multiply fp32 as such, not rounded to TF32."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
