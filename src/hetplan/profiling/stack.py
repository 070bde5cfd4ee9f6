"""Software stacks: what a training framework adds to the arithmetic of a model.

A device works as fast as its host hands it kernels. An eager framework spends tens of microseconds
of a CPU core per operator (Python, autograd, dispatch), so that small layers wait for the host
whatever the device; compiled steps spend less, and CUDA graphs nearly nothing. Stacks also differ
in which kernels they have (fused attention, fused norms), in the type of the gradients that travel,
and in whether weights are cast before every pass.
"""

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
    each further one moves the operator's bytes again. gradient_bytes: per parameter, of the
    gradients that replicas exchange; None: the training precision's. casts: whether fp32 weights
    are cast to the training precision in every pass. origin: where the figures come from. flash:
    which version of FlashAttention fused attention is. fp8: whether products with weights are
    computed on 8-bit numbers. hidden_reduces: whether the collectives of tensor ranks hide behind
    products (asynchronous tensor parallelism). sequence_parallel: whether tensor ranks divide
    norms, dropouts and residuals, too (Korthikanti et al. 2022, Section 4.2.2). gather_copies:
    whether what they gather and scatter is copied, since the sequence is not its first dimension.
    """

    name: str
    attention: Attention
    host_seconds: float
    kernels: float
    gradient_bytes: int | None
    casts: bool
    origin: str
    flash: int = 2
    fp8: bool = False
    hidden_reduces: bool = False
    sequence_parallel: bool = False
    gather_copies: bool = False


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "eager-2021", "standard", 90e-6, 1.0, None, False,
            "Megatron-LM of 2021 with its fused kernels", 1,
        ),
        Stack("eager", "fused", 40e-6, 2.0, 4, True, "PyTorch eager with autocast"),
        Stack("fused", "fused", 40e-6, 1.0, 4, False, "fused kernels under eager PyTorch"),
        Stack("compiled", "fused", 15e-6, 0.7, 4, False, "torch.compile by block", 3),
        Stack("graphs", "fused", 2e-6, 0.7, 4, False, "CUDA graphs", 3),
    )
}  # fmt: skip
# Shares of the 16-bit peak that fused attention reaches forward and backward on long sequences, by
# version: on devices before bf16, on Ampere and Ada, and on those whose tensor cores outrun
# everything else. Dao 2023, Section 1 (version 1: 30 to 50 % forward, 25 to 35 % backward on A100)
# and Section 4.1 (version 2: up to 73 and 63 %); Shah et al. 2024, abstract (version 2: 35 % on
# H100; version 3: 1.5 to 2.0 times that forward, 1.5 to 1.75 times backward). Version 1 on H100 by
# what version 2 loses there.
FLASH: dict[int, tuple[tuple[float, float], ...]] = {
    1: ((0.3, 0.25), (0.4, 0.3), (0.23, 0.17)),
    2: ((0.3, 0.25), (0.6, 0.5), (0.35, 0.28)),
    3: ((0.3, 0.25), (0.6, 0.5), (0.6, 0.45)),
}
# The ranges that the papers state, around their middle.
FLASH_SPREAD = {"low": 0.8, "seconds": 1.0, "high": 1.25}
OUTRUN = 500e12  # FLOP/s: A100 312, H100 989
HALF_SEQUENCE = 256.0  # keys at which fused attention reaches half of these


def flash_shares(version: int, peak: float, bf16: bool) -> tuple[float, float]:
    """(forward, backward) shares of `peak` FLOP/s on long sequences."""
    return FLASH[version][0 if not bf16 else 1 + (peak > OUTRUN)]


# A collective that hides behind computation takes multiprocessors and memory bandwidth from it: so
# much of what is hidden is lost. Agrawal et al. 2024 ("Optimizing ML Concurrent Computation and
# Communication with GPU DMA Engines") measured 21 to 72 % of the ideal speed-up of hiding; the
# middle.
CONTENTION = 0.5

DEFAULT_STACK = STACKS["fused"]


def load_stack(name: str, *, where: str | None = None) -> Stack:
    """The stack of that name, which stands `where`; raises InputError that suggests the nearest."""
    if name not in STACKS:
        raise unknown_name("unknown software stack", name, STACKS, where=where)
    return STACKS[name]
