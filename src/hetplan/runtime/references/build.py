"""Chains of reference layers of texts by name, with data and weights that follow from names and
positions alone; the layers are in `transformer`.

`Reference` keeps the contract of `execution.chain`: a user's own factory (`module:factory`) returns
anything that does.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.profiling.transformer import Transformer
from hetplan.profiling.zoo import gpt2
from hetplan.runtime.execution.position import key_of, mixed, signed
from hetplan.runtime.references.transformer import IGNORED, Block, Embedding, Head
from hetplan.runtime.refusals import check_shape
from hetplan.runtime.tracing.layers import Called


class Reference(nn.Module):
    """A chain of named layers with synthetic texts."""

    def __init__(
        self,
        layers: dict[str, nn.Module],
        *,
        vocabulary: int,
        sequence: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed
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
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(
            0.0, 0.02, generator=generator
        )
        return drawn.to(parameter.dtype)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the global rows [first, last) of a step: tokens that can be learnt.

        A text is an arithmetic sequence modulo the vocabulary; its last tokens do not count where
        its row says so.
        """
        rows = torch.arange(first, last)
        drawn = (mixed(rows * 2 + signed(key_of(self.seed, step, "batch"))) >> 1) & ((1 << 62) - 1)
        places = torch.arange(self.sequence + 1)
        texts = (drawn[:, None] + places * (1 + drawn[:, None] // 7 % 3)) % self.vocabulary
        targets = texts[:, 1:].clone()
        if self.sequence > 2:
            cut = drawn // 11 % 3  # texts of different lengths: tokens are weighed, not samples
            targets[places[None, :-1] >= self.sequence - cut[:, None]] = IGNORED
        return texts[:, :-1].contiguous(), targets


def build(shape: Transformer, sequence: int, *, seed: int = 0) -> Reference:
    """Embedding, blocks and head of a text model, on the current default device."""
    return Reference(text_layers(shape), vocabulary=shape.vocabulary, sequence=sequence, seed=seed)


def text_layers(shape: Transformer) -> dict[str, nn.Module]:
    """Embedding, blocks and head by name, with torch's own first values; raises UnsupportedError
    for what these layers do not compute."""
    check_shape(shape)
    embedding = Embedding(shape, "embedding")
    blocks = {f"block-{i}": Block(shape, f"block-{i}") for i in range(shape.layers)}
    head = Head(shape, embedding.table if shape.tied else None)
    return {"embedding": embedding, **blocks, "head": head}


def stand_in(names: Sequence[str], *, tensor: int = 1, seed: int = 0) -> Reference:
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
        feed_forward=8 * heads, dropout=False, tied=len(names) > 1,
    )  # fmt: skip
    layers = list(text_layers(shape).values())
    if len(names) == 1:
        layers = [Called(build(shape, 8))]
    named = dict(zip(names, layers, strict=True))
    return Reference(named, vocabulary=shape.vocabulary, sequence=8, seed=seed)
