"""Software stacks: what a training framework adds to the arithmetic of a model.

A device works as fast as its host hands it kernels. An eager framework spends tens of microseconds
of a CPU core per operator (Python, autograd, dispatch), so that small layers wait for the host
whatever the device; compiled steps spend less, and CUDA graphs nearly nothing. Stacks also differ
in which kernels they have (fused attention, fused norms), in the type of the gradients that travel,
and in whether weights are cast before every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetplan.names import unknown_name

Attention = Literal["standard", "fused"]


@dataclass(frozen=True)
class Stack:
    """One software stack.

    attention: "standard" writes the scores to memory and keeps them; "fused" (FlashAttention) does
    neither. host_seconds: of the host per described operator and pass, the backward pass of a
    matrix product counting twice. kernels: device kernels per described memory-bound operator;
    each further one moves the operator's bytes again. attention_shares: of the device's peak,
    by generation, that fused attention reaches forward and backward on long sequences.
    gradient_bytes: per parameter, of the gradients that replicas exchange; None: the training
    precision's. casts: whether fp32 weights are cast to the training precision in every pass.
    origin: where the figures come from.
    """

    name: str
    attention: Attention
    host_seconds: float
    kernels: float
    gradient_bytes: int | None
    casts: bool
    origin: str


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "eager-2021", "standard", 90e-6, 1.0, None, False,
            "Megatron-LM of 2021 with its fused kernels",
        ),
        Stack("eager", "fused", 40e-6, 2.0, 4, True, "PyTorch eager with autocast"),
        Stack("fused", "fused", 40e-6, 1.0, 4, False, "fused kernels under eager PyTorch"),
        Stack("compiled", "fused", 15e-6, 0.7, 4, False, "torch.compile by block"),
        Stack("graphs", "fused", 2e-6, 0.7, 4, False, "CUDA graphs"),
    )
}  # fmt: skip
DEFAULT_STACK = STACKS["fused"]


def load_stack(name: str) -> Stack:
    """The stack of that name; raises InputError that suggests the nearest."""
    if name not in STACKS:
        raise unknown_name("unknown software stack", name, STACKS)
    return STACKS[name]
