"""Chains of reference layers by name, with data and weights that follow from names and positions
alone; transformers' layers are in `transformer`, ViT's and VGG's here.

`Reference` keeps the contract of `execution.chain`: a user's own factory (`module:factory`) returns
anything that does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetplan.errors import InputError, UnsupportedError
from hetplan.profiling.models import Model
from hetplan.profiling.transformer import Experts, Transformer
from hetplan.profiling.vision import VGG19, encoder
from hetplan.profiling.zoo import gpt2
from hetplan.runtime.execution.position import Dropout, key_of, mixed, signed, uniform
from hetplan.runtime.references.transformer import IGNORED, Block, Embedding, Head


class Reference(nn.Module):
    """A chain of named layers with synthetic data. vocabulary: tokens or classes; sequence: None
    for images."""

    def __init__(
        self,
        layers: dict[str, nn.Module],
        *,
        vocabulary: int,
        sequence: int | None,
        image: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.vocabulary, self.sequence, self.image, self.seed = vocabulary, sequence, image, seed
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(self.initial(name, parameter))

    def initial(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter's first values, from its name: norms' scales 1, biases 0, others normal with
        deviation 0.02."""
        last = name.rpartition(".")[2]
        if "norm" in name or "after" in name:
            fill = 1.0 if last == "weight" else 0.0
            return torch.full(parameter.shape, fill, dtype=parameter.dtype)
        if last == "bias" or last.endswith("_bias"):
            return torch.zeros(parameter.shape, dtype=parameter.dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        deviation = 0.02 if self.sequence else min(0.1, (2.0 / max(1, parameter[0].numel())) ** 0.5)
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(
            0.0, deviation, generator=generator
        )
        return drawn.to(parameter.dtype)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the global rows [first, last) of a step: tokens that can be learnt,
        or images.

        A text is an arithmetic sequence modulo the vocabulary; its last tokens do not count where
        its row says so.
        """
        rows = torch.arange(first, last)
        drawn = (mixed(rows * 2 + signed(key_of(self.seed, step, "batch"))) >> 1) & ((1 << 62) - 1)
        if self.sequence is None:
            size = (last - first, 3, self.image, self.image)
            images = uniform(
                key_of(self.seed, step, "image"), size, (first, 0, 0, 0), (0, *size[1:]), "cpu"
            )
            return (2 * images - 1).to(torch.get_default_dtype()), drawn % self.vocabulary
        places = torch.arange(self.sequence + 1)
        texts = (drawn[:, None] + places * (1 + drawn[:, None] // 7 % 3)) % self.vocabulary
        targets = texts[:, 1:].clone()
        if self.sequence > 2:
            cut = drawn // 11 % 3  # texts of different lengths: tokens are weighed, not samples
            targets[places[None, :-1] >= self.sequence - cut[:, None]] = IGNORED
        return texts[:, :-1].contiguous(), targets


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


def build(shape: Transformer, sequence: int, *, seed: int = 0) -> Reference:
    """Embedding, blocks and head of a text model, on the current default device."""
    embedding = Embedding(shape, "embedding")
    layers: dict[str, nn.Module] = {"embedding": embedding}
    layers |= {f"block-{i}": Block(shape, i, f"block-{i}") for i in range(shape.layers)}
    layers["head"] = Head(shape, embedding.table if shape.tied else None)
    return Reference(layers, vocabulary=shape.vocabulary, sequence=sequence, seed=seed)


def build_vit(
    shape: Transformer, *, image: int, patch: int, classes: int, seed: int = 0
) -> Reference:
    """A ViT."""
    layers: dict[str, nn.Module] = {"patches": Patches(shape, image, patch)}
    layers |= {f"block-{i}": Block(shape, i, f"block-{i}") for i in range(shape.layers)}
    layers["head"] = Classifier(shape, classes)
    return Reference(layers, vocabulary=classes, sequence=None, image=image, seed=seed)


def build_vgg(
    plan: Sequence[int] = VGG19,
    *,
    image: int = 224,
    classes: int = 1000,
    inner: int = 4096,
    seed: int = 0,
) -> Reference:
    """A VGG; `plan` as in `profiling.vision`: widths, 0 for pooling."""
    layers: dict[str, nn.Module] = {}
    channels, side = 3, image
    for i, width in enumerate(plan):
        if width:
            pooled = i + 1 < len(plan) and plan[i + 1] == 0
            layers[f"conv-{len(layers)}"] = Convolution(channels, width, pooled=pooled)
            channels = width
        else:
            side //= 2
    layers["fc-0"] = Connected(channels * side * side, inner, 0.5, "fc-0")
    layers["fc-1"] = Connected(inner, inner, 0.5, "fc-1")
    layers["head"] = LinearClassifier(inner, classes)
    return Reference(layers, vocabulary=classes, sequence=None, image=image, seed=seed)


def reference(model: Model, *, seed: int = 0) -> Reference:
    """A described model at full width; raises UnsupportedError for what has no layers here."""
    if model.spec.shape is not None and model.sequence is not None:
        return build(model.spec.shape, model.sequence, seed=seed)
    names = [layer.name for layer in model.layers]
    if names[0] == "patches":
        wide = {
            "vit-base": encoder(768, 12, 12, 3072),
            "vit-large": encoder(1024, 24, 16, 4096),
        }.get(model.name)
        if wide is not None:
            return build_vit(wide, image=224, patch=16, classes=1000, seed=seed)
    if names[0] == "conv-0":
        return build_vgg(seed=seed)
    raise UnsupportedError(
        f"{model.name} has no torch layers here; name your own by --factory module:function"
    )


def stand_in(
    names: Sequence[str], *, tensor: int = 1, seed: int = 0, experts: Experts | None = None
) -> Reference:
    """A narrow chain of real layers under any names: the first embeds, the last has the loss,
    blocks between.

    tensor: the widest tensor group that it must split over. Raises InputError for names that stand
    twice.
    """
    if len(set(names)) < len(names):
        raise InputError("layer names stand twice", expected="different names")
    heads = max(2, tensor)
    shape = replace(
        gpt2(max(1, len(names) - 2), 4 * heads, heads, vocabulary=max(32, tensor), positions=8),
        feed_forward=8 * heads, dropout=False, tied=len(names) > 1, experts=experts,
    )  # fmt: skip
    embedding = Embedding(shape, names[0])
    head = Head(shape, embedding.table if shape.tied else None)
    if len(names) == 1:
        layers: dict[str, nn.Module] = {names[0]: Whole(embedding, Block(shape, 0, names[0]), head)}
    else:
        inner = {name: Block(shape, i, name) for i, name in enumerate(names[1:-1])}
        layers = {names[0]: embedding, **inner, names[-1]: head}
    return Reference(layers, vocabulary=shape.vocabulary, sequence=8, seed=seed)
