"""ViT's and VGG's layers; the first takes images [B, 3, side, side], the last gives the sum of the
samples' losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetplan.profiling.transformer import Transformer
from hetplan.runtime.execution.position import Dropout


class Patches(nn.Module):
    """Patch embedding with class token and positions: [B, 3, side, side] -> [B, S, H]."""

    def __init__(self, t: Transformer, image: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, t.hidden)
        self.mark = nn.Parameter(torch.empty(t.hidden))
        self.places = nn.Parameter(torch.empty((image // patch) ** 2 + 1, t.hidden))

    def forward(self, images: Tensor) -> Tensor:
        """Cut, embed, prepend the class token, add positions."""
        cut = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        mark = self.mark.expand(len(images), 1, -1)
        return torch.cat((mark, self.embed(cut)), dim=1) + self.places


class Classifier(nn.Module):
    """Norm and classifier of the class token: ([B, S, H], classes [B]) -> sum of losses."""

    def __init__(self, t: Transformer, classes: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(t.hidden), nn.Linear(t.hidden, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.out(self.norm(x)[:, 0]), targets, reduction="sum")


class Convolution(nn.Module):
    """3 x 3 convolution, ReLU, and 2 x 2 maximum pooling where `pooled`."""

    def __init__(self, channels: int, width: int, *, pooled: bool) -> None:
        super().__init__()
        self.convolution, self.pooled = nn.Conv2d(channels, width, 3, padding=1), pooled

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, side, side] -> [B, width, side or side / 2, …]."""
        y = F.relu(self.convolution(x))
        return F.max_pool2d(y, 2) if self.pooled else y


class Connected(nn.Module):
    """A linear layer of all there is of a sample, ReLU and dropout."""

    def __init__(self, inputs: int, outputs: int, probability: float, site: str) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(inputs, outputs), Dropout(probability, site)

    def forward(self, x: Tensor) -> Tensor:
        """[B, …] -> [B, outputs]."""
        return self.drop(F.relu(self.linear(x.flatten(1))))


class LinearClassifier(nn.Module):
    """([B, …], classes [B]) -> sum of losses."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.linear(x.flatten(1)), targets, reduction="sum")


class Whole(nn.Module):
    """Several layers as one: (inputs, targets) -> sum of losses. For chains of a single layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """One after the other."""
        for part in self.parts[:-1]:
            x = part(x)
        loss: Tensor = self.parts[-1](x, targets)
        return loss
