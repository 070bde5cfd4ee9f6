"""Bytes per logit of eager losses, as torch's own record of allocations has them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from hetplan.profiling.frameworks import DEEPSPEED, FSDP, Framework

pytest.importorskip("torch", reason="torch's own counts need torch")

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile


def eager_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """torchtitan, components/loss.py."""
    return functional.cross_entropy(logits.float(), targets)


def shifted_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """transformers, loss_utils.py: upcast, shifted by a token."""
    whole = logits.float()
    return functional.cross_entropy(whole[:-1].contiguous(), targets[1:])


LOSSES = [(FSDP, eager_loss, False), (DEEPSPEED, shifted_loss, True)]


@pytest.mark.parametrize(("framework", "loss", "returned"), LOSSES)
def test_bytes_per_logit_as_torch_allocates_them(
    framework: Framework,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    returned: bool,
) -> None:
    """torch's own record of a loss and its backward pass. returned: the logits outlive the loss, as
    in a model's output."""
    tokens, vocabulary = 256, 4096
    inputs = torch.randn(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(vocabulary, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))

    def step() -> None:
        logits = inputs @ weights.t()
        value = loss(logits, targets)
        if not returned:
            del logits
        value.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = max(accumulate(change for _, change in changes))
    assert peak / (tokens * vocabulary) == pytest.approx(framework.logit_bytes, rel=0.01)
