"""Modules of transformers with the fused kernels that hetplan's memory model describes: they keep
what Liger-Kernel's RMSNorm and SwiGLU keep, and no copies in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Norm(torch.autograd.Function):
    """RMSNorm that keeps its input and a number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, factor)
        return (wide * factor).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, weight, factor = ctx.saved_tensors
        scaled = (gradients[0] * weight).float()
        normed = x.float() * factor
        mean = (scaled * normed).mean(-1, keepdim=True)
        return (factor * (scaled - normed * mean)).to(x.dtype), None, None


class Gated(torch.autograd.Function):
    """silu(gate) * up, that keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        share = torch.sigmoid(gate)
        slope = share * (1 + gate * (1 - share))
        return gradient * up * slope, gradient * gate * share


class FusedNorm(nn.Module):
    """`Norm` with a module's weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x."""
        y: Tensor = Norm.apply(x, self.weight, self.eps)
        return y


def with_fused_kernels(model: nn.Module) -> nn.Module:
    """The model with fused norms and gated networks; GPT-2's own are fused in torch."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, FusedNorm(module))
        elif type(module).__name__ == "LlamaMLP":
            module.forward = fused_network(module)
    return model


def fused_network(network: Any) -> Any:
    """The forward function of a gated network with the fused product."""

    def forward(x: Tensor) -> Tensor:
        y: Tensor = network.down_proj(Gated.apply(network.gate_proj(x), network.up_proj(x)))
        return y

    return forward
