"""Attention: grouped queries, rotary positions, windows; fused or with the scores in memory; split
by heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hetplan.profiling.architecture import Transformer
from hetplan.runtime.execution.position import Dropout
from hetplan.runtime.execution.tensor import ALONE, Cut, Part


class Attention(nn.Module):
    """[B, S, H] -> the same. qkv: queries, keys and values under each other.

    A tensor rank holds whole key-value heads with their queries, none where there are fewer than
    ranks. selective: the scores are computed again in the backward pass (Korthikanti et al. 2022,
    Section 5).
    """

    def __init__(self, t: Transformer, site: str, probability: float) -> None:
        super().__init__()
        self.shape, self.tensor, self.selective = t, ALONE, False
        width = t.query_width + 2 * t.kv_width
        self.qkv = nn.Parameter(torch.empty(width, t.hidden))
        self.qkv_bias = nn.Parameter(torch.empty(width)) if t.attention_bias else None
        self.out = nn.Parameter(torch.empty(t.hidden, t.query_width))
        self.out_bias = nn.Parameter(torch.empty(t.hidden)) if t.output_bias else None
        standard = t.dropout and t.attention == "standard"
        self.drop = Dropout(probability if standard else 0.0, site)

    def cuts(self, part: Part) -> dict[str, Cut]:
        """Heads: rows of qkv, columns of out."""
        t = self.shape
        groups, (a, b) = t.heads // t.kv_heads, part.of(t.kv_heads)
        queries = (a * groups * t.head_dim, b * groups * t.head_dim)
        keys = (t.query_width + a * t.head_dim, t.query_width + b * t.head_dim)
        values = (keys[0] + t.kv_width, keys[1] + t.kv_width)
        rows = Cut(0, (queries, keys, values))
        found = {"qkv": rows, "out": Cut(1, (queries,))}
        return found if self.qkv_bias is None else found | {"qkv_bias": rows}

    def forward(self, x: Tensor) -> Tensor:
        """Projections, attention of the heads that are here, projection."""
        t = self.shape
        samples, length, _ = x.shape
        a, b = self.tensor.of(t.kv_heads)
        groups = t.heads // t.kv_heads
        widths = ((b - a) * groups * t.head_dim, (b - a) * t.head_dim, (b - a) * t.head_dim)
        parts = F.linear(self.tensor.enter(x), self.qkv, self.qkv_bias).split(widths, dim=-1)
        q, k, v = (
            y.view(samples, length, n, t.head_dim).transpose(1, 2)
            for y, n in zip(parts, ((b - a) * groups, b - a, b - a), strict=True)
        )
        if b > a:
            mixed = (
                checkpoint(self.mix, q, k, v, a, use_reentrant=False)
                if self.selective
                else self.mix(q, k, v, a)
            )
        else:
            mixed = q
        y = F.linear(mixed.transpose(1, 2).reshape(samples, length, widths[0]), self.out)
        y = self.tensor.leave(y)
        return y if self.out_bias is None else y + self.out_bias

    def mix(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """softmax(q k^T / sqrt(d)) v of key-value heads [first, …)."""
        t = self.shape
        groups = t.heads // t.kv_heads
        if t.rotary:
            q, k = rotated(q), rotated(k)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        causal = t.head != "bert" and t.vocabulary > 0
        if t.attention == "fused" and not t.window:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        seen = visible(q.shape[2], causal, t.window, q.device)
        if t.attention == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        scores = (q @ k.transpose(-2, -1)) / t.head_dim**0.5
        shares = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return self.drop(shares, first * groups, t.heads) @ v


def visible(length: int, causal: bool, window: int | None, device: object) -> Tensor:
    """[S, S] which keys a query sees."""
    places = torch.arange(length, device=device)
    back = places[:, None] - places[None, :]
    seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    return seen & (back < window) if window else seen


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) on [B, heads, S, d], halves paired."""
    length, half = x.shape[2], x.shape[3] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    turns = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * 10_000.0 ** (
        -steps / max(half, 1)
    )
    cosine, sine = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine, x[..., 2 * half :]), dim=-1)
