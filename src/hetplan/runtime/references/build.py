"""Chains of reference layers by name, with data and weights that follow from names and positions
alone; transformers' layers are in `transformer`, ViT's and VGG's here.

`Reference` keeps the contract of `execution.chain`: a user's own factory (`module:factory`) returns
anything that does.
"""

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetplan.errors import InputError, UnsupportedError
from hetplan.profiling.models import Model
from hetplan.profiling.transformer import Experts, Transformer
from hetplan.profiling.vision import VGG19
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


class Whole(nn.Module):
    """Several layers as one: (inputs, targets) -> sum of losses. For chains of a single layer."""

    def __init__(self, *inner: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(*inner), last

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """One after the other."""
        loss: Tensor = self.last(self.inner(x), targets)
        return loss


def build(shape: Transformer, sequence: int, *, seed: int = 0) -> Reference:
    """Embedding, blocks and head of a text model, on the current default device."""
    layers = text_layers(shape)
    return Reference(layers, vocabulary=shape.vocabulary, sequence=sequence, seed=seed)


def text_layers(shape: Transformer) -> dict[str, nn.Module]:
    """Embedding, blocks and head by name, with torch's own first values; raises UnsupportedError
    for what these layers do not compute."""
    experts = shape.experts or Experts(1, 1)
    lacking = {
        "latent attention": shape.latent is not None,
        "norms of queries and keys": shape.qk_norm != "none",
        f"{shape.block_norms} norms in a block": shape.block_norms != 2,
        "windows in some blocks only": bool(shape.full_every),
        "shared experts, or experts of another width": bool(experts.shared or experts.width),
    }
    if any(lacking.values()):
        names = ", ".join(name for name, lacks in lacking.items() if lacks)
        raise UnsupportedError(
            f"hetplan's own layers have no {names}: run the module itself by --factory"
        )
    embedding = Embedding(shape, "embedding")
    blocks = {f"block-{i}": Block(shape, i, f"block-{i}") for i in range(shape.layers)}
    head = Head(shape, embedding.table if shape.tied else None)
    return {"embedding": embedding, **blocks, "head": head}


def build_vit(
    shape: Transformer, *, image: int, patch: int, classes: int, seed: int = 0
) -> Reference:
    """A ViT."""
    layers: dict[str, nn.Module] = {"patches": Patches(shape, image, patch)}
    layers |= {f"block-{i}": Block(shape, i, f"block-{i}") for i in range(shape.layers)}
    layers["head"] = Classifier(shape.hidden, classes, nn.LayerNorm(shape.hidden))
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
            layers[f"conv-{len(layers)}"] = convolution(channels, width, pooled=pooled)
            channels = width
        else:
            side //= 2
    layers["fc-0"] = connected(channels * side * side, inner, 0.5, "fc-0")
    layers["fc-1"] = connected(inner, inner, 0.5, "fc-1")
    layers["head"] = Classifier(inner, classes)
    return Reference(layers, vocabulary=classes, sequence=None, image=image, seed=seed)


def reference(model: Model, *, seed: int = 0) -> Reference:
    """A described model at full width; raises UnsupportedError for what has no layers here."""
    if model.spec.shape is not None and model.sequence is not None:
        return build(model.spec.shape, model.sequence, seed=seed)
    first = model.layers[0].name
    if first == "patches" and model.spec.encoder is not None:
        return build_vit(model.spec.encoder, image=224, patch=16, classes=1000, seed=seed)
    if first == "conv-0":
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
    heads, blocks = max(2, tensor), len(names) - 2 if len(names) > 1 else 1
    shape = replace(
        gpt2(blocks, 4 * heads, heads, vocabulary=max(32, tensor), positions=8),
        feed_forward=8 * heads, dropout=False, tied=len(names) > 1, experts=experts,
    )  # fmt: skip
    layers = list(text_layers(shape).values())
    if len(names) == 1:
        layers = [Whole(*layers[:-1], last=layers[-1])]
    named = dict(zip(names, layers, strict=True))
    return Reference(named, vocabulary=shape.vocabulary, sequence=8, seed=seed)
