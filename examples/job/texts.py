"""Data for job.yaml: every byte of this file is a token."""

from collections.abc import Callable
from pathlib import Path

import torch

from hetplan.plans.plan import Plan

Batch = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]


def build(plan: Plan) -> Batch:
    """What gives rows [first, last) of a step's global batch: (inputs, targets)."""
    tokens = torch.tensor([*Path(__file__).read_bytes()])
    length, size = plan.workload.sequence or 64, plan.workload.global_batch

    def batch(step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        begins = torch.arange(step * size + first, step * size + last) * 31
        rows = begins[:, None] % (len(tokens) - length) + torch.arange(length + 1)
        return tokens[rows][:, :-1].contiguous(), tokens[rows][:, 1:].contiguous()

    return batch
