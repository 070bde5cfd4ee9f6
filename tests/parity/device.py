"""What the parity tests' ranks compute on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

DEVICE = os.environ.get("PARITY_DEVICE", "cpu").partition(" ")[0]


def exact() -> None:
    """GPUs multiply fp32 as such, not rounded to TF32."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def default_type(name: str) -> Iterator[None]:
    """torch's default type inside; other tests of this process have theirs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def doubled() -> Iterator[None]:
    """What is fp32 by name is of torch's default type here."""
    kind = torch.get_default_dtype()
    with (
        patch.object(torch, "float32", kind),
        patch.object(torch, "float", kind),
        patch.object(torch.Tensor, "float", lambda x: x.to(kind)),
    ):
        yield
