"""Small PyTorch modules of different make, with data, for tracing; factories take a plan and ignore
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, TOKENS, VOCABULARY = 64, 4, 16, 100


class Block(nn.Module):
    """A pre-norm block with fused attention, dropout and an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> the same."""
        samples, length, width = x.shape
        q, k, v = (
            t.view(samples, length, HEADS, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(samples, length, width)))
        return x + self.down(F.gelu(self.up(self.after(x))))


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of losses."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Text(nn.Module):
    """No chain: embedding, a list of blocks, norm, tied head, loss; the first block's input meets
    the last's output."""

    def __init__(
        self, skip: bool = False, loss: Callable[[Tensor, Tensor], Tensor] = summed
    ) -> None:
        super().__init__()
        self.skip, self.loss = skip, loss
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        first = x = self.embed(tokens)
        for block in self.body.blocks:
            x = block(x)
        if self.skip:
            x = x + first
        return self.loss(self.head(x), targets)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets."""
        tokens = torch.randint(VOCABULARY, (last - first, TOKENS))
        return tokens, tokens


def text(plan: Any) -> nn.Module:
    """A factory."""
    return Text()


def skipping(plan: Any) -> nn.Module:
    """A factory."""
    return Text(skip=True)


class Images(nn.Sequential):
    """A chain of convolutions, pooling and a classifier."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, groups=groups), nn.ReLU()),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        )

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Images and classes."""
        return torch.randn(last - first, 3, 16, 16), torch.zeros(last - first, dtype=torch.int64)


class Choosing(nn.Module):
    """The size of what it computes depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Rows with a positive first entry."""
        y = self.linear(x)
        return y[(y[:, 0] > 0).nonzero().squeeze(-1)].sum()

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Rows."""
        return torch.randn(last - first, 8), torch.zeros(last - first)


class Comparing(Choosing):
    """Samples meet each other: work grows with their square."""

    def forward(self, x: Tensor) -> Tensor:
        """All pairs."""
        y = self.linear(x)
        return (y @ y.T).exp().sum()


class Odd(Choosing):
    """Uses an operator that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        """A determinant of every sample's outer product."""
        y = self.linear(x)
        return torch.linalg.det(y[:, :, None] * y[:, None, :] + torch.eye(8)).sum()


def without_data(plan: Any) -> nn.Module:
    """A factory of what has no `batch`."""
    return nn.Linear(2, 2)
