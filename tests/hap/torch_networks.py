"""The networks of `networks` as ordinary PyTorch modules that return their loss, to be traced or
trained.

Written as they usually are: separate projections of queries, keys and values, views and
transpositions between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetplan.formulations.hap.spmd.networks import VGG19, sizes
from hetplan.profiling.architecture import Transformer
from hetplan.runtime.tracing.routing import route

# (module that returns the loss, example arguments)
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    """Self-attention over heads, optionally causal and with rotary positions."""

    def __init__(
        self,
        s: Transformer,
        tokens: int,
        *,
        causal: bool = False,
        rotary: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        self.s, self.causal, self.rotary = s, causal, rotary
        self.cos: Any
        self.sin: Any
        self.query, self.key, self.value, self.out = (
            nn.Linear(s.hidden, s.hidden, bias=bias) for _ in range(4)
        )
        if rotary:
            half = s.head_dim // 2
            angle = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
            self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], dim=-1))
            self.register_buffer("sin", torch.cat([angle.sin(), angle.sin()], dim=-1))

    def heads(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, n, s, d]."""
        return x.view(x.shape[0], x.shape[1], self.s.heads, self.s.head_dim).transpose(1, 2)

    def turned(self, x: Tensor) -> Any:
        """Rotary positions."""
        one, other = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-other, one], dim=-1) * self.sin

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        if self.rotary:
            q, k = self.turned(q), self.turned(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """Up, GELU, down."""

    def __init__(self, s: Transformer):
        super().__init__()
        self.up, self.down = (
            nn.Linear(s.hidden, s.feed_forward),
            nn.Linear(s.feed_forward, s.hidden),
        )
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        return self.down(self.gelu(self.up(x)))


class GatedFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Transformer):
        super().__init__()
        self.gate, self.up = (nn.Linear(s.hidden, s.feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(s.feed_forward, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two experts of all per token, one group per sample (GShard)."""

    def __init__(self, s: Transformer, experts: int, tokens: int):
        super().__init__()
        self.router = nn.Linear(s.hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, s.feed_forward, s.hidden) / s.hidden**0.5)
        self.down = nn.Parameter(
            torch.randn(experts, s.hidden, s.feed_forward) / s.feed_forward**0.5
        )
        self.active = min(2, experts)
        self.capacity = min(tokens, max(1, -(-2 * self.active * tokens // experts)))
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        weights = route(torch.softmax(self.router(x), dim=-1), self.active, self.capacity)
        y = torch.einsum("bsec,bsh->bech", (weights > 0).to(x.dtype), x)
        y = torch.einsum(
            "becf,ehf->bech", self.gelu(torch.einsum("bech,efh->becf", y, self.up)), self.down
        )
        return torch.einsum("bsec,bech->bsh", weights, y)


class Block(nn.Module):
    """Attention and feed-forward with norms before (`first`) or behind the sums."""

    def __init__(
        self, attention: nn.Module, feed: nn.Module, norms: Callable[[], nn.Module], *, first: bool
    ):
        super().__init__()
        self.attention, self.feed, self.norm1, self.norm2, self.first = (
            attention,
            feed,
            norms(),
            norms(),
            first,
        )

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class Vit(nn.Module):
    """On unfolded patches, a mean in place of the class token."""

    def __init__(self, s: Transformer, patches: int, pixels: int, classes: int):
        super().__init__()
        self.embed = nn.Linear(pixels, s.hidden)
        self.positions = nn.Parameter(torch.randn(patches, s.hidden))
        self.blocks = nn.ModuleList(
            Block(Attention(s, patches), FeedForward(s), lambda: nn.LayerNorm(s.hidden), first=True)
            for _ in range(s.layers)
        )
        self.norm, self.classify = nn.LayerNorm(s.hidden), nn.Linear(s.hidden, classes)

    def forward(self, patches: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x = self.embed(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.classify(self.norm(x).mean(dim=1)), labels)


class Bert(nn.Module):
    """Norms behind the sums; with `experts`, every second block has them."""

    def __init__(self, s: Transformer, tokens: int, vocabulary: int, experts: int | None):
        super().__init__()
        self.words = nn.Embedding(vocabulary, s.hidden)
        self.positions = nn.Parameter(torch.randn(tokens, s.hidden))
        self.norm = nn.LayerNorm(s.hidden)
        self.blocks = nn.ModuleList(
            Block(
                Attention(s, tokens),
                Experts(s, experts, tokens)
                if experts is not None and i % 2 == 1
                else FeedForward(s),
                lambda: nn.LayerNorm(s.hidden),
                first=False,
            )
            for i in range(s.layers)
        )
        self.transform, self.transform_norm = nn.Linear(s.hidden, s.hidden), nn.LayerNorm(s.hidden)
        self.decode = nn.Linear(s.hidden, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x = self.norm(self.words(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        x = self.transform_norm(F.gelu(self.transform(x), approximate="tanh"))
        return F.cross_entropy(self.decode(x).flatten(0, 1), labels.flatten())


class Gpt2(nn.Module):
    """Norms first, causal, the head tied to the embedding."""

    def __init__(self, s: Transformer, tokens: int, vocabulary: int):
        super().__init__()
        self.words = nn.Embedding(vocabulary, s.hidden)
        self.positions = nn.Parameter(torch.randn(tokens, s.hidden))
        self.blocks = nn.ModuleList(
            Block(
                Attention(s, tokens, causal=True),
                FeedForward(s),
                lambda: nn.LayerNorm(s.hidden),
                first=True,
            )
            for _ in range(s.layers)
        )
        self.norm = nn.LayerNorm(s.hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x = self.words(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LlamaBlocks(nn.Module):
    """Blocks alone on embedded tokens, 16 classes behind them."""

    def __init__(self, s: Transformer, tokens: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(
                Attention(s, tokens, causal=True, rotary=True, bias=False),
                GatedFeedForward(s),
                lambda: nn.RMSNorm(s.hidden, eps=1e-5),
                first=True,
            )
            for _ in range(s.layers)
        )
        self.classify = nn.Linear(s.hidden, 16, bias=False)

    def forward(self, embedded: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x = embedded
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.classify(x).flatten(0, 1), labels.flatten())


class Vgg19(nn.Module):
    """For images of 32 x 32, whose last 1 x 1 map is repeated to `pooled` x `pooled`."""

    def __init__(self, width: int, pooled: int, classes: int, dense: int):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for times, count in VGG19:
            for _ in range(count):
                layers += [nn.Conv2d(channels, times * width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = times * width
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


def network(name: str, batch: int, devices: int, *, tiny: bool = False, meta: bool = False) -> Made:
    """The network of that name as `models.model` has it, with example arguments; on the meta device
    if asked."""
    with torch.device("meta" if meta else "cpu"):
        return _makers()[name](batch, devices, tiny)


def _makers() -> dict[str, Callable[[int, int, bool], Made]]:
    def tokens(published: int, tiny: bool, devices: int) -> int:
        return 2 * devices if tiny else published

    def vit(layers: int) -> Callable[[int, int, bool], Made]:
        def make(b: int, m: int, t: bool) -> Made:
            n = tokens(196, t, m)
            return Vit(sizes(layers, t, m), n, 768, 10), (
                torch.randn(b, n, 768),
                torch.randint(10, (b,)),
            )

        return make

    def words(
        build: Callable[[Transformer, int, int], nn.Module], length: int, vocabulary: int
    ) -> Callable[..., Made]:
        def make(b: int, m: int, t: bool) -> Made:
            n, v = tokens(length, t, m), 6 * m if t else vocabulary
            return build(sizes(12, t, m), n, v), (
                torch.randint(v, (b, n)),
                torch.randint(v, (b, n)),
            )

        return make

    def moe(b: int, m: int, t: bool) -> Made:
        return words(lambda s, n, v: Bert(s, n, v, m), 128, 30522)(b, m, t)

    def llama(b: int, m: int, t: bool) -> Made:
        s, n = sizes(4, t, m, 4096, 32, 11008), tokens(2048, t, m)
        return LlamaBlocks(s, n), (torch.randn(b, n, s.hidden), torch.randint(16, (b, n)))

    def vgg(b: int, m: int, t: bool) -> Made:
        images = torch.randn(b, 3, 32, 32), torch.randint(10, (b,))
        return Vgg19(m if t else 64, 7, 10, m if t else 4096), images

    return {
        "vgg19": vgg,
        "vit": vit(12),
        "vit-24": vit(24),
        "bert-base": words(lambda s, n, v: Bert(s, n, v, None), 128, 30522),
        "bert-moe": moe,
        "gpt2": words(Gpt2, 1024, 50257),
        "llama-blocks": llama,
    }
