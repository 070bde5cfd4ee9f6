"""What a layer keeps from forward to backward, by torch's own books: storages that are alive when
its pass is done."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hetplan.runtime.engine.position import Dropout
from hetplan.runtime.tracing.counter import Fused, storage, tensors


class Alive(TorchDispatchMode):
    """Bytes of storages that were made inside and still are."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen = {storage(t) for t in own}
        self.made: list[tuple[StorageWeakRef, int, float]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            key = storage(tensor)
            known = [entry for entry in self.made if entry[1] == key and not entry[0].expired()]
            if key not in self.seen and not known:
                held = tensor.untyped_storage()
                self.made.append((StorageWeakRef(held), key, float(held.nbytes())))
        return out

    def total(self, but: Tensor) -> float:
        """All but one tensor's."""
        gc.collect()
        return sum(
            size for ref, key, size in self.made if not ref.expired() and key != storage(but)
        )


def kept_bytes(
    layer: torch.nn.Module,
    x: Tensor,
    *more: Tensor,
    run: Callable[..., Tensor] | None = None,
    real: bool = False,
) -> float:
    """Of layer(x, …) in training: what its pass leaves beside parameters and output, and its input
    if it has gradients.

    Kernels are those of a GPU: fused attention and norms, a byte per element of a dropout's mask.
    real: values matter.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dropout, "forward", lambda self, x, *_: F.dropout(x, self.probability))
        if real:
            return _kept(layer, x, more, run or layer)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for module in layer.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    module._parameters[name] = torch.nn.Parameter(fake)
            given = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (x, *more)]
            return _kept(layer, given[0], given[1:], run or layer)


def _kept(
    layer: torch.nn.Module, x: Tensor, more: Iterable[Tensor], run: Callable[..., Tensor]
) -> float:
    x.requires_grad_(x.is_floating_point())
    counter = Alive([*layer.parameters(), *layer.buffers(), x, *more])
    with Fused(), counter:
        out = run(x, *more)
    found = counter.total(out)
    assert out.grad_fn is not None
    return found + (x.untyped_storage().nbytes() if x.requires_grad else 0.0)


class FusedSwiGLU(torch.autograd.Function):
    """silu(gate) * value as one kernel (Apex's, Megatron's), which keeps what it is given and
    nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        """[…, F] twice -> […, F]."""
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Not needed: nothing is trained here."""
        raise NotImplementedError


class LlamaBlock(torch.nn.Module):
    """A block as torchtitan writes it: projections apart, rotary positions before heads are moved;
    fused SwiGLU."""

    def __init__(self, t: Any, *, eager: bool = False) -> None:
        super().__init__()
        self.t, self.eager = t, eager
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(t.hidden), torch.nn.RMSNorm(t.hidden)
        sizes = {
            "q": t.query_width,
            "k": t.kv_width,
            "v": t.kv_width,
            "gate": t.feed_forward,
            "up": t.feed_forward,
        }
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(t.hidden, size, bias=False))
        self.out = torch.nn.Linear(t.query_width, t.hidden, bias=False)
        self.down = torch.nn.Linear(t.feed_forward, t.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> the same."""
        samples, length, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (
            p(y).view(samples, length, -1, self.t.head_dim) for p in (self.q, self.k, self.v)
        )
        q, k, v = (z.transpose(1, 2) for z in (turned(q), turned(k), v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.t.kv_heads < self.t.heads
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, -1))
        y = self.norm_2(x)
        gate, value = self.gate(y), self.up(y)
        inner = F.silu(gate) * value if self.eager else FusedSwiGLU.apply(gate, value)
        return x + self.down(inner)


def turned(x: Tensor) -> Tensor:
    """Rotary positions of [B, S, heads, d]."""
    angles = torch.zeros(x.shape[1], 1, x.shape[3] // 2, dtype=x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1
    )
