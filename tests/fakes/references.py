"""Models of other kinds by the contract of `engine.chain`: mixtures of experts whose experts lie
whole on tensor ranks, a ViT and a VGG; data and weights as the references have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetplan.profiling.models.model import Model
from hetplan.profiling.models.transformer import Experts, Transformer
from hetplan.profiling.models.zoo import VGG19
from hetplan.runtime.engine.chain import ALONE, Cut, Part, cut
from hetplan.runtime.engine.position import Dropout, as_int64, key_of, splitmix64, uniform
from hetplan.runtime.references import Block, Reference, activated, text_layers


def build(shape: Transformer, sequence: int) -> Reference:
    """A text model, with experts where the shape has them."""
    layers = text_layers(replace(shape, experts=None))
    for i in range(shape.layers):
        if shape.experts is not None and (i + 1) % shape.experts.every == 0:
            block: Any = layers[f"block-{i}"]
            block.feed_forward = Mixture(shape, shape.experts)
    return Reference(layers, vocabulary=shape.vocabulary, sequence=sequence)


class Pictures(Reference):
    """A chain of named layers with synthetic pictures. classes: how many; image: their side."""

    def __init__(self, layers: dict[str, nn.Module], *, classes: int, image: int) -> None:
        self.image = image
        super().__init__(layers, vocabulary=classes, sequence=0)

    def initial(self, name: str, parameter: Tensor) -> Tensor:
        """As the references, with a deviation that follows from the size of the inputs."""
        made = super().initial(name, parameter)
        scaled = parameter.dim() > 1
        return made * (min(0.1, (2.0 / parameter[0].numel()) ** 0.5) / 0.02) if scaled else made

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(pictures, classes) of the global rows [first, last) of a step."""
        rows = torch.arange(first, last)
        row_key = as_int64(key_of(self.seed, step, "batch"))
        drawn = (splitmix64(rows * 2 + row_key) >> 1) & ((1 << 62) - 1)
        size = (last - first, 3, self.image, self.image)
        key = key_of(self.seed, step, "image")
        images = uniform(key, size, (first, 0, 0, 0), (0, *size[1:]), "cpu")
        return (2 * images - 1).to(torch.get_default_dtype()), drawn % self.vocabulary


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
    """([B, …], classes [B]) -> the sum of losses, of the class token where there is a norm, else of
    all there is of a sample."""

    def __init__(self, inputs: int, classes: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(inputs, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        x = x.flatten(1) if self.norm is None else self.norm(x)[:, 0]
        return F.cross_entropy(self.linear(x), targets, reduction="sum")


def convolution(channels: int, width: int, *, pooled: bool) -> nn.Module:
    """3 x 3 convolution, ReLU, and 2 x 2 maximum pooling where `pooled`: [B, channels, side, side]
    -> [B, width, side or side / 2, …]."""
    pool = nn.MaxPool2d(2) if pooled else nn.Identity()
    own = nn.Conv2d(channels, width, 3, padding=1)
    return nn.Sequential(OrderedDict(convolution=own, relu=nn.ReLU(), pool=pool))


def connected(inputs: int, outputs: int, probability: float, site: str) -> nn.Module:
    """A linear layer of all there is of a sample, ReLU and dropout: [B, …] -> [B, outputs]."""
    linear, drop = nn.Linear(inputs, outputs), Dropout(probability, site)
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), linear=linear, relu=nn.ReLU(), drop=drop))


class Mixture(nn.Module):
    """`active` of `count` feed-forward networks per token, weighted by a softmax over the chosen
    (Mixtral).

    Experts are spread over the tensor group, whole ones, in parts of any size.
    """

    def __init__(self, t: Transformer, mixture: Experts) -> None:
        super().__init__()
        self.shape, self.mixture, self.tensor = t, mixture, ALONE
        count, inner = mixture.count, (2 if t.gated else 1) * t.feed_forward
        self.router = nn.Linear(t.hidden, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, inner, t.hidden))
        self.down = nn.Parameter(torch.empty(count, t.hidden, t.feed_forward))
        bias = t.feed_forward_bias
        self.up_bias = nn.Parameter(torch.empty(count, inner)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, t.hidden)) if bias else None

    def cuts(self, part: Part) -> dict[str, Cut]:
        """Whole experts."""
        names = ["up", "down"] + (["up_bias", "down_bias"] if self.up_bias is not None else [])
        return {name: cut(0, self.mixture.count, part) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        """The experts that are here, on the tokens that chose them; x [B, S, H]."""
        if x.is_meta:  # how many tokens an expert gets depends on their values
            return x
        tokens = x.flatten(0, -2)
        best, chosen = self.router(tokens).topk(self.mixture.active, dim=-1)
        weights = torch.zeros(len(tokens), self.mixture.count, dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, best.softmax(dim=-1))
        entered = self.tensor.enter(torch.cat((tokens, weights), dim=-1))
        tokens, weights = entered.split((x.shape[-1], self.mixture.count), dim=-1)
        # zeros that keep `enter` in the graph
        y = entered[:, :0].sum(dim=-1, keepdim=True).expand_as(tokens)
        first, last = self.tensor.of(self.mixture.count)
        for i, e in enumerate(range(first, last)):
            rows = (chosen == e).any(dim=-1).nonzero().squeeze(-1)
            y = y.index_add(0, rows, self.expert(i, tokens[rows]) * weights[rows, e].unsqueeze(-1))
        return self.tensor.leave(y).view_as(x)

    def expert(self, i: int, x: Tensor) -> Tensor:
        """The i-th network here."""
        up_bias = None if self.up_bias is None else self.up_bias[i]
        inner = activated(F.linear(x, self.up[i], up_bias), gated=self.shape.gated)
        return F.linear(inner, self.down[i], None if self.down_bias is None else self.down_bias[i])


def build_vit(shape: Transformer, *, image: int, patch: int, classes: int) -> Pictures:
    """A ViT."""
    layers: dict[str, nn.Module] = {"patches": Patches(shape, image, patch)}
    layers |= {f"block-{i}": Block(shape, f"block-{i}") for i in range(shape.layers)}
    layers["head"] = Classifier(shape.hidden, classes, nn.LayerNorm(shape.hidden))
    return Pictures(layers, classes=classes, image=image)


def build_vgg(
    plan: Sequence[int] = VGG19,
    *,
    image: int = 224,
    classes: int = 1000,
    inner: int = 4096,
) -> Pictures:
    """A VGG; `plan` as in `profiling.zoo`: widths, 0 for pooling."""
    layers: dict[str, nn.Module] = {}
    channels, side = 3, image
    for i, width in enumerate(plan):
        if width:
            pooled = i + 1 < len(plan) and plan[i + 1] == 0
            layers[f"conv-{len(layers)}"] = convolution(channels, width, pooled=pooled)
            channels = width
        else:
            side //= 2
    layers["fc-0"] = connected(channels * side * side, inner, 0.5, "fc-0")
    layers["fc-1"] = connected(inner, inner, 0.5, "fc-1")
    layers["head"] = Classifier(inner, classes)
    return Pictures(layers, classes=classes, image=image)


def built(model: Model) -> Reference:
    """A described model at full width, of any kind."""
    if model.spec.shape is not None and model.spec.shape.experts and model.sequence:
        return build(model.spec.shape, model.sequence)
    if model.layers[0].name == "patches" and model.spec.encoder is not None:
        return build_vit(model.spec.encoder, image=224, patch=16, classes=1000)
    if model.layers[0].name == "conv-0":
        return build_vgg()
    assert model.spec.shape is not None and model.sequence is not None
    return build(model.spec.shape, model.sequence)
