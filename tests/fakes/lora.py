"""Adapters of low rank beside frozen linear modules, with the parameter names of `peft`, and
weights packed as bitsandbytes packs them. `peft` itself is no requirement of the tests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

KEPT_BLOCK, SCALES_BLOCK = 64, 256  # weights of a scale, scales of a second scale (NF4)


class Lora(nn.Module):
    """A frozen linear module with an adapter of rank r: y = W x + B A x."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        shape = tuple(base.weight.shape)
        rows, columns = shape if type(base).__name__ == "Conv1D" else shape[::-1]
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(rows, rank, bias=False, **like)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, columns, bias=False, **like)})

    def forward(self, x: Tensor) -> Tensor:
        inner = self.lora_A["default"](x)
        result: Tensor = self.base_layer(x) + self.lora_B["default"](inner)
        return result


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one that all-linear adapters stand beside."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def with_lora(model: nn.Module, rank: int, modules: Collection[str] | None = None) -> nn.Module:
    """The model with frozen weights and adapters beside its linear modules but the head's.

    modules: the last parts of their names; None: all.
    """
    model.requires_grad_(False)
    chosen = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        wanted = modules is None or last in modules
        if is_linear(module) and wanted and last != "lm_head":
            chosen.append(name)
    for name in chosen:
        parent, _, last = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        setattr(owner, last, Lora(getattr(owner, last), rank))
    return model


def packed(weight: Tensor, bits: int) -> list[Tensor]:
    """The tensors in which bitsandbytes holds a frozen weight: NF4 with double quantisation, or
    LLM.int8()'s numbers with a scale for each output."""
    if bits == 8:
        numbers = torch.empty_like(weight, dtype=torch.int8)
        return [numbers, torch.empty(weight.shape[0], device=weight.device)]
    count = weight.numel()
    blocks = -(-count // KEPT_BLOCK)
    return [
        torch.empty(count // 2, dtype=torch.uint8, device=weight.device),
        torch.empty(blocks, dtype=torch.uint8, device=weight.device),
        torch.empty(-(-blocks // SCALES_BLOCK), device=weight.device),
    ]


def weight_bytes(model: nn.Module, bits: int) -> int:
    """Bytes of all weights, those of the blocks' linear modules packed in so many bits."""
    total = 0
    frozen_linear = [
        module.base_layer if isinstance(module, Lora) else module
        for name, module in model.named_modules()
        if isinstance(module, Lora) or (is_linear(module) and "lora_" not in name)
    ]
    linear_weights = {id(module.weight) for module in frozen_linear}
    if hasattr(model, "lm_head"):
        linear_weights.discard(id(model.lm_head.weight))
    for parameter in model.parameters():
        tensors = [parameter.detach()]
        if bits < 16 and id(parameter) in linear_weights:
            tensors = packed(parameter.detach(), bits)
        total += sum(tensor.nbytes for tensor in tensors)
    return total


class Network(nn.Module):
    """A gated network, whose modules have the names of Llama's."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        result: Tensor = self.down_proj(hidden)
        return result
