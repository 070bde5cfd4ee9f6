"""The private names of torch that tracing needs, all here: the test of torch's names says when one
of them changes.

Fake tensors and dispatch modes have no public names yet; the numbers of autograd's nodes say which
forward operator a backward one belongs to, and nothing public does.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "TorchDispatchMode",
    "next_node",
    "running_node",
]


def next_node() -> int:
    """The number that the next autograd node gets."""
    return int(torch.autograd._get_sequence_nr())


def running_node() -> int | None:
    """The number of the autograd node whose backward pass runs; None outside of one."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
