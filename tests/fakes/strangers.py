"""Modules as a stranger writes them, with data of their own: a ResNet and a ViT in torchvision's
manner, a perceptron with a skip, and one with operators that have no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Basic(nn.Module):
    """torchvision's BasicBlock: two convolutions with batch norms beside a skip."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if stride != 1 or before != after:
            shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Any:
        """[b, c, h, w] -> [b, c', h', w']."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A stem, two stages, a pooled classifier."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Basic(width, width, 1))
        self.layer2 = nn.Sequential(Basic(width, 2 * width, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Any:
        """[b, 3, h, w] -> [b, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Encoder(nn.Module):
    """torchvision's EncoderBlock."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Any:
        """[b, s, h] -> [b, s, h]."""
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """Patches by a convolution, a class token, encoder blocks."""

    def __init__(self, hidden: int, heads: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, hidden, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        tokens = (size // patch) ** 2 + 1
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, tokens, hidden))
        self.layers = nn.Sequential(Encoder(hidden, heads))
        self.ln, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Any:
        """[b, 3, size, size] -> [b, classes]."""
        x = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head(self.ln(self.layers(x + self.pos_embedding))[:, 0])


class Perceptron(nn.Module):
    """A skip around a layer, normalised over the batch."""

    def __init__(self, width: int, classes: int, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.norm, self.last = nn.BatchNorm1d(width), nn.Linear(width, classes)
        self.activation = activation

    def forward(self, x: Tensor) -> Any:
        """[b, 6] -> [b, classes]."""
        x = self.activation(self.first(x * 2))
        return self.last(self.norm(x + self.activation(self.second(x))))


class Classified(nn.Module):
    """A network with its loss and made-up data, whose values it looks at."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.network, self.shape, self.classes = network, shape, classes

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        """The mean loss."""
        return F.cross_entropy(self.network(x), targets)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """These rows of the global batch."""
        rows = []
        for number in range(first, last):
            draw = torch.Generator().manual_seed(1000 * step + number)
            label = torch.randint(self.classes, (), generator=draw)
            rows.append((torch.randn(self.shape, generator=draw) + float(label), label))
        inputs, targets = zip(*rows, strict=True)
        return torch.stack(inputs), torch.stack(targets)


def resnet(plan: Any = None) -> nn.Module:
    """A ResNet of two blocks."""
    torch.manual_seed(0)
    return Classified(ResNet(4, 10), (3, 32, 32), 10)


def vit(plan: Any = None) -> nn.Module:
    """A ViT of one block."""
    torch.manual_seed(0)
    return Classified(ViT(16, 4, 16, 4, 10), (3, 16, 16), 10)


def perceptron(plan: Any = None) -> nn.Module:
    """A perceptron with a skip."""
    torch.manual_seed(0)
    return Classified(Perceptron(12, 4, nn.ReLU()), (6,), 4)


def strange(plan: Any = None) -> nn.Module:
    """The same with an activation that has no rule."""
    torch.manual_seed(0)
    return Classified(Perceptron(12, 4, nn.Softplus()), (6,), 4)


def chain(plan: Any = None) -> nn.Module:
    """A chain of layers, the last of which gives the sum of the losses."""
    torch.manual_seed(0)

    class Last(nn.Linear):
        def forward(self, x: Tensor, targets: Tensor) -> Any:
            return F.cross_entropy(super().forward(x), targets, reduction="sum")

    class Chain(nn.Sequential):
        batch = Classified.batch

    made = Chain(nn.Linear(6, 12), nn.ReLU(), Last(12, 4))
    made.shape, made.classes = (6,), 4
    return made


class Regression(nn.Module):
    """A linear map and a loss, its mean squared error unless another one is given."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 3), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of x [b, 6] and labels [b, 3]."""
        return self.loss(self.linear(x), labels)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Numbers that follow from the rows."""
        rows = torch.arange(first, last).view(-1, 1)
        return torch.sin(rows + torch.arange(6.0)), torch.cos(rows * torch.arange(3.0))


def hooked(plan: Any = None) -> nn.Module:
    """A module that doubles a gradient by a hook, which its trace drops."""
    module = Regression()
    module.linear.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def masked(plan: Any = None) -> nn.Module:
    """A module whose loss is a mean over the positive labels."""

    def loss(y: Tensor, labels: Tensor) -> Tensor:
        counted = (labels > 0).to(y.dtype)
        return ((y - labels).square() * counted).sum() / counted.sum()

    torch.manual_seed(0)
    return Regression(loss)
