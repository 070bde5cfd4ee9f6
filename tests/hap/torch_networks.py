"""The networks of `spmd.networks` as ordinary PyTorch modules that return their loss, to be traced
or trained.

Written as they usually are: separate projections of queries, keys and values, views and
transpositions between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evidence.speed import hap_theories
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import VGG19
from hetplan.runtime.tracing.aten import route

# (module that returns the loss, example arguments)
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    """Self-attention over heads, [b, s, h] -> [b, s, h]; Llama's is causal, rotary, without
    biases."""

    def __init__(self, t: Transformer, tokens: int, *, causal: bool):
        super().__init__()
        self.t, self.causal, biased = t, causal, t.attention_bias
        self.cos: Any
        self.sin: Any
        self.query, self.key, self.value, self.out = (
            nn.Linear(t.hidden, t.hidden, bias=biased) for _ in range(4)
        )
        if t.rotary:
            half = t.head_dim // 2
            angle = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
            self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], dim=-1))
            self.register_buffer("sin", torch.cat([angle.sin(), angle.sin()], dim=-1))

    def turned(self, x: Tensor) -> Any:
        """Rotary positions."""
        one, other = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-other, one], dim=-1) * self.sin

    def forward(self, x: Tensor) -> Any:
        """Projections, attention, projection."""
        heads = (*x.shape[:2], self.t.heads, self.t.head_dim)
        q, k, v = (
            project(x).view(heads).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if self.t.rotary:
            q, k = self.turned(q), self.turned(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """Up, GELU, down; or SwiGLU."""

    def __init__(self, t: Transformer):
        super().__init__()
        biased, width = t.feed_forward_bias, t.feed_forward
        self.gate = nn.Linear(t.hidden, width, bias=biased) if t.gated else None
        self.up, self.down = (
            nn.Linear(t.hidden, width, bias=biased),
            nn.Linear(width, t.hidden, bias=biased),
        )

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """Two experts of all per token, one group per sample (GShard)."""

    def __init__(self, t: Transformer, experts: int, tokens: int):
        super().__init__()
        self.router = nn.Linear(t.hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, t.feed_forward, t.hidden) / t.hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, t.hidden, t.feed_forward) / t.hidden**0.5)
        self.active = min(2, experts)
        self.capacity = min(tokens, max(1, -(-2 * self.active * tokens // experts)))

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        weights = route(torch.softmax(self.router(x), dim=-1), self.active, self.capacity)
        y = torch.einsum("bsec,bsh->bech", (weights > 0).to(x.dtype), x)
        y = F.gelu(torch.einsum("bech,efh->becf", y, self.up), approximate="tanh")
        return torch.einsum("bsec,bech->bsh", weights, torch.einsum("becf,ehf->bech", y, self.down))


class Block(nn.Module):
    """Attention and feed-forward with norms before (`first`) or behind the sums."""

    def __init__(self, t: Transformer, attention: nn.Module, feed: nn.Module, *, first: bool):
        super().__init__()
        self.attention, self.feed, self.first = attention, feed, first
        self.norm1, self.norm2 = norm(t), norm(t)

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


def norm(t: Transformer) -> nn.Module:
    """LayerNorm or RMSNorm."""
    return nn.LayerNorm(t.hidden) if t.norm == "layer" else nn.RMSNorm(t.hidden, eps=1e-5)


class Network(nn.Module):
    """(inputs, labels) -> the loss. embed: of the inputs, with positions and a norm behind the
    blocks. bert: norms behind embedding and sums; experts: of every second block; pooled: the
    mean over
    tokens has the loss."""

    def __init__(
        self,
        t: Transformer,
        tokens: int,
        embed: nn.Module | None,
        *head: nn.Module,
        bert: bool = False,
        experts: int | None = None,
        causal: bool = False,
        pooled: bool = False,
    ):
        super().__init__()
        self.embed, self.head, self.pooled = embed, nn.Sequential(*head), pooled
        self.positions = nn.Parameter(torch.randn(tokens, t.hidden)) if embed else None
        self.norm = norm(t) if embed else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(
                t,
                Attention(t, tokens, causal=causal),
                Experts(t, experts, tokens) if experts is not None and i % 2 else FeedForward(t),
                first=not bert,
            )
            for i in range(t.layers)
        )
        self.bert = bert

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """The mean over all labels."""
        if self.embed is not None:
            x = self.embed(x) + self.positions
        x = self.norm(x) if self.bert else x
        for block in self.blocks:
            x = block(x)
        x = x if self.bert else self.norm(x)
        logits = self.head(x.mean(dim=1) if self.pooled else x)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Vgg19(nn.Module):
    """For images of 32 x 32, whose last 1 x 1 map is repeated to `pooled` x `pooled`."""

    def __init__(self, width: int, pooled: int, classes: int, dense: int):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for wide in VGG19:
            if wide:
                after = wide // 64 * width
                layers += [nn.Conv2d(channels, after, 3, padding=1), nn.ReLU(inplace=True)]
                channels = after
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((pooled, pooled))
        self.head = nn.Sequential(
            nn.Linear(channels * pooled**2, dense), nn.ReLU(inplace=True), nn.Linear(dense, dense),
            nn.ReLU(inplace=True), nn.Linear(dense, classes),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        """The loss."""
        return F.cross_entropy(self.head(self.pool(self.features(images)).flatten(1)), labels)


def network(name: str, b: int, m: int, *, tiny: bool = False, meta: bool = False) -> Made:
    """The network of that name as `networks.model` has it, for b samples and m devices, with
    example arguments; on the meta device if asked."""
    with torch.device("meta" if meta else "cpu"):
        if name == "vgg19":
            module: nn.Module = Vgg19(m if tiny else 64, 7, 10, m if tiny else 4096)
            return module, (torch.randn(b, 3, 32, 32), torch.randint(10, (b,)))
        s = 2 * m if tiny else {"vit": 196, "gpt2": 1024, "llama-blocks": 2048}.get(name, 128)
        if name == "llama-blocks":
            t = Transformer(
                **vars(hap_theories.sizes(4, tiny, m, 4096, 32, 11008))
                | {"gated": True, "norm": "rms", "rotary": True, "attention_bias": False}
                | {"feed_forward_bias": False}
            )
            module = Network(t, s, None, nn.Linear(t.hidden, 16, bias=False), causal=True)
            return module, (torch.randn(b, s, t.hidden), torch.randint(16, (b, s)))
        t = hap_theories.sizes(12, tiny, m)
        if name == "vit":
            module = Network(t, s, nn.Linear(768, t.hidden), nn.Linear(t.hidden, 10), pooled=True)
            return module, (torch.randn(b, s, 768), torch.randint(10, (b,)))
        v = 6 * m if tiny else {"gpt2": 50257}.get(name, 30522)
        words, decode = nn.Embedding(v, t.hidden), nn.Linear(t.hidden, v, bias=name != "gpt2")
        if name == "gpt2":
            decode.weight = words.weight
            module = Network(t, s, words, decode, causal=True)
        else:
            dense, gelu = nn.Linear(t.hidden, t.hidden), nn.GELU(approximate="tanh")
            experts = m if name == "bert-moe" else None
            module = Network(t, s, words, dense, gelu, norm(t), decode, bert=True, experts=experts)
        return module, (torch.randint(v, (b, s)), torch.randint(v, (b, s)))
